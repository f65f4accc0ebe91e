"""Compile the sources for GPUs, where NVIDIA's compiler is installed: they are fast, not needed."""

# pyright: strict
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nestpipe.kernels.build import built_once, first_error, hash_of, version_of

SOURCES = Path(__file__).parent / "cuda"
# Bulk copies came with compute capability 9.0; later GPUs compile the same for themselves.
FLAGS = (
    *("-std=c++17", "-O3", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
    # No contraction: torch, which does one rounding per operation, must agree.
    *("-fmad=false", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
)
HEADERS = (
    *sorted(SOURCES.glob("*.h")),
    Path(__file__).parent / "native" / "rows" / "row_math.h",
)
USUAL = Path("/usr/local/cuda/bin/nvcc")


class CannotCompileError(Exception):
    """Why there is no library; those who ask have another way."""


def build_cuda() -> Path:
    """The library, compiled now where this machine has none of these sources yet."""
    compiler = str(find_nvcc())
    key = hash_of((*FLAGS, compiler, version_of([compiler])), (*_sources(), *HEADERS))
    return built_once(f"libnestpipe-cuda-{key}.so", lambda to: _compile(compiler, to))


def find_nvcc() -> Path:
    """NVIDIA's compiler: in `$CUDA_HOME`, on the path, or where it usually is."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc")
    wanted = [Path(home) / "bin" / "nvcc"] if home else []
    for path in (*wanted, *([Path(found)] if found else []), USUAL):
        if path.is_file():
            return path
    raise CannotCompileError("nvcc is not installed (or name its folder in CUDA_HOME)")


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cu"))


def _compile(compiler: str, target: Path) -> None:
    sys.stderr.write("compiling for the GPU with nvcc\n")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-o", str(made), *map(str, _sources())]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CannotCompileError(f"nvcc cannot compile: {first_error(result.stderr)}")
        made.replace(target)
