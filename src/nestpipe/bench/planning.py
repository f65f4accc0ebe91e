"""How right `nestpipe plan` and `simulate --job` are: their predictions beside real runs.

A grid compares the settings that a plan chooses with an exhaustive small one. Its ranks profile the
job, choose, and then run the choice and the grid in turns. Ratios are of steps of one call.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from nestpipe.bench.machines import bits_per_s, launch_on_hosts, shaped_hosts
from nestpipe.comm import Communicator
from nestpipe.config import build
from nestpipe.errors import NestpipeError, RunError
from nestpipe.planner import (
    Candidate,
    JobBench,
    ProfilePredictor,
    check_candidates,
    choose,
    job_bench,
    profile_job,
)
from nestpipe.planner.fleet import Assumptions, FleetPredictor, Link, Machine, ProfiledOn, Site
from nestpipe.planner.profile import FirstThinks, heard
from nestpipe.sim.job_costs import profile_from_json
from nestpipe.train.job import JobConfig
from nestpipe.train.loop import communicator

MODULE = "nestpipe.bench.planning"
TASK, RESULT = "task.json", "result.json"
GRID_COUNTS = (2, 4, 8)
OFFERS = 3
"""The best few by prediction, which run beside the grid."""


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
    offers: tuple[Candidate, ...]
    """The best few by prediction, the chosen one first."""
    predicted_ms: float
    measured: Mapping[Candidate, float]
    """Median step of the choice and of every point of the grid, ms."""

    @property
    def chosen(self) -> Candidate:
        return self.offers[0]

    @property
    def checked(self) -> Candidate:
        """What `--check` keeps: the fastest of the best few."""
        return min(self.offers, key=lambda c: self.measured[c])

    @property
    def best(self) -> Candidate:
        """The fastest point of the grid."""
        grid = [c for c in self.measured if c in set(small_grid())]
        return min(grid, key=lambda c: self.measured[c])

    @property
    def ratio(self) -> float:
        """The best step of the grid over that of the choice: 1 and more is as good as the grid."""
        return self.measured[self.best] / self.measured[self.chosen]

    @property
    def checked_ratio(self) -> float:
        """The same for what `--check` keeps."""
        return self.measured[self.best] / self.measured[self.checked]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "rate": self.rate,
            "chosen": asdict(self.chosen),
            "best": asdict(self.best),
            "checked": asdict(self.checked),
            "best_over_chosen": self.ratio,
            "best_over_checked": self.checked_ratio,
            "predicted_ms": self.predicted_ms,
            "measured": [{**asdict(c), "step_ms": ms} for c, ms in self.measured.items()],
        }


def run_grid(
    config: JobConfig, rate: str, ranks: int, *, steps: int = 8, rounds: int = 3
) -> GridReading:
    """Measure one network."""
    task = {"do": "grid", "config": asdict(config), "steps": steps, "rounds": rounds}
    found = run_on_hosts(task, rate, ranks)
    measured = {Candidate(**one): float(ms) for one, ms in found["measured"]}
    offers = tuple(Candidate(**one) for one in found["offers"])
    return GridReading(rate, offers, found["predicted_ms"], measured)


def run_on_hosts(task: Mapping[str, Any], rate: str, ranks: int) -> dict[str, Any]:
    """Do a task on so many hosts; what rank 0 left in its folder."""
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
        offers, predicted_ms = _choose(bench)
        say(comm, f"chosen: {offers[0]}; running it beside the grid")
        candidates = list(dict.fromkeys([*offers, *small_grid()]))
        measured = check_candidates(
            bench, candidates, steps=int(task["steps"]), rounds=int(task["rounds"])
        )
    return {
        "offers": [asdict(one) for one in offers],
        "predicted_ms": predicted_ms,
        "measured": [[asdict(c), ms] for c, ms in measured.items()],
    }


def _choose(bench: JobBench) -> tuple[list[Candidate], float]:
    """What `nestpipe plan` would say; the same on every rank."""
    comm = bench.comm
    say(comm, "profiling")
    profile = profile_job(bench, steps=10, rounds=2)
    if comm.rank == 0:
        waiting = FirstThinks(comm)
        choice = choose(ProfilePredictor(profile), Candidate(), draws=1, tell=waiting.still)
        best = [asdict(row.candidate) for row in choice.rows[:OFFERS]]
        told: Mapping[str, Any] = {"best": best, "ms": choice.chosen.figures.step_ms}
        waiting.say(told)
    else:
        told = heard(comm)
    offers = cast("list[dict[str, Any]]", told["best"])
    return [Candidate(**one) for one in offers], float(told["ms"])


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
    tell: Callable[[object], None] = lambda _: None,
) -> list[SitePrediction]:
    """Profile one place, predict and measure the others; the worst first."""
    base = {"config": asdict(config), "steps": steps, "rounds": rounds}
    ranks, rate = fitted_on
    found = run_on_hosts({**base, "do": "profile"}, rate, ranks)
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
        steps_ms = {Candidate(**one): float(ms) for one, ms in read["measured"]}
        site = site_of(count, speed)
        for one, ms in steps_ms.items():
            predicted = predictor.figures(site, one, Assumptions()).step_ms
            compared.append(SitePrediction(count, speed, one, predicted, ms))
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
        return profile_job(bench, steps=max(8, int(task["steps"])), rounds=2).as_json()


def _measure(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    say(comm, f"measure: {comm.size} hosts")
    with job_bench(config, comm) as bench:
        measured = check_candidates(
            bench, VALIDATED, steps=int(task["steps"]), rounds=int(task["rounds"])
        )
    return {"measured": [[asdict(one), ms] for one, ms in measured.items()]}


DO = {"grid": _run_grid, "profile": _profile, "measure": _measure}
"""What a task may ask of the ranks."""

if __name__ == "__main__":
    do_task()
