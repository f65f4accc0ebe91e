"""Keys sent by micro-batches cut in different ways, on MovieLens and on planted communities."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.config.load import positive
from nestpipe.data.clustering import Balance, How, count_keys_sent, partition
from nestpipe.data.order import Permutation, draw, mix, uniform
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged

RANDOM_CUTS = 5
"""Random cuts whose mean the others are compared with."""
ROUNDS = 7
"""Timed calls; the median counts."""
WAYS: dict[str, tuple[How, Balance]] = {
    "contiguous": ("contiguous", Balance()),
    "clustered": ("clustered", Balance()),
    "clustered both": ("clustered", Balance(both_sides=True)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusteringCase:
    """Sizes of the clustering benchmark."""

    samples: int = 512
    items: int = 200
    """The latest of each MovieLens user; at most this many of each generated one."""
    parts: tuple[int, ...] = (8, 32)
    """Numbers of micro-batches."""
    draws: int = 5
    """Different sets of users, and different generated batches."""

    def __post_init__(self) -> None:
        for name in ("samples", "items", "draws"):
            positive(name, getattr(self, name))
        for parts in self.parts:
            if not 1 <= parts <= self.samples:
                raise ConfigError(
                    f"{self.samples} samples cannot be cut into {parts} micro-batches; "
                    f"give 1 to {self.samples}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusteringReading:
    """One way to cut, on one kind of data: means over the draws."""

    data: str
    parts: int
    how: str
    ratio: float
    """Keys sent over dedup of the whole batch."""
    fewer_percent: float
    """Keys saved, of those that random cuts send."""
    fewer_percent_worst: float
    """The same of the worst draw."""
    excess_removed_percent: float
    """Keys saved, of those that random cuts send more often than once."""
    tokens_over: float
    """The heaviest micro-batch of all draws: tokens over the mean, less 1."""
    tokens_under: float
    """The lightest: 1 less its tokens over the mean."""
    ms: float
    cpu_ms: float
    """Of the one thread that it runs on: what `ms` would be with a core to itself."""


@dataclass(frozen=True, slots=True)
class _Cut:
    ratio: float
    tokens_over: float
    tokens_under: float
    ms: float
    cpu_ms: float


def measure_clustering(
    case: ClusteringCase, movielens: Path | None, progress: Callable[[], object]
) -> list[ClusteringReading]:
    """Random, contiguous and clustered micro-batches of the same batches."""
    batches = {"communities": [communities(case, seed) for seed in range(case.draws)]}
    if movielens is not None:
        batches = {"movielens": movielens_batches(case, movielens), **batches}
    readings: list[ClusteringReading] = []
    for name, drawn in batches.items():
        for parts in case.parts:
            readings += _compare(name, drawn, parts, progress)
    return readings


def steps(case: ClusteringCase, movielens: bool) -> int:
    """Calls of `progress`."""
    return len(case.parts) * case.draws * (2 if movielens else 1)


def movielens_batches(case: ClusteringCase, path: Path) -> list[Jagged]:
    """The latest items of users drawn at random, one batch per draw."""
    try:
        from nestpipe.data.public_sets import read_ratings
        from nestpipe.data.text import Broken
    except ImportError:
        raise ConfigError(
            "reading MovieLens needs pyarrow; run pip install 'nestpipe[train]'"
        ) from None
    ratings = read_ratings(path, Broken(0))
    order = np.argsort(ratings.user, kind="stable")
    _, counts = np.unique(ratings.user, return_counts=True)
    if len(counts) < case.samples:
        raise DataError(
            f"{str(path)!r} has {len(counts):,} users; ask for that many samples at most"
        )
    items = Jagged(torch.from_numpy(ratings.item[order]), torch.from_numpy(counts.astype(np.int64)))
    return [
        _latest(items, _some(len(counts), case.samples, s), case.items) for s in range(case.draws)
    ]


def _some(total: int, wanted: int, seed: int) -> Tensor:
    return torch.from_numpy(Permutation(total, mix(seed))(np.arange(wanted)))


def _latest(items: Jagged, users: Tensor, most: int) -> Jagged:
    return Jagged.from_lists([row[-most:] for row in items.select(users).to_lists()])


# Generated batches: users of a community look at its own items most of the time.
COMMUNITIES = 32
OWN_ITEMS = 1000
COMMON_ITEMS = 4000
OWN_SHARE = 0.8


def communities(case: ClusteringCase, seed: int) -> Jagged:
    """Users of planted communities in random order, with half of `items` to `items` keys each."""
    fewest = max(1, case.items // 2)
    users = np.arange(case.samples)
    lengths = fewest + _below(case.items - fewest + 1, mix(seed, 0), case.samples)
    community = Permutation(case.samples, mix(seed, 1))(users) % COMMUNITIES
    home = np.repeat(community, lengths)
    total = len(home)
    own = uniform(draw(mix(seed, 2), np.arange(total))) < OWN_SHARE
    # Squared: the first items of a catalogue are looked at most.
    rank = uniform(draw(mix(seed, 3), np.arange(total))) ** 2
    at_home = (home + 1) * OWN_ITEMS + (rank * OWN_ITEMS).astype(np.int64)
    anywhere = -1 - (rank * COMMON_ITEMS).astype(np.int64)
    return Jagged(
        torch.from_numpy(np.where(own, at_home, anywhere)),
        torch.from_numpy(lengths),
    )


def _below(limit: int, key: int, count: int) -> NDArray[np.int64]:
    return (uniform(draw(key, np.arange(count))) * limit).astype(np.int64)


def _compare(
    name: str, batches: Sequence[Jagged], parts: int, progress: Callable[[], object]
) -> list[ClusteringReading]:
    cuts: dict[str, list[_Cut]] = {"random": [], **{way: [] for way in WAYS}}
    for batch in batches:
        drawn = [_cut(batch, parts, "random", Balance(), seed) for seed in range(RANDOM_CUTS)]
        cuts["random"].append(_mean(drawn))
        for way, (how, balance) in WAYS.items():
            cuts[way].append(_cut(batch, parts, how, balance))
        progress()
    return [_reading(name, parts, way, found, cuts["random"]) for way, found in cuts.items()]


def _cut(batch: Jagged, parts: int, how: How, balance: Balance, seed: int | None = None) -> _Cut:
    keys = {"items": batch}
    each, extra = divmod(batch.num_samples, parts)
    sizes = [each + (part < extra) for part in range(parts)]
    times: list[float] = []
    cpu_times: list[float] = []
    found: list[Tensor] = []
    for _ in range(ROUNDS):
        began, cpu_began = time.perf_counter(), time.thread_time()
        found = partition(keys, sizes, how, balance=balance, seed=seed)
        times.append(1e3 * (time.perf_counter() - began))
        cpu_times.append(1e3 * (time.thread_time() - cpu_began))
    share = batch.lengths.sum() / batch.num_samples
    load = [float(batch.lengths[own].sum() / (share * len(own))) for own in found]
    ratio = count_keys_sent(keys, found).ratio
    return _Cut(ratio, max(load) - 1, 1 - min(load), median(times), median(cpu_times))


def _mean(cuts: Sequence[_Cut]) -> _Cut:
    return _Cut(
        mean(cut.ratio for cut in cuts),
        max(cut.tokens_over for cut in cuts),
        max(cut.tokens_under for cut in cuts),
        mean(cut.ms for cut in cuts),
        mean(cut.cpu_ms for cut in cuts),
    )


def _reading(
    data: str, parts: int, how: str, cuts: Sequence[_Cut], random: Sequence[_Cut]
) -> ClusteringReading:
    pairs = list(zip(cuts, random, strict=True))
    fewer = [100 * (1 - cut.ratio / base.ratio) for cut, base in pairs]
    excess = [
        100 * (base.ratio - cut.ratio) / (base.ratio - 1) if base.ratio > 1 else 0.0
        for cut, base in pairs
    ]
    average = _mean(cuts)
    return ClusteringReading(
        data=data,
        parts=parts,
        how=how,
        ratio=average.ratio,
        fewer_percent=mean(fewer),
        fewer_percent_worst=min(fewer),
        excess_removed_percent=mean(excess),
        tokens_over=average.tokens_over,
        tokens_under=average.tokens_under,
        ms=average.ms,
        cpu_ms=average.cpu_ms,
    )
