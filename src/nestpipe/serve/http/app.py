"""What the HTTP apps of instances and of the router share: errors, health, metrics, OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from nestpipe import __version__
from nestpipe.errors import NestpipeError
from nestpipe.serve.http.bodies import MEDIA_TYPE, ErrorAnswer, HealthAnswer, HttpError, of_fault
from nestpipe.serve.http.limits import LimitsMiddleware, RequestLimits
from nestpipe.serve.http.metrics import CONTENT_TYPE, Metrics

SAYS = {
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


Asked = Callable[[], Awaitable[dict[str, float]]]


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

    for told in (HttpError, NestpipeError, TimeoutError):
        app.exception_handler(told)(failed)

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
    app: FastAPI, limits: RequestLimits, token: str | None, metrics: Metrics, asked: Asked = _none
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
    told = version if request.scope.get("nestpipe.authorised", True) else None
    body = HealthAnswer(ready=ready and not draining, draining=draining, version=told)
    status = 200 if body.ready else 503
    return Response(body.model_dump_json(), status, media_type="application/json")


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Statuses of a page for OpenAPI."""
    return {one: {"model": ErrorAnswer, "description": SAYS[one]} for one in statuses}


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
