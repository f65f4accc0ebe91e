"""Native code does random work from several threads under the compiler's sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

from nestpipe.errors import ConfigError
from nestpipe.kernels.build import SOURCES, find_compiler

DRIVERS = [
    Path(__file__).with_name(name) for name in ("native_driver.cpp", "native_routing_driver.cpp")
]

OPTIMISE = {"address,undefined": "-O0", "thread": "-O1"}
"""By sanitizer: what compiles and runs in the shortest time."""


def compile_and_run(folder: Path, sources: list[Path], sanitizer: str):
    try:
        compiler = find_compiler()
    except ConfigError as error:
        pytest.skip(str(error))
    program = folder / "driver"
    # Lines are enough to find a fault; names of variables take most of the time to compile.
    flags = ["-std=c++17", OPTIMISE[sanitizer], "-g1", "-pthread", f"-fsanitize={sanitizer}"]
    command = [*compiler, *flags, f"-I{SOURCES}", "-o", str(program), *map(str, sources)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        return made
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    return subprocess.run(
        [str(program)], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("sanitizer", OPTIMISE)
def test_random_work_from_threads_is_clean(tmp_path: Path, sanitizer: str):
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    probe = compile_and_run(tmp_path, [empty], sanitizer)
    if probe.returncode:
        pytest.skip(f"no runtime for -fsanitize={sanitizer}: {probe.stderr.strip()[:200]}")
    result = compile_and_run(tmp_path, [*DRIVERS, *sorted(SOURCES.rglob("*.cpp"))], sanitizer)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "done\n"
