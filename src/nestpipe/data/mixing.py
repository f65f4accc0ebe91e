"""Stable 64-bit hashes: the same on every machine, in every process, for good."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

STEP = 0x9E3779B97F4A7C15
"""An odd number far from any pattern: neighbours times this share few bits."""
_MASK = (1 << 64) - 1
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(*parts: int) -> int:
    """Whole numbers to one 64-bit number; any change of any part changes about half its bits."""
    state = 0
    for part in parts:
        state = (state + STEP + part) & _MASK
        for shift, factor in _ROUNDS:
            state = ((state ^ (state >> shift)) * factor) & _MASK
        state ^= state >> 31
    return state


def scatter(state: U64) -> U64:
    """Each number to one that looks random, one to one; `state` is overwritten and returned."""
    for shift, factor in _ROUNDS:
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


def draw(key: int, numbers: NDArray[np.integer]) -> U64:
    """A random-looking 64-bit number for each of `numbers`, under `key`."""
    state = numbers.astype(np.uint64)
    state *= np.uint64(STEP)
    state += np.uint64(key)
    return scatter(state)


def uniform(bits: U64) -> NDArray[np.float64]:
    """64 bits as a number from 0 up to but not 1."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def text_key(text: str) -> int:
    """The key of a string: the first 8 bytes of its BLAKE2b-64 as a signed number, UTF-8."""
    digest = blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def text_keys(texts: Iterable[str]) -> NDArray[np.int64]:
    """`text_key` of each."""
    return np.array([text_key(text) for text in texts], dtype=np.int64)
