"""Host memory: a caching allocator for large tensors, and memory pinned for GPUs.

Fresh pages cost more than the work in them, so memory is used again. It comes back by itself when
the last tensor in it is gone, as with torch's allocator for GPUs.
"""

from __future__ import annotations

import bisect
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

SMALLEST = 256 * 1024
"""Bytes from which a tensor's memory is kept; malloc does well below."""
HUGE_PAGE = 2 * 1024 * 1024
SMALL_STEP = 64 * 1024


class HostMemory:
    """Blocks of memory that are free, by size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[mmap.mmap] = deque()
        """Blocks that came back; finalizers may run anywhere, so they only append here."""
        self._free: list[tuple[int, int, mmap.mmap]] = []
        self._counter = 0
        self.mapped_bytes = 0
        """All memory, in use or free."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with any content; small ones are torch's own."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALLEST:
            return torch.empty(*shape, dtype=dtype)
        block = self._take(size)
        view = np.frombuffer(block, np.uint8, size)
        # The tensor holds the view, the view holds the block; when the tensor's storage goes, the
        # view goes, and the block is free again.
        weakref.finalize(view, self._returned.append, block).atexit = False
        tensor = torch.from_numpy(view)  # pyright: ignore[reportUnknownMemberType]
        return tensor.view(dtype).view(*shape)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            while self._returned:
                block = self._returned.popleft()
                self._counter += 1
                bisect.insort(self._free, (len(block), self._counter, block))
            at = bisect.bisect_left(self._free, (size,))
            # Memory of more than twice what is needed is left for others.
            if at < len(self._free) and self._free[at][0] <= 2 * block_size(size):
                return self._free.pop(at)[2]
            self._drop_what_is_too_small(at)
            block = map_pages(block_size(size))
            self.mapped_bytes += len(block)
            return block

    def _drop_what_is_too_small(self, at: int) -> None:
        """Where half of all memory lies idle, sizes have changed: give the smaller blocks back."""
        idle = sum(size for size, _, _ in self._free)
        if 2 * idle > self.mapped_bytes:
            self.mapped_bytes -= sum(size for size, _, _ in self._free[:at])
            del self._free[:at]


def block_size(size: int) -> int:
    """A little more than is needed, because batches differ a little in size."""
    wanted = size + size // 8
    step = HUGE_PAGE if wanted >= 2 * HUGE_PAGE else SMALL_STEP
    return -(-wanted // step) * step


def map_pages(size: int) -> mmap.mmap:
    """Fresh memory of this process, in huge pages where the system has them."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_MEMORY = HostMemory()


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> Tensor:
    """An uninitialised tensor from memory that is used again, on the host or on a GPU.

    `pinned`: host memory from which a GPU copies by itself; torch keeps that for us.
    """
    if device.type != "cpu" or pinned:
        return torch.empty(*shape, dtype=dtype, device=device, pin_memory=pinned)
    return _MEMORY.empty(shape, dtype)


class CopiesToHost:
    """Brings tensors of a device to the host, beside whatever else the device does.

    Made by the thread that has put the tensors on its stream; used by one other thread. On a GPU
    that has a stream of its own here, which waits for the tensors, and nobody else waits.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._made: torch.cuda.Event | None = None

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """These and others of their device are read behind all that is on the caller's stream."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is None:
            return
        if self._stream is None:  # one for good: torch deals them out in turns, and lanes have some
            self._stream = torch.cuda.Stream(device)
        self._made = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(device))

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside, the calling thread's work goes to that stream; it is done with it at the end.

        So the tensors are free for others then, whatever has failed inside.
        """
        if self._stream is None or self._made is None:
            yield
            return
        self._stream.wait_event(self._made)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def fetch(self, tensor: Tensor) -> Tensor:
        """A tensor on the host: a copy in pinned memory, or the tensor itself where it is there."""
        if not tensor.is_cuda:
            return tensor
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # a thread that spins would take a core from lanes
        done.record()
        done.synchronize()
        return there


Pieces = Callable[[int], list[tuple[int, int]]]
"""Address and bytes of every piece of memory from a number on."""
PORTABLE = 1
"""CUDA's flag for memory that every GPU of the process may use."""


class PinnedMemory:
    """Memory that only grows, and that GPUs read and write at the host's own addresses."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._refused = False

    def extend(self, pieces: Pieces) -> bool:
        """Pin what came since; False where the system refuses, now or before."""
        if self._refused:
            return False
        for address, size in pieces(len(self._addresses)):
            if _register(address, size) != 0:
                self._refused = True
                return False
            self._addresses.append(address)
        return True

    def close(self) -> None:
        """Let the system have it back; to be called before the memory goes."""
        for address in self._addresses:
            _unregister(address)
        self._addresses = []


def _register(address: int, size: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE))  # pyright: ignore


def _unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # pyright: ignore
