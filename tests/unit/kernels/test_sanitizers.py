"""Native code does random work from several threads under the compiler's sanitizers."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nestpipe.errors import ConfigError
from nestpipe.kernels.build import SOURCES, built_once, find_compiler

DRIVERS = [
    Path(__file__).with_name(name) for name in ("native_driver.cpp", "native_routing_driver.cpp")
]

OPTIMISE = {"address,undefined": "-O0", "thread": "-O1"}
"""By sanitizer: what compiles and runs in the shortest time."""


def compiled(folder: Path, sources: list[Path], sanitizer: str) -> Path | str:
    """The program, or what the compiler says; one of the same text is found in the cache."""
    try:
        compiler = find_compiler()
    except ConfigError as error:
        pytest.skip(str(error))
    # Lines are enough to find a fault; names of variables take most of the time to compile.
    flags = ["-std=c++17", OPTIMISE[sanitizer], "-g1", "-pthread", f"-fsanitize={sanitizer}"]
    program = folder / "driver"
    command = [*compiler, *flags, f"-I{SOURCES}", "-o", str(program), *map(str, sources)]
    said = ""

    def make(target: Path) -> None:
        nonlocal said
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        said = made.stderr
        if made.returncode == 0:
            shutil.copy2(program, target.with_suffix(".partial"))
            target.with_suffix(".partial").rename(target)

    texts = [file.read_bytes() for file in [*sources, *sorted(SOURCES.rglob("*.h"))]]
    key = hashlib.sha256(b"\0".join([repr((compiler, flags)).encode(), *texts])).hexdigest()[:16]
    found = built_once(f"sanitized-{key}", make)
    return found if found.exists() else said or "the compiler says nothing"


def run_program(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    command = [str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("sanitizer", OPTIMISE)
def test_random_work_from_threads_is_clean(tmp_path: Path, sanitizer: str):
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    probe = compiled(tmp_path, [empty], sanitizer)
    if isinstance(probe, str) or (started := run_program(probe)).returncode:
        said = probe if isinstance(probe, str) else started.stderr
        pytest.skip(f"no runtime for -fsanitize={sanitizer}: {said.strip()[:200]}")
    driver = compiled(tmp_path, [*DRIVERS, *sorted(SOURCES.rglob("*.cpp"))], sanitizer)
    assert isinstance(driver, Path), driver
    result = run_program(driver)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "done\n"
