"""`nestpipe show`, `train --dashboard`, `train --report` and `bench dashboard` from the outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from nestpipe.bench.checkpoint import DashboardReading
from nestpipe.cli.app import main
from nestpipe.dashboard.server import Address, listen
from support.recorded_runs import written_run

SETTINGS = (
    *("data.synthetic.samples=64", "data.synthetic.test_samples=8", "data.synthetic.num_tables=2"),
    *("model.dim=4", "model.bottom=[4]", "model.top=[4]", "run.batch=16", "run.device=cpu"),
)
SMALL = [word for one in SETTINGS for word in ("--set", one)]
Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, standard output and standard error of a command, in this process."""

    def go(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return stop.value.code, printed.out, printed.err

    return go


def inlined(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_a_run_is_served_while_it_trains_and_leaves_a_report(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    report = tmp_path / "report.html"
    flags = ("--dashboard", "127.0.0.1:0", "--report", report)
    status, _, said = run("train", *SMALL, *flags)
    assert status == 0, said
    assert re.search(r"^dashboard: http://127\.0\.0\.1:\d+/$", said, re.MULTILINE)
    data = inlined(report.read_text())
    assert (data["run"]["status"], data["run"]["step"]) == ("finished", 4)
    left = list((tmp_path / "temporary").glob("nestpipe-run-*"))
    assert not left, "a record that nobody asked for is gone"


def test_all_ranks_are_in_the_report(run: Run, tmp_path: Path):
    report = tmp_path / "report.html"
    command = [sys.executable, "-m", "nestpipe", "train", *SMALL, "--ranks", "2"]
    done = subprocess.run(
        [*command, "--report", str(report)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [row["rank"] for row in inlined(report.read_text())["ranks"]] == [0, 1]


def test_a_run_that_fails_leaves_a_report_that_says_why(run: Run, tmp_path: Path):
    report = tmp_path / "report.html"
    wild = ("--set", "rows.lr=1e30", "--set", "dense.lr=1e30", "--set", "rows.optimizer=sgd")
    status, _, said = run("train", *SMALL, *wild, "--report", report)
    assert status == 3, said
    about = inlined(report.read_text())["run"]
    assert about["status"] == "failed"
    assert f"error: {about['sentence']}" in said


def test_show_writes_a_report_of_a_finished_run(run: Run, tmp_path: Path):
    folder = tmp_path / "run"
    assert run("train", *SMALL, "--set", f"run.checkpoint={folder}")[0] == 0
    status, _, said = run("show", folder, "--html", tmp_path / "report.html")
    assert status == 0, said
    data = inlined((tmp_path / "report.html").read_text())
    assert (data["run"]["name"], data["run"]["step"]) == ("run", 4)
    assert run("show", folder / "step-00000004", "--html", "-")[1].startswith("<!doctype html>")


def test_show_serves_until_it_is_interrupted(tmp_path: Path):
    written_run(tmp_path, 5)
    command = [sys.executable, "-m", "nestpipe", "show", str(tmp_path), "--port", "0"]
    # A shell may have told its children to ignore it.
    restored = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=restored
    ) as showing:
        assert showing.stdout is not None
        said = showing.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+/); Ctrl-C ends it", said)
        assert found is not None, said
        with urlopen(found[1], timeout=30) as answer:
            assert answer.status == 200
        showing.send_signal(signal.SIGINT)
        assert showing.wait(30) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "nowhere"], "there is no folder 'nowhere'"),
        (["show", "{empty}"], "holds no record of a run"),
        (["show", "{run}", "--host", "0.0.0.0"], "no token; set NESTPIPE_TOKEN or --token-file"),
        (["show", "{run}", "--port", "{taken}"], "choose another address"),
        (["show", "{run}", "--port", "70000"], "less than or equal to 65535"),
        (["show", "{run}", "--html", "{empty}"], "choose another file"),
        (["train", "--dashboard", "0.0.0.0:1"], "or use --dashboard 127.0.0.1:1"),
        (["train", "--dashboard=here"], "write HOST:PORT"),
        (["train", "--dashboard", "--set", "run.record=off"], "run.record is 'off'"),
        (["train", "--report", "nowhere/report.html"], "name a file in an existing folder"),
        (["train", "--report", "r.html", "--set", "run.record=off"], "which --report reads"),
        (["train", "--dashboard", "{taken}"], "choose another address"),
        (["train", "--dashboard", "--token-file", "nowhere"], "cannot read a token from 'nowhere'"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
):
    monkeypatch.delenv("NESTPIPE_TOKEN", raising=False)
    (tmp_path / "empty").mkdir()
    written_run(tmp_path / "run", 3)
    with listen(Address(port=0)) as taken:
        places = {"empty": tmp_path / "empty", "run": tmp_path / "run"}
        port = taken.getsockname()[1]
        status, out, said = run(*(word.format(**places, taken=port) for word in arguments))
    assert (status, out) == (2, "")
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert sentence in said


def test_turns_with_and_without_the_dashboard_are_compared(run: Run, tmp_path: Path):
    figures = tmp_path / "figures.json"
    sizes = ("--steps", 3, "--rounds", 2, "--json", figures)
    status, out, said = run("bench", "dashboard", *sizes, *SMALL)
    assert status == 0, said
    found = json.loads(figures.read_text())
    assert len(found["without"]) == len(found["with_it"]) == 2
    assert all(speed > 0 for speed in (*found["without"], *found["with_it"]))
    assert "throughput lost" in out
    assert found["answers"] >= 2, "every turn with the dashboard begins once the page has an answer"
    assert found["server_share"] >= 0


def test_the_cost_is_the_median_over_pairs_of_turns():
    reading = DashboardReading((100.0, 50.0, 10.0), (99.0, 50.0, 11.0), 0.005, 0.01, 3)
    assert reading.cost == pytest.approx(0.0)
    assert reading.middle_half == pytest.approx((-0.05, 0.005))
