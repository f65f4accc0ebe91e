#!/usr/bin/env python3
"""How fast a GPU reads and writes rows in pinned host memory: by blocks, each way and both at once.

python tools/bench_row_copies.py --rows 170000 --dim 128 --json out/row_copies.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from nestpipe.kernels.rows import row_copy_tma
from nestpipe.kernels.rows.row_copy_tma import aligned_rows, copy_rows_in_bulk

BLOCKS = (2, 4, 8, 16, 32, 64)
ROUNDS, WARM = 20, 3


class Side:
    """Rows that go one way, on a stream of their own."""

    def __init__(self, rows: int, dim: int, home_rows: int, *, to_store: bool) -> None:
        self.home_NW = torch.zeros(home_rows, dim, pin_memory=True)
        chosen = torch.randperm(home_rows)[:rows].sort().values
        self.addresses_K = (self.home_NW.data_ptr() + chosen * dim * 4).cuda()
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


def main() -> None:
    """Print and write what the copies reach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=170_000, help="rows of a copy")
    parser.add_argument("--dim", type=int, default=128, help="numbers of a row")
    parser.add_argument("--home", type=int, default=8_000_000, help="rows in host memory, each way")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU; run this on a machine that has one")
    torch.manual_seed(0)
    read = Side(given.rows, given.dim, given.home, to_store=False)
    write = Side(given.rows, given.dim, given.home, to_store=True)
    found: list[dict[str, float]] = []
    for blocks in BLOCKS:
        row_copy_tma.BLOCKS_ALONE = blocks
        found.append(
            {
                "blocks": blocks,
                "read_gb_s": gigabytes_per_s(read),
                "write_gb_s": gigabytes_per_s(write),
                "both_gb_s": gigabytes_per_s(read, write),
            }
        )
        sys.stdout.write(" ".join(f"{k} {v:.1f}" for k, v in found[-1].items()) + "\n")
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": given.rows, "dim": given.dim, "found": found}))


if __name__ == "__main__":
    main()
