"""`nestpipe bench groups`: the same work in one dimension and in groups of ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from nestpipe.bench.pipeline.cases import PipelineCase
from nestpipe.bench.pipeline.launch import launch_ranks
from nestpipe.errors import ConfigError, RunError

WARM_STEPS, LAST_STEPS = 4, 4
"""Steps before and after those on the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVariant:
    """How ranks are grouped, and how groups keep together."""

    groups: int = 1
    merge: str = "exact"
    merge_every: int = 1

    @property
    def name(self) -> str:
        if self.groups == 1:
            return "one dimension"
        every = f", every {self.merge_every}" if self.merge == "averaged" else ""
        return f"{self.groups} groups, {self.merge}{every}"


@dataclass(frozen=True, slots=True)
class GroupReading:
    """What one variant took and sent."""

    variant: GroupVariant
    step_ms: float
    """Median of the rounds' mean steps."""
    rounds_ms: tuple[float, ...]
    sent_mb: float
    """Sent by a rank to others in a step, the mean of all ranks."""


def group_variants(groups: int, intervals: Sequence[int]) -> list[GroupVariant]:
    """One dimension, exact groups, and averaged ones with each interval."""
    averaged = [
        GroupVariant(groups=groups, merge="averaged", merge_every=every) for every in intervals
    ]
    return [GroupVariant(), GroupVariant(groups=groups), *averaged]


def timed_steps(variants: Sequence[GroupVariant]) -> int:
    """Steps on the clock: at least 16, and whole intervals of every variant."""
    longest = max(variant.merge_every for variant in variants)
    if any(longest % variant.merge_every for variant in variants):
        raise ConfigError(
            f"intervals are {', '.join(str(v.merge_every) for v in variants[2:])}; use such that "
            "divide the longest, so that all are timed over whole intervals"
        )
    return longest * max(1, -(-16 // longest))


def measure_groups(
    case: PipelineCase, variants: Sequence[GroupVariant], *, hosts: bool
) -> list[GroupReading]:
    """Run all variants in turns, with the plan `nested`."""
    timed = timed_steps(variants)
    with tempfile.TemporaryDirectory(prefix="nestpipe-groups-") as name:
        folder = Path(name)
        task = {
            "case": asdict(case),
            "variants": [asdict(variant) for variant in variants],
            "timed": timed,
        }
        (folder / "task.json").write_text(json.dumps(task))
        command = [sys.executable, "-m", "nestpipe.bench.groups.rank", str(folder)]
        status = launch_ranks(case, command, hosts=hosts)
        if status != 0:
            raise RunError(f"the benchmark ended with status {status}; see above")
        found = json.loads((folder / "readings.json").read_text())
    return [
        GroupReading(variant, median(of["ms"]), tuple(of["ms"]), median(of["mb"]))
        for variant, of in zip(variants, found, strict=True)
    ]
