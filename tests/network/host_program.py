"""What a rank does in the tests of `test_hosts`: `python host_program.py SCENARIO`."""

from __future__ import annotations

import sys
import time
from contextlib import closing

import torch

from nestpipe.comm import connect

ROWS = 5000


def exchange() -> None:
    """Rows of every rank reach every other one; their content says where they came from."""
    with closing(connect("gloo", timeout_s=60.0)) as comm:
        sent = torch.arange(ROWS * comm.size).reshape(-1, 1) + 1_000_000 * comm.rank
        received = torch.empty_like(sent)
        splits = [ROWS] * comm.size
        comm.all_to_all(received, sent, splits, splits)
        mine = torch.arange(comm.rank * ROWS, (comm.rank + 1) * ROWS)
        wanted = torch.cat([mine + 1_000_000 * peer for peer in range(comm.size)])
        assert torch.equal(received[:, 0], wanted)
        comm.barrier()


def one_fails() -> None:
    """Rank 1 ends with a status of its own while rank 0 would stay."""
    with closing(connect("gloo", timeout_s=60.0)) as comm:
        comm.barrier()
        if comm.rank == 1:
            sys.exit(7)
        time.sleep(60)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
