"""The backends of the built-in router over HTTP: bodies pass through unread, health is probed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.http.client import CONNECT_S, Reply, fault_of, read_stats
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.http.requests import WAITED_HEADER
from nestpipe.serve.routing.router import Router, RouterSettings
from nestpipe.serve.settings import HttpSettings
from nestpipe.serve.types import AdmissionOutcome, RealClock

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
        """The same: `arrived` says how long it waited, and the instance is told when it is sent."""
        return self


class RefusedError(NestpipeError):
    """An instance refused for good; the caller gets its reply."""

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
        sent = asyncio.run_coroutine_threadsafe(self._judged(signal), self._loop)
        return AdmissionOutcome(json.loads(sent.result().body)["outcome"])

    def rank(self, request: Call) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(self._judged(request), self._loop)

    async def _judged(self, call: Call) -> Reply:
        """The instance's result, or the fault that tells the router what to do next."""
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
            await self._look(probed)
            looking = loop.create_task(self._look_for_ever(probed))
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
        """A signal that nobody took is no error: its ranking runs inline."""
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

    async def _look_for_ever(self, probed: list[HttpBackend]) -> None:
        while True:
            await asyncio.sleep(self._http.probe_s)
            await self._look(probed)

    async def _look(self, probed: list[HttpBackend]) -> None:
        """Check all instances at once, and tell the router."""
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
