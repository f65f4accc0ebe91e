"""Host memory that a GPU may read and write by itself, at the addresses that the host uses."""

# pyright: strict
from __future__ import annotations

from collections.abc import Callable

import torch

Pieces = Callable[[int], list[tuple[int, int]]]
"""Address and bytes of every piece of memory from a number on."""
PORTABLE = 1
"""CUDA's flag for memory that every GPU of the process may use."""


class PinnedMemory:
    """The pieces of a memory that only grows."""

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
