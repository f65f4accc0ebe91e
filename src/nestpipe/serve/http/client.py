"""Calls to instances over HTTP: a client of a service, and the backends of the built-in router.

The router passes bodies through unread, and probes the health of its backends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray

from nestpipe.deprecated import METRICS
from nestpipe.errors import CheckpointError, DataError, NestpipeError, RunError, ShedError
from nestpipe.serve.http.bodies import MEDIA_TYPE, cut, pack, split
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.http.requests import WAITED_HEADER
from nestpipe.serve.http.router import Router, RouterSettings
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    History,
    HttpSettings,
    RankPath,
    RankRequest,
    RealClock,
    Signal,
)

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
        RankPath(header["path"]),
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
    """The error of a reply other than 200."""
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


# The backends of the built-in router.


SIGNALS_AT_ONCE = 64
"""Signals that wait for an instance at the same time; more wait for their turn."""
PROBE_S = 1.0
"""Timeout of a health check."""
PASSED_ON = ("content-type", "accept", "authorization", "x-user")
"""Request headers that are forwarded."""
RETURNED = ("content-type", "retry-after")
"""Response headers that are returned."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came: of its body only the user is known."""

    user: str
    """Empty where a page is about no user."""
    page: str
    body: bytes
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, user: str, page: str, body: bytes, headers: Mapping[str, str]) -> Call:
        passed_on = {name: headers[name] for name in PASSED_ON if name in headers}
        return cls(user, page, body, passed_on)

    def after(self, waited_s: float) -> Call:
        """The same call: the wait counts from `arrived`, when it is sent."""
        return self


class RefusedError(NestpipeError):
    """An instance refused, and a retry would not help; the caller gets its reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the instance answered with status {reply.status}")
        self.reply = reply


HttpRouter = Router[Call, Call, Reply]


class HttpBackend:
    """A `Backend` for the router: sends on the loop's own connections, which are kept open."""

    def __init__(
        self, name: str, url: str, http: httpx.AsyncClient, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.name = name
        self.url = url
        self._http = http
        self._loop = loop

    def prefetch(self, signal: Call) -> AdmissionOutcome:
        """Waits for the answer: not to be called on the loop's thread."""
        sent = asyncio.run_coroutine_threadsafe(self._checked(signal), self._loop)
        return AdmissionOutcome(json.loads(sent.result().body)["outcome"])

    def rank(self, request: Call) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(self._checked(request), self._loop)

    async def _checked(self, call: Call) -> Reply:
        """The instance's result, or the fault by which the router decides what to do next."""
        reply = await self.send("POST", call)
        if reply.status == 200:
            return reply
        fault = fault_of(reply)
        final = reply.status < 500 or reply.status == 504
        raise RefusedError(reply) if final else fault

    async def send(self, method: str, call: Call, patient: bool = False) -> Reply:
        """The reply of the instance; `RunError` if there is none in time."""
        waited_ms = (time.monotonic() - call.arrived) * 1e3
        headers = {**call.headers, WAITED_HEADER: f"{waited_ms:.3f}"}
        timeout = httpx.Timeout(None, connect=CONNECT_S) if patient else self._http.timeout
        try:
            reply = await self._http.request(
                method, self.url + call.page, content=call.body, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise RunError(f"{self.name} did not answer ({error!r})") from None
        return Reply(reply.status_code, reply.headers, reply.content)

    async def numbers(self, call: Call) -> dict[str, float]:
        """The counters of the instance; none if it does not answer."""
        try:
            reply = await self.send("GET", call)
        except RunError:
            return {}
        return read_stats(reply.body.decode()) if reply.status == 200 else {}

    def drain(self, timeout_s: float) -> bool:
        """Nothing to do: the launcher drains instances."""
        return True


def connections(answer_s: float) -> httpx.AsyncClient:
    """The connections of a router to all its instances."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        trust_env=False,
    )


class BackendPool:
    """Several instances as one, by the rules of `Router`; lives on an event loop."""

    def __init__(
        self, urls: Mapping[str, str], life_s: float, http: HttpSettings, token: str | None
    ) -> None:
        self._urls = dict(urls)
        self._life_s = life_s
        self._http = http
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._versions: dict[str, str | None] = dict.fromkeys(urls)
        self._router: HttpRouter | None = None
        self._signals: ThreadPoolExecutor | None = None
        self.backends: dict[str, HttpBackend] = {}

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open connections and check the health of every instance until left."""
        loop = asyncio.get_running_loop()
        async with connections(self._http.answer_s) as sender, connections(PROBE_S) as prober:
            self.backends = {
                name: HttpBackend(name, url, sender, loop) for name, url in self._urls.items()
            }
            probed = [HttpBackend(name, url, prober, loop) for name, url in self._urls.items()]
            self._router = Router(self.backends, RouterSettings(life_s=self._life_s), RealClock())
            self._signals = ThreadPoolExecutor(SIGNALS_AT_ONCE, "nestpipe-signal")
            await self._probe_all(probed)
            looking = loop.create_task(self._probe_forever(probed))
            try:
                yield
            finally:
                looking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await looking
                self._signals.shutdown(wait=False, cancel_futures=True)

    @property
    def router(self) -> HttpRouter:
        assert self._router is not None, "the app is used before it was started"
        return self._router

    @property
    def ready(self) -> bool:
        """Whether any instance is healthy."""
        return any(version is not None for version in self._versions.values())

    @property
    def version(self) -> str:
        """The versions that they serve; more than one during a reload."""
        return ", ".join(sorted({version for version in self._versions.values() if version}))

    async def prefetch(self, call: Call) -> AdmissionOutcome:
        """A signal that no instance took is no error: its ranking runs inline."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._signals, self.router.prefetch, call)

    async def rank(self, call: Call) -> Reply:
        """The reply of the first instance that answered."""
        return await asyncio.wrap_future(self.router.rank(call))

    async def totals(self) -> dict[str, float]:
        """The numbers of all instances that answer, summed."""
        call = Call("", "/metrics", b"", self._headers)
        found = await asyncio.gather(*(one.numbers(call) for one in self.backends.values()))
        return totals(found)

    async def _probe_forever(self, probed: list[HttpBackend]) -> None:
        while True:
            await asyncio.sleep(self._http.probe_s)
            await self._probe_all(probed)

    async def _probe_all(self, probed: list[HttpBackend]) -> None:
        """Check all instances at once, and report to the router."""
        found = await asyncio.gather(*(self._version_of(one) for one in probed))
        self._versions = {one.name: version for one, version in zip(probed, found, strict=True)}
        self.router.check(lambda name: self._versions[name] is not None)

    async def _version_of(self, backend: HttpBackend) -> str | None:
        """None: unhealthy."""
        try:
            reply = await backend.send("GET", Call("", "/v1/health", b"", self._headers))
            if reply.status != 200:
                return None
            return str(json.loads(reply.body).get("version") or "")
        except (RunError, ValueError, AttributeError):
            return None
