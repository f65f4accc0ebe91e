"""`Ranking`: users' sequences as rankings, items to be told from others that nobody chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.config import positive
from nestpipe.data.order import U64, draw, mix
from nestpipe.data.source import (
    HISTORY,
    PASS,
    SAMPLE_ID,
    TARGET,
    TIME,
    TIMESTAMPS,
    Column,
    Source,
    empty_batch,
    keys_column,
    tensor,
    time_column,
    times_column,
)
from nestpipe.data.text import Broken
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged

# Shapes: B samples, T items of all samples together, C candidates of all samples together

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

        With an `offset`, all of them begin so many samples later.
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
        return (self._ranked(batch) if batch.size else self.empty() for batch in sequences)

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
            before = _ranges(begin_B, cut_B)
            kept = {
                name: Jagged(tensor(batch.sparse[name].values.numpy()[before]), tensor(cut_B))
                for name in self._lists
            }
            liked_B = np.minimum(lengths_B - cut_B, self.options.positives)
            liked = values_T[_ranges(begin_B + cut_B, liked_B)]
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
        numbers = _ranges(np.zeros_like(counts_B), counts_B).astype(np.uint64)
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


def _ranges(begin_B: NDArray[np.int64], length_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """begin, begin + 1, ... for each sample."""
    ends_B = np.cumsum(length_B)
    within = np.arange(ends_B[-1]) - np.repeat(ends_B - length_B, length_B)
    return np.repeat(begin_B, length_B) + within
