"""The slices of a GPU session: every command line is one that its program takes, and a step that
fails or never ends costs the others nothing. `tools/gpu_session.sh rehearse` runs them all."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from nestpipe.cli.app import command_tree
from support import triton_without_gpu
from support.tools import ROOT, load_tool

SESSION = ROOT / "tools/gpu_session.sh"
TOOLS = ("bench_device_index", "bench_switches", "bench_row_copies", "lab", "quality_runs")
"""Scripts whose arguments are read here; `bench_attention` needs Triton."""
GPU_TESTS = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}


def session(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SESSION, *words],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def all_slices() -> list[str]:
    text = SESSION.read_text()
    named = re.search(r'ALL_SLICES="\$FIRST_SLICES ([^"]*)"', text)
    first = re.search(r'FIRST_SLICES="([^"]*)"', text)
    assert named is not None
    assert first is not None
    return [*first[1].split(), *named[1].replace("\\\n", " ").split()]


def steps() -> list[tuple[str, str, int, list[str]]]:
    """Slice, name, seconds and command of every step."""
    said = session("list", *all_slices(), OLD=str(ROOT))
    assert said.returncode == 0, said.stderr
    lines = [line.split("\t") for line in said.stdout.splitlines()]
    return [(part, name, int(limit), shlex.split(what)) for part, name, limit, what in lines]


def read_by_nestpipe(words: list[str]) -> None:
    """As typer reads them, without doing anything."""
    command: Any = command_tree()
    name = "nestpipe"
    context = command.make_context(name, [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name!r}"
    command.make_context(name, words, parent=context)


def lives(process: int) -> bool:
    """Whether it runs; one that ended and that nobody asked about has left its number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def read_by_tool(script: str, words: list[str]) -> None:
    tool: Any = load_tool(Path(script).stem)
    if hasattr(tool, "parse"):
        tool.parse(words)
    else:
        tool.parser().parse_args(words)


def test_every_step_is_a_command_that_its_program_takes():
    read = 0
    for part, name, limit, (_, *words) in steps():
        assert 10 <= limit <= 540, f"{part}, {name}"
        if words[:2] == ["-m", "nestpipe"]:
            read_by_nestpipe(words[2:])
        elif words[0] == "-m":
            assert words[1] in ("pytest", "nestpipe.kernels.library"), words
            files = [word for word in words if word.startswith("tests/gpu/")]
            assert {Path(file).name for file in files} <= GPU_TESTS, words
        elif Path(words[0]).stem in TOOLS:
            read_by_tool(words[0], words[1:])
        else:
            assert (ROOT / words[0]).is_file(), words
        read += 1
    assert read >= 30


def test_the_arguments_of_the_attention_bench_are_read_too():
    """In a process of its own: without Triton a stand-in takes its place for good."""
    words = [of for _, _, _, of in steps() if "tools/bench_attention.py" in of]
    assert words
    code = (
        "import json, sys; from support import triton_without_gpu as t\n"
        "t.HAS_TRITON or t.install()\n"
        "from support.tools import load_tool\n"
        "for words in json.loads(sys.argv[1]): load_tool('bench_attention').parse(words)\n"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    subprocess.run(
        [sys.executable, "-c", code, json.dumps([of[2:] for of in words])],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert triton_without_gpu.__file__


def test_the_calls_of_the_plan_have_their_most_telling_steps_first_and_the_page_names_each():
    by_slice: dict[str, list[str]] = {}
    for part, name, _, _ in steps():
        by_slice.setdefault(part, []).append(name)
    assert list(by_slice)[:4] == ["first", "second", "third", "hstu"]
    assert by_slice["first"][:2] == ["kernels", "gpu_tests"]
    assert all(len(set(names)) == len(names) for names in by_slice.values())
    page = (ROOT / "docs/gpu.md").read_text()
    told = set(re.findall(r"`(\w+)`", page[page.index("What each step shows") :]))
    needed = {"kernels", "peers_put", "peers_unpack"}
    for part in ("first", "second", "third", "hstu"):
        assert set(by_slice[part]) - needed <= told, part


def test_without_the_older_sources_a_session_leaves_their_steps_out(tmp_path: Path):
    python = stand_in(tmp_path)
    said = session("lab_old", PYTHON=python, OUT=str(tmp_path), OLD=str(tmp_path / "none"))
    assert said.returncode == 0, said.stdout
    assert "prepare" in said.stdout
    assert [step["step"] for step in json.loads((tmp_path / "lab_old.json").read_text())] == [
        "lab_new"
    ]


STAND_IN = """\
#!/usr/bin/env bash
# Python for a session: a step does what its name in the table says.
case "$*" in
  -\\ *|-c\\ *) exec {python} "$@" ;;
  *"{hangs}"*) trap '' TERM; sleep 300 & echo $! >{folder}/left; echo half; wait; sleep 300 ;;
  *"{fails}"*) echo broken >&2; exit 3 ;;
esac
while (($# > 1)); do [[ $1 == --json ]] && echo '{{"ms": 1.5}}' >"$2"; shift; done
"""


def stand_in(folder: Path, *, hangs: str = "no such", fails: str = "no such") -> str:
    program = folder / "python"
    told = {"python": sys.executable, "folder": folder, "hangs": hangs, "fails": fails}
    program.write_text(textwrap.dedent(STAND_IN).format(**told))
    program.chmod(0o755)
    return str(program)


def outcome(folder: Path) -> dict[str, dict[str, Any]]:
    return {step["step"]: step for step in json.loads((folder / "host.json").read_text())}


def test_a_step_that_fails_leaves_the_others_their_turn(tmp_path: Path):
    python = stand_in(tmp_path, fails="dispatch --keys 10")
    said = session("host", PYTHON=python, OUT=str(tmp_path))
    assert said.returncode == 1
    found = outcome(tmp_path)
    assert {name: of["status"] for name, of in found.items()} == {
        "dispatch": 0,
        "dispatch_10_keys": 3,
        "dispatch_serial": 0,
        "dispatch_4_micros": 0,
        "kernels_alone": 0,
    }
    assert found["dispatch_serial"]["figures"] == {"ms": 1.5}
    assert found["dispatch_10_keys"]["figures"] is None
    assert "broken" in (tmp_path / "host.log").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"python", "host.json", "host.log"}


def test_a_step_that_never_ends_is_killed_with_all_that_it_started(tmp_path: Path):
    python = stand_in(tmp_path, hangs="--plan serial")
    said = session("host", PYTHON=python, OUT=str(tmp_path), LIMIT="4", LEAST="1", GRACE="1")
    assert said.returncode == 1
    found = outcome(tmp_path)
    assert [of["status"] for of in found.values()][:2] == [0, 0]
    assert found["dispatch_serial"]["status"] == 137
    assert "half" in (tmp_path / "host.log").read_text(), "what it said is kept"
    assert not lives(int((tmp_path / "left").read_text()))
    assert set(found) == {
        *("dispatch", "dispatch_10_keys", "dispatch_serial", "dispatch_4_micros", "kernels_alone")
    }


def test_an_unknown_slice_is_refused():
    said = session("fourth")
    assert said.returncode == 2
    assert "there is no slice 'fourth'" in said.stderr
