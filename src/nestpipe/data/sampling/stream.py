"""`Stream`: samples that can only be read in passing, shuffled in windows.

Chunks (a file, a row group) come in an order that the seed decides; their samples are cut into
windows, and each window is permuted. Memory: one window, one piece of a chunk and one batch.
Every rank reads and decodes every chunk, and keeps its part of each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.batch import Batch
from nestpipe.data.readers.text import Broken
from nestpipe.data.sampling.order import Permutation, Share, mix
from nestpipe.data.source import Column, concat, empty_batch
from nestpipe.errors import DataError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring samples of one file, readable from their beginning."""

    read: Callable[[Broken], Iterator[Batch]]
    """Pieces of bounded size; rows that cannot be read are told to `Broken`."""
    count: Callable[[], int | None] = lambda: None
    """Samples that `read` will give, where that is known without reading them."""


class Stream:
    """A source over chunks. The order is set by the seed, the epoch and the window's size.

    `broken` says how many broken rows are too many, and which there were before the first pass.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        chunks: Sequence[Chunk],
        *,
        window: int,
        shuffle: bool = True,
        broken: Broken | None = None,
        name: str = "the data set",
    ) -> None:
        self._columns = tuple(columns)
        self._chunks = tuple(chunks)
        self._window = window
        self._shuffle = shuffle
        self._name = name
        self._opened = broken or Broken()
        self._broken = self._opened
        self._counts: dict[int, int | None] = {}

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns

    @property
    def num_samples(self) -> int | None:
        total = 0
        for chunk in range(len(self._chunks)):
            count = self._count(chunk)
            if count is None:
                return None
            total += count
        return total

    @property
    def broken(self) -> Broken:
        return self._broken

    def empty(self) -> Batch:
        return empty_batch(self._columns)

    def batches(
        self,
        *,
        global_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        offset: int = 0,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from `start` on; every rank gets as many.

        With an `offset`, all of them begin so many samples later.
        """
        share = Share(global_batch=global_batch, rank=rank, ranks=ranks, start=start, offset=offset)
        return self._deal(share, mix(seed, epoch))

    def _deal(self, share: Share, key: int) -> Iterator[Batch]:
        """Cut the windows into global batches, and keep this rank's part of each."""
        step, wanted = share.global_batch, share.first
        window = wanted // self._window
        position = window * self._window
        carry = self.empty()  # samples of all ranks that do not fill a batch yet
        for samples in self._windows(key, position):
            order = self._order(samples.size, mix(key, window))
            begin = max(0, wanted - position)
            if carry.size:
                begin = min(step - carry.size, samples.size)
                carry = concat([carry, samples.select(order[:begin])])
                if carry.size == step:
                    yield carry.slice(*share.part(step))
                    carry = self.empty()
            low, high = share.part(step)
            while begin + step <= samples.size:
                yield samples.select(order[begin + low : begin + high])
                begin += step
            if begin < samples.size:
                carry = samples.select(order[begin:])
            position += samples.size
            window += 1
        if carry.size:
            yield carry.slice(*share.part(carry.size))

    def _windows(self, key: int, drop: int) -> Iterator[Batch]:
        """Windows of the chunks' samples without the first `drop`, which are whole windows."""
        held: list[Batch] = []
        size = 0
        for piece in self._pieces(key, drop):
            rest = piece
            while size + rest.size >= self._window:
                cut = self._window - size
                yield concat([*held, rest.slice(0, cut)])
                held, size, rest = [], 0, rest.slice(cut, rest.size)
            if rest.size:
                held.append(rest)
                size += rest.size
        if held:
            yield concat(held)

    def _pieces(self, key: int, drop: int) -> Iterator[Batch]:
        """The chunks' samples without the first `drop`; chunks wholly before are not read."""
        broken = self._broken = self._opened.copy()
        found = False
        for chunk in self._order(len(self._chunks), key).tolist():
            count = self._count(chunk) if drop else None
            if count is not None and count <= drop:
                drop -= count
                found = found or count > 0
                continue
            for piece in self._chunks[chunk].read(broken):
                found = found or piece.size > 0
                kept = piece.slice(min(drop, piece.size), piece.size)
                drop -= piece.size - kept.size
                if kept.size:
                    yield kept
        if not found:
            raise DataError(f"{self._name} has no samples; check the split and the files")

    def _order(self, size: int, key: int) -> torch.Tensor:
        numbers = np.arange(size, dtype=np.int64)
        return torch.from_numpy(Permutation(size, key)(numbers) if self._shuffle else numbers)

    def _count(self, chunk: int) -> int | None:
        if self._opened.limit:
            return None  # how many rows will be skipped is not known before reading them
        if chunk not in self._counts:
            self._counts[chunk] = self._chunks[chunk].count()
        return self._counts[chunk]
