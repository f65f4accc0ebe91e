"""Two groups of two real processes: exchanges in both directions, and the loss of one rank."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mesh_program.py")
RANKS = 4
START_S = 90.0
"""Enough for processes to import torch on a busy machine, and for the timeout of 4 s."""


def start_ranks(scenario: str) -> list[subprocess.Popen[str]]:
    """By themselves, as on several machines: no launcher tells a rank that a peer is gone."""
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port = any_socket.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def outcomes(scenario: str, ranks: int) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of the first ranks; the others may never end by themselves."""
    started = start_ranks(scenario)
    try:
        ended = [rank.communicate(timeout=START_S) for rank in started[:ranks]]
        for out, said in ended:
            print(out, said, sep="\n")
        return [(rank.returncode, *said) for rank, said in zip(started, ended, strict=False)]
    finally:
        for rank in started:
            rank.kill()
            rank.communicate()


def test_sums_and_exchanges_in_both_directions():
    first, *others = outcomes("both_ways", RANKS)
    assert first == (0, "rank 0 has seen all\n", "")
    assert others == [(0, "", "")] * 3


@pytest.mark.parametrize("scenario", ["one_is_killed", "one_stays_away"])
def test_every_survivor_names_the_lost_rank_of_the_world(scenario: str):
    """Also the one that shares no subgroup with it, and waited for one that did."""
    ended = outcomes(scenario, 3)
    assert [status for status, _, _ in ended] == [3] * 3
    for rank, op in enumerate(["mirror 3", "rows 3.1", "mirror 3"]):
        said = ended[rank][2]
        assert f"rank {rank} waited in vain for its peers in `{op}` (all_reduce)" in said
        assert "no sign of rank 3;" in said
    assert "rank 1 failed in `rows 3.1` (all_reduce)" in ended[0][2]
