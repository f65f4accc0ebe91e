"""What a user says about an embedding table, and about the life of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nestpipe.config.values import fit_leaf, fraction, not_negative, positive
from nestpipe.errors import ConfigError

Pooling = Literal["none", "sum", "mean"]
RowDtype = Literal["float32", "bfloat16"]
Placement = Literal["rows", "table"]
Eviction = Literal["none", "lru", "lfu", "norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPolicy:
    """Which keys of a table get a row, and which rows leave again.

    Decisions fall at the boundaries of `run.lifecycle_every`. They follow from the batches trained
    so far alone: no plan, number of ranks or restart changes them.
    """

    max_rows: int = 0
    """Rows of the table over all workers at most; 0: as many as memory holds."""
    max_bytes: int = 0
    """The same in bytes: weights, optimizer state and 128 bytes of index a row; 0: no limit."""
    evict: Eviction = "none"
    """Who leaves a table at its capacity: the rows used longest ago (`lru`), in the fewest batches
    (`lfu`), or with the smallest weights (`norm`); `none`: nobody, and a full table is an error."""
    ttl: int = 0
    """Time to live: rows that no batch used for so many steps leave; 0: they stay."""
    admit_count: int = 1
    """A key gets a row once so many batches have used it; until then it reads as its first value
    and its gradients are dropped. 1: at first use."""
    admit_probability: float = 1.0
    """The share of keys that ever get a row, drawn by the seed and the key."""
    admit_candidates: int = 1_048_576
    """Keys below `admit_count` whose counts are kept after a boundary, those used last."""

    def __post_init__(self) -> None:
        fit_leaf(Eviction, self.evict, "evict")
        for name in ("max_rows", "max_bytes", "ttl"):
            not_negative(name, getattr(self, name))
        for name in ("admit_count", "admit_candidates"):
            positive(name, getattr(self, name))
        fraction("admit_probability", self.admit_probability)
        if self.evict != "none" and not (self.max_rows or self.max_bytes):
            raise ConfigError(
                f"evict is {self.evict!r} but there is no capacity; set max_rows or max_bytes"
            )

    @property
    def evicts(self) -> bool:
        """Whether rows ever leave."""
        return self.evict != "none" or self.ttl > 0

    @property
    def selects(self) -> bool:
        """Whether some keys get no row, or get it later."""
        return self.admit_count > 1 or self.admit_probability < 1

    @property
    def keeps_to_limit(self) -> bool:
        """Whether a full table is no error: rows leave, or wait until they fit."""
        return self.evict != "none" or self.admit_count > 1

    @property
    def has_lifecycle(self) -> bool:
        return self.evicts or self.selects


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(RowPolicy):
    """A table of rows that appear on first use; its keys are any 64-bit integers."""

    name: str
    """How rows and checkpoints refer to it."""
    dim: int
    """Width of a row."""
    features: tuple[str, ...] = ()
    """Features of `sparse_keys` that look rows up here; by default the one of the same name."""
    pooling: Pooling = "none"
    """`none`: a row per key; `sum`, `mean`: per sample the sum or the mean of its rows."""
    init_std: float = 0.01
    """Spread of a new row's values, drawn from a normal distribution."""
    dtype: RowDtype = "float32"
    """How weights are stored; sums, gradients and optimizer state are float32."""
    placement: Placement = "rows"
    """`rows`: every row has a worker of its own, so a table may be larger than any of them;
    `table`: one worker keeps all rows, which is less traffic for pooled features of small tables.
    """
    lr: float = 0.0
    """Learning rate of its rows; 0: that of all rows."""
    trainable: bool = True
    """Off: rows are read, and never updated or inserted."""

    def __post_init__(self) -> None:
        # `super()` does not know a class with slots.
        RowPolicy.__post_init__(self)
        if not self.name.isidentifier():
            raise ConfigError(f"a table cannot be called {self.name!r}; use letters, digits and _")
        for name, words in (("pooling", Pooling), ("dtype", RowDtype), ("placement", Placement)):
            fit_leaf(words, getattr(self, name), f"{name} of table {self.name!r}")
        positive("dim", self.dim)
        not_negative("init_std", self.init_std)
        not_negative("lr", self.lr)
        if self.has_lifecycle and not self.trainable:
            raise ConfigError(
                f"table {self.name!r} is frozen and has a row policy, but its rows neither come "
                "nor go; leave it out of lifecycle.tables, or train it"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (self.name,)
