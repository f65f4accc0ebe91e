"""The record of a run: one file of JSON lines for each rank, bounded however long the run is.

The first line says what runs. A `point` holds totals since the run began, so that any two of them
give exact means of what lies between: a record that is made coarser loses resolution and no truth.
Beside points there are `lanes` (when the ops of a few batches ran), evaluations, and the end.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nestpipe.errors import ConfigError, ParseError

VERSION = 1
FOLDER = "record"
"""The folder of the record inside that of a run."""
MOST_POINTS, MOST_LANES, MOST_EVALUATIONS = 2048, 48, 1024
"""Lines of each kind in a file; with one more, as many stay as `KEPT` says."""
KEPT = {"point": 1024, "lanes": 12, "evaluation": 512}
MOST = {"point": MOST_POINTS, "lanes": MOST_LANES, "evaluation": MOST_EVALUATIONS}
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
        found = {"point": self.points, "lanes": self.lanes, "evaluation": self.evaluations}
        return found[kind]

    def lines(self) -> Iterator[Line]:
        """All of it, as it is written."""
        yield self.about
        for kind in MOST:
            yield from self.of(kind)
        if self.end is not None:
            yield self.end

    def until(self, step: int) -> RankRecord:
        """What was known by that step, without an end."""
        kept = {kind: [line for line in self.of(kind) if line["step"] <= step] for kind in MOST}
        return RankRecord(self.about, kept["point"], kept["lanes"], kept["evaluation"])


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
