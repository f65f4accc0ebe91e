"""The HTTP app of one instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from nestpipe.errors import NestpipeError
from nestpipe.serve.http.app import ServedApp, answer_health, errors, guarded, new_app, takes
from nestpipe.serve.http.bodies import (
    MEDIA_TYPE,
    HealthAnswer,
    HttpError,
    PrefetchAnswer,
    RankAnswer,
    ReloadAnswer,
    ReloadBody,
    of_fault,
    pack,
    request_schemas,
)
from nestpipe.serve.http.limits import RequestLimits
from nestpipe.serve.http.metrics import Metrics
from nestpipe.serve.http.requests import JSON, HistoryStore, RequestReader, media_type, validated
from nestpipe.serve.settings import MOST_DEADLINE_S, HttpSettings, ServeSettings
from nestpipe.serve.types import Answer, RankRequest, RankService

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
    well: Callable[[], bool] = lambda: True,
    reload: Reload,
    token: str | None = None,
    histories: HistoryStore | None = None,
) -> ServedApp:
    """The routes of one instance behind its limits."""
    schemas = request_schemas(settings, http, histories is not None)
    app, limits = new_app("NestPipe instance", schemas), RequestLimits(http)
    metrics = Metrics(service.stats, limits.stats)
    _add_legs(app, service, RequestReader(settings, http, histories), metrics)
    reloading = _add_reload(app, reload)

    @app.get(
        "/v1/health",
        response_model=HealthAnswer,
        responses={503: {"model": HealthAnswer, "description": "Draining, or broken"}},
    )
    async def health(request: Request) -> Response:
        """Whether to send requests here."""
        return answer_health(request, well(), limits.draining, version())

    async def drain(timeout_s: float) -> bool:
        limits.draining = True
        empty = await limits.emptied(timeout_s)
        return await asyncio.to_thread(service.drain, timeout_s) and empty

    return ServedApp(guarded(app, limits, token, metrics), app, limits, metrics, drain, reloading)


def _add_legs(app: FastAPI, service: RankService, reader: RequestReader, metrics: Metrics) -> None:
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
    future.add_done_callback(_look)
    done, _ = await asyncio.wait([future], timeout=ranking.deadline_s or MOST_DEADLINE_S)
    if not done:
        raise of_fault(TimeoutError())
    return future.result()


def _look(future: asyncio.Future[Answer]) -> None:
    """A fault that comes after the deadline was told already."""
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
    told = RankAnswer(scores=answer.scores_C.tolist(), **about)
    return Response(told.model_dump_json(), media_type=JSON)


def _add_reload(app: FastAPI, reload: Reload) -> Callable[[], Awaitable[str]]:
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
