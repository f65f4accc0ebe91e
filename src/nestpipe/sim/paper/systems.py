"""The published table, simulated: each system is a plan plus costs, nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product

from nestpipe.schedule import Plan, PlanOptions, Retrieval, plan
from nestpipe.schedule.op import Kind
from nestpipe.sim.cluster import Cluster
from nestpipe.sim.costs import Scale, costs
from nestpipe.sim.paper import published as paper
from nestpipe.sim.paper.calibration import (
    GROUPS,
    HOST_SPLIT,
    LAYOUT,
    OTHER_HOST_SPLIT,
    paper_cluster,
)
from nestpipe.sim.paper.published import BEYOND, LARGEST, PUBLISHED, SCALES, Published
from nestpipe.sim.report import Figures, simulate
from nestpipe.sim.scaling import GroupChoice, choice_as_json, choose_groups, usual_groups


@dataclass(frozen=True, slots=True)
class System:
    """A training system as the simulator sees it."""

    name: str
    plan: str
    micro_batches: int = 1
    groups: int = 1

    def make_plan(self) -> Plan:
        return plan(self.plan, PlanOptions(micro_batches=self.micro_batches))


SYSTEMS = (
    System(paper.TORCHREC, "serial"),
    System(paper.SP_2D, "serial", groups=GROUPS),
    System(paper.UNIEMB, "stale_prefetch"),
    System(paper.NESTPIPE, "nested", micro_batches=paper.MICROS),
    System(paper.NESTPIPE_2D, "nested", micro_batches=paper.MICROS, groups=GROUPS),
    System(paper.DBP_ONLY, "dual_buffer"),
    System(paper.FWP_ONLY, "frozen_window", micro_batches=paper.MICROS),
)

FITTED: dict[tuple[str, int], tuple[str, ...]] = {
    (paper.TORCHREC, 1536): ("step_ms", "lookup_ms", "exposed_comm_ms"),
    (paper.TORCHREC, 128): ("lookup_ms",),
    (paper.UNIEMB, 1536): ("step_ms", "lookup_ms"),
    (paper.UNIEMB, 512): ("scaling_efficiency",),
    (paper.UNIEMB, 128): ("step_ms",),
    (paper.SP_2D, 1536): ("step_ms", "exposed_comm_ms"),
    (paper.NESTPIPE_2D, 1536): ("all_to_all_ms",),
}
"""Which published figures the calibration used; every other row is a prediction."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that no published figure fixes, and what else would fit them."""

    name: str
    taken: str
    others: str
    from_nestpipe: bool = False
    """Whether it was inferred from NestPipe's own figures: then its rows are not all predicted."""


MICRO_BATCHES = Assumption(
    "micro-batches",
    f"{paper.MICROS}, inferred from NestPipe's own exposed share of 1/{paper.MICROS}",
    "4 or 16",
    from_nestpipe=True,
)
SPLIT = Assumption(
    "host split",
    "60 % of the host's lookup time is retrieval and write-back",
    "40 %, which fits every figure up to 1,536 workers as well",
)
CONTENTION = Assumption(
    "contention",
    "a quadratic through the All2All at 128, 512 and 1,536 workers",
    "past them, the line through the last two",
)
ASSUMPTIONS = (MICRO_BATCHES, SPLIT, CONTENTION)
MICRO_CHOICES = (4, paper.MICROS, 16)
DECIDES = 0.01
"""An assumption that changes a step by more than this part of it is named."""


@dataclass(frozen=True, slots=True)
class StepRange:
    """The step of a row under all assumptions that fit the published figures as well."""

    low_ms: float
    high_ms: float
    decided_by: tuple[str, ...]
    """The assumptions that change it, by name; empty where none does."""


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One system at one scale, beside what was published of it."""

    system: str
    plan: str
    workers: int
    step_ms: float
    lookup_ms: float
    exposed_comm_ms: float
    all_to_all_ms: float
    """All All2Alls of rows and gradients, hidden or not."""
    speedup: float
    """Over TorchRec at the same scale."""
    qps: float
    """Samples per second of the whole cluster."""
    scaling_efficiency: float
    """Percent: the 128-worker step over this one."""
    utilisation: float
    kind: str
    """`calibrated` where a published figure of this very row was used, `extrapolated` past the
    largest published scale, else `predicted`."""
    fitted: tuple[str, ...]
    """The published figures of this row that the calibration used."""
    inferred: tuple[str, ...]
    """Assumptions of this row that were inferred from NestPipe's own figures."""
    step_range: StepRange
    published: Published

    def error_percent(self, name: str) -> float | None:
        """By how many percent a figure differs from the published one; None where unknown."""
        known = getattr(self.published, name)
        return None if known is None else 100 * (getattr(self, name) / known - 1)


@dataclass(frozen=True, slots=True)
class PaperChoice:
    """Numbers of groups compared for NestPipe, rows averaged every batch."""

    retrieval: Retrieval
    choice: GroupChoice
    step_range: StepRange
    """Of the best number of groups."""


COMPARED = tuple(f.name for f in fields(Published) if f.name != "derived")
"""The figures that can be compared with published ones."""


def paper_rows(
    scales: tuple[int, ...] = (*SCALES, BEYOND), progress: Callable[[], None] = lambda: None
) -> list[PaperRow]:
    """Simulate every system at every scale; `progress` is called after each run."""
    cluster = _clusters()[TAKEN]
    runs: dict[tuple[str, int], Figures] = {}
    for system in SYSTEMS:
        for workers in sorted({paper.BASE, *scales}):
            scale = Scale(workers, system.groups, LAYOUT)
            runs[system.name, workers] = simulate(system.make_plan(), cluster, scale)
            progress()
    return [_row(system, workers, runs) for system in SYSTEMS for workers in scales]


def paper_choices(progress: Callable[[int], None] = lambda batch: None) -> list[PaperChoice]:
    """Into how many groups NestPipe's workers are best split, at the largest scale and past it."""
    cluster = paper_cluster()
    found: list[PaperChoice] = []
    for workers in (LARGEST, BEYOND):
        for retrieval in Retrieval:
            options = PlanOptions(micro_batches=paper.MICROS, retrieval=retrieval, merge_every=1)
            numbers = usual_groups(workers)
            choice = choose_groups("nested", options, cluster, workers, numbers, progress=progress)
            found.append(PaperChoice(retrieval, choice, _range_of_best(choice, options)))
    return found


def _range_of_best(choice: GroupChoice, options: PlanOptions) -> StepRange:
    def step_ms(case: _Case) -> float:
        micros, cluster = case
        if case == (options.micro_batches, TAKEN):
            return choice.best.figures.step_ms
        chosen = replace(options, micro_batches=micros)
        groups, workers = [choice.best.groups], choice.workers
        again = choose_groups("nested", chosen, _clusters()[cluster], workers, groups)
        return again.best.figures.step_ms

    return _step_range(step_ms, MICRO_CHOICES, choice.workers)


TAKEN = ("taken", 2)
"""The cluster of the table."""
_Case = tuple[int, tuple[str, int]]
"""Micro-batches, and which cluster of `_clusters`."""


@cache
def _clusters() -> dict[tuple[str, int], Cluster]:
    """The calibrated cluster under each assumption, first the one of the table."""
    splits = {"taken": HOST_SPLIT, "other": OTHER_HOST_SPLIT}
    return {
        (name, terms): paper_cluster(split, contention_terms=terms)
        for name, split in splits.items()
        for terms in (2, 1)
    }


def _step_range(
    step_ms: Callable[[_Case], float], micros: Sequence[int], workers: int
) -> StepRange:
    """All combinations; split and contention are open only past the published scales."""
    clusters = list(_clusters()) if workers > LARGEST else [TAKEN]
    steps = {case: step_ms(case) for case in product(micros, clusters)}
    axes: dict[str, Callable[[_Case], object]] = {
        MICRO_BATCHES.name: lambda case: case[1],
        SPLIT.name: lambda case: (case[0], case[1][1]),
        CONTENTION.name: lambda case: (case[0], case[1][0]),
    }
    decided: list[str] = []
    for name, others in axes.items():
        alike: dict[object, list[float]] = {}
        for case, ms in steps.items():
            alike.setdefault(others(case), []).append(ms)
        if any(max(ms) > (1 + DECIDES) * min(ms) for ms in alike.values()):
            decided.append(name)
    return StepRange(min(steps.values()), max(steps.values()), tuple(decided))


def _row(system: System, workers: int, runs: dict[tuple[str, int], Figures]) -> PaperRow:
    run = runs[system.name, workers]
    fitted = FITTED.get((system.name, workers), ())
    scale = Scale(workers, system.groups, LAYOUT)
    clusters = _clusters()
    at = costs(clusters[TAKEN], system.make_plan().shape, scale)

    def step_ms(case: _Case) -> float:
        micros, cluster = case
        if case == (system.micro_batches, TAKEN):
            return run.step_ms
        return simulate(
            replace(system, micro_batches=micros).make_plan(), clusters[cluster], scale
        ).step_ms

    split = system.micro_batches > 1
    guessed = "predicted" if workers <= LARGEST else "extrapolated"
    return PaperRow(
        system=system.name,
        plan=system.plan,
        workers=workers,
        step_ms=run.step_ms,
        lookup_ms=run.lookup_ms,
        exposed_comm_ms=run.exposed_comm_ms,
        all_to_all_ms=system.micro_batches * (at[Kind.ROWS] + at[Kind.GRADS]),
        speedup=runs[paper.TORCHREC, workers].step_ms / run.step_ms,
        qps=run.samples_per_s,
        scaling_efficiency=100 * runs[system.name, paper.BASE].step_ms / run.step_ms,
        utilisation=run.utilisation,
        kind="calibrated" if fitted else guessed,
        fitted=fitted,
        inferred=(MICRO_BATCHES.name,) if split else (),
        step_range=_step_range(step_ms, MICRO_CHOICES if split else (1,), workers),
        published=PUBLISHED.get((system.name, workers), Published()),
    )


def rows_as_json(rows: list[PaperRow], choices: Sequence[PaperChoice] = ()) -> dict[str, object]:
    """The table as plain values, with the errors, the groups and what does not reconcile."""
    return {
        "rows": [
            {**asdict(row), "error_percent": {name: row.error_percent(name) for name in COMPARED}}
            for row in rows
        ],
        "groups": [
            {
                "retrieval": str(one.retrieval),
                "step_range": asdict(one.step_range),
                **choice_as_json(one.choice),
            }
            for one in choices
        ],
        "assumptions": [asdict(one) for one in ASSUMPTIONS],
        "unreconciled": list(paper.UNRECONCILED),
    }
