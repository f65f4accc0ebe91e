"""Collectives of the devices start in one order, although two threads start them."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nestpipe.runtime import Act, StopSignal, ThreadLanes, inject_delays, run
from nestpipe.schedule import (
    PLANS,
    Kind,
    Op,
    Plan,
    PlanOptions,
    Retrieval,
    Step,
    check,
    plan,
    with_early_rows,
    with_separate_dense_group,
    with_separate_key_group,
    with_third_buffer,
)
from nestpipe.schedule.schedule import DEVICE_NETWORKS

SEEDS = 12
NEW = PlanOptions(micro_batches=3, retrieval=Retrieval.NEW)
IN_TURN = [plan(name, PlanOptions(micro_batches=3)) for name in PLANS]
EVERY = {
    **{chosen.name: chosen for chosen in IN_TURN},
    "early": with_early_rows(plan("nested", NEW)),
    "early, third": with_early_rows(with_third_buffer(plan("nested", NEW))),
    "early, one micro-batch": with_early_rows(plan("dual_buffer", PlanOptions(micro_batches=1))),
    "replicas": plan("nested", replace(NEW, merge_every=2)),
}


def on_gpus(chosen: Plan) -> Plan:
    return with_separate_dense_group(with_separate_key_group(chosen))


def starts_collectives(chosen: Plan, op: Op) -> bool:
    return chosen.shape.network(op.kind) in DEVICE_NETWORKS


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
    check(chosen.schedule(5), stale=chosen.name)
    order = [str(op) for op in chosen.schedule(5).ops if starts_collectives(chosen, op)]
    for seed in range(SEEDS):
        assert started(chosen, seed) == order


class Careless(Plan):
    """A plan that does not say which collectives start behind which."""

    def steps_of(self, *tick: object) -> Iterator[Step]:
        yield from (replace(step, behind=()) for step in super().steps_of(*tick))  # type: ignore[arg-type]


def test_without_it_ranks_would_start_them_in_different_orders():
    chosen = on_gpus(EVERY["early"])
    careless = Careless(chosen.shape, chosen.tick)
    assert len({tuple(started(careless, seed)) for seed in range(SEEDS)}) > 1


def test_sums_never_start_behind_rows_of_the_next_batch():
    """Else dense compute would wait for a lookup."""
    for chosen in map(on_gpus, EVERY.values()):
        for step in chosen.schedule(5):
            if step.op.kind in (Kind.TOTALS, Kind.REDUCE):
                assert all(before.batch <= step.op.batch for before in step.behind)


def test_an_op_alongside_another_starts_before_that_one_has_ended():
    chosen = on_gpus(plan("nested", PlanOptions(micro_batches=2)))
    events: list[str] = []

    def dense(op: Op) -> None:
        if op == chosen.shape.last_dense(op.batch):
            assert taken.wait(10), "`totals` did not start while `dense` ran"
            taken.clear()
            events.append(f"{op} ends")

    def totals(op: Op) -> None:
        events.append(f"{op} starts")
        taken.set()

    taken = threading.Event()
    acts: dict[Kind, Act] = {
        **dict.fromkeys(Kind, lambda op: None),
        Kind.DENSE: dense,
        Kind.TOTALS: totals,
    }
    run(chosen, acts, ThreadLanes(), batches=StopSignal(3))
    assert events[:2] == ["totals 0 starts", "dense 0.1 ends"]
    assert len(events) == 6
