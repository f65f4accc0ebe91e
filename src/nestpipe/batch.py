"""`Batch`: the samples of one rank's part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.errors import DataError
from nestpipe.jagged import Jagged


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples by column: tensors with one row per sample, and lists of keys."""

    size: int
    """Samples; 0 is allowed, and happens where a rank has run out of data."""
    dense: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Features and labels, each (size, ...)."""
    sparse: Mapping[str, Jagged] = field(default_factory=dict[str, Jagged])
    """Lists of 64-bit keys."""
    packed: PackedColumns | None = field(default=None, repr=False, compare=False)
    """The memory of all columns, where they lie one after the other: a copy moves them together."""

    def __post_init__(self) -> None:
        for name, tensor in self.dense.items():
            if tensor.ndim == 0 or tensor.shape[0] != self.size:
                raise DataError(
                    f"column {name!r} has shape {tuple(tensor.shape)} in a batch of {self.size} "
                    "samples; give a row for each"
                )
        for name, jagged in self.sparse.items():
            if not isinstance(jagged, Jagged) or jagged.num_samples != self.size:
                found = jagged.num_samples if isinstance(jagged, Jagged) else "no"
                raise DataError(
                    f"column {name!r} has {found} lists in a batch of {self.size} samples; give a "
                    "Jagged with one for each"
                )

    def select(self, samples: Tensor) -> Batch:
        """Some samples, in the order asked for."""
        return self._map(
            int(samples.shape[0]), lambda dense: dense[samples], lambda keys: keys.select(samples)
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Neighbouring samples, without a copy."""
        return self._map(
            stop - start, lambda dense: dense[start:stop], lambda keys: keys.slice(start, stop)
        )

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """The batch cut into pieces of these sizes."""
        assert sum(sizes) == self.size, f"{sizes} do not add up to {self.size} samples"
        parts: list[Batch] = []
        start = 0
        for size in sizes:
            parts.append(self.slice(start, start + size))
            start += size
        return parts

    def empty(self) -> Batch:
        """A batch of the same columns without samples."""
        return self.slice(0, 0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        if self.packed is not None:
            return self.packed.to(device, non_blocking).unpack(self)
        return self._map(
            self.size,
            lambda dense: dense.to(device, non_blocking=non_blocking),
            lambda keys: keys.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The same samples in pinned memory, packed; one that is already there is not copied."""
        pinned = self.packed is not None and self.packed.is_pinned
        return self if pinned else self.pack(pin_memory=True)

    def pack(self, *, pin_memory: bool = False) -> Batch:
        """The same samples with all columns of a type in one piece of memory."""
        return PackedColumns.of(self, pin_memory=pin_memory).unpack(self)

    def _map(
        self, size: int, on_dense: Callable[[Tensor], Tensor], on_keys: Callable[[Jagged], Jagged]
    ) -> Batch:
        return Batch(
            size,
            {name: on_dense(tensor) for name, tensor in self.dense.items()},
            {name: on_keys(jagged) for name, jagged in self.sparse.items()},
        )


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """The columns of a batch, those of one type behind each other."""

    parts: Mapping[torch.dtype, Tensor]

    @classmethod
    def of(cls, batch: Batch, *, pin_memory: bool) -> PackedColumns:
        parts: dict[torch.dtype, Tensor] = {}
        for dtype, columns in _by_type(batch).items():
            size = sum(column.numel() for column in columns)
            parts[dtype] = torch.empty(size, dtype=dtype, pin_memory=pin_memory)
            torch.cat([column.reshape(-1) for column in columns], out=parts[dtype])
        return cls(parts)

    @property
    def is_pinned(self) -> bool:
        return all(part.is_pinned() for part in self.parts.values())

    def to(self, device: torch.device | str, non_blocking: bool) -> PackedColumns:
        return PackedColumns(
            {
                dtype: part.to(device, non_blocking=non_blocking)
                for dtype, part in self.parts.items()
            }
        )

    def unpack(self, like: Batch) -> Batch:
        """The batch again, as views of this memory; `like` says which columns there are."""
        columns = _by_type(like)
        views = {
            dtype: iter(torch.split(part, [column.numel() for column in columns[dtype]]))
            for dtype, part in self.parts.items()
        }
        dense = {
            name: next(views[column.dtype]).view(column.shape)
            for name, column in like.dense.items()
        }
        sparse = {
            name: Jagged(next(views[keys.values.dtype]), next(views[keys.lengths.dtype]))
            for name, keys in like.sparse.items()
        }
        return Batch(like.size, dense, sparse, self)


def _by_type(batch: Batch) -> dict[torch.dtype, list[Tensor]]:
    """All columns in one order, by type."""
    columns = [*batch.dense.values()]
    for keys in batch.sparse.values():
        columns += [keys.values, keys.lengths]
    found: dict[torch.dtype, list[Tensor]] = {}
    for column in columns:
        found.setdefault(column.dtype, []).append(column)
    return found
