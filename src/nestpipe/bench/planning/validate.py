"""Steps that the simulator predicts for other networks and numbers of ranks, beside measured ones.

A job is profiled on hosts with links of one speed. Every other site is predicted from that profile
alone, and then really run; the errors are listed, the worst first. The ranks run as
`python -m nestpipe.bench.planning.validate FOLDER`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nestpipe.bench.machines import bits_per_s
from nestpipe.bench.planning.grid import do_task, run_on_hosts, say
from nestpipe.comm import Communicator
from nestpipe.planner import Candidate, check_candidates, job_bench, profile_job
from nestpipe.planner.fleet import Assumptions, FleetPredictor, Link, Machine, ProfiledOn, Site
from nestpipe.sim.job_costs import profile_from_json
from nestpipe.train.job import JobConfig

MODULE = "nestpipe.bench.planning.validate"
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
    found = run_on_hosts(MODULE, {**base, "do": "profile"}, rate, ranks)
    tell(fitted_on)
    predictor = FleetPredictor(
        profile_from_json(found, "the profile"),
        ProfiledOn(gb_per_s=bits_per_s(rate) / 8e9),
        global_batch=config.run.batch,
        per_worker=False,
    )
    compared: list[SitePrediction] = []
    for count, speed in others:
        read = run_on_hosts(MODULE, {**base, "do": "measure"}, speed, count)
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


def _do(task: Mapping[str, Any], config: JobConfig, comm: Communicator) -> dict[str, Any]:
    with job_bench(config, comm) as bench:
        say(comm, f"{task['do']}: {comm.size} hosts")
        if task["do"] == "profile":
            return profile_job(bench, steps=max(8, int(task["steps"])), rounds=2).as_json()
        measured = check_candidates(
            bench, VALIDATED, steps=int(task["steps"]), rounds=int(task["rounds"])
        )
    return {"measured": [[asdict(one), ms] for one, ms in measured.items()]}


if __name__ == "__main__":
    do_task(_do)
