"""NestPipe beside TorchRec on one GPU: the lab configurations A to D, timed alike.

TorchRec is timed by its own script, which is not part of NestPipe, with packages from a folder of
their own. `tools/lab.py` brings both to the machine and calls this.
"""

from __future__ import annotations

import json
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

from nestpipe.bench.one_gpu import QUEUES, mps_daemon
from nestpipe.bench.pipeline.cases import (
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
from nestpipe.bench.pipeline.files import read_rounds
from nestpipe.bench.pipeline.launch import measure_rounds
from nestpipe.bench.pipeline.report import steady
from nestpipe.errors import ConfigError
from nestpipe.schedule import Kind
from nestpipe.trace import Trace

CONFIGS = ("A", "B", "C", "D")
TORCHREC, NESTPIPE = "TorchRec", "NestPipe"


@dataclass(frozen=True, slots=True)
class Reading:
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
    script: Path
    """The script that times it."""
    kernels: str = "fused_uvm_caching"
    """Where its table is, by FBGEMM's names: here on the host, behind a cache on the device."""
    queues: str = QUEUES
    """Hardware queues, as for NestPipe; empty: what CUDA takes by itself."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both systems on one configuration."""

    config: str
    case: PipelineCase
    readings: tuple[Reading, ...]

    def best(self, system: str) -> Reading | None:
        """The fastest of a system; of ours only what overlaps, `serial` being no contender."""
        found = [r for r in self.readings if r.system == system and "serial" not in r.pipeline]
        return _fastest(found)

    def serial(self, loop: SerialLoop) -> Reading | None:
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


def _fastest(readings: Sequence[Reading]) -> Reading | None:
    return min(readings, key=lambda reading: reading.step_ms, default=None)


def lab_case(config: str, steps: int = TIMED_STEPS) -> PipelineCase:
    """The case of configuration A, B, C or D, with so many steps on the clock."""
    if config not in CONFIGS:
        raise ConfigError(f"unknown configuration {config!r}; use {', '.join(CONFIGS)}")
    if steps < 1:
        raise ConfigError(f"steps is {steps}; put at least 1 on the clock")
    case = case_of(f"lab_{config.lower()}")
    more = steps - TIMED_STEPS
    return replace(case, steps=case.steps + more, distinct=case.distinct + more)


def lab_variants(
    case: PipelineCase, plans: Sequence[str], forms: Sequence[str], micros: Sequence[int]
) -> list[Variant]:
    """Our runs: each plan in each form, with each number of micro-batches.

    `serial` runs as strict and as async loop.
    """
    check_names(plans, forms)
    sized = [replace(case, micros=number) for number in micros]  # refuses what cannot be
    found = [variant_of(of, plan, form) for plan, form, of in product(plans, forms, sized)]
    serial = [variant for variant in found if variant.serial]
    return [*serial_loops(case, serial), *(variant for variant in found if not variant.serial)]


def time_nestpipe(case: PipelineCase, variants: Sequence[Variant]) -> list[Reading]:
    """Every variant in turns; each reading is a round's, from update to update."""
    timed = case.steps - WARM_STEPS - LAST_STEPS
    with tempfile.TemporaryDirectory(prefix="nestpipe-lab-") as name:
        folder = Path(name)
        measure_rounds(case, variants, folder, hosts=False)
        return [_reading(v, read_rounds(folder, case, 0, v), timed) for v in variants]


def _reading(variant: Variant, rounds: Sequence[Trace], timed: int) -> Reading:
    steps_ms = tuple(timed_step(trace, WARM_STEPS, timed) for trace in rounds)
    seen, step_ms = steady(rounds), median(steps_ms)
    parts = {"compute": seen.compute, "lookup": seen.lookup, "exchange": seen.exchange}
    early = ", rows early" if variant.early else ""
    third = ", 3 buffers" if variant.buffers == 3 else ""
    plan = f"{variant.plan} {variant.loop}" if variant.serial else variant.plan
    return Reading(
        NESTPIPE,
        f"{plan} {variant.retrieval}, {variant.micros} micro-batches{early}{third}",
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


def time_torchrec(peer: Peer, config: str, steps: int) -> list[tuple[str, float]]:
    """One reading of each of TorchRec's pipelines; none where it failed, which it says itself."""
    with tempfile.TemporaryDirectory(prefix="nestpipe-lab-") as folder, mps_daemon():
        out = Path(folder) / "readings.json"
        command = [sys.executable, str(peer.script), "--config", config, "--json", str(out)]
        command += ["--kernels", peer.kernels, "--steps", str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(peer.site)}
        if peer.queues:
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = peer.queues
        # It talks on standard output, which may be ours for JSON.
        subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        lines = out.read_text().splitlines() if out.exists() else []
    seen = [json.loads(line) for line in lines]
    return [(f"{reading['pipeline']}, {reading['kernel']}", reading["step_ms"]) for reading in seen]


def gathered(readings: Sequence[tuple[str, float]]) -> list[Reading]:
    """Readings of the same pipeline of TorchRec, together."""
    by_pipeline: dict[str, list[float]] = defaultdict(list)
    for pipeline, step_ms in readings:
        by_pipeline[pipeline].append(step_ms)
    return [Reading(TORCHREC, name, median(ms), tuple(ms), {}) for name, ms in by_pipeline.items()]
