"""Users' sequences in Parquet: a list of items per row, where known with the time of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data import inputs
from nestpipe.data.config import DataConfig, ParquetConfig, Split
from nestpipe.data.source import (
    HISTORY,
    LABEL,
    SAMPLE_ID,
    TARGET,
    TIME,
    TIMESTAMPS,
    Column,
    history_column,
    tensor,
    time_column,
    times_column,
)
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged

# Shapes: B rows, T items of all rows together

I64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldOut:
    """Which items of a sequence a split has."""

    last: int
    """Items at the end that are not in the history; the first of them is the target."""
    least: int
    """Items that a row needs to be a sample."""
    target: bool
    """Whether the split has a target."""

    @classmethod
    def of(cls, split: Split, *, own_rows: bool) -> HoldOut:
        """`own_rows`: the split has rows of its own, so that training keeps whole sequences."""
        if split == "train":
            # Short ones stay, and teach nothing: so the footers of files say how many there are.
            return cls(last=0 if own_rows else 2, least=0, target=False)
        last = 2 if split == "validation" and not own_rows else 1
        return cls(last=last, least=2 if own_rows else 3, target=True)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which column of the file is what, and which part of a sequence is wanted."""

    history: str
    timestamps: str | None
    target: str | None
    """The column of the item after the history, where that is apart."""
    time: str | None
    """The column of the target's time."""
    max_len: int
    held: HoldOut
    items: Callable[[], I64] = field(compare=False)
    """Reads the different items of all splits."""

    @property
    def names(self) -> tuple[str, ...]:
        found = (self.history, self.timestamps, self.target, self.time)
        return tuple(name for name in found if name is not None)

    @property
    def columns(self) -> tuple[Column, ...]:
        timed = self.timestamps is not None
        lists = [history_column(items=self.items), *([times_column()] if timed else [])]
        target = [Column(TARGET, "target", "int64")] if self.held.target else []
        time = [time_column()] if self.held.target and timed else []
        return (*lists, *target, *time, Column(SAMPLE_ID, "id", "int64"))


def find_layout(
    schema: pa.Schema,
    config: DataConfig,
    split: Split,
    read_items: Callable[[tuple[str, ...]], I64],
) -> SequenceLayout | None:
    """The columns of sequences; None where the file has something else.

    They are sequences where the config names a history, or where a list `history` is the only
    column of keys and there is no label.
    """
    wanted = config.parquet
    history = wanted.history or _history(schema, wanted)
    if not history:
        return None
    if wanted.sparse or wanted.dense or wanted.labels:
        raise ConfigError(
            f"data.parquet.history is {history!r}, so rows are sequences; leave out sparse, dense "
            "and labels"
        )
    target = _there(schema, wanted.target, TARGET)
    own_rows = bool(config.test_every or config.test_path or config.validation_path)
    return SequenceLayout(
        history,
        _there(schema, wanted.timestamps, TIMESTAMPS),
        target,
        TIME if target and TIME in schema.names else None,
        wanted.max_len,
        HoldOut.of(split, own_rows=own_rows),
        lambda: read_items((history, *([target] if target else []))),
    )


def _history(schema: pa.Schema, wanted: ParquetConfig) -> str:
    others = {TIMESTAMPS, TARGET, TIME, *wanted.ignore}
    keys = [f.name for f in schema if inputs.is_keys(f.type) and f.name not in others]
    alone = keys == [HISTORY] and inputs.is_list(schema.field(HISTORY).type)
    named = wanted.sparse or wanted.dense or wanted.labels or LABEL in schema.names
    return HISTORY if alone and not named else ""


def _there(schema: pa.Schema, named: str, usual: str) -> str | None:
    return named or (usual if usual in schema.names else None)


def check_types(schema: pa.Schema, layout: SequenceLayout, where: object) -> None:
    """Refuse columns whose types do not fit."""
    kind = schema.field(layout.history).type
    fits = inputs.is_list(kind) and inputs.is_keys(kind)
    inputs.need(kind, fits, layout.history, "a list of items per row", where)
    if layout.timestamps:
        kind = schema.field(layout.timestamps).type
        fits = inputs.is_list(kind) and _is_time(kind.value_type)
        inputs.need(kind, fits, layout.timestamps, "a list of times per row", where)
    if layout.target:
        kind = schema.field(layout.target).type
        inputs.need(kind, inputs.is_key(kind), layout.target, "an item per row", where)
    if layout.time:
        kind = schema.field(layout.time).type
        inputs.need(kind, _is_time(kind), layout.time, "a time per row", where)


def _is_time(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or inputs.is_number(kind)


def broken_rows(piece: Any, layout: SequenceLayout) -> list[tuple[NDArray[np.bool_], str]]:
    """Which rows cannot be used, with the reason."""
    history = inputs.flat(piece[layout.history])
    found = [(inputs.holes(history), f"{layout.history} has an empty entry")]
    if layout.timestamps:
        times = inputs.flat(piece[layout.timestamps])
        found.append((inputs.holes(times), f"{layout.timestamps} has an empty entry"))
        differ = inputs.list_lengths(history) != inputs.list_lengths(times)
        reason = f"{layout.timestamps} has more or fewer entries than {layout.history}"
        found.append((differ, reason))
    for name in (layout.target, layout.time):
        if name:
            found.append((inputs.is_null(piece[name]), f"{name} is empty"))
    return found


def to_batch(piece: Any, layout: SequenceLayout, ids_B: I64) -> tuple[Batch, NDArray[np.bool_]]:
    """The rows with enough items as samples, and which rows those are."""
    history = inputs.lists(piece[layout.history])
    items_T, lengths_B = _list(history)
    if layout.target:
        items_T = np.insert(items_T, np.cumsum(lengths_B), inputs.keys(piece[layout.target]))
    times_T = _times(piece, layout, lengths_B) if layout.timestamps else None
    if layout.target:
        lengths_B = lengths_B + 1
    if times_T is not None:
        items_T, times_T = in_order(items_T, times_T, lengths_B)
    held = layout.held
    if _is_whole(layout, lengths_B):
        lists = {HISTORY: items_T, **({} if times_T is None else {TIMESTAMPS: times_T})}
        at = history.known_offsets
        sparse = {name: Jagged(tensor(one), history.lengths, at) for name, one in lists.items()}
        return Batch(len(ids_B), {SAMPLE_ID: tensor(ids_B)}, sparse), np.ones(len(ids_B), bool)
    kept_B = lengths_B >= held.least
    begin_B = (np.cumsum(lengths_B) - lengths_B)[kept_B]
    length_B = np.maximum(lengths_B[kept_B] - held.last, 0)
    latest_B = np.minimum(length_B, layout.max_len)
    places_T = ranges(begin_B + length_B - latest_B, latest_B)
    sparse = {HISTORY: Jagged(tensor(items_T[places_T]), tensor(latest_B))}
    dense = {TARGET: tensor(items_T[begin_B + length_B])} if held.target else {}
    if times_T is not None:
        sparse[TIMESTAMPS] = Jagged(tensor(times_T[places_T]), tensor(latest_B))
        if held.target:
            dense[TIME] = tensor(times_T[begin_B + length_B])
    dense[SAMPLE_ID] = tensor(ids_B[kept_B])
    return Batch(int(kept_B.sum()), dense, sparse), kept_B


def _is_whole(layout: SequenceLayout, lengths_B: I64) -> bool:
    """Whether all rows are samples as they are, so that nothing needs to be copied."""
    held = layout.held
    if layout.target or held.target or held.last or held.least:
        return False
    return bool((lengths_B <= layout.max_len).all())


def _list(lists: Jagged) -> tuple[I64, I64]:
    return lists.values.numpy(), lists.lengths.numpy()


def _times(piece: Any, layout: SequenceLayout, lengths_B: I64) -> I64:
    """(T,) whole seconds; where a target has no time of its own, it has that of the item before."""
    values = inputs.flat(piece[layout.timestamps]).flatten()
    times_T = seconds(values)
    if not layout.target:
        return times_T
    if layout.time:
        own_B = seconds(inputs.flat(piece[layout.time]))
    else:
        before_B = np.maximum(np.cumsum(lengths_B) - 1, 0)
        own_B = np.where(lengths_B > 0, np.append(times_T, 0)[before_B], 0)
    return np.insert(times_T, np.cumsum(lengths_B), own_B)


def seconds(array: Any) -> I64:
    """Times as whole seconds; numbers are seconds already."""
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    numbers = array.to_numpy(zero_copy_only=False)
    whole = numbers if np.issubdtype(numbers.dtype, np.integer) else np.floor(numbers)
    return whole.astype(np.int64, copy=False)


def in_order(items_T: I64, times_T: I64, lengths_B: I64) -> tuple[I64, I64]:
    """Each row's items by time; at equal times they keep the order of the file."""
    earlier_T = times_T[1:] < times_T[:-1]
    ends_B = np.cumsum(lengths_B)
    begins = ends_B[(lengths_B > 0) & (ends_B < len(times_T))] - 1  # another row follows
    if np.count_nonzero(earlier_T) == np.count_nonzero(earlier_T[begins]):
        return items_T, times_T
    row_T = np.repeat(np.arange(len(lengths_B)), lengths_B)
    order_T = np.lexsort((times_T, row_T))
    return items_T[order_T], times_T[order_T]


def ranges(begin_B: I64, length_B: I64) -> I64:
    """begin, begin + 1, ... for each row."""
    ends_B = np.cumsum(length_B)
    within_T = np.arange(ends_B[-1] if len(ends_B) else 0) - np.repeat(ends_B - length_B, length_B)
    return np.repeat(begin_B, length_B) + within_T
