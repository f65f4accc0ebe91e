"""Start one rank on each host, as torchrun would on machines of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from nestpipe.bench.hosts import LINK, Host, inside

PORT = 29400
"""Where ranks meet, on the first host: its network is empty, so any port is free."""
POLL_S = 0.05
STOP_S = 10.0
"""After a rank has failed, the others have so long to say where they were."""


KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Lets glibc keep freed memory: else every large tensor costs page faults, in threads most of
all."""


def launch_on_hosts(hosts: Sequence[Host], command: Sequence[str]) -> int:
    """Run the command once per host and return the exit status of the run.

    A host has one core of the machine, which it shares where hosts are more than cores: ranks that
    wander between cores would now and then wait for each other's luck, not for each other's work.
    Standard output is shown for rank 0, standard error for all. When a rank fails the others are
    told to stop, and the status is that of the first to fail.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with _sigterm_raises():
        try:
            for host in hosts:
                ranks.append(_start(host, len(hosts), hosts[0].address, command))
            return _wait(ranks)
        finally:
            _stop(ranks)


def _start(host: Host, size: int, master: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(host.number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": LINK,
        "OMP_NUM_THREADS": "1",
        # Names of hosts cannot be looked up here, and torch would say so each time.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **KEEP_MEMORY,
    }
    cores = sorted(os.sched_getaffinity(0))
    core = cores[host.number % len(cores)]
    return subprocess.Popen(
        inside(host.holder, ["taskset", "--cpu-list", str(core), *command]),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=None if host.number == 0 else subprocess.DEVNULL,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The status of the first rank to fail, or 0 when all are done."""
    while True:
        ended = [rank.poll() for rank in ranks]
        failed = [status for status in ended if status]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in ended:
            return 0
        time.sleep(POLL_S)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: first with a word, then without."""
    for rank in ranks:
        rank.terminate()
    until = time.monotonic() + STOP_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds like an interrupt, so that ranks and hosts go before this process does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
