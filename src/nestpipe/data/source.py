"""What every data set offers to training: exact batches for any number of ranks.

The contract: the order of samples is a function of (data, seed, epoch) alone. Global batch g is
samples [g G, (g + 1) G) of that order, and rank r has the r-th contiguous part of it. So 1, 2 and 4
ranks see the same global batches, and a run that resumes at batch g sees what it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.data.readers.text import Broken
from nestpipe.jagged import Jagged

DENSE = "features"
"""Name of the column that holds all dense features, (size, features)."""
LABEL = "label"
HISTORY = "history"
TARGET = "target"
SAMPLE_ID, PASS = "sample_id", "step"
"""Which sample it is, and in which pass over the data: what is drawn for it follows from both."""

MISSING = -1
"""The key of a category that is not known; features of one key per sample always have one."""


@dataclass(frozen=True, slots=True)
class Column:
    """One entry of a batch."""

    name: str
    kind: Literal["keys", "features", "label", "target", "id"]
    """`keys` are in `Batch.sparse`, the rest in `Batch.dense`."""
    dtype: Literal["int64", "float32"]
    fields: tuple[str, ...] = ()
    """For `features`: what each of the tensor's columns is."""
    single: bool = False
    """For `keys`: every sample has exactly one."""
    max_key: int | None = field(default=None, compare=False)
    """For a `history`: the greatest key there is in any split, where that is known."""

    def empty(self) -> Tensor:
        shape = (0, len(self.fields)) if self.kind == "features" else (0,)
        return torch.empty(shape, dtype=getattr(torch, self.dtype))


@runtime_checkable
class Source(Protocol):
    """Samples in an order that only the data, the seed and the epoch decide."""

    @property
    def columns(self) -> tuple[Column, ...]: ...

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, or None where only reading all of them would tell."""
        ...

    @property
    def broken(self) -> Broken:
        """Rows that the latest pass has skipped so far."""
        ...

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
        ...

    def empty(self) -> Batch:
        """A batch of the same columns without samples."""
        ...


def keys_column(name: str, single: bool = False, max_key: int | None = None) -> Column:
    """A column of 64-bit keys."""
    return Column(name, "keys", "int64", single=single, max_key=max_key)


def features_column(fields: Sequence[str]) -> Column:
    """The column of all dense features."""
    return Column(DENSE, "features", "float32", tuple(fields))


def label_column(name: str = LABEL) -> Column:
    """A column of labels."""
    return Column(name, "label", "float32")


def empty_batch(columns: Sequence[Column]) -> Batch:
    """No samples of these columns."""
    return Batch(
        0,
        {column.name: column.empty() for column in columns if column.kind != "keys"},
        {
            column.name: Jagged(column.empty(), column.empty())
            for column in columns
            if column.kind == "keys"
        },
    )


def concat(batches: Sequence[Batch]) -> Batch:
    """The samples of several batches of the same columns, one after the other."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return Batch(
        sum(batch.size for batch in batches),
        {name: torch.cat([batch.dense[name] for batch in batches]) for name in first.dense},
        {
            name: Jagged(
                torch.cat([batch.sparse[name].values for batch in batches]),
                torch.cat([batch.sparse[name].lengths for batch in batches]),
            )
            for name in first.sparse
        },
    )


def tensor(array: NDArray[np.generic]) -> Tensor:
    """An array as a tensor, copied only where it may not be written to."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
