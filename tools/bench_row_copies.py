#!/usr/bin/env python3
"""How fast a GPU reads and writes rows in pinned host memory: by blocks, each way and both at once.

python tools/bench_row_copies.py --rows 170000 --dim 128 --json out/row_copies.json

`--memory pinned`: one piece that CUDA has allocated. `store`: rows of a host store, in pieces that
were registered with CUDA, as a cache has them; their pages may be smaller.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from nestpipe.embedding.store import StoreLayout
from nestpipe.embedding.store.host import NativeStore
from nestpipe.kernels.rows import cuda as row_copies
from nestpipe.kernels.rows.cuda import aligned_rows, copy_rows_in_bulk

BLOCKS = (2, 4, 8, 16, 32, 64)
ROUNDS, WARM = 20, 3
CHUNK = 1 << 18
"""Rows stored at a time."""


class Home:
    """Rows in host memory that a GPU reaches."""

    def __init__(self, memory: str, rows: int, dim: int) -> None:
        self.rows, self._dim = rows, dim
        self._pinned = torch.zeros(rows, dim, pin_memory=True) if memory == "pinned" else None
        self._store = _stored(rows, dim) if self._pinned is None else None

    def addresses(self, chosen: torch.Tensor) -> torch.Tensor:
        """Where some rows live, in ascending order."""
        if self._store is None:
            assert self._pinned is not None
            return (self._pinned.data_ptr() + chosen * self._dim * 4).sort().values
        return self._store.locate(chosen, [len(chosen)]).addresses_K.sort().values


def huge_gb() -> float:
    """Memory of this process in huge pages, where the system tells."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return float("nan")
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHuge")) / 1e6


def _stored(rows: int, dim: int) -> NativeStore:
    store = NativeStore(StoreLayout(table_seeds=(1,), init_stds=(0.1,), dim=dim, state_dim=0))
    some = torch.zeros(min(CHUNK, rows), dim)
    for keys in torch.arange(rows).split(CHUNK):
        store.scatter(keys, [len(keys)], some[: len(keys)])
    if not store.pin():
        sys.exit("the system refuses to pin the store's memory; raise ulimit -l")
    return store


class Side:
    """Rows that go one way, on a stream of their own."""

    def __init__(self, rows: int, dim: int, home: Home, *, to_store: bool) -> None:
        self.addresses_K = home.addresses(torch.randperm(home.rows)[:rows]).cuda()
        self.positions_K = torch.arange(rows, device="cuda")
        self.rows_KW = aligned_rows(rows, dim, torch.device("cuda"))
        self.stream, self.to_store = torch.cuda.Stream(), to_store

    def copy(self) -> None:
        with torch.cuda.stream(self.stream):
            copy_rows_in_bulk(
                *(self.addresses_K, self.positions_K, self.rows_KW),
                to_store=self.to_store,
                alone=True,
            )

    @property
    def num_bytes(self) -> int:
        return self.rows_KW.numel() * 4


def gigabytes_per_s(*sides: Side) -> float:
    """Of several rounds together, by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(WARM + ROUNDS):
        if number == WARM:
            torch.cuda.synchronize()
            begin.record()
        for side in sides:
            side.copy()
    for side in sides:
        torch.cuda.current_stream().wait_stream(side.stream)
    end.record()
    end.synchronize()
    return sum(side.num_bytes for side in sides) * ROUNDS / begin.elapsed_time(end) / 1e6


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=170_000, help="rows of a copy")
    parser.add_argument("--dim", type=int, default=128, help="numbers of a row")
    parser.add_argument("--home", type=int, default=8_000_000, help="rows in host memory")
    parser.add_argument("--memory", default="pinned,store", help="kinds of memory, by commas")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


def main() -> None:
    """Print and write what the copies reach, each figure as it is known."""
    given = parse()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU; run this on a machine that has one")
    torch.manual_seed(0)
    found: list[dict[str, float | str]] = []
    for memory in given.memory.split(","):
        for figures in measure(memory, given):
            found.append(figures)
            if given.json is not None:
                about = {"rows": given.rows, "dim": given.dim}
                given.json.write_text(json.dumps({**about, "found": found}))


def measure(memory: str, given: argparse.Namespace) -> Iterator[dict[str, float | str]]:
    """What copies from and to one kind of memory reach, by blocks."""
    home = Home(memory, given.home, given.dim)
    read = Side(given.rows, given.dim, home, to_store=False)
    write = Side(given.rows, given.dim, home, to_store=True)
    sys.stdout.write(f"{memory}: {huge_gb():.2f} GB of this process are in huge pages\n")
    for blocks in BLOCKS:
        row_copies.BLOCKS_ALONE = blocks
        speeds = {
            "read_gb_s": gigabytes_per_s(read),
            "write_gb_s": gigabytes_per_s(write),
            "both_gb_s": gigabytes_per_s(read, write),
        }
        words = " ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())
        sys.stdout.write(f"{memory} blocks {blocks} {words}\n")
        yield {"memory": memory, "huge_gb": huge_gb(), "blocks": blocks, **speeds}


if __name__ == "__main__":
    main()
