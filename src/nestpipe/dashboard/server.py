"""Serves the page of a run: `nestpipe show` in its own process, `train --dashboard` in a child.

The child reads the record like anybody else, so whoever looks at the page takes nothing from
training but a share of one core. It ends with training, once open pages know how that ended.
Run as `python -m nestpipe.dashboard.server RUN` with a listening socket as its third file.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nestpipe.config.access import TOKEN_VARIABLE, is_authorised, read_token, require_token
from nestpipe.dashboard.page import LIVE, live_page, policy
from nestpipe.dashboard.view import RunFolder, page_data
from nestpipe.errors import ConfigError, NestpipeError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8907
IDLE_TIMEOUT_S = 30
"""How long a connection may say nothing."""
LINGER_S = 5.0
"""How long the child of a run that has ended waits for open pages to hear of it."""
WATCHED_S = 5.0
"""A page that asked within this time is open."""
LEAVE_S = LINGER_S + 5.0
ADDRESS = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]*):)?(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is served."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    chosen: bool = True
    """Whether the user chose the port; else another will do where it is taken."""

    @classmethod
    def parsed(cls, text: str) -> Address:
        """From `HOST:PORT`, or a port alone; empty: this machine, at a port that is free."""
        if not text:
            return cls(chosen=False)
        found = ADDRESS.fullmatch(text)
        if found is None or int(found["port"]) > 65535:
            raise ConfigError(
                f"the address of the dashboard is {text!r}; write HOST:PORT, such as "
                f"{DEFAULT_HOST}:{DEFAULT_PORT}, or nothing"
            )
        return cls(found["host"] or DEFAULT_HOST, int(found["port"]))


def with_address(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments, where `--dashboard` without an address gets an empty one.

    What follows it may be a config or another flag.
    """
    found: list[str] = []
    for place, argument in enumerate(arguments):
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        bare = argument == "--dashboard" and ADDRESS.fullmatch(following) is None
        found.append("--dashboard=" if bare else argument)
    return found


def checked_token(address: Address, token_file: Path | None, instead: str) -> str | None:
    """The token of callers; beyond this machine there must be one, or else ask for `instead`."""
    token = read_token(token_file, os.environ)
    require_token(address.host, token, instead)
    return token


def listen(address: Address) -> socket.socket:
    """A socket at that address, or near the one that nobody chose."""
    host = address.host.strip("[]")
    for port in (address.port, *([] if address.chosen else [0])):
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            reason = error.strerror or str(error)
    raise ConfigError(
        f"cannot serve the dashboard at {address.host}:{address.port}: {reason}; "
        "choose another address"
    )


def url_of(listening: socket.socket) -> str:
    """What to open in a browser."""
    host, port = listening.getsockname()[:2]
    wild = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}
    host = wild.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}/"


class RunServer(ThreadingHTTPServer):
    """Answers for one run: the page, its data as JSON, and metrics."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, folder: RunFolder, token: str | None) -> None:
        super().__init__(listening.getsockname()[:2], _Answer, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.token = token
        self.page = live_page(needs_token=token is not None).encode()
        self.asked_at = 0.0
        """When a page last asked for news, ..."""
        self.told_end = False
        """... and whether it has heard how the run ended."""
        self._folder, self._lock = folder, threading.Lock()

    def data(self) -> tuple[bytes, str]:
        """All that the page shows, compressed, and a tag that changes with it."""
        with self._lock:  # readers remember how far they are
            found = page_data(self._folder.read())
        self.asked_at = time.monotonic()
        self.told_end = found["run"]["status"] != "running"
        text = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
        return gzip.compress(text, 4, mtime=0), f'"{hashlib.sha256(text).hexdigest()[:20]}"'

    def metrics(self) -> bytes:
        """For Prometheus."""
        from nestpipe.dashboard.metrics import exposition

        with self._lock:
            return exposition(self._folder.read())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no news."""


class _Answer(BaseHTTPRequestHandler):
    """One connection."""

    server: RunServer  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "nestpipe", ""
    timeout = IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif path not in ("/v1/run", "/metrics"):
            self._say(HTTPStatus.NOT_FOUND, "there is only /, /v1/run and /metrics")
        elif not is_authorised(self._authorization(), self.server.token):
            sentence = "the token is missing or wrong; send Authorization: Bearer TOKEN"
            self._say(HTTPStatus.UNAUTHORIZED, sentence)
        else:
            self._read(path)

    def _authorization(self) -> bytes | None:
        given = self.headers.get("Authorization")
        return None if given is None else given.encode("latin-1", "replace")

    def _read(self, path: str) -> None:
        try:
            if path == "/metrics":
                kind = "text/plain; version=0.0.4; charset=utf-8"
                self._send(HTTPStatus.OK, self.server.metrics(), kind)
                return
            body, tag = self.server.data()
        except NestpipeError as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            return
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", ETag=tag)
        else:
            more = {"ETag": tag, "Content-Encoding": "gzip"}
            self._send(HTTPStatus.OK, body, "application/json", **more)

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        body = json.dumps({"error": sentence}).encode()
        more = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
        self._send(status, body, "application/json", **more)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, **more: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy(LIVE),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            **more,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Nobody wants a line for every question."""


@contextmanager
def beside_training(
    run: Path, listening: socket.socket, token: str | None
) -> Generator[subprocess.Popen[bytes]]:
    """Inside, a child serves the run; it ends on its own when this process does."""
    environment = dict(os.environ)
    environment.pop(TOKEN_VARIABLE, None)
    if token is not None:
        environment[TOKEN_VARIABLE] = token
    # Not a rank of anything, whatever this process is.
    environment.pop("RANK", None)
    command = [sys.executable, "-m", "nestpipe.dashboard.server", str(run), str(listening.fileno())]
    with listening:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=[listening.fileno()],
            start_new_session=True,  # Ctrl-C is for training, which then ends this one
        )
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _serve_beside(run: Path, listening: socket.socket) -> None:
    """The child: serve until training is over and open pages know it."""
    with suppress(OSError):
        os.nice(10)
    while True:  # the record may be about to be written
        try:
            folder = RunFolder(run)
            break
        except ConfigError:
            if not _parent_lives(0.2):
                return
    server = RunServer(listening, folder, read_token(None, os.environ))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while _parent_lives(1.0):
        pass
    over = time.monotonic()
    while time.monotonic() < over + LINGER_S:
        open_page = server.asked_at > over - WATCHED_S
        if server.told_end or not open_page:
            break
        time.sleep(0.05)
    time.sleep(0.05)  # the answer that told it is on its way
    server.shutdown()


def _parent_lives(wait_s: float) -> bool:
    """Whether the other end of the pipe is open; waits so long for it to be closed."""
    import select

    ready, _, _ = select.select([sys.stdin.buffer.raw], [], [], wait_s)  # type: ignore[attr-defined]
    return not ready or bool(os.read(sys.stdin.fileno(), 1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        _serve_beside(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
