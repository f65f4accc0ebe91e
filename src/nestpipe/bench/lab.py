"""NestPipe beside TorchRec on one GPU: the lab configurations A to D and `paper`, timed alike.

TorchRec runs in processes of its own (`bench/torchrec_lab.py`), with packages from a folder of
their own. `tools/lab.py` brings them to the machine and calls this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from nestpipe.bench.pipeline_cases import (
    BASELINE_FORMS,
    EXACT_PLANS,
    LAST_STEPS,
    TIMED_STEPS,
    WARM_STEPS,
    PipelineCase,
    SerialLoop,
    Variant,
    case_of,
    check_names,
    serial_loops,
    variant_of,
)
from nestpipe.bench.pipeline_rank import measure_rounds, read_rounds
from nestpipe.bench.pipeline_report import steady
from nestpipe.bench.torchrec_lab import PeerTask, read_readings
from nestpipe.errors import ConfigError
from nestpipe.schedule import Kind
from nestpipe.trace import Trace

CONFIGS = ("A", "B", "C", "D", "paper")
SHARES = (0.02, 0.1, 0.3)
"""Shares of TorchRec's device cache; the fastest counts."""
TORCHREC, NESTPIPE = "TorchRec", "NestPipe"


@dataclass(frozen=True, slots=True)
class LabReading:
    """One way to run a configuration."""

    system: str
    pipeline: str
    step_ms: float
    """Median of the readings."""
    readings_ms: tuple[float, ...]
    parts_ms: Mapping[str, float]
    """NestPipe: compute, and what else is exposed, of a median step."""

    @property
    def range_ms(self) -> tuple[float, float]:
        """The fastest and the slowest reading."""
        return min(self.readings_ms), max(self.readings_ms)

    def samples_per_s(self, samples: int) -> float:
        return 1000 * samples / self.step_ms


@dataclass(frozen=True, slots=True)
class Peer:
    """Where TorchRec is, and how it is run."""

    site: Path
    """Folder of its packages."""
    shares: tuple[float, ...] = SHARES
    """Parts of the rows that its device cache holds; the fastest counts."""
    limit_s: float = 240.0
    """Seconds after which it is stopped; readings up to then count."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both systems on one configuration."""

    config: str
    case: PipelineCase
    readings: tuple[LabReading, ...]

    def best(self, system: str) -> LabReading | None:
        """The fastest of a system; of ours only what overlaps, `serial` being no contender."""
        found = [r for r in self.readings if r.system == system and "serial" not in r.pipeline]
        return _fastest(found)

    def serial(self, loop: SerialLoop) -> LabReading | None:
        """The fastest run of a baseline."""
        return _fastest([r for r in self.readings if r.pipeline.startswith(f"serial {loop}")])

    def over_serial(self, loop: SerialLoop) -> float | None:
        """Step of the fastest run of a baseline over our best step; None where one is missing."""
        ours, baseline = self.best(NESTPIPE), self.serial(loop)
        return baseline.step_ms / ours.step_ms if ours and baseline else None

    @property
    def ratio(self) -> float | None:
        """Our samples per second over TorchRec's, each at its best; None where one is missing."""
        ours, theirs = self.best(NESTPIPE), self.best(TORCHREC)
        return theirs.step_ms / ours.step_ms if ours and theirs else None

    @property
    def samples(self) -> int:
        return self.case.batch * self.case.ranks

    def as_json(self) -> dict[str, object]:
        return {
            "config": self.config,
            "case": asdict(self.case),
            "ratio": self.ratio,
            "over_strict_serial": self.over_serial(SerialLoop.STRICT),
            "over_async_serial": self.over_serial(SerialLoop.ASYNC),
            "readings": [
                {
                    **asdict(reading),
                    "range_ms": list(reading.range_ms),
                    "samples_per_s": reading.samples_per_s(self.samples),
                }
                for reading in self.readings
            ],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Comparison:
        """Read what `as_json` wrote."""
        readings = tuple(
            LabReading(
                seen["system"],
                seen["pipeline"],
                seen["step_ms"],
                tuple(seen["readings_ms"]),
                seen["parts_ms"],
            )
            for seen in given["readings"]
        )
        return cls(given["config"], PipelineCase(**given["case"]), readings)


def joined_parts(parts: Sequence[Comparison]) -> list[Comparison]:
    """One comparison of each configuration, from runs that each did a part."""
    found: dict[str, Comparison] = {}
    for part in parts:
        before = found.get(part.config)
        seen = part.readings if before is None else (*before.readings, *part.readings)
        found[part.config] = replace(part, readings=seen)
    return list(found.values())


def _fastest(readings: Sequence[LabReading]) -> LabReading | None:
    return min(readings, key=lambda reading: reading.step_ms, default=None)


def lab_case(config: str, steps: int = TIMED_STEPS) -> PipelineCase:
    """The case of a configuration, with `steps` steps on the clock."""
    if config not in CONFIGS:
        raise ConfigError(f"unknown configuration {config!r}; use {', '.join(CONFIGS)}")
    if steps < 1:
        raise ConfigError(f"steps is {steps}; put at least 1 on the clock")
    if config == "paper":
        return replace(case_of(config), steps=WARM_STEPS + steps + LAST_STEPS)
    case = case_of(f"lab_{config.lower()}")
    more = steps - TIMED_STEPS
    return replace(case, steps=case.steps + more, distinct=case.distinct + more)


def lab_variants(
    case: PipelineCase, plans: Sequence[str], forms: Sequence[str], micro_batches: Sequence[int]
) -> list[Variant]:
    """Our runs: each plan in each form, with each number of micro-batches.

    `serial` runs as strict and as async loop.
    """
    check_names(plans, forms)
    sized = [
        replace(case, micro_batches=number) for number in micro_batches
    ]  # refuses what cannot be
    found = [variant_of(of, plan, form) for plan, form, of in product(plans, forms, sized)]
    serial = [variant for variant in found if variant.serial]
    return [*serial_loops(case, serial), *(variant for variant in found if not variant.serial)]


def time_nestpipe(case: PipelineCase, variants: Sequence[Variant]) -> list[LabReading]:
    """Every variant in turns; each reading is a round's, from update to update."""
    timed = case.steps - WARM_STEPS - LAST_STEPS
    with tempfile.TemporaryDirectory(prefix="nestpipe-lab-") as name:
        folder = Path(name)
        measure_rounds(case, variants, folder, hosts=False)
        return [_reading(v, read_rounds(folder, case, 0, v), timed) for v in variants]


def _reading(variant: Variant, rounds: Sequence[Trace], timed: int) -> LabReading:
    steps_ms = tuple(timed_step(trace, WARM_STEPS, timed) for trace in rounds)
    seen, step_ms = steady(rounds), median(steps_ms)
    parts = {"compute": seen.compute, "lookup": seen.lookup, "exchange": seen.exchange}
    early = ", rows early" if variant.speculative_rows else ""
    third = ", 3 buffers" if variant.buffers == 3 else ""
    plan = f"{variant.plan} {variant.loop}" if variant.serial else variant.plan
    return LabReading(
        NESTPIPE,
        f"{plan} {variant.retrieval}, {variant.micro_batches} micro-batches{early}{third}",
        step_ms,
        steps_ms,
        {name: part * step_ms for name, part in {**parts, "idle": seen.idle}.items()},
    )


def timed_step(trace: Trace, warm: int, timed: int) -> float:
    """The mean of `timed` steps after `warm` ones, from update to update of the last rank."""
    ends: dict[int, float] = defaultdict(float)
    for span in trace.spans:
        if span.kind == Kind.UPDATE:
            ends[span.batch] = max(ends[span.batch], span.end)
    return (ends[warm + timed - 1] - ends[warm - 1]) / timed


def time_torchrec(peer: Peer, case: PipelineCase, rounds: int, steps: int) -> list[LabReading]:
    """Every pipeline of TorchRec with every share of its cache; those that ran before a failure.

    The failure itself is on standard error, where the ranks write.
    """
    with tempfile.TemporaryDirectory(prefix="nestpipe-lab-") as name:
        folder = Path(name)
        PeerTask(case, peer.shares, rounds, steps).write(folder)
        command = [sys.executable, "-m", "nestpipe.bench.torchrec_lab", str(folder)]
        paths = [os.environ.get("PYTHONPATH", ""), str(peer.site)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # It talks on standard output, which may be ours for JSON.
        with subprocess.Popen(command, env=environment, stdout=sys.stderr) as ranks:
            try:
                ranks.wait(peer.limit_s)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"TorchRec took more than {peer.limit_s:.0f} s; stopped\n")
                ranks.terminate()  # its launcher then ends the ranks
        found = read_readings(folder)
    return [
        LabReading(
            TORCHREC,
            f"{seen.pipeline}, cache {100 * seen.share:g} %",
            median(seen.rounds_ms),
            seen.rounds_ms,
            {},
        )
        for seen in found
    ]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the plan table: a plan, or TorchRec, in its fastest form on each workload."""

    name: str
    readings: Mapping[str, LabReading]
    """By workload; without those that it did not run on."""

    def as_json(self) -> dict[str, object]:
        found = {
            config: {
                "step_ms": seen.step_ms,
                "range_ms": list(seen.range_ms),
                "pipeline": seen.pipeline,
            }
            for config, seen in self.readings.items()
        }
        return {"name": self.name, "workloads": found}


def table_variants(case: PipelineCase, forms: Sequence[str]) -> list[Variant]:
    """The runs behind the plan table: overlapping plans in the given forms, baselines in these
    and in those that copy rows.

    `serial` has no use for micro-batches, so it has one.
    """
    plans = [plan for plan in EXACT_PLANS if plan != "serial"]
    return [
        *lab_variants(case, ["serial"], list(dict.fromkeys((*BASELINE_FORMS, *forms))), [1]),
        *lab_variants(case, plans, forms, [case.micro_batches]),
    ]


def plan_table(results: Sequence[Comparison]) -> list[TableRow]:
    """The fastest form of each plan and of TorchRec, by the median, on every workload."""
    starts = {
        **{f"{loop} serial": (NESTPIPE, f"serial {loop} ") for loop in SerialLoop},
        **{plan: (NESTPIPE, f"{plan} ") for plan in EXACT_PLANS if plan != "serial"},
        TORCHREC: (TORCHREC, ""),
    }
    rows: list[TableRow] = []
    for name, (system, start) in starts.items():
        found: dict[str, LabReading] = {}
        for result in results:
            ran = [
                r for r in result.readings if r.system == system and r.pipeline.startswith(start)
            ]
            if fastest := _fastest(ran):
                found[result.config] = fastest
        rows.append(TableRow(name, found))
    return rows
