"""Which micro-batch each sample of a batch goes to: native code, and its plain twin in numpy.

docs/clustering.md has the algorithm. Both forms agree to the bit in the start, the order of visits,
and the choice among equally good swaps (the one at the first position).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import CapacityError
from nestpipe.kernels.library import Status, library, native_wanted

# Shapes: B samples or places, P parts, K keys that several samples share, T keys of all samples

I64 = NDArray[np.int64]
MOST_TOKENS = (1 << 30) - 1
"""Tokens of one sample."""
SWEEPS = 16
"""Visits of every sample."""
FEW_SWEEPS, MANY_PARTS = 12, 16
"""The same where a visit is expensive: with more parts than this."""
DESCENTS = 2
"""The last of them, in which keys sent can only get fewer."""
STEEPNESS = 4
"""A swap of the first sweep may cost this part of a sample's keys."""
WINDOW = 1024
"""Positions among which a sample looks for a partner."""
_NEVER = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterTask:
    """A batch to be cut into micro-batches ("parts")."""

    offsets_B1: I64
    """Where each sample's keys are in `keys_T`, and the end."""
    keys_T: I64
    """Keys of all tables, made distinct before."""
    tokens_B: I64
    """How much work each sample is."""
    sizes_P: I64
    """Samples of each part."""
    least_P: I64
    """Tokens of a part at least; where the start is further out, no further than that."""
    most_P: I64
    """And at most."""


class _ClusterTaskStruct(ctypes.Structure):
    """`ClusterTask` of `native/clustering/cluster.h`."""

    _fields_ = (
        ("num_samples", c_int64),
        ("num_parts", c_int64),
        ("offsets", c_void_p),
        ("keys", c_void_p),
        ("tokens", c_void_p),
        ("sizes", c_void_p),
        ("least", c_void_p),
        ("most", c_void_p),
    )


def cluster(task: ClusterTask, *, native: bool | None = None) -> I64:
    """(B,) the part of each sample, a function of the task alone; runs without the GIL.

    `native=None` leaves the choice to NESTPIPE_NATIVE.
    """
    _check(task)
    if not (native_wanted() if native is None else native):
        return cluster_plainly(task)
    columns = (task.offsets_B1, task.keys_T, task.tokens_B, task.sizes_P, task.least_P, task.most_P)
    held = [np.ascontiguousarray(column, np.int64) for column in columns]
    given = _ClusterTaskStruct(
        len(task.tokens_B), len(task.sizes_P), *(column.ctypes.data for column in held)
    )
    part_B = np.empty(len(task.tokens_B), np.int64)
    status = library().nestpipe_cluster(ctypes.addressof(given), part_B.ctypes.data)
    if status == Status.NO_MEMORY:
        raise CapacityError(
            f"host memory is full: {len(task.keys_T):,} keys cannot be clustered into "
            f"{len(task.sizes_P)} micro-batches; free memory or use smaller batches"
        )
    assert status == Status.OK, f"clustering answered {status}"
    return part_B


def _check(task: ClusterTask) -> None:
    samples, parts = len(task.tokens_B), len(task.sizes_P)
    assert len(task.offsets_B1) == samples + 1, "every sample has a start, and the last an end"
    assert task.offsets_B1[0] == 0, "the first sample's keys are the first"
    assert task.offsets_B1[-1] == len(task.keys_T), "the last sample's keys are the last"
    assert (np.diff(task.offsets_B1) >= 0).all(), "samples follow one another"
    assert len(task.least_P) == len(task.most_P) == parts, "every part has bounds"
    assert (task.sizes_P >= 0).all(), "a part cannot have less than no samples"
    assert task.sizes_P.sum() == samples, "the parts have room for all samples"
    assert (task.tokens_B >= 0).all(), "tokens are a number from 0"
    assert (task.tokens_B <= MOST_TOKENS).all(), f"a sample has at most {MOST_TOKENS} tokens"


def cluster_plainly(task: ClusterTask) -> I64:
    """(B,) the part of each sample."""
    swaps = _Swaps(task)
    swaps.run()
    part_B = np.empty(len(task.tokens_B), np.int64)
    part_B[swaps.sample_at] = swaps.part_at
    return part_B


def shared_keys(task: ClusterTask) -> list[I64]:
    """The keys of each sample that another has too, each once, as numbers from 0."""
    _, numbers_T = np.unique(task.keys_T, return_inverse=True)
    pairs = zip(task.offsets_B1[:-1], task.offsets_B1[1:], strict=True)
    own = [np.unique(numbers_T[begin:end]) for begin, end in pairs]
    frequency = np.bincount(np.concatenate([*own, np.empty(0, np.int64)]))
    renumbered = np.cumsum(frequency > 1) - 1
    return [renumbered[keys[frequency[keys] > 1]] for keys in own]


def seat_by_tokens(task: ClusterTask) -> I64:
    """(B,) the sample at each place; part p has the places after those of part p - 1.

    Samples by falling tokens, each to the part whose free places have the most tokens to come.
    """
    tokens_B, sizes = task.tokens_B.tolist(), task.sizes_P.tolist()
    total = float(sum(tokens_B))
    due = [total * float(size) / float(len(tokens_B)) for size in sizes] if tokens_B else []
    members: list[list[int]] = [[] for _ in sizes]
    filled = [0] * len(sizes)
    for sample in np.argsort(-task.tokens_B, kind="stable").tolist():
        free = [p for p, size in enumerate(sizes) if len(members[p]) < size]
        part = max(
            free, key=lambda p: (due[p] - float(filled[p])) / float(sizes[p] - len(members[p]))
        )
        members[part].append(sample)
        filled[part] += tokens_B[sample]
    return np.array([sample for part in members for sample in part], np.int64)


@dataclass(slots=True)
class _Swaps:
    """Swaps samples of two parts while that saves keys."""

    task: ClusterTask
    keys: list[I64] = field(init=False)
    sample_at: I64 = field(init=False)
    part_at: I64 = field(init=False)
    tokens_P: I64 = field(init=False)
    least_P: I64 = field(init=False)
    most_P: I64 = field(init=False)
    holders_KP: I64 = field(init=False)
    """Samples of a part that have a key."""
    absent_PB: I64 = field(init=False)
    """Keys of the sample at a place that a part lacks."""
    alone_B: I64 = field(init=False)
    """Keys of the sample at a place that its part has from nobody else."""

    def __post_init__(self) -> None:
        task, parts = self.task, len(self.task.sizes_P)
        self.keys = shared_keys(task)
        self.sample_at = seat_by_tokens(task)
        self.part_at = np.repeat(np.arange(parts), task.sizes_P)
        self.tokens_P = np.zeros(parts, np.int64)
        np.add.at(self.tokens_P, self.part_at, task.tokens_B[self.sample_at])
        self.least_P = np.minimum(task.least_P, self.tokens_P)
        self.most_P = np.maximum(task.most_P, self.tokens_P)
        num_keys = 1 + max((int(keys.max(initial=-1)) for keys in self.keys), default=-1)
        self.holders_KP = np.zeros((num_keys, parts), np.int64)
        for place, sample in enumerate(self.sample_at):
            self.holders_KP[self.keys[sample], self.part_at[place]] += 1
        self.absent_PB = np.zeros((parts, len(self.sample_at)), np.int64)
        self.alone_B = np.zeros(len(self.sample_at), np.int64)

    def run(self) -> None:
        mean = sum(map(len, self.keys)) // max(1, len(self.keys))
        sweeps = FEW_SWEEPS if len(self.task.sizes_P) > MANY_PARTS else SWEEPS
        falls = sweeps - DESCENTS
        for sweep in range(sweeps):
            left = max(0, falls - sweep)
            limit = mean * left * left // (STEEPNESS * falls * falls)
            changed = self.visit_all(sweep, limit)
            if limit == 0 and not changed:
                return

    def visit_all(self, sweep: int, limit: int) -> bool:
        samples = len(self.sample_at)
        for place in range(samples):
            self.count_keys(place)
        window = min(samples, WINDOW)
        changed = False
        for sample in range(samples):
            place = int(np.flatnonzero(self.sample_at == sample)[0])
            begin = (sample + sweep * window) % (samples - window + 1)
            self.count_keys(place)
            other = self.best_partner(place, slice(begin, begin + window), limit)
            if other is None:
                continue
            self.count_keys(other)
            if self.exact_change(place, other) < limit:
                self.swap(place, other)
                changed = True
        return changed

    def count_keys(self, place: int) -> None:
        """What the sample at a place would bring to each part, and takes along when it goes."""
        holders_SP = self.holders_KP[self.keys[self.sample_at[place]]]
        self.absent_PB[:, place] = (holders_SP == 0).sum(0)
        self.alone_B[place] = (holders_SP[:, self.part_at[place]] == 1).sum()

    def best_partner(self, place: int, window: slice, limit: int) -> int | None:
        """The place whose sample would make the best swap, by the counts at hand."""
        part, others = self.part_at[place], self.part_at[window]
        goes = self.absent_PB[others, place] - self.alone_B[place]
        change = goes + self.absent_PB[part, window] - self.alone_B[window]
        mine = self.task.tokens_B[self.sample_at[place]]
        theirs = self.task.tokens_B[self.sample_at[window]]
        after_p = self.tokens_P[part] - mine + theirs
        after_q = self.tokens_P[others] + mine - theirs
        fits = (self.least_P[part] <= after_p) & (after_p <= self.most_P[part])
        fits &= (self.least_P[others] <= after_q) & (after_q <= self.most_P[others])
        change[~fits | (others == part)] = _NEVER
        best = int(change.argmin())
        return window.start + best if change[best] < limit else None

    def exact_change(self, x: int, y: int) -> int:
        """Keys sent after a swap less those before; the counts of both places must be current."""
        p, q = self.part_at[x], self.part_at[y]
        change = self.absent_PB[q, x] - self.alone_B[x] + self.absent_PB[p, y] - self.alone_B[y]
        # A key of both stays in both parts, but counts as leaving where nobody else has it.
        both = np.intersect1d(self.keys[self.sample_at[x]], self.keys[self.sample_at[y]])
        kept = (self.holders_KP[both][:, [p, q]] == 1).sum()
        return int(change + kept)

    def swap(self, x: int, y: int) -> None:
        a, b = self.sample_at[x], self.sample_at[y]
        p, q = self.part_at[x], self.part_at[y]
        for sample, old, new in ((a, p, q), (b, q, p)):
            self.holders_KP[self.keys[sample], old] -= 1
            self.holders_KP[self.keys[sample], new] += 1
            self.tokens_P[old] -= self.task.tokens_B[sample]
            self.tokens_P[new] += self.task.tokens_B[sample]
        self.sample_at[x], self.sample_at[y] = b, a
        self.count_keys(x)
        self.count_keys(y)
