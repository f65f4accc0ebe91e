"""Cut a batch into micro-batches: so that samples which share keys meet, or into even work.

A key that two micro-batches have is sent twice where each asks for itself; docs/clustering.md says
how much that is and what clustering saves.

Histories differ in length, and the slowest part decides, so even work is not even counts. The work
of a sample is what its model says, from its own lengths alone. Samples go by falling work, each to
the part that has the least so far (LPT). The parts are a function of the work alone, so every rank
finds the same ones without a word.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.data.order import Permutation, draw, mix
from nestpipe.data.source import Source
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.kernels.clustering import ClusterTask, cluster

# Shapes: B samples, P micro-batches, F features, T keys of all samples

I64 = NDArray[np.int64]
How = Literal["contiguous", "random", "clustered"]
TOKEN_SLACK = 0.10
"""How far the tokens of a micro-batch may be from its share."""
_MOST_WORK = 1 << 20
"""Tokens of the sample with the most work in a batch: work is resolved to one in a million."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How even the tokens of micro-batches are to be; their samples are given."""

    slack: float = TOKEN_SLACK
    """At most this much more than a micro-batch's share, which goes by its samples."""
    both_sides: bool = False
    """At most this much less, too."""

    def bounds(self, tokens: int, sizes_P: I64) -> tuple[I64, I64]:
        """Tokens of each micro-batch, at least and at most."""
        due_P = tokens * sizes_P / max(1, int(sizes_P.sum()))
        most_P = np.floor(due_P * (1 + self.slack)).astype(np.int64)
        least_P = np.ceil(due_P * (1 - self.slack)).astype(np.int64)
        return least_P if self.both_sides else np.zeros_like(least_P), most_P


@dataclass(frozen=True, slots=True)
class KeysSent:
    """Keys that travel for one batch: each micro-batch asks for its own distinct keys."""

    per_micro: tuple[int, ...]
    whole: int
    """Distinct keys of the whole batch."""

    @property
    def total(self) -> int:
        return sum(self.per_micro)

    @property
    def ratio(self) -> float:
        """Keys sent over what dedup of the whole batch would send."""
        return self.total / self.whole if self.whole else 1.0


def micro_batches(
    batch: Batch,
    keys: Mapping[str, Jagged],
    sizes: Sequence[int],
    how: How = "clustered",
    *,
    table_of: Mapping[str, str] | None = None,
    balance: Balance | None = None,
    work_B: Tensor | None = None,
) -> list[Batch]:
    """The batch in pieces of these sizes; samples of a piece keep their order.

    `keys` are what the samples are clustered by, all features or some; the rest is `partition`'s.
    """
    if how == "contiguous" or not keys:
        return batch.split(sizes)
    parts = partition(keys, sizes, how, table_of=table_of, balance=balance, work_B=work_B)
    return [batch.select(samples) for samples in parts]


def partition(
    keys: Mapping[str, Jagged],
    sizes: Sequence[int],
    how: How = "clustered",
    *,
    table_of: Mapping[str, str] | None = None,
    balance: Balance | None = None,
    seed: int | None = None,
    work_B: Tensor | None = None,
) -> list[Tensor]:
    """The samples of each micro-batch, in ascending order; a function of the arguments alone.

    `table_of` names the table of each feature; without it each feature has its own. `seed` is for
    `random`; without it, the keys are the seed. `work_B` is for `clustered`: how much work each
    sample is; without it, as much as it has keys.
    """
    if how not in get_args(How):
        raise ConfigError(f"samples cannot be cut {how!r}; use {', '.join(get_args(How))}")
    sizes_P = np.array(sizes, np.int64)
    offsets_B1, keys_T = join_keys(keys, table_of)
    samples = len(offsets_B1) - 1
    assert sizes_P.sum() == samples, f"{sizes} do not add up to {samples} samples"
    if how == "clustered":
        tokens_B = np.diff(offsets_B1) if work_B is None else _whole_numbers(work_B)
        return _clustered(offsets_B1, keys_T, tokens_B, sizes_P, balance or Balance())
    order_B = np.arange(samples)
    if how == "random":
        content = int(keys_T.view(np.uint64).sum()) if seed is None else seed
        order_B = Permutation(samples, mix(content))(order_B)
    ends_P = np.cumsum(sizes_P)
    pieces = (order_B[end - size : end] for end, size in zip(ends_P, sizes_P, strict=True))
    return [torch.from_numpy(np.sort(piece)) for piece in pieces]


def count_keys_sent(
    keys: Mapping[str, Jagged],
    parts: Sequence[Tensor],
    table_of: Mapping[str, str] | None = None,
) -> KeysSent:
    """What these micro-batches send, and what one exchange for the whole batch would."""
    whole = 0
    per_micro = [0] * len(parts)
    for features in _tables(keys, table_of):
        whole += _distinct(features)
        for number, samples in enumerate(parts):
            per_micro[number] += _distinct([feature.select(samples) for feature in features])
    return KeysSent(tuple(per_micro), whole)


def join_keys(
    keys: Mapping[str, Jagged], table_of: Mapping[str, str] | None = None
) -> tuple[I64, I64]:
    """(B + 1,) offsets and (T,) keys of all features, sample by sample, distinct by table."""
    tables = _tables(keys, table_of)
    if not tables:
        return np.zeros(1, np.int64), np.empty(0, np.int64)
    values: list[I64] = []
    lengths: list[I64] = []
    for number, features in enumerate(tables):
        for feature in features:
            found = feature.values.numpy().astype(np.int64, copy=False)
            apart = found if len(tables) == 1 else draw(mix(number), found).view(np.int64)
            values.append(apart)
            lengths.append(feature.lengths.numpy())
    lengths_FB = np.stack(lengths)
    offsets_B1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_FB.sum(0))])
    if len(values) == 1:
        return offsets_B1, values[0]
    keys_T = np.empty(offsets_B1[-1], np.int64)
    starts_FB = offsets_B1[:-1] + np.cumsum(lengths_FB, 0) - lengths_FB
    for own, lengths_B, starts_B in zip(values, lengths_FB, starts_FB, strict=True):
        shift_B = starts_B - (np.cumsum(lengths_B) - lengths_B)
        keys_T[np.arange(len(own)) + np.repeat(shift_B, lengths_B)] = own
    return offsets_B1, keys_T


def _tables(keys: Mapping[str, Jagged], table_of: Mapping[str, str] | None) -> list[list[Jagged]]:
    """The features of each table."""
    features: dict[str, list[Jagged]] = {}
    for name, feature in keys.items():
        features.setdefault(table_of[name] if table_of else name, []).append(feature)
    return list(features.values())


def _distinct(features: Sequence[Jagged]) -> int:
    return len(torch.unique(torch.cat([feature.values for feature in features])))


def _whole_numbers(work_B: Tensor) -> I64:
    """Work as tokens: the largest sample has `_MOST_WORK`."""
    work = work_B.double().numpy()
    return np.rint(work * (_MOST_WORK / max(1e-300, float(work.max(initial=0.0))))).astype(np.int64)


def _clustered(
    offsets_B1: I64, keys_T: I64, tokens_B: I64, sizes_P: I64, balance: Balance
) -> list[Tensor]:
    least_P, most_P = balance.bounds(int(tokens_B.sum()), sizes_P)
    task = ClusterTask(
        offsets_B1=offsets_B1,
        keys_T=keys_T,
        tokens_B=tokens_B,
        sizes_P=sizes_P,
        least_P=least_P,
        most_P=most_P,
    )
    part_B = cluster(task)
    parts = [np.flatnonzero(part_B == part) for part in range(len(sizes_P))]
    if len(set(sizes_P.tolist())) == 1:
        parts = _light_ends(parts, tokens_B)
    return [torch.from_numpy(part) for part in parts]


def _light_ends(parts: list[I64], tokens_B: I64) -> list[I64]:
    """The lightest first and the next lightest last: the ends of a window are what shows."""
    light, *rest = sorted(range(len(parts)), key=lambda part: int(tokens_B[parts[part]].sum()))
    inner, last = sorted(rest[1:]), rest[:1]
    return [parts[part] for part in (light, *inner, *last)]


# Shapes: B samples, P parts

WorkOf = Callable[[Batch], Tensor]
"""(B,) how much work each sample is, in any unit."""


def even_parts(work_B: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """The samples of each part, ascending; part p has about `shares[p]` of all work.

    Equal work goes by the sample's place, equal parts by theirs: nothing is left to chance.
    """
    work = [float(of_sample) for of_sample in work_B.tolist()]
    members: list[list[int]] = [[] for _ in shares]
    parts = [(0.0, part) for part in range(len(shares))]
    for sample in sorted(range(len(work)), key=lambda sample: -work[sample]):
        load, part = heapq.heappop(parts)
        members[part].append(sample)
        heapq.heappush(parts, (load + work[sample] / shares[part], part))
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in members]


def deal_evenly(
    source: Source,
    work_of: WorkOf,
    *,
    global_batch: int,
    rank: int,
    ranks: int,
    seed: int,
    epoch: int = 0,
    start: int = 0,
    offset: int = 0,
) -> Iterator[Batch]:
    """`source.batches`, where ranks have even work of the same global batches.

    Each rank reads all of a batch and keeps its part: lengths are known only then.
    """
    whole = source.batches(
        global_batch=global_batch,
        rank=0,
        ranks=1,
        seed=seed,
        epoch=epoch,
        start=start,
        **({"offset": offset} if offset else {}),
    )
    for batch in whole:
        yield batch.select(even_parts(work_of(batch), [1.0] * ranks)[rank])


@dataclass(frozen=True, slots=True)
class MicroBatchSplitter:
    """How batches are split into micro-batches: how many samples each gets, and which."""

    count: int
    how: How = "contiguous"
    first: float = 1.0
    last: float = 1.0
    """Sizes of the first and the last micro-batch over that of those in the middle."""
    work_of: WorkOf | None = None
    """Sizes are by work; None: by samples."""

    def split(
        self,
        batch: Batch,
        keys_of: Callable[[Batch], Mapping[str, Jagged]],
        table_of: Mapping[str, str],
    ) -> list[Batch]:
        """The micro-batches; `table_of` says which of the features in `keys_of` share keys."""
        if self.count == 1:
            return [batch]
        sizes = micro_sizes(batch.size, self.count, self.first, self.last)
        work_B = None if self.work_of is None else self.work_of(batch)
        if work_B is not None and self.how != "clustered":
            shares = _weights(self.count, self.first, self.last)
            return [batch.select(part) for part in even_parts(work_B, shares)]
        if self.how == "contiguous":
            return batch.split(sizes)
        keys = keys_of(batch)
        return micro_batches(batch, keys, sizes, self.how, table_of=table_of, work_B=work_B)


def _weights(count: int, first: float, last: float) -> list[float]:
    weights = [1.0] * count
    weights[0], weights[-1] = first, last
    return weights


def micro_sizes(total: int, count: int, first: float = 1.0, last: float = 1.0) -> list[int]:
    """Samples of each micro-batch: at the ends `first` and `last` times those in the middle."""
    weights = _weights(count, first, last)
    due = [total * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in due]
    # What rounding left over goes where it is missed most, earlier ones first.
    order = sorted(range(count), key=lambda i: (sizes[i] - due[i], i))
    for i in order[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
