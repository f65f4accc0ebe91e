"""A world so small that a hundred jobs take seconds, with every kind of feature in it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm import Communicator
from nestpipe.config import Table, build
from nestpipe.data.source import concat
from nestpipe.embedding.pool import RowPool, SlotList
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.runtime import Work
from nestpipe.train.config import PipelineSettings, TrainSettings
from nestpipe.train.trainer import Trainer

BATCH, STEPS = 16, 5
DIM, USER_DIM, FEATURES = 4, 2, 3


def tables(dtype: str) -> list[Table]:
    """Two stores: one of width 4 with two tables, one of width 2."""
    given = (
        {"name": "items", "dim": DIM, "features": ("history", "candidate")},
        {"name": "tags", "dim": DIM, "pooling": "sum"},
        {"name": "users", "dim": USER_DIM},
    )
    return [build(Table, {**table, "init_std": 0.3, "dtype": dtype}) for table in given]


class Model(nn.Module):
    """Sequences, pooled lists, single keys, dense features, and a counter of samples."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.top = nn.Sequential(
            nn.Linear(3 * DIM + USER_DIM + FEATURES, 6), nn.Tanh(), nn.Linear(6, 1)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        self.seen += batch.size
        sample = torch.repeat_interleave(batch.sparse["history"].lengths)
        history = rows["history"].new_zeros(batch.size, DIM).index_add(0, sample, rows["history"])
        parts = [history, rows["candidate"], rows["tags"], rows["users"], batch.dense["features"]]
        logits = self.top(torch.cat(parts, 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits
        return Loss(losses(logits, batch.dense["label"], reduction="sum"), batch.size)


def _one_batch(b: int, first: int, vocabulary: int, lists_seed: int | None = None) -> Batch:
    """Batch b, keys from `first` to before `first + vocabulary`; the last batch is shorter."""
    size = BATCH if b < STEPS - 1 else BATCH // 3
    lists_rng = torch.Generator().manual_seed(b if lists_seed is None else lists_seed)
    values_rng = torch.Generator().manual_seed(b)

    def keys(count: int) -> Tensor:
        return torch.randint(first, first + vocabulary, (count,), generator=lists_rng) * 7919 - 50

    def lists(most: int) -> Jagged:
        lengths = torch.randint(0, most + 1, (size,), generator=lists_rng)
        return Jagged(keys(int(lengths.sum())), lengths)

    return Batch(
        size,
        {
            "label": torch.rand(size, generator=values_rng).round(),
            "features": torch.randn(size, FEATURES, generator=values_rng),
        },
        {
            "history": lists(4),
            "candidate": Jagged.one_each(keys(size)),
            "tags": lists(3),
            "users": Jagged.one_each(keys(size)),
        },
    )


KEYS: Mapping[str, Callable[[int], Batch]] = {
    "some shared": lambda b: _one_batch(b, 0, 40),
    "none shared": lambda b: _one_batch(b, 1000 * b, 40),
    "all shared": lambda b: _one_batch(b, 0, 40, lists_seed=0),
    "growing": lambda b: _one_batch(b, 0, 10 + 15 * b),
    "empty on some ranks": lambda b: _one_batch(b, 0, 40),
    "each rank its own": lambda b: _one_batch(b, 0, 40),
    "coming back": lambda b: _one_batch(b, 15 * (b % 3), 25),
}
"""How the keys of neighbouring batches meet: batch b of each kind of data."""


def _own_keys(batch: Batch, rank: int) -> Batch:
    """The same with keys of which most are this rank's alone."""
    sparse = {
        name: Jagged(
            torch.where(keys.values % 3 == 0, keys.values, keys.values + 10**7 * (rank + 1)),
            keys.lengths,
        )
        for name, keys in batch.sparse.items()
    }
    return Batch(batch.size, batch.dense, sparse)


@dataclass(frozen=True)
class Samples:
    """A source of `STEPS` global batches."""

    keys: str

    @property
    def num_samples(self) -> int:
        return sum(KEYS[self.keys](b).size for b in range(STEPS))

    def empty(self) -> Batch:
        return KEYS[self.keys](0).empty()

    def batches(
        self, *, global_batch: int, rank: int, ranks: int, seed: int, epoch: int, start: int
    ) -> Iterator[Batch]:
        """A rank ends after its last batch with samples: the others go on without it."""
        mine = [self._part(b, rank, ranks) for b in range(start, STEPS)]
        while mine and mine[-1].size == 0:
            mine.pop()
        return iter(mine)

    def _part(self, b: int, rank: int, ranks: int) -> Batch:
        batch, members = KEYS[self.keys](b), list(range(ranks))
        if self.keys == "empty on some ranks":
            late = b >= STEPS - 2 or ranks == 1
            members = [0] if late else [r for r in members if (b + r) % 2 == 0]
        if rank not in members:
            return batch.empty()
        place, parts = members.index(rank), len(members)
        part = batch.slice(batch.size * place // parts, batch.size * (place + 1) // parts)
        return _own_keys(part, rank) if self.keys == "each rank its own" else part

    def num_rows(self, *, frozen: Sequence[str] = ()) -> int:
        """Different rows that training updates, counted the plain way."""
        every = concat([KEYS[self.keys](b) for b in range(STEPS)]).sparse
        items = {*every["history"].values.tolist(), *every["candidate"].values.tolist()}
        trained = [name for name in ("tags", "users") if name not in frozen]
        others = [set(every[name].values.tolist()) for name in trained]
        return len(items) + sum(map(len, others))


RECIPES: Mapping[str, Mapping[str, dict[str, object]]] = {
    "plain": {},
    "scheduled": {
        "rows": {"schedule": "cosine", "decay_steps": 4, "warmup_steps": 2, "final": 0.1},
        "dense": {"schedule": "step", "decay_steps": 2, "decay": 0.5, "warmup_steps": 1},
    },
    "decaying": {
        "rows": {"weight_decay": 0.5},
        "dense": {"weight_decay": 0.1, "no_decay": ["*.bias"]},
    },
    "by name": {
        "rows": {"rates": ["ta*=0.2", "users=0.01"]},
        "dense": {"rates": ["top.2.*=0.1"], "schedule": "cosine", "decay_steps": 5},
    },
    "frozen": {"rows": {"frozen": ["users", "tags"]}},
    "clipped": {"": {"clip_norm": 0.05}, "rows": {"frozen": ["users"]}},
    "clipped dense": {"": {"clip_norm": 0.02, "clip_rows": False}},
}
"""What training can do besides its optimizers."""


def decay(optimizer: str) -> dict[str, float]:
    return {"weight_decay": 0.1} if optimizer == "adamw" else {}


@dataclass(frozen=True, kw_only=True)
class World:
    """One job: its data, its tables and its optimizers, but not its pipeline."""

    keys: str = "some shared"
    dtype: str = "float32"
    optimizer: str = "rowwise_adagrad"
    dense: str = "adam"
    dense_lr: float = 0.01
    in_place: bool = True
    parallel: Mapping[str, object] = field(default_factory=dict[str, object])
    recipe: str = "plain"
    """One of `RECIPES`: schedules, rates, decay."""
    store: Mapping[str, object] = field(default_factory=dict[str, object])
    """Where rows live: keys of `[run]`."""
    model: Model = field(default_factory=Model)
    """Made here, not in the threads of the ranks, which share one random state."""

    @property
    def source(self) -> Samples:
        return Samples(self.keys)

    def trainer(
        self,
        pipeline: PipelineSettings,
        comm: Communicator | None = None,
        around: Callable[[Work], Work] = lambda work: work,
    ) -> Trainer:
        given: dict[str, Any] = {
            "batch": BATCH,
            "device": "cpu",
            "seed": 3,
            "store_threads": 1,
            "in_place": self.in_place,
            "parallel": self.parallel,
            **self.store,
            "rows": {"optimizer": self.optimizer, "lr": 0.05, "eps": 1e-6, **decay(self.optimizer)},
            "dense": {"optimizer": self.dense, "lr": self.dense_lr, **decay(self.dense)},
        }
        for section, keys in RECIPES[self.recipe].items():
            if section:
                given[section] = given.get(section, {}) | keys
            else:
                given |= keys
        settings = replace(build(TrainSettings, given), pipeline=pipeline)
        return Trainer(deepcopy(self.model), tables(self.dtype), settings, comm, around=around)


@pytest.fixture(scope="session")
def make_world() -> type[World]:
    return World


@pytest.fixture
def hasty_pool(monkeypatch):
    """A pool that gives up every row that it may, in every batch; how many leave."""
    left: list[int] = []
    make_room, admit = RowPool._make_room, RowPool._admit

    def make_all_room(pool: RowPool, in_use_from: int, least_free: int) -> list[SlotList]:
        return make_room(pool, in_use_from, pool.num_slots)

    def count_leaving(pool: RowPool, batch: int, *keys: Any, sure: bool) -> Tensor:
        found = admit(pool, batch, *keys, sure=sure)
        left.extend(of.count for of in pool._admitted[batch].leaving)
        return found

    monkeypatch.setattr(RowPool, "_make_room", make_all_room)
    monkeypatch.setattr(RowPool, "_admit", count_leaving)
    monkeypatch.setattr(RowPool, "_surely_free", lambda pool, keys: False)
    return left
