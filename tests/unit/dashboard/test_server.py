"""The server of the page: what it answers, whom, and when it ends."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from nestpipe.dashboard.server import (
    DEFAULT_PORT,
    Address,
    RunServer,
    beside_training,
    checked_token,
    listen,
    url_of,
    with_address,
)
from nestpipe.dashboard.view import RunFolder
from nestpipe.errors import ConfigError
from support.recorded_runs import written_run

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
