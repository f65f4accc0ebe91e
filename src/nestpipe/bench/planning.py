"""How right `nestpipe plan` and `simulate --job` are: their predictions beside real runs.

A grid compares the settings that a plan chooses with an exhaustive small one. Its ranks profile the
job, choose, and then run the choice and the grid in turns. Ratios are of steps of one call.

An adaptive run begins with bad settings, ends when it has settled, and is replayed. What it settled
on then runs in turns with a grid of fixed settings.

To validate, a job is profiled on hosts with links of one speed. Every other network and number of
ranks is predicted from that profile alone, and then really run; the worst errors are listed first.

Ranks are hosts with shaped links, and run as `python -m nestpipe.bench.planning FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from nestpipe.bench.machines import bits_per_s, launch_on_hosts, shaped_hosts
from nestpipe.comm import Communicator
from nestpipe.config import build
from nestpipe.errors import NestpipeError, RunError
from nestpipe.planner import (
    AdaptiveRun,
    Candidate,
    Choice,
    JobBench,
    candidate_of,
    check_candidates,
    job_bench,
    profile_job,
    replay_choices,
    run_off,
    thought,
)
from nestpipe.planner.choice import LEAST_SAMPLES
from nestpipe.planner.fleet import (
    EVERY_ASSUMPTION,
    Assumptions,
    FleetPredictor,
    Link,
    Machine,
    ProfiledOn,
    Site,
)
from nestpipe.sim.job_costs import profile_from_json
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.loop import communicator, train_steps
from nestpipe.train.trainer import choose_device

MODULE = "nestpipe.bench.planning"
TASK, RESULT = "task.json", "result.json"
GRID_COUNTS = (2, 4, 8)


def small_grid(counts: Sequence[int] = GRID_COUNTS) -> list[Candidate]:
    """Every exact plan, with micro-batches and exchanges where it has a use for them."""
    plain = [Candidate(plan=p, retrieval="new") for p in ("serial", "sparse_dist", "dual_buffer")]
    return plain + [
        Candidate(plan=name, retrieval="new", micro_batches=count, exchange=exchange)
        for name in ("frozen_window", "nested")
        for count in counts
        for exchange in ("micro", "window")
    ]


@dataclass(frozen=True, slots=True)
class GridReading:
    """One network: what was chosen, and what everything took."""

    rate: str
    chosen: Candidate
    """What `nestpipe plan` says: the fastest in its short runs."""
    first: Candidate
    """The best by prediction alone, as with `--check 0`."""
    predicted_ms: float
    """The step of the chosen one."""
    measured: Mapping[Candidate, float]
    """Median step of both and of every point of the grid, ms."""

    @property
    def best(self) -> Candidate:
        """The fastest point of the grid."""
        return min(small_grid(), key=lambda c: self.measured[c])

    @property
    def ratio(self) -> float:
        """The best step of the grid over that of the choice: 1 and more is as good as the grid."""
        return self.measured[self.best] / self.measured[self.chosen]

    @property
    def unchecked_ratio(self) -> float:
        """The same for the best by prediction."""
        return self.measured[self.best] / self.measured[self.first]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rate": self.rate,
            "chosen": asdict(self.chosen),
            "unchecked": asdict(self.first),
            "best": asdict(self.best),
            "best_over_chosen": self.ratio,
            "best_over_unchecked": self.unchecked_ratio,
            "predicted_ms": self.predicted_ms,
            "measured": _steps_as_json(self.measured),
        }


def _steps_as_json(measured: Mapping[Candidate, float]) -> list[dict[str, Any]]:
    return [{**asdict(c), "step_ms": ms} for c, ms in measured.items()]


def run_grid(
    config: JobConfig, rate: str, ranks: int, *, steps: int = 8, rounds: int = 3
) -> GridReading:
    """Measure one network."""
    task = {"do": "grid", "config": asdict(config), "steps": steps, "rounds": rounds}
    found = run_on_hosts(task, rate, ranks)
    chosen, first = (Candidate(**found[name]) for name in ("chosen", "first"))
    return GridReading(rate, chosen, first, found["predicted_ms"], _steps_of(found))


def _steps_of(found: Mapping[str, Any]) -> dict[Candidate, float]:
    return {Candidate(**one): float(ms) for one, ms in found["measured"]}


def run_on_hosts(task: Mapping[str, Any], rate: str, ranks: int) -> dict[str, Any]:
    """Do a task on a number of hosts; returns the figures that rank 0 wrote."""
    with tempfile.TemporaryDirectory(prefix="nestpipe-plan-") as name:
        folder = Path(name)
        (folder / TASK).write_text(json.dumps(task))
        with shaped_hosts(ranks, rate) as hosts:
            status = launch_on_hosts(hosts, [sys.executable, "-m", MODULE, name])
        if status != 0:
            raise RunError(f"the ranks on links of {rate} ended with status {status}; see above")
        return json.loads((folder / RESULT).read_text())


def do_task() -> None:
    """In a rank that `run_on_hosts` started: do the task, and leave what came of it."""
    folder = Path(sys.argv[1])
    task = json.loads((folder / TASK).read_text())
    config = build(JobConfig, task["config"])
    torch.set_num_threads(config.run.threads or 1)
    try:
        comm = communicator(config)
        result = DO[task["do"]](task, config, comm)
        if comm.rank == 0:
            (folder / RESULT).write_text(json.dumps(result))
        comm.barrier()
        comm.close()
    except NestpipeError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)


def say(comm: Communicator, line: str) -> None:
    """Rank 0 tells how far it has come."""
    if comm.rank == 0:
        sys.stderr.write(line + "\n")


def _run_grid(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    with job_bench(config, comm) as bench:
        found = _choose(bench)
        chosen, first = (Candidate(**found[name]) for name in ("chosen", "first"))
        say(comm, f"chosen: {chosen}; running it beside the grid")
        measured = _measured(bench, [chosen, first, *small_grid()], task)
    return {**found, "measured": measured}


def _choose(bench: JobBench) -> dict[str, Any]:
    """What `nestpipe plan` says; the same on every rank."""
    comm = bench.comm
    say(comm, "profiling")
    profile = profile_job(bench)
    start = candidate_of(bench.config, profile.device, profile.ranks)
    predicted = thought(profile, start, comm, draws=1)
    choice = run_off(bench, predicted)
    found: dict[str, Any] = {}
    if choice is not None and predicted is not None:
        found = {
            "chosen": asdict(choice.chosen.candidate),
            "first": asdict(predicted.chosen.candidate),
            "predicted_ms": choice.chosen.figures.step_ms,
        }
    return cast("dict[str, Any]", comm.all_gather_values(found)[0])


def _measured(
    bench: JobBench, candidates: Sequence[Candidate], task: Mapping[str, Any]
) -> list[tuple[dict[str, Any], float]]:
    """Each candidate once, in turns with the others, with its median step."""
    steps, rounds = int(task["steps"]), int(task["rounds"])
    found = check_candidates(bench, list(dict.fromkeys(candidates)), steps=steps, rounds=rounds)
    return [(asdict(one), ms) for one, ms in found.items()]


# Adaptive mode, from bad settings, beside fixed ones.


FIXED_COUNTS = (1, 2, 4, 8, 16, 32)
"""Micro-batches of the fixed settings; adaptive runs begin with the first and with the last."""
MOST_STEPS = 480
"""A run that has not settled by then has failed to."""
LOOK_EVERY = 12
REPLAY_RATE = "100gbit"
"""Links of a replay: bits do not depend on them."""


@dataclass(frozen=True, slots=True)
class AdaptiveReading:
    """One network and start: what the run settled on, and what everything took."""

    rate: str
    choices: tuple[Choice, ...]
    """As the run recorded them."""
    steps: int
    """That the run had."""
    settled: bool
    last: Candidate
    """The settings in the end."""
    measured: Mapping[Candidate, float]
    """Median step of the settings in the end and of every fixed one, ms."""
    difference: str
    """Where the replay of the run first differs; empty where it is identical."""

    @property
    def best(self) -> Candidate:
        """The fastest of the fixed settings."""
        fixed = (c for c in self.measured if c.micro_batches in FIXED_COUNTS and _is_even(c))
        return min(fixed, key=lambda c: self.measured[c])

    @property
    def ratio(self) -> float:
        """The best fixed step over that of the settings in the end."""
        return self.measured[self.best] / self.measured[self.last]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rate": self.rate,
            "choices": [asdict(one) for one in self.choices],
            "steps": self.steps,
            "settled": self.settled,
            "last": asdict(self.last),
            "best": asdict(self.best),
            "best_over_last": self.ratio,
            "replay_identical": not self.difference,
            "difference": self.difference,
            "measured": _steps_as_json(self.measured),
        }


def _is_even(one: Candidate) -> bool:
    return (one.first, one.last) == (1.0, 1.0)


def run_adaptive(
    config: JobConfig, rate: str, ranks: int, *, steps: int = 8, rounds: int = 3
) -> list[AdaptiveReading]:
    """Measure one network, from both starts."""
    base = {"config": asdict(config), "steps": steps, "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="nestpipe-runs-") as folder:
        found = run_on_hosts({**base, "do": "adapt", "runs": folder}, rate, ranks)
        names = [run["name"] for run in found["runs"]]
        replays = run_on_hosts(
            {**base, "do": "replay", "runs": folder, "names": names}, REPLAY_RATE, ranks
        )
    measured = _steps_of(found)
    return [
        AdaptiveReading(
            rate,
            tuple(Choice(**one) for one in run["choices"]),
            run["steps"],
            run["settled"],
            Candidate(**run["last"]),
            measured,
            replays["differences"][run["name"]],
        )
        for run in found["runs"]
    ]


def _adapt(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    base = candidate_of(config, choose_device(config.run.device).type, comm.size)
    most = config.run.batch // comm.size // LEAST_SAMPLES
    counts = [count for count in FIXED_COUNTS if count <= most]
    fixed = [replace(base, micro_batches=n, first=1.0, last=1.0) for n in counts]
    runs = [_adapted(config, comm, one, Path(task["runs"])) for one in (fixed[0], fixed[-1])]
    say(comm, "running what it settled on beside fixed settings")
    with job_bench(config, comm) as bench:
        measured = _measured(bench, [*(Candidate(**run["last"]) for run in runs), *fixed], task)
    return {"runs": runs, "measured": measured}


def _adapted(
    config: JobConfig, comm: Communicator, start: Candidate, folder: Path
) -> dict[str, Any]:
    """Train from these settings until nothing more is gained."""
    name = f"from-{start.micro_batches}"
    run = replace(
        config.run,
        adaptive=True,
        adaptive_every=LOOK_EVERY,
        checkpoint=str(folder / name),
        steps=MOST_STEPS,
        epochs=MOST_STEPS,
        eval_every=MOST_STEPS,
    )
    pipeline = replace(config.pipeline, **start.sections()["pipeline"])
    job = make_job(replace(config, run=run, pipeline=pipeline), comm)
    adaptation = AdaptiveRun(job, lambda line: say(comm, f"adaptive, {line}"))
    job.trainer.stop_wanted = lambda: adaptation.settled
    trained = train_steps(job, lambda report: None, adapt=lambda: adaptation)
    choices = [Choice(**one) for one in job.trainer.choices]
    last = choices[-1]
    sizes = {"micro_batches": last.micro_batches, "first": last.first, "last": last.last}
    return {
        "name": name,
        "choices": [asdict(one) for one in choices],
        "steps": trained.steps,
        "settled": adaptation.settled,
        "last": asdict(replace(start, **sizes)),
    }


def _replay(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    differences: dict[str, str] = {}
    for name in task["names"]:
        say(comm, f"replaying the run {name}")
        verdict = replay_choices(Path(task["runs"]) / name, comm)
        differences[name] = "" if verdict.identical else str(verdict.first_difference)
    return {"differences": differences}


VALIDATED = (
    Candidate(retrieval="new"),
    Candidate(plan="dual_buffer", retrieval="new"),
    Candidate(plan="nested", retrieval="new", micro_batches=4),
    Candidate(plan="nested", retrieval="new", micro_batches=8, exchange="window"),
)
Place = tuple[int, str]
"""Hosts, and the speed of their links."""


@dataclass(frozen=True, slots=True)
class SitePrediction:
    """One site and candidate."""

    ranks: int
    rate: str
    candidate: Candidate
    predicted_ms: float
    measured_ms: float
    range_ms: tuple[float, float] = (0.0, 0.0)
    """Of the prediction, over all that is assumed."""

    @property
    def error(self) -> float:
        """By how much the prediction is off, as a part of the measured step."""
        return self.predicted_ms / self.measured_ms - 1

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "error": self.error}


def worst_first(found: Sequence[SitePrediction]) -> list[SitePrediction]:
    """In the order in which they should be read."""
    return sorted(found, key=lambda one: -abs(one.error))


def validate(
    config: JobConfig,
    fitted_on: Place,
    others: Sequence[Place],
    *,
    steps: int,
    rounds: int,
    keep: Callable[[Mapping[str, Any]], None] = lambda _: None,
    tell: Callable[[object], None] = lambda _: None,
) -> list[SitePrediction]:
    """Profile one place, predict and measure the others; the worst first.

    `keep` is called with the profile.
    """
    base = {"config": asdict(config), "steps": steps, "rounds": rounds}
    ranks, rate = fitted_on
    found = run_on_hosts({**base, "do": "profile"}, rate, ranks)
    keep(found)
    tell(fitted_on)
    predictor = FleetPredictor(
        profile_from_json(found, "the profile"),
        ProfiledOn(gb_per_s=bits_per_s(rate) / 8e9),
        global_batch=config.run.batch,
        per_worker=False,
    )
    compared: list[SitePrediction] = []
    for count, speed in others:
        read = run_on_hosts({**base, "do": "measure"}, speed, count)
        site = site_of(count, speed)
        for one, ms in _steps_of(read).items():
            steps_of = {a: predictor.figures(site, one, a).step_ms for a in EVERY_ASSUMPTION}
            around = min(steps_of.values()), max(steps_of.values())
            predicted = steps_of[Assumptions()]
            compared.append(SitePrediction(count, speed, one, predicted, ms, around))
        tell((count, speed))
    return worst_first(compared)


def site_of(ranks: int, rate: str) -> Site:
    """Hosts of this machine: each has one of its cores, and shares it where they are more."""
    cores = len(os.sched_getaffinity(0))
    return Site(
        machine=Machine(name="host"),
        link=Link(name=rate, gb_per_s=bits_per_s(rate) / 8e9),
        workers=ranks,
        pools=tuple(rank % cores for rank in range(ranks)),
    )


def _profile(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    say(comm, f"profile: {comm.size} hosts")
    with job_bench(config, comm) as bench:
        return profile_job(bench).as_json()


def _measure(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    say(comm, f"measure: {comm.size} hosts")
    with job_bench(config, comm) as bench:
        return {"measured": _measured(bench, VALIDATED, task)}


DO = {
    "grid": _run_grid,
    "adapt": _adapt,
    "replay": _replay,
    "profile": _profile,
    "measure": _measure,
}
"""What a task may ask of the ranks."""

if __name__ == "__main__":
    do_task()
