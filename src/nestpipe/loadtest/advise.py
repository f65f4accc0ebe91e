"""Request logs, and advice from one: whether relay pays, and with which settings.

A log says who asked when, with how long a history, as CSV, JSON lines or Parquet. Three questions:
would rankings miss the target if they ran inline; can their prefixes be ready in time on the same
device; and do users return soon enough for host memory to save that work.
"""

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
from nestpipe.loadtest.driver import percentile
from nestpipe.loadtest.workload import Visit
from nestpipe.serve.engine.admission import Costs, at_risk, fits_window
from nestpipe.serve.types import ServeSettings


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
    """Write a log in the format of the file's extension."""
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


# Reuse of prefixes, and the host memory that would keep them.
#
# The store is the host tier: bounded in bytes, LRU, each entry gone `ttl_s`
# after its last use. One pass answers for every size and every TTL at once: an entry is still there
# when it and all that was used since fit (its stack distance), and the TTL has not passed.


# Shapes: R requests

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """What reuse depends on in a request."""

    time_s: float
    key: tuple[str, int]
    """The user and the prefix."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """For every request, the size and the TTL with which a store would still have had its
    prefix."""

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
    """`Reuse.share` by simulating the store itself: the slow twin, for one size."""
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


TTLS_S = (10.0, 60.0, 600.0, 3600.0, 21_600.0)
"""TTLs that are examined."""
SHARES = (0.5, 0.75, 0.9, 0.95, 1.0)
"""Shares of the reuse that a TTL allows; the memory for each is reported."""
NEARLY_ALL = 0.95
"""A TTL or a size is enough when it gives this part of what no limit would; one of `SHARES`."""
MOST_MISSES = 0.01
"""Share of requests that may miss the target without breaking its P99."""
WORTH = 1.1
"""Gain in throughput below which host memory is not worth its upkeep."""
ROOM = 2.0
"""Device memory is this many times the mean need: arrivals come in bunches."""
MB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Costs and settings, besides the log."""

    costs: Costs
    kv_bytes: Callable[[int], int]
    """Bytes of a prefix by its number of events."""
    settings: ServeSettings
    """Target, window, life, margin and risk are taken from here."""
    instances: int = 1
    """That share the requests of the log."""
    short: int = 64
    """Newest events of a history, which are no part of the prefix."""
    grow_by: int = 256
    """Events by which a history grows before its prefix is computed anew."""

    @property
    def allowed_ms(self) -> float:
        return self.settings.target_ms * (1 - self.settings.margin)

    def prefix_of(self, length: int) -> int:
        """Events of the prefix; it grows in steps, so that a later request can reuse it."""
        long = max(0, length - self.short)
        return long - long % self.grow_by if long >= self.grow_by else long


@dataclass(frozen=True, slots=True)
class Memory:
    """The reuse under a TTL, and the host memory of one instance that it takes."""

    ttl_s: float
    seen: float
    """Share of requests whose user had come within that time."""
    reused: float
    """Share of requests whose prefix would be there, with memory without limit."""
    mb_for: dict[str, float]
    """MB for parts of it, such as `90%`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFacts:
    """Facts from the log and the costs, before any judgement. Loads are per instance."""

    requests: int
    users: int
    seconds: float
    length_p50: float
    length_p99: float
    longest: int
    candidates_p50: float
    inline_p99_ms: float
    """Time of an inline ranking on an idle device."""
    misses: float
    """Share of requests whose inline ranking would miss the target on an idle device."""
    at_risk: float
    """Share that admission control would prepare: these and those that come close."""
    too_slow: float
    """Share that would miss the target even with a prefix."""
    too_late: float
    """Share that would miss it and whose prefix cannot be ready within the window."""
    inline_load: float
    """Device time per second, everything inline."""
    relay_load: float
    """The same with prefixes for those at risk: the work is moved, not saved."""
    host_load: float
    """Device time per second where prefixes are kept in host memory as well."""

    @property
    def helped(self) -> float:
        """Share of requests that relay would bring within the target."""
        return self.misses - max(self.too_slow, self.too_late)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The answer; `load_advice_text` says it in words."""

    facts: LogFacts
    memory: list[Memory]
    chosen: Memory
    """The shortest TTL that gives nearly all of the reuse."""
    relay: bool
    """Whether to prepare prefixes ahead."""
    host: bool
    """Whether to keep them in host memory."""
    host_gain: float
    """Requests per second with host memory over without, where the device is the limit."""
    settings: dict[str, float]
    """Of an instance, as `--set serve.KEY=VALUE` takes them."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request with its costs in milliseconds."""

    logged: Logged
    prefix: int
    """Events of its prefix."""
    num_bytes: int
    inline_ms: float
    prefix_ms: float
    cached_ms: float
    reload_ms: float
    misses: bool
    """Whether it misses the target inline."""
    at_risk: bool
    """Whether admission control would prepare it."""
    in_time: bool
    """Whether its prefix would be ready for its ranking."""


def advise(
    log: Sequence[Logged], question: Question, progress: Callable[[], None] = lambda: None
) -> Advice:
    """Measure the log against the costs, and judge."""
    requests = [_cost(one, question) for one in log]
    helped = _share([one.misses and _can_help(one, question) for one in requests])
    relay = helped > MOST_MISSES
    # With relay only prefixes that were prepared are there to be kept, without it all are.
    kept = [one for one in requests if one.at_risk or not relay]
    found = reuse([_asked(one) for one in kept], progress)
    memory = _memory(found, log, len(kept) / len(log), question.instances)
    chosen = next(row for row in memory if row.reused >= NEARLY_ALL * memory[-1].reused)
    again = {id(one) for one, gap in zip(kept, found.gaps_R, strict=True) if gap <= chosen.ttl_s}
    host_ms = _mean([_host_ms(one, relay, id(one) in again) for one in requests])
    facts = _facts(log, requests, host_ms, question)
    gain = (facts.relay_load if relay else facts.inline_load) / max(facts.host_load, 1e-12)
    host = chosen.reused > 0 and gain >= WORTH and facts.host_load <= 1
    relay = relay and (facts.host_load if host else facts.relay_load) <= 1
    settings = _settings(requests, chosen, question, relay=relay, host=host)
    return Advice(
        facts=facts,
        memory=memory,
        chosen=chosen,
        relay=relay,
        host=host,
        host_gain=gain,
        settings=settings,
    )


def _cost(one: Logged, question: Question) -> _Request:
    costs = question.costs
    prefix = question.prefix_of(one.history_length)
    num_bytes = question.kv_bytes(prefix)
    inline_ms = costs.inline_ms(one.history_length, one.candidates)
    return _Request(
        logged=one,
        prefix=prefix,
        num_bytes=num_bytes,
        inline_ms=inline_ms,
        prefix_ms=costs.prefix_ms(prefix),
        cached_ms=costs.cached_ms(prefix, one.candidates),
        reload_ms=costs.reload_ms(num_bytes),
        misses=inline_ms > question.allowed_ms,
        at_risk=at_risk(one.history_length, one.candidates, 0.0, costs, question.settings),
        in_time=fits_window(prefix, one.candidates, 0.0, costs, question.settings),
    )


def _can_help(one: _Request, question: Question) -> bool:
    return one.in_time and one.cached_ms <= question.allowed_ms


def _asked(one: _Request) -> LoggedRequest:
    return LoggedRequest(one.logged.time, (one.logged.user, one.prefix), one.num_bytes)


def _memory(found: Reuse, log: Sequence[Logged], share_kept: float, instances: int) -> list[Memory]:
    """A row per TTL; users are spread over the instances, so each needs its part of the memory."""
    seen = reuse([LoggedRequest(one.time, (one.user, 0), 0) for one in log])
    rows: list[Memory] = []
    for ttl_s in TTLS_S:
        reused = found.share(ttl_s=ttl_s)
        needs = {f"{share:.0%}": found.bytes_for(share * reused, ttl_s) for share in SHARES}
        mb_for = {name: (need or 0.0) / MB / instances for name, need in needs.items()}
        rows.append(Memory(ttl_s, seen.share(ttl_s=ttl_s), reused * share_kept, mb_for))
    return rows


def _facts(
    log: Sequence[Logged], requests: Sequence[_Request], host_ms: float, question: Question
) -> LogFacts:
    seconds = log[-1].time - log[0].time
    # Requests per second times ms is device time; a log of n requests has n - 1 gaps.
    load = (len(log) - 1) / seconds / question.instances / 1e3 if seconds > 0 else 0.0
    lengths = [one.history_length for one in log]
    inline_ms = [one.inline_ms for one in requests]
    return LogFacts(
        requests=len(log),
        users=len({one.user for one in log}),
        seconds=seconds,
        length_p50=percentile(lengths, 0.5),
        length_p99=percentile(lengths, 0.99),
        longest=max(lengths),
        candidates_p50=percentile([one.candidates for one in log], 0.5),
        inline_p99_ms=percentile(inline_ms, 0.99),
        misses=_share([one.misses for one in requests]),
        at_risk=_share([one.at_risk for one in requests]),
        too_slow=_share([one.misses and one.cached_ms > question.allowed_ms for one in requests]),
        too_late=_share([one.misses and not one.in_time for one in requests]),
        inline_load=load * _mean(inline_ms),
        relay_load=load * _mean([_relay_ms(one) for one in requests]),
        host_load=load * host_ms,
    )


def _relay_ms(one: _Request) -> float:
    """Device time of a request where those at risk are prepared."""
    return one.prefix_ms + one.cached_ms if one.at_risk else one.inline_ms


def _host_ms(one: _Request, relay: bool, again: bool) -> float:
    """Device time of a request where prefixes are kept: those that relay made, or all."""
    if again:
        return one.reload_ms + one.cached_ms
    # Two legs are no less work than one, whatever separately measured costs add up to.
    return _relay_ms(one) if relay else max(one.inline_ms, one.prefix_ms + one.cached_ms)


def _settings(
    requests: Sequence[_Request], chosen: Memory, question: Question, *, relay: bool, host: bool
) -> dict[str, float]:
    found: dict[str, float] = {"target_ms": question.settings.target_ms, "relay": float(relay)}
    found["cut_length"] = _cut_length(requests, question)
    if relay:
        found["device_mb"] = _device_mb(requests, question)
    found["host_mb"] = max(1.0, math.ceil(chosen.mb_for[f"{NEARLY_ALL:.0%}"])) if host else 0.0
    if host:
        found["host_ttl_s"] = chosen.ttl_s
    return found


def _device_mb(requests: Sequence[_Request], question: Question) -> float:
    """By Little's law: prefixes that live at once, with room, and at least four of the largest."""
    sizes = [one.num_bytes for one in requests if one.at_risk]
    seconds = requests[-1].logged.time - requests[0].logged.time
    per_s = sum(sizes) / seconds / question.instances if seconds > 0 else 0.0
    return float(math.ceil(max(ROOM * per_s * question.settings.life_s, 4 * max(sizes)) / MB))


def _cut_length(requests: Sequence[_Request], question: Question) -> int:
    """The longest history that ranks inline within the target, with the usual candidates."""
    candidates = int(percentile([one.logged.candidates for one in requests], 0.5))
    low, high = 1, question.settings.max_events
    while low < high:
        middle = (low + high + 1) // 2
        if question.costs.inline_ms(middle, candidates) <= question.allowed_ms:
            low = middle
        else:
            high = middle - 1
    return low


def _share(which: Sequence[bool]) -> float:
    return sum(which) / len(which)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# The advice in sentences: what pays, what does not, and why.


BUSY = 0.7
"""Part of a device's time above which queues alone may break a P99."""


def sentences(advice: Advice, question: Question) -> list[str]:
    """Facts of the log, whether relay pays, whether host memory pays, and with which settings."""
    found = [_log(advice), _reuse(advice), _relay(advice, question), _host(advice)]
    load = _load(advice, question)
    return [*found, *([load] if load else []), _settings_sentence(advice)]


def _log(advice: Advice) -> str:
    facts = advice.facts
    return (
        f"The log has {facts.requests:,} requests of {facts.users:,} users in "
        f"{_duration(facts.seconds)}; histories have {facts.length_p50:,.0f} events at the median, "
        f"{facts.length_p99:,.0f} at P99 and {facts.longest:,} at most, and "
        f"{facts.candidates_p50:,.0f} candidates are usual."
    )


def _reuse(advice: Advice) -> str:
    seen = ", ".join(f"{row.seen:.0%} within {_duration(row.ttl_s)}" for row in advice.memory[1:4])
    return f"Share of requests whose user had come before: {seen}."


def _relay(advice: Advice, question: Question) -> str:
    facts, settings = advice.facts, question.settings
    target = f"{settings.target_ms:g} ms"
    if facts.misses <= MOST_MISSES:
        return (
            f"Relay does not pay: inline rankings take {facts.inline_p99_ms:.1f} ms at P99 on an "
            f"idle device, and {facts.misses:.1%} of requests would miss the target of {target}, "
            "which its P99 allows."
        )
    begin = f"{facts.misses:.1%} of requests would miss the target of {target} if ranked inline"
    if facts.helped <= MOST_MISSES:
        late = facts.too_late >= facts.too_slow
        why = (
            f"their prefixes take longer than the window of {settings.window_ms:g} ms; a quicker "
            "device or an earlier signal would help"
            if late
            else "even with a prefix they would be too slow; fewer candidates or a quicker device "
            "would help"
        )
        return f"Relay does not pay: {begin}, but {why}."
    if not advice.relay:
        return (
            f"Relay does not pay: {begin}, but it moves work and saves none, and "
            f"{question.instances} instances would need {facts.relay_load:.0%} of their time; "
            f"{_instances(facts.relay_load, question)} instances could carry it."
        )
    rest = facts.misses - facts.helped
    left = f", {rest:.1%} stay out of reach" if rest > 0.0005 else ""
    return f"Relay pays: {begin}; with their prefixes ready {facts.helped:.1%} are within it{left}."


def _host(advice: Advice) -> str:
    row = advice.chosen
    found = f"{row.reused:.0%} of requests would find their prefix within {_duration(row.ttl_s)}"
    if advice.host:
        what = "" if advice.relay else " even without relay"
        return (
            f"Host memory pays{what}: {found}, which lets the device answer "
            f"{advice.host_gain:.2f} times the requests."
        )
    if advice.host_gain >= WORTH:
        return (
            f"Host memory would give {advice.host_gain:.2f} times the requests ({found}), but even "
            f"so {advice.facts.host_load:.0%} of the instances' time would be needed."
        )
    return (
        f"Host memory does not pay: {found}, and reloading instead of computing gives "
        f"{advice.host_gain:.2f} times the requests, less than {WORTH:g}."
    )


def _load(advice: Advice, question: Question) -> str | None:
    facts = advice.facts
    load = facts.relay_load if advice.relay else facts.inline_load
    load = facts.host_load if advice.host else load
    if load <= BUSY:
        return None
    return (
        f"The instances are {load:.0%} busy with that: above {BUSY:.0%} queues alone may break the "
        f"target, so plan for {_instances(load, question)} instances."
    )


def _instances(load: float, question: Question) -> int:
    return math.ceil(load * question.instances / BUSY)


def _settings_sentence(advice: Advice) -> str:
    words = ", ".join(f"{name} = {_value(name, x)}" for name, x in advice.settings.items())
    return f"Settings for each instance: {words}."


def _value(name: str, value: float) -> str:
    return str(bool(value)).lower() if name == "relay" else f"{value:g}"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
