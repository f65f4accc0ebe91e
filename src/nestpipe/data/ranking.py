"""`Ranking`: users' sequences as rankings, items to be told from others that nobody chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.config import positive
from nestpipe.data.order import U64, draw, mix
from nestpipe.data.readers.text import Broken
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
from nestpipe.jagged import Jagged

# Shapes: B samples, T items of all samples together, C candidates of all samples together

CANDIDATES, LABELS = "candidates", "labels"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingOptions:
    """What is ranked after a history."""

    num_items: int
    """Negatives are drawn from the items 1 to this, all with the same chance."""
    positives: int = 4
    """Items after the history that are liked candidates, at most; held-out samples have one."""
    negatives: int = 8
    """Items drawn for each liked candidate, in every split: so their share is the same."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_items", "positives", "negatives"):
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
        items = (bits % np.uint64(self.options.num_items)).astype(np.int64) + 1
        width = max(self.options.num_items, int(chosen[1].max(initial=0))) + 1
        free = ~np.isin(samples * width + items, chosen[0] * width + chosen[1])
        return samples[free], items[free]

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
