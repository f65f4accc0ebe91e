"""Request logs: who asked when, with how long a history. CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from nestpipe.errors import ConfigError, DataError
from nestpipe.serve.load_workload import Visit


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
