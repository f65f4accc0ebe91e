import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

FORK = Path(__file__).with_name("fork_ranks.py")
START_S = 90.0
"""Enough for a process to import torch on a busy machine, and for the timeout of 4 s."""


class Outcome(NamedTuple):
    """How a rank ended."""

    status: int
    out: str
    said: str


@pytest.fixture
def outcomes(tmp_path: Path) -> Callable[..., list[Outcome]]:
    """How the first ranks of a program end; the others may never end by themselves.

    No launcher: as on several machines, nobody tells a rank that a peer is gone.
    """

    def run(program: Path, scenario: str, ranks: int, first: int) -> list[Outcome]:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, FORK, program, scenario, str(ranks), str(first), tmp_path]
        group = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            statuses, _ = group.communicate(timeout=START_S)
        finally:
            if group.poll() is None:
                os.killpg(group.pid, signal.SIGKILL)
                group.wait()
            said = [
                [(tmp_path / f"{rank}.{suffix}").read_text() for suffix in ("out", "err")]
                for rank in range(first)
                if (tmp_path / f"{rank}.err").exists()
            ]
            print(*("\n".join(of_rank) for of_rank in said), sep="\n")
        return [Outcome(n, *of_rank) for n, of_rank in zip(json.loads(statuses), said, strict=True)]

    return run


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return any_socket.getsockname()[1]
