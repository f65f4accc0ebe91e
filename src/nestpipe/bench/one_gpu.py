"""Several NCCL ranks on one GPU: each looks like a host of its own, MPS lets them run together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from nestpipe.comm import launch

CONTROL = "nvidia-cuda-mps-control"
QUEUES = "16"
"""Hardware queues: with fewer, short kernels wait behind long ones; with 32, four ranks run out of
what MPS has."""
CONTROL_S = 30.0


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
                subprocess.run(
                    [CONTROL],
                    input=b"quit\n",
                    stdout=subprocess.DEVNULL,
                    check=False,
                    timeout=CONTROL_S,
                )


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
