"""The HTTP app of the built-in router: both legs of a user to the same instance."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TypeVar
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from nestpipe.errors import RunError
from nestpipe.serve.http.app import ServedApp, answer_health, errors, guarded, new_app, takes
from nestpipe.serve.http.backend_pool import RETURNED, BackendPool, Call, RefusedError
from nestpipe.serve.http.bodies import (
    MEDIA_TYPE,
    BinaryError,
    HealthAnswer,
    HttpError,
    PrefetchAnswer,
    RankAnswer,
    ReloadAnswer,
    User,
    request_schemas,
    shed,
    split,
)
from nestpipe.serve.http.client import Reply
from nestpipe.serve.http.instance_app import BINARY_ANSWER
from nestpipe.serve.http.limits import RequestLimits
from nestpipe.serve.http.metrics import Metrics
from nestpipe.serve.http.requests import JSON, USER_HEADER, media_type, validated
from nestpipe.serve.settings import HttpSettings, ServeSettings

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
    _add_legs(app, instances)
    _add_reload(app, instances)

    @app.get(
        "/v1/health",
        response_model=HealthAnswer,
        responses={503: {"model": HealthAnswer, "description": "Draining, or no instance is well"}},
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


def _add_legs(app: FastAPI, instances: BackendPool) -> None:
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
        return answer_reply(await _heard(instances.rank(read_call(request))))


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


async def _heard(answer: Awaitable[T]) -> T | Reply:
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


def _add_reload(app: FastAPI, instances: BackendPool) -> None:
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
        told = ReloadAnswer(version=", ".join(sorted(versions)))
        return Response(told.model_dump_json(), media_type=JSON)
