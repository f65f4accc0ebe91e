"""Where prefixes lie: the pool in device memory, and the host tier, an LRU cache with a TTL.

In the pool a prefix is reserved, filling, ready, in use or done. The host tier reloads prefixes.
Both are plain state, without threads: the caller holds a lock and gives the time. Pinning half a
gigabyte takes tens of milliseconds and stalls the GPU. So `HostArena` pins all memory when an
instance starts, and hands it out in pieces.
"""

from __future__ import annotations

import bisect
import heapq
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, takewhile
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from nestpipe.errors import CapacityError, RunError
from nestpipe.kernels.host_memory import PinnedMemory, map_pages
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
    """No ranking was promised it: it may be offloaded or evicted."""


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
        """Give its memory back; it must not be used any more."""
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
        """Entries whose promises have ended, which nothing reads, fills or waits for."""
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


@dataclass(eq=False, slots=True)
class HostEntry:
    """One prefix in host memory; without contents while it is copied there."""

    num_bytes: int
    expires: float
    kv: KV | None = None
    reloads: int = 0
    """Reloads that read it, or are about to: it is not evicted under them."""

    @property
    def pinned(self) -> bool:
        return self.kv is None or self.reloads > 0


class HostTier:
    """LRU host cache with a TTL, bounded in bytes; room is made before a copy begins."""

    def __init__(self, bound: int, ttl_s: float) -> None:
        self.bound = bound
        self.ttl_s = ttl_s
        self.num_bytes = 0
        self.evicted = 0
        self.expired = 0
        self._kept: dict[PrefixKey, HostEntry] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: PrefixKey) -> bool:
        """Whether it is there, or being copied here."""
        return key in self._kept

    def holds(self, key: PrefixKey, now: float) -> bool:
        """Whether it can be reloaded."""
        kept = self._kept.get(key)
        if kept is None or kept.kv is None:
            return False
        return kept.pinned or kept.expires > now

    # Out of device memory

    def begin(self, key: PrefixKey, num_bytes: int, now: float) -> bool:
        """Reserve room for a copy; False if it is here already, or there is no room."""
        if key in self._kept or not self._make_room(num_bytes, now):
            return False
        self._kept[key] = HostEntry(num_bytes, now + self.ttl_s)
        self.num_bytes += num_bytes
        return True

    def finish(self, key: PrefixKey, kv: KV, now: float) -> None:
        """The copy is complete."""
        kept = self._kept[key]
        assert kept.kv is None, f"{key} was copied twice"
        kept.kv = kv
        self._touch(key, now)

    def cancel(self, key: PrefixKey) -> None:
        """The copy failed."""
        assert self._kept[key].kv is None, f"the copy of {key} has come"
        self._drop(key)

    # Back into device memory

    def pin(self, key: PrefixKey, now: float) -> None:
        """A reload will read it."""
        self._kept[key].reloads += 1
        self._touch(key, now)

    def read(self, key: PrefixKey) -> KV:
        """What a pinned entry holds."""
        kept = self._kept[key]
        assert kept.kv is not None, f"{key} is read before it was copied"
        assert kept.reloads, f"{key} is read without a pin"
        return kept.kv

    def num_layers(self, key: PrefixKey) -> int:
        """Of a prefix that can be reloaded."""
        kept = self._kept[key]
        assert kept.kv is not None, f"{key} is asked about before it was copied"
        return len(kept.kv.keys_LNHA)

    def unpin(self, key: PrefixKey) -> None:
        """The reload is over."""
        kept = self._kept[key]
        assert kept.reloads, f"{key} has no pin"
        kept.reloads -= 1

    # Leaving

    def drop_where(self, stale: Callable[[PrefixKey], bool]) -> None:
        """Drop what is stale, but not from under a copy."""
        for key in list(filter(stale, self._kept)):
            self.discard(key)

    def discard(self, key: PrefixKey) -> None:
        """Drop one, but not from under a copy."""
        if not self._kept[key].pinned:
            self._drop(key)

    def expire(self, now: float) -> None:
        """Drop entries whose TTL is over."""
        for key, kept in list(self._old(now)):
            if not kept.pinned:
                self.expired += 1
                self._drop(key)

    def _old(self, now: float) -> Iterator[tuple[PrefixKey, HostEntry]]:
        return takewhile(lambda pair: pair[1].expires <= now, self._kept.items())

    def _make_room(self, num_bytes: int, now: float) -> bool:
        self.expire(now)
        if num_bytes > self.bound:
            return False
        while self.num_bytes + num_bytes > self.bound:
            oldest = next((key for key, kept in self._kept.items() if not kept.pinned), None)
            if oldest is None:
                return False
            self.evicted += 1
            self._drop(oldest)
        return True

    def _touch(self, key: PrefixKey, now: float) -> None:
        kept = self._kept.pop(key)
        kept.expires = now + self.ttl_s
        self._kept[key] = kept

    def _drop(self, key: PrefixKey) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes


class LayerEvents:
    """Which layers of a prefix are readable, between the thread that copies and those that read.

    One thread adds layers in order; any number of threads wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event | None] = []
        self._failed = False
        self._change = threading.Condition()

    def add(self, event: torch.cuda.Event | None) -> None:
        """The next layer is readable; with a CUDA event, once the device has reached it."""
        with self._change:
            self._events.append(event)
            self._change.notify_all()

    def fail(self) -> None:
        """The copy failed: a thread that waits for a layer gets an error."""
        with self._change:
            self._failed = True
            self._change.notify_all()

    def wait_for(self, layer: int) -> None:
        """Return when kernels that this thread launches next may read the layer.

        On a GPU the thread waits only until the copy is enqueued; its current stream then waits for
        the copy's event.
        """
        with self._change:
            self._change.wait_for(lambda: self._failed or layer < len(self._events))
            if self._failed:
                raise RunError("a prefix came back only in part; compute it again")
            event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


class Reload:
    """A prefix on its way from host to device memory, one layer after the other.

    Made and run by one thread, on its current stream.

    `kv` may be given to `rank` as soon as it is made: its arrival says when each layer is there.
    """

    @torch.inference_mode()
    def __init__(self, host: KV, device: torch.device) -> None:
        """Sets device memory aside; brings the times at once, which `rank` reads before any layer.

        The memory belongs to the present stream, and the allocator gives it out again on that
        stream only: also where this fails half way, copies that are still under way end before
        others begin. Reads on other streams must have ended before it is freed.
        """
        self._host = host
        self._device = device
        self._arrival = LayerEvents(device)
        self.kv = KV(
            torch.empty_like(host.keys_LNHA, device=device),
            torch.empty_like(host.values_LNHV, device=device),
            None if host.times_N is None else self._whole(host.times_N),
            self._arrival,
        )

    @torch.inference_mode()
    def run(self) -> KV:
        """Copy all layers; the complete prefix."""
        try:
            for layer in range(len(self._host.keys_LNHA)):
                self.copy(layer)
                self._arrival.add(self._event())
            self._synchronize()
        except BaseException:
            self._arrival.fail()
            raise
        return replace(self.kv, layer_events=None)

    def copy(self, layer: int) -> None:
        """Enqueue the copy of one layer; asynchronous from pinned memory."""
        for host, here in (
            (self._host.keys_LNHA, self.kv.keys_LNHA),
            (self._host.values_LNHV, self.kv.values_LNHV),
        ):
            here[layer].copy_(host[layer], non_blocking=True)

    def _whole(self, times_N: Tensor) -> Tensor:
        copied_N = torch.empty_like(times_N, device=self._device).copy_(times_N, non_blocking=True)
        self._synchronize()
        return copied_N

    def _event(self) -> torch.cuda.Event | None:
        """An event after all that is enqueued on this thread's stream."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@runtime_checkable
class ReloadsByLayer(Protocol):
    """A model that reloads by layer; others reload by `to_device`."""

    def begin_reload(self, host: KV) -> Reload:
        """The copy that is to be run; `rank` may use its `kv` meanwhile."""
        ...


# Host memory for prefixes, mapped and pinned before the first request.


GRAIN = 4096
"""Alignment of pieces, in bytes."""
SPARE = 16
"""One part in N is added, against fragmentation."""


class HostArena:
    """An allocator in one mapping; a piece is freed with the last tensor in it."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        wanted = num_bytes + num_bytes // SPARE
        self.num_bytes = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = map_pages(self.num_bytes)
        self._pins = PinnedMemory()
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()
        """Finalizers may run anywhere, so they only append here."""
        self._free = [(0, self.num_bytes)]
        """Start and end of every free piece, in order; neighbours are never both free."""
        if pinned:
            address = np.frombuffer(self._memory, np.uint8).ctypes.data
            if not self._pins.extend(lambda known: [(address, self.num_bytes)][known:]):
                raise CapacityError(
                    f"the system does not pin {self.num_bytes / 1e9:.1f} GB of host memory; "
                    "give a smaller serve.host_mb, or raise the limit on locked memory (ulimit -l)"
                )
            weakref.finalize(self, self._pins.close).atexit = False

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return sum(end - start for start, end in self._free)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        start, end = self._take(size)
        view = np.frombuffer(self._memory, np.uint8, size, start)
        # The tensor's storage holds the view, and until that goes the arena is kept too.
        weakref.finalize(view, HostArena._come_back, self, (start, end)).atexit = False
        return torch.from_numpy(view).view(dtype).view(*shape)

    def _take(self, size: int) -> tuple[int, int]:
        wanted = max(1, -(-size // GRAIN)) * GRAIN
        with self._lock:
            self._take_back()
            for at, (start, end) in enumerate(self._free):
                if end - start >= wanted:
                    rest = (start + wanted, end)
                    self._free[at : at + 1] = [rest] if rest[0] < end else []
                    return start, start + wanted
        raise CapacityError(
            f"no {size / 1e6:.0f} MB in one piece of host memory for prefixes are free; "
            "give a larger serve.host_mb"
        )

    def _take_back(self) -> None:
        """With the lock held."""
        while self._returned:
            start, end = self._returned.popleft()
            at = bisect.bisect_left(self._free, (start, end))
            if at < len(self._free) and self._free[at][0] == end:
                end = self._free.pop(at)[1]
            if at > 0 and self._free[at - 1][1] == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, end))

    def _come_back(self, piece: tuple[int, int]) -> None:
        self._returned.append(piece)


@runtime_checkable
class KeepsInArena(Protocol):
    """A model that offloads prefixes into an arena, if it has one."""

    arena: HostArena | None

    @property
    def wants_arena(self) -> bool:
        """Whether host memory must be pinned for its device."""
        ...


def give_arena(model: object, num_bytes: int) -> None:
    """Give an arena to a model that wants one and has none of that size."""
    if isinstance(model, KeepsInArena) and model.wants_arena:
        before = model.arena
        if before is None or before.num_bytes < num_bytes:
            model.arena = HostArena(num_bytes, pinned=True)


def hand_over_arena(old: object, new: object) -> None:
    """A new model takes over the arena of the old one, with what is in it."""
    if isinstance(old, KeepsInArena) and isinstance(new, KeepsInArena) and new.wants_arena:
        new.arena = new.arena or old.arena
