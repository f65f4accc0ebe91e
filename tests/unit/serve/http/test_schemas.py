"""Requests made from the OpenAPI page itself, right ones and wrong ones, against a fake service."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nestpipe.serve.http.apps import ServedApp, instance_app
from nestpipe.serve.http.worker import bind_port, new_server
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    HttpSettings,
    RankPath,
    RankRequest,
    ServeSettings,
    Signal,
)
from support.examples import num_examples

schemathesis = pytest.importorskip("schemathesis", reason="needs the dev extra")

BEYOND_SCHEMAS = ("make them agree", "give one for each", "events are too many", "a valid integer")
BEYOND_SCHEMAS += ("for models without a prefix", "a whole number, unquoted")
"""How values must fit each other, and that 5.0 is no id: what a schema cannot say."""
OPERATIONS = ["POST /v1/prefetch", "POST /v1/rank", "POST /v1/reload"]
OPERATIONS += ["GET /v1/health", "GET /metrics"]


class Fake:
    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        return AdmissionOutcome.NOT_AT_RISK

    def rank(self, request: RankRequest) -> Future[Answer]:
        future: Future[Answer] = Future()
        scores_C = np.zeros(len(request.candidates_C), np.float32)
        future.set_result(
            Answer(scores_C, RankPath.MISS_FULL, len(request.long), "v", {"queue": 0.1})
        )
        return future

    def stats(self) -> dict[str, float]:
        return {"shed": 0.0}

    def drain(self, timeout_s: float) -> bool:
        return True


def app(http: HttpSettings) -> ServedApp:
    small = ServeSettings(max_events=20, max_candidates=20)
    return instance_app(Fake(), small, http, version=lambda: "v", reload=lambda _: "v")


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    http = HttpSettings()
    listener = bind_port("127.0.0.1", 0)
    listener.listen()
    server = new_server(app(http), http)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    try:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
    finally:
        server.should_exit = True
        thread.join()


def operations(api: Any) -> dict[str, Any]:
    found = [result.ok() for result in api.get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found}


def test_the_page_has_these_operations(api: Any):
    assert set(operations(api)) == set(OPERATIONS)


@pytest.mark.parametrize(
    ("operation", "mode"),
    [(one, "POSITIVE") for one in OPERATIONS]
    + [(one, "NEGATIVE") for one in OPERATIONS if one.startswith("POST")],
)
def test_every_answer_is_one_that_the_page_announces(api: Any, operation: str, mode: str):
    one = operations(api)[operation]
    strategy = one.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

    @settings(
        max_examples=num_examples("some"), deadline=None, database=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(strategy)
    def check(case: Any) -> None:
        reply = case.call()
        assert reply.status_code < 500
        beyond = any(words in reply.text for words in BEYOND_SCHEMAS)
        schemathesis.checks.load_all_checks()
        accepts = schemathesis.checks.CHECKS.get_one("positive_data_acceptance")
        case.validate_response(reply, excluded_checks=[accepts] if beyond else [])

    check()
