"""Several NCCL ranks on one GPU: each looks like a host of its own, MPS lets them run together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nestpipe.comm import launch

CONTROL = "nvidia-cuda-mps-control"
QUEUES = "16"
"""Hardware queues: with fewer, short kernels wait behind long ones; with 32, four ranks run out of
what MPS has."""
CONTROL_S, QUIT_S = 30.0, 5.0
"""How long it may take to start, and to end."""


def look_like_a_host() -> None:
    """Call in a rank before NCCL starts: ranks on one GPU must seem to be on different hosts."""
    settings = {
        "NCCL_HOSTID": f"host{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def launch_on_one_gpu(ranks: int, command: Sequence[str]) -> int:
    """Run the command once per rank, all on this machine's GPU; returns the exit status."""
    with _environment({"CUDA_DEVICE_MAX_CONNECTIONS": QUEUES}), mps_daemon():
        return launch(ranks, command)


@contextmanager
def mps_daemon() -> Iterator[None]:
    """NVIDIA's daemon that runs kernels of several processes side by side, for the time inside.

    It has folders of its own, so it never meets another daemon. Where the program is missing,
    ranks take turns on the GPU: slower, and said.
    """
    if shutil.which(CONTROL) is None:
        sys.stderr.write(f"{CONTROL} not found: ranks take turns on the GPU, which is slower\n")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nestpipe-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with _environment(places):
            subprocess.run([CONTROL, "-d"], check=True, timeout=CONTROL_S)
            try:
                yield
            finally:
                _stop_daemon(Path(folder))


def _stop_daemon(folder: Path) -> None:
    """Ask it to end; it may wait for ever for ranks that were killed, and is then ended too."""
    ask = [CONTROL]
    try:
        subprocess.run(ask, input=b"quit\n", stdout=subprocess.DEVNULL, check=False, timeout=QUIT_S)
    except subprocess.TimeoutExpired:
        for process in _daemon_and_servers(folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _daemon_and_servers(folder: Path) -> list[int]:
    """The daemon whose folder it is, and the servers that it started."""
    file = folder / f"{CONTROL}.pid"
    if not file.exists():
        return []
    daemon = int(file.read_text())
    servers = Path(f"/proc/{daemon}/task/{daemon}/children")
    return [daemon, *(int(child) for child in servers.read_text().split())]


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Settings that processes started inside inherit."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
