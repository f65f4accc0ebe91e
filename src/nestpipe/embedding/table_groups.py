"""Groups of tables that share a store: same width, type of weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nestpipe.config import Table
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.store.protocol import ROW_TYPES, StoreLayout
from nestpipe.errors import ConfigError

ROW_INDEX_BYTES = 128
"""Of a row beside weights and state: its places in the index, and the metadata of a policy."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature: a list of keys per sample, and the table of its rows."""

    name: str
    table: int
    """Number of its table inside the store."""
    pooled: bool
    """Whether each sample gets the sum of its rows instead of all of them."""
    mean: bool = False
    """Whether that sum is then divided by the number of its keys."""


@dataclass(frozen=True, slots=True)
class TableGroup:
    """The tables of one store, and the features that look them up, in the order of the tables."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    table_owners: tuple[int, ...]
    """For each table the rank that owns all of it, modulo their number; -1: sharded by row."""
    owner_sums: bool = True
    """Whether owners may add up a sample's rows, where that is fewer bytes on the network."""

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    @property
    def dtype(self) -> str:
        """How weights are stored."""
        return self.tables[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether its rows are updated; else they are only read."""
        return self.tables[0].trainable

    def tuned(self, optimizer: RowOptimizer) -> RowOptimizer:
        """The optimizer of all rows, with the learning rate of these tables."""
        lr = self.tables[0].lr
        return replace(optimizer, lr=lr) if lr else optimizer

    def layout(self, optimizer: RowOptimizer, *, seed: int, ranks: int) -> StoreLayout:
        """How this group's rows are kept.

        A table's limit is shared out over the ranks; where its policy keeps to it, all ranks
        together do, and no rank alone may exceed it.
        """
        return StoreLayout(
            table_seeds=tuple(_table_seed(seed, table.name) for table in self.tables),
            init_stds=tuple(table.init_std for table in self.tables),
            dim=self.dim,
            state_dim=optimizer.state_dim(self.dim),
            state_init=optimizer.state_init,
            dtype=self.dtype,
            names=tuple(table.name for table in self.tables),
            max_rows=tuple(
                limit if owner >= 0 or table.keeps_to_limit else -(-limit // ranks)
                for table, owner, limit in zip(
                    self.tables, self.table_owners, self.max_rows(optimizer), strict=True
                )
            ),
        )

    def max_rows(self, optimizer: RowOptimizer) -> tuple[int, ...]:
        """For each table, its rows over all ranks at most; 0: no limit."""
        weights = self.dim * ROW_TYPES[self.dtype].itemsize
        row_bytes = weights + 4 * optimizer.state_dim(self.dim) + ROW_INDEX_BYTES
        for table in self.tables:
            if 0 < table.max_bytes < row_bytes:
                raise ConfigError(
                    f"max_bytes of table {table.name!r} is {table.max_bytes}, less than one row of "
                    f"{row_bytes} bytes; raise it"
                )
        limits = [[n for n in (t.max_rows, t.max_bytes // row_bytes) if n] for t in self.tables]
        return tuple(min(found, default=0) for found in limits)


def group_tables(tables: Sequence[Table], *, owner_sums: bool = True) -> list[TableGroup]:
    """One group per width, type, rate and whether it is trained, in order of first appearance."""
    _refuse_repeats(tables)
    members: dict[tuple[int, str, float, bool], list[Table]] = {}
    for table in tables:
        alike = (table.dim, table.dtype, table.lr, table.trainable)
        members.setdefault(alike, []).append(table)
    whole = [table.name for table in tables if table.placement == "table"]
    return [
        TableGroup(
            tuple(group),
            tuple(
                Feature(name, number, table.pooling != "none", table.pooling == "mean")
                for number, table in enumerate(group)
                for name in table.feature_names
            ),
            tuple(whole.index(t.name) if t.name in whole else -1 for t in group),
            owner_sums,
        )
        for group in members.values()
    ]


def mean_features(groups: Sequence[TableGroup]) -> list[str]:
    """Features whose pooled rows are means."""
    return [feature.name for group in groups for feature in group.features if feature.mean]


def check_features(groups: Sequence[TableGroup], keys: Mapping[str, object]) -> None:
    """Refuse keys that do not fit the tables, feature by feature."""
    known = {feature.name for group in groups for feature in group.features}
    if known != keys.keys():
        odd = sorted(known ^ set(keys))[0]
        where = "no table has it" if odd in keys else "the model gives no keys for it"
        raise ConfigError(f"feature {odd!r} does not match: {where}; mend the table's features")


def _refuse_repeats(tables: Sequence[Table]) -> None:
    if not tables:
        raise ConfigError(
            "there is no table; declare at least one, e.g. Table(name='items', dim=64)"
        )
    names: set[str] = set()
    features: dict[str, str] = {}
    for table in tables:
        if table.name in names:
            raise ConfigError(f"two tables are called {table.name!r}; rename one of them")
        names.add(table.name)
        for feature in table.feature_names:
            if feature in features:
                raise ConfigError(
                    f"feature {feature!r} belongs to table {features[feature]!r} and to "
                    f"{table.name!r}; let it have one table"
                )
            features[feature] = table.name


def _table_seed(seed: int, name: str) -> int:
    """A table's seed from the run's: by name, so that the order of tables does not matter."""
    value = (seed * 0x9E3779B97F4A7C15 + 0x1234_5678_9ABC_DEF1) % 2**64
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value % 2**63
