"""The host tier: an LRU cache of prefixes with a TTL, their reload, and the memory they lie in.

`HostTier` is plain state, without threads: the caller holds a lock and gives the time. Pinning half
a gigabyte takes tens of milliseconds and stalls the GPU. So `HostArena` pins all memory when an
instance starts, and hands it out in pieces.
"""

from __future__ import annotations

import bisect
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from nestpipe.errors import CapacityError
from nestpipe.kernels.host_memory import PinnedMemory, map_pages
from nestpipe.serve.types import KV, LayerEvents, PrefixKey


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
        others begin. Whoever reads it on another stream must have ended before it is freed.
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
"""One part in so many is added, against fragmentation."""


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
