"""`nestpipe bench pipeline`: start the ranks of a workload, and read what they measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from nestpipe.bench.machines import launch_on_hosts, launch_on_one_gpu, shaped_hosts
from nestpipe.bench.pipeline.cases import PipelineCase, Variant
from nestpipe.bench.pipeline.report import PointReport, report
from nestpipe.comm import launch
from nestpipe.errors import ConfigError, RunError
from nestpipe.schedule import Lane
from nestpipe.sim.replay import Sharing
from nestpipe.trace import Trace, read_chrome

MOVE_DRAW = 0.115
"""What a rank's rows take of a GPU that moves them, in one direction, while others compute on it.

Measured by itself on an H200, not in a pipeline: four ranks that read and wrote rows without end
made the dense compute of all four take 18.7 instead of 15.2 ms, which is 1 + 2 x 0.115 times as
long (docs/experiments/2026-11-16-bulk-copies.md).
"""


def run_pipeline(
    case: PipelineCase, variants: Sequence[Variant], folder: Path, *, hosts: bool
) -> list[PointReport]:
    """Measure every variant, and predict its step from the traces of `serial`."""
    sharing = sharing_of(case, hosts=hosts)
    done = measure_rounds(case, variants, folder, hosts=hosts)
    return [
        report(case, passes, sharing, {v: read_rounds(folder, case, point, v) for v in variants})
        for point, passes in enumerate(done.passes)
    ]


def measure_rounds(
    case: PipelineCase, variants: Sequence[Variant], folder: Path, *, hosts: bool
) -> Points:
    """Start the ranks and let them run every variant; their traces are then in the folder."""
    if case.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"case {case.name!r} needs a GPU and torch finds none; use --device cpu")
    write_task(folder, case, variants)
    command = [sys.executable, "-m", "nestpipe.bench.pipeline.rank", str(folder)]
    status = launch_ranks(case, command, hosts=hosts)
    if status != 0:
        raise RunError(f"the benchmark ended with status {status}; see above")
    return read_points(folder)


def launch_ranks(case: PipelineCase, command: Sequence[str], *, hosts: bool) -> int:
    """Run a command on every rank of a case: hosts, ranks on one GPU, or plain processes."""
    if hosts:
        if case.device != "cpu":
            raise ConfigError("hosts have no GPU of their own; use --hosts with --device cpu")
        with shaped_hosts(case.ranks, case.rate) as made:
            return launch_on_hosts(made, command)
    if case.device == "cuda":
        return launch_on_one_gpu(case.ranks, command)
    return launch(case.ranks, command)


def sharing_of(case: PipelineCase, *, hosts: bool) -> Sharing:
    """What the ranks of a run compute with, and have to share."""
    everyone = (0,) * case.ranks
    if case.device == "cuda":
        # Routing is done in host memory.
        return Sharing(everyone, frozenset({Lane.COMPUTE}), move_draw=MOVE_DRAW)
    off_network = frozenset(Lane) - {Lane.NET}
    cores = len(os.sched_getaffinity(0))
    if hosts:  # each has one core, as `launch_on_hosts` gives them out
        return Sharing(tuple(rank % cores for rank in range(case.ranks)), off_network)
    return Sharing(everyone, off_network, capacity=cores)


# What the command and its ranks tell each other, as files in one folder.


@dataclass(frozen=True, slots=True)
class Points:
    """What the ranks did, one point for each amount of compute."""

    passes: tuple[int, ...]
    stored_bytes: int
    """Memory of rank 0's host store."""


def write_task(folder: Path, case: PipelineCase, variants: Sequence[Variant]) -> None:
    """Say what to do."""
    task = {"case": asdict(case), "variants": [asdict(variant) for variant in variants]}
    (folder / "task.json").write_text(json.dumps(task))


def read_task(folder: Path) -> tuple[PipelineCase, list[Variant]]:
    """What to do."""
    task = json.loads((folder / "task.json").read_text())
    return PipelineCase(**task["case"]), [Variant(**given) for given in task["variants"]]


def trace_file(folder: Path, point: int, variant: Variant, number: int, rank: int) -> Path:
    """Where a rank leaves the trace of a round."""
    return folder / f"{point}-{variant.name}-round{number}-rank{rank}.json"


def write_points(folder: Path, passes: Sequence[int], stored_bytes: int) -> None:
    """Write the amounts of compute that ran, for the command."""
    done = {"passes": list(passes), "stored_bytes": stored_bytes}
    (folder / "points.json").write_text(json.dumps(done))


def read_points(folder: Path) -> Points:
    """Read the amounts of compute that ran."""
    done = json.loads((folder / "points.json").read_text())
    return Points(tuple(done["passes"]), done["stored_bytes"])


def read_rounds(folder: Path, case: PipelineCase, point: int, variant: Variant) -> list[Trace]:
    """The rounds of one variant, each with the spans of all ranks."""
    return [
        joined(
            [
                read_chrome(trace_file(folder, point, variant, number, rank))
                for rank in range(case.ranks)
            ]
        )
        for number in range(1, case.rounds + 1)
    ]


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace of all ranks, from time zero."""
    begin = min(span.start for trace in traces for span in trace.spans)
    spans = (replace(s, start=s.start - begin, end=s.end - begin) for t in traces for s in t.spans)
    return Trace(tuple(sorted(spans, key=lambda s: (s.start, s.end))), traces[0].facts)
