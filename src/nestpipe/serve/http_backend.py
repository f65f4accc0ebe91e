"""An instance as the router sees it: bodies pass through unread, only their user is known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import httpx
import numpy as np

from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.client import CONNECT_S, Reply, fault_of, read_stats
from nestpipe.serve.http_requests import WAITED_HEADER
from nestpipe.serve.types import Answer, History, Ids, Outcome, Path, RankRequest, Signal

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

    def prefetch(self, signal: Signal) -> Outcome:
        """Waits for the answer: not to be called on the loop's thread."""
        assert isinstance(signal, UnreadSignal), "the router passes bodies on"
        assert signal.call is not None
        sent = asyncio.run_coroutine_threadsafe(self._judged(signal.call), self._loop)
        return Outcome(json.loads(sent.result().body)["outcome"])

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
