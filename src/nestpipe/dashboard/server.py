"""The page of a run and its metrics: `nestpipe show` serves them, `train --dashboard` by a child.

The child reads the record like any other reader, so a viewer takes nothing from training but a
share of one core. It ends with training, once open pages know how that ended. Run as `python -m
nestpipe.dashboard.server RUN` with a listening socket as its third file.

The page is one file of HTML with its style and script inside, live or with its data. Its policy
lets the browser run this script alone, and load nothing from anywhere else. /metrics is the run in
Prometheus' text format, made anew at each scrape.
"""

from __future__ import annotations

import base64
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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nestpipe.config.sections import TOKEN_VARIABLE, is_authorised, read_token, require_token
from nestpipe.dashboard.record import FAILED, FINISHED, RUNNING, STOPPED
from nestpipe.dashboard.view import LOST, RunFolder, RunRecords, page_data
from nestpipe.errors import ConfigError, NestpipeError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LIVE, REPORT = "'self'", "'none'"
"""Where the page may poll for news: its own server, or nowhere."""


@cache
def _part(name: str) -> str:
    return files("nestpipe.dashboard").joinpath(name).read_text("utf-8")


def policy(connect: str) -> str:
    """The page's Content-Security-Policy."""
    digest = hashlib.sha256(_part("page.js").encode()).digest()
    script = f"'sha256-{base64.b64encode(digest).decode()}'"
    return (
        f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _filled(connect: str, data: Any) -> str:
    # In a script `<` could end it or begin a comment; in JSON it stands in strings alone.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _part("page.html").replace("@@POLICY@@", policy(connect))
    return page.replace("@@DATA@@", text).replace("@@SCRIPT@@", _part("page.js"))


def live_page(*, needs_token: bool) -> str:
    """The page without data: it polls its server."""
    return _filled(LIVE, {"live": True, "needs_token": needs_token})


def report_page(data: dict[str, Any]) -> str:
    """The page with its data inside, which needs no server: a report to keep or send."""
    return _filled(REPORT, {"live": False, **data})


STATES = (RUNNING, FINISHED, STOPPED, FAILED, LOST)
Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class RunMetric:
    """A metric of training: its name without `nestpipe_train_`, its labels and its help."""

    name: str
    help: str
    labels: tuple[str, ...] = ("rank",)
    kind: Literal["counter", "gauge"] = "counter"

    @property
    def full_name(self) -> str:
        """As a query asks for it."""
        return f"nestpipe_train_{self.name}" + ("_total" if self.kind == "counter" else "")


PLAIN = {
    "steps": "Batches trained",
    "samples": "Samples trained, of the global batches",
    "rows_read": "Rows read from host memory",
    "rows_refreshed": "Rows refreshed from the batch before",
    "rows_written": "Rows written back to host memory",
    "keys_asked": "Keys asked for, the rank's own included",
    "faults": "Gradients that were NaN or inf, and weights beyond float16",
    "seconds": "Seconds of training by the clock",
}
COUNTED = {
    "bytes_sent": "Bytes sent to other ranks",
    "keys_shared": "Keys that the batch before had too, of those compared",
    "keys_compared": "Keys compared with the batch before",
}
SAMPLED = {
    "batches": ("timed_batches", "Batches whose ops were looked at"),
    "step_ms": ("timed_seconds", "Seconds of those batches"),
    "compute_ms": ("compute_seconds", "Seconds of compute and updates in them"),
}
BY_NAME = {
    "exposed_ms": ("exposed_seconds", "op", "Seconds without compute, by the op waited for"),
    "hidden_ms": ("hidden_seconds", "op", "Seconds of an op under compute"),
    "lane_ms": ("lane_seconds", "lane", "Seconds in which a lane ran an op"),
}
METRICS = {
    made.name: made
    for made in (
        *(RunMetric(name, text) for name, text in (PLAIN | COUNTED).items()),
        *(RunMetric(name, text) for name, text in SAMPLED.values()),
        *(RunMetric(name, text, ("rank", label)) for name, label, text in BY_NAME.values()),
        RunMetric("step", "The last step that was written down", kind="gauge"),
        RunMetric("loss", "Mean loss between the last two points", (), "gauge"),
        RunMetric("table_rows", "Rows of a table in host memory", ("rank", "table"), "gauge"),
        RunMetric("pool_slots", "Slots of the pool", kind="gauge"),
        RunMetric("pool_slots_used", "Slots of the pool that are taken", kind="gauge"),
        RunMetric("evaluation", "A metric of the last evaluation", ("split", "metric"), "gauge"),
        RunMetric("last_sign_seconds", "When the rank last gave a sign of life", kind="gauge"),
        RunMetric("state", "1 for the state that the run is in", ("state",), "gauge"),
    )
}
"""Every metric of training, by its short name."""


def exposition(run: RunRecords) -> bytes:
    """The run as Prometheus reads it."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError:
        raise ConfigError(
            "metrics need prometheus_client, which is not installed; pip install 'nestpipe[train]'"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Families(run))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Families:
    """A collector of one run."""

    def __init__(self, run: RunRecords) -> None:
        self._run = run

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        found: dict[str, list[Sample]] = {name: [] for name in METRICS}
        for name, labels, value in _samples(self._run):
            found[name].append((labels, value))
        for name, samples in found.items():
            about = METRICS[name]
            family = families[about.kind](
                f"nestpipe_train_{name}", about.help, labels=list(about.labels)
            )
            for labels, value in samples:
                family.add_metric([labels[label] for label in about.labels], value)
            yield family


def _samples(run: RunRecords) -> Iterator[tuple[str, Mapping[str, str], float]]:
    state, _ = run.status(time.time())
    yield from (("state", {"state": each}, float(each == state)) for each in STATES)
    for record in run.ranks:
        rank = {"rank": str(record.about.get("rank", 0))}
        yield "last_sign_seconds", rank, run.signs[record.about.get("rank", 0)]
        if record.points:
            yield from _of_point(record.points[-1], rank)
    points = run.first.points
    if points:
        before: Mapping[str, Any] = points[-2] if len(points) > 1 else {}
        steps = points[-1]["finite"] - before.get("finite", 0)
        if steps:
            yield "loss", {}, (points[-1]["loss"] - before.get("loss", 0)) / steps
    if run.first.evaluations:
        newest = run.first.evaluations[-1]
        for metric, value in newest["metrics"].items():
            if value is not None:
                yield "evaluation", {"split": str(newest["split"]), "metric": metric}, value


def _of_point(
    point: Mapping[str, Any], rank: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    yield "step", rank, point["step"]
    yield from ((name, rank, point.get(name, 0)) for name in PLAIN)
    yield from ((name, rank, point.get("counters", {}).get(name, 0)) for name in COUNTED)
    for name, (metric, _) in SAMPLED.items():
        value = point.get(name, 0)
        yield metric, rank, value if name == "batches" else value / 1e3
    for name, (metric, label, _) in BY_NAME.items():
        for kind, spent_ms in point.get(name, {}).items():
            yield metric, {**rank, label: kind}, spent_ms / 1e3
    for table, rows in point.get("tables", {}).items():
        yield "table_rows", {**rank, "table": table}, rows
    if pool := point.get("pool"):
        yield "pool_slots", rank, pool["slots"]
        yield "pool_slots_used", rank, pool["used"]


DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8907
IDLE_TIMEOUT_S = 30
"""How long a connection may say nothing."""
LINGER_S = 5.0
"""How long the child waits for open pages to learn that the run has ended."""
WATCHED_S = 5.0
"""A page that asked within this time is open."""
LEAVE_S = LINGER_S + 5.0
REST = 100
"""While a run goes on, its data are made anew after so many times as long as that took: all open
pages together cost 1 % of one core at most."""
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
    """A socket at that address, or at a nearby port where the user chose none."""
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
    """The URL to open in a browser."""
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
        self.end_reported = False
        """... and whether it was sent how the run ended."""
        self.hurried = False
        """Whether training is over, so that the last news must not wait."""
        self._folder, self._lock = folder, threading.Lock()
        self._made, self._again_at, self._over = (b"", ""), 0.0, False

    def data(self) -> tuple[bytes, str]:
        """All that the page shows, compressed, and a tag that changes with it."""
        with self._lock:  # readers remember how far they are
            if self.hurried or time.monotonic() >= self._again_at:
                self._make()
            self.asked_at = time.monotonic()
            self.end_reported = self._over
            return self._made

    def _make(self) -> None:
        began = time.thread_time()
        found = page_data(self._folder.read())
        text = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
        tag = f'"{hashlib.sha256(text).hexdigest()[:20]}"'
        self._made = gzip.compress(text, 4, mtime=0), tag
        self._over = found["run"]["status"] != RUNNING
        self._again_at = time.monotonic() + REST * (time.thread_time() - began)

    def metrics(self) -> bytes:
        """For Prometheus."""

        with self._lock:
            return exposition(self._folder.read())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that disconnects is not an error."""


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

    do_HEAD = do_GET

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
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        """Log no line per request."""


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
            if not _parent_runs(0.2):
                return
    server = RunServer(listening, folder, read_token(None, os.environ))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while _parent_runs(1.0):
        pass
    over = time.monotonic()
    server.hurried = True
    while time.monotonic() < over + LINGER_S:
        open_page = server.asked_at > over - WATCHED_S
        if server.end_reported or not open_page:
            break
        time.sleep(0.05)
    time.sleep(0.05)  # the answer with the end is on its way
    server.shutdown()


def _parent_runs(wait_s: float) -> bool:
    """Whether the other end of the pipe is open; waits up to a timeout for it to close."""
    import select

    ready, _, _ = select.select([sys.stdin.buffer.raw], [], [], wait_s)  # type: ignore[attr-defined]
    return not ready or bool(os.read(sys.stdin.fileno(), 1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        _serve_beside(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
