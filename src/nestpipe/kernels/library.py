"""The native libraries: compiled once per machine and version, loaded once per process.

The name of a library carries a hash of everything that went into it, so a library that exists is
never stale. A file beside it has the hash of the library itself, so damage is noticed.
`python -m nestpipe.kernels.library` builds both, for the host and for GPUs, ahead of the first use.
The one for GPUs is fast, not needed: without NVIDIA's compiler, torch and Triton do its work.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from nestpipe.errors import ConfigError

SOURCES = Path(__file__).parent / "native"
"""A folder for each subject; includes are written from here."""
# No contraction and no fast math: numpy, which does one rounding per operation, must agree.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-fast-math", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fPIC", "-shared", "-pthread"),
)
CUDA_SOURCES = Path(__file__).parent / "cuda"
# Bulk copies came with compute capability 9.0; later GPUs compile the same for themselves.
CUDA_FLAGS = (
    *("-std=c++17", "-O3", "-gencode", "arch=compute_90,code=[sm_90,compute_90]"),
    # No contraction: torch, which does one rounding per operation, must agree.
    *("-fmad=false", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
)
CUDA_HEADERS = (
    *sorted(CUDA_SOURCES.glob("*.h")),
    *(SOURCES / "rows" / name for name in ("row_math.h", "sum_order.h")),
)
USUAL_NVCC = Path("/usr/local/cuda/bin/nvcc")
COMPILERS = ("g++", "c++", "clang++")
TWIN = "or set NESTPIPE_NATIVE=0 to use the slow plain twin"


class CannotCompileError(Exception):
    """Why there is no library; those who ask have another way."""


def build() -> Path:
    """The library, compiled now where this machine has none of these sources yet."""
    compiler = find_compiler()
    return built_once(f"libnestpipe-{build_key(compiler)}.so", lambda to: _compile(compiler, to))


def built_once(name: str, make: Callable[[Path], None]) -> Path:
    """A library of that name in the cache; of those who miss it at the same time one makes it."""
    target = cache_folder() / name
    if is_whole(target):
        return target
    with locked(target.with_suffix(".lock")):
        if not is_whole(target):
            make(target)
            target.with_suffix(".sha256").write_text(_hash_of_file(target))
    return target


def is_whole(target: Path) -> bool:
    """Whether a library is there as it was made; one that is damaged is made again.

    Code of another user is refused: to load it is to run it.
    """
    try:
        owner, mode = target.stat().st_uid, target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if owner not in (os.geteuid(), 0) or mode & stat.S_IWOTH:
        raise ConfigError(
            f"{str(target)!r} belongs to user {owner} or can be written by anybody; remove it, "
            "or name a folder of your own in NESTPIPE_CACHE"
        )
    said = target.with_suffix(".sha256")
    return said.is_file() and said.read_text() == _hash_of_file(target)


def _hash_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_compiler() -> list[str]:
    """The command of a C++ compiler: `$CXX` where it is set, else the first that is installed."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked and shutil.which(asked[0]) is None:
        raise ConfigError(f"there is no compiler {asked[0]!r}; correct or unset CXX, {TWIN}")
    if asked:
        return asked
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise ConfigError(
        "there is no C++ compiler for the native store; "
        f"install g++ 12 or newer (or name one in CXX), {TWIN}"
    )


def cache_folder() -> Path:
    """Where libraries are kept: NESTPIPE_CACHE, or `nestpipe` in the user's cache folder."""
    if own := os.environ.get("NESTPIPE_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "nestpipe"


def build_key(compiler: list[str]) -> str:
    """A hash of the sources, the flags, the compiler and the processor."""
    return hash_of((*FLAGS, *compiler, version_of(compiler), _processor()), source_files())


def hash_of(words: Iterable[str], sources: Iterable[Path]) -> str:
    """Of all that a library is made of."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(word.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def source_files() -> list[Path]:
    """Headers and sources of all folders, in a fixed order."""
    return sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")])


def version_of(compiler: list[str]) -> str:
    """What a compiler says of itself."""
    result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return result.stdout


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a file lock: of several ranks that start at once, one compiles and the others wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {str(path.parent)!r}: {error.strerror}; "
            f"name another folder in NESTPIPE_CACHE, {TWIN}"
        ) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], target: Path) -> None:
    sys.stderr.write(f"compiling the native store with {Path(compiler[0]).name}\n")
    sources = [str(path) for path in source_files() if path.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [*compiler, *FLAGS, f"-I{SOURCES}", "-o", str(made), *sources]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigError(
                f"{compiler[0]} cannot compile the native store ({first_error(result.stderr)}); "
                f"use g++ 12 or newer (name it in CXX), {TWIN}"
            )
        made.replace(target)


def build_cuda() -> Path:
    """The library, compiled now where this machine has none of these sources yet."""
    compiler = str(find_nvcc())
    key = hash_of(
        (*CUDA_FLAGS, compiler, version_of([compiler])), (*_cuda_sources(), *CUDA_HEADERS)
    )
    return built_once(f"libnestpipe-cuda-{key}.so", lambda to: _compile_cuda(compiler, to))


def find_nvcc() -> Path:
    """NVIDIA's compiler: in `$CUDA_HOME`, on the path, or where it usually is."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc")
    wanted = [Path(home) / "bin" / "nvcc"] if home else []
    for path in (*wanted, *([Path(found)] if found else []), USUAL_NVCC):
        if path.is_file():
            return path
    raise CannotCompileError("nvcc is not installed (or name its folder in CUDA_HOME)")


def _cuda_sources() -> list[Path]:
    return sorted(CUDA_SOURCES.glob("*.cu"))


def _compile_cuda(compiler: str, target: Path) -> None:
    """Every source by a process of its own: templates keep a single one busy for a minute."""
    sys.stderr.write("compiling for the GPU with nvcc\n")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor() as pool:
        made = Path(folder) / target.name
        sources = _cuda_sources()
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        flags = [flag for flag in CUDA_FLAGS if flag != "-shared"]
        commands = [
            [compiler, *flags, "-c", "-o", str(to), str(source)]
            for source, to in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run_nvcc, commands))
        _run_nvcc([compiler, *CUDA_FLAGS, "-o", str(made), *map(str, objects)])
        made.replace(target)


def _run_nvcc(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise CannotCompileError(f"nvcc cannot compile: {first_error(result.stderr)}")


def first_error(text: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = text.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line), lines[-1])


# The loaded libraries, with the types of their functions.


class Status(IntEnum):
    """What a native call answers; `native/common/abi.h` says more."""

    OK = 0
    TOO_MANY_ROWS = 1
    NO_MEMORY = 2
    REPEATED_KEY = 3
    DEFECT = 4
    UNKNOWN_OPTIMIZER = 5
    FILE_FAILED = 6
    FILE_DAMAGED = 7


class StoreReport(ctypes.Structure):
    """The values that belong to a status other than OK."""

    _fields_ = (("table", c_int64), ("key", c_int64), ("asked", c_int64), ("limit", c_int64))
    table: int
    key: int
    asked: int
    limit: int


class StoreShape(ctypes.Structure):
    """What a store is opened with."""

    _fields_ = (
        ("num_tables", c_int64),
        ("dim", c_int64),
        ("state_dim", c_int64),
        ("bfloat16", c_int64),
        ("state_init", c_float),
        ("seeds", POINTER(c_uint64)),
        ("stds", POINTER(c_double)),
        ("max_rows", POINTER(c_int64)),
    )


class SsdShape(ctypes.Structure):
    """What a store with a file is opened with, besides its shape."""

    _fields_ = tuple(
        (name, c_int64) for name in ("file", "align", "cache_bytes", "segment_bytes", "depth")
    )


class SsdCounters(ctypes.Structure):
    """What a store with a file has read and written so far, and how large it is."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("rows_hit", "rows_read", "bytes_read", "rows_written", "bytes_written"),
            *("rows_moved", "file_bytes", "cached_rows", "cache_rows"),
        )
    )


# Addresses of tensors and of the store itself travel as void pointers.
_SIGNATURES = {
    "nestpipe_memory_left": (c_int64, [c_char_p, c_char_p]),
    "nestpipe_store_open": (c_void_p, [POINTER(StoreShape), c_int64]),
    "nestpipe_store_close": (None, [c_void_p]),
    "nestpipe_store_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "nestpipe_store_locate": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "nestpipe_store_scatter": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(StoreReport)],
    ),
    "nestpipe_store_erase": (
        c_int,
        [c_void_p, c_void_p, c_void_p, POINTER(c_int64), POINTER(StoreReport)],
    ),
    "nestpipe_store_num_rows": (c_int64, [c_void_p, c_int64]),
    "nestpipe_store_num_bytes": (c_int64, [c_void_p]),
    "nestpipe_store_chunks": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64],
    ),
    "nestpipe_store_keys": (c_int64, [c_void_p, c_int64, c_void_p, c_int64]),
    "nestpipe_ssd_open": (c_void_p, [POINTER(StoreShape), POINTER(SsdShape), c_int64]),
    "nestpipe_ssd_close": (None, [c_void_p]),
    "nestpipe_ssd_index": (c_void_p, [c_void_p]),
    "nestpipe_ssd_gather": (
        c_int,
        [*[c_void_p] * 4, c_int64, POINTER(c_int64), POINTER(StoreReport)],
    ),
    "nestpipe_ssd_scatter": (c_int, [*[c_void_p] * 4, POINTER(StoreReport)]),
    "nestpipe_ssd_erase": (
        c_int,
        [*[c_void_p] * 3, POINTER(c_int64), POINTER(StoreReport)],
    ),
    "nestpipe_ssd_num_bytes": (c_int64, [c_void_p]),
    "nestpipe_ssd_probe": (
        c_int,
        [c_int64, c_int64, c_void_p, *[c_int64] * 3, POINTER(c_double), POINTER(StoreReport)],
    ),
    "nestpipe_ssd_counters": (None, [c_void_p, POINTER(SsdCounters)]),
    "nestpipe_cluster": (c_int, [c_void_p, c_void_p]),
    "nestpipe_take_sizes": (None, [c_void_p] * 3),
    "nestpipe_take_spans": (None, [c_void_p] * 3),
    "nestpipe_take_samples": (None, [c_void_p, c_void_p, c_int64, *[c_void_p] * 4]),
    "nestpipe_request": (c_int, [c_void_p, c_void_p]),
    "nestpipe_window": (c_int, [c_void_p, c_void_p]),
    "nestpipe_union": (c_int, [c_void_p, c_void_p]),
    "nestpipe_index_size": (c_int64, [c_int64, c_void_p]),
    "nestpipe_index": (None, [c_int64, *[c_void_p] * 3]),
    "nestpipe_neighbours": (c_int, [c_int64, *[c_void_p] * 5]),
    "nestpipe_others": (c_int64, [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "nestpipe_copy_rows": (
        c_int,
        [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64],
    ),
    "nestpipe_segment_sum": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64],
    ),
    "nestpipe_update": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_float, c_int64],
    ),
}

FIRST_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs with bulk copies."""
_CUDA_SIGNATURES = {
    "nestpipe_row_copy_begin": [],
    "nestpipe_row_copy": [*[c_void_p] * 3, *[c_int64] * 3, *[c_int] * 2, c_void_p],
    "nestpipe_segment_sum": [
        *[c_void_p, c_int64, c_void_p, c_int64],
        *[c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_void_p],
    ],
    "nestpipe_update_rows": [
        *[c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64],
        c_void_p,
    ],
}


@cache
def library() -> ctypes.CDLL:
    """The library, built first where that is needed; its calls run without the GIL."""
    path = build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"cannot load {str(path)!r} ({error}); remove it so that it is built again, "
            "or set NESTPIPE_NATIVE=0 to use the slow plain twin"
        ) from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def free_memory() -> float:
    """Bytes that the machine has left, and the control groups of this process."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    if not native_wanted():
        return free
    left = library().nestpipe_memory_left(b"/proc/self/cgroup", b"/sys/fs/cgroup")
    return free if left < 0 else min(free, float(left))


def native_wanted() -> bool:
    """Whether the native code is to be used: unless NESTPIPE_NATIVE is 0."""
    value = os.environ.get("NESTPIPE_NATIVE", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"NESTPIPE_NATIVE is {value!r}; set 0 (plain twin) or 1 (native)")
    return value == "1"


@cache
def cuda_library(device: int) -> ctypes.CDLL | None:
    """The library for a GPU, or None where the GPU is too old or nothing can be compiled.

    A warning says the latter.
    """
    if torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return None
    try:
        return _begun(ctypes.CDLL(str(build_cuda())), device)
    except (CannotCompileError, OSError) as error:
        warnings.warn(
            f"rows are moved and updated by slower kernels of torch and triton: {error}",
            stacklevel=2,
        )
        return None


def _begun(library: ctypes.CDLL, device: int) -> ctypes.CDLL:
    typed_cuda(library, _CUDA_SIGNATURES)
    with torch.cuda.device(device):
        status = library.nestpipe_row_copy_begin()
    if status != 0:
        raise CannotCompileError(f"the driver refuses what nvcc made: CUDA's error {status}")
    return library


def typed_cuda(library: ctypes.CDLL, names: Iterable[str]) -> None:
    """Give some functions of a library for GPUs their types."""
    for name in names:
        function = getattr(library, name)
        function.argtypes, function.restype = _CUDA_SIGNATURES[name], c_int


def launch(device: torch.device, name: str, *arguments: object) -> int:
    """Call a function of a GPU's library on the device's current stream; returns its status."""
    library = cuda_library(device.index)
    assert library is not None, f"there is no {name} for {device}"
    return call_on_stream(device, getattr(library, name), *arguments)


def call_on_stream(device: torch.device, function: Callable[..., int], *arguments: object) -> int:
    """Call a function with the device's current stream as its last argument.

    By torch's own short way: the usual one takes longer than a kernel.
    """
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(device):
            return call_on_stream(device, function, *arguments)
    stream = torch._C._cuda_getCurrentRawStream(index)  # pyright: ignore
    return function(*arguments, stream)


def main() -> None:
    """Build the libraries and say where they are."""
    _say(build)
    try:
        _say(build_cuda)
    except CannotCompileError as error:
        sys.stdout.write(f"nothing for a GPU: {error}\n")


def _say(make: Callable[[], Path]) -> None:
    began = time.monotonic()
    path = make()
    sys.stdout.write(f"{path} ({time.monotonic() - began:.1f} s)\n")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)
