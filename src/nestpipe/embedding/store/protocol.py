"""What a store is: rows with their optimizer state, by table and key.

Every store reads and writes by key (`RowStore`). What it can do beyond that are abilities: say
where rows live (`RowLocator`), open that memory to GPUs (`RowPinner`), or keep rows on the device
itself (`DeviceRows`). `embedding/transports.py` asks for abilities, never for the kind of store.

A row's first value is a function of its table's seed and its key alone. Neither the order of
arrival, nor the number of ranks, nor a restart changes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.kernels.rows.native import RowPointers

# Shapes: K keys, D weights of a row, W width of a row as it travels: weights, then state,
# S slots of a device pool

MOST_KEYS = 2**32 - 1
"""Keys of one call."""
MOST_THREADS = 64
"""Of one store."""
MASK = 2**64 - 1
"""A table's seed is a 64-bit number."""
HASH_STEP = np.uint64(0x9E3779B97F4A7C15)
ROW_TYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""How a row's weights may be kept, as `Table.dtype` names it."""
LARGEST_FLOAT16, FLOAT16_INF = 65504.0, 65520.0
"""The largest number of float16, and the least that is rounded to inf."""


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
    """One of `ROW_TYPES`: how weights are kept in host memory."""
    max_rows: tuple[int, ...] = ()
    """One per table: rows that this store holds at most; 0 or left out: no limit."""
    names: tuple[str, ...] = ()
    """One per table, for errors; left out: their numbers."""

    @property
    def width(self) -> int:
        return self.dim + self.state_dim

    @property
    def num_tables(self) -> int:
        return len(self.table_seeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdOptions:
    """Rows beyond host memory: where, and how much of them stays in memory."""

    folder: Path
    """On a local SSD; the file there has no name and goes with its process."""
    cache_bytes: int
    """Memory for rows, 24 bytes beside each included; the index of all keys comes on top."""
    depth: int = 32
    """Reads and writes at the same time."""
    segment_bytes: int = 1 << 18
    """What is written at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdTraffic:
    """What a store has read and written so far, and how large it is."""

    rows_hit: int
    """Asked for and in memory."""
    rows_read: int
    """Asked for and only in the file."""
    bytes_read: int
    rows_written: int
    bytes_written: int
    """What the disk was given to write: its endurance is counted in these."""
    rows_moved: int
    """Of those written: only to make room in the file."""
    file_bytes: int
    cached_rows: int
    cache_rows: int
    """Rows that memory may hold."""


class FileRows(Protocol):
    """Ability: rows beyond memory live in a file, and what that costs is counted."""

    @property
    def direct(self) -> bool:
        """Whether reads and writes go past the system's own cache of files."""
        ...

    def traffic(self) -> SsdTraffic:
        """What was read and written so far."""
        ...

    def disk_seconds(self, block: int, count: int, *, write: bool) -> float:
        """How long the disk itself takes for random blocks of a file as large."""
        ...


class RowLocator(Protocol):
    """Ability: rows are float32 numbers at fixed addresses in host memory."""

    @property
    def threads(self) -> int:
        """Threads that copy rows between their addresses and a buffer."""
        ...

    def locate(self, keys_K: Tensor, counts: Sequence[int]) -> RowPointers:
        """Where the rows live; rows of new keys are inserted first.

        Rows never move. While they are used there, nobody may gather or scatter them.
        """
        ...

    def locate_each(self, keys_n: Tensor, tables_n: Tensor, addresses_n: Tensor) -> None:
        """Write where the rows of keys in any order live; `tables_n`: int32, the table of each."""
        ...


class RowPinner(Protocol):
    """Ability: GPUs may read and write located rows by themselves."""

    def pin(self) -> bool:
        """Open the memory of all present rows to GPUs; False: the system refuses.

        Call it again after rows were inserted.
        """
        ...


class DeviceRows(Protocol):
    """Ability: rows live in device memory, in the slots of one tensor."""

    @property
    def rows_SW(self) -> Tensor:  # noqa: N802 - its shape
        """All slots, weights and state side by side."""
        ...

    def slots(self, keys_K: Tensor, counts: Sequence[int]) -> Tensor:
        """(K,) the slot of each key, on the device; new keys get a slot with their first value.

        A slot belongs to its key until the caller has written it back.
        """
        ...


class WriteNotes(Protocol):
    """Ability: the store notes which rows are written, for the next checkpoint."""

    @property
    def tracking(self) -> bool:
        """Whether anybody asked for that."""
        ...

    def note(self, keys_K: Tensor, counts: Sequence[int]) -> None:
        """Rows are written where they live, unseen by `scatter` and `locate`."""
        ...

    def unnoted(self) -> AbstractContextManager[None]:
        """Inside, what the calling thread writes or locates is not noted."""
        ...


class StoredKeys(Protocol):
    """Ability: the store says which keys have a row, and reads none."""

    def stored(self, keys_K: Tensor, counts: Sequence[int]) -> Tensor:
        """(K,) whether each key has a row."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAbilities:
    """What a store can do beyond reading and writing by key; None: it cannot."""

    locate: RowLocator | None = None
    pin: RowPinner | None = None
    """Only together with `locate`."""
    device: DeviceRows | None = None
    keys: StoredKeys | None = None
    notes: WriteNotes | None = None
    file: FileRows | None = None


class RowStore(Protocol):
    """Rows by key. Keys come grouped by table: `counts[i]` keys of table i, in order.

    All tensors are contiguous CPU tensors; rows travel as float32 of `layout.width`.
    """

    layout: StoreLayout

    @property
    def abilities(self) -> StoreAbilities:
        """What else the store can do; the same answer for as long as it is open."""
        ...

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

    def erase(self, keys_K: Tensor, counts: Sequence[int]) -> int:
        """Remove rows, and return how many there were; keys must not repeat.

        A key that has no row is left alone. One that was erased reads as its first value, and can
        be stored again. The room of erased rows is used again; no other row moves. Rows that are
        in use where they were located must not be erased.
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


class ReadOnlyRows:
    """The rows of another store, for tables that are not trained: what is written is dropped."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self.layout = store.layout

    @property
    def abilities(self) -> StoreAbilities:
        """None: rows that are located are inserted, and may be written where they live."""
        return StoreAbilities()

    def gather(self, keys_K: Tensor, counts: Sequence[int], out_KW: Tensor) -> int:
        return self._store.gather(keys_K, counts, out_KW)

    def scatter(self, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
        """Rows come back as they were read."""

    def erase(self, keys_K: Tensor, counts: Sequence[int]) -> int:
        """Rows stay."""
        return 0

    def num_rows(self) -> list[int]:
        return self._store.num_rows()

    def num_bytes(self) -> int:
        return self._store.num_bytes()

    def export(self, chunk: int = 65536) -> Iterator[tuple[int, Tensor, Tensor]]:
        return self._store.export(chunk)

    def close(self) -> None:
        """It is not this one's to close."""


def default_threads() -> int:
    """The cores that this process may use, shared fairly with its peers on the machine."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        cores = os.cpu_count() or 1
    peers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_THREADS, cores // max(1, peers)))


# First values in numpy, bit for bit those of `kernels/native/store/first_values.h`.


def first_weights(
    seed: int, keys_K: NDArray[np.int64], dim: int, spread: float
) -> NDArray[np.float32]:
    """Weights that rows of these keys begin with: normal, of standard deviation `spread`."""
    salt = mix(np.array([seed & MASK], np.uint64) + HASH_STEP)
    start_K = mix(salt ^ keys_K.view(np.uint64))
    steps_D = np.arange(1, dim + 1, dtype=np.uint64) * HASH_STEP
    bits_KD = mix(start_K[:, None] + steps_D)
    return (_normal(bits_KD) * spread).astype(np.float32)


def weight_bytes(dim: int, dtype: str) -> int:
    """Of a row: state, which follows, begins at a multiple of four bytes."""
    return -(-dim * ROW_TYPES[dtype].itemsize // 4) * 4


# How weights are rounded that are not kept as float32: to the nearest number, ties to even. Native
# code does it in `kernels/native/rows/row_format.h`, and devices by torch's own casts.


def rounded(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Weights as a row of that type has them, as float32."""
    match dtype:
        case "bfloat16":
            return round_to_bfloat16(values)
        case "float16":
            return round_to_float16(values)
        case _:
            return values


def round_weights(weights_KD: Tensor, dtype: str) -> Tensor | None:
    """The same in place, on any device, for rows that were updated.

    A weight that float16 would make inf becomes the largest that it has. Returns whether there was
    one, on the device; None: the type has the range of float32.
    """
    kind = ROW_TYPES[dtype]
    if kind == torch.float32:
        return None
    if kind != torch.float16:
        weights_KD.copy_(weights_KD.to(kind))
        return None
    beyond = (weights_KD.abs() >= FLOAT16_INF).any()
    weights_KD.copy_(weights_KD.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16).to(kind))
    return beyond


def round_to_float16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest float16 numbers, ties to even, as float32; from 65,520 on inf.

    A nan stays one, with its upper bits: numpy's own depend on the processor.
    """
    nan = np.isnan(values)
    with np.errstate(over="ignore"):
        near = np.where(nan, np.float32(0), values).astype(np.float16).astype(np.float32)
    quiet = values.view(np.uint32) & np.uint32(0xFFFFE000) | np.uint32(0x400000)
    return np.where(nan, quiet.view(np.float32), near)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest bfloat16 numbers, ties to even, as float32; nan stays nan."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = (bits & np.uint32(0x7FFFFFFF)) > 0x7F800000
    kept = np.where(nan, bits | np.uint32(0x400000), rounded) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normal(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Four 16-bit numbers added up, bent into a normal variate by an odd polynomial."""
    parts = [(bits >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
    total = sum(parts[1:], start=parts[0]).astype(np.int64)
    x = (total - 131070).astype(np.float64) * (1.0 / 65536.0)
    s = x * x
    p = 0.005411906108740816 * s + -0.017329680146971713
    p = p * s + 0.02863321968706253
    p = p * s + 0.04776074440493899
    p = p * s + 1.6668930519836869
    return p * x


# Checks that all stores share: a wrong argument is a defect of the caller, hence ValueError.


def check_layout(layout: StoreLayout) -> None:
    """Refuse a layout that contradicts itself."""
    tables = layout.num_tables
    limits = layout.max_rows
    if len(layout.init_stds) != tables or len(limits) not in (0, tables):
        raise ValueError(f"{tables} seeds, {len(layout.init_stds)} stds, {len(limits)} limits")
    if layout.dim < 1 or layout.state_dim < 0 or any(limit < 0 for limit in limits):
        raise ValueError(f"a store cannot have the layout {layout}")
    if layout.dtype not in ROW_TYPES:
        raise ValueError(f"dtype is {layout.dtype!r}; use one of {', '.join(ROW_TYPES)}")


def check_rows(layout: StoreLayout, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
    """Refuse keys, counts and rows that do not belong together."""
    check_keys(layout, keys_K, counts)
    check_tensor("rows", rows_KW, torch.float32, (keys_K.numel(), layout.width))


def check_keys(layout: StoreLayout, keys_K: Tensor, counts: Sequence[int]) -> None:
    """Refuse keys and counts that do not belong together."""
    check_tensor("keys", keys_K, torch.int64, (keys_K.numel(),))
    if len(counts) != layout.num_tables or any(count < 0 for count in counts):
        raise ValueError(f"counts are {list(counts)}; give one, 0 or more, for each table")
    if sum(counts) != keys_K.numel():
        raise ValueError(f"counts add up to {sum(counts)}, but there are {keys_K.numel()} keys")
    if keys_K.numel() > MOST_KEYS:
        raise ValueError(f"{keys_K.numel()} keys at once; pass at most {MOST_KEYS}")


def repeated(table: int, key: int) -> ValueError:
    """The error for a key that came twice."""
    return ValueError(
        f"key {key} of table {table} comes twice; keys that are stored or erased must not repeat"
    )


def too_many_rows(layout: StoreLayout, table: int, asked: int, limit: int) -> str:
    """The sentence for a table that would outgrow its limit."""
    name = repr(layout.names[table]) if layout.names else table
    return (
        f"table {name} would have {asked:,} rows here and may have {limit:,}; "
        "raise its max_rows or max_bytes, set evict, or make batches smaller"
    )


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse what native code cannot read."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and on the CPU, not on {tensor.device}")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ValueError(f"{name} must be {dtype} of shape {shape}, not {given}")
