"""The native libraries as files: one that came with the wheel, or one compiled on this machine.

A wheel has a library for each level of processor (`shipped`). Where none fits, the sources, which
are in the wheel too, are compiled once per machine and version (`build`). The name of a library
carries a hash of everything that went into it, so a library that exists is never stale. A file
beside a compiled one has the hash of the library itself, so damage is noticed.

No torch here: `hatch_build.py` imports this module where nothing is installed yet.
"""

from __future__ import annotations

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
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from nestpipe.errors import ConfigError

SOURCES = Path(__file__).parent / "native"
"""A folder for each subject; includes are written from here."""
# No contraction and no fast math: numpy, which does one rounding per operation, must agree, and so
# must libraries for other processors.
COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fno-fast-math", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fPIC", "-shared", "-pthread"),
)
FLAGS = (*COMMON_FLAGS, "-march=native")
SHIPPED = Path(__file__).parent / "shipped"
"""Where a wheel has its libraries; a checkout has none."""
_AVX2 = (
    *("cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
)
_AVX512 = (*_AVX2, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx512": _AVX512, "avx2": _AVX2, "baseline": ()},
    "aarch64": {"baseline": ()},
}
"""By machine, best first: levels of processor, with what /proc/cpuinfo calls their features."""
_OPTIONS = {"abm": "-mlzcnt", "bmi1": "-mbmi", "sse4_1": "-msse4.1", "sse4_2": "-msse4.2"}
"""Features that compilers have other names for; unlike -march, they agree on these."""
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


def shipped(folder: Path = SHIPPED) -> Path | None:
    """The wheel's library for this processor, of exactly these sources; None where it has none."""
    flags = set(_processor().replace(":", " ").split())
    machine = platform.machine()
    for level, needed in LEVELS.get(machine, {}).items():
        if flags.issuperset(needed) and (path := folder / shipped_name(machine, level)).is_file():
            return path
    return None


def shipped_name(machine: str, level: str) -> str:
    """What the library for a level of processor is called."""
    return f"libnestpipe-{machine}-{level}-{hash_of(COMMON_FLAGS, source_files())}.so"


def build_shipped(compiler: list[str], machine: str, level: str, folder: Path) -> Path:
    """Compile the library for a level of processor as a wheel has it.

    It brings the C++ runtime along: the machine that it will run on may have an older one.
    """
    target = folder / shipped_name(machine, level)
    features = [_OPTIONS.get(name, f"-m{name}") for name in LEVELS[machine][level]]
    own_runtime = ("-static-libstdc++", "-static-libgcc", "-s")
    compile_to(target, compiler, (*COMMON_FLAGS, *features, *own_runtime))
    return target


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
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"{str(target)!r} is no file; remove it, or name another folder in NESTPIPE_CACHE"
        )
    if owner not in (os.geteuid(), 0) or mode & stat.S_IWOTH:
        raise ConfigError(
            f"{str(target)!r} belongs to user {owner} or can be written by anybody; remove it, "
            "or name a folder of your own in NESTPIPE_CACHE"
        )
    said = target.with_suffix(".sha256")
    return said.is_file() and said.read_bytes() == _hash_of_file(target).encode()


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
    sys.stderr.write(
        f"compiling the native store with {Path(compiler[0]).name}, once on this machine\n"
    )
    compile_to(target, compiler, FLAGS)


def compile_to(target: Path, compiler: list[str], flags: Iterable[str]) -> None:
    """Compile all sources into one library, which appears when it is whole."""
    sources = [str(path) for path in source_files() if path.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [*compiler, *flags, f"-I{SOURCES}", "-o", str(made), *sources]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if "No space left on device" in result.stderr:
            raise ConfigError(
                f"no space is left in {str(target.parent)!r} or for temporary files; free some, "
                f"or name other folders in NESTPIPE_CACHE and TMPDIR, {TWIN}"
            )
        if result.returncode != 0:
            raise ConfigError(
                f"{compiler[0]} cannot compile the native store ({first_error(result.stderr)}); "
                f"use g++ 12 or newer (name it in CXX), {TWIN}"
            )
        made.replace(target)


def build_cuda() -> Path:
    """The GPU library, compiled now where this machine has none of these sources yet.

    Without a compiler, one that another stage of an image has built will do.
    """
    of_sources = f"libnestpipe-cuda-{hash_of(CUDA_FLAGS, (*_cuda_sources(), *CUDA_HEADERS))}"
    try:
        compiler = str(find_nvcc())
    except CannotCompileError:
        found = filter(is_whole, sorted(cache_folder().glob(f"{of_sources}-*.so")))
        if (built_elsewhere := next(found, None)) is None:
            raise
        return built_elsewhere
    key = hash_of((compiler, version_of([compiler])), ())
    return built_once(f"{of_sources}-{key}.so", lambda to: _compile_cuda(compiler, to))


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
    sys.stderr.write(
        f"compiling the GPU kernels with {compiler}: a minute or two, once on this machine; "
        f"they are kept in {str(target.parent)!r}\n"
    )
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
