"""`Indexed`: samples that can be had by number, from memory or made on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.readers.text import Broken
from nestpipe.data.sampling.order import Permutation, Share, mix
from nestpipe.data.source import HISTORY, PASS, SAMPLE_ID, Column, empty_batch
from nestpipe.errors import DataError

Take = Callable[[NDArray[np.int64]], Batch]
"""The samples of these numbers, in this order."""


class Indexed:
    """A source that makes exactly the samples that a rank asks for; shuffles all of them."""

    def __init__(
        self,
        columns: Sequence[Column],
        num_samples: int,
        take: Take,
        *,
        shuffle: bool = True,
        broken: Broken | None = None,
        name: str = "the data set",
    ) -> None:
        if num_samples == 0:
            raise DataError(f"{name} has no samples; check the split and the files")
        self._named = any(column.name == HISTORY for column in columns)
        ids = [Column(name, "id", "int64") for name in (SAMPLE_ID, PASS)] if self._named else []
        self._columns = (*columns, *ids)
        self._num_samples = num_samples
        self._take = take
        self._shuffle = shuffle
        self._broken = broken or Broken()

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns

    @property
    def num_samples(self) -> int:
        return self._num_samples

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
        return self._deal(share, Permutation(self._num_samples, mix(seed, epoch)), epoch)

    def _deal(self, share: Share, permutation: Permutation, epoch: int) -> Iterator[Batch]:
        step = share.global_batch
        for begin in range(share.first, self._num_samples, step):
            low, high = share.part(min(step, self._num_samples - begin))
            numbers = np.arange(begin + low, begin + high, dtype=np.int64)
            if not numbers.size:
                yield self.empty()
            else:
                numbers = permutation(numbers) if self._shuffle else numbers
                samples = self._take(numbers)
                yield _with_ids(samples, numbers, epoch) if self._named else samples


def _with_ids(samples: Batch, numbers: NDArray[np.int64], epoch: int) -> Batch:
    ids = torch.from_numpy(np.ascontiguousarray(numbers))
    named = {SAMPLE_ID: ids, PASS: torch.full_like(ids, epoch)}
    return Batch(samples.size, {**samples.dense, **named}, samples.sparse)


def from_memory(samples: Batch) -> Take:
    """Samples of a batch that holds them all."""
    return lambda numbers: samples.select(torch.from_numpy(numbers))
