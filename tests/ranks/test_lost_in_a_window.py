"""A rank is lost in the middle of a window, while every lane of the others has its own thread."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("train_program.py")
START_S = 90.0
"""Enough for processes to import torch on a busy machine, and for the timeout of 4 s."""
IN_VAIN = re.compile(
    r"rank (\d) waited in vain for its peers in `(\w+) (\d+)(?:\.\d)?` "
    r"\((?:all_to_all|all_reduce)\), at most 4 s: no sign of rank 2"
)


def start_rank(rank: int, size: int, port: int, how: str) -> subprocess.Popen[str]:
    """By itself, as on several machines: no launcher tells it that a peer is gone."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), how],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_every_survivor_exits_and_names_op_batch_and_peer(how: str):
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port = any_socket.getsockname()[1]
    ranks = [start_rank(rank, 3, port, how) for rank in range(3)]
    try:
        for number, rank in enumerate(ranks[:2]):
            _, said = rank.communicate(timeout=START_S)
            print(said)
            assert rank.returncode == 3
            found = IN_VAIN.search(said)
            assert found, "a survivor names the op, its batch and the rank that it waited for"
            assert int(found[1]) == number
            assert int(found[3]) >= 3, "batches before that window had ended"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
