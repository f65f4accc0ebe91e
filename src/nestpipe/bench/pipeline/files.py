"""What `nestpipe bench pipeline` and its ranks tell each other, as files in one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nestpipe.bench.pipeline.cases import PipelineCase, Variant
from nestpipe.trace import Trace, read_chrome

NET_CPU = "net_cpu_ms"
"""A fact of a trace: processor time of rank 0 in collectives, all batches together."""


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
    """Say what was done."""
    done = {"passes": list(passes), "stored_bytes": stored_bytes}
    (folder / "points.json").write_text(json.dumps(done))


def read_points(folder: Path) -> Points:
    """What was done."""
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
