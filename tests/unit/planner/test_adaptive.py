"""Settings that follow the trace: what is tried, what stays, what is recorded and replayed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from nestpipe.checkpoint.folder import read_manifest
from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.config import build
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.planner import AdaptiveRun, Candidate, Choice, replay_choices
from nestpipe.planner import adaptive as adaptive_module
from nestpipe.planner.adaptive import FILE, SettingSearch, step_times
from nestpipe.runtime import Work
from nestpipe.schedule import Kind, Op
from nestpipe.sim.job_costs import Split
from nestpipe.sim.replay import Sharing, replay_shared
from nestpipe.trace import Trace
from nestpipe.train import JobConfig, train_job
from nestpipe.train.job import AUTO, prepare

WORLD: dict[str, Any] = {
    "data": {
        "synthetic": {"samples": 4_000, "test_samples": 200, "num_tables": 2, "num_keys": 300}
    },
    "model": {"dim": 8, "bottom": [8], "top": [8]},
    "pipeline": {"plan": "nested", "retrieval": "new", "micro_batches": 16},
    "run": {"batch": 128, "epochs": 10, "steps": 48, "adaptive": True, "adaptive_every": 8},
}
LATENCY_S = 0.01
"""Of each message on the slow link: sixteen of them make a step long."""


def plan_of(one: Choice):
    return Candidate(
        plan="nested", retrieval="new", micro_batches=one.micro_batches, first=one.first
    ).make_plan("cpu", 2)


def world_trace(one: Choice, *, fixed: float, net: float, dense: float) -> Trace:
    """A run of two ranks in which each message costs `fixed` ms, and a batch `net` and `dense`."""
    shares = Split.of(one.micro_batches, one.first, one.last).shares
    whole = {Kind.ROWS: net, Kind.GRADS: net, Kind.DENSE: dense}

    def cost(op: Op, rank: int) -> float:
        if op.micro is None:
            return 1.0
        return whole[op.kind] * shares[op.micro] + (0.0 if op.kind is Kind.DENSE else fixed)

    return replay_shared(plan_of(one), cost, Sharing((0, 1), frozenset()), batches=16)


def settled_from(start: Choice, **world: float) -> tuple[Choice, list[Choice]]:
    search, current, tried = SettingSearch(256, plan_of), start, [start]
    for _ in range(30):
        current, settled = search.next_after(current, world_trace(current, **world))
        if settled:
            return current.setting, tried
        tried.append(current.setting)
    raise AssertionError(f"it never settles: {tried}")


def step_of(one: Choice, **world: float) -> float:
    return median(step_times(world_trace(one, **world)))


@pytest.mark.parametrize(
    ("start", "world"),
    [
        (Choice(), {"fixed": 0.2, "net": 20.0, "dense": 40.0}),
        (Choice(micro_batches=32), {"fixed": 4.0, "net": 20.0, "dense": 40.0}),
        (Choice(micro_batches=8), {"fixed": 15.0, "net": 5.0, "dense": 30.0}),
        (Choice(micro_batches=32), {"fixed": 1.0, "net": 5.0, "dense": 60.0}),
    ],
)
def test_from_a_bad_start_it_settles_near_the_best_fixed_setting(start, world):
    last, tried = settled_from(start, **world)
    best = min(step_of(Choice(micro_batches=n), **world) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32))
    assert step_of(last, **world) <= 1.03 * best
    assert step_of(last, **world) < 0.9 * step_of(start, **world)
    assert len(tried) <= 12


def settled_where(step_ms: Callable[[Choice, int], float]) -> Choice:
    """What it settles on from 32, where a setting takes so long in each of its looks."""
    search, current, settled = SettingSearch(256, plan_of), Choice(micro_batches=32), False
    looks: dict[Choice, int] = {}
    for _ in range(20):
        now = current.setting
        looks[now] = looks.get(now, 0) + 1
        trace = world_trace(now, fixed=1.0, net=20.0, dense=20.0)
        longer = step_ms(now, looks[now]) / median(step_times(trace))
        spans = tuple(replace(s, start=longer * s.start, end=longer * s.end) for s in trace.spans)
        current, settled = search.next_after(now, replace(trace, spans=spans))
        if settled:
            return current.setting
    raise AssertionError("it never settles")


def test_what_lies_behind_a_worse_setting_is_found():
    """Four micro-batches are slower than eight here, and two are faster than both."""
    steps = {1: 43.0, 2: 36.0, 4: 46.0, 8: 44.5, 16: 55.0, 32: 98.0}
    last = settled_where(lambda one, look: steps.get(one.micro_batches, 60.0))
    assert last.micro_batches == 2


def test_what_was_read_in_a_bad_moment_is_read_again():
    steps = {1: 60.0, 2: 50.0, 4: 44.0, 8: 40.0, 16: 44.0, 32: 98.0}

    def step_ms(one: Choice, look: int) -> float:
        bad = 1.15 if one.micro_batches == 8 and look == 1 else 1.0
        uneven = (one.first, one.last) != (1.0, 1.0)
        return 60.0 if uneven else bad * steps.get(one.micro_batches, 60.0)

    assert settled_where(step_ms) == Choice(micro_batches=8)


def test_when_the_network_changes_it_looks_again():
    fast = {"fixed": 0.1, "net": 20.0, "dense": 40.0}
    slow = {"fixed": 20.0, "net": 20.0, "dense": 40.0}
    search, current = SettingSearch(256, plan_of), Choice()
    settled = False
    for _ in range(12):
        current, settled = search.next_after(current.setting, world_trace(current, **fast))
    many = current.micro_batches
    for _ in range(12):
        current, settled = search.next_after(current.setting, world_trace(current, **slow))
    assert settled
    assert current.micro_batches < many


def test_nothing_changes_where_nothing_gains():
    last, tried = settled_from(Choice(), fixed=0.0, net=0.01, dense=40.0)
    assert last == Choice()
    assert tried == [Choice()]


# On a real job, whose link is slow.


def slow_link(work: Work) -> Work:
    def delayed(act):
        def later(op: Op) -> None:
            time.sleep(LATENCY_S)
            act(op)

        return later

    slow = (Kind.ROWS, Kind.GRADS)
    return {kind: delayed(act) if kind in slow else act for kind, act in work.items()}


def adapted(folder: Path, comm: Communicator, *, resume: bool = False, **run: object) -> list[str]:
    """Train on a slow link; the choices as they were told."""
    sections = {**WORLD, "run": {**WORLD["run"], "checkpoint": str(folder), **run}}
    config = build(JobConfig, sections)
    job = prepare(config, comm, AUTO if resume else None)
    job.trainer.around = slow_link
    told: list[str] = []
    train_job(job, lambda report: None, adapt=lambda: AdaptiveRun(job, told.append))
    return told


def choices_of(folder: Path) -> list[Choice]:
    return [Choice(**json.loads(line)) for line in (folder / FILE).read_text().splitlines()]


def test_on_a_slow_link_messages_become_fewer_and_the_replay_is_identical(tmp_path, caplog):
    told = adapted(tmp_path, LocalCommunicator())
    choices = choices_of(tmp_path)
    assert choices[0] == Choice(micro_batches=16, reason="as the config has it")
    assert choices[-1].micro_batches < 16
    assert len(told) == len(choices) > 1
    assert [one.step for one in choices] == sorted({one.step for one in choices})
    verdict = replay_choices(tmp_path, LocalCommunicator())
    assert verdict.identical, verdict.first_difference
    assert (verdict.steps, verdict.rows_compared > 100) == (48, True)
    assert "nothing is trained" not in caplog.text


def test_a_replay_of_other_choices_differs(tmp_path, monkeypatch):
    adapted(tmp_path, LocalCommunicator())
    true = adaptive_module.choices_in
    monkeypatch.setattr(adaptive_module, "choices_in", lambda *given: true(*given)[:1])
    assert not replay_choices(tmp_path, LocalCommunicator()).identical


def test_a_resumed_run_goes_on_with_its_choices_and_replays(tmp_path):
    adapted(tmp_path, LocalCommunicator(), steps=24)
    before = choices_of(tmp_path)
    assert len(before) > 1
    adapted(tmp_path, LocalCommunicator(), resume=True)
    after = choices_of(tmp_path)
    assert after[: len(before)] == before
    assert read_manifest(tmp_path / "step-00000048").choices == tuple(asdict(c) for c in after)
    assert replay_choices(tmp_path, LocalCommunicator()).identical


def test_a_run_that_trained_all_of_its_data_replays(tmp_path):
    adapted(tmp_path, LocalCommunicator(), steps=0, epochs=1)
    verdict = replay_choices(tmp_path, LocalCommunicator())
    assert verdict.identical, verdict.first_difference
    assert verdict.steps == 32


def test_going_on_without_adapting_is_recorded_too(tmp_path):
    adapted(tmp_path, LocalCommunicator(), steps=24)
    adapted(tmp_path, LocalCommunicator(), resume=True, steps=32, adaptive=False)
    last = read_manifest(tmp_path / "step-00000032").choices[-1]
    assert (last["step"], last["micro_batches"]) == (24, 16)
    assert replay_choices(tmp_path, LocalCommunicator()).identical


def nestpipe(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nestpipe", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def test_two_ranks_agree_and_their_run_replays(tmp_path):
    small = [f"data.synthetic.{k}={v}" for k, v in WORLD["data"]["synthetic"].items()]
    sizes = ["pipeline.plan=nested", "pipeline.micro_batches=16", "model.dim=8"]
    run = [f"run.checkpoint={tmp_path}", "run.batch=128", "run.steps=24", "run.adaptive_every=8"]
    settings = [word for one in (*small, *sizes, *run) for word in ("--set", one)]
    done = nestpipe("train", *settings, "--ranks", 2, "--adaptive")
    assert done.returncode == 0, done.stderr
    assert "adaptive, from step 0 on: 16 micro-batches (as the config has it)" in done.stderr
    assert choices_of(tmp_path)[1].micro_batches != 16
    replayed = nestpipe("verify", "--replay", tmp_path, "--ranks", 2)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "in the settings that it recorded, 24 steps" in replayed.stdout
    alone = nestpipe("verify", "--replay", tmp_path)
    assert alone.returncode == 2
    assert "was trained by 2 ranks, and sums depend on them; add --ranks 2" in alone.stderr


def test_a_pool_grows_where_rows_that_it_lacks_hold_up_the_step(tmp_path):
    sections = {
        **WORLD,
        "pipeline": {"plan": "nested", "retrieval": "pooled"},
        "run": {**WORLD["run"], "checkpoint": str(tmp_path), "device_memory": "60KB"},
    }
    job = prepare(build(JobConfig, sections), LocalCommunicator())

    def slow_host(work: Work) -> Work:
        moved = dict(work)
        moved[Kind.RETRIEVE] = slow_link({Kind.ROWS: work[Kind.RETRIEVE]})[Kind.ROWS]
        return moved

    job.trainer.around = slow_host
    train_job(job, lambda report: None, adapt=lambda: AdaptiveRun(job))
    sizes = {one.device_memory for one in choices_of(tmp_path)}
    assert len(sizes) > 1
    assert replay_choices(tmp_path, LocalCommunicator()).identical


def test_what_cannot_be_recorded_or_replayed_is_refused(tmp_path):
    config = build(JobConfig, {**WORLD, "run": {**WORLD["run"]}})
    job = prepare(config, LocalCommunicator())
    with pytest.raises(ConfigError, match="no folder to record the choices in"):
        AdaptiveRun(job)
    averaged = {"groups": 2, "merge": "averaged", "merge_every": 4}
    with pytest.raises(ConfigError, match="merge_every 4: each look at the trace would merge"):
        adaptive_module.choices_file(build(JobConfig, {**WORLD, "parallel": averaged}))
    with pytest.raises(ConfigError, match="nothing adapts"):
        train_job(job, lambda report: None)
    adapted(tmp_path, LocalCommunicator(), adaptive=False, steps=8)
    with pytest.raises(CheckpointError, match="no choices from the first step on"):
        replay_choices(tmp_path, LocalCommunicator())
    with pytest.raises(ConfigError, match="could not be replayed"):
        adapted(tmp_path, LocalCommunicator(), resume=True)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        replay_choices(tmp_path / "none", LocalCommunicator())
    with pytest.raises(ConfigError, match="adaptive_every is 2"):
        replace(config, run=replace(config.run, adaptive_every=2))
