"""The data of the page: the records of all ranks as columns, thinned to a bounded number of points.

Totals of other ranks are read at the steps of rank 0's points, between two of their own. Means of
any interval are then differences of sums, whatever each rank has kept.
"""

from __future__ import annotations

import math
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe.dashboard.record import (
    FAILED,
    FOLDER,
    RUNNING,
    Line,
    RankRecord,
    RecordReader,
    file_of,
    merged,
    thinned,
)
from nestpipe.errors import ConfigError
from nestpipe.trace import IDLE

MOST_SHOWN = 320
"""Points of a chart."""
MOST_TABLES = 7
"""Tables with a line of their own; the others share one."""
MOST_DRAWN = 8
"""Ranks whose lanes are shown."""
RECENT_S = 30.0
"""Window of the current figures."""
LOST_S = 20.0
"""A run without a sign of life for this long is taken to have died."""
LOST = "lost"
NETWORK = ("net", "dense_net", "keys")
"""Lanes on which ranks wait for each other."""
COMPUTE, NET, HOST, ROUTE, LOAD, WAIT = "compute", "net", "host", "route", "load", "wait"
"""What a step is spent on; `wait`: for the slowest rank."""
RESOURCES = {
    **dict.fromkeys(("dense", "apply", "update"), COMPUTE),
    **dict.fromkeys(("sync", "swap", "retrieve", "writeback"), HOST),
    **dict.fromkeys(("dedup", "union", "replica_union"), ROUTE),
    **dict.fromkeys(("prefetch", "copy"), LOAD),
    IDLE: IDLE,
}
"""What kinds of ops use; all others use the network between ranks."""
WORTH_NAMING = 0.1
"""Part of a step from which the wait for a rank counts apart from the network, and ..."""
WORTH_BETWEEN = 0.2
"""... part of the clock from which it is said what lies between steps."""
COUNTERS = ("bytes_sent", "keys_shared", "keys_compared")
OF_STEPS = ("samples", "loss", "finite", "rows_read", "rows_refreshed", "rows_written")
SUMS = ("steps", *OF_STEPS, "keys_asked", "faults", "seconds", "batches", "step_ms", "compute_ms")
Column = npt.NDArray[np.float64]
Columns = dict[str, Column]


class RunFolder:
    """The record of a run on disk, which may still grow; read again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = _record_folder(path)
        self._readers: dict[int, RecordReader] = {}

    def read(self) -> RunRecords:
        """What all ranks have written by now."""
        first = self._read(0)
        ranks = [self._read(r) for r in range(1, int(first.about.get("ranks", 1)))]
        found = [first, *(rank for rank in ranks if rank is not None and rank.points)]
        signs = {r.about["rank"]: self._sign(r.about["rank"]) for r in found}
        return RunRecords(self.path, found, signs)

    def _read(self, rank: int) -> Any:
        file = file_of(self.folder, rank)
        if rank and not file.exists():
            return None
        return self._readers.setdefault(rank, RecordReader(file)).read()

    def _sign(self, rank: int) -> float:
        try:
            return file_of(self.folder, rank).stat().st_mtime
        except OSError:  # it is being replaced
            return time.time()


def _record_folder(path: Path) -> Path:
    """Where the record is: in the folder, in its `record`, or beside a checkpoint."""
    places = (path / FOLDER, path, path.parent / FOLDER)
    for place in places:
        if file_of(place, 0).exists():
            return place
    if not path.exists():
        raise ConfigError(f"there is no folder {str(path)!r}; check the path")
    raise ConfigError(
        f"{str(path)!r} holds no record of a run; name the folder of a run that had "
        "run.checkpoint, run.log or run.record set"
    )


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of the ranks of a run, rank 0 first."""

    path: Path
    ranks: Sequence[RankRecord]
    signs: Mapping[int, float]
    """When each rank last gave a sign of life, in seconds since 1970."""

    @property
    def first(self) -> RankRecord:
        return self.ranks[0]

    def status(self, now: float) -> tuple[str, str]:
        """The status of the run, and why, in words."""
        ends = [(r.end["time"], r) for r in self.ranks if r.end and r.end.get("status") == FAILED]
        if ends:
            failed = min(ends, key=lambda end: end[0])[1]
            return FAILED, _of_rank(failed, len(self.ranks), str(failed.end["sentence"]))  # type: ignore[index]
        if self.first.end is not None:
            return str(self.first.end.get("status")), str(self.first.end.get("sentence", ""))
        for record in self.ranks:
            if record.end is None and _has_ended(record.about):
                said = "the process has ended without a word: it was killed, or its memory was full"
                return LOST, _of_rank(record, len(self.ranks), said)
        silent = now - max(self.signs.values())
        if silent > LOST_S:
            return LOST, f"no sign of the run for {_tens(silent):,} s"
        return RUNNING, ""


def _of_rank(record: RankRecord, ranks: int, sentence: str) -> str:
    return sentence if ranks == 1 else f"rank {record.about['rank']}: {sentence}"


def _has_ended(about: Line) -> bool:
    """Whether the process is known to have ended; unknown on another machine."""
    if about.get("host") != socket.gethostname() or not isinstance(about.get("pid"), int):
        return False
    try:
        os.kill(about["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def page_data(run: RunRecords, now: float | None = None, most: int = MOST_SHOWN) -> dict[str, Any]:
    """All that the page needs, as plain values; `now`: the time, where it is not that of now."""
    now = time.time() if now is None else now
    points = [merged(group) for group in thinned(run.first.points, most, _step)]
    steps = np.array([point["step"] for point in points], dtype=np.float64)
    ranks = [_RankSums(record, steps, most) for record in run.ranks]
    total = _added([rank.sums for rank in ranks])
    series = _series(run, ranks, total, points) if len(steps) else {}
    tables, kinds, rows = _tables(ranks, steps), _kinds(ranks), _rank_rows(run, ranks, now)
    recent = _recent(ranks, tables, rows) if len(steps) else {}
    return _finite(
        {
            "version": 1,
            "run": _about(run, now),
            "now": recent,
            "series": series,
            "tables": tables,
            "kinds": kinds,
            "limit": _limit(kinds, rows, recent),
            "resources": RESOURCES,
            "lanes": _windows(run),
            "ranks": rows,
            "evaluations": _evaluations(run.first),
            "choices": _choices(run.first),
        }
    )


def _step(line: Line) -> float:
    return line["step"]


class _RankSums:
    """Sums of one rank at the steps that are shown."""

    def __init__(self, record: RankRecord, steps: Column, most: int) -> None:
        self.record = record
        points = [group[-1] for group in thinned(record.points, most, _step)]
        self.points = points
        names = [*SUMS, *COUNTERS]
        for group in ("hidden_ms", "exposed_ms", "lane_ms"):
            names += [f"{group}.{kind}" for kind in (points[-1].get(group, {}) if points else ())]
        self.sums = {name: _at(steps, points, _reader(name)) for name in names}

    def between(self, name: str, since: float) -> float:
        """How much a sum grew from a step on to the last."""
        of = _reader(name)
        steps = np.array([since], dtype=np.float64)
        place = bisect_left(self.points, since, key=_step)
        near = self.points[max(0, place - 2) : place + 1]  # no others decide what it was there
        return float(of(self.points[-1]) - _at(steps, near, of)[0])


def _reader(name: str) -> Callable[[Line], float]:
    group, _, kind = name.partition(".")
    if kind:
        return lambda point: point.get(group, {}).get(kind, 0.0)
    if name in COUNTERS:
        return lambda point: point.get("counters", {}).get(name, 0)
    return lambda point: point.get(name, 0)


def _at(steps: Column, points: Sequence[Line], of: Callable[[Line], Any]) -> Column:
    """A sum at some steps: between two points on the line through them, and beyond on the last."""
    known = [point["step"] for point in points]
    values = [float(of(point) or 0.0) for point in points]
    if not known:
        return np.zeros_like(steps)
    if points[0].get("steps") == known[0]:  # the run began here, so nothing was before
        known, values = [0, *known], [0.0, *values]
    if len(known) > 1 and len(steps) and steps[-1] > known[-1] > known[-2]:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        values.append(values[-1] + slope * (float(steps[-1]) - known[-1]))
        known.append(int(steps[-1]))
    return np.interp(steps, known, values)


def _added(columns: Sequence[Columns]) -> Columns:
    names = dict.fromkeys(name for of in columns for name in of)
    return {name: sum(of[name] for of in columns if name in of) for name in names}  # type: ignore[misc]


def _grown(column: Column) -> Column:
    """How much a sum grew since the point before."""
    return np.diff(column, prepend=0.0)


def _ratio(above: Column, below: Column) -> Column:
    """One over the other; nan where there is nothing to divide by."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / np.where(below > 0, below, 1.0), math.nan)


def _series(
    run: RunRecords, ranks: Sequence[_RankSums], total: Columns, points: Sequence[Line]
) -> dict[str, Any]:
    """Columns over the steps; those of rows and bytes are of all ranks together."""
    own = {name: _grown(column) for name, column in ranks[0].sums.items()}
    every = {name: _grown(column) for name, column in total.items()}
    steps, batches = own["steps"], every["batches"]
    exposed = sum((v for n, v in every.items() if n.startswith("exposed_ms.")), steps * 0)
    hidden = sum((v for n, v in every.items() if n.startswith("hidden_ms.")), steps * 0)
    idle = every.get(f"exposed_ms.{IDLE}", steps * 0)
    waits = _waits(ranks)
    return {
        "step": [point["step"] for point in points],
        "time": [point["time"] for point in points],
        "loss": _ratio(own["loss"], own["finite"]),
        "loss_low": [point["low"] for point in points],
        "loss_high": [point["high"] for point in points],
        "loss_not_finite": own["steps"] - own["finite"],
        "samples_per_s": _ratio(own["samples"], own["seconds"]),
        "step_ms": _ratio(every["step_ms"], batches),
        "compute_ms": _ratio(every["compute_ms"], batches),
        "exposed_ms": _ratio(exposed - idle, batches),
        "idle_ms": _ratio(idle, batches),
        "hidden_ms": _ratio(hidden, batches),
        "keys_shared": _ratio(every["keys_shared"], every["keys_compared"]),
        "without_read": _without_read(_ratio(every["rows_read"], every["keys_asked"])),
        "bytes_per_step": _ratio(every["bytes_sent"], steps),
        "rows_read": _ratio(every["rows_read"], steps),
        "rows_refreshed": _ratio(every["rows_refreshed"], steps),
        "rows_written": _ratio(every["rows_written"], steps),
        "waited_ms": np.max(waits, axis=0) if len(ranks) > 1 else [],
        "waited_mean_ms": np.mean(waits, axis=0) if len(ranks) > 1 else [],
        "pool_used": _pool(run, points),
        "lanes": {
            name.partition(".")[2]: _ratio(column, every["step_ms"])
            for name, column in every.items()
            if name.startswith("lane_ms.")
        },
    }


def _without_read(read_of_asked: Column | float) -> Any:
    """The part of keys whose rows needed no read; groups also read rows that others touched."""
    return np.maximum(0.0, 1 - np.asarray(read_of_asked))


def _waits(ranks: Sequence[_RankSums]) -> Column:
    """Per step and rank, what a rank spent on the network beyond the one that came to it last.

    Ranks look at batches of their own choice, and a slow one is slow for all of them: so what is
    compared is how much of a step each spends elsewhere.
    """
    nothing = ranks[0].sums["steps"] * 0
    network = []
    for rank in ranks:
        lanes = [rank.sums.get(f"lane_ms.{lane}", nothing) for lane in NETWORK]
        beyond = sum((_grown(of) for of in lanes), nothing) - _grown(rank.sums["step_ms"])
        network.append(_ratio(beyond, _grown(rank.sums["batches"])))
    of_ranks = np.stack(network)
    return of_ranks - of_ranks.min(axis=0)


def _pool(run: RunRecords, points: Sequence[Line]) -> list[float | None]:
    """The part of rank 0's pool that is taken."""
    pools = [point.get("pool") for point in points]
    return [of["used"] / of["slots"] if of else None for of in pools]


def _tables(ranks: Sequence[_RankSums], steps: Column) -> list[dict[str, Any]]:
    """Rows of the largest tables over the steps, all shards of one group together."""
    if not len(steps):
        return []
    replicas = int(ranks[0].record.about.get("groups", 1))
    names = dict.fromkeys(n for rank in ranks for n in rank.points[-1].get("tables", {}))
    rows = {
        name: np.sum([_at(steps, r.points, _reader(f"tables.{name}")) for r in ranks], 0) / replicas
        for name in names
    }
    largest = sorted(rows, key=lambda name: -rows[name][-1])
    shown = [{"name": name, "rows": np.round(rows[name])} for name in largest[:MOST_TABLES]]
    others = largest[MOST_TABLES:]
    if others:
        rest = np.round(sum((rows[name] for name in others), steps * 0))
        shown.append({"name": f"{len(others)} more tables", "rows": rest})
    return shown


def _recent_from(rank: _RankSums) -> float:
    """The step of the point that lies far enough back for a mean of what happens now."""
    points = rank.record.points
    until = points[-1]["time"] - RECENT_S
    earlier = [p["step"] for p in points[:-1] if p["time"] <= until]
    if earlier:
        return earlier[-1]
    begins = points[0].get("steps") == points[0]["step"]
    return 0 if begins or len(points) == 1 else points[0]["step"]


def _recent(
    ranks: Sequence[_RankSums],
    tables: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Means of the last seconds, for the figures on top."""
    since = _recent_from(ranks[0])

    def of(name: str) -> float:
        return sum(rank.between(name, since) for rank in ranks)

    first = ranks[0]
    steps, batches = first.between("steps", since), of("batches")
    kinds = [n for n in first.sums if n.startswith("exposed_ms.")]
    return {
        "loss": _over(first.between("loss", since), first.between("finite", since)),
        "losses_not_finite": _not_finite(first.points[-1]),
        "loss_is_finite": _newest_loss_is_finite(first.points),
        "samples_per_s": _over(first.between("samples", since), first.between("seconds", since)),
        "step_ms": _over(of("step_ms"), batches),
        "clock_ms": _over(1e3 * first.between("seconds", since), steps),
        "exposed": _over(sum(of(name) for name in kinds), of("step_ms")),
        "keys_shared": _over(of("keys_shared"), of("keys_compared")),
        "without_read": float(_without_read(_over(of("rows_read"), of("keys_asked")))),
        "bytes_per_step": _over(of("bytes_sent"), steps),
        "rows": sum(table["rows"][-1] for table in tables),
        "waited_ms": max(row["waited_ms"] for row in rows) if len(ranks) > 1 else None,
        "faults": first.points[-1].get("faults", 0),
    }


def _not_finite(point: Line) -> int:
    """How many steps had a loss that is no number."""
    return point.get("steps", 0) - point.get("finite", 0)


def _newest_loss_is_finite(points: Sequence[Line]) -> bool:
    """Whether any step since the point before had one."""
    before = points[-2] if len(points) > 1 else {}
    return points[-1].get("finite", 0) > before.get("finite", 0)


def _over(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


def _kinds(ranks: Sequence[_RankSums]) -> list[dict[str, Any]]:
    """The time of each kind of op in a recent step, the mean over ranks; longest first."""
    ranks = [rank for rank in ranks if rank.points]
    if not ranks:
        return []
    sums: dict[str, dict[str, float]] = {"hidden_ms": {}, "exposed_ms": {}}
    batches = 0.0
    for rank in ranks:
        since = _recent_from(rank)
        batches += rank.between("batches", since)
        for group, of_kinds in sums.items():
            for kind in rank.points[-1].get(group, {}):
                grown = rank.between(f"{group}.{kind}", since)
                of_kinds[kind] = of_kinds.get(kind, 0.0) + grown
    names = {kind for of_kinds in sums.values() for kind in of_kinds}
    found = [
        {"kind": kind, **{group: _over(of.get(kind, 0.0), batches) for group, of in sums.items()}}
        for kind in names
    ]
    return sorted(found, key=lambda of: (of["kind"] == IDLE, -of["exposed_ms"] - of["hidden_ms"]))


def _limit(
    kinds: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    recent: Mapping[str, Any],
) -> dict[str, Any] | None:
    """What a recent step is spent on, largest first, and the op that the first of them waits for.

    Compute and what is exposed add up to the step: each part is what would be gained at most if
    it were hidden.
    """
    step_ms = recent.get("step_ms", math.nan)
    if not step_ms > 0:
        return None
    exposed = [(kind["kind"], _resource(kind["kind"]), kind["exposed_ms"]) for kind in kinds]
    spent: dict[str, float] = {}
    for _, resource, ms in exposed:
        spent[resource] = spent.get(resource, 0.0) + ms
    spent[COMPUTE] = max(0.0, step_ms - sum(spent.values()))
    waits = {row["rank"]: row["waited_ms"] for row in rows if row["waited_ms"] >= 0}
    if len(waits) > 1 and max(waits.values()) > WORTH_NAMING * step_ms:
        spent[WAIT] = min(sum(waits.values()) / len(waits), spent.get(NET, 0.0))
        spent[NET] = spent.get(NET, 0.0) - spent[WAIT]
    largest = sorted(spent, key=lambda resource: -spent[resource])
    waited_for = [(ms, kind) for kind, resource, ms in exposed if resource == largest[0]]
    between = 1 - step_ms / recent["clock_ms"] if recent["clock_ms"] > 0 else 0.0
    return {
        "resource": largest[0],
        "op": max(waited_for)[1] if waited_for else None,
        "rank": min(waits, key=lambda rank: waits[rank]) if WAIT in spent else None,
        "parts": [
            {"resource": resource, "ms": spent[resource], "share": spent[resource] / step_ms}
            for resource in largest
            if spent[resource] > 0
        ],
        "between_steps": between if between > WORTH_BETWEEN else 0.0,
    }


def _resource(kind: str) -> str:
    return RESOURCES.get(kind, NET)


def _figures_of_ranks(ranks: Sequence[_RankSums]) -> list[dict[str, float]]:
    """A recent step on each rank."""
    rows: list[dict[str, float]] = []
    for rank in ranks:
        since = _recent_from(rank)
        steps, batches = rank.between("steps", since), rank.between("batches", since)
        network = sum(rank.between(f"lane_ms.{lane}", since) for lane in NETWORK)
        rows.append(
            {
                "step_ms": _over(rank.between("step_ms", since), batches),
                "compute_ms": _over(rank.between("compute_ms", since), batches),
                "network_ms": _over(network, batches),
                "keys_asked": _over(rank.between("keys_asked", since), steps),
                "rows_read": _over(rank.between("rows_read", since), steps),
                "bytes_sent": _over(rank.between("bytes_sent", since), steps),
            }
        )
    beyond = [row["network_ms"] - row["step_ms"] for row in rows]
    least = min(beyond, default=math.nan)
    return [{**row, "waited_ms": of - least} for row, of in zip(rows, beyond, strict=True)]


def _rank_rows(run: RunRecords, ranks: Sequence[_RankSums], now: float) -> list[dict[str, Any]]:
    ranks = [rank for rank in ranks if rank.points]
    return [
        {
            "rank": rank.record.about["rank"],
            "host": rank.record.about.get("host", ""),
            "step": rank.points[-1]["step"],
            "rows": sum(rank.points[-1].get("tables", {}).values()),
            "silent_s": _tens(now - run.signs[rank.record.about["rank"]]),
            "status": (rank.record.end or {}).get("status", RUNNING),
            **figures,
        }
        for rank, figures in zip(ranks, _figures_of_ranks(ranks), strict=True)
    ]


def _tens(seconds: float) -> int:
    """In tens, so that an answer is the same as the one before while nothing happens."""
    return max(0, int(seconds // 10) * 10)


def _windows(run: RunRecords) -> list[dict[str, Any]]:
    """When ops ran: all drawings of rank 0, and the newest of some others."""
    drawn = [(0, line) for line in run.first.lanes[-12:]]
    drawn += [(r.about["rank"], r.lanes[-1]) for r in run.ranks[1:MOST_DRAWN] if r.lanes]
    return [
        {"rank": rank, **{name: line[name] for name in ("step", "time", "ms", "spans")}}
        for rank, line in drawn
        if isinstance(line.get("spans"), list)
    ]


def _evaluations(record: RankRecord) -> list[Line]:
    kept = [group[-1] for group in thinned(record.evaluations, MOST_SHOWN, _step)]
    return [
        {"step": line["step"], "split": line.get("split"), "metrics": line.get("metrics", {})}
        for line in kept
    ]


def _choices(record: RankRecord) -> list[Line]:
    names = ("step", "micro_batches", "first", "last", "device_memory", "reason")
    return [{name: line.get(name) for name in names} for line in record.choices]


SHOWN_FACTS = (
    *("plan", "micro_batches", "retrieval", "compares", "groups", "device", "batch", "model"),
)


def _about(run: RunRecords, now: float) -> dict[str, Any]:
    about, last = run.first.about, run.first.points[-1] if run.first.points else {}
    status, sentence = run.status(now)
    step, steps, done = last.get("step", 0), about.get("steps"), last.get("steps", 0)
    seconds = last.get("seconds", 0.0)
    to_go = steps - step if steps and status == RUNNING else 0
    return {
        "name": run.path.resolve().name,
        "status": status,
        "sentence": sentence,
        **{name: about.get(name) for name in SHOWN_FACTS},
        "micro_batches": last.get("micro_batches", about.get("micro_batches")),
        "adaptive": "micro_batches" in last,
        "resumed": about.get("resumed", []),
        "ranks": about.get("ranks", 1),
        "ranks_seen": len(run.ranks),
        "started": about.get("started"),
        "updated": last.get("time", about.get("started")),
        "step": step,
        "steps": steps,
        "seconds": seconds,
        "left_s": to_go * seconds / done if done and to_go else None,
        "damaged": sum(rank.damaged for rank in run.ranks),
    }


def _finite(value: Any) -> Any:
    """Plain values of seven digits; a value that is not finite becomes null."""
    if isinstance(value, np.ndarray):
        return [_finite(item) for item in value.tolist()]
    if isinstance(value, float):
        short = float(f"{value:.7g}") if abs(value) < 1e8 else round(value, 2)
        return short if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
