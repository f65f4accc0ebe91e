"""The host store in plain Python: slow, readable, and bit for bit the native one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.store.protocol import (
    StoreAbilities,
    StoreLayout,
    check_keys,
    check_layout,
    check_rows,
    first_weights,
    repeated,
    round_to_bfloat16,
    too_many_rows,
)
from nestpipe.errors import CapacityError

# Shapes: K keys, D weights of a row, W width of a row as it travels

Row = NDArray[np.float32]


class PlainStore:
    """A dictionary from key to row for each table."""

    def __init__(self, layout: StoreLayout) -> None:
        check_layout(layout)
        self.layout = layout
        self._tables: list[dict[int, Row]] = [{} for _ in layout.table_seeds]

    @property
    def abilities(self) -> StoreAbilities:
        """None: rows are read and written by key alone."""
        return StoreAbilities()

    def gather(self, keys_K: Tensor, counts: Sequence[int], out_KW: Tensor) -> int:
        check_rows(self.layout, keys_K, counts, out_KW)
        out = out_KW.numpy()
        num_new = 0
        for table, begin, keys in self._by_table(keys_K, counts):
            stored = self._tables[table]
            fresh = [i for i, key in enumerate(keys.tolist()) if key not in stored]
            for i, key in enumerate(keys.tolist()):
                if key in stored:
                    out[begin + i] = stored[key]
            if fresh:
                out[begin + np.array(fresh)] = self._first_rows(table, keys[fresh])
            num_new += len(fresh)
        return num_new

    def scatter(self, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
        check_rows(self.layout, keys_K, counts, rows_KW)
        for table, _, keys in self._by_table(keys_K, counts):
            self._check_repeats(table, keys)
        for table, _, keys in self._by_table(keys_K, counts):
            self._check_limit(table, keys)
        rows = rows_KW.numpy().copy()
        if self.layout.dtype == "bfloat16":
            dim = self.layout.dim
            rows[:, :dim] = round_to_bfloat16(np.ascontiguousarray(rows[:, :dim]))
        for table, begin, keys in self._by_table(keys_K, counts):
            for i, key in enumerate(keys.tolist()):
                self._tables[table][key] = rows[begin + i].copy()

    def erase(self, keys_K: Tensor, counts: Sequence[int]) -> int:
        check_keys(self.layout, keys_K, counts)
        for table, _, keys in self._by_table(keys_K, counts):
            self._check_repeats(table, keys)
        found = [
            self._tables[table].pop(key, None)
            for table, _, keys in self._by_table(keys_K, counts)
            for key in keys.tolist()
        ]
        return sum(row is not None for row in found)

    def num_rows(self) -> list[int]:
        return [len(table) for table in self._tables]

    def num_bytes(self) -> int:
        rows = sum(sys.getsizeof(row) for table in self._tables for row in table.values())
        return rows + sum(sys.getsizeof(table) for table in self._tables)

    def export(self, chunk: int = 65536) -> Iterator[tuple[int, Tensor, Tensor]]:
        for table, stored in enumerate(self._tables):
            keys = sorted(stored)
            for begin in range(0, len(keys), chunk):
                part = keys[begin : begin + chunk]
                rows = np.stack([stored[key] for key in part])
                yield table, torch.tensor(part, dtype=torch.int64), torch.from_numpy(rows)

    def close(self) -> None:
        self._tables = [{} for _ in self.layout.table_seeds]

    def _by_table(
        self, keys_K: Tensor, counts: Sequence[int]
    ) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        begin = 0
        for table, count in enumerate(counts):
            yield table, begin, keys_K[begin : begin + count].numpy()
            begin += count

    def _first_rows(self, table: int, keys_K: NDArray[np.int64]) -> Row:
        layout = self.layout
        seed, spread = layout.table_seeds[table], layout.init_stds[table]
        weights_KD = first_weights(seed, keys_K, layout.dim, spread)
        if layout.dtype == "bfloat16":
            weights_KD = round_to_bfloat16(weights_KD)
        state = np.full((len(keys_K), layout.state_dim), layout.state_init, np.float32)
        return np.concatenate([weights_KD, state], axis=1)

    def _check_repeats(self, table: int, keys_K: NDArray[np.int64]) -> None:
        values, times = np.unique(keys_K, return_counts=True)
        if len(values) < len(keys_K):
            raise repeated(table, int(values[times.argmax()]))

    def _check_limit(self, table: int, keys_K: NDArray[np.int64]) -> None:
        limit = self.layout.max_rows[table] if self.layout.max_rows else 0
        stored = self._tables[table]
        new = sum(key not in stored for key in keys_K.tolist())
        if limit and new and len(stored) + new > limit:
            raise CapacityError(too_many_rows(table, len(stored) + new, limit))
