"""Bodies of requests, answers and errors, and the limits in front of an app.

Bodies have JSON schemas and a binary form, which `MEDIA_TYPE` describes; a fault is one sentence.
The limits are a token, requests in flight, size and time of bodies. Bodies are read here, before
the app is called, so that no route can forget a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nestpipe.config.sections import is_authorised
from nestpipe.errors import NestpipeError, ShedError
from nestpipe.serve.types import (
    MOST_DEADLINE_S,
    AdmissionOutcome,
    ClosingError,
    HttpSettings,
    RankPath,
    ServeSettings,
)

log = logging.getLogger("nestpipe.serve")

LARGEST = 2**63 - 1
LARGEST_FLOAT = 3e38
"""Beyond it a float32 is inf."""
LONGEST_VALUE = 40
"""Characters of a wrong value that an error shows."""

Whole = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
Wholes = Annotated[list[Whole], Field(fail_fast=True)]
Texts = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(fail_fast=True)]
Keys = Annotated[Wholes | Texts, Field(union_mode="left_to_right")]
"""Whole numbers, or strings where the data had strings, whose keys are made as in training."""
Count = Annotated[int, Field(ge=0, le=2**31)]
User = Annotated[str, Field(min_length=1, max_length=256, examples=["u42"])]
Deadline = Annotated[
    float, Field(gt=0, le=MOST_DEADLINE_S * 1000, allow_inf_nan=False, examples=[50])
]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class HistoryBody(_StrictModel):
    """Events of a user, oldest first."""

    items: Keys
    times: Wholes | None = None
    """As many as items; needed where the model reads times."""


class PrefetchBody(_StrictModel):
    """A user whose ranking is about to come."""

    user: User
    history: HistoryBody | None = None
    """May be left out where the service has a file of histories."""


Number = Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT, allow_inf_nan=False)]
Numbers = Annotated[list[Number], Field(fail_fast=True)]


class RankColumns(_StrictModel):
    """What models without a prefix read besides the candidates."""

    features: dict[str, Keys] | None = None
    """Keys by feature, the same for all candidates."""
    candidate_features: dict[str, list[Keys]] | None = None
    """Keys by feature, a list for each candidate."""
    values: dict[str, Number | Numbers] | None = None
    """Numbers by dense column, the same for all candidates."""
    candidate_values: dict[str, Numbers | list[Numbers]] | None = None
    """Numbers by dense column, an entry for each candidate."""

    @property
    def any_columns(self) -> str:
        """The name of one that is given; empty: none is."""
        given = [name for name in RankColumns.model_fields if getattr(self, name) is not None]
        return given[0] if given else ""


class RankBody(RankColumns):
    """Candidates to score."""

    user: User
    long: HistoryBody | None = None
    """The history that was (or could have been) given to /v1/prefetch."""
    short: HistoryBody | None = None
    """Events after it."""
    candidates: Keys
    time: Whole | None = None
    """When it is asked; needed where the model reads times."""
    deadline_ms: Deadline | None = None
    """Deadline in milliseconds; a later answer is replaced by 504."""


class HistoryCounts(_StrictModel):
    """A history in the header of a binary body."""

    items: Count
    times: Count | None = None


class PrefetchHeader(_StrictModel):
    """A signal in the header of a binary body."""

    user: User
    history: HistoryCounts | None = None


class RankHeader(RankColumns):
    """A ranking in the header of a binary body."""

    user: User
    long: HistoryCounts | None = None
    short: HistoryCounts | None = None
    candidates: Count
    time: Whole | None = None
    deadline_ms: Deadline | None = None


class ReloadBody(_StrictModel):
    """Another checkpoint to serve."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A folder on the machine of the service; left out: the latest of the folder it began with."""


class PrefetchAnswer(BaseModel):
    """What admission control decided."""

    outcome: AdmissionOutcome


class RankAnswer(BaseModel):
    """Scores in the order of the candidates, and how they came about."""

    scores: list[float]
    path: RankPath
    length_used: int
    """Events that the scores rest on."""
    version: str
    stages_ms: dict[str, float]


class HealthAnswer(BaseModel):
    """Whether to send requests."""

    ready: bool
    draining: bool
    version: str | None = None
    """Hidden from callers without the token."""


class ReloadAnswer(BaseModel):
    """What is served now."""

    version: str


class ErrorAnswer(BaseModel):
    """One sentence: what, which value, what to do."""

    error: str


REQUESTS = (PrefetchBody, RankBody, ReloadBody)


def request_schemas(settings: ServeSettings, http: HttpSettings, histories: bool) -> dict[str, Any]:
    """The bodies for OpenAPI, with the limits of this very service.

    `histories`: it has some itself, so that requests may leave theirs out.
    """
    _, found = models_json_schema(
        [(model, "validation") for model in REQUESTS], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = found["$defs"]
    items = schemas["HistoryBody"]["properties"]["items"]
    candidates = schemas["RankBody"]["properties"]["candidates"]
    for numbers_or_texts in items["anyOf"]:
        numbers_or_texts["maxItems"] = settings.max_events
    for numbers_or_texts in candidates["anyOf"]:
        numbers_or_texts |= {"minItems": 1, "maxItems": settings.max_candidates}
    if not http.negative_ids:
        for field in (items, candidates):
            field["anyOf"][0]["items"]["minimum"] = 0
    if not histories:
        for body, name in (("PrefetchBody", "history"), ("RankBody", "long")):
            schemas[body]["required"].append(name)
            schemas[body]["properties"][name] = {"$ref": "#/components/schemas/HistoryBody"}
    return schemas


MEDIA_TYPE = "application/x-nestpipe"
"""A binary body, for requests whose ids take longer to write as JSON than to rank.

It is the length of the header (4 bytes, little-endian, unsigned), the header (JSON in UTF-8, padded
with spaces), then the arrays without gaps. In the header each array is replaced by its number of
values. A request has little-endian int64 arrays in the order `long.items`, `long.times`,
`short.items`, `short.times`, `candidates` (a signal: `history.items`, `history.times`), without
those that the header leaves out. An answer has one array, `scores`, little-endian float32.
"""
ALIGNMENT = 8
LONGEST_HEADER = 65536
LENGTH_BYTES = 4


class BinaryError(Exception):
    """A binary body that does not parse; one sentence says why."""


def pack(header: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> bytes:
    """A binary body; arrays are aligned, so that a reader needs no copy."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    parts = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for array in arrays]
    length = len(text).to_bytes(LENGTH_BYTES, "little")
    return b"".join([length, text, *(part.tobytes() for part in parts)])


def split(body: bytes | bytearray) -> tuple[bytes, memoryview]:
    """The header, not yet parsed, and what follows it."""
    if len(body) < LENGTH_BYTES:
        raise BinaryError(f"the body has {len(body)} bytes; begin with 4 for the header's length")
    length = int.from_bytes(body[:LENGTH_BYTES], "little")
    if length > min(LONGEST_HEADER, len(body) - LENGTH_BYTES):
        raise BinaryError(
            f"the header has {length} bytes by its length; the body is {len(body)} and a header "
            f"{LONGEST_HEADER} at most"
        )
    end = LENGTH_BYTES + length
    return bytes(body[LENGTH_BYTES:end]), memoryview(body)[end:]


def cut(
    data: memoryview, counts: Sequence[int], dtype: type[np.generic] = np.int64
) -> list[NDArray[Any]]:
    """Cut the data into arrays of these lengths; together they must use all of it."""
    stored = np.dtype(dtype).newbyteorder("<")
    needed = sum(counts) * stored.itemsize
    if needed != len(data):
        raise BinaryError(
            f"the header announces {needed} bytes of arrays and {len(data)} follow; make them agree"
        )
    values = np.frombuffer(data, stored).astype(dtype, copy=False)
    values = np.require(values, requirements=["ALIGNED", "WRITEABLE"])
    return np.split(values, np.cumsum(counts)[:-1]) if counts else []


class HttpError(Exception):
    """An error response: a status and one sentence."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> bytes:
        return json.dumps({"error": self.sentence}).encode()


def shed(sentence: str, retry_after_s: float = 1.0) -> HttpError:
    """Overload: the caller may retry later."""
    return HttpError(503, sentence, retry_after=str(max(1, math.ceil(retry_after_s))))


def draining() -> HttpError:
    """Shutdown: the caller may ask another instance at once."""
    return HttpError(
        503, "the service is draining; ask another", retry_after="1", x_nestpipe_draining="1"
    )


def of_fault(fault: BaseException) -> HttpError:
    """The error response for an exception."""
    if isinstance(fault, HttpError):
        return fault
    if isinstance(fault, ClosingError):
        return draining()
    if isinstance(fault, ShedError):
        return shed(str(fault), fault.retry_after_s)
    if isinstance(fault, TimeoutError):
        return HttpError(504, "the deadline passed before the answer was there; allow more time")
    if isinstance(fault, NestpipeError) and fault.exit_status == NestpipeError.exit_status:
        return HttpError(422, str(fault))
    log.error("a request failed", exc_info=fault)
    return HttpError(500, "the service failed on this request; its log has the reason")


def of_body(error: ValidationError) -> HttpError:
    """The error response for the first thing that is wrong with a body."""
    first: Any = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it does not parse")
        return HttpError(400, f"the body is not JSON: {reason}; correct it")
    where = _place(first["loc"])
    if first["type"] == "missing":
        return HttpError(422, f"{where} is missing; give it")
    if first["type"] == "extra_forbidden":
        return HttpError(422, f"{where} is not known; leave it out")
    return HttpError(422, f"{where} is {_shown(first['input'])}; {_advice(first['msg'])}")


def _place(loc: tuple[int | str, ...]) -> str:
    """`long.items[3]`, or `the body`; without the form of a value that was tried."""
    shown = [part for part in loc if not str(part).startswith(("list[", "constrained-"))]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in shown)
    return text.lstrip(".") or "the body"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, bytes) else "not JSON"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _advice(message: str) -> str:
    """`Input should be a valid integer` as the end of a sentence."""
    return message.replace("Input should be", "it should be").rstrip(".")


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
        """Count more bytes of a body that has `of_this` already."""
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
"""Called with the path, the status and the seconds of every answer."""


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
            # The app has answered the caller and logged it; the server need not do so again.

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
