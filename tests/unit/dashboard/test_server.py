"""The server of the page: what it answers, whom, and when it ends."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nestpipe.dashboard.record import RecordWriter, file_of
from nestpipe.dashboard.server import (
    DEFAULT_PORT,
    METRICS,
    Address,
    RunServer,
    beside_training,
    checked_token,
    exposition,
    listen,
    live_page,
    report_page,
    url_of,
    with_address,
)
from nestpipe.dashboard.view import RunFolder, RunRecords, page_data
from nestpipe.errors import ConfigError
from support.recorded_runs import COMPUTE_MS, STEP_MS, about, written_run

TOKEN = "0123456789abcdef"


@contextmanager
def served(folder: Path, token: str | None = None) -> Iterator[tuple[str, int]]:
    """Serve a run at a free port of this machine."""
    listening = listen(Address(port=0))
    with RunServer(listening, RunFolder(folder), token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield listening.getsockname()[:2]
        finally:
            server.shutdown()
            thread.join()


def ask(
    at: tuple[str, int], path: str, method: str = "GET", **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    connection = http.client.HTTPConnection(*at, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_asks_for_its_data_and_hears_when_there_are_no_news(tmp_path: Path):
    with served(written_run(tmp_path, 30)) as at:
        status, headers, body = ask(at, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert body.startswith(b"<!doctype html>")
        status, headers, body = ask(at, "/v1/run")
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert json.loads(gzip.decompress(body))["run"]["step"] == 30
        again = ask(at, "/v1/run", **{"If-None-Match": headers["ETag"]})
        assert (again[0], again[2]) == (304, b"")
        status, _, body = ask(at, "/metrics")
        assert status == 200
        assert b'nestpipe_train_steps_total{rank="0"} 30.0' in body


def test_many_open_pages_cost_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was made is given to all who ask, until so many times as long as it took have passed."""
    made: list[float] = []

    def counted(run: RunRecords) -> dict[str, Any]:
        made.append(1)
        return page_data(run)

    monkeypatch.setattr("nestpipe.dashboard.server.page_data", counted)
    monkeypatch.setattr("nestpipe.dashboard.server.REST", 1_000_000)
    folder = written_run(tmp_path, 20, end=None)
    listening = listen(Address(port=0))
    with RunServer(listening, RunFolder(folder), None) as server:
        answers = {server.data() for _ in range(20)}
        assert (len(answers), len(made)) == (1, 1)
        assert not server.told_end
        writer = RecordWriter(file_of(folder / "record", 0), about(0, 1, 20), first_step=20)
        writer.add("end", 20, {"status": "finished", "sentence": ""})
        server.data()
        assert not server.told_end
        server.hurried = True  # training is over
        assert server.data() not in answers
        assert server.told_end


def test_data_and_metrics_need_the_token_and_the_empty_page_does_not(tmp_path: Path):
    with served(written_run(tmp_path, 3), TOKEN) as at:
        status, _, page = ask(at, "/")
        assert status == 200
        assert b"needs_token" in page
        assert TOKEN.encode() not in page
        for path in ("/v1/run", "/metrics", "/v1/run?token=" + TOKEN):
            for given in ({}, {"Authorization": "Bearer wrong-token-here"}):
                status, headers, _ = ask(at, path, **given)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert ask(at, "/v1/run", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_other_pages_and_methods_are_refused(tmp_path: Path):
    with served(written_run(tmp_path, 3)) as at:
        assert ask(at, "/etc/passwd")[0] == 404
        assert ask(at, "/../record")[0] == 404
        assert ask(at, "/v1/run", "POST")[0] == 501
        assert ask(at, "/", "HEAD")[::2] == (200, b"")


def test_a_record_that_is_damaged_meanwhile_is_a_sentence_and_not_the_end(tmp_path: Path):
    written_run(tmp_path, 3)
    file = tmp_path / "record" / "rank-00000.jsonl"
    with served(tmp_path) as at:
        good = file.read_text()
        file.write_text("hello\n")
        status, _, body = ask(at, "/v1/run")
        assert status == 503
        assert "is not the record of a run" in json.loads(body)["error"]
        file.write_text(good)
        assert ask(at, "/v1/run")[0] == 200


@pytest.mark.parametrize(
    ("text", "host", "port", "chosen"),
    [
        ("", "127.0.0.1", DEFAULT_PORT, False),
        ("9000", "127.0.0.1", 9000, True),
        (":9000", "127.0.0.1", 9000, True),
        ("0.0.0.0:9000", "0.0.0.0", 9000, True),
        ("host.example:1", "host.example", 1, True),
        ("[::1]:9000", "[::1]", 9000, True),
    ],
)
def test_addresses_are_read(text: str, host: str, port: int, chosen: bool):
    assert Address.parsed(text) == Address(host, port, chosen)


@pytest.mark.parametrize("text", ["x", "x:y", "host:99999", "a:b:1", "http://x:1", "host:"])
def test_what_is_no_address_is_refused_in_a_sentence(text: str):
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        Address.parsed(text)


def test_beyond_this_machine_there_must_be_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NESTPIPE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"no token; set NESTPIPE_TOKEN .* or use --host 1"):
        checked_token(Address("0.0.0.0", 1), None, "--host 1")
    assert checked_token(Address(), None, "") is None
    (tmp_path / "token").write_text(TOKEN)
    assert checked_token(Address("0.0.0.0", 1), tmp_path / "token", "") == TOKEN


def test_a_port_that_is_taken_is_refused_only_where_it_was_chosen():
    with listen(Address(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another address"):
            listen(Address(port=port))
        with listen(Address(port=port, chosen=False)) as other:
            assert other.getsockname()[1] != port
            assert url_of(other) == f"http://127.0.0.1:{other.getsockname()[1]}/"


def test_a_flag_without_an_address_gets_an_empty_one():
    given = ["train", "--dashboard", "c.toml", "--dashboard", "--set", "--dashboard", "8000"]
    assert with_address(given) == [
        *("train", "--dashboard=", "c.toml", "--dashboard=", "--set"),
        *("--dashboard", "8000"),
    ]
    assert with_address(["--dashboard"]) == ["--dashboard="]


def test_the_child_of_a_run_serves_it_and_ends_with_it(tmp_path: Path):
    listening = listen(Address(port=0))
    at = listening.getsockname()[:2]
    with beside_training(tmp_path, listening, TOKEN) as child:
        written_run(tmp_path, 5)  # only now: the child waits for it
        assert ask(at, "/v1/run")[0] == 401
        assert ask(at, "/v1/run", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert child.returncode == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(at, 5):
        pass


def test_the_child_of_a_run_that_never_began_ends_too(tmp_path: Path):
    with beside_training(tmp_path, listen(Address(port=0)), None) as child:
        pass
    assert child.returncode == 0


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


GRAFANA = Path(__file__).resolve().parents[3] / "configs/grafana/nestpipe-training.json"
NAME = re.compile(r"nestpipe_\w+")


def samples(folder: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = exposition(RunFolder(folder).read()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_the_totals_of_every_rank(tmp_path: Path):
    found = samples(written_run(tmp_path, 50, ranks=2))
    for rank in ("0", "1"):
        assert found["nestpipe_train_steps_total", (("rank", rank),)] == 50
        assert found["nestpipe_train_bytes_sent_total", (("rank", rank),)] == 250_000
        seconds = found["nestpipe_train_compute_seconds_total", (("rank", rank),)]
        assert seconds == pytest.approx(50 * COMPUTE_MS / 1e3)
    op = (("op", "rows"), ("rank", "0"))
    assert found["nestpipe_train_exposed_seconds_total", op] == pytest.approx(0.075)
    assert found["nestpipe_train_timed_seconds_total", (("rank", "0"),)] == pytest.approx(
        50 * STEP_MS / 1e3
    )
    assert found["nestpipe_train_table_rows", (("rank", "1"), ("table", "items"))] == 500
    assert found["nestpipe_train_state", (("state", "finished"),)] == 1
    assert found["nestpipe_train_state", (("state", "running"),)] == 0
    evaluated = (("metric", "auc"), ("split", "validation"))
    assert found["nestpipe_train_evaluation", evaluated] == pytest.approx(0.796)


def test_a_run_without_steps_has_a_state_alone(tmp_path: Path):
    names = {name for name, _ in samples(written_run(tmp_path, 0, end=None))}
    assert names == {"nestpipe_train_state", "nestpipe_train_last_sign_seconds"}


def test_every_metric_that_grafana_asks_for_exists():
    board = json.loads(GRAFANA.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in NAME.findall(target["expr"])
    }
    asked |= {name for of in board["templating"]["list"] for name in NAME.findall(of["query"])}
    known = {metric.full_name for metric in METRICS.values()}
    assert asked <= known, f"unknown: {sorted(asked - known)}"
    shown_elsewhere = {"nestpipe_train_steps_total", "nestpipe_train_seconds_total"}
    assert known - asked <= shown_elsewhere, "a metric that no panel shows"


def test_labels_that_grafana_selects_or_groups_by_exist():
    labels = {metric.full_name: metric.labels for metric in METRICS.values()}
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel["targets"]:
            for name, selected in re.findall(r"(nestpipe_\w+)\{([^}]*)\}", target["expr"]):
                for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected):
                    assert label in (*labels[name], "job"), f"{name} has no label {label}"
            grouped = re.findall(r"sum by \((\w+)\) \((?:rate\()?(nestpipe_\w+)", target["expr"])
            for label, name in grouped:
                assert label in labels[name], f"{name} has no label {label}"


def test_panels_do_not_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
