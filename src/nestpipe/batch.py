"""`Batch`: the samples of one rank's part of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

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
        if self.packed is not None:  # views of columns that were looked at before
            return
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
        if pinned or self.packed is None:
            return self if pinned else self.pack(pin_memory=True)
        return self.packed.pin_memory().unpack(self)

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


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Names and sizes of columns; equal ones of recent batches are one object, to be cached by."""

    size: int
    dense: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Name, shape and type."""
    sparse: tuple[tuple[str, int], ...]
    """Name, and keys of all samples together."""

    @staticmethod
    def shared(
        size: int,
        dense: tuple[tuple[str, tuple[int, ...], torch.dtype], ...],
        sparse: tuple[tuple[str, int], ...],
    ) -> BatchLayout:
        """The one object of these columns."""
        return _shared_layout(size, dense, sparse)

    @classmethod
    def of(cls, batch: Batch) -> BatchLayout:
        return cls.shared(
            batch.size,
            tuple((name, tuple(c.shape), c.dtype) for name, c in batch.dense.items()),
            tuple((name, keys.values.numel()) for name, keys in batch.sparse.items()),
        )


_shared_layout = lru_cache(maxsize=64)(BatchLayout)


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """The columns of a batch, those of one type behind each other."""

    parts: Mapping[torch.dtype, Tensor]
    layout: BatchLayout
    agreeing: frozenset[str] = frozenset()
    """Lists of int64 keys whose lengths add up to their number, as they were packed."""
    equal_lengths: EqualLengths | None = None
    """What the int64 part ends with; None: lengths differ, or are too few to matter."""

    @classmethod
    def of(cls, batch: Batch, *, pin_memory: bool) -> PackedColumns:
        parts: dict[torch.dtype, Tensor] = {}
        for dtype, columns in _by_type(batch).items():
            size = sum(column.numel() for column in columns)
            parts[dtype] = torch.empty(size, dtype=dtype, pin_memory=pin_memory)
            torch.cat([column.reshape(-1) for column in columns], out=parts[dtype])
        layout = BatchLayout.of(batch)
        int64 = all(keys.lengths.dtype == torch.int64 for keys in batch.sparse.values())
        equal = EqualLengths.of(parts, layout) if int64 else None
        return cls(parts, layout, _agreeing(batch, parts), equal)

    @property
    def is_pinned(self) -> bool:
        return all(part.is_pinned() for part in self.parts.values())

    def to(self, device: torch.device | str, non_blocking: bool) -> PackedColumns:
        equal = self.equal_lengths if torch.device(device).type == "cuda" else None

        def sent(part: Tensor) -> Tensor:
            if equal is None or part.dtype != torch.int64:
                return part.to(device, non_blocking=non_blocking)
            return equal.send_all_else(part, torch.device(device), non_blocking=non_blocking)

        return self._with(sent)

    def pin_memory(self) -> PackedColumns:
        return self._with(lambda part: part.pin_memory())

    def _with(self, change: Callable[[Tensor], Tensor]) -> PackedColumns:
        parts = {dtype: change(part) for dtype, part in self.parts.items()}
        return PackedColumns(parts, self.layout, self.agreeing, self.equal_lengths)

    def unpack(self, like: Batch) -> Batch:
        """The batch again, as views of this memory; `like` says which columns there are.

        A view is made when somebody asks for its column: a replayed step asks for none.
        """
        views = _Views(partial(_cut_like, self.parts, like))
        dense = _Columns[Tensor](views, 0, tuple(like.dense))
        return Batch(like.size, dense, _Columns[Jagged](views, 1, tuple(like.sparse)), self)

    def has_lists(self, batch: Batch, keys: Mapping[str, Jagged]) -> bool:
        """Whether keys are lists of the batch that this was packed from, and agree with lengths."""
        columns = batch.sparse.made() if isinstance(batch.sparse, _Columns) else batch.sparse
        return self.agreeing.issuperset(keys) and all(
            of is columns[name] for name, of in keys.items()
        )

    def batch(self) -> Batch:
        """The batch that lies here, with lists of 64-bit keys; views are made on demand."""
        layout = self.layout
        dense = _Views(partial(_cut_dense, self.parts, layout))
        sparse = _Views(partial(_cut_lists, self.parts, layout))
        return Batch(
            layout.size,
            _Columns[Tensor](dense, 0, tuple(name for name, _, _ in layout.dense)),
            _Columns[Jagged](sparse, 1, tuple(name for name, _ in layout.sparse)),
            self,
        )

    def same_place(self, other: PackedColumns, tensors: Sequence[Tensor]) -> Tensor | None:
        """What lies here where some neighbours lie in another copy; None: they are not neighbours.

        `tensors` are parts of `other`, all of one type, in order.
        """
        some = [tensor for tensor in tensors if tensor.numel()]
        there = other.parts.get(some[0].dtype) if some else None
        if there is None:
            return None
        size, base = there.element_size(), there.data_ptr()
        first = at = some[0].data_ptr()
        for tensor in some:
            if tensor.data_ptr() != at or not tensor.is_contiguous():
                return None
            at += tensor.numel() * size
        if first < base or at > base + there.numel() * size:
            return None
        return self.parts[there.dtype][(first - base) // size : (at - base) // size]


WORTH_LEAVING_OUT = 1 << 19
"""Equal lengths that need not be copied to a GPU: 4 MB, on a link that brings rows too."""


@dataclass(frozen=True, slots=True)
class EqualLengths:
    """Where all lists of a batch have equally many keys: their lengths end the int64 part."""

    count: int
    """Of samples and lists together."""
    length: int

    @classmethod
    def of(cls, parts: Mapping[torch.dtype, Tensor], layout: BatchLayout) -> EqualLengths | None:
        """None: they differ, or are few. For lists whose lengths are int64."""
        count = layout.size * len(layout.sparse)
        if count < WORTH_LEAVING_OUT:
            return None
        lengths = parts[torch.int64][-count:]
        length = int(lengths[0])
        if any(keys != length * layout.size for _, keys in layout.sparse):
            return None
        least, most = (int(bound) for bound in lengths.aminmax())
        return cls(count, length) if least == most else None

    def send_all_else(self, part: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        """A copy of the int64 part; the device itself writes the lengths."""
        first = len(part) - self.count
        there = torch.empty(len(part), dtype=part.dtype, device=device)
        there[:first].copy_(part[:first], non_blocking=non_blocking)
        there[first:].fill_(self.length)
        return there


def _agreeing(batch: Batch, parts: Mapping[torch.dtype, Tensor]) -> frozenset[str]:
    """By one sum over all lists, which lie behind each other at the end of their type."""
    lists, count = batch.sparse, len(batch.sparse)
    if not count or any(keys.lengths.dtype != torch.int64 for keys in lists.values()):
        return frozenset()
    lengths_FB = parts[torch.int64][-count * batch.size :] if batch.size else torch.empty(0)
    sums = lengths_FB.view(count, batch.size).sum(1).tolist()
    of_list = zip(lists.items(), sums, strict=True)
    return frozenset(
        name
        for (name, keys), total in of_list
        if keys.values.dtype == torch.int64 and total == keys.values.numel()
    )


class _Views:
    """The columns of packed memory, cut out once, for whoever asks first."""

    def __init__(self, cut: Callable[[], tuple[dict[str, Tensor], dict[str, Jagged]]]) -> None:
        self._cut = cut
        self._made: tuple[dict[str, Tensor], dict[str, Jagged]] | None = None

    def made(self) -> tuple[dict[str, Tensor], dict[str, Jagged]]:
        if self._made is None:
            self._made = self._cut()
        return self._made


def _cut_like(
    parts: Mapping[torch.dtype, Tensor], like: Batch
) -> tuple[dict[str, Tensor], dict[str, Jagged]]:
    """Views of the columns that a batch has."""
    columns = _by_type(like)
    views = {
        dtype: iter(torch.split(part, [column.numel() for column in columns[dtype]]))
        for dtype, part in parts.items()
    }
    dense = {
        name: next(views[column.dtype]).view(column.shape) for name, column in like.dense.items()
    }
    values = {name: next(views[keys.values.dtype]) for name, keys in like.sparse.items()}
    lengths = {name: next(views[keys.lengths.dtype]) for name, keys in like.sparse.items()}
    return dense, {
        name: keys.moved(values[name], lengths[name]) for name, keys in like.sparse.items()
    }


def _cut_dense(
    parts: Mapping[torch.dtype, Tensor], layout: BatchLayout
) -> tuple[dict[str, Tensor], dict[str, Jagged]]:
    """Views of tensors, which are the first of their type."""
    at = dict.fromkeys(parts, 0)
    found: dict[str, Tensor] = {}
    for name, shape, dtype in layout.dense:
        end = at[dtype] + math.prod(shape)
        found[name] = parts[dtype][at[dtype] : end].view(shape)
        at[dtype] = end
    return found, {}


def _cut_lists(
    parts: Mapping[torch.dtype, Tensor], layout: BatchLayout
) -> tuple[dict[str, Tensor], dict[str, Jagged]]:
    """Views of lists, which are the last of their type: all values, then all lengths."""
    if not layout.sparse:
        return {}, {}
    part = parts[torch.int64]
    counts = [count for _, count in layout.sparse]
    lengths = [layout.size] * len(counts)
    begin = part.numel() - sum(counts) - sum(lengths)
    views = torch.split(part[begin:], [*counts, *lengths])
    return {}, {
        name: Jagged(views[number], views[len(counts) + number])
        for number, (name, _) in enumerate(layout.sparse)
    }


C = TypeVar("C", Tensor, Jagged)


class _Columns(Mapping[str, C]):
    """Names of columns, and their views on demand."""

    def __init__(self, views: _Views, which: int, names: tuple[str, ...]) -> None:
        self._views, self._which, self._names = views, which, names

    def __getitem__(self, name: str) -> C:
        return self._views.made()[self._which][name]  # type: ignore[return-value]

    def made(self) -> Mapping[str, C]:
        """All views."""
        return self._views.made()[self._which]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _by_type(batch: Batch) -> dict[torch.dtype, list[Tensor]]:
    """All columns in one order, by type; keys of all features are neighbours, then lengths."""
    columns = [
        *batch.dense.values(),
        *(keys.values for keys in batch.sparse.values()),
        *(keys.lengths for keys in batch.sparse.values()),
    ]
    found: dict[torch.dtype, list[Tensor]] = {}
    for column in columns:
        found.setdefault(column.dtype, []).append(column)
    return found
