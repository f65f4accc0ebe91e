"""What a user says about an embedding table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nestpipe.config.values import fit_leaf, not_negative, positive
from nestpipe.errors import ConfigError

Pooling = Literal["none", "sum"]
RowDtype = Literal["float32", "bfloat16"]
Placement = Literal["rows", "table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of rows that appear on first use; its keys are any 64-bit integers."""

    name: str
    """How rows and checkpoints refer to it."""
    dim: int
    """Width of a row."""
    features: tuple[str, ...] = ()
    """Features of `sparse_keys` that look rows up here; by default the one of the same name."""
    pooling: Pooling = "none"
    """`none`: a row per key; `sum`: per sample the sum of its rows."""
    init_std: float = 0.01
    """Spread of a new row's values, drawn from a normal distribution."""
    dtype: RowDtype = "float32"
    """How weights are stored; sums, gradients and optimizer state are float32."""
    placement: Placement = "rows"
    """`rows`: every row has a worker of its own, so a table may be larger than any of them;
    `table`: one worker keeps all rows, which is less traffic for pooled features of small tables.
    """
    max_rows: int = 0
    """Rows of the table over all workers at most; 0: as many as memory holds."""
    lr: float = 0.0
    """Learning rate of its rows; 0: that of all rows."""
    trainable: bool = True
    """Off: rows are read, and never updated or inserted."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"a table cannot be called {self.name!r}; use letters, digits and _")
        for name, words in (("pooling", Pooling), ("dtype", RowDtype), ("placement", Placement)):
            fit_leaf(words, getattr(self, name), f"{name} of table {self.name!r}")
        positive("dim", self.dim)
        not_negative("init_std", self.init_std)
        not_negative("max_rows", self.max_rows)
        not_negative("lr", self.lr)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (self.name,)
