"""`HostArena`: host memory for prefixes, mapped and pinned before the first request.

Pinning half a gigabyte takes tens of milliseconds and stalls the GPU. So all memory is pinned when
an instance starts, and handed out in pieces.
"""

from __future__ import annotations

import bisect
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from nestpipe.errors import CapacityError
from nestpipe.kernels.host_memory import PinnedMemory, map_pages

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
