"""Who sees which samples when: the order of an epoch, and each rank's part of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import ConfigError

_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Permutation:
    """A shuffle of `range(size)` that can be asked for any part without making the whole.

    It is a Feistel network over the next power of two; a number that falls outside is sent
    through again until it falls inside. No memory, and the same on every machine.
    """

    size: int
    key: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """What stands at each of these positions."""
        found = self._shuffle(positions.astype(np.uint64))
        while (outside := np.flatnonzero(found >= self.size)).size:
            found[outside] = self._shuffle(found[outside])
        return found.astype(np.int64)

    def _shuffle(self, number: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = max(2, (self.size - 1).bit_length())
        low_bits, high_bits = bits // 2, bits - bits // 2
        low = number & np.uint64((1 << low_bits) - 1)
        high = number >> np.uint64(low_bits)
        for turn in range(_ROUNDS):
            # `high` is as wide as it came in: both halves get their turn, and their widths back.
            mask = np.uint64((1 << (high_bits if turn % 2 == 0 else low_bits)) - 1)
            salt = np.uint64(mix(self.key, turn))
            low, high = high ^ (scatter(low * np.uint64(STEP) + salt) & mask), low
        return (high << np.uint64(low_bits)) | low


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which part of every global batch is this rank's."""

    global_batch: int
    """Samples of one batch over all ranks."""
    rank: int
    ranks: int
    start: int = 0
    """The first global batch that is wanted ..."""
    offset: int = 0
    """... and how many samples later it begins: after a change of the batch size."""

    @property
    def first(self) -> int:
        """The first sample that is wanted."""
        return self.start * self.global_batch + self.offset

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ConfigError(f"global_batch is {self.global_batch}; give 1 or more samples")
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise ConfigError(
                f"rank {self.rank} of {self.ranks} does not exist; ranks count from 0"
            )
        if self.start < 0 or self.offset < 0:
            raise ConfigError(f"start is {self.start}, {self.offset}; give 0 or a later batch")

    def part(self, size: int) -> tuple[int, int]:
        """Where this rank's samples begin and end in a global batch of `size`.

        Parts are neighbours in the order of ranks; the first ones have one more where `size`
        does not divide.
        """
        each, over = divmod(size, self.ranks)
        begin = self.rank * each + min(self.rank, over)
        return begin, begin + each + (self.rank < over)


# Stable 64-bit hashes: the same on every machine, in every process, for good.


U64 = NDArray[np.uint64]

STEP = 0x9E3779B97F4A7C15
"""An odd number far from any pattern: neighbours times this share few bits."""
_MASK = (1 << 64) - 1
_MIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(*parts: int) -> int:
    """Whole numbers to one 64-bit number; any change of any part changes about half its bits."""
    state = 0
    for part in parts:
        state = (state + STEP + part) & _MASK
        for shift, factor in _MIX_ROUNDS:
            state = ((state ^ (state >> shift)) * factor) & _MASK
        state ^= state >> 31
    return state


def scatter(state: U64) -> U64:
    """Each number to one that looks random, one to one; `state` is overwritten and returned."""
    for shift, factor in _MIX_ROUNDS:
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
