"""Counts what a run does and writes it down now and then, from a thread of its own.

A step costs training some additions. All else happens in the recorder's thread, which asks only
for what is known already and rests `REST` times as long as it worked: it cannot take more than that
share of one core from a run.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nestpipe.dashboard.record import Line, RecordWriter, file_of
from nestpipe.trace import USEFUL, Span, exposure, lane_busy

log = logging.getLogger("nestpipe.train")

EVERY_S = 0.5
"""Between two points, at least."""
LANES_EVERY_S = 4.0
"""Between two drawings of lanes, at least."""
REST = 200
"""The thread rests so many times as long as it has worked: it takes 0.5 % of a core."""
RECENT = 8
"""Batches whose spans are looked at; one that is in flight does not count."""
DRAWN = 3
"""Batches of a drawing of lanes, and at most ..."""
MOST_SPANS = 240
"""... so many ops."""
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"


class FinishedStep(Protocol):
    """As much of a step's report as is recorded."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def rows_read(self) -> int: ...
    @property
    def rows_refreshed(self) -> int: ...
    @property
    def rows_written(self) -> int: ...
    @property
    def keys_asked(self) -> int: ...
    @property
    def faults(self) -> int: ...


class Probe(Protocol):
    """What a rank knows of itself without waiting for anybody; the recorder's thread asks it."""

    def spans(self, batches: int) -> Sequence[Span]:
        """Ops of the newest batches that have ended."""
        ...

    def counters(self) -> Mapping[str, float]:
        """More totals since this process began, such as `bytes_sent`."""
        ...

    def gauges(self) -> Mapping[str, Any]:
        """What is so now: rows of each table, slots of the pool."""
        ...


COUNTED = ("samples", "rows_read", "rows_refreshed", "rows_written", "keys_asked", "faults")


@dataclass(slots=True)
class Totals:
    """Sums over all steps, and over the batches whose spans were looked at."""

    of_steps: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("steps", "loss", "finite", *COUNTED), 0)
    )
    sampled: dict[str, float] = field(
        default_factory=lambda: {"batches": 0, "step_ms": 0.0, "compute_ms": 0.0}
    )
    by_kind: dict[str, dict[str, float]] = field(
        default_factory=lambda: {"hidden_ms": {}, "exposed_ms": {}, "lane_ms": {}}
    )

    def count(self, report: FinishedStep) -> None:
        """Add a step."""
        totals = self.of_steps
        totals["steps"] += 1
        if math.isfinite(report.loss):
            totals["loss"] += report.loss
            totals["finite"] += 1
        for name in COUNTED:
            totals[name] += getattr(report, name)

    def look(self, spans: Sequence[Span], start: float, end: float, batches: int) -> None:
        """Add what ran from one moment to another."""
        split = exposure(spans, start, end)
        self.sampled["batches"] += batches
        self.sampled["step_ms"] += split.total_ms
        self.sampled["compute_ms"] += split.compute_ms
        hidden = {kind: split.hidden(kind) for kind in split.busy if kind not in USEFUL}
        found = {
            "hidden_ms": hidden,
            "exposed_ms": split.exposed,
            "lane_ms": lane_busy(spans, start, end),
        }
        for name, of_kinds in found.items():
            sums = self.by_kind[name]
            for kind, ms in of_kinds.items():
                sums[str(kind)] = sums.get(str(kind), 0.0) + ms


class RunRecorder:
    """The record of one rank of a run, from its first step here to its end."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        probe: Probe,
        about: Mapping[str, Any],
        *,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = RecordWriter(file_of(folder, rank), {**about, "rank": rank}, first_step)
        self._probe, self._clock = probe, clock
        self._totals, self._lock = Totals(), threading.Lock()
        self._step, self._low, self._high = first_step, math.inf, -math.inf
        self._began = clock()
        self._drawn_at = -math.inf
        self._looked_until = -1
        self._written_steps = 0.0
        self._before = self._resumed()
        self._stopping, self._writing = threading.Event(), threading.Lock()
        self._failed = False
        self.spent_s = 0.0
        """Processor time of the thread."""
        self._thread = threading.Thread(target=self._work, name="run record", daemon=True)

    def _resumed(self) -> Mapping[str, float]:
        """Totals of the run before it went on here."""
        last = self._writer.last
        if last is None:
            return {}
        for group in (self._totals.of_steps, self._totals.sampled):
            group.update({name: last.get(name, 0) for name in group})
        self._written_steps = self._totals.of_steps["steps"]
        for name, sums in self._totals.by_kind.items():
            sums.update(last.get(name, {}))
        counters = last.get("counters", {})
        return {"seconds": last.get("seconds", 0.0), **counters}

    def start(self) -> None:
        """Let the thread run."""
        self._thread.start()

    def on_step(self, report: FinishedStep) -> None:
        """Count a step."""
        with self._lock:
            self._totals.count(report)
            self._step = report.step
            if report.loss < self._low:
                self._low = report.loss
            if report.loss > self._high:
                self._high = report.loss

    def on_evaluation(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Write down an evaluation."""
        self._write("evaluation", step, {"split": split, "metrics": dict(metrics)})

    def _work(self) -> None:
        rest = EVERY_S / 2
        while not self._stopping.wait(rest) and not self._failed:
            began = time.thread_time()
            self.tick()
            spent_s = time.thread_time() - began
            self.spent_s += spent_s
            rest = max(EVERY_S, REST * spent_s)

    def tick(self) -> None:
        """Write a point, where steps have been done since the one before."""
        with self._lock:
            step, steps = self._step, self._totals.of_steps["steps"]
            of_steps = dict(self._totals.of_steps)
            low, high = self._low, self._high
            self._low, self._high = math.inf, -math.inf
        if steps == self._written_steps:
            self._guarded(self._writer.beat)
            return
        self._written_steps = steps
        self._look(step)
        counters = self._since(self._probe.counters())
        seconds = self._before.get("seconds", 0.0) + self._clock() - self._began
        point: Line = {"seconds": seconds, "low": low, "high": high, **of_steps}
        point |= {**self._totals.sampled, **self._totals.by_kind}
        self._write("point", step, {**point, "counters": counters, **self._probe.gauges()})

    def _since(self, counters: Mapping[str, float]) -> dict[str, float]:
        return {name: value + self._before.get(name, 0) for name, value in counters.items()}

    def _look(self, step: int) -> None:
        """See how the newest batches overlapped, unless they were seen before."""
        spans = self._probe.spans(RECENT)
        ends: dict[int, float] = {}
        for span in spans:
            if span.kind == "update":
                ends[span.batch] = max(span.end, ends.get(span.batch, span.end))
        # Of the oldest batch ops may be missing that ran beside it.
        batches = sorted(ends)[1:]
        if len(batches) < 2 or batches[-1] == self._looked_until:
            return
        self._looked_until = batches[-1]
        start, end = ends[batches[0]], ends[batches[-1]]
        if not 0 <= start < end:
            return
        self._totals.look(spans, start, end, len(batches) - 1)
        if self._clock() - self._drawn_at >= LANES_EVERY_S:
            self._drawn_at = self._clock()
            self._draw(step, spans, ends[batches[-min(DRAWN + 1, len(batches))]], end)

    def _draw(self, step: int, spans: Sequence[Span], start: float, end: float) -> None:
        seen = sorted((s for s in spans if s.end > start and s.start < end), key=lambda s: s.start)
        drawn = [
            [str(s.kind), str(s.lane), s.batch, s.micro, *(round(t - start, 4) for t in moments)]
            for s in seen[-MOST_SPANS:]
            for moments in [(s.start, s.end)]
        ]
        self._write("lanes", step, {"ms": round(end - start, 4), "spans": drawn})

    def _write(self, kind: str, step: int, about: Mapping[str, Any]) -> None:
        self._guarded(lambda: self._writer.add(kind, step, about))

    def _guarded(self, act: Callable[[], None]) -> None:
        """A record that cannot be written must not end a run."""
        if self._failed:
            return
        try:
            with self._writing:
                act()
        except (OSError, ValueError) as error:
            self._failed = True
            log.warning("the record of the run ends here: %s; training goes on", error)

    def close(self, status: str, sentence: str = "") -> None:
        """Write the last point and how the run ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.tick()
        self._write("end", self._step, {"status": status, "sentence": sentence})
