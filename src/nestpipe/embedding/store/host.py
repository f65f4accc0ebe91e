"""The host store in native code, and its twin in plain Python: slow, readable, the same bits.

Native rows lie in large chunks, read and written by several threads. They never move while they
are there, so float32 rows can be located and pinned where they are.
"""

from __future__ import annotations

import ctypes
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.embedding.store.protocol import (
    MASK,
    MOST_THREADS,
    StoreAbilities,
    StoreLayout,
    check_keys,
    check_layout,
    check_rows,
    check_tensor,
    default_threads,
    first_weights,
    repeated,
    rounded,
    too_many_rows,
)
from nestpipe.errors import CapacityError
from nestpipe.kernels.host_memory import PinnedMemory
from nestpipe.kernels.library import RowType, Status, StoreReport, StoreShape, library
from nestpipe.kernels.rows.native import RowPointers

# Shapes: K keys, D weights of a row, W width of a row as it travels

CHUNKS_AT_ONCE = 256


class NativeRows(ABC):
    """How rows get into native code and leave it: the same for rows in memory and in a file."""

    layout: StoreLayout
    _scatter: Callable[..., int]
    _erase: Callable[..., int]

    @property
    @abstractmethod
    def _open(self) -> int:
        """The address of the store."""

    @abstractmethod
    def _raise(self, status: int, report: StoreReport, keys_K: Tensor) -> None:
        """Say what went wrong, if anything did."""

    def scatter(self, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
        check_rows(self.layout, keys_K, counts, rows_KW)
        report = StoreReport()
        status = self._scatter(
            self._open, keys_K.data_ptr(), int64s(counts), rows_KW.data_ptr(), report
        )
        self._raise(status, report, keys_K)

    def erase(self, keys_K: Tensor, counts: Sequence[int]) -> int:
        check_keys(self.layout, keys_K, counts)
        report, erased = StoreReport(), ctypes.c_int64()
        status = self._erase(self._open, keys_K.data_ptr(), int64s(counts), erased, report)
        self._raise(status, report, keys_K)
        return erased.value

    @property
    def _index(self) -> int:
        """The native store of the keys: its rows may be places of rows elsewhere."""
        return self._open

    def stored(self, keys_K: Tensor, counts: Sequence[int]) -> Tensor:
        check_keys(self.layout, keys_K, counts)
        return self._found(keys_K, counts)[0] != 0

    def _found(self, keys_K: Tensor, counts: Sequence[int]) -> tuple[Tensor, int]:
        """Where the index has each key, 0 where it has none, and how many those are."""
        addresses_K, num_new = torch.empty_like(keys_K), ctypes.c_int64()
        status = library().nestpipe_store_locate(
            self._index, keys_K.data_ptr(), int64s(counts), addresses_K.data_ptr(), num_new
        )
        self._raise(status, StoreReport(), keys_K)
        return addresses_K, num_new.value


class NativeStore(NativeRows):
    """Calls may come from several Python threads at once; a row is read whole or not at all.

    One `scatter` or `erase` runs at a time. `close` must be the last call of all.
    """

    def __init__(self, layout: StoreLayout, *, threads: int | None = None) -> None:
        self._address: int | None = None
        check_layout(layout)
        self.layout = layout
        self.threads = default_threads() if threads is None else threads
        if not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(f"threads is {threads}; give 1 to {MOST_THREADS}")
        self._library = library()
        self._scatter, self._erase = (
            self._library.nestpipe_store_scatter,
            self._library.nestpipe_store_erase,
        )
        self._process = os.getpid()
        self._pinned = [PinnedMemory() for _ in range(layout.num_tables)]
        shape = native_shape(layout)
        self._address = self._library.nestpipe_store_open(ctypes.byref(shape), self.threads)
        if self._address is None:
            raise CapacityError(
                f"cannot open a store of {layout.num_tables} tables with {self.threads} threads; "
                "free memory, or allow more threads (ulimit -u)"
            )

    @property
    def abilities(self) -> StoreAbilities:
        """Rows can be located and pinned where weights are kept as float32."""
        if self.layout.dtype != "float32":
            return StoreAbilities(keys=self)
        return StoreAbilities(locate=self, pin=self, keys=self)

    def gather(self, keys_K: Tensor, counts: Sequence[int], out_KW: Tensor) -> int:
        check_rows(self.layout, keys_K, counts, out_KW)
        num_new = ctypes.c_int64()
        status = self._library.nestpipe_store_gather(
            self._open, keys_K.data_ptr(), int64s(counts), out_KW.data_ptr(), num_new
        )
        self._raise(status, StoreReport(), keys_K)
        return num_new.value

    def locate(self, keys_K: Tensor, counts: Sequence[int]) -> RowPointers:
        """Where the rows live, float32 ones only; rows of new keys are made.

        Rows never move. While they are used there, nobody may gather or scatter them.
        """
        assert self.layout.dtype == "float32", "rows in place are float32"
        check_keys(self.layout, keys_K, counts)
        addresses_K, num_new = self._found(keys_K, counts)
        if not num_new:
            return RowPointers(addresses_K, self.layout.width)
        new_K = addresses_K == 0
        new_counts = [int(part.sum()) for part in torch.split(new_K, list(counts))]
        rows_KW = torch.empty(sum(new_counts), self.layout.width)
        self.gather(keys_K[new_K], new_counts, rows_KW)
        self.scatter(keys_K[new_K], new_counts, rows_KW)
        return RowPointers(self._found(keys_K, counts)[0], self.layout.width)

    def locate_each(self, keys_n: Tensor, tables_n: Tensor, addresses_n: Tensor) -> None:
        """The same for keys in any order, each with its table (int32), into a tensor that is given.

        Nobody need sort them by table, unless rows are to be made.
        """
        assert self.layout.dtype == "float32", "rows in place are float32"
        count, num_new = len(keys_n), ctypes.c_int64()
        check_tensor("keys", keys_n, torch.int64, (count,))
        check_tensor("tables", tables_n, torch.int32, (count,))
        check_tensor("addresses", addresses_n, torch.int64, (count,))
        status = self._library.nestpipe_store_locate_each(
            *(self._open, keys_n.data_ptr(), tables_n.data_ptr(), count),
            *(addresses_n.data_ptr(), num_new),
        )
        self._raise(status, StoreReport(), keys_n)
        if num_new.value:
            new_n = (addresses_n == 0).nonzero().squeeze(1)
            tables, order = torch.sort(tables_n[new_n], stable=True)
            new_n = new_n[order]
            counts = torch.bincount(tables, minlength=self.layout.num_tables).tolist()
            addresses_n[new_n] = self.locate(keys_n[new_n], counts).addresses_K

    def pin(self) -> bool:
        """Let GPUs read and write all rows that there are now; False: the system refuses.

        To be called again when rows have been added.
        """
        return all(
            pinned.extend(lambda first, table=table: self._chunks(table, first))
            for table, pinned in enumerate(self._pinned)
        )

    def _chunks(self, table: int, first: int) -> list[tuple[int, int]]:
        """Address and bytes of the memory of a table's rows, from piece `first` on."""
        found: list[tuple[int, int]] = []
        memory, sizes = (np.empty(CHUNKS_AT_ONCE, np.int64) for _ in range(2))
        while True:
            start = first + len(found)
            count = self._library.nestpipe_store_chunks(
                *(self._open, table, start, memory.ctypes.data, sizes.ctypes.data, CHUNKS_AT_ONCE)
            )
            new = min(count - start, CHUNKS_AT_ONCE)
            found += zip(memory[:new].tolist(), sizes[:new].tolist(), strict=True)
            if first + len(found) == count:
                return found

    def num_rows(self) -> list[int]:
        count = self._library.nestpipe_store_num_rows
        return [count(self._open, table) for table in range(self.layout.num_tables)]

    def num_bytes(self) -> int:
        return self._library.nestpipe_store_num_bytes(self._open)

    def export(self, chunk: int = 65536) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every row in order of table and key, with 8 bytes of memory per row of one table.

        Keys are those at the start of a table's turn, rows those at the time of their chunk.
        """
        return exported(self.layout, self._open, self.gather, chunk)

    def close(self) -> None:
        # A forked child has the memory but not the threads that `close` waits for.
        if self._address is not None and os.getpid() == self._process:
            for pinned in self._pinned:
                pinned.close()
            self._library.nestpipe_store_close(self._address)
        self._address = None

    def __del__(self) -> None:
        self.close()

    @property
    def _open(self) -> int:
        if self._address is None:
            raise ValueError("the store is closed")
        return self._address

    def _raise(self, status: int, report: StoreReport, keys_K: Tensor) -> None:
        match status:
            case Status.OK:
                return
            case Status.TOO_MANY_ROWS:
                raise CapacityError(
                    too_many_rows(self.layout, report.table, report.asked, report.limit)
                )
            case Status.NO_MEMORY:
                raise CapacityError(
                    f"host memory is full: {keys_K.numel():,} rows of {self.layout.width} numbers "
                    f"do not fit beside the {self.num_bytes() / 2**30:.1f} GiB in use here; "
                    "free memory, set max_rows, or spread tables over more machines"
                )
            case Status.REPEATED_KEY:
                raise repeated(report.table, report.key)
            case _:
                raise AssertionError(f"the native store answered {status}")


def exported(
    layout: StoreLayout,
    address: int,
    gather: Callable[[Tensor, Sequence[int], Tensor], int],
    chunk: int,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every row of the keys in the native store at an address, as `gather` reads it."""
    for table in range(layout.num_tables):
        keys = torch.from_numpy(_sorted_keys(address, table))
        counts = [0] * layout.num_tables
        for keys_K in keys.split(chunk) if len(keys) else ():
            counts[table] = len(keys_K)
            rows_KW = torch.empty(len(keys_K), layout.width)
            gather(keys_K, counts, rows_KW)
            yield table, keys_K, rows_KW


def _sorted_keys(address: int, table: int) -> np.ndarray:
    room = library().nestpipe_store_num_rows(address, table)
    keys = np.empty(room, np.int64)
    found = library().nestpipe_store_keys(address, table, keys.ctypes.data, room)
    keys = keys[:found]  # a scatter in between is not seen, an erase is
    keys.sort()
    return keys


def native_shape(layout: StoreLayout) -> StoreShape:
    """What native code must know of a layout."""
    tables = layout.num_tables
    return StoreShape(
        num_tables=tables,
        dim=layout.dim,
        state_dim=layout.state_dim,
        row_type=RowType[layout.dtype.upper()],
        state_init=layout.state_init,
        seeds=(ctypes.c_uint64 * tables)(*(seed & MASK for seed in layout.table_seeds)),
        stds=(ctypes.c_double * tables)(*layout.init_stds),
        max_rows=int64s(layout.max_rows or [0] * tables),
    )


def int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Numbers as native code reads them."""
    return (ctypes.c_int64 * len(values))(*values)


Row = NDArray[np.float32]


class PlainStore:
    """A dictionary from key to row for each table."""

    def __init__(self, layout: StoreLayout) -> None:
        check_layout(layout)
        self.layout = layout
        self._tables: list[dict[int, Row]] = [{} for _ in layout.table_seeds]

    @property
    def abilities(self) -> StoreAbilities:
        """Rows are read and written by key alone."""
        return StoreAbilities(keys=self)

    def stored(self, keys_K: Tensor, counts: Sequence[int]) -> Tensor:
        check_keys(self.layout, keys_K, counts)
        of_tables = self._by_table(keys_K, counts)
        stored = [key in self._tables[t] for t, _, keys in of_tables for key in keys.tolist()]
        return torch.tensor(stored, dtype=torch.bool)

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
        weights_KD = np.ascontiguousarray(rows[:, : self.layout.dim])
        rows[:, : self.layout.dim] = rounded(weights_KD, self.layout.dtype)
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
        weights_KD = rounded(first_weights(seed, keys_K, layout.dim, spread), layout.dtype)
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
            raise CapacityError(too_many_rows(self.layout, table, len(stored) + new, limit))
