"""Any order that the edges allow ends where the serial plan ends."""

import random
from collections.abc import Callable
from functools import cache

import pytest

from nestpipe.schedule import (
    PLANS,
    Exchange,
    Kind,
    Merge,
    Plan,
    PlanOptions,
    Retrieval,
    check,
    from_text,
    plan,
    to_text,
    with_early_rows,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.schedule.effects import CARRIES
from support.examples import num_examples
from support.toy_memory import do_collective, do_local, new_world
from support.toy_schedule import Interpreter, Outcome, ToyData

BATCHES = 8
SEEDS = num_examples("orders")
EXACT = [name for name in PLANS if name != "stale_prefetch"]
EVERY = [
    pytest.param(name, retrieval, id=f"{name}-{retrieval}")
    for name in EXACT
    for retrieval in Retrieval
]
every_exact_plan = pytest.mark.parametrize(("name", "retrieval"), EVERY)
MakeData = Callable[[int], ToyData]


# Plans are compared on the same data: what can be shared is made once.


@cache
def interpreter(name: str, options: PlanOptions) -> Interpreter:
    return Interpreter(plan(name, options).schedule(BATCHES))


@cache
def random_data(micro_batches: int, *, ranks: int = 3, groups: int = 1) -> MakeData:
    """Fresh data for every seed; about a third of all keys are in each batch."""

    @cache
    def data(seed: int) -> ToyData:
        return ToyData.random(
            seed,
            ranks=ranks,
            batches=BATCHES,
            micro_batches=micro_batches,
            groups=groups,
            vocabulary=4 + 8 * micro_batches,
        )

    return data


@cache
def end_in_issue_order(reference: Interpreter, data: MakeData, seed: int) -> Outcome:
    end = reference.run_in_issue_order(data(seed))
    assert end.table is not None, end.trouble
    return end


def seeds_that_end_elsewhere(
    run: Interpreter, reference: Interpreter, data: MakeData, seeds: int
) -> dict[int, str]:
    """Seeds whose random order does not end where the reference ends, and what happened."""
    elsewhere: dict[int, str] = {}
    for seed in range(seeds):
        found = run.run_at_random(data(seed), seed)
        if found != end_in_issue_order(reference, data, seed):
            elsewhere[seed] = found.trouble or "another table"
    return elsewhere


@every_exact_plan
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_keys_in_a_network_of_their_own_change_nothing(
    name: str, retrieval: Retrieval, micro_batches: int
) -> None:
    options = PlanOptions(micro_batches=micro_batches, retrieval=retrieval)
    assert_no_difference(with_separate_key_group(plan(name, options)), micro_batches)


@every_exact_plan
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_dense_sums_in_a_network_of_their_own_change_nothing(
    name: str, retrieval: Retrieval, micro_batches: int
) -> None:
    options = PlanOptions(micro_batches=micro_batches, retrieval=retrieval)
    assert_no_difference(
        with_separate_dense_group(with_separate_key_group(plan(name, options))), micro_batches
    )


@pytest.mark.parametrize("name", ["dual_buffer", "nested"])
@pytest.mark.parametrize("retrieval", [Retrieval.WHOLE, Retrieval.NEW])
@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 4), (3, 1), (4, 4), (7, 2)])
@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_are_sent_early_change_nothing(
    name: str, retrieval: Retrieval, micro_batches: int, stages: int, apart: bool
) -> None:
    exchange = Exchange.WINDOW if micro_batches == 4 else Exchange.MICRO
    options = PlanOptions(
        micro_batches=micro_batches, retrieval=retrieval, stages=stages, exchange=exchange
    )
    early = with_early_rows(plan(name, options))
    apart_too = with_separate_dense_group(with_separate_key_group(early)) if apart else early
    assert_no_difference(apart_too, micro_batches, exchange)


@pytest.mark.parametrize("name", ["dual_buffer", "nested"])
@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 4), (3, 1), (4, 4), (7, 2)])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_a_third_buffer_changes_nothing(
    name: str, micro_batches: int, stages: int, early: bool, apart: bool
) -> None:
    exchange = Exchange.WINDOW if micro_batches == 4 else Exchange.MICRO
    made = plan(
        name,
        PlanOptions(
            micro_batches=micro_batches,
            retrieval=Retrieval.NEW,
            stages=stages,
            exchange=exchange,
            speculative_rows=early,
            buffers=3,
        ),
    )
    apart_too = with_separate_dense_group(with_separate_key_group(made)) if apart else made
    assert_no_difference(apart_too, micro_batches, exchange)


@pytest.mark.parametrize("name", ["dual_buffer", "nested"])
@pytest.mark.parametrize("merge_every", [1, 2, 3])
def test_a_third_buffer_changes_nothing_on_groups_with_replicas(
    name: str, merge_every: int
) -> None:
    options = PlanOptions(
        micro_batches=2, retrieval=Retrieval.NEW, merge_every=merge_every, buffers=3
    )
    serial = interpreter("serial", PlanOptions(micro_batches=2, merge_every=merge_every))
    data = random_data(2, ranks=4, groups=2)
    assert seeds_that_end_elsewhere(interpreter(name, options), serial, data, SEEDS) == {}


def assert_no_difference(
    apart: Plan, micro_batches: int, exchange: Exchange = Exchange.MICRO
) -> None:
    schedule = apart.schedule(BATCHES)
    check(schedule)
    assert from_text(to_text(schedule)) == schedule
    reference = interpreter("serial", PlanOptions(micro_batches=micro_batches, exchange=exchange))
    data = random_data(micro_batches)
    assert not seeds_that_end_elsewhere(
        Interpreter(schedule), reference, data, num_examples("orders apart")
    )


@every_exact_plan
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_any_legal_order_matches_serial(
    name: str, retrieval: Retrieval, micro_batches: int
) -> None:
    run = interpreter(name, PlanOptions(micro_batches=micro_batches, retrieval=retrieval))
    serial = interpreter("serial", PlanOptions(micro_batches=micro_batches))
    assert seeds_that_end_elsewhere(run, serial, random_data(micro_batches), SEEDS) == {}


@every_exact_plan
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_any_legal_order_of_a_shared_window_matches_serial(
    name: str, retrieval: Retrieval, micro_batches: int
) -> None:
    run = interpreter(
        name,
        PlanOptions(micro_batches=micro_batches, retrieval=retrieval, exchange=Exchange.WINDOW),
    )
    serial = interpreter(
        "serial", PlanOptions(micro_batches=micro_batches, exchange=Exchange.WINDOW)
    )
    assert seeds_that_end_elsewhere(run, serial, random_data(micro_batches), SEEDS) == {}


def test_rows_leave_the_toy_pool_and_come_back() -> None:
    """Else nothing of the above would say anything about a pool."""
    came_back = 0
    for seed in range(20):
        schedule = plan(
            "serial", PlanOptions(micro_batches=4, retrieval=Retrieval.POOLED)
        ).schedule(BATCHES)
        data = random_data(4)(seed)
        world = new_world(schedule.shape, data.keys, 1, CARRIES)
        left: set[tuple[int, int]] = set()
        for op in schedule.ops:
            if op.collective:
                do_collective(world, world.ranks, op)
                continue
            for rank in world.ranks:
                do_local(world, rank, op)
                if op.kind is Kind.UNION:
                    slot = op.batch % schedule.shape.slots
                    came_back += sum((rank.number, key) in left for key in rank.absent[slot])
                    left |= {(rank.number, key) for key in rank.victims[slot]}
    assert came_back > 100


@every_exact_plan
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_any_legal_order_of_fewer_stages_matches_serial(
    name: str, retrieval: Retrieval, stages: int
) -> None:
    run = interpreter(name, PlanOptions(micro_batches=2, retrieval=retrieval, stages=stages))
    serial = interpreter("serial", PlanOptions(micro_batches=2))
    assert seeds_that_end_elsewhere(run, serial, random_data(2), SEEDS) == {}


@every_exact_plan
@pytest.mark.parametrize("merge_every", [1, 2, 3])
def test_any_legal_order_matches_serial_on_groups_with_replicas(
    name: str, retrieval: Retrieval, merge_every: int
) -> None:
    options = PlanOptions(micro_batches=2, retrieval=retrieval, merge_every=merge_every)
    serial = interpreter("serial", PlanOptions(micro_batches=2, merge_every=merge_every))
    data = random_data(2, ranks=4, groups=2)
    assert seeds_that_end_elsewhere(interpreter(name, options), serial, data, SEEDS) == {}


@every_exact_plan
@pytest.mark.parametrize("apart", [False, True])
def test_any_legal_order_matches_serial_on_groups_that_sum_gradients(
    name: str, retrieval: Retrieval, apart: bool
) -> None:
    exact = {"micro_batches": 2, "merge_every": 1, "merge": Merge.EXACT}
    made = plan(name, PlanOptions(retrieval=retrieval, **exact))
    schedule = (
        with_separate_dense_group(with_separate_key_group(made)) if apart else made
    ).schedule(BATCHES)
    check(schedule)
    assert from_text(to_text(schedule)) == schedule
    serial = interpreter("serial", PlanOptions(**exact))
    data = random_data(2, ranks=4, groups=2)
    assert seeds_that_end_elsewhere(Interpreter(schedule), serial, data, SEEDS) == {}


@cache
def uneven(seed: int) -> ToyData:
    """Ranks run out of data at different times, and some micro-batches are empty before that."""
    rng = random.Random(seed)

    def micro(batch: int, last: int) -> tuple[int, ...]:
        count = 0 if batch >= last else rng.randrange(4)
        return tuple(rng.randrange(9) for _ in range(count))

    def rank() -> tuple[tuple[tuple[int, ...], ...], ...]:
        last = rng.randrange(BATCHES + 1)
        return tuple(tuple(micro(batch, last) for _ in range(2)) for batch in range(BATCHES))

    return ToyData(tuple(rank() for _ in range(3)))


@cache
def sharing_no_key(seed: int) -> ToyData:
    """No key is in two batches."""
    rng = random.Random(seed)
    return ToyData(
        tuple(
            tuple(
                tuple(tuple(rng.randrange(8 * b, 8 * b + 8) for _ in range(3)) for _ in range(2))
                for b in range(BATCHES)
            )
            for _ in range(3)
        )
    )


@cache
def sharing_all_keys(seed: int) -> ToyData:
    """Every rank asks for every key in every batch."""
    rng = random.Random(seed)

    def batch() -> tuple[tuple[int, ...], ...]:
        keys = rng.sample(range(6), 6)
        cut = rng.randrange(7)
        return tuple(keys[:cut]), tuple(keys[cut:])

    return ToyData(tuple(tuple(batch() for _ in range(BATCHES)) for _ in range(3)))


@every_exact_plan
@pytest.mark.parametrize("data", [uneven, sharing_no_key, sharing_all_keys])
def test_any_legal_order_matches_serial_on_awkward_data(
    name: str, retrieval: Retrieval, data: MakeData
) -> None:
    run = interpreter(name, PlanOptions(micro_batches=2, retrieval=retrieval))
    serial = interpreter("serial", PlanOptions(micro_batches=2))
    assert seeds_that_end_elsewhere(run, serial, data, SEEDS) == {}


@every_exact_plan
def test_ranks_without_any_data_still_end(name: str, retrieval: Retrieval) -> None:
    run = interpreter(name, PlanOptions(micro_batches=2, retrieval=retrieval))
    serial = interpreter("serial", PlanOptions(micro_batches=2))
    nothing = ToyData(((((), ()),) * BATCHES,) * 3)
    assert seeds_that_end_elsewhere(run, serial, lambda seed: nothing, 20) == {}


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_any_legal_order_of_the_stale_plan_ends_where_its_own_issue_order_ends(
    micro_batches: int,
) -> None:
    stale = interpreter("stale_prefetch", PlanOptions(micro_batches=micro_batches))
    assert seeds_that_end_elsewhere(stale, stale, random_data(micro_batches), SEEDS) == {}


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_the_stale_plan_ends_elsewhere_than_serial(micro_batches: int) -> None:
    stale = interpreter("stale_prefetch", PlanOptions(micro_batches=micro_batches))
    serial = interpreter("serial", PlanOptions(micro_batches=micro_batches))
    elsewhere = seeds_that_end_elsewhere(stale, serial, random_data(micro_batches), SEEDS)
    assert set(elsewhere.values()) == {"another table"}
    assert len(elsewhere) >= 0.99 * SEEDS


def test_the_stale_plan_is_exact_where_no_batch_shares_a_key() -> None:
    stale = interpreter("stale_prefetch", PlanOptions(micro_batches=2))
    serial = interpreter("serial", PlanOptions(micro_batches=2))
    assert seeds_that_end_elsewhere(stale, serial, sharing_no_key, 50) == {}


def test_random_orders_are_different_orders() -> None:
    run = interpreter("nested", PlanOptions(micro_batches=2))
    data = random_data(2)(0)

    def order(seed: int) -> tuple[tuple[int, int], ...]:
        taken: list[tuple[int, int]] = []
        rng = random.Random(seed)

        def choose(runnable: list[tuple[int, int]]) -> int:
            pick = rng.randrange(len(runnable))
            taken.append(runnable[pick])
            return pick

        run.run(data, choose)
        return tuple(taken)

    assert len({order(seed) for seed in range(50)}) == 50


def test_the_same_seed_gives_the_same_run() -> None:
    run = interpreter("nested", PlanOptions(micro_batches=2))

    def once() -> list[Outcome]:
        return [run.run_at_random(random_data(2)(seed), seed) for seed in range(4)]

    assert once() == once()
