"""On a GPU too: whatever the plan, the data and the optimizers, the bits of `serial`."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, product

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.embedding.optimizers import OPTIMIZERS
from support import verify_world as world

DEVICE = "cuda"
SEEDS = 10


Case = dict[str, object]
AXES: Mapping[str, Sequence[object]] = {
    "plan": ("dual_buffer", "frozen_window", "nested"),
    "micro_batches": (1, 2, 3, 4, 5, 6, 7, 8),
    "keys": tuple(world.KEYS),
    "retrieval": ("whole", "new"),
    "exchange": ("micro", "window"),
    "optimizer": OPTIMIZERS,
    "dense": ("sgd", "adam"),
    "pin_rows": (True, False),
}


def case_number(n: int) -> Case:
    """Axes whose sizes have no common factor go round together; the others are shifted by a turn
    of the longest one."""
    turn = n // len(AXES["micro_batches"])
    places = {
        "retrieval": turn + n // 16,
        "exchange": n // 3 + turn,
        "dense": n // 2 + turn,
        "pin_rows": n // 4 + turn // 2,
    }
    return {axis: values[places.get(axis, n) % len(values)] for axis, values in AXES.items()}


ON_ONE_RANK = [case_number(n) for n in range(56)]
ON_RANKS = ON_ONE_RANK[:15]
ROUNDED = [{**case_number(n), "comm_dtype": "bfloat16"} for n in (2, 3, 10, 14)]
"""Every plan, with both exchanges and both retrievals."""
EARLY = [
    {**case_number(n), "plan": "nested", "speculative_rows": True} for n in (0, 1, 3, 7, 9, 13)
]
"""Rows of the first micro-batch are sent before their refresh; some of them once more."""
EARLY_ON_RANKS = [EARLY[2], {**EARLY[4], "comm_dtype": "bfloat16"}]
THIRD = [
    {
        **case_number(n),
        "plan": plan,
        "retrieval": "new",
        "speculative_rows": n % 2 == 1,
        "buffers": 3,
    }
    for n, plan in ((0, "nested"), (1, "nested"), (3, "nested"), (7, "dual_buffer"), (14, "nested"))
]
"""Rows are written back while the next are read."""
STALE: Case = {
    "plan": "stale_prefetch",
    "micro_batches": 2,
    "keys": "some shared",
    "retrieval": "whole",
    "exchange": "micro",
    "optimizer": "rowwise_adagrad",
    "dense": "sgd",
    "pin_rows": True,
}


def name_of(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def pairs_of(case: Case) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def test_any_two_values_meet_in_some_case():
    met = set().union(*(pairs_of(case) for case in ON_ONE_RANK))
    for one, two in combinations(AXES, 2):
        for a, b in product(AXES[one], AXES[two]):
            assert frozenset([(one, a), (two, b)]) in met


def test_on_ranks_every_plan_meets_every_kind_of_data_and_every_value_occurs():
    met = {(case["plan"], case["keys"]) for case in ON_RANKS}
    assert met == set(product(AXES["plan"], AXES["keys"]))
    for axis, values in AXES.items():
        assert {case[axis] for case in ON_RANKS} == set(values)


def test_early_rows_meet_every_kind_of_data_every_exchange_and_every_retrieval():
    for axis in ("keys", "exchange", "retrieval", "pin_rows"):
        assert {case[axis] for case in EARLY} == set(AXES[axis])
    assert 1 in {case["micro_batches"] for case in EARLY}


def test_a_third_buffer_meets_every_kind_of_data_and_rows_moved_by_host_and_device():
    for axis in ("keys", "exchange", "pin_rows"):
        assert {case[axis] for case in THIRD} == set(AXES[axis])


def assert_identical(figures: Mapping[str, object], case: Case, ranks: int) -> None:
    assert figures["first_difference"] is None
    assert figures["identical"] is True
    assert (figures["ranks"], figures["steps"]) == (ranks, world.STEPS)
    assert figures["rows_compared"] == world.Samples(str(case["keys"])).num_rows()
    assert int(str(figures["tensors_compared"])) >= 9 * ranks


@pytest.mark.parametrize("case", [*ON_ONE_RANK, *ROUNDED, *EARLY, *THIRD], ids=name_of)
def test_a_plan_changes_no_bit(case):
    assert_identical(world.prove(case, LocalCommunicator(), DEVICE).figures(), case, 1)


def test_a_stale_plan_is_caught():
    verdict = world.prove(STALE, LocalCommunicator(), DEVICE)
    assert verdict.rows_different > 0
    assert verdict.first_different_step == 2, "batch 1 is the first that can see a stale row"
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("on rank 0, table 'history', key ")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_delay_of_host_or_device_changes_a_bit(seed):
    case = {**case_number(seed), "plan": "nested", "speculative_rows": seed % 2 == 1}
    case |= {"retrieval": "new", "buffers": 3} if seed % 3 == 0 else {}
    around = partial(world.delayed, seed=seed)
    assert_identical(world.prove(case, LocalCommunicator(), DEVICE, around).figures(), case, 1)


MPS = pytest.mark.needs("nvidia-cuda-mps-control")


@MPS
@pytest.mark.parametrize("ranks", [2, 4])
def test_nccl_ranks_on_one_gpu_change_no_bit_and_catch_a_stale_plan(tmp_path, ranks):
    """One start of the ranks for all cases: that is what takes time."""
    exact = [*ON_RANKS, *ROUNDED, *EARLY_ON_RANKS, *THIRD[1:3]]
    *figures, stale = world.verdicts_of([*exact, STALE], ranks, tmp_path, DEVICE)
    for case, found in zip(exact, figures, strict=True):
        assert_identical(found, case, ranks)
    assert stale["identical"] is False
    assert stale["rows_different"] > 0
    assert stale["first_different_step"] == 2


ONE_STREAM = [
    {**EARLY[n], "retrieval": "new", "buffers": 3, "one_stream": True, "delays": n}
    for n in range(len(EARLY))
]
"""Whoever starts collectives in another order than its peers hangs with them."""


@MPS
def test_ranks_whose_threads_are_late_by_chance_start_collectives_in_one_order(tmp_path):
    for case, found in zip(
        ONE_STREAM, world.verdicts_of(ONE_STREAM, 2, tmp_path, DEVICE), strict=True
    ):
        assert_identical(found, case, 2)


IN_GROUPS = [
    {**case, "parallel": {"groups": 2, "merge": merge, "merge_every": every}}
    for case, (merge, every) in zip(
        ON_ONE_RANK[:6], 2 * [("exact", 1), ("averaged", 1), ("averaged", 3)], strict=True
    )
]


@MPS
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_of_nccl_ranks_change_no_bit_either(tmp_path, ranks):
    for found in world.verdicts_of(IN_GROUPS, ranks, tmp_path, DEVICE):
        assert found["first_difference"] is None
        assert found["identical"] is True
        assert found["rows_compared"] > 100
