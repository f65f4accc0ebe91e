#!/usr/bin/env python3
"""Where the time of a step goes when rows lie on the host behind a pool: per op, on host and GPU.

python tools/profile_cache.py --optimizer sgd --rows 8000000 --json out/cache.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from nestpipe.bench.embedding import (
    EmbeddingCase,
    PhaseLines,
    make_batches,
    make_trainer,
    store_rows,
)
from nestpipe.bench.pipeline_rank import Repeated
from nestpipe.schedule import Kind, Op

Act = Callable[[Op], None]


class OpTimes:
    """Host time of every act, and the time between two events around what it puts on a stream."""

    def __init__(self, first: int, last: int) -> None:
        self._batches = range(first, last)
        self._lock = threading.Lock()
        self.host_ms: dict[Kind, list[float]] = defaultdict(list)
        self._events: dict[Kind, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        self._events = defaultdict(list)

    def around(self, work: dict[Kind, Act]) -> dict[Kind, Act]:
        """The same work, timed."""
        return {kind: self._timed(kind, act) for kind, act in work.items()}

    def _timed(self, kind: Kind, act: Act) -> Act:
        def call(op: Op) -> None:
            if op.batch not in self._batches:
                act(op)
                return
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            begin = time.perf_counter()
            act(op)
            passed_ms = (time.perf_counter() - begin) * 1e3
            events[1].record()
            with self._lock:
                self.host_ms[kind].append(passed_ms)
                self._events[kind].append((events[0], events[1]))

        return call

    def table(self) -> list[dict[str, float | str]]:
        """One row an op: medians of both clocks."""
        torch.cuda.synchronize()
        return [
            {
                "op": str(kind),
                "host_ms": statistics.median(times),
                "host_most_ms": max(times),
                "stream_ms": statistics.median(a.elapsed_time(b) for a, b in self._events[kind]),
            }
            for kind, times in self.host_ms.items()
        ]


def kernels_of(profiler: torch.profiler.profile, steps: int) -> list[dict[str, float | str]]:
    """Kernels and copies by their time on the device, ms a step."""
    found: list[dict[str, float | str]] = [
        {
            "kernel": event.key[:70],
            "ms": event.self_device_time_total / 1e3 / steps,
            "count": event.count / steps,
        }
        for event in profiler.key_averages()
        if event.self_device_time_total > 0 and "cuda" in str(event.device_type).lower()
    ]
    return sorted(found, key=lambda row: -float(row["ms"]))[:16]


def main() -> None:
    """Print and write both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--rows", type=int, default=8_000_000, help="different keys of a table")
    parser.add_argument("--buffers", type=int, default=3, help="batches that the pool holds")
    parser.add_argument("--warm", type=int, default=48, help="steps until the pool is full")
    parser.add_argument("--steps", type=int, default=30, help="steps on the clock, and again")
    parser.add_argument("--blocks", type=int, help="blocks of a row copy")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU; run this on a machine that has one")
    if given.blocks:
        from nestpipe.kernels.rows import cuda as row_copies

        row_copies.BLOCKS_ALONE = given.blocks
    case = EmbeddingCase(
        where="cache",
        optimizer=given.optimizer,
        rows=given.rows,
        buffers=given.buffers,
        warm=given.warm,
        steps=given.steps,
        rounds=2,
    )
    figures = profile(case)
    for row in [*figures["ops"], *figures["kernels"]]:
        words = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        sys.stdout.write("  ".join(words) + "\n")
    sys.stdout.write(
        f"{case.work}: {figures['step_ms']:.2f} ms a step, {figures['rows_read']:,.0f} rows read "
        f"and {figures['rows_written']:,.0f} written\n"
    )
    if given.json is not None:
        given.json.write_text(json.dumps(figures))


def profile(case: EmbeddingCase) -> dict[str, Any]:
    """Steps without a timer first, then timed ones, then some under torch's profiler."""
    tell, batches = PhaseLines(case, "profile"), make_batches(case)
    tell(f"{len(batches)} batches drawn")
    timed = OpTimes(case.warm + case.steps, case.warm + 2 * case.steps)
    reports: list[tuple[float, int, int]] = []

    def note(report: object) -> None:
        reports.append((time.perf_counter(), report.rows_read, report.rows_written))  # type: ignore[attr-defined]

    with closing(make_trainer(case)) as trainer:
        tell(f"{store_rows(trainer, batches):,} rows stored")
        trainer.around = timed.around  # type: ignore[assignment]
        first = case.warm + 2 * case.steps + 4
        trainer.fit(Repeated(batches, first), steps=first, on_step=note)  # type: ignore[arg-type]
        tell("steps done")
        ops = timed.table()
        rest, profiled = Repeated(batches[first:], 12), min(12, len(batches) - first)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            if profiled > 0:
                trainer.fit(rest, steps=profiled)  # type: ignore[arg-type]
        kernels = kernels_of(profiler, max(1, profiled))
    tell("closed")
    plain = reports[case.warm - 1 : case.warm + case.steps]
    step_ms = (plain[-1][0] - plain[0][0]) * 1e3 / case.steps
    return {
        "step_ms": step_ms,
        "rows_read": statistics.mean(read for _, read, _ in plain),
        "rows_written": statistics.mean(written for *_, written in plain),
        "ops": ops,
        "kernels": kernels,
    }


if __name__ == "__main__":
    main()
