"""MovieLens runs side by side: who is done, who met the mark, and what is told at the limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tools import load_tool

TOOL: Any = load_tool("quality_runs")
TRAINS = """\
import json, signal, sys, time
figures, seed, hit, stopped = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), False
def end(*_):
    global stopped
    stopped = True
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while seed == 2 and not stopped:
    time.sleep(0.01)
if seed == 3:
    sys.exit("error: out of memory")
found = {"steps": 7, "stopped": stopped, "metrics": {"hr@10": hit, "ndcg@10": 0.2, "auc": 1.0}}
open(figures, "w").write(json.dumps(found))
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ratings; what trains is a stand-in that waits for its end if its seed is 2."""
    (tmp_path / "ratings.dat").write_text("1::1::5::1\n")

    def start(run: Any, _: Any) -> subprocess.Popen[bytes]:
        hit = {"honest": 0.31, "published": 0.3, "fuxi": 0.29}[run.recipe]
        words = [sys.executable, "-c", TRAINS, str(run.figures), str(run.seed), str(hit)]
        with (run.work / f"{run.name}.txt").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        while b"ready" not in (run.work / f"{run.name}.txt").read_bytes():
            assert process.poll() is None or run.seed != 2
            if process.poll() is not None:
                break
        return process

    monkeypatch.setattr(TOOL.Run, "start", start)
    return tmp_path


def outcome(data: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    target = data / "out.json"
    given = ["--data", str(data), "--work", str(data / "work"), "--json", str(target), *words]
    status = TOOL.main(given)
    return status, json.loads(target.read_text())["runs"]


def test_all_recipes_and_seeds_run_and_are_held_against_their_marks(data: Path):
    status, runs = outcome(data, "--seeds", "0,1")
    assert status == 0
    assert [(of["recipe"], of["seed"]) for of in runs] == [
        (recipe, seed) for seed in (0, 1) for recipe in ("honest", "published", "fuxi")
    ]
    assert all(of["done"] and of["steps"] == 7 and "auc" not in of for of in runs)
    met = {of["recipe"]: of["met"] for of in runs}
    assert met == {
        "honest": {"hr@10": True}, "published": {"hr@10": False, "ndcg@10": True}, "fuxi": {}
    }  # fmt: skip


def test_a_run_that_the_limit_ends_is_not_done(data: Path, capsys: pytest.CaptureFixture[str]):
    status, runs = outcome(data, "--seeds", "2", "--recipes", "honest", "--limit", "0")
    assert status == 1
    assert not runs[0]["done"]
    assert runs[0]["hr@10"] == 0.31
    assert "not done, 7 steps" in capsys.readouterr().out


def test_a_run_that_fails_says_why(data: Path, capsys: pytest.CaptureFixture[str]):
    status, runs = outcome(data, "--seeds", "3", "--recipes", "fuxi")
    assert status == 1
    assert runs[0]["said"] == ["error: out of memory"]
    assert "out of memory" in capsys.readouterr().out


def test_what_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert TOOL.main(["--data", str(tmp_path)]) == 2
    assert "has no ratings.dat" in capsys.readouterr().err
    for wrong in (["--recipes", "best"], ["--seeds", "x"]):
        with pytest.raises(SystemExit, match="2"):
            TOOL.parse(["--data", str(tmp_path), *wrong])
