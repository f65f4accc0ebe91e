"""What a host store does: rows with their optimizer state, by table and key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Shapes: K keys, W width of a stored row as it travels: weights, then state


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLayout:
    """What all tables of a store have in common."""

    table_seeds: tuple[int, ...]
    """One per table; a row's first value is a function of (seed, key) alone."""
    init_stds: tuple[float, ...]
    """One per table: spread of a new row's weights."""
    dim: int
    """Weights of a row."""
    state_dim: int
    """float32 numbers of optimizer state that travel with the row; they start at `state_init`."""
    state_init: float = 0.0
    dtype: str = "float32"
    """`float32` or `bfloat16`: how weights are kept in host memory."""
    max_rows: tuple[int, ...] = ()
    """One per table: rows that this store holds at most; 0 or left out: no limit."""

    @property
    def width(self) -> int:
        return self.dim + self.state_dim

    @property
    def num_tables(self) -> int:
        return len(self.table_seeds)


class RowStore(Protocol):
    """Rows in host memory. Keys come grouped by table: `counts[i]` keys of table i, in order.

    All tensors are contiguous CPU tensors; rows travel as float32 of `layout.width`.
    """

    layout: StoreLayout

    def gather(self, keys_K: Tensor, counts: Sequence[int], out_KW: Tensor) -> int:
        """Read rows; one that was never stored has its first value. Returns how many were new.

        Keys may repeat. Nothing is inserted.
        """
        ...

    def scatter(self, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
        """Store rows, inserting those that are new; keys must not repeat.

        Raises `CapacityError` and stores nothing at all where a table would outgrow its limit.
        """
        ...

    def num_rows(self) -> list[int]:
        """Rows of each table."""
        ...

    def num_bytes(self) -> int:
        """Memory in use, everything counted."""
        ...

    def export(self, chunk: int = 65536) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every row as (table, keys, rows), table by table, in ascending order of the key."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...
