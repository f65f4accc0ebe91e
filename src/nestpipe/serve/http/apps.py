"""The HTTP apps of an instance and of the built-in router, and what both share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from nestpipe import __version__
from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.http.bodies import (
    MEDIA_TYPE,
    BinaryError,
    ErrorAnswer,
    HealthAnswer,
    HttpError,
    LimitsMiddleware,
    PrefetchAnswer,
    RankAnswer,
    ReloadAnswer,
    ReloadBody,
    RequestLimits,
    User,
    of_fault,
    pack,
    request_schemas,
    shed,
    split,
)
from nestpipe.serve.http.client import RETURNED, BackendPool, Call, RefusedError, Reply
from nestpipe.serve.http.metrics import CONTENT_TYPE, Metrics
from nestpipe.serve.http.requests import (
    JSON,
    USER_HEADER,
    HistoryStore,
    RequestReader,
    media_type,
    validated,
)
from nestpipe.serve.types import (
    MOST_DEADLINE_S,
    Answer,
    HttpSettings,
    RankRequest,
    RankService,
    ServeSettings,
)

STATUS_TEXTS = {
    400: "The body cannot be parsed",
    401: "The token is missing or wrong",
    404: "The user is unknown and the request has no history",
    408: "The body took too long to arrive",
    409: "The checkpoint cannot be served; the one before goes on",
    413: "Too many bytes, events or candidates",
    415: "Neither JSON nor binary",
    422: "A value cannot be used",
    500: "The service failed",
    503: "Shed or draining: ask again after Retry-After seconds",
    504: "The deadline passed",
}


AwaitedNumbers = Callable[[], Awaitable[dict[str, float]]]


@dataclass(frozen=True, slots=True)
class ServedApp:
    """An app with its limits, metrics and shutdown."""

    app: ASGIApp
    """What the server calls: the app behind its limits."""
    inner: FastAPI
    limits: RequestLimits
    metrics: Metrics
    drain: Callable[[float], Coroutine[Any, Any, bool]]
    """Finish what was accepted."""
    reload: Callable[[], Awaitable[str]]
    """Read the checkpoint's folder again; what happened, in a sentence."""


def new_app(title: str, schemas: dict[str, Any], lifespan: Any = None) -> FastAPI:
    """An app without routes whose errors are all one sentence; `schemas` are those of bodies."""
    app = FastAPI(title=title, version=__version__, redoc_url=None, lifespan=lifespan)
    app.openapi = lambda: _openapi(app, schemas)

    @app.exception_handler(Exception)
    async def failed(_: Request, fault: Exception) -> Response:
        return answer_error(of_fault(fault))

    for kind in (HttpError, NestpipeError, TimeoutError):
        app.exception_handler(kind)(failed)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, fault: HTTPException) -> Response:
        """No such page, or no such method on it."""
        what = f"{request.method} {request.url.path}"
        error = HttpError(fault.status_code, f"there is no {what}; see /docs")
        return answer_error(error, fault.headers or {})

    return app


async def _none() -> dict[str, float]:
    return {}


def guarded(
    app: FastAPI,
    limits: RequestLimits,
    token: str | None,
    metrics: Metrics,
    asked: AwaitedNumbers = _none,
) -> ASGIApp:
    """The app behind its limits, with /metrics; `asked` gives numbers that must be awaited."""

    @app.get("/metrics", response_class=Response, responses=_metrics_page())
    async def scraped() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(metrics.text(await asked()), media_type=CONTENT_TYPE)

    return LimitsMiddleware(app, limits, token, metrics.observe_http)


def answer_error(error: HttpError, headers: Any = None) -> Response:
    """The sentence as JSON."""
    all_headers = {**error.headers, **(headers or {})}
    return Response(error.body, error.status, all_headers, "application/json")


def answer_health(request: Request, ready: bool, draining: bool, version: str) -> Response:
    """200 or 503; callers without the token get no version."""
    shown = version if request.scope.get("nestpipe.authorised", True) else None
    body = HealthAnswer(ready=ready and not draining, draining=draining, version=shown)
    status = 200 if body.ready else 503
    return Response(body.model_dump_json(), status, media_type="application/json")


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Statuses of a page for OpenAPI."""
    return {one: {"model": ErrorAnswer, "description": STATUS_TEXTS[one]} for one in statuses}


def takes(body: str, binary: bool = True) -> dict[str, Any]:
    """The body of a page for OpenAPI."""
    content: dict[str, Any] = {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}
    }
    if binary:
        content[MEDIA_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    if binary:
        extra["parameters"] = [USER_PARAMETER]
    return extra


USER_PARAMETER = {
    "name": "X-User",
    "in": "header",
    "required": False,
    "description": "The user of the body, percent-encoded: routers need not read the body then.",
    "schema": {"type": "string", "maxLength": 2048},
}


def _metrics_page() -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors(401)}


def _openapi(app: FastAPI, schemas: dict[str, Any]) -> dict[str, Any]:
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = found.setdefault("components", {}).setdefault("schemas", {})
        components |= schemas
        app.openapi_schema = found
    return app.openapi_schema


# The app of one instance.


BINARY_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        "description": "Scores; binary where the request accepts it",
    }
}

Reload = Callable[[str | None], str]
"""Loads another checkpoint (None: the latest where it began), swaps, and returns its version."""


def instance_app(
    service: RankService,
    settings: ServeSettings,
    http: HttpSettings,
    *,
    version: Callable[[], str],
    healthy: Callable[[], bool] = lambda: True,
    reload: Reload,
    token: str | None = None,
    histories: HistoryStore | None = None,
    needs_history: bool = True,
) -> ServedApp:
    """The routes of one instance behind its limits."""
    schemas = request_schemas(settings, http, histories is not None or not needs_history)
    app, limits = new_app("NestPipe instance", schemas), RequestLimits(http)
    metrics = Metrics(service.stats, limits.stats)
    reader = RequestReader(settings, http, histories, needs_history)
    _add_instance_legs(app, service, reader, metrics)
    reloading = _add_instance_reload(app, reload)

    @app.get(
        "/v1/health",
        response_model=HealthAnswer,
        responses={503: {"model": HealthAnswer, "description": "Draining, or broken"}},
    )
    async def health(request: Request) -> Response:
        """Whether to send requests here."""
        return answer_health(request, healthy(), limits.draining, version())

    async def drain(timeout_s: float) -> bool:
        limits.draining = True
        empty = await limits.emptied(timeout_s)
        return await asyncio.to_thread(service.drain, timeout_s) and empty

    return ServedApp(guarded(app, limits, token, metrics), app, limits, metrics, drain, reloading)


def _add_instance_legs(
    app: FastAPI, service: RankService, reader: RequestReader, metrics: Metrics
) -> None:
    @app.post(
        "/v1/prefetch",
        response_model=PrefetchAnswer,
        openapi_extra=takes("PrefetchBody"),
        responses=errors(400, 401, 404, 408, 413, 415, 422, 500, 503),
    )
    async def prefetch(request: Request) -> PrefetchAnswer:
        """The early leg: a ranking of this user is about to come."""
        signal = reader.signal(request.scope["nestpipe.body"], request.headers)
        return PrefetchAnswer(outcome=service.prefetch(signal))

    @app.post(
        "/v1/rank",
        response_model=RankAnswer,
        openapi_extra=takes("RankBody"),
        responses=BINARY_ANSWER | errors(400, 401, 404, 408, 413, 415, 422, 500, 503, 504),
    )
    async def rank(request: Request) -> Response:
        """The late leg: scores of the candidates."""
        start = time.monotonic()
        ranking = reader.ranking(request.scope["nestpipe.body"], request.headers)
        answer = await _answered(service, ranking)
        metrics.observe_rank(answer.path, time.monotonic() - start)
        return encode(answer, MEDIA_TYPE in request.headers.get("accept", ""))


async def _answered(service: RankService, ranking: RankRequest) -> Answer:
    """The answer, unless the deadline is first. Work that was begun is not stopped: it may be what
    another ranking waits for.
    """
    future = asyncio.wrap_future(service.rank(ranking))
    future.add_done_callback(_consume_fault)
    done, _ = await asyncio.wait([future], timeout=ranking.deadline_s or MOST_DEADLINE_S)
    if not done:
        raise of_fault(TimeoutError())
    return future.result()


def _consume_fault(future: asyncio.Future[Answer]) -> None:
    """Read a fault that comes after the deadline: the caller has its answer already."""
    if not future.cancelled():
        future.exception()


def encode(answer: Answer, binary: bool) -> Response:
    """An answer as JSON, or with its scores as they are."""
    about = {
        "path": answer.path.value,
        "length_used": answer.length_used,
        "version": answer.version,
        "stages_ms": {name: round(ms, 4) for name, ms in answer.stages_ms.items()},
    }
    if binary:
        body = pack({"scores": len(answer.scores_C), **about}, [answer.scores_C])
        return Response(body, media_type=MEDIA_TYPE)
    as_json = RankAnswer(scores=answer.scores_C.tolist(), **about)
    return Response(as_json.model_dump_json(), media_type=JSON)


def _add_instance_reload(app: FastAPI, reload: Reload) -> Callable[[], Awaitable[str]]:
    """The route, and the same as a function for signals; one at a time."""
    busy = asyncio.Lock()

    async def load(checkpoint: str | None) -> str:
        if busy.locked():
            raise HttpError(409, "a reload is under way; wait for it")
        async with busy:
            try:
                return await asyncio.to_thread(reload, checkpoint)
            except NestpipeError as error:
                raise HttpError(409, str(error)) from None

    @app.post(
        "/v1/reload",
        response_model=ReloadAnswer,
        openapi_extra=takes("ReloadBody", binary=False),
        responses=errors(400, 401, 408, 409, 413, 415, 422, 500, 503),
    )
    async def reload_page(request: Request) -> ReloadAnswer:
        """Serve another checkpoint; requests go on meanwhile, none is dropped."""
        if media_type(request.headers) != JSON:
            raise HttpError(415, f"a checkpoint is named in JSON; send {JSON}")
        body = validated(ReloadBody, request.scope["nestpipe.body"])
        return ReloadAnswer(version=await load(body.checkpoint))

    async def latest() -> str:
        try:
            return f"now serving {await load(None)}"
        except HttpError as error:
            return f"not reloaded: {error.sentence}"

    return latest


# The app of the built-in router: both legs of a user to the same instance.


T = TypeVar("T")


class OnlyUser(BaseModel):
    """All that the router reads of a body."""

    model_config = ConfigDict(extra="ignore", strict=True)
    user: User


def router_app(
    urls: Mapping[str, str],
    settings: ServeSettings,
    http: HttpSettings,
    token: str | None = None,
    histories: bool = False,
) -> ServedApp:
    """The routes of the router behind its limits; `urls` are the instances' by name.

    `histories`: the instances have some themselves.
    """
    instances = BackendPool(urls, settings.life_s, http, token)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with instances.connected():
            yield

    schemas = request_schemas(settings, http, histories)
    app, limits = new_app("NestPipe router", schemas, lifespan), RequestLimits(http)
    metrics = Metrics(lambda: instances.router.stats(), lambda: limits.stats("router_"))
    _add_router_legs(app, instances)
    _add_router_reload(app, instances)

    @app.get(
        "/v1/health",
        response_model=HealthAnswer,
        responses={
            503: {"model": HealthAnswer, "description": "Draining, or no instance is healthy"}
        },
    )
    async def health(request: Request) -> Response:
        """Whether to send requests here."""
        return answer_health(request, instances.ready, limits.draining, instances.version)

    async def drain(timeout_s: float) -> bool:
        limits.draining = True
        return await limits.emptied(timeout_s)

    async def reload() -> str:
        return "a router has no checkpoint; reload the instances"

    around = guarded(app, limits, token, metrics, instances.totals)
    return ServedApp(around, app, limits, metrics, drain, reload)


def _add_router_legs(app: FastAPI, instances: BackendPool) -> None:
    @app.post(
        "/v1/prefetch",
        response_model=PrefetchAnswer,
        openapi_extra=takes("PrefetchBody"),
        responses=errors(400, 401, 408, 413, 415, 422, 500, 503),
    )
    async def prefetch(request: Request) -> PrefetchAnswer:
        """The early leg, to the instance that the ranking will go to."""
        return PrefetchAnswer(outcome=await instances.prefetch(read_call(request)))

    @app.post(
        "/v1/rank",
        response_model=RankAnswer,
        openapi_extra=takes("RankBody"),
        responses=BINARY_ANSWER | errors(400, 401, 404, 408, 413, 415, 422, 500, 503, 504),
    )
    async def rank(request: Request) -> Response:
        """The late leg, by the first instance that answers in the user's order."""
        return answer_reply(await _reply_or_refusal(instances.rank(read_call(request))))


def read_call(request: Request) -> Call:
    """The user, from the header where there is one, and the request as it came."""
    headers, body = request.headers, request.scope["nestpipe.body"]
    kind, given = media_type(headers), headers.get(USER_HEADER)
    if given is not None:
        user = unquote(given)
    else:
        try:
            user = validated(OnlyUser, split(body)[0] if kind == MEDIA_TYPE else body).user
        except BinaryError as error:
            raise HttpError(400, str(error)) from None
    return Call.of(user, request.url.path, bytes(body), headers)


async def _reply_or_refusal(answer: Awaitable[T]) -> T | Reply:
    """The answer, or the refusal of an instance in its own words."""
    try:
        return await answer
    except RefusedError as refusal:
        return refusal.reply
    except RunError as error:
        raise shed(str(error)) from None


def answer_reply(reply: Reply) -> Response:
    """An instance's reply as the router's own."""
    headers = {name: reply.headers[name] for name in RETURNED if name in reply.headers}
    return Response(reply.body, reply.status, headers)


def _add_router_reload(app: FastAPI, instances: BackendPool) -> None:
    @app.post(
        "/v1/reload",
        response_model=ReloadAnswer,
        openapi_extra=takes("ReloadBody", binary=False),
        responses=errors(400, 401, 408, 409, 413, 415, 422, 500, 503),
    )
    async def reload(request: Request) -> Response:
        """One instance after the other, so that the others go on; stops at the first refusal."""
        if media_type(request.headers) != JSON:
            raise HttpError(415, f"a checkpoint is named in JSON; send {JSON}")
        call = Call.of("", "/v1/reload", bytes(request.scope["nestpipe.body"]), request.headers)
        versions: set[str] = set()
        for backend in instances.backends.values():
            try:
                reply = await backend.send("POST", call, patient=True)
            except RunError as error:
                raise HttpError(409, f"{error}; instances before it are reloaded") from None
            if reply.status != 200:
                return answer_reply(reply)
            versions.add(json.loads(reply.body)["version"])
        reloaded = ReloadAnswer(version=", ".join(sorted(versions)))
        return Response(reloaded.model_dump_json(), media_type=JSON)
