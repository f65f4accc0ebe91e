"""The KV cache: both legs acquire a prefix here, from the device pool, the host tier, or a fill.

Plain state, without threads: the caller holds a lock and gives the time, does the work that
`next_fill`, `next_load` and `next_copy` hand out, and reports how it ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from nestpipe.serve.engine.kv_memory import (
    DevicePool,
    Entry,
    EntryState,
    FillQueue,
    HostTier,
    KVSource,
    Need,
)
from nestpipe.serve.types import KV


class Purpose(StrEnum):
    """Who asks."""

    SIGNAL = "signal"
    """The early leg: fill a prefix that is not cached."""
    RANK = "rank"
    """The late leg: never fills, but reloads what the host tier has."""
    RANK_AND_KEEP = "rank_and_keep"
    """A ranking that fills a prefix that is not cached, to keep it."""


@dataclass(frozen=True, slots=True)
class Promised:
    """For a signal: it is cached or on its way, and is kept for the ranking."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Use:
    """For a ranking: read it now, then call `released`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Wait:
    """For a ranking: it is on its way; the ticket is returned when it is readable."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Load:
    """This call queued a reload; a ranking waits as above."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Fill:
    """This call queued a fill; a ranking waits as above."""

    entry: Entry


class Miss(StrEnum):
    """There is no prefix for this call."""

    NOWHERE = "nowhere"
    NO_ROOM = "no_room"
    """All device memory is promised."""
    TOO_LATE = "too_late"
    """It is on its way, but not in time."""


Acquired = Promised | Use | Wait | Load | Fill | Miss


def always(entry: Entry) -> bool:
    """Whatever is on its way is worth waiting for."""
    return True


class Cache:
    """Device pool and host tier together; with single flight a key is filled or reloaded once."""

    def __init__(
        self,
        device_pool: DevicePool,
        host_tier: HostTier | None = None,
        *,
        life_s: float,
        reloads: int,
        single_flight: bool = True,
    ) -> None:
        self.device_pool = device_pool
        self.host_tier = host_tier
        self.life_s = life_s
        self.reloads = reloads
        self.single_flight = single_flight
        self.loading = 0
        self.fills = FillQueue()
        """Entries to fill, those under way included."""
        self.loads = FillQueue()
        """Entries to reload, those under way excluded."""
        self.counts: Counter[str] = Counter()
        self._retired: set[str] = set()

    # Asking

    def has(self, need: Need, now: float) -> bool:
        """Whether it is cached or on its way."""
        entry = self.device_pool.find(need.key)
        if entry and (entry.complete or self.single_flight):
            return True
        return self.host_tier is not None and self.host_tier.holds(need.key, now)

    def acquire(
        self,
        need: Need,
        purpose: Purpose,
        now: float,
        ticket: Any = None,
        in_time: Callable[[Entry], bool] = always,
    ) -> Acquired:
        """What this leg is to do; a ranking that has to wait comes back as `ticket`.

        `in_time` says whether a ranking gains by waiting for an entry that is not complete.
        """
        entry = self.device_pool.find(need.key)
        if entry and not entry.complete and not self.single_flight:
            entry = None
        if entry is None:
            return self._start(need, purpose, now, ticket, in_time)
        if purpose is Purpose.SIGNAL:
            self._promise(entry, now)
            return Promised(entry)
        entry.promises = max(0, entry.promises - 1)
        if entry.complete:
            self._use(entry)
            return Use(entry)
        if not in_time(entry):
            self._settle(entry)
            return Miss.TOO_LATE
        entry.waiters.append(ticket)
        self._queue_of(entry).hurry(entry)
        return Wait(entry)

    def _start(
        self,
        need: Need,
        purpose: Purpose,
        now: float,
        ticket: Any,
        in_time: Callable[[Entry], bool],
    ) -> Acquired:
        """Nothing in device memory: reload, compute, or miss."""
        kept = self.host_tier is not None and self.host_tier.holds(need.key, now)
        if not kept and purpose is Purpose.RANK:
            return Miss.NOWHERE
        source = KVSource.HOST if kept else KVSource.COMPUTED
        late = purpose is not Purpose.SIGNAL and not in_time(Entry(need, source))
        if late and kept:
            return Miss.TOO_LATE
        entry = self.device_pool.reserve(need, source)
        if entry is None:
            return Miss.NO_ROOM
        entry.lasting = purpose is Purpose.RANK_AND_KEEP and not kept
        if late:  # not for this ranking, but for the user's next one
            self.fills.push(entry)
            return Miss.TOO_LATE
        if kept:
            assert self.host_tier is not None, "there is no host memory"
            self.host_tier.pin(need.key, now)
        if purpose is Purpose.SIGNAL:
            self._promise(entry, now)
        else:
            entry.waiters.append(ticket)
        self._queue_of(entry).push(entry)
        return Load(entry) if kept else Fill(entry)

    def leave(self, entry: Entry, ticket: Any) -> None:
        """A ranking waits no longer."""
        entry.waiters.remove(ticket)
        self._settle(entry)

    def released(self, entry: Entry) -> None:
        """A ranking has read it."""
        entry.users -= 1
        self._settle(entry)

    def discard(self, entry: Entry) -> None:
        """Hide a bad prefix, and free it after its last reader."""
        self.counts["discarded"] += 1
        self.device_pool.unlist(entry)
        self._want_no_more(entry)

    # Working

    def next_fill(self) -> Entry | None:
        """The entry to fill next."""
        while entry := self.fills.first():
            if entry.wanted:
                entry.state = EntryState.FILLING
                return entry
            self.counts["abandoned_fills"] += 1
            self._forget(entry)
        return None

    def next_fills(self, events: int, entries: int) -> list[Entry]:
        """Entries to fill in one batch: the first in the queue, and those that end within `events`.

        Those after it join in their order while they fit whole, have the same model, and are
        as urgent: a ranking that waits is not held up by a prefix that none waits for.
        """
        first = self.next_fill()
        if first is None:
            return []
        chosen, left = [first], events - first.num_missing
        for entry in islice((e for e in self.fills if e is not first and e.wanted), entries - 1):
            left -= entry.num_missing
            alike = entry.need.model is first.need.model
            if left < 0 or not alike or bool(entry.waiters) != bool(first.waiters):
                break
            entry.state = EntryState.FILLING
            chosen.append(entry)
        return chosen

    def filled(self, entry: Entry, kv: KV, now: float) -> list[Any]:
        """A chunk is computed; once it is complete, the tickets that may now read it."""
        assert entry.accepts(kv), f"{len(kv)} events after {entry.num_events} of {entry.key}"
        entry.kv = kv
        if len(kv) < entry.key.length:
            return []
        self.counts["fills"] += 1
        self.fills.remove(entry)
        return self._ready(entry, now)

    def next_load(self, now: float) -> tuple[Entry, KV] | None:
        """The reload to do next; None while `reloads` are under way."""
        while self.loading < self.reloads and (entry := self.loads.first()):
            if entry.wanted:
                assert self.host_tier is not None, "there is no host memory"
                self.loads.remove(entry)
                self.loading += 1
                entry.state, entry.loading_since = EntryState.FILLING, now
                return entry, self.host_tier.read(entry.key)
            self._forget(entry)
        return None

    def begun(self, entry: Entry, kv: KV, now: float) -> list[Any]:
        """Its layers arrive from now on; the tickets that may read them meanwhile.

        Host memory stays pinned, and the entry stays, until `loaded` or `failed` is said.
        """
        self._check_reload(entry, kv)
        entry.kv, entry.arriving = kv, True
        return self._ready(entry, now)

    def loaded(self, entry: Entry, kv: KV, now: float) -> list[Any]:
        """The reload is complete; the tickets that may now read it."""
        self.counts["reloads"] += 1
        self.loading -= 1
        self._unpin(entry)
        if not entry.arriving:
            self._check_reload(entry, kv)
            entry.kv = kv
            return self._ready(entry, now)
        entry.kv, entry.arriving = kv, False
        self._settle(entry)
        return []

    def _check_reload(self, entry: Entry, kv: KV) -> None:
        assert entry.accepts(kv), f"more memory than was set aside for {entry.key}"
        assert len(kv) == entry.key.length, f"{len(kv)} events of {entry.key}"

    def failed(self, entry: Entry) -> list[Any]:
        """Its fill or reload failed; the tickets that go inline.

        Rankings that read it already are not among them: they find out, and then leave it.
        """
        if entry.arriving:
            return self._failed_half_way(entry)
        self.counts[f"failed_{'reloads' if entry.source is KVSource.HOST else 'fills'}"] += 1
        tickets, entry.waiters, entry.promises, entry.lasting = entry.waiters, [], 0, False
        if entry.source is KVSource.HOST:
            self.loading -= 1
        self._forget(entry)
        return tickets

    def _failed_half_way(self, entry: Entry) -> list[Any]:
        self.counts["failed_reloads"] += 1
        self.loading -= 1
        self._unpin(entry)
        entry.arriving = False
        self.device_pool.unlist(entry)
        self._want_no_more(entry)
        return []

    def next_copy(self, now: float) -> tuple[Entry, KV] | None:
        """The offload to do next."""
        while self.host_tier is not None and (entry := self.device_pool.oldest_idle()):
            assert entry.kv is not None
            if self.host_tier.begin(entry.key, entry.num_bytes, now):
                self.device_pool.busy(entry)
                entry.copying = True
                return entry, entry.kv
            self.device_pool.free(entry)
        return None

    def copied(self, entry: Entry, kv: KV | None, now: float) -> None:
        """The offload is complete, or, without `kv`, failed."""
        assert self.host_tier is not None, "there is no host memory"
        entry.copying = False
        if kv is None or entry.key.version in self._retired:
            self.counts["failed_offloads"] += kv is None
            self.host_tier.cancel(entry.key)
            if entry.state is EntryState.DONE:
                return self.device_pool.free(entry)
        else:
            self.counts["offloads"] += 1
            self.host_tier.finish(entry.key, kv, now)
        self._settle(entry)

    # Time and versions

    def expire(self, now: float) -> bool:
        """End promises whose TTL is over; whether there were any."""
        some = False
        for entry in self.device_pool.ended(now):
            some = True
            entry.promises = 0
            if entry.state is EntryState.RESERVED:
                computed = entry.source is KVSource.COMPUTED
                self.counts["abandoned_fills"] += computed and not entry.lasting
            elif not entry.used:
                self.counts["wasted_prefixes"] += 1
                self.device_pool.unlist(entry)
            self._settle(entry)
        if self.host_tier is not None:
            self.host_tier.expire(now)
        return some

    def retire(self, version: str) -> None:
        """A model was replaced: free its prefixes after their last readers."""
        self._retired.add(version)
        for entry in [e for e in self.device_pool if e.key.version == version]:
            self._want_no_more(entry)
        if self.host_tier is not None:
            self.host_tier.drop_where(lambda key: key.version == version)

    def revive(self, version: str) -> None:
        """A model serves (again)."""
        self._retired.discard(version)

    # The life of an entry

    def _queue_of(self, entry: Entry) -> FillQueue:
        return self.loads if entry.source is KVSource.HOST else self.fills

    def _promise(self, entry: Entry, now: float) -> None:
        entry.promises += 1
        self.device_pool.promise(entry, now + self.life_s)
        if entry.state is EntryState.DONE:
            self.device_pool.busy(entry)
            entry.state = EntryState.READY

    def _use(self, entry: Entry) -> None:
        self.device_pool.busy(entry)
        entry.state = EntryState.IN_USE
        entry.users += 1
        entry.used = True

    def _ready(self, entry: Entry, now: float) -> list[Any]:
        entry.state, entry.lasting = EntryState.READY, False
        tickets, entry.waiters = entry.waiters, []
        for _ in tickets:
            self._use(entry)
        self.device_pool.promise(entry, now + self.life_s)
        self._settle(entry)
        return tickets

    def _want_no_more(self, entry: Entry) -> None:
        """Free it once those who read or wait for it have left."""
        entry.promises, entry.lasting = 0, False
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        """Move an entry to its next state after a user released it."""
        if entry.users or entry.waiters:
            return
        if entry.promises:
            if entry.state is EntryState.IN_USE:
                entry.state = EntryState.READY
            self.device_pool.promise(entry, entry.keep_until)
        elif entry.state is EntryState.RESERVED and not entry.lasting:
            self._forget(entry)
        elif entry.complete:
            self._done(entry)

    def _done(self, entry: Entry) -> None:
        entry.state = EntryState.DONE
        if entry.copying or entry.arriving:
            return  # the copy thread says when it has ended
        if self._worth_copying(entry):
            self.device_pool.idle(entry)
        else:
            self.device_pool.free(entry)

    def _worth_copying(self, entry: Entry) -> bool:
        if self.host_tier is None or not entry.listed or entry.key.version in self._retired:
            return False
        return entry.key not in self.host_tier

    def _forget(self, entry: Entry) -> None:
        """Free an entry that never became complete."""
        self._queue_of(entry).remove(entry)
        if entry.source is KVSource.HOST:
            self._unpin(entry)
        self.device_pool.free(entry)

    def _unpin(self, entry: Entry) -> None:
        assert self.host_tier is not None, "there is no host memory"
        self.host_tier.unpin(entry.key)
        if entry.key.version in self._retired:
            self.host_tier.discard(entry.key)
