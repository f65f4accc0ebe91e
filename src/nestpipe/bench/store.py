"""How fast the host store is, beside `torch.index_select` on a tensor of the same size."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from nestpipe.config.values import positive
from nestpipe.embedding.store import RowStore, open_store
from nestpipe.embedding.store.protocol import MOST_THREADS, StoreLayout
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


def keys_at(positions_K: Tensor) -> Tensor:
    """The keys that the benchmark stores rows 0, 1, 2, ... under."""
    return positions_K * SPREAD


def _fill(store: RowStore, case: StoreCase, progress: Callable[[], object]) -> float:
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


def _batch(case: StoreCase, generator: torch.Generator) -> Tensor:
    """Distinct positions in random order."""
    # Of twice as many draws at least 1.26 times as many are distinct: rows are at least twice keys.
    drawn = torch.randint(case.rows, (case.keys * 2,), generator=generator).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[: case.keys]]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
