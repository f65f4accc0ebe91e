"""A small world of tables whose rows come and go, and a plain model of it that shares no code.

The model is two dictionaries for each table. It sees whole global batches, never ranks, plans or
micro-batches, and says which keys have a row, what is noted of them, and who left when.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.config import Table
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.train.trainer import Trainer

BATCH, SEED, EVERY = 12, 11, 4
NAMES = ("one", "two")
Uses = dict[int, tuple[int, int]]
"""Last step and count, by key."""


@dataclass(frozen=True)
class Stream:
    """Global batches of keys, some of which come again and again, others once."""

    steps: int
    seed: int = 0
    drift: int = 3
    """How far the window of keys moves in a step."""

    @property
    def num_samples(self) -> int:
        return self.steps * BATCH

    def keys(self, step: int) -> dict[str, list[list[int]]]:
        """Of batch `step`, counted from 1: for each feature the keys of each sample."""
        chance = random.Random(self.seed * 10_007 + step)

        def key() -> int:
            if chance.random() < 0.5:
                return chance.randrange(12) * 7919 - 5
            return (self.drift * step + chance.randrange(25)) * 104_729

        return {
            "one": [[key() for _ in range(chance.randrange(4))] for _ in range(BATCH)],
            "two": [[key()] for _ in range(BATCH)],
        }

    def batches(self, *, rank: int, ranks: int, start: int = 0, **_: int) -> Iterator[Batch]:
        for step in range(start + 1, self.steps + 1):
            whole = self._batch(step)
            yield whole.slice(whole.size * rank // ranks, whole.size * (rank + 1) // ranks)

    def _batch(self, step: int) -> Batch:
        sparse: dict[str, Jagged] = {}
        for name, lists in self.keys(step).items():
            flat = torch.tensor([key for of in lists for key in of], dtype=torch.int64)
            sparse[name] = Jagged(flat, torch.tensor([len(of) for of in lists]))
        label = torch.rand(BATCH, generator=torch.Generator().manual_seed(step)).round()
        return Batch(BATCH, {"label": label}, sparse)

    def empty(self) -> Batch:
        return self._batch(1).empty()


class Model(nn.Module):
    """Adds up pooled and single rows; no row has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(8, 1)
        with torch.no_grad():  # ranks that are threads share torch's generator
            self.top.weight.copy_(torch.linspace(-1.0, 1.2, 8))
            self.top.bias.fill_(0.1)

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_B = self.top(torch.cat([rows["one"], rows["two"]], 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits
        return Loss(losses(logits_B, batch.dense["label"], reduction="sum"), batch.size)


def tables(**policy: object) -> list[Table]:
    """Two tables of one store; both have the policy."""
    return [
        Table(name="one", dim=4, pooling="sum", init_std=0.3, **policy),  # pyright: ignore
        Table(name="two", dim=4, init_std=0.3, **policy),  # pyright: ignore
    ]


# What a trainer has, all ranks together


@dataclass
class Held:
    """What all ranks of a run hold of each table."""

    rows: dict[str, dict[int, tuple[float, ...]]] = field(default_factory=dict)
    uses: dict[str, Uses] = field(default_factory=dict)
    waiting: dict[str, Uses] = field(default_factory=dict)
    evicted: list[tuple[int, str, list[int]]] = field(default_factory=list)


def held_by(trainer: Trainer) -> Held:
    """This rank's part."""
    held = Held()
    assert trainer.lifecycle is not None
    for group, store in zip(trainer.groups, trainer.stores, strict=True):
        for name in (table.name for table in group.tables):
            held.rows[name] = {}
        for table, keys, rows in store.export():
            of = held.rows[group.tables[table].name]
            of |= {int(k): tuple(r.tolist()) for k, r in zip(keys, rows, strict=True)}
    for policy in trainer.lifecycle:
        for table, known in zip(policy.group.tables, policy.ledger.snapshot(), strict=True):
            held.uses[table.name] = _uses(known.keys, known.uses)
            held.waiting[table.name] = _uses(known.waiting, known.waiting_uses)
    return held


def _uses(keys: Tensor, uses: Tensor) -> Uses:
    return {int(k): (int(u[0]), int(u[1])) for k, u in zip(keys, uses, strict=True)}


def joined(ranks: list[Held]) -> Held:
    """What ranks hold together; no two hold the same key."""
    whole = Held()
    for part in ("rows", "uses", "waiting"):
        for name in NAMES:
            of_ranks = [getattr(held, part)[name] for held in ranks]
            keys = [key for of in of_ranks for key in of]
            assert len(keys) == len(set(keys)), f"two ranks hold the same key of {name}"
            getattr(whole, part)[name] = {key: of[key] for of in of_ranks for key in of}
    boundaries = sorted({(step, name) for held in ranks for step, name, _ in held.evicted})
    whole.evicted = [
        (step, name, sorted(k for held in ranks for s, n, of in held.evicted for k in of
                            if (s, n) == (step, name)))
        for step, name in boundaries
    ]  # fmt: skip
    whole.evicted = [(step, name, keys) for step, name, keys in whole.evicted if keys]
    return whole


# The plain model


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def _salted(seed: int, salt: int, key: int) -> int:
    start = _mixed(((seed ^ salt) + 0x9E3779B97F4A7C15) % 2**64)
    return _mixed((key % 2**64) ^ start)


@dataclass
class PlainLife:
    """One table: who has a row, by the rules of the docs."""

    table: Table
    seed: int
    limit: int
    rows: Uses = field(default_factory=dict)
    waiting: Uses = field(default_factory=dict)
    peak: int = 0

    def drawn(self, key: int) -> bool:
        bits = _salted(self.seed, 0xD1B54A32D192ED03, key) >> 11
        return bits / 2**53 < self.table.admit_probability

    def batch(self, keys: set[int], step: int) -> None:
        came = 0
        for key in keys:
            if key in self.rows:
                self.rows[key] = (step, self.rows[key][1] + 1)
            elif self.drawn(key) and self.table.admit_count == 1:
                self.rows[key] = (step, 1)
                came += 1
            elif self.drawn(key):
                self.waiting[key] = (step, self.waiting.get(key, (0, 0))[1] + 1)
        self.peak = max(self.peak, came)

    @property
    def grows(self) -> bool:
        return self.table.evict != "none" and self.table.admit_count == 1

    def tie(self, key: int) -> int:
        return _salted(self.seed, 0x8CB92BA72F3D8DD7, key)

    def boundary(self, step: int, to_next: int, squares: Mapping[int, float]) -> list[int]:
        """Returns who left; `squares` has the sums of squares of weights, for the norm."""
        table, old = self.table, set(self.rows)
        live = {k: u for k, u in self.rows.items() if not (table.ttl and u[0] <= step - table.ttl)}
        wait = {
            k: u for k, u in self.waiting.items() if not (table.ttl and u[0] <= step - table.ttl)
        }
        come = {k: u for k, u in wait.items() if u[1] >= table.admit_count}
        live |= come

        def order(key: int) -> tuple[float, ...]:
            last, count = live[key]
            if table.evict == "lru":
                return (last, count, self.tie(key))
            if table.evict == "norm":
                return (squares[key] if key in old else float("inf"), self.tie(key))
            return (count, last, self.tie(key))

        if self.limit and (table.evict != "none" or table.admit_count > 1):
            spare = min(2 * self.peak * to_next, self.limit // 4) if self.grows else 0
            over = max(0, len(live) - (self.limit - spare))
            may_go = live if table.evict != "none" else come
            for key in sorted(may_go, key=order)[:over]:
                del live[key]
        self.rows = live
        wait = {k: u for k, u in wait.items() if k not in live}
        over = max(0, len(wait) - table.admit_candidates)
        for key in sorted(wait, key=lambda k: (wait[k][0], self.tie(k)))[:over]:
            del wait[key]
        self.waiting = wait
        return sorted(old - set(live))

    def steps_to_go(self, to_next: int) -> int:
        if not self.grows:
            return to_next
        room = (self.limit - len(self.rows)) // (2 * self.peak) if self.peak else 1
        return max(1, min(to_next, room))


class PlainLives:
    """All tables, batch after batch."""

    def __init__(self, of: list[Table], seeds: Mapping[str, int], limit: int, every: int) -> None:
        self.every = every
        self.tables = {table.name: PlainLife(table, seeds[table.name], limit) for table in of}
        self.evicted: list[tuple[int, str, list[int]]] = []
        self.boundaries: list[int] = []
        self.next = self._planned(0)

    def _planned(self, step: int) -> int:
        to_next = self.every - step % self.every
        return step + min(life.steps_to_go(to_next) for life in self.tables.values())

    def run(self, stream: Stream, squares_at: Mapping[int, Mapping[str, Mapping[int, float]]]):
        for step in range(1, stream.steps + 1):
            for name, lists in stream.keys(step).items():
                self.tables[name].batch({key for of in lists for key in of}, step)
            if step == self.next:
                self.boundaries.append(step)
                for name, life in self.tables.items():
                    squares = squares_at.get(step, {}).get(name, {})
                    gone = life.boundary(step, self.every - step % self.every, squares)
                    self.evicted += [(step, name, gone)] if gone else []
                self.next = self._planned(step)
        return self
