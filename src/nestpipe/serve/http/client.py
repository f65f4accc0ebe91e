"""An HTTP client of a service."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray

from nestpipe.deprecated import METRICS
from nestpipe.errors import CheckpointError, DataError, NestpipeError, RunError, ShedError
from nestpipe.serve.http.bodies import MEDIA_TYPE, cut, pack, split
from nestpipe.serve.types import AdmissionOutcome, Answer, History, Path, RankRequest, Signal

CONNECT_S = 1.0
PREFIX = "nestpipe_"


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """A `RankService` behind a URL: an instance, the built-in router, or nginx.

    Rankings run on `threads` threads, each with a connection that is kept open.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 60.0, threads: int = 32
    ) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=threads),
            trust_env=False,
        )
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="nestpipe-client")
        self._open: set[Future[Answer]] = set()
        self._lock = threading.Lock()

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        """What the service decided; waits for its answer."""
        reply = self._post("/v1/prefetch", signal.user, signal_body(signal))
        return AdmissionOutcome(json.loads(_good(reply).body)["outcome"])

    def rank(self, request: RankRequest) -> Future[Answer]:
        """Scores, or the error that the service answered with."""
        future = self._pool.submit(self._rank, request)
        with self._lock:
            self._open.add(future)
        future.add_done_callback(self._closed)
        return future

    def _rank(self, request: RankRequest) -> Answer:
        body = ranking_body(request)
        return read_answer(_good(self._post("/v1/rank", request.user, body)).body)

    def _closed(self, future: Future[Answer]) -> None:
        with self._lock:
            self._open.discard(future)

    def stats(self) -> dict[str, float]:
        """The numbers of /metrics that have no labels, by the names that an instance uses."""
        return read_stats(_good(self._send("GET", "/metrics")).body.decode())

    def health(self) -> dict[str, Any]:
        """Ready, draining, version; also of a service that is not ready."""
        reply = self._send("GET", "/v1/health")
        return json.loads(reply.body if reply.status == 503 else _good(reply).body)

    def reload(self, checkpoint: str | None = None) -> str:
        """Serve another checkpoint; its version."""
        body = json.dumps({} if checkpoint is None else {"checkpoint": checkpoint}).encode()
        headers = {"content-type": "application/json"}
        reply = self._send("POST", "/v1/reload", body, headers)
        if reply.status == 409:
            raise CheckpointError(_sentence(reply))
        return json.loads(_good(reply).body)["version"]

    def drain(self, timeout_s: float) -> bool:
        """Wait for the answers that are still to come to this client; the service goes on."""
        with self._lock:
            left = list(self._open)
        return not wait_for(left, timeout_s).not_done

    def close(self) -> None:
        """Give the connections back."""
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, user: str, body: bytes) -> Reply:
        headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, "x-user": quote(user, safe="")}
        return self._send("POST", path, body, headers)

    def _send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        try:
            reply = self._http.request(method, path, content=body, headers=headers)
        except httpx.TimeoutException:
            raise RunError(f"{self.url} did not answer in time; look at its log") from None
        except httpx.TransportError as error:
            raise RunError(f"{self.url} did not answer ({error}); is it running?") from None
        return Reply(reply.status_code, reply.headers, reply.content)


def signal_body(signal: Signal) -> bytes:
    """A signal as a binary body."""
    counts, arrays = _history(signal.long)
    return pack({"user": signal.user, "history": counts}, arrays)


def ranking_body(request: RankRequest) -> bytes:
    """A ranking as a binary body."""
    long, long_arrays = _history(request.long)
    short, short_arrays = _history(request.short)
    header: dict[str, Any] = {"user": request.user, "long": long, "short": short}
    header["candidates"] = len(request.candidates_C)
    if request.time is not None:
        header["time"] = int(request.time)
    if request.deadline_s is not None:
        header["deadline_ms"] = request.deadline_s * 1000
    return pack(header, [*long_arrays, *short_arrays, request.candidates_C])


def _history(history: History) -> tuple[dict[str, int], list[NDArray[np.int64]]]:
    if history.times_N is None:
        return {"items": len(history)}, [history.items_N]
    return {"items": len(history), "times": len(history)}, [history.items_N, history.times_N]


def read_answer(body: bytes) -> Answer:
    """The answer of a binary body."""
    text, data = split(body)
    header = json.loads(text)
    (scores_C,) = cut(data, [header["scores"]], np.float32)
    return Answer(
        scores_C,
        Path(header["path"]),
        header["length_used"],
        header["version"],
        header["stages_ms"],
    )


def read_stats(text: str) -> dict[str, float]:
    """The numbers without labels of a page in Prometheus' format, counters without `_total`.

    A metric that was renamed comes under its new name only.
    """
    found: dict[str, float] = {}
    counters = set[str]()
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "#" and line.endswith(" counter"):
            counters.add(line.split()[2])
        elif name.startswith(PREFIX) and "{" not in name:
            own = name.removesuffix("_total") if name in counters else name
            with contextlib.suppress(ValueError):
                found[own.removeprefix(PREFIX)] = float(value)
    return {name: value for name, value in found.items() if name not in METRICS}


def fault_of(reply: Reply) -> NestpipeError | TimeoutError:
    """The error that a reply other than 200 stands for."""
    sentence = _sentence(reply)
    if reply.status == 503 and "x-nestpipe-draining" not in reply.headers:
        return ShedError(sentence, float(reply.headers.get("retry-after", 1)))
    if reply.status == 504:
        return TimeoutError(sentence)
    return DataError(sentence) if reply.status < 500 else RunError(sentence)


def _good(reply: Reply) -> Reply:
    if reply.status != 200:
        raise fault_of(reply)
    return reply


def _sentence(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the service answered with status {reply.status} and no reason"
