"""The instances behind the built-in router: connections to them, and how they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np

from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.http.client import CONNECT_S, Reply, fault_of, read_stats
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.http.requests import WAITED_HEADER
from nestpipe.serve.routing.router import Router, RouterSettings
from nestpipe.serve.settings import HttpSettings
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    History,
    Ids,
    Path,
    RankRequest,
    RealClock,
    Signal,
)

SIGNALS_AT_ONCE = 64
"""Signals that wait for an instance at the same time; more wait for their turn."""
PROBE_S = 1.0
"""An instance that takes longer to say how it is, is not well."""


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
        self._router: Router | None = None
        self._signals: ThreadPoolExecutor | None = None
        self.backends: dict[str, HttpBackend] = {}

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open connections, and look at every instance now and then until left."""
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
    def router(self) -> Router:
        assert self._router is not None, "the app is used before it was started"
        return self._router

    @property
    def ready(self) -> bool:
        """Whether any instance is well."""
        return any(version is not None for version in self._versions.values())

    @property
    def version(self) -> str:
        """What they serve; more than one version while a reload is under way."""
        return ", ".join(sorted({version for version in self._versions.values() if version}))

    async def prefetch(self, user: str, call: Call) -> AdmissionOutcome:
        """A signal that nobody took is no error: its ranking runs inline."""
        loop, signal = asyncio.get_running_loop(), UnreadSignal(user, call=call)
        return await loop.run_in_executor(self._signals, self.router.prefetch, signal)

    async def rank(self, user: str, call: Call) -> Reply:
        """The reply of the first instance that answered."""
        answer = await asyncio.wrap_future(self.router.rank(UnreadRanking(user, call=call)))
        assert isinstance(answer, UnreadAnswer), "replies are passed on as they are"
        assert answer.reply is not None
        return answer.reply

    async def totals(self) -> dict[str, float]:
        """The instances' own numbers, of all that answer together."""
        call = Call("/metrics", b"", self._headers)
        found = await asyncio.gather(*(one.numbers(call) for one in self.backends.values()))
        return totals(found)

    async def _look_for_ever(self, probed: list[HttpBackend]) -> None:
        while True:
            await asyncio.sleep(self._http.probe_s)
            await self._look(probed)

    async def _look(self, probed: list[HttpBackend]) -> None:
        """Ask every instance how it is, all at once, and tell the router."""
        found = await asyncio.gather(*(self._version_of(one) for one in probed))
        self._versions = {one.name: version for one, version in zip(probed, found, strict=True)}
        self.router.check(lambda name: self._versions[name] is not None)

    async def _version_of(self, backend: HttpBackend) -> str | None:
        """None: not well."""
        try:
            reply = await backend.send("GET", "/v1/health", Call("", b"", self._headers))
            if reply.status != 200:
                return None
            return str(json.loads(reply.body).get("version") or "")
        except (RunError, ValueError, AttributeError):
            return None


# An instance as the router sees it: bodies pass through unread, only their user is known.


PASSED_ON = ("content-type", "accept", "authorization", "x-user")
"""Headers of a request that an instance is to see."""
RETURNED = ("content-type", "retry-after")
"""Headers of an answer that the caller is to see."""

NO_IDS: Ids = np.zeros(0, np.int64)
NO_HISTORY = History(NO_IDS)


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came."""

    page: str
    body: bytes
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, page: str, body: bytes, headers: Mapping[str, str]) -> Call:
        return cls(page, body, {name: headers[name] for name in PASSED_ON if name in headers})


@dataclass(frozen=True, slots=True)
class UnreadSignal(Signal):
    """A signal of which only the user was read."""

    call: Call | None = None
    long: History = NO_HISTORY


@dataclass(frozen=True, slots=True)
class UnreadRanking(RankRequest):
    """A ranking of which only the user was read."""

    call: Call | None = None
    long: History = NO_HISTORY
    short: History = NO_HISTORY
    candidates_C: Ids = field(default_factory=lambda: NO_IDS)


@dataclass(frozen=True, slots=True)
class UnreadAnswer(Answer):
    """An answer that goes back as it came."""

    reply: Reply | None = None

    @classmethod
    def of(cls, reply: Reply) -> UnreadAnswer:
        return cls(np.zeros(0, np.float32), Path.MISS_FULL, 0, "", reply=reply)


class RefusedError(NestpipeError):
    """An instance said no and meant it; the caller is to hear its own words."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the instance answered with status {reply.status}")
        self.reply = reply


class HttpBackend:
    """A `RankService` for the router: sends on the loop's own connections, which are kept open."""

    def __init__(
        self, name: str, url: str, http: httpx.AsyncClient, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.name = name
        self.url = url
        self._http = http
        self._loop = loop

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        """Waits for the answer: not to be called on the loop's thread."""
        assert isinstance(signal, UnreadSignal), "the router passes bodies on"
        assert signal.call is not None
        sent = asyncio.run_coroutine_threadsafe(self._judged(signal.call), self._loop)
        return AdmissionOutcome(json.loads(sent.result().body)["outcome"])

    def rank(self, request: RankRequest) -> Future[Answer]:
        assert isinstance(request, UnreadRanking), "the router passes bodies on"
        assert request.call is not None
        return asyncio.run_coroutine_threadsafe(self._answered(request.call), self._loop)

    async def _answered(self, call: Call) -> Answer:
        return UnreadAnswer.of(await self._judged(call))

    async def _judged(self, call: Call) -> Reply:
        """The instance's result, or the fault that tells the router what to do next."""
        reply = await self.send("POST", call.page, call)
        if reply.status == 200:
            return reply
        fault = fault_of(reply)
        final = reply.status < 500 or reply.status == 504
        raise RefusedError(reply) if final else fault

    async def send(
        self,
        method: str,
        page: str,
        call: Call,
        patient: bool = False,
    ) -> Reply:
        """Whatever the instance says; `RunError` where it says nothing in time."""
        waited_ms = (time.monotonic() - call.arrived) * 1e3
        headers = {**call.headers, WAITED_HEADER: f"{waited_ms:.3f}"}
        timeout = httpx.Timeout(None, connect=CONNECT_S) if patient else self._http.timeout
        try:
            reply = await self._http.request(
                method, self.url + page, content=call.body, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise RunError(f"{self.name} did not answer ({error!r})") from None
        return Reply(reply.status_code, reply.headers, reply.content)

    def stats(self) -> dict[str, float]:
        raise AssertionError("the router asks instances by `numbers`")

    async def numbers(self, call: Call) -> dict[str, float]:
        """The counters of the instance; none where it does not answer."""
        try:
            reply = await self.send("GET", "/metrics", call)
        except RunError:
            return {}
        return read_stats(reply.body.decode()) if reply.status == 200 else {}

    def drain(self, timeout_s: float) -> bool:
        """An instance is stopped by whoever started it."""
        return True


def connections(answer_s: float) -> httpx.AsyncClient:
    """The connections of a router to all its instances."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        trust_env=False,
    )
