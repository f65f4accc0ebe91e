"""Limits in front of an app: token, requests in flight, size and time of bodies.

Bodies are read here, before the app is called, so that no route can forget a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nestpipe.config.sections import is_authorised
from nestpipe.serve.http.bodies import HttpError, draining, shed
from nestpipe.serve.settings import HttpSettings

OPEN = "/v1/health"
"""The page that needs no token."""


LINGER_S = 0.25
"""How long the rest of a refused body is discarded before the connection is closed."""
COUNTED = ("http_shed_requests", "http_shed_bodies", "http_too_large", "http_slow")


class RequestLimits:
    """Requests and bytes in flight, and whether more are accepted; used by the event loop only."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.draining = False
        self.requests = 0
        self.body_bytes = 0
        self.counts = dict.fromkeys(COUNTED, 0)
        self._left: asyncio.Event | None = None

    def enter(self) -> None:
        """Accept one more request, or raise."""
        if self.draining:
            raise draining()
        if self.requests >= self.settings.requests:
            self.counts["http_shed_requests"] += 1
            raise shed(f"{self.requests} requests are in flight already; ask again in a second")
        self.requests += 1

    def leave(self, body_bytes: int) -> None:
        """The request was answered; its body is gone."""
        self.requests -= 1
        self.body_bytes -= body_bytes
        if self._left is not None:
            self._left.set()

    def hold(self, more_bytes: int, of_this: int) -> None:
        """So many more bytes of a body that has `of_this` already."""
        if of_this + more_bytes > self.settings.body_bytes:
            self.counts["http_too_large"] += 1
            raise HttpError(
                413, f"the body is too large; send {self.settings.body_bytes} bytes at most"
            )
        if self.body_bytes + more_bytes > self.settings.bodies_bytes:
            self.counts["http_shed_bodies"] += 1
            raise shed("the bodies in flight fill their memory; ask again in a second")
        self.body_bytes += more_bytes

    async def emptied(self, timeout_s: float) -> bool:
        """Whether every accepted request is answered within this time."""
        self._left = asyncio.Event()
        try:
            async with asyncio.timeout(timeout_s):
                while self.requests:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True

    def stats(self, prefix: str = "") -> dict[str, float]:
        """Counters and gauges by name."""
        now = {"http_requests": self.requests, "http_body_bytes": self.body_bytes}
        return {prefix + name: float(count) for name, count in (now | self.counts).items()}


Observe = Callable[[str, int, float], None]
"""Hears the path, the status and the seconds of every answer."""


class LimitsMiddleware:
    """ASGI middleware: checks the token, reads the body within the limits, times the answer."""

    def __init__(
        self, app: ASGIApp, limits: RequestLimits, token: str | None, observe: Observe
    ) -> None:
        self._app = app
        self._limits = limits
        self._token = token
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Response(scope, send, self._limits, self._observe)
        try:
            scope["nestpipe.authorised"] = self._check_token(scope)
            if scope["method"] == "POST":
                await self._with_body(scope, receive, answer.send)
            else:
                await self._app(scope, receive, answer.send)
        except HttpError as error:
            if scope["method"] == "POST" and error.status != 408:
                await _discard(scope, receive)
            await answer.say(error)
        except Exception:
            if not answer.status:
                raise
            # The app has told the caller and its log; the server need not do so again.

    def _check_token(self, scope: Scope) -> bool:
        """Whether the caller is known; refuses unknown ones unless the page is open."""
        if is_authorised(_header(scope, b"authorization"), self._token):
            return True
        if scope["path"] == OPEN and scope["method"] == "GET":
            return False
        raise HttpError(
            401,
            "the token is missing or wrong; send Authorization: Bearer TOKEN",
            www_authenticate="Bearer",
        )

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._limits.enter()
        body = _BodyReader(self._limits)
        try:
            if not await body.read(scope, receive):
                return
            scope["nestpipe.body"] = body.data
            await self._app(scope, _nothing_more, send)
        finally:
            self._limits.leave(body.held)


class _BodyReader:
    """One body as it arrives, and the bytes that the limits count for it."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.data = bytearray()
        self.held = 0

    async def read(self, scope: Scope, receive: Receive) -> bool:
        """All of it; false where the caller has gone."""
        self._hold(_announced(scope))
        timeout_s = self._limits.settings.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    self._hold(len(self.data) + len(part) - self.held)
                    self.data += part
                    more = message.get("more_body", False)
        except TimeoutError:
            self._limits.counts["http_slow"] += 1
            raise HttpError(
                408, f"the body did not arrive within {timeout_s:g} s; send it faster"
            ) from None
        return True

    def _hold(self, more_bytes: int) -> None:
        if more_bytes > 0:
            self._limits.hold(more_bytes, self.held)
            self.held += more_bytes


class _Response:
    """Sends an answer, and says when it was complete."""

    def __init__(self, scope: Scope, send: Send, limits: RequestLimits, observe: Observe) -> None:
        self._scope, self._send, self._limits, self._observe = scope, send, limits, observe
        self._start = time.monotonic()
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._limits.draining:
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._observe(self._scope["path"], self.status, time.monotonic() - self._start)

    async def say(self, error: HttpError) -> None:
        """The body may be on its way still: nothing more can be asked on this connection."""
        headers = {"content-type": "application/json", "connection": "close", **error.headers}
        headers["content-length"] = str(len(error.body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._observe(self._scope["path"], error.status, time.monotonic() - self._start)
        await self._send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self._send({"type": "http.response.body", "body": error.body})


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _announced(scope: Scope) -> int:
    """Content-Length, if any; the server enforces it."""
    length = _header(scope, b"content-length")
    return int(length) if length is not None and length.isdigit() else 0


async def _discard(scope: Scope, receive: Receive) -> None:
    """Discard a body that still arrives for a moment: callers read the answer after sending it."""
    if _header(scope, b"expect") is not None:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            more = True
            while more:
                message = await receive()
                more = message["type"] == "http.request" and message.get("more_body", False)


async def _nothing_more() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
