"""Timing changes nothing: every op takes longer by chance, and no bit moves."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pytest

from nestpipe.config import build
from nestpipe.errors import LossError, RunError
from nestpipe.runtime import inject_delays
from nestpipe.schedule import Kind, Plan, Retrieval, Step
from nestpipe.train.config import PipelineSettings
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import (
    Findings,
    Trained,
    compare,
    races_named,
    serial_twin,
    train_to_compare,
    verify,
)
from support.examples import every
from support.thread_ranks import run_ranks

RANKS, SEEDS, MAX_MS, STEPS = 2, 54, 1.5, 5


def pipeline(plan: str, seed: int) -> PipelineSettings:
    """Seeds also vary what the plan does."""
    retrieval = ("whole", "new")[seed // 3 % 2] if plan != "stale_prefetch" else "whole"
    given = {
        "plan": plan,
        "micro_batches": 1 + seed % 3,
        "retrieval": retrieval,
        "exchange": ("micro", "window")[seed // 6 % 2],
        "speculative_rows": bool(seed // 12 % 2),
        "buffers": 3 if retrieval == "new" and seed >= SEEDS // 2 else 2,
    }
    return build(PipelineSettings, given)


@dataclass(frozen=True)
class Without(Plan):
    """A plan in which ops of one kind no longer wait for those of another."""

    kind: Kind
    awaited: Kind

    def steps_of(self, *tick: Any) -> Iterator[Step]:
        for step in super().steps_of(*tick):
            cut = step.op.kind is self.kind
            yield Step(step.op, tuple(a for a in step.after if not cut or a.kind != self.awaited))


def without(kind: Kind, awaited: Kind) -> Callable[[Plan], Plan]:
    return lambda plan: Without(plan.shape, plan.tick, kind, awaited)


def train(
    world,
    settings: PipelineSettings,
    delays: int | None = None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> list[Trained]:
    """What every rank comes to; ranks are delayed differently."""

    def one(comm) -> Trained:
        around = partial(inject_delays, seed=RANKS * (delays or 0) + comm.rank, max_ms=MAX_MS)
        hook = {} if delays is None else {"around": around}
        trainer = world.trainer(settings, comm, **hook)
        trainer.plan = change(trainer.plan)
        return train_to_compare(trainer, world.source, settings.plan, STEPS, 1, lambda report: None)

    return run_ranks(RANKS, one)


@pytest.fixture(scope="module")
def twins(make_world):
    """The serial run without delays, by micro-batches and exchange; made once."""
    world = make_world(optimizer="adam")
    serials = {serial_twin(pipeline("nested", seed)) for seed in range(SEEDS)}
    assert len(serials) == 6
    return world, {settings: train(world, settings) for settings in serials}


def findings(
    twins, plan: str, seed: int, change: Callable[[Plan], Plan] = lambda plan: plan
) -> list[Findings]:
    world, made = twins
    settings = pipeline(plan, seed)
    delayed = train(world, settings, seed, change)
    found = [
        compare(one, two) for one, two in zip(made[serial_twin(settings)], delayed, strict=True)
    ]
    for trained in delayed:
        trained.trainer.close()
    return found


@pytest.mark.parametrize("seed", every(3, range(SEEDS)))
def test_no_delay_changes_a_bit(twins, seed):
    for found in findings(twins, "nested", seed):
        assert found.rows_compared > 20
        assert asdict(found) == asdict(
            Findings(rows_compared=found.rows_compared, tensors_compared=found.tensors_compared)
        )


def test_a_broken_loss_under_delays_is_called_a_race():
    with (
        pytest.raises(RunError, match="with delays 3 the loss of step 4 is nan, with serial"),
        races_named("nested", 3),
    ):
        raise LossError(4, float("nan"))
    with pytest.raises(LossError, match="lower the learning rates"), races_named("nested", None):
        raise LossError(4, float("nan"))


def test_the_same_comparison_catches_a_stale_plan(twins):
    assert all(found.rows_different for found in findings(twins, "stale_prefetch", 1))


def test_rows_taken_over_before_their_update_are_found(twins):
    """With three buffers: one wait less, and some seed shows it."""
    different = 0
    for seed in range(SEEDS // 2, SEEDS):
        if pipeline("nested", seed).buffers == 3:
            hasty = without(Kind.RETRIEVE, Kind.UPDATE)
            with suppress(RunError, KeyError):
                different += sum(f.rows_different for f in findings(twins, "nested", seed, hasty))
        if different:
            return
    pytest.fail("nobody noticed")


POOLED_SEEDS = 18


@pytest.fixture(scope="module")
def pooled_twins(make_world):
    """The same for a job whose rows leave a pool and come back."""
    world = make_world(optimizer="adam", keys="coming back")
    serials = {serial_twin(pooled(seed)) for seed in range(POOLED_SEEDS)}
    return world, {settings: train(world, settings) for settings in serials}


def pooled(seed: int) -> PipelineSettings:
    plans = ("nested", "dual_buffer", "sparse_dist")
    settings = {"retrieval": Retrieval.POOLED, "speculative_rows": False, "buffers": 2}
    return replace(pipeline(plans[seed // 6], seed), **settings)


@pytest.mark.parametrize("seed", range(POOLED_SEEDS))
def test_no_delay_changes_a_bit_of_a_pool(pooled_twins, hasty_pool, seed):
    for found in pool_findings(pooled_twins, seed):
        assert found.rows_compared > 20
        assert asdict(found) == asdict(
            Findings(rows_compared=found.rows_compared, tensors_compared=found.tensors_compared)
        )
    assert sum(hasty_pool) > 0


def pool_findings(
    twins, seed: int, change: Callable[[Plan], Plan] = lambda plan: plan
) -> list[Findings]:
    world, made = twins
    delayed = train(world, pooled(seed), seed, change)
    found = [
        compare(one, two) for one, two in zip(made[serial_twin(pooled(seed))], delayed, strict=True)
    ]
    for trained in delayed:
        trained.trainer.close()
    return found


def test_rows_of_a_pool_sent_before_their_update_are_found(pooled_twins):
    """Rows that two batches share are one memory: one wait less, and some seed shows it."""
    hasty = without(Kind.ROWS, Kind.UPDATE)
    different = 0
    for seed in range(6):
        with suppress(RunError):
            different += sum(f.rows_different for f in pool_findings(pooled_twins, seed, hasty))
    assert different > 0


def test_rows_sent_before_their_refresh_are_found(twins):
    """Delays and comparison have teeth: one wait less, and some seed shows it."""
    different = 0
    for seed in range(6):
        # Memory that nothing has filled yet may hold any number, or not be there at all.
        with suppress(RunError, KeyError):
            hasty = without(Kind.ROWS, Kind.SYNC)
            different += sum(f.rows_different for f in findings(twins, "nested", seed, hasty))
    assert different > 0


def verdict_of(world, seed: int | None, change: Callable[[Plan], Plan]) -> bool:
    """Whether `verify` finds nested identical to serial; a run that breaks is not."""

    def one(comm) -> bool:
        def start(settings: PipelineSettings) -> tuple[Trainer, Any]:
            trainer = world.trainer(settings, comm)
            if settings.plan == "nested":
                trainer.plan = change(trainer.plan)
            return trainer, world.source

        return verify(start, pipeline("nested", 1), steps=STEPS, delays=seed).identical

    try:
        return run_ranks(1, one)[0]
    except RunError as error:
        if "nan" not in str(error):
            raise
        return False


def test_verify_loses_a_race_on_purpose(make_world):
    """`retrieve` that does not wait for `sync` reads over rows which are still to be copied."""
    hasty = without(Kind.RETRIEVE, Kind.SYNC)
    assert not all(verdict_of(make_world(), seed, hasty) for seed in range(20))


@pytest.mark.parametrize("seed", range(3))
def test_verify_with_delays_lets_a_whole_plan_pass(make_world, seed):
    assert verdict_of(make_world(), seed, lambda plan: plan)
