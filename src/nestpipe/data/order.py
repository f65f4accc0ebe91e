"""Who sees which samples when: the order of an epoch, and each rank's part of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import ConfigError
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.take import permutation

# Shapes: V shards

I64 = NDArray[np.int64]
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

    def whole(self, *, native: bool) -> I64:
        """What stands at every position; native code has the same numbers faster."""
        if not native:
            return self(np.arange(self.size, dtype=np.int64))
        salts = [mix(self.key, turn) for turn in range(_ROUNDS)]
        return permutation(self.size, np.array(salts, dtype=np.uint64))

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


# An epoch in virtual shards.


SHARD_WINDOW = 8_192
"""Samples that a shard's window has at least, where the number of shards is chosen."""
MOST_SHARDS = 64
"""Shards at most, where their number is chosen."""


def choose_shards(wanted: int, window: int, num_chunks: int) -> int:
    """How many shards: as wanted, or a power of two with windows and chunks enough for each."""
    if wanted:
        return wanted
    most = max(1, min(MOST_SHARDS, window // SHARD_WINDOW, num_chunks // 2))
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Turns:
    """Which shard has the sample at each position of an epoch."""

    shards: int
    samples: int
    place_V: I64 = field(init=False)
    """When in a round each shard has its turn."""

    def __post_init__(self) -> None:
        # Shards far apart follow each other: a part of a round is spread over all ranks.
        bits = max(1, (self.shards - 1).bit_length())
        reversed_ = [int(f"{shard:0{bits}b}"[::-1], 2) for shard in range(self.shards)]
        turn = np.argsort(reversed_, kind="stable")
        place_V = np.empty(self.shards, dtype=np.int64)
        place_V[turn] = np.arange(self.shards)
        object.__setattr__(self, "place_V", place_V)

    def counts(self, position: int) -> I64:
        """(V,) samples of each shard before a position."""
        rounds, rest = divmod(position, self.shards)
        return rounds + (self.place_V < rest)

    def parts(self, share: Share, begin: int) -> Iterator[tuple[int, int, int]]:
        """This rank's part of the batch that begins there: (shard, first, end), shard by shard."""
        end = min(begin + share.global_batch, self.samples)
        return self.between(begin, end, *share.part(end - begin))

    def between(self, begin: int, end: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Numbers [low, high) of the positions from `begin` to `end`, listed shard by shard."""
        first_V = self.counts(begin)
        size_V = self.counts(end) - first_V
        before_V = np.cumsum(size_V) - size_V
        from_V = np.clip(low - before_V, 0, size_V)
        to_V = np.clip(high - before_V, 0, size_V)
        for shard in np.flatnonzero(to_V > from_V).tolist():
            first = int(first_V[shard])
            yield shard, first + int(from_V[shard]), first + int(to_V[shard])


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one epoch; a function of the data, the seed, the epoch and these sizes."""

    counts: Sequence[int]
    """Samples of each chunk."""
    key: int
    """Of the seed and the epoch."""
    window: int
    """Samples that are permuted at a time, of all shards together."""
    shards: int
    shuffle: bool

    @property
    def turns(self) -> Turns:
        return Turns(self.shards, sum(self.counts))

    @property
    def shard_window(self) -> int:
        return max(1, self.window // self.shards)

    def window_order(self, shard: int, window: int, size: int) -> I64 | None:
        """How a window's samples are permuted; None: not at all.

        One shard alone has the order of a stream without shards.
        """
        if not self.shuffle:
            return None
        alone = self.shards == 1
        key = mix(self.key, window) if alone else mix(self.key, 1 + shard, window)
        return Permutation(size, key).whole(native=native_wanted())

    def chunk_order(self) -> list[int]:
        numbers = np.arange(len(self.counts), dtype=np.int64)
        return (Permutation(len(numbers), self.key)(numbers) if self.shuffle else numbers).tolist()

    def ranges(self) -> list[list[tuple[int, int, int]]]:
        """For each shard its (chunk, first, end), in order."""
        turns = self.turns
        size_V = turns.counts(turns.samples)
        cuts = [0, *np.cumsum(size_V).tolist()]
        chunks = self.chunk_order()
        begins = [0, *np.cumsum([self.counts[chunk] for chunk in chunks]).tolist()]
        found: list[list[tuple[int, int, int]]] = []
        for low, high in pairwise(cuts):
            first = int(np.searchsorted(begins, low, side="right")) - 1
            of_shard: list[tuple[int, int, int]] = []
            for number in range(first, len(chunks)):
                begin, end = begins[number], begins[number + 1]
                if begin >= high:
                    break
                if end > low and end > begin:
                    of_shard.append(
                        (chunks[number], max(low, begin) - begin, min(high, end) - begin)
                    )
            found.append(of_shard)
        return found

    def windows(self) -> list[ShardWindows]:
        """How each shard is cut and permuted."""
        turns = self.turns
        size_V = turns.counts(turns.samples).tolist()
        return [ShardWindows(self, shard, size) for shard, size in enumerate(size_V)]


@dataclass(frozen=True, slots=True)
class ShardWindows:
    """The windows of one shard, by number."""

    order: Order
    shard: int
    samples: int
    """Of the shard."""

    def bounds(self, window: int) -> tuple[int, int]:
        """The samples [low, high) of a window."""
        size = self.order.shard_window
        return window * size, min((window + 1) * size, self.samples)

    def permutation(self, window: int) -> I64 | None:
        """How its samples are permuted; None: not at all."""
        low, high = self.bounds(window)
        return self.order.window_order(self.shard, window, high - low)

    def between(self, begin: int, end: int) -> range:
        """The windows that have samples of [begin, end)."""
        size = self.order.shard_window
        return range(begin // size, -(-end // size))


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


def text_key(text: str | bytes) -> int:
    """The key of a string: the first 8 bytes of its BLAKE2b-64 as a signed number, UTF-8."""
    encoded = text.encode("utf-8") if isinstance(text, str) else text
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "little", signed=True)


def text_keys(texts: Iterable[str | bytes]) -> NDArray[np.int64]:
    """`text_key` of each."""
    return np.array([text_key(text) for text in texts], dtype=np.int64)
