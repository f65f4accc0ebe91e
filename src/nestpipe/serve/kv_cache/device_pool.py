"""The device pool: prefixes in device memory, each reserved, filling, ready, in use or done.

Plain state, without threads: the caller holds a lock and gives the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

from nestpipe.serve.types import KV, History, PrefixKey, RankModel


class EntryState(StrEnum):
    """The state of an entry; it begins RESERVED and is freed after DONE."""

    RESERVED = "reserved"
    """Its memory is reserved; nothing is computed or copied yet."""
    FILLING = "filling"
    READY = "ready"
    """Complete, or layers arrive one by one; promised to a ranking that has not come yet."""
    IN_USE = "in_use"
    DONE = "done"
    """Promised to nobody: it may be offloaded or evicted."""


class KVSource(StrEnum):
    """Where the contents of an entry come from."""

    COMPUTED = "computed"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Need:
    """A prefix that a request needs, and what it takes to compute it."""

    key: PrefixKey
    history: History
    model: RankModel
    num_bytes: int

    @classmethod
    def of(cls, user: str, history: History, model: RankModel) -> Need:
        key = PrefixKey.of(user, history, model.version, model.dtype)
        return cls(key, history, model, model.kv_bytes(len(history)))


@dataclass(eq=False, slots=True)
class Entry:
    """One prefix in device memory, or its reservation."""

    need: Need
    source: KVSource
    state: EntryState = EntryState.RESERVED
    kv: KV | None = None
    """The first events only, while it is filled in chunks."""
    promises: int = 0
    """Signals whose ranking has not come yet."""
    waiters: list[Any] = field(default_factory=list[Any])
    """Tickets of rankings that wait until it is complete."""
    users: int = 0
    """Rankings that read it now."""
    keep_until: float = 0.0
    """End of the last promise."""
    used: bool = False
    lasting: bool = False
    """It is filled to be kept, even if no ranking uses it."""
    spent_s: float = 0.0
    """Time that computing it has taken so far."""
    loading_since: float | None = None
    """When its reload began."""
    copying: bool = False
    """It is being offloaded."""
    arriving: bool = False
    """Readable, while its layers are still being reloaded."""
    listed: bool = True
    """Whether `find` returns it; one that is not listed is freed after its last reader."""

    @property
    def key(self) -> PrefixKey:
        return self.need.key

    @property
    def num_bytes(self) -> int:
        return self.need.num_bytes

    @property
    def num_events(self) -> int:
        """Events that are computed."""
        return 0 if self.kv is None else len(self.kv)

    @property
    def wanted(self) -> bool:
        """Whether a ranking waits for it, reads it or may still come, or it is to be kept."""
        return bool(self.promises or self.waiters or self.users or self.lasting)

    @property
    def num_missing(self) -> int:
        """Events that are not computed yet."""
        return self.key.length - self.num_events

    @property
    def complete(self) -> bool:
        """Whether a ranking may read it; it waits for a layer that is still arriving."""
        return self.state in (EntryState.READY, EntryState.IN_USE, EntryState.DONE)

    def accepts(self, kv: KV) -> bool:
        """Whether this is more of the prefix, within the reserved memory."""
        return self.num_events < len(kv) <= self.key.length and kv.num_bytes <= self.num_bytes


class DevicePool:
    """Device memory for prefixes: a hard limit in bytes; what is promised is never evicted."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.num_bytes = 0
        self.evicted = 0
        self._entries: dict[PrefixKey, list[Entry]] = {}
        self._unlisted: set[Entry] = set()
        self._idle: dict[Entry, None] = {}
        """Done and not being copied, oldest first."""
        self._idle_bytes = 0
        self._ends: list[tuple[float, int, Entry]] = []
        self._serial = count()

    def __iter__(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from entries
        yield from self._unlisted

    def find(self, key: PrefixKey) -> Entry | None:
        """The most complete entry of that key."""
        entries = self._entries.get(key, ())
        return max(entries, key=lambda entry: (entry.complete, entry.num_events), default=None)

    def fits(self, num_bytes: int) -> bool:
        """Whether so much memory is free, or can be by evicting what is done."""
        return self.promised_bytes + num_bytes <= self.bound

    def reserve(self, need: Need, source: KVSource) -> Entry | None:
        """Reserve memory, evicting what is done; None if the rest is promised."""
        if not self.fits(need.num_bytes):
            return None
        while self.num_bytes + need.num_bytes > self.bound:
            self.evicted += 1
            self.free(next(iter(self._idle)))
        entry = Entry(need, source)
        self._entries.setdefault(need.key, []).append(entry)
        self.num_bytes += need.num_bytes
        return entry

    def free(self, entry: Entry) -> None:
        """Give its memory back; nobody may touch it any more."""
        assert not entry.wanted, f"{entry.key} is freed while it is needed"
        moving = entry.copying or entry.arriving
        assert not moving, f"{entry.key} is freed while it is copied"
        self.unlist(entry)
        self._unlisted.remove(entry)
        self.num_bytes -= entry.num_bytes
        entry.kv = None

    def unlist(self, entry: Entry) -> None:
        """Hide it from `find`."""
        self.busy(entry)
        if entry.listed:
            entry.listed = False
            self._unlisted.add(entry)
            entries = self._entries[entry.key]
            entries.remove(entry)
            if not entries:
                del self._entries[entry.key]

    @property
    def promised_bytes(self) -> int:
        """Memory that cannot be evicted now."""
        return self.num_bytes - self._idle_bytes

    # What is done, and in which order

    def idle(self, entry: Entry) -> None:
        """It is done: evictable until it is read or offloaded."""
        entry.state = EntryState.DONE
        if not entry.copying and entry not in self._idle:
            self._idle[entry] = None
            self._idle_bytes += entry.num_bytes

    def busy(self, entry: Entry) -> None:
        """It is not evictable any more."""
        if entry in self._idle:
            del self._idle[entry]
            self._idle_bytes -= entry.num_bytes

    def oldest_idle(self) -> Entry | None:
        return next(iter(self._idle), None)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    # The end of promises

    def promise(self, entry: Entry, until: float) -> None:
        """Keep it until then, or longer where that was promised before."""
        entry.keep_until = max(entry.keep_until, until)
        heapq.heappush(self._ends, (entry.keep_until, next(self._serial), entry))

    def next_end(self) -> float | None:
        """When the next promise may end."""
        return self._ends[0][0] if self._ends else None

    def ended(self, now: float) -> Iterator[Entry]:
        """Entries whose promises have ended and which nobody reads, fills or waits for."""
        while self._ends and self._ends[0][0] <= now:
            entry = heapq.heappop(self._ends)[2]
            over = entry.keep_until <= now and entry.listed
            if (
                over
                and entry.state in (EntryState.RESERVED, EntryState.READY)
                and not entry.waiters
            ):
                yield entry


class FillQueue:
    """Prefixes to fill or reload: those that a ranking waits for first, then FIFO."""

    def __init__(self) -> None:
        self._awaited: dict[Entry, None] = {}
        self._promised: dict[Entry, None] = {}

    def __len__(self) -> int:
        return len(self._awaited) + len(self._promised)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._awaited
        yield from self._promised

    def push(self, entry: Entry) -> None:
        (self._awaited if entry.waiters else self._promised)[entry] = None

    def hurry(self, entry: Entry) -> None:
        """A ranking waits for it now; no effect on one that has left the queue."""
        if entry in self._promised:
            del self._promised[entry]
            self._awaited[entry] = None

    def remove(self, entry: Entry) -> None:
        self._awaited.pop(entry, None)
        self._promised.pop(entry, None)

    def first(self) -> Entry | None:
        return next(iter(self), None)

    @property
    def awaited(self) -> bool:
        """Whether a ranking waits for the first."""
        return bool(self._awaited)
