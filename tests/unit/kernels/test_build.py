"""The native library is built once, by one of many, and says what is missing."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.errors import ConfigError
from nestpipe.kernels import build as building
from nestpipe.kernels.build import build, build_key, cache_folder, find_compiler

BUILD = """
import os, sys
from pathlib import Path
from nestpipe.kernels import build

sources, arrived = map(Path, sys.argv[1:])
locked = build.locked

def locked_together(path):
    (arrived / str(os.getpid())).touch()
    return locked(path)

build.SOURCES, build.locked = sources, locked_together
print(build.build())
"""
"""Builds, and says when it has come to the lock."""
PATIENT_COMPILER = """#!/bin/sh
# Has work to do until all four have come to the lock, or for a minute.
case "$*" in *-shared*)
    for _ in $(seq 3000); do
        [ "$(ls "$ARRIVED" | wc -l)" -ge 4 ] && break
        sleep 0.02
    done
esac
exec {compiler} "$@"
"""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A tiny set of sources and an empty cache, so that a build takes no time."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "one.cpp").write_text('#include "one.h"\nextern "C" int one() { return ONE; }\n')
    (sources / "one.h").write_text("#define ONE 1\n")
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setenv("NESTPIPE_CACHE", str(tmp_path / "cache"))
    return sources


def test_a_library_is_compiled_once_and_again_when_a_header_changes(small, capsys):
    first = build()
    assert capsys.readouterr().err.startswith("compiling the native store with ")
    assert build() == first
    assert capsys.readouterr().err == ""
    (small / "one.h").write_text("#define ONE 2\n")
    second = build()
    assert second != first
    assert second.exists()
    assert "compiling" in capsys.readouterr().err


def test_only_libraries_and_locks_are_left_in_the_cache(small):
    library = build()
    assert {path.name for path in library.parent.iterdir()} == {
        library.name,
        library.with_suffix(".lock").name,
        library.with_suffix(".sha256").name,
    }


def test_another_compiler_gives_another_library(small, monkeypatch):
    (compiler,) = find_compiler()[:1]
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-DMORE"))
    with_more = build_key([compiler])
    monkeypatch.undo()
    assert with_more != build_key([compiler])
    assert build_key([compiler, "-DMORE"]) != build_key([compiler])


def test_many_that_start_at_once_compile_once(small, tmp_path):
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    compiler = tmp_path / "c++"
    compiler.write_text(PATIENT_COMPILER.format(compiler=shlex.join(find_compiler())))
    compiler.chmod(0o755)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(small), str(arrived)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CXX": str(compiler), "ARRIVED": str(arrived)},
        )
        for _ in range(4)
    ]
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert len(list(arrived.iterdir())) == 4
    assert len({out for out, _ in said}) == 1
    assert sum("compiling" in err for _, err in said) == 1


def test_no_compiler_is_one_sentence_with_two_ways_out(small, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError) as missing:
        build()
    assert str(missing.value) == (
        "there is no C++ compiler for the native store; install g++ 12 or newer "
        "(or name one in CXX), or set NESTPIPE_NATIVE=0 to use the slow plain twin"
    )


def test_a_compiler_that_is_not_there_is_named(small, monkeypatch):
    monkeypatch.setenv("CXX", "g++-from-nowhere -m64")
    with pytest.raises(ConfigError, match=r"no compiler 'g\+\+-from-nowhere'; correct or unset"):
        build()


def test_a_compiler_that_fails_is_quoted(small, monkeypatch):
    (small / "one.h").write_text("#error this is too old\n")
    with pytest.raises(ConfigError, match=r"cannot compile .*too old.*NESTPIPE_NATIVE=0"):
        build()
    assert not list(cache_folder().glob("*.so"))


def test_a_full_disk_is_not_blamed_on_the_compiler(small, monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    linker = "ld: final link failed: No space left on device\\ncollect2: error: ld returned 1\\n"
    compiler.write_text(f"#!/bin/sh\nprintf '{linker}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ConfigError, match=r"^no space is left in .*NESTPIPE_CACHE and TMPDIR"):
        build()


def test_a_cache_that_is_a_file_is_one_sentence(small, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NESTPIPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="name another folder in NESTPIPE_CACHE"):
        build()


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("NESTPIPE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "nestpipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "nestpipe"
    monkeypatch.setenv("NESTPIPE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_the_command_builds_and_says_where():
    result = subprocess.run(
        [sys.executable, "-m", "nestpipe.kernels.library"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "libnestpipe-" in result.stdout


def test_the_arithmetic_of_first_rows_cannot_be_contracted():
    assert {"-ffp-contract=off", "-fno-fast-math"} <= set(building.FLAGS)
    for source in building.source_files():
        assert "std::fma" not in source.read_text()


def fail_if_called(target: Path) -> None:
    raise AssertionError(f"{target} is made again")


def test_a_damaged_library_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NESTPIPE_CACHE", str(tmp_path))
    made: list[Path] = []

    def make(target: Path) -> None:
        made.append(target)
        target.write_bytes(b"code")

    path = building.built_once("some.so", make)
    assert building.built_once("some.so", make) == path
    assert len(made) == 1
    path.write_bytes(b"c0de")
    assert building.built_once("some.so", make).read_bytes() == b"code"
    path.with_suffix(".sha256").unlink()
    building.built_once("some.so", make)
    assert len(made) == 3
    path.with_suffix(".sha256").write_bytes(b"\xff\xfe")  # no text at all
    building.built_once("some.so", make)
    assert len(made) == 4


def test_a_folder_in_the_place_of_a_library_is_told(tmp_path: Path):
    (tmp_path / "lib.so").mkdir()
    with pytest.raises(ConfigError, match=r"lib\.so' is no file; remove it"):
        building.is_whole(tmp_path / "lib.so")


def test_a_library_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NESTPIPE_CACHE", str(tmp_path))
    path = building.built_once("some.so", lambda target: Path(target).touch())
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"can be written by anybody; remove it"):
        building.built_once("some.so", fail_if_called)
    path.chmod(0o644)
    mine = path.stat().st_uid
    monkeypatch.setattr(building.os, "geteuid", lambda: mine + 1)
    if mine == 0:  # what root owns is trusted by all
        assert building.built_once("some.so", fail_if_called) == path
        os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user"):
        building.built_once("some.so", fail_if_called)
