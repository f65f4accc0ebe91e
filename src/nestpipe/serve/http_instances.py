"""The instances behind the built-in router: connections to them, and how they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from nestpipe.errors import RunError
from nestpipe.serve.client import Reply
from nestpipe.serve.http_backend import (
    Call,
    HttpBackend,
    UnreadAnswer,
    UnreadRanking,
    UnreadSignal,
    connections,
)
from nestpipe.serve.http_settings import HttpSettings
from nestpipe.serve.router import Router, RouterSettings
from nestpipe.serve.totals import totals
from nestpipe.serve.types import Outcome, RealClock

SIGNALS_AT_ONCE = 64
"""Signals that wait for an instance at the same time; more wait for their turn."""
PROBE_S = 1.0
"""An instance that takes longer to say how it is, is not well."""


class Instances:
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

    async def prefetch(self, user: str, call: Call) -> Outcome:
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
