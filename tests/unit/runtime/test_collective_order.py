"""Collectives of the devices start in one order, although two threads start them."""

import pytest

from nestpipe.runtime import Act, StopSignal, ThreadLanes, inject_delays, run
from nestpipe.runtime.collective_order import CollectiveOrder
from nestpipe.schedule import (
    PLANS,
    Kind,
    Lane,
    Op,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    with_early_rows,
    with_separate_dense_group,
    with_separate_key_group,
    with_third_buffer,
)

SEEDS = 12
NEW = PlanOptions(micro_batches=3, retrieval=Retrieval.NEW)
IN_TURN = [plan(name, PlanOptions(micro_batches=3)) for name in PLANS]
EVERY = {
    **{chosen.name: chosen for chosen in IN_TURN},
    "early": with_early_rows(plan("nested", NEW)),
    "early, third": with_early_rows(with_third_buffer(plan("nested", NEW))),
    "early, one micro-batch": with_early_rows(plan("dual_buffer", PlanOptions(micro_batches=1))),
}


def on_gpus(chosen: Plan) -> Plan:
    return with_separate_dense_group(with_separate_key_group(chosen))


def starts_collectives(chosen: Plan, op: Op) -> bool:
    last = op.kind is Kind.DENSE and op.micro == chosen.shape.micro_batches - 1
    return last or chosen.shape.lane(op.kind) is Lane.NET


def started(chosen: Plan, seed: int) -> list[str]:
    """The ops that start collectives, in the order in which their threads do it."""
    names: list[str] = []

    def note(op: Op) -> None:
        if starts_collectives(chosen, op):
            names.append(str(op))

    acts: dict[Kind, Act] = dict.fromkeys(Kind, note)
    slow = inject_delays(acts, seed=seed, max_ms=2)
    run(chosen, slow, ThreadLanes(), batches=StopSignal(5))
    return names


@pytest.mark.parametrize("name", EVERY)
def test_whatever_is_late_the_order_is_that_of_the_plan(name: str):
    chosen = on_gpus(EVERY[name])
    order = [str(op) for op in chosen.schedule(5).ops if starts_collectives(chosen, op)]
    for seed in range(SEEDS):
        assert started(chosen, seed) == order


def test_without_it_ranks_would_start_them_in_different_orders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CollectiveOrder, "behind", lambda self, op: None)
    chosen = on_gpus(EVERY["early"])
    assert len({tuple(started(chosen, seed)) for seed in range(SEEDS)}) > 1


def test_sums_never_wait_for_rows_of_the_next_batch():
    """Else dense compute would wait for a lookup."""
    for chosen in map(on_gpus, EVERY.values()):
        order = CollectiveOrder(chosen.shape)
        for op in chosen.schedule(5).ops:
            behind = order.behind(op)
            if op.kind is Kind.DENSE and behind is not None:
                assert behind.batch <= op.batch
