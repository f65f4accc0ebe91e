"""Users' sequences: in Parquet, a list of items per row, and as rankings with drawn negatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.config import positive
from nestpipe.data import inputs
from nestpipe.data.config import DataConfig, ParquetConfig, Split
from nestpipe.data.order import U64, draw, mix
from nestpipe.data.source import (
    HISTORY,
    LABEL,
    PASS,
    SAMPLE_ID,
    TARGET,
    TIME,
    TIMESTAMPS,
    Column,
    Source,
    empty_batch,
    history_column,
    keys_column,
    tensor,
    time_column,
    times_column,
)
from nestpipe.data.text import Broken
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged

# Shapes: B samples, a row for each, T items of all samples together, C candidates of all together

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
    text: bool
    """Whether items are strings."""
    items: Callable[[], I64] | None = field(compare=False)
    """Reads the different items of all splits; a log without an end cannot."""

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
    read_items: Callable[[tuple[str, ...]], I64] | None,
) -> SequenceLayout | None:
    """The columns of sequences; None where the file has something else.

    They are sequences where the config names a history, or where a list `history` is the only
    column of keys and there is no label.
    """
    wanted = config.parquet
    history = wanted.history or _history(schema, wanted)
    if not history:
        return None
    if wanted.sparse or wanted.dense or wanted.labels or wanted.weights or wanted.sample_weight:
        raise ConfigError(
            f"data.parquet.history is {history!r}, so rows are sequences; leave out sparse, dense, "
            "labels and weights"
        )
    own_rows = bool(config.test_every or config.test_path or config.validation_path)
    own_rows = own_rows or config.kind == "stream"
    columns = (history, wanted.target or TARGET)
    found = SequenceLayout(
        history,
        _there(schema, wanted.timestamps, TIMESTAMPS),
        None,
        None,
        wanted.max_len,
        HoldOut.of(split, own_rows=own_rows),
        history in schema.names and inputs.is_text_key(schema.field(history).type),
        partial(read_items, columns) if read_items else None,
    )
    return with_target(found, schema, wanted)


def with_target(layout: SequenceLayout, schema: pa.Schema, wanted: ParquetConfig) -> SequenceLayout:
    """The same columns, and the target where a split's files have it apart."""
    target = _there(schema, wanted.target, TARGET)
    time = TIME if target and TIME in schema.names else None
    return replace(layout, target=target, time=time)


def _history(schema: pa.Schema, wanted: ParquetConfig) -> str:
    others = {TIMESTAMPS, TARGET, TIME, *wanted.ignore}
    keys = [f.name for f in schema if inputs.is_keys(f.type) and f.name not in others]
    alone = keys == [HISTORY] and inputs.is_list(schema.field(HISTORY).type)
    named = wanted.sparse or wanted.dense or wanted.labels or LABEL in schema.names
    named = named or wanted.weights or wanted.sample_weight
    return HISTORY if alone and not named else ""


def _there(schema: pa.Schema, named: str, usual: str) -> str | None:
    return named or (usual if usual in schema.names else None)


def check_types(schema: pa.Schema, layout: SequenceLayout, where: object) -> None:
    """Refuse columns whose types do not fit."""
    kind = schema.field(layout.history).type
    fits = inputs.is_list(kind) and inputs.is_keys(kind)
    inputs.need(kind, fits, layout.history, "a list of items per row", where)
    inputs.need_alike(kind, layout.text, layout.history, where)
    if layout.timestamps:
        kind = schema.field(layout.timestamps).type
        fits = inputs.is_list(kind) and _is_time(kind.value_type)
        inputs.need(kind, fits, layout.timestamps, "a list of times per row", where)
    if layout.target:
        kind = schema.field(layout.target).type
        inputs.need(kind, inputs.is_key(kind), layout.target, "an item per row", where)
        inputs.need_alike(kind, layout.text, layout.target, where)
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
        if (never_T := _never(inputs.values_of(times))).any():
            bad = inputs.lists_with(inputs.list_lengths(times), never_T)
            found.append((bad, f"{layout.timestamps} has an entry that is no time"))
    for name in (layout.target, layout.time):
        if name:
            found.append((inputs.is_null(piece[name]), f"{name} is empty"))
    if layout.time:
        found.append((_never(inputs.flat(piece[layout.time])), f"{layout.time} is no time"))
    return found


def _never(array: Any) -> NDArray[np.bool_]:
    """Which times are no whole seconds of 64 bits."""
    if not pa.types.is_floating(array.type):
        return np.zeros(len(array), dtype=bool)
    return ~(np.abs(array.to_numpy(zero_copy_only=False).astype(np.float64)) < 2.0**63)


def to_batch(piece: Any, layout: SequenceLayout, ids_B: I64) -> tuple[Batch, NDArray[np.bool_]]:
    """The rows with enough items as samples, and which rows those are."""
    history = inputs.lists(piece[layout.history])
    items_T, lengths_B = _list(history)
    times_T = None
    if layout.timestamps:
        times_T = seconds(inputs.values_of(inputs.flat(piece[layout.timestamps])))
        items_T, times_T = in_order(items_T, times_T, lengths_B)
    if layout.target:
        items_T, times_T = _with_targets(piece, layout, items_T, times_T, lengths_B)
        lengths_B = lengths_B + 1
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


def _with_targets(
    piece: Any, layout: SequenceLayout, items_T: I64, times_T: I64 | None, lengths_B: I64
) -> tuple[I64, I64 | None]:
    """Each row's target follows its other items, whatever their times."""
    ends_B = np.cumsum(lengths_B)
    if times_T is not None:
        times_T = np.insert(times_T, ends_B, _target_times(piece, layout, times_T, lengths_B))
    return np.insert(items_T, ends_B, inputs.keys(piece[layout.target])), times_T


def _target_times(piece: Any, layout: SequenceLayout, times_T: I64, lengths_B: I64) -> I64:
    """(B,) the targets' own times, or that of the latest item of each history."""
    if layout.time:
        return seconds(inputs.flat(piece[layout.time]))
    before_B = np.maximum(np.cumsum(lengths_B) - 1, 0)
    return np.where(lengths_B > 0, np.append(times_T, 0)[before_B], 0)


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
    """begin, begin + 1, ... for each sample."""
    ends_B = np.cumsum(length_B)
    within_T = np.arange(ends_B[-1] if len(ends_B) else 0) - np.repeat(ends_B - length_B, length_B)
    return np.repeat(begin_B, length_B) + within_T


CANDIDATES, LABELS = "candidates", "labels"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All items, numbered from 1."""

    num_items: int
    ids: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    """Their keys, sorted, where those are not the numbers themselves."""

    @classmethod
    def of(cls, ids: NDArray[np.int64]) -> Catalogue:
        """Different keys, sorted. Those of 1, 2, ... with few gaps stay their own numbers."""
        if len(ids) and ids[0] >= 1 and ids[-1] <= 2 * len(ids):
            return cls(int(ids[-1]))
        return cls(len(ids), ids)

    def __post_init__(self) -> None:
        positive("num_items", self.num_items)

    def numbers(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each key; 0 where it is no item's."""
        if self.ids is None:
            return np.where((keys > 0) & (keys <= self.num_items), keys, 0)
        place = np.minimum(np.searchsorted(self.ids, keys), len(self.ids) - 1)
        return np.where(self.ids[place] == keys, place + 1, 0)

    def keys(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The key of each number."""
        return numbers if self.ids is None else self.ids[numbers - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingOptions:
    """What is ranked after a history."""

    catalogue: Catalogue
    """Negatives are drawn from these items, all with the same chance."""
    positives: int = 4
    """Items after the history that are liked candidates, at most; held-out samples have one."""
    negatives: int = 8
    """Items drawn for each liked candidate, in every split: so their share is the same."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("positives", "negatives"):
            positive(name, getattr(self, name))


class Ranking:
    """A source of `history`, `candidates` and `labels`, made from one of sequences.

    Where the sequences have `timestamps`, so have the histories, and `time` is that of the first
    liked candidate: when the ranking was asked for.

    Each time a user comes up for training, the sequence is cut somewhere: what is before is the
    history, the next items are candidates with label 1. Where the sequence has a target apart, that
    is the one with label 1. Negatives are drawn; those that the user chose, as far as the split
    knows, are left out. Cut and draw follow from the seed, the sample's id and the pass alone.
    """

    def __init__(self, sequences: Source, options: RankingOptions) -> None:
        names = [column.name for column in sequences.columns]
        assert {HISTORY, SAMPLE_ID, PASS} <= set(names), "only named sequences can be ranked"
        self.sequences = sequences
        self.options = options
        self._held_out = TARGET in names
        ids = [column for column in sequences.columns if column.kind == "id"]
        history = [column for column in sequences.columns if column.name == HISTORY]
        self._timed = TIMESTAMPS in names
        self._lists = (HISTORY, TIMESTAMPS) if self._timed else (HISTORY,)
        lists = (*history, keys_column(CANDIDATES), keys_column(LABELS))
        timed = (times_column(), time_column()) if self._timed else ()
        self._columns = (*lists, *timed[:1], *ids, *timed[1:])

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns

    @property
    def num_samples(self) -> int | None:
        return self.sequences.num_samples

    @property
    def broken(self) -> Broken:
        return self.sequences.broken

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

        `offset` skips that many samples more.
        """
        sequences = self.sequences.batches(
            global_batch=global_batch,
            rank=rank,
            ranks=ranks,
            seed=seed,
            epoch=epoch,
            start=start,
            offset=offset,
        )
        return map(self.ranked, sequences)

    def ranked(self, batch: Batch) -> Batch:
        """The ranking of each of these sequences."""
        return self._ranked(batch) if batch.size else self.empty()

    def _ranked(self, batch: Batch) -> Batch:
        values_T = batch.sparse[HISTORY].values.numpy()
        lengths_B = batch.sparse[HISTORY].lengths.numpy()
        begin_B = np.cumsum(lengths_B) - lengths_B
        if self._held_out:
            kept = {name: batch.sparse[name] for name in self._lists}
            liked_B = np.ones_like(lengths_B)
            liked = batch.dense[TARGET].numpy()
        else:
            cut_B = self._bits(batch, 1) % np.maximum(lengths_B, 1).astype(np.uint64)
            cut_B = cut_B.astype(np.int64)
            before = ranges(begin_B, cut_B)
            kept = {
                name: Jagged(tensor(batch.sparse[name].values.numpy()[before]), tensor(cut_B))
                for name in self._lists
            }
            liked_B = np.minimum(lengths_B - cut_B, self.options.positives)
            liked = values_T[ranges(begin_B + cut_B, liked_B)]
        numbers_T = self.options.catalogue.numbers(values_T)
        if len(values_T) and not numbers_T.all():
            raise DataError(
                f"a history has item {values_T[numbers_T == 0][0]}, which is none of the "
                f"{self.options.catalogue.num_items:,} items; correct model.num_items, or leave it "
                "0 to take the items of the data"
            )
        samples_B = np.arange(batch.size)
        chosen = (np.repeat(samples_B, lengths_B), values_T)
        wanted = (np.repeat(samples_B, liked_B), liked)
        drawn = self._negatives(batch, liked_B, _joined(chosen, wanted))
        candidates, labels = _candidates(wanted, drawn, batch.size)
        dense = {name: batch.dense[name] for name in (SAMPLE_ID, PASS)}
        if self._timed:
            dense[TIME] = batch.dense[TIME] if self._held_out else _first(batch, begin_B + cut_B)
        sparse = {HISTORY: kept.pop(HISTORY), CANDIDATES: candidates, LABELS: labels, **kept}
        return Batch(batch.size, dense, sparse)

    def _negatives(self, batch: Batch, liked_B: NDArray[np.int64], chosen: _Items) -> _Items:
        """(sample, item) drawn for each sample, less those chosen."""
        counts_B = liked_B * self.options.negatives
        samples = np.repeat(np.arange(batch.size), counts_B)
        numbers = ranges(np.zeros_like(counts_B), counts_B).astype(np.uint64)
        bits = draw(mix(self.options.seed, 3), self._bits(batch, 2)[samples] + numbers)
        catalogue = self.options.catalogue
        items = (bits % np.uint64(catalogue.num_items)).astype(np.int64) + 1
        width = catalogue.num_items + 1
        taken = chosen[0] * width + catalogue.numbers(chosen[1])
        free = ~np.isin(samples * width + items, taken)
        return samples[free], catalogue.keys(items[free])

    def _bits(self, batch: Batch, salt: int) -> U64:
        """64 bits for each sample and pass."""
        ids_B, passes_B = batch.dense[SAMPLE_ID].numpy(), batch.dense[PASS].numpy()
        of_sample_B = draw(mix(self.options.seed, salt), ids_B)
        return draw(mix(self.options.seed, salt), of_sample_B + passes_B.astype(np.uint64))


def _first(batch: Batch, place_B: NDArray[np.int64]) -> Tensor:
    """When the item at each place was chosen; 0 for a user without any."""
    times_T = np.append(batch.sparse[TIMESTAMPS].values.numpy(), 0)
    there_B = batch.sparse[HISTORY].lengths.numpy() > 0
    return tensor(np.where(there_B, times_T[np.minimum(place_B, len(times_T) - 1)], 0))


_Items = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The sample of each item, and the items."""


def _joined(one: _Items, other: _Items) -> _Items:
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])


def _candidates(liked: _Items, drawn: _Items, size: int) -> tuple[Jagged, Jagged]:
    """The candidates of each sample, liked ones first, and their labels."""
    samples_C, items_C = _joined(liked, drawn)
    labels_C = np.concatenate([np.ones_like(liked[1]), np.zeros_like(drawn[1])])
    order_C = np.argsort(samples_C, kind="stable")
    lengths_B = tensor(np.bincount(samples_C, minlength=size))
    return (
        Jagged(tensor(items_C[order_C]), lengths_B),
        Jagged(tensor(labels_C[order_C]), lengths_B),
    )
