"""Whatever the plan, the data and the optimizers: the bits of `serial`.

The cases are no full product, but every value of an axis meets every value of every other. Some of
them run, with every value in one; in the long profile all do.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product

import pytest

from nestpipe.config import build
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.embedding.pool import RowPool
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.embedding.store.ssd import SsdStore
from nestpipe.embedding.transports import RowBuffers
from nestpipe.errors import RunError
from nestpipe.train.config import PipelineSettings
from nestpipe.train.verify import Verdict, verify
from support.examples import every
from support.thread_ranks import run_ranks

STEPS = 5
Case = dict[str, object]

PIPELINE: Mapping[str, Sequence[object]] = {
    "plan": ("sparse_dist", "dual_buffer", "frozen_window", "nested"),
    "retrieval": ("whole", "new", "pooled"),
    "micro_batches": (1, 2, 3, 4, 5, 6, 7, 8),
    "exchange": ("micro", "window"),
    "comm_dtype": ("float32", "bfloat16"),
    "micro_batching": ("contiguous", "clustered"),
    "first": (1.0, 0.5),
    "last": (1.0, 0.5),
}
"""Keys of `[pipeline]`, and the values that must not change a bit."""
WORLD: Mapping[str, Sequence[object]] = {
    "keys": (
        *("some shared", "none shared", "all shared", "growing"),
        *("empty on some ranks", "coming back"),
    ),
    "optimizer": OPTIMIZERS,
    "dense": ("sgd", "adagrad", "adam", "adamw"),
    "dtype": ("float32", "bfloat16", "float16"),
    "in_place": (True, False),
    "recipe": (
        *("plain", "scheduled", "decaying", "by name", "frozen", "clipped", "clipped dense"),
    ),
}
"""The job itself."""
AXES: Mapping[str, Sequence[object]] = {"ranks": (1, 2, 4), **PIPELINE, **WORLD}


def pairs_of(case: Mapping[str, object]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def covering_cases(axes: Mapping[str, Sequence[object]]) -> list[Case]:
    """Few cases in which any two values of different axes meet; greedy, the same every time."""
    missing = {
        frozenset([(one, a), (two, b)]): None
        for one, two in combinations(axes, 2)
        for a, b in product(axes[one], axes[two])
    }
    cases: list[Case] = []
    while missing:
        case: Case = dict(next(iter(missing)))
        for axis in axes:
            if axis not in case:
                gains = [
                    sum(frozenset([(axis, value), other]) in missing for other in case.items())
                    for value in axes[axis]
                ]
                # Of equal gains take another one each time.
                best = [
                    value
                    for value, gain in zip(axes[axis], gains, strict=True)
                    if gain == max(gains)
                ]
                case[axis] = best[len(cases) % len(best)]
        for pair in pairs_of(case):
            missing.pop(pair, None)
        cases.append({axis: case[axis] for axis in axes})
    return cases


def chosen_of(cases: Sequence[Case]) -> list[Case]:
    """A third of them, and the first with a value that none of those has."""
    chosen = every(3, cases)
    for case in cases:
        if any(all(value != other[axis] for other in chosen) for axis, value in case.items()):
            chosen.append(case)
    return chosen


CASES = covering_cases(AXES)
CHOSEN = chosen_of(CASES)


def prove(make_world, case: Case) -> Verdict:
    """The verdict on one case, which must be the same on every rank."""
    pipeline = build(
        PipelineSettings,
        {name: case[name] for name in (*PIPELINE, "speculative_rows", "buffers") if name in case},
    )
    world = make_world(**{name: case[name] for name in WORLD if name in case})

    def one(comm) -> Verdict:
        return verify(lambda settings: (world.trainer(settings, comm), world.source), pipeline)

    first, *others = run_ranks(int(str(case["ranks"])), one)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: "-".join(map(str, case.values())))
def test_a_plan_changes_no_bit(make_world, case):
    verdict = prove(make_world, case)
    assert verdict.first_difference is None
    assert verdict.identical
    assert verdict.steps == STEPS
    frozen = {"frozen": ("users", "tags"), "clipped": ("users",)}.get(str(case["recipe"]), ())
    rows = make_world(keys=case["keys"]).source.num_rows(frozen=frozen)
    assert verdict.rows_compared == rows, "frozen tables have no rows"
    assert verdict.tensors_compared >= 10 * case["ranks"]


EARLY_AXES: Mapping[str, Sequence[object]] = {
    **{name: AXES[name] for name in ("ranks", "exchange", "keys", "dtype")},
    "retrieval": ("whole", "new"),
    "micro_batches": (1, 2, 3, 8),
    "plan": ("nested",),
    "speculative_rows": (True,),
}


@pytest.mark.parametrize(
    "case", every(2, covering_cases(EARLY_AXES)), ids=lambda case: "-".join(map(str, case.values()))
)
def test_rows_that_are_sent_early_change_no_bit(make_world, case):
    verdict = prove(make_world, case)
    assert verdict.first_difference is None
    assert verdict.identical


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("retrieval", ["whole", "new"])
def test_rows_that_are_sent_early_and_not_again_are_caught(
    make_world, ranks, retrieval, monkeypatch
):
    monkeypatch.setattr(ShardedTables, "patch", lambda tables, batch: None)
    case = {"ranks": ranks, "plan": "nested", "speculative_rows": True, "retrieval": retrieval}
    case["micro_batches"] = 2
    assert prove(make_world, {**case, "keys": "none shared"}).identical
    with suppress(RunError):  # a loss of what was in memory by chance, and nobody should have read
        assert not prove(make_world, {**case, "keys": "some shared"}).identical


THIRD_AXES: Mapping[str, Sequence[object]] = {
    **{name: AXES[name] for name in ("ranks", "exchange", "keys", "dtype", "in_place")},
    "optimizer": ("rowwise_adagrad", "adam"),
    "micro_batches": (1, 2, 3, 8),
    "plan": ("nested", "dual_buffer"),
    "retrieval": ("new",),
    "speculative_rows": (False, True),
    "buffers": (3,),
}


@pytest.mark.parametrize(
    "case", every(2, covering_cases(THIRD_AXES)), ids=lambda case: "-".join(map(str, case.values()))
)
def test_a_third_buffer_changes_no_bit(make_world, case):
    verdict = prove(make_world, case)
    assert verdict.first_difference is None
    assert verdict.identical


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("in_place", [True, False])
def test_rows_that_are_not_taken_over_are_caught(make_world, ranks, in_place, monkeypatch):
    monkeypatch.setattr(RowBuffers, "_carry_over", lambda buffers, batch, working: None)
    case = {"ranks": ranks, "plan": "nested", "buffers": 3, "retrieval": "new"}
    case |= {"micro_batches": 2, "in_place": in_place}
    assert prove(make_world, {**case, "keys": "none shared"}).identical
    with suppress(RunError):  # a loss of what was in memory by chance, and nobody should have read
        assert not prove(make_world, {**case, "keys": "some shared"}).identical


POOL_AXES: Mapping[str, Sequence[object]] = {
    **{name: AXES[name] for name in ("ranks", "exchange", "keys", "optimizer", "dtype")},
    "recipe": ("plain", "scheduled", "by name", "clipped dense"),
    "micro_batches": (1, 2, 3),
    "plan": ("serial", *PIPELINE["plan"]),
    "retrieval": ("pooled",),
}


@pytest.mark.parametrize(
    "case", every(3, covering_cases(POOL_AXES)), ids=lambda case: "-".join(map(str, case.values()))
)
def test_rows_that_leave_a_pool_and_come_back_change_no_bit(make_world, case, hasty_pool):
    verdict = prove(make_world, case)
    assert verdict.first_difference is None
    assert verdict.identical
    assert verdict.rows_compared == make_world(keys=case["keys"]).source.num_rows()
    assert sum(hasty_pool) > 0 or case["keys"] == "all shared"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plan", ["nested", "dual_buffer"])
def test_room_that_is_made_one_batch_ahead_changes_no_bit(make_world, ranks, plan, hasty_pool):
    case = {"ranks": ranks, "plan": plan, "micro_batches": ranks, "retrieval": "pooled"}
    verdict = prove(make_world, {**case, "keys": "coming back", "buffers": 3})
    assert verdict.first_difference is None
    assert verdict.identical
    assert sum(hasty_pool) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_leave_a_pool_unsaved_are_caught(make_world, ranks, hasty_pool, monkeypatch):
    monkeypatch.setattr(RowPool, "writeback", lambda pool, batch: 0)
    case = {"ranks": ranks, "plan": "nested", "micro_batches": 2, "retrieval": "pooled"}
    assert not prove(make_world, {**case, "keys": "coming back"}).identical


SSD_AXES: Mapping[str, Sequence[object]] = {
    "ranks": (1, 2),
    "plan": ("serial", *PIPELINE["plan"]),
    "retrieval": PIPELINE["retrieval"],
    "micro_batches": (1, 3),
    "keys": ("some shared", "coming back", "empty on some ranks"),
    "dtype": AXES["dtype"],
    "host_memory": ("0.001KB", "1.5KB"),
}
"""Memory for no row, and for a few of each table."""


@pytest.mark.parametrize(
    "case", covering_cases(SSD_AXES), ids=lambda case: "-".join(map(str, case.values()))
)
@pytest.mark.usefixtures("hasty_pool")
def test_rows_on_an_ssd_have_the_bits_of_serial_in_memory(make_world, case, tmp_path, monkeypatch):
    written: list[int] = []
    close = SsdStore.close

    def count_and_close(store: SsdStore) -> None:
        if store._address is not None:
            written.append(store.traffic().rows_written)
        close(store)

    monkeypatch.setattr(SsdStore, "close", count_and_close)
    pipeline = build(PipelineSettings, {name: case[name] for name in PIPELINE if name in case})
    of = {name: case[name] for name in WORLD if name in case}
    ssd = {"store": "ssd", "store_path": str(tmp_path), "host_memory": case["host_memory"]}
    on_host, on_ssd = make_world(**of), make_world(**of, store=ssd)

    def one(comm) -> Verdict:
        worlds = [on_host, on_ssd]
        return verify(
            lambda settings: (worlds.pop(0).trainer(settings, comm), on_host.source), pipeline
        )

    for verdict in run_ranks(int(str(case["ranks"])), one):
        assert verdict.first_difference is None
        assert verdict.identical
        assert verdict.rows_compared == on_host.source.num_rows()
    assert len(written) == 2 * int(str(case["ranks"]))
    assert all(written)


def test_any_two_values_meet_in_some_case():
    met = set().union(*(pairs_of(case) for case in CASES))
    for one, two in combinations(AXES, 2):
        for a, b in product(AXES[one], AXES[two]):
            assert frozenset([(one, a), (two, b)]) in met
    assert len(CASES) < 80
    for axis, values in AXES.items():
        assert {case[axis] for case in CHOSEN} == set(values)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("keys", ["some shared", "all shared", "growing"])
def test_a_stale_plan_is_caught_where_neighbours_share_keys(make_world, ranks, keys):
    case = {"ranks": ranks, "plan": "stale_prefetch", "micro_batches": 2, "keys": keys}
    verdict = prove(make_world, case)
    assert not verdict.identical
    assert verdict.rows_different > 0
    assert verdict.tensors_different > 0
    assert verdict.largest_difference is not None
    assert verdict.largest_difference > 1e-4
    # Batch 1 is the first that can see a stale row.
    assert verdict.first_different_step == 2
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("on rank 0, table 'items', key ")
    assert "serial has " in verdict.first_difference
    assert "stale_prefetch has " in verdict.first_difference


def test_a_stale_plan_is_exact_where_no_key_returns(make_world):
    case = {"ranks": 2, "plan": "stale_prefetch", "keys": "none shared"}
    assert prove(make_world, case).identical
