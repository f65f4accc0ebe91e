#!/usr/bin/env python3
"""What each switch of an embedding step is worth: one is off at a time, in turns, on one store.

python tools/bench_switches.py --where cache --optimizer sgd --json out/switches.json

All variants train the same trainer, whose pool stays full, on other batches of the same cycle. A
cycle is longer than what the pool holds, so that every step misses as many rows as with fresh keys.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nestpipe.batch import Batch
from nestpipe.bench.embedding import (
    EmbeddingCase,
    PhaseLines,
    make_batches,
    make_trainer,
    store_rows,
)
from nestpipe.bench.pipeline_rank import Repeated
from nestpipe.embedding import slot_transfer
from nestpipe.kernels.rows import cuda as row_copies
from nestpipe.runtime import Lanes, cuda
from nestpipe.runtime.executor import EndedRun
from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Lane, Plan
from nestpipe.trace import Span, Trace
from nestpipe.trace.span import Fact
from nestpipe.train import ops, trainer
from nestpipe.train.trainer import Trainer

Figures = dict[str, dict[str, list[float]]]
"""Of each variant, by round: ms, rows read, rows written."""
Switch = tuple[object, str, object]
"""A module, the name of a switch there, and what it is where the switch is off."""


def _as_planned(plan: Plan) -> Plan:
    return plan


KEYS: Switch = (trainer, "with_separate_key_group", _as_planned)
STREAMS: Switch = (cuda, "ROW_LANES", frozenset[Lane]())
EACH: Switch = (slot_transfer, "EACH_WITH_ITS_TABLE", False)
BACKWARD: Switch = (ops, "BACKWARD_HERE", False)
VARIANTS: Mapping[str, tuple[Switch, ...]] = {
    "all on": (),
    "all off": (KEYS, STREAMS, EACH, BACKWARD),
    "union waits for rows": (KEYS,),
    "lanes of rows wait on the host": (STREAMS,),
    "keys sorted by table": (EACH,),
    "backward by autograd's thread": (BACKWARD,),
    "8 blocks": ((row_copies, "BLOCKS_ALONE", 8),),
    "32 blocks": ((row_copies, "BLOCKS_ALONE", 32),),
}
IN_HBM = ("all on", "all off", "union waits for rows", "backward by autograd's thread")
"""Those that matter where no row moves."""


class Untimed:
    """No op is traced: events around each would cost the host its time."""

    def begin(self) -> None:
        """Nothing is counted."""

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        return act

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        return EndedRun(0, lambda: Trace((), dict(facts)))

    def recent(self, batches: int) -> list[Span]:
        return []


@contextmanager
def switched_off(switches: Sequence[Switch]) -> Iterator[None]:
    """Inside, these are off."""
    with ExitStack() as inside:
        for module, name, value in switches:
            inside.enter_context(patch.object(module, name, value))
        yield


class Turns:
    """One trainer that goes on and on through a cycle of batches."""

    def __init__(self, trained: Trainer, batches: list[Batch]) -> None:
        self._trainer, self._batches, self._at = trained, batches, 0
        self._lanes: dict[str, Lanes] = {}
        trained.spans = Untimed()

    def go(self, variant: str, skip: int, steps: int) -> tuple[float, float, float]:
        """Mean ms of a step, rows read and rows written; the first steps do not count."""
        seen: list[tuple[float, int, int]] = []
        with switched_off(VARIANTS[variant]):
            self._trainer.plan = self._trainer._checked_plan()
            if variant not in self._lanes:  # with streams that keep their memory
                self._lanes[variant] = self._trainer._make_lanes()
            self._trainer.lanes = self._lanes[variant]
            self._fit(skip + steps, lambda r: seen.append(_moment(r)))
        counted = seen[skip - 1 :]
        step_ms = (counted[-1][0] - counted[0][0]) * 1e3 / steps
        read, written = (statistics.mean(of[i] for of in counted[1:]) for i in (1, 2))
        return step_ms, read, written

    def _fit(self, steps: int, note: Callable[[Any], None]) -> None:
        batches = self._batches[self._at :] + self._batches[: self._at]
        self._at = (self._at + steps) % len(batches)
        self._trainer.fit(Repeated(batches, steps), steps=steps, on_step=note)  # type: ignore[arg-type]

    def trace(self, target: Path) -> None:
        """Some steps under torch's profiler, host and device, for a viewer of traces."""
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler:
            self._fit(12, lambda report: None)
        profiler.export_chrome_trace(str(target))


def _moment(report: Any) -> tuple[float, int, int]:
    return time.perf_counter(), report.rows_read, report.rows_written


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", default="cache", choices=("hbm", "cache"))
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--rows", type=int, default=0, help="different keys of a table")
    parser.add_argument("--tables", type=int, default=10)
    parser.add_argument("--samples", type=int, default=104_857)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--buffers", type=int, default=0, help="batches that the pool holds")
    parser.add_argument("--distinct", type=int, default=0, help="batches of the cycle")
    parser.add_argument("--warm", type=int, default=72, help="steps until the pool is full")
    parser.add_argument("--skip", type=int, default=12, help="steps before each reading")
    parser.add_argument("--steps", type=int, default=40, help="steps of a reading")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", default="", help="some of them, by commas; default: all")
    parser.add_argument("--device", default="cuda", help="cpu: only to try this tool")
    parser.add_argument("--trace", type=Path, help="write a few steps there, as .json.gz")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


def main() -> None:
    """Print a line a variant and round, then medians; write them."""
    given = parse()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; run this on a machine that has one")
    case = EmbeddingCase(
        device=given.device,
        where=given.where,
        optimizer=given.optimizer,
        rows=given.rows,
        tables=given.tables,
        samples=given.samples,
        dim=given.dim,
        buffers=given.buffers,
        distinct=given.distinct or (166 if given.where == "cache" else 6),
    )
    names = given.variants.split(",") if given.variants else list(VARIANTS)
    if given.where == "hbm" and not given.variants:
        names = list(IN_HBM)
    found = compare(case, names, given)
    for name, of in found.items():
        least, most = min(of["ms"]), max(of["ms"])
        middle = statistics.median(of["ms"])
        sys.stdout.write(f"{name:32} {middle:6.2f} ms ({least:.2f} to {most:.2f})\n")


def keep(target: Path | None, case: EmbeddingCase, found: Figures) -> None:
    """Write what there is: a call that is stopped leaves that."""
    if target is not None:
        about = {"case": case.work, "rows": case.rows, "distinct": case.distinct}
        target.write_text(json.dumps({**about, "variants": found}))


def compare(case: EmbeddingCase, names: Sequence[str], given: argparse.Namespace) -> Figures:
    """Rounds of all variants in turns."""
    found: Figures = {name: {"ms": list[float](), "read": [], "written": []} for name in names}
    tell, batches = PhaseLines(case, "switches"), make_batches(case)
    tell(f"{len(batches)} batches drawn")
    with closing(make_trainer(case)) as trained, patch.object(trainer, "KEEP_BATCHES", 0):
        if case.where != "hbm":
            tell(f"{store_rows(trained, batches):,} rows stored")
        turns = Turns(trained, batches)
        turns.go(names[0], given.skip, given.warm)
        tell("warm")
        for number in range(given.rounds):
            for name in names:
                ms, read, written = turns.go(name, given.skip, given.steps)
                for key, value in (("ms", ms), ("read", read), ("written", written)):
                    found[name][key].append(value)
                keep(given.json, case, found)
                tell(f"round {number}: {name}: {ms:.2f} ms, {read:,.0f} in, {written:,.0f} out")
        if given.trace is not None:
            turns.trace(given.trace)
    return found


if __name__ == "__main__":
    main()
