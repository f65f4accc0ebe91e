"""The page of a run in a real browser: live, with a long history, and when the run has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nestpipe.dashboard.record import RecordWriter, file_of
from nestpipe.dashboard.server import Address, RunServer, listen, report_page, url_of
from nestpipe.dashboard.view import RunFolder, page_data
from support.chromium import Page, chromium
from support.recorded_runs import about, point, written_run

pytestmark = pytest.mark.needs("chromium")
SHOWN = "!document.getElementById('page').hidden && document.querySelectorAll('svg').length >= 8"
TEXT = "document.getElementById('{}').textContent"
SIZES = [(1366, 900, False), (390, 844, True)]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as opened:
        opened.resize(1366, 900)
        yield opened


@contextmanager
def served(folder: Path, token: str | None = None) -> Iterator[str]:
    listening = listen(Address(port=0))
    with RunServer(listening, RunFolder(folder), token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield url_of(listening)
        finally:
            server.shutdown()
            thread.join()


def asked_only(page: Page, url: str) -> bool:
    """Whether nothing but the run's own server was asked for anything."""
    own = urlsplit(url).netloc
    return bool(page.requests) and {urlsplit(asked).netloc for asked in page.requests} == {own}


def test_ten_thousand_steps_are_shown_on_a_laptop_and_a_phone(page: Page, tmp_path: Path):
    with served(written_run(tmp_path / "run", 10_000, ranks=2)) as url:
        for width, height, phone in SIZES:
            for scheme in ("light", "dark"):
                page.resize(width, height, phone=phone)
                page.prefer(scheme)
                page.open(url, SHOWN)
                assert page.evaluate(TEXT.format("progress")) == "step 10,000 of 10,000"
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, "nothing is cut off, and the page does not scroll sideways"
                elements = page.evaluate("document.querySelectorAll('svg *').length")
                assert 100 < elements < 10_000, "drawn, and few enough to stay fast"
        assert page.complaints == []
        assert asked_only(page, url)


def test_a_run_that_goes_on_moves_on_the_page(page: Page, tmp_path: Path):
    folder = written_run(tmp_path / "run", 20, end=None)
    writer = RecordWriter(file_of(folder / "record", 0), about(0, 1, 40), first_step=20)
    with served(folder) as url:
        page.open(url, SHOWN)
        assert page.evaluate(TEXT.format("progress")) == "step 20 of 40"
        writer.add("point", 30, point(30, 0))
        page.until(lambda: page.evaluate(TEXT.format("progress")) == "step 30 of 40")
        writer.add("point", 40, point(40, 0))
        writer.add("end", 40, {"status": "failed", "sentence": "a peer was lost"})
        page.until(lambda: page.evaluate(TEXT.format("status")) == "failed")
        assert "A peer was lost" in page.evaluate(TEXT.format("notices"))
        assert page.complaints == []
        assert asked_only(page, url)


def test_a_pointer_over_a_chart_shows_values(page: Page, tmp_path: Path):
    with served(written_run(tmp_path / "run", 100)) as url:
        page.open(url, SHOWN)
        place = page.evaluate(
            "(() => { const r = document.querySelector('.plot svg').getBoundingClientRect();"
            " return [r.left + r.width * 0.6, r.top + r.height / 2]; })()"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        tip = "document.querySelector('.tip').textContent"
        page.until(lambda: page.evaluate(tip).startswith("step "))
        assert "training" in page.evaluate(tip)
        assert page.complaints == []


def test_a_run_behind_a_token_is_shown_to_who_has_it(page: Page, tmp_path: Path):
    token = "0123456789abcdef"
    with served(written_run(tmp_path / "run", 10), token) as url:
        page.open(url, "!document.getElementById('gate').hidden")
        assert [urlsplit(asked).path for asked in page.requests] == ["/"]
        page.evaluate(
            f"document.getElementById('token').value = '{token}';"
            "document.querySelector('#gate form').requestSubmit()"
        )
        page.until(lambda: page.evaluate(SHOWN))
        assert page.complaints == []


def test_a_report_is_a_file_that_asks_nobody(page: Page, tmp_path: Path):
    report = tmp_path / "report.html"
    run = written_run(tmp_path / "run", 10_000, ranks=2)
    report.write_text(report_page(page_data(RunFolder(run).read())))
    assert report.stat().st_size < 500_000
    page.open(report.as_uri(), SHOWN)
    assert page.requests == [report.as_uri()]
    assert page.complaints == []


def test_a_run_without_steps_says_what_is_missing(page: Page, tmp_path: Path):
    with served(written_run(tmp_path / "run", 0, end=None)) as url:
        page.open(url, "document.querySelectorAll('.empty').length >= 8")
        assert page.complaints == []


def test_a_run_that_was_killed_is_lost_on_its_own_page(page: Page, tmp_path: Path):
    run = tmp_path / "run"
    settings = (
        *("data.synthetic.samples=4000000", "data.synthetic.num_tables=2", "model.dim=4"),
        *("run.batch=64", "run.device=cpu", f"run.record={run}"),
    )
    flags = [word for one in settings for word in ("--set", one)]
    command = [sys.executable, "-m", "nestpipe", "train", "--dashboard", "127.0.0.1:0", *flags]
    training = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert training.stderr is not None
        url = training.stderr.readline().removeprefix("dashboard: ").strip()
        page.open(url, SHOWN)
        assert page.evaluate(TEXT.format("status")) == "running"
        os.kill(training.pid, signal.SIGKILL)
        training.wait()
        page.until(lambda: page.evaluate(TEXT.format("status")) == "lost")
        assert "ended without a word" in page.evaluate(TEXT.format("notices"))
        assert page.complaints == []
    finally:
        training.kill()
        training.wait()
        assert training.stderr is not None
        training.stderr.close()


def test_the_page_says_what_limits_a_step(page: Page, tmp_path: Path):
    with served(written_run(tmp_path / "run", 100)) as url:
        page.open(url, SHOWN)
        said = page.evaluate("document.querySelector('.card').textContent")
        assert "What limits a step" in said
        assert "Compute: forward, backward and updates" in said
        shown = page.evaluate("document.querySelector('.split').getAttribute('aria-label')")
        assert shown.startswith("compute and updates 12 ms (77.4 %), exchange between ranks 2 ms")
        assert page.complaints == []


def test_the_keyboard_walks_over_a_chart_and_news_do_not_take_it_away(page: Page, tmp_path: Path):
    def press(key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    tip = "document.activeElement.parentNode.querySelector('.tip').textContent"
    folder = written_run(tmp_path / "run", 20, end=None)
    writer = RecordWriter(file_of(folder / "record", 0), about(0, 1, 40), first_step=20)
    with served(folder) as url:
        page.open(url, SHOWN)
        page.evaluate("document.querySelector('.plot svg').focus()")
        press("ArrowLeft")
        assert page.evaluate(tip).startswith("step 20")
        press("ArrowLeft")
        assert page.evaluate(tip).startswith("step 19")
        writer.add("point", 30, point(30, 0))
        page.until(lambda: page.evaluate(TEXT.format("progress")) == "step 30 of 40")
        assert page.evaluate(tip).startswith("step 19"), "it stays where it was"
        press("End")
        assert page.evaluate(tip).startswith("step 30")
        page.evaluate("[...document.querySelectorAll('.wide .plot svg')].at(0).focus()")
        press("ArrowRight")
        assert page.evaluate(tip).startswith("retrieve 21")
        assert page.complaints == []


def test_losses_that_are_not_finite_are_seen(page: Page, tmp_path: Path):
    folder = written_run(tmp_path / "run", 20, end=None)
    writer = RecordWriter(file_of(folder / "record", 0), about(0, 1, 40), first_step=20)
    writer.add("point", 30, {**point(30, 0), "finite": 20, "loss": point(20, 0)["loss"]})
    with served(folder) as url:
        page.open(url, SHOWN)
        assert "loss of 10 of 30 steps was NaN" in page.evaluate(TEXT.format("notices"))
        assert page.evaluate("document.querySelector('.tile dd').textContent") == "NaN"
        assert page.complaints == []


def test_choices_of_an_adaptive_run_are_shown_and_those_of_others_are_not(
    page: Page, tmp_path: Path
):
    hidden = "[...document.querySelectorAll('h2')].find(h => h.textContent === 'Choices')"
    hidden += ".parentNode.hidden"
    folder = written_run(tmp_path / "run", 20, end=None)
    writer = RecordWriter(file_of(folder / "record", 0), about(0, 1, 40), first_step=20)
    with served(folder) as url:
        page.open(url, SHOWN)
        assert page.evaluate(hidden)
        settings = {"first": 1.0, "last": 1.0, "device_memory": "auto", "reason": "the fastest"}
        writer.add("choice", 20, {"micro_batches": 4, **settings})
        page.until(lambda: not page.evaluate(hidden))
        assert "the fastest" in page.evaluate("document.querySelector('.reasons').textContent")
        assert page.complaints == []


def test_long_names_do_not_widen_the_page(page: Page, tmp_path: Path):
    folder = written_run(tmp_path / ("a-run-" * 30), 20, end=None)
    long = {**about(0, 1, 40), "model": "M" * 120}
    writer = RecordWriter(file_of(folder / "record", 0), long, first_step=20)
    writer.add("point", 30, {**point(30, 0), "tables": {"t" * 100: 5, "u" * 100: 6}})
    with served(folder) as url:
        for width, height, phone in SIZES:
            page.resize(width, height, phone=phone)
            page.open(url, SHOWN)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
