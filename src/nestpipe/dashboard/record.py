"""The record of a run: one file of JSON lines for each rank, bounded however long the run is.

The first line says what runs. A `point` holds totals since the run began, so that any two of them
give exact means of what lies between: a record that is made coarser loses resolution and no truth.
Beside points there are `lanes` (when the ops of a few batches ran), evaluations, choices of an
adaptive run, and the end.

`RunRecorder` writes it. A step costs training some additions. All else happens in the recorder's
thread, which asks only for what is known already and rests `REST` times as long as it worked: it
cannot take more than that share of one core from a run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nestpipe.errors import ConfigError, ParseError
from nestpipe.trace import USEFUL, Span, exposure, lane_busy

VERSION = 1
FOLDER = "record"
"""The folder of the record inside that of a run."""
MOST_POINTS, MOST_LANES, MOST_EVALUATIONS, MOST_CHOICES = 2048, 48, 1024, 256
"""Lines of each kind in a file; with one more, as many stay as `KEPT` says."""
KEPT = {"point": 1024, "lanes": 12, "evaluation": 512, "choice": 128}
MOST = {
    "point": MOST_POINTS,
    "lanes": MOST_LANES,
    "evaluation": MOST_EVALUATIONS,
    "choice": MOST_CHOICES,
}
MOST_RESUMED = 32
"""Steps remembered from which a run went on."""
Line = dict[str, Any]
T = TypeVar("T")


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank writes its record."""
    return folder / f"rank-{rank:05d}.jsonl"


@dataclass(slots=True)
class RankRecord:
    """What one rank has written: lines of each kind, in the order of steps."""

    about: Line = field(default_factory=dict[str, Any])
    points: list[Line] = field(default_factory=list[Line])
    lanes: list[Line] = field(default_factory=list[Line])
    evaluations: list[Line] = field(default_factory=list[Line])
    choices: list[Line] = field(default_factory=list[Line])
    """Settings of an adaptive run, each from its step on."""
    end: Line | None = None
    damaged: int = 0
    """Lines that could not be read."""

    def add(self, line: Line) -> None:
        """Take a line of a known kind; others are of a later program and left out."""
        kind = line["kind"]
        if kind == "run":
            self.about, self.end = line, None
        elif kind == "end":
            self.end = line
        elif kind in MOST:
            self.of(kind).append(line)

    def of(self, kind: str) -> list[Line]:
        """The lines of a kind that there are many of."""
        found = {
            "point": self.points,
            "lanes": self.lanes,
            "evaluation": self.evaluations,
            "choice": self.choices,
        }
        return found[kind]

    def lines(self) -> Iterator[Line]:
        """All of it, as it is written."""
        yield self.about
        for kind in MOST:
            yield from self.of(kind)
        if self.end is not None:
            yield self.end

    def until(self, step: int) -> RankRecord:
        """The record up to that step, without an end; a run keeps its choices itself."""
        kept = RankRecord(self.about)
        for kind in set(MOST) - {"choice"}:
            kept.of(kind)[:] = [line for line in self.of(kind) if line["step"] <= step]
        return kept


def thinned(lines: Sequence[T], most: int, step_of: Callable[[T], float]) -> list[list[T]]:
    """Lines in at most `most` groups of equal steps; the last of a group stands for it.

    Steps of old and new lines are alike far apart afterwards, and no group is empty.
    """
    if len(lines) <= most:
        return [[line] for line in lines]
    first, last = step_of(lines[0]), step_of(lines[-1])
    width = (last - first) / most or 1.0
    groups: dict[int, list[T]] = {}
    for line in lines:
        place = min(most - 1, int((step_of(line) - first) / width))
        groups.setdefault(place, []).append(line)
    return list(groups.values())


def merged(points: Sequence[Line]) -> Line:
    """Neighbouring points as one: totals are those of the last, the lowest loss is of all."""
    lows = [point["low"] for point in points if point.get("low") is not None]
    highs = [point["high"] for point in points if point.get("high") is not None]
    extremes = {"low": min(lows, default=None), "high": max(highs, default=None)}
    return {**points[-1], **extremes}


def as_json(line: Mapping[str, Any]) -> str:
    """A line of the file; JSON has no nan and no inf."""
    return json.dumps(_finite(line), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        # Totals grow and their differences count, so they keep more digits than a figure needs.
        return float(f"{value:.12g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class RecordWriter:
    """Writes the record of one rank; a run that goes on adds to what was there by its step."""

    def __init__(self, file: Path, about: Mapping[str, Any], first_step: int = 0) -> None:
        self._file = file
        self.kept = self._earlier(first_step)
        """All that the file has."""
        before = self.kept.about
        again = {
            "started": before.get("started", round(time.time(), 3)),
            "generation": before.get("generation", 0),
            "resumed": _resumed(before, first_step) if self.kept.points else [],
        }
        self.kept.about = {"kind": "run", "version": VERSION, **again, **about}
        self._write_anew()

    def _earlier(self, first_step: int) -> RankRecord:
        """What the run had recorded before; another run's is put aside."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if not self._file.exists():
            return RankRecord()
        try:
            earlier = read_record(self._file).until(first_step)
        except ParseError:
            earlier = RankRecord()
        if not earlier.points:
            self._file.replace(self._file.with_name(f"{self._file.name}.old"))
            return RankRecord()
        return earlier

    def _write_anew(self) -> None:
        # A reader that was halfway through the file before sees that this is another one.
        self.kept.about["generation"] = self.kept.about.get("generation", 0) + 1
        hidden = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        hidden.write_text("".join(as_json(line) + "\n" for line in self.kept.lines()), "utf-8")
        hidden.replace(self._file)

    @property
    def last(self) -> Line | None:
        """The newest point."""
        return self.kept.points[-1] if self.kept.points else None

    def add(self, kind: str, step: int, about: Mapping[str, Any]) -> None:
        """Write one line; now and then the file is written anew, with half of its lines."""
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **about}
        self.kept.add(line)
        if kind in MOST and len(self.kept.of(kind)) > MOST[kind]:
            self._thin(kind)
        else:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(as_json(line) + "\n")

    def _thin(self, kind: str) -> None:
        groups = thinned(self.kept.of(kind), KEPT[kind], lambda line: line["step"])
        choose = merged if kind == "point" else lambda group: group[-1]
        self.kept.of(kind)[:] = [choose(group) for group in groups]
        self._write_anew()

    def beat(self) -> None:
        """Show that the process is alive, where there is nothing to write."""
        os.utime(self._file)


def _resumed(before: Line, first_step: int) -> list[int]:
    """The steps from which a run went on, this time included."""
    earlier = [step for step in before.get("resumed", []) if step < first_step]
    return [*earlier, first_step][-MOST_RESUMED:]


def read_record(file: Path) -> RankRecord:
    """The record of a rank; a last line that is being written is left out."""
    return RecordReader(file).read()


class RecordReader:
    """Reads a record again and again, each time only what is new."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._record, self._place, self._head = RankRecord(), 0, b""

    def read(self) -> RankRecord:
        """All that is known now."""
        try:
            with self.file.open("rb") as opened:
                head = opened.readline()
                if head != self._head:
                    self._record, self._place, self._head = RankRecord(), 0, head
                opened.seek(self._place)
                text = opened.read()
        except OSError as error:
            raise ConfigError(
                f"cannot read {str(self.file)!r}: {error.strerror}; check the path"
            ) from None
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        self._take(whole.splitlines())
        return self._record

    def _take(self, lines: Iterable[bytes]) -> None:
        for text in lines:
            line = _parsed(text)
            if not self._record.about:
                _check_first(self.file, line)
            if line is None:
                self._record.damaged += 1
            else:
                self._record.add(line)


def _parsed(text: bytes) -> Line | None:
    """A line that has what every line has; None: it is damaged."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    known = isinstance(line, dict) and isinstance(line.get("kind"), str)
    if not known or (line["kind"] in MOST and not isinstance(line.get("step"), int)):
        return None
    return line


def _check_first(file: Path, line: Line | None) -> None:
    if line is None or line["kind"] != "run":
        raise ParseError(f"{str(file)!r} is not the record of a run; name the folder of a run")
    if line.get("version") != VERSION:
        raise ParseError(
            f"{str(file)!r} is a record of version {line.get('version')!r}, and this program reads "
            f"{VERSION}; use the nestpipe that wrote it"
        )


log = logging.getLogger("nestpipe.train")

EVERY_S = 0.5
"""Shortest interval between two points."""
LANES_EVERY_S = 4.0
"""Shortest interval between two drawings of lanes."""
REST = 200
"""The thread sleeps this many times as long as it has worked: it takes 0.5 % of a core."""
RECENT = 8
"""Batches whose spans are looked at; one that is in flight does not count."""
DRAWN = 3
"""Batches in a drawing of lanes, and at most ..."""
MOST_SPANS = 240
"""... this many ops."""
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
    """The state of a rank, read without waiting; the recorder's thread calls it."""

    def spans(self, batches: int) -> Sequence[Span]:
        """Ops of the newest batches that have ended."""
        ...

    def counters(self) -> Mapping[str, float]:
        """More totals since this process began, such as `bytes_sent`."""
        ...

    def gauges(self) -> Mapping[str, Any]:
        """Gauges: rows of each table, slots of the pool."""
        ...

    def choices(self) -> Sequence[Mapping[str, Any]]:
        """Settings that an adaptive run has chosen so far, each with its `step`."""
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
        """Add the spans of an interval."""
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
        self._chosen = -1
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
        self._measure_overlap(step)
        counters = self._since(self._probe.counters())
        seconds = self._before.get("seconds", 0.0) + self._clock() - self._began
        point: Line = {"seconds": seconds, "low": low, "high": high, **of_steps}
        point |= {**self._totals.sampled, **self._totals.by_kind}
        self._write("point", step, {**point, "counters": counters, **self._probe.gauges()})
        for choice in self._probe.choices():
            if choice["step"] > self._chosen:
                self._chosen = choice["step"]
                self._write("choice", self._chosen, choice)

    def _since(self, counters: Mapping[str, float]) -> dict[str, float]:
        return {name: value + self._before.get(name, 0) for name, value in counters.items()}

    def _measure_overlap(self, step: int) -> None:
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
