"""How fast stores are: in memory beside `torch.index_select`, on an SSD beside the disk itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from nestpipe.config.load import fraction, positive
from nestpipe.embedding.store import RowStore, SsdOptions, open_store
from nestpipe.embedding.store.protocol import MOST_THREADS, SsdTraffic, StoreLayout
from nestpipe.errors import ConfigError

# Shapes: K keys of a batch, D width of a row

FILL = 65536
"""Rows stored at a time while the store is filled."""
SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""Odd, so that multiplying by it makes scattered, distinct keys of 0, 1, 2, ..."""
BATCHES = 16
"""Different batches of keys, drawn before the clock starts."""
PAUSE_S = 0.02
"""Between two timed calls: torch's threads spin for some 5 ms after a call, on cores that the next
call needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCase:
    """Sizes of the store benchmark."""

    gb: float = 4.0
    """Rows of the store in GB, without its index."""
    dim: int = 128
    threads: int = 1
    keys: int = 200_000
    """Keys of a batch."""
    seconds: float = 10.0
    """Time for the timed rounds."""

    def __post_init__(self) -> None:
        for name in ("dim", "gb", "threads", "keys", "seconds"):
            positive(name, getattr(self, name))
        if self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; give at most {MOST_THREADS}")
        machine_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        if 2.2 * self.gb > machine_gb:
            raise ConfigError(
                f"gb is {self.gb}, and this machine has {machine_gb:.1f} GB; "
                "give less than half of that: a tensor as large stands beside the store"
            )
        if self.rows < 2 * self.keys:
            raise ConfigError(
                f"{self.rows:,} rows are too few for batches of {self.keys:,} keys; "
                "raise gb or lower keys"
            )

    @property
    def rows(self) -> int:
        return int(self.gb * 1e9 / (self.dim * 4))

    @property
    def fills(self) -> int:
        return -(-self.rows // FILL)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReading:
    """Medians over interleaved rounds."""

    gather_rows_per_s: float
    gather_gb_per_s: float
    insert_rows_per_s: float
    scatter_gb_per_s: float
    index_select_gb_per_s: float
    ratio: float
    """Gather by key over `index_select` by position."""
    first_rows_per_s: float
    """Gather of keys that were never stored."""
    rounds: int
    rows: int
    gb: float
    threads: int
    bytes: int
    """Memory of the store, everything counted."""


def measure_store(case: StoreCase, progress: Callable[[], object]) -> StoreReading:
    """Fill a store and a tensor, then read and write both in turns."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    layout = StoreLayout(table_seeds=(1,), init_stds=(0.01,), dim=case.dim, state_dim=0)
    store = open_store(layout, native=True, threads=case.threads)
    try:
        insert_s = _fill(store, case, progress)
        plain = torch.full((case.rows, case.dim), 0.5)
        times = _rounds(store, plain, case)
        size = store.num_bytes()
    finally:
        store.close()
        torch.set_num_threads(threads_before)
    gather, scatter, select, first = (median(taken) for taken in times)
    batch_gb = case.keys * case.dim * 4 / 1e9
    return StoreReading(
        gather_rows_per_s=case.keys / gather,
        gather_gb_per_s=batch_gb / gather,
        insert_rows_per_s=case.rows / insert_s,
        scatter_gb_per_s=batch_gb / scatter,
        index_select_gb_per_s=batch_gb / select,
        ratio=select / gather,
        first_rows_per_s=case.keys / first,
        rounds=len(times[0]),
        rows=case.rows,
        gb=case.gb,
        threads=case.threads,
        bytes=size,
    )


# Rows on an SSD


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdCase:
    """Sizes of the benchmark of rows on an SSD."""

    path: Path
    gb: float = 4.0
    """Rows of the store in GB."""
    dim: int = 128
    cache: float = 0.1
    """Share of the rows that memory holds."""
    threads: int = 1
    depth: int = 32
    """Reads and writes at the same time, of the store and of the disk alone."""
    keys: int = 50_000
    """Keys of a batch."""
    rounds: int = 10

    def __post_init__(self) -> None:
        for name in ("dim", "gb", "threads", "depth", "keys", "rounds"):
            positive(name, getattr(self, name))
        fraction("cache", self.cache)
        for name in ("threads", "depth"):
            if getattr(self, name) > MOST_THREADS:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at most {MOST_THREADS}")
        if self.rows < 2 * self.keys:
            raise ConfigError(
                f"{self.rows:,} rows are too few for batches of {self.keys:,} keys; "
                "raise gb or lower keys"
            )

    @property
    def rows(self) -> int:
        return int(self.gb * 1e9 / (self.dim * 4))

    @property
    def steps(self) -> int:
        """Of a progress bar: fills, rounds, and the disk in each of them."""
        return -(-self.rows // FILL) + self.rounds

    @property
    def options(self) -> SsdOptions:
        cached = int(self.rows * self.cache)
        # A row in memory: its numbers, padded to 16 bytes, and 24 beside them.
        return SsdOptions(
            folder=self.path,
            cache_bytes=cached * (-(-self.dim // 4) * 16 + 24),
            depth=self.depth,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdReading:
    """Medians over rounds; in each the disk itself is timed right after the store."""

    gather_rows_per_s: float
    writeback_rows_per_s: float
    """Scatter of rows that were just gathered."""
    scatter_rows_per_s: float
    """Scatter of random rows."""
    insert_rows_per_s: float
    disk_reads_per_s: float
    """Random blocks of `read_block` bytes."""
    disk_row_writes_per_s: float
    """The same, written."""
    disk_writes_mb_per_s: float
    """Random blocks of `write_block` bytes: what the store writes at once."""
    gather_ratio: float
    """Time of the disk alone for the reads and writes that a gather made, over the gather's."""
    scatter_ratio: float
    """The same of the scatter of random rows; above 1 it is faster than the disk: rows stay."""
    read_block: int
    write_block: int
    hit_share: float
    """Of rows asked for: in memory."""
    written_mb_per_round: float
    """By a gather and both scatters of a round."""
    moved_share: float
    """Of rows written: only to keep the file small."""
    rounds: int
    rows: int
    gb: float
    cache: float
    threads: int
    depth: int
    bytes: int
    """Memory of the store, everything counted."""
    file_bytes: int
    direct: bool
    """Whether files are read past the system's cache."""


def measure_ssd(case: SsdCase, progress: Callable[[], object]) -> SsdReading:
    """Fill a store, then gather and scatter random batches, with the disk itself in between."""
    layout = StoreLayout(table_seeds=(1,), init_stds=(0.01,), dim=case.dim, state_dim=0)
    store = open_store(layout, native=True, threads=case.threads, ssd=case.options)
    try:
        insert_s = _fill(store, case, progress)
        rounds = []
        for number in range(case.rounds):
            rounds.append(_ssd_round(store, case, number))
            progress()
        return _ssd_reading(store, case, insert_s, rounds)
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class _SsdRound:
    """Seconds of calls and of one block of the disk, and what was moved before and after calls."""

    gather_s: float
    writeback_s: float
    scatter_s: float
    read_s: float
    row_write_s: float
    write_s: float
    gathered: tuple[SsdTraffic, SsdTraffic]
    scattered: tuple[SsdTraffic, SsdTraffic]

    def disk_s(self, between: tuple[SsdTraffic, SsdTraffic]) -> float:
        """What the disk alone takes for what was read and written in between."""
        before, after = between
        reads = after.rows_read - before.rows_read
        writes = (after.bytes_written - before.bytes_written) / WRITE_BLOCK
        return reads * self.read_s + writes * self.write_s


WRITE_BLOCK = SsdOptions(folder=Path(), cache_bytes=0).segment_bytes
DISK_WRITES = 1000
"""Blocks that the disk is timed with."""


def _ssd_round(store: RowStore, case: SsdCase, number: int) -> _SsdRound:
    """A batch is gathered and written back, as training does; then another one is written."""
    file = store.abilities.file
    assert file is not None, "rows live in a file"
    generator = torch.Generator().manual_seed(number)
    keys_K, others_K = (keys_at(_batch(case, generator)) for _ in range(2))
    rows_KD, count = torch.empty(case.keys, case.dim), [case.keys]
    began = file.traffic()
    gather_s = _seconds(lambda: store.gather(keys_K, count, rows_KD))
    gathered = file.traffic()
    writeback_s = _seconds(lambda: store.scatter(keys_K, count, rows_KD))
    written = file.traffic()
    scatter_s = _seconds(lambda: store.scatter(others_K, count, rows_KD))
    scattered = file.traffic()
    block = _read_block(began, gathered)
    read_s = file.disk_seconds(block, case.keys, write=False) / case.keys
    row_write_s = file.disk_seconds(block, case.keys, write=True) / case.keys
    write_s = file.disk_seconds(WRITE_BLOCK, DISK_WRITES, write=True) / DISK_WRITES
    return _SsdRound(
        *(gather_s, writeback_s, scatter_s, read_s, row_write_s, write_s),
        gathered=(began, gathered),
        scattered=(written, scattered),
    )


def _read_block(before: SsdTraffic, after: SsdTraffic) -> int:
    """Bytes that the store reads for a row, on average."""
    return (after.bytes_read - before.bytes_read) // max(1, after.rows_read - before.rows_read) or 1


def _ssd_reading(
    store: RowStore, case: SsdCase, insert_s: float, rounds: list[_SsdRound]
) -> SsdReading:
    file = store.abilities.file
    assert file is not None, "rows live in a file"
    first, last = rounds[0].gathered[0], file.traffic()
    asked = (last.rows_hit - first.rows_hit) + (last.rows_read - first.rows_read)
    written = last.rows_written - first.rows_written
    return SsdReading(
        gather_rows_per_s=case.keys / median(r.gather_s for r in rounds),
        writeback_rows_per_s=case.keys / median(r.writeback_s for r in rounds),
        scatter_rows_per_s=case.keys / median(r.scatter_s for r in rounds),
        insert_rows_per_s=case.rows / insert_s,
        disk_reads_per_s=1 / median(r.read_s for r in rounds),
        disk_row_writes_per_s=1 / median(r.row_write_s for r in rounds),
        disk_writes_mb_per_s=WRITE_BLOCK / 1e6 / median(r.write_s for r in rounds),
        gather_ratio=median(r.disk_s(r.gathered) / r.gather_s for r in rounds),
        scatter_ratio=median(r.disk_s(r.scattered) / r.scatter_s for r in rounds),
        read_block=_read_block(first, last),
        write_block=WRITE_BLOCK,
        hit_share=(last.rows_hit - first.rows_hit) / max(1, asked),
        written_mb_per_round=(last.bytes_written - first.bytes_written) / 1e6 / len(rounds),
        moved_share=(last.rows_moved - first.rows_moved) / max(1, written),
        rounds=len(rounds),
        rows=case.rows,
        gb=case.gb,
        cache=case.cache,
        threads=case.threads,
        depth=case.depth,
        bytes=store.num_bytes(),
        file_bytes=last.file_bytes,
        direct=file.direct,
    )


def keys_at(positions_K: Tensor) -> Tensor:
    """The keys that the benchmark stores rows 0, 1, 2, ... under."""
    return positions_K * SPREAD


def _fill(store: RowStore, case: StoreCase | SsdCase, progress: Callable[[], object]) -> float:
    """Seconds spent on inserting."""
    rows_KD = torch.randn(FILL, case.dim)
    spent = 0.0
    for begin in range(0, case.rows, FILL):
        keys_K = keys_at(torch.arange(begin, min(begin + FILL, case.rows)))
        count = len(keys_K)
        spent += _seconds(lambda: store.scatter(keys_K, [count], rows_KD[:count]))  # noqa: B023
        progress()
    return spent


def _rounds(
    store: RowStore, plain: Tensor, case: StoreCase
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds of gather, scatter, index_select and gather of unknown keys, round by round."""
    generator = torch.Generator().manual_seed(1)
    batches = [_batch(case, generator) for _ in range(BATCHES)]
    out_KD = torch.empty(case.keys, case.dim)
    times: tuple[list[float], ...] = ([], [], [], [])
    until = time.perf_counter() + case.seconds
    while time.perf_counter() < until or len(times[0]) < 3:
        positions_K = batches[len(times[0]) % BATCHES]
        keys_K, unknown_K = keys_at(positions_K), keys_at(positions_K + case.rows)
        count = [len(keys_K)]
        works: list[Callable[[], object]] = [
            lambda: store.gather(keys_K, count, out_KD),  # noqa: B023
            lambda: store.scatter(keys_K, count, out_KD),  # noqa: B023
            lambda: torch.index_select(plain, 0, positions_K, out=out_KD),  # noqa: B023
            lambda: store.gather(unknown_K, count, out_KD),  # noqa: B023
        ]
        for taken, work in zip(times, works, strict=True):
            time.sleep(PAUSE_S)
            taken.append(_seconds(work))
    return times  # pyright: ignore[reportReturnType]


def _batch(case: StoreCase | SsdCase, generator: torch.Generator) -> Tensor:
    """Distinct positions in random order."""
    # Of twice as many draws at least 1.26 times as many are distinct: rows are at least twice keys.
    drawn = torch.randint(case.rows, (case.keys * 2,), generator=generator).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[: case.keys]]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
