"""GPU kernels compiled for the host, so that tests run them without a GPU.

`cuda_on_cpu` runs the threads of a block as fibers that overtake each other.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from nestpipe.embedding import optimizers
from nestpipe.kernels.attention import bias_gradient
from nestpipe.kernels.build import (
    CUDA_HEADERS,
    CUDA_SOURCES,
    built_once,
    find_compiler,
    hash_of,
)
from nestpipe.kernels.index import library
from nestpipe.kernels.library import typed_cuda
from nestpipe.kernels.rows import cuda, segments

KERNELS = (
    *("index", "dedup", "segments", "row_sums", "segment_sum", "update", "step"),
    "bias_gradient",
)
FAKE_CUDA = Path(__file__).parent / "cuda_on_cpu"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-DNESTPIPE_EMULATED", "-shared", "-fPIC"]


@cache
def emulated_kernels() -> ctypes.CDLL:
    """The kernels as a library of the host, compiled once per machine and version."""
    compiler = find_compiler()
    sources = [CUDA_SOURCES / f"{name}.cu" for name in KERNELS]
    headers = [*FAKE_CUDA.glob("*.h"), *CUDA_HEADERS]

    def make(target: Path) -> None:
        command = [*compiler, *FLAGS, f"-I{FAKE_CUDA}", "-o", str(target), "-x", "c++"]
        made = subprocess.run(
            [*command, *map(str, sources)], capture_output=True, text=True, check=False
        )
        assert made.returncode == 0, made.stderr[-4000:]

    key = hash_of((*FLAGS, *compiler), [*sources, *headers])
    made = ctypes.CDLL(str(built_once(f"libnestpipe-emulated-{key}.so", make)))
    typed_cuda(made, ["nestpipe_segment_sum", "nestpipe_update_rows", "nestpipe_bias_gradient"])
    return made


@contextmanager
def rows_on_emulated_gpu() -> Iterator[list[str]]:
    """Sums and updates of rows in host memory by the kernels; yields the names of those called."""
    called: list[str] = []

    def launch(device: torch.device, name: str, *arguments: object) -> int:
        called.append(name)
        return getattr(emulated_kernels(), name)(*arguments, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "launch", launch)
        patch.setattr(segments, "can_sum", lambda *_: True)
        patch.setattr(optimizers, "can_update", lambda *_: True)
        yield called


@contextmanager
def biases_on_emulated_gpu() -> Iterator[list[str]]:
    """Gradients of bias tables in host memory by the kernel; yields the names of those called."""
    called: list[str] = []

    def launch(device: torch.device, name: str, *arguments: object) -> int:
        called.append(name)
        return getattr(emulated_kernels(), name)(*arguments, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bias_gradient, "launch", launch)
        patch.setattr(bias_gradient, "has_kernel", lambda _: True)
        yield called


class OneAtATime:
    """The kernels for threads of lanes and ranks, which would share the emulated blocks."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        self._kernels = library.typed(emulated_kernels())
        self._busy = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., int]:
        kernel: Callable[..., int] = getattr(self._kernels, name)

        def launch(*arguments: object) -> int:
            with self._busy:
                self.called.add(name)
                return kernel(*arguments)

        return launch


@contextmanager
def pools_on_emulated_gpu() -> Iterator[set[str]]:
    """Keys and rows of pools in host memory by the kernels; yields the names of those called."""
    kernels = OneAtATime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "loaded", lambda device: kernels)
        patch.setattr(library, "has_kernels", lambda device: True)
        yield kernels.called
