"""The page holds all that it needs, and lets the browser load nothing else."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nestpipe.dashboard.server import live_page, report_page
from nestpipe.dashboard.view import RunFolder, page_data
from support.recorded_runs import written_run

LOADS = ("src", "href", "action", "data", "poster", "srcset", "formaction", "background")


class Parts(html.parser.HTMLParser):
    """What a page would load, and its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.policy = ""
        self._kind: str | None = None
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [str(given[name]) for name in LOADS if name in given]
        self._inside, self._kind = tag == "script", given.get("type")
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts.append((self._kind, data))

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def report(folder: Path) -> str:
    return report_page(page_data(RunFolder(folder).read()))


@pytest.fixture(params=["live", "report"])
def page(request: Any, tmp_path: Path) -> str:
    if request.param == "live":
        return live_page(needs_token=False)
    return report(written_run(tmp_path, 20))


def test_nothing_is_loaded_from_elsewhere(page: str):
    parts = Parts(page)
    assert parts.loads == ["data:,"], "the empty icon"
    code = page.replace("http://www.w3.org/2000/svg", "")  # the name of a format, not a place
    assert not re.findall(r"https?:|//\w+\.\w|@import|url\(|import\(|importScripts", code)


def test_the_browser_runs_this_script_alone(page: str):
    parts = Parts(page)
    (script,) = [text for kind, text in parts.scripts if kind is None]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in parts.policy
    assert parts.policy.startswith("default-src 'none'")


def test_a_report_asks_nobody_and_has_the_data_of_the_run(tmp_path: Path):
    page = report(written_run(tmp_path, 20))
    parts = Parts(page)
    assert "connect-src 'none'" in parts.policy
    (data,) = [json.loads(text) for kind, text in parts.scripts if kind == "application/json"]
    assert (data["live"], data["run"]["step"]) == (False, 20)


def test_a_live_page_has_no_data_and_says_whether_it_needs_a_token():
    for needed in (False, True):
        (data,) = [
            json.loads(text)
            for kind, text in Parts(live_page(needs_token=needed)).scripts
            if kind == "application/json"
        ]
        assert data == {"live": True, "needs_token": needed}


def test_names_of_a_run_cannot_end_its_script(tmp_path: Path):
    folder = tmp_path / "<!-- <script> run"
    page = report(written_run(folder, 5))
    (data,) = [json.loads(text) for kind, text in Parts(page).scripts if kind == "application/json"]
    assert data["run"]["name"] == folder.name
