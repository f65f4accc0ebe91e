"""Request logs: who asked when, with how long a history. CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import ConfigError, DataError
from nestpipe.loadtest.workload import Visit


@dataclass(frozen=True, slots=True)
class Logged:
    """One request of a log."""

    time: float
    """Seconds, from any beginning."""
    user: str
    history_length: int
    candidates: int


COLUMNS = tuple(field.name for field in fields(Logged))


def log_of(visits: Iterable[Visit]) -> list[Logged]:
    """The log that a service would have written of these requests."""
    return [
        Logged(round(visit.signal_s, 6), f"u{visit.user}", visit.asked, visit.candidates)
        for visit in visits
    ]


def read_log(path: Path) -> list[Logged]:
    """The requests of a log file, in the order of time."""
    if not path.exists():
        raise ConfigError(f"there is no file {str(path)!r}; check the path")
    readers = {".csv": _read_csv, ".jsonl": _read_json, ".json": _read_json}
    readers[".parquet"] = _read_parquet
    if path.suffix not in readers:
        raise ConfigError(f"{str(path)!r} is no log that can be read; use {', '.join(readers)}")
    try:
        rows = readers[path.suffix](path)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"cannot read {str(path)!r}: {reason}; write it again") from None
    requests = [_logged(row, number, path) for number, row in enumerate(rows, 1)]
    if not requests:
        raise DataError(f"{str(path)!r} holds no requests; give a log that has some")
    return sorted(requests, key=lambda request: request.time)


def write_log(path: Path, requests: Sequence[Logged]) -> None:
    """Write a log in the form that the end of the file's name says."""
    rows = [asdict(request) for request in requests]
    writers = {".csv": _write_csv, ".jsonl": _write_json, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ConfigError(f"{str(path)!r} names no kind of log; end it in {', '.join(writers)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writers[path.suffix](path, rows)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        ) from None


def _logged(row: Mapping[str, Any], number: int, path: Path) -> Logged:
    missing = [name for name in COLUMNS if row.get(name) in (None, "")]
    if missing:
        raise DataError(
            f"request {number} of {str(path)!r} has no {missing[0]}; a log has {', '.join(COLUMNS)}"
        )
    length = _count(row, "history_length", number, path)
    candidates = _count(row, "candidates", number, path)
    return Logged(_seconds(row["time"], number, path), str(row["user"]), length, candidates)


def _count(row: Mapping[str, Any], name: str, number: int, path: Path) -> int:
    try:
        value = float(row[name])
        if value >= 0 and value == int(value):
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(
        f"{name} of request {number} of {str(path)!r} is {row[name]!r}; give a whole number from 0"
    )


def _seconds(value: Any, number: int, path: Path) -> float:
    """Seconds, or a date and time as ISO 8601 writes them."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = _moment(value)
    if not math.isfinite(seconds):
        raise DataError(
            f"time of request {number} of {str(path)!r} is {value!r}; give seconds or a date "
            "and time such as 2026-01-05T10:00:00"
        )
    return seconds


def _moment(value: Any) -> float:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    except ValueError:
        return math.nan
    return moment.timestamp()


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _read_json(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is not a JSON object")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    return table.select([name for name in COLUMNS if name in table.column_names]).to_pylist()


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist(list(rows)), path)


# How often a prefix is asked for again, and what host memory would take to still have it.
#
# The store is the host tier: bounded in bytes, LRU, each entry gone `ttl_s`
# after its last use. One pass answers for every size and every TTL at once: an entry is still there
# when it and all that was used since fit (its stack distance), and the TTL has not passed.


# Shapes: R requests

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request, as far as reuse is concerned."""

    time_s: float
    key: tuple[str, int]
    """The user, and which prefix of theirs."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """For every request, what a store would have needed to still have its prefix."""

    bytes_R: NDArray[np.float64]
    """Of memory; infinite at a first visit."""
    gaps_R: NDArray[np.float64]
    """Seconds since the last use; infinite at a first visit."""

    def share(self, num_bytes: float = NEVER, ttl_s: float = NEVER) -> float:
        """Share of requests that such a store would have served.

        Exact for stores that the largest prefix fits in, a lower bound for smaller ones.
        """
        if not len(self.bytes_R):
            return 0.0
        seen_R = np.isfinite(self.gaps_R)
        return float((seen_R & (self.bytes_R <= num_bytes) & (self.gaps_R <= ttl_s)).mean())

    def bytes_for(self, share: float, ttl_s: float = NEVER) -> float | None:
        """The smallest store that serves such a share of requests; None: no store does."""
        kept_R = np.sort(self.bytes_R[np.isfinite(self.gaps_R) & (self.gaps_R <= ttl_s)])
        place = int(np.ceil(share * len(self.bytes_R) - 1e-9))
        if place <= 0:
            return 0.0
        return float(kept_R[place - 1]) if place <= len(kept_R) else None


def reuse(asked: Sequence[LoggedRequest], progress: Callable[[], None] = lambda: None) -> Reuse:
    """Stack distances in bytes and gaps in time; `asked` is in the order of time."""
    recent = _Sums(len(asked))
    last: dict[tuple[str, int], int] = {}
    bytes_R = np.full(len(asked), NEVER)
    gaps_R = np.full(len(asked), NEVER)
    for number, one in enumerate(asked):
        before = last.get(one.key)
        if before is not None:
            bytes_R[number] = recent.above(before) + one.num_bytes
            gaps_R[number] = one.time_s - asked[before].time_s
            recent.add(before, -asked[before].num_bytes)
        recent.add(number, one.num_bytes)
        last[one.key] = number
        progress()
    return Reuse(bytes_R, gaps_R)


def share_by_replay(
    asked: Sequence[LoggedRequest], num_bytes: float, ttl_s: float = NEVER
) -> float:
    """What `Reuse.share` says, by keeping the store itself: the slow twin, for one size."""
    store: OrderedDict[tuple[str, int], LoggedRequest] = OrderedDict()
    held = served = 0
    for one in asked:
        kept = store.pop(one.key, None)
        if kept is not None:
            served += one.time_s - kept.time_s <= ttl_s
            held -= kept.num_bytes
        store[one.key] = one
        held += one.num_bytes
        while held > num_bytes:
            held -= store.popitem(last=False)[1].num_bytes
    return served / len(asked) if asked else 0.0


class _Sums:
    """Numbers at places, and the sum of all above a place, both in log time (a Fenwick tree)."""

    def __init__(self, count: int) -> None:
        self._tree = [0] * (count + 1)
        self._total = 0

    def add(self, place: int, number: int) -> None:
        self._total += number
        place += 1
        while place < len(self._tree):
            self._tree[place] += number
            place += place & -place

    def above(self, place: int) -> int:
        """The sum of the numbers at all places after this one."""
        below, place = 0, place + 1
        while place > 0:
            below += self._tree[place]
            place -= place & -place
        return self._total - below
