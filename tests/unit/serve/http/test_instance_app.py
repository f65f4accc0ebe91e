"""The HTTP app of an instance, with a service behind it that does as it is told."""

import asyncio
import json
import threading
from concurrent.futures import Future
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from nestpipe.data.order import text_keys
from nestpipe.errors import CheckpointError, DataError, RunError, ShedError
from nestpipe.serve.engine.state import ClosingError
from nestpipe.serve.http.apps import ServedApp, instance_app
from nestpipe.serve.http.bodies import MEDIA_TYPE
from nestpipe.serve.http.client import ranking_body, read_answer, read_stats, signal_body
from nestpipe.serve.http.requests import HistoryStore
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    History,
    HttpSettings,
    RankPath,
    RankRequest,
    ServeSettings,
    Signal,
)

SETTINGS = ServeSettings(max_events=50, max_candidates=10)
TOKEN = "0123456789abcdef"
GOOD: dict[str, Any] = {"user": "u", "long": {"items": [1, 2, 3]}, "candidates": [7, 8]}


class Fake:
    """Scores are ids; faults and waiting on request."""

    def __init__(self) -> None:
        self.signals: list[Signal] = []
        self.requests: list[RankRequest] = []
        self.fault: BaseException | None = None
        self.raises = False
        self.hold = False
        self.held: list[Future[Answer]] = []
        self.drained = 0

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        self.signals.append(signal)
        if self.fault:
            raise self.fault
        return AdmissionOutcome.ADMITTED

    def rank(self, request: RankRequest) -> Future[Answer]:
        self.requests.append(request)
        future: Future[Answer] = Future()
        if self.fault and self.raises:
            raise self.fault
        if self.fault:
            future.set_exception(self.fault)
        elif self.hold:
            self.held.append(future)
        else:
            future.set_result(self.answer(request))
        return future

    @staticmethod
    def answer(request: RankRequest) -> Answer:
        used = len(request.long) + len(request.short)
        scores_C = (request.candidates_C / 3).astype(np.float32)
        return Answer(scores_C, RankPath.HBM_HIT, used, "v1", {"compute": 1.25})

    def stats(self) -> dict[str, float]:
        return {"shed": 3.0, "path_hbm_hit": float(len(self.requests))}

    def drain(self, timeout_s: float) -> bool:
        self.drained += 1
        return True


class Reloads:
    def __init__(self) -> None:
        self.version = "v1"
        self.asked: list[str | None] = []

    def __call__(self, checkpoint: str | None) -> str:
        self.asked.append(checkpoint)
        if checkpoint == "broken":
            raise CheckpointError("'broken' is not a checkpoint; name another")
        self.version = f"of {checkpoint}"
        return self.version


def histories() -> HistoryStore:
    ids = np.array([1, 2, 3, 4], dtype=np.int64)
    return HistoryStore(["known", "new"], np.array([4, 0], np.int64), ids, None, 50)


def build(
    service: Fake | None = None, http: HttpSettings | None = None, **options: Any
) -> tuple[ServedApp, Fake, Reloads]:
    service, reload = service or Fake(), Reloads()
    served = instance_app(
        service,
        SETTINGS,
        http or HttpSettings(),
        version=lambda: reload.version,
        reload=reload,
        **options,
    )
    return served, service, reload


def ask(served: ServedApp, method: str, path: str, **options: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(once())


def sentence(reply: httpx.Response) -> str:
    assert reply.headers["content-type"] == "application/json"
    assert set(reply.json()) == {"error"}
    return reply.json()["error"]


def test_a_ranking_is_answered_with_how_it_came_about():
    served, fake, _ = build()
    body = {**GOOD, "short": {"items": [4]}, "time": 99, "deadline_ms": 50}
    reply = ask(served, "POST", "/v1/rank", json=body)
    assert reply.status_code == 200
    assert reply.json() == {
        "scores": [float(np.float32(7 / 3)), float(np.float32(8 / 3))],
        "path": "hbm_hit",
        "length_used": 4,
        "version": "v1",
        "stages_ms": {"compute": 1.25},
    }
    (request,) = fake.requests
    assert (request.user, request.time, request.deadline_s) == ("u", 99, 0.05)
    assert request.long.items_N.tolist() == [1, 2, 3]
    assert request.long.items_N.dtype == np.int64
    assert request.short.items_N.tolist() == [4]


def test_a_signal_is_answered_with_its_outcome():
    served, fake, _ = build()
    body = {"user": "u", "history": {"items": [5, 6], "times": [1, 2]}}
    reply = ask(served, "POST", "/v1/prefetch", json=body, headers={"X-User": "u"})
    assert reply.json() == {"outcome": "admitted"}
    times_N = fake.signals[0].long.times_N
    assert times_N is not None
    assert times_N.tolist() == [1, 2]


def test_binary_scores_are_those_of_json_to_the_last_bit():
    served, fake, _ = build()
    items_N = np.arange(5, dtype=np.int64)
    request = RankRequest("u", History(items_N), History(items_N[:0]), items_N + 3)
    headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE}
    reply = ask(served, "POST", "/v1/rank", content=ranking_body(request), headers=headers)
    assert reply.headers["content-type"] == MEDIA_TYPE
    answer = read_answer(reply.content)
    assert np.array_equal(answer.scores_C, fake.answer(request).scores_C)
    assert (answer.path, answer.length_used, answer.version) == (RankPath.HBM_HIT, 5, "v1")
    as_json = ask(
        served, "POST", "/v1/rank", content=ranking_body(request),
        headers={"content-type": MEDIA_TYPE},
    ).json()  # fmt: skip
    assert np.array_equal(np.array(as_json["scores"], np.float32), answer.scores_C)
    signal = signal_body(Signal("u", History(items_N)))
    assert ask(served, "POST", "/v1/prefetch", content=signal, headers=headers).status_code == 200


@pytest.mark.parametrize("user", ["u", "a b", "użytkownik", "100%", "a/b?c"])
def test_the_header_names_the_same_user_as_the_body(user: str):
    served, _, _ = build()
    body = {**GOOD, "user": user}
    right = {"X-User": quote(user, safe="")}
    assert ask(served, "POST", "/v1/rank", json=body, headers=right).status_code == 200
    reply = ask(served, "POST", "/v1/rank", json=body, headers={"X-User": "somebody"})
    assert reply.status_code == 422
    assert "make them agree" in sentence(reply)


def test_a_user_of_the_file_needs_no_history():
    served, fake, _ = build(histories=histories())
    assert ask(served, "POST", "/v1/prefetch", json={"user": "known"}).status_code == 200
    body = {"user": "known", "short": {"items": [9]}, "candidates": [1]}
    assert ask(served, "POST", "/v1/rank", json=body).json()["length_used"] == 5
    assert fake.signals[0].long.items_N.tolist() == [1, 2, 3, 4]
    body = {"user": "new", "candidates": [1]}
    assert ask(served, "POST", "/v1/rank", json=body).json()["length_used"] == 0


@pytest.mark.parametrize("page", ["/v1/rank", "/v1/prefetch"])
def test_an_unknown_user_without_history_is_not_found(page: str):
    served, fake, _ = build(histories=histories())
    body = {"user": "nobody"} | ({"candidates": [1]} if page == "/v1/rank" else {})
    reply = ask(served, "POST", page, json=body)
    assert reply.status_code == 404
    assert "'nobody' is unknown" in sentence(reply)
    assert not fake.requests
    assert not fake.signals


BAD_JSON = [
    b"",
    b"{",
    b"nul",
    b'{"user": "u", "candidates": [1], "long": {"items": [NaN]}}',
    b'{"user": "u", "candidates": [1], "deadline_ms": Infinity, "long": {"items": []}}',
    b'{"user": "\\ud800", "candidates": [1], "long": {"items": []}}',
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("body", BAD_JSON, ids=range(len(BAD_JSON)))
def test_what_is_not_json_is_refused(body: bytes):
    served, fake, _ = build()
    headers = {"content-type": "application/json"}
    reply = ask(served, "POST", "/v1/rank", content=body, headers=headers)
    assert reply.status_code in (400, 422)
    assert len(sentence(reply)) < 300
    assert not fake.requests


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"user": 42}, "user is 42"),
        ({"user": ""}, "user is"),
        ({"user": "x" * 257}, "user is"),
        ({"user": None}, "user is null"),
        ({"candidates": []}, "candidates is empty"),
        ({"candidates": [1.5]}, "candidates[0] is 1.5"),
        ({"candidates": ["1"]}, 'candidates[0] is "1"'),
        ({"candidates": [True]}, "candidates[0] is true"),
        ({"candidates": [2**63]}, "candidates[0] is 9223372036854775808"),
        ({"candidates": [-1]}, "candidates holds -1"),
        ({"candidates": None}, "candidates is null"),
        ({"candidates": {"items": [1]}}, "candidates is"),
        ({"long": {"items": [1, -5]}}, "items holds -5"),
        ({"short": {"items": [-6]}}, "items holds -6"),
        ({"long": {"items": [1, 2], "times": [1]}}, "2 items and 1 times"),
        ({"long": {}}, "long.items is missing"),
        ({"long": [1, 2]}, "long is [1, 2]"),
        ({"long": None}, "long is missing"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"deadline_ms": -1}, "deadline_ms is -1"),
        ({"deadline_ms": 60001}, "deadline_ms is 60001"),
        ({"deadline_ms": "50"}, 'deadline_ms is "50"'),
        ({"time": 1.5}, "time is 1.5"),
        ({"tme": 1}, "tme is not known"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(change: dict[str, Any], says: str):
    served, fake, _ = build()
    reply = ask(served, "POST", "/v1/rank", json={**GOOD, **change})
    assert reply.status_code == 422
    assert says in sentence(reply)
    assert not fake.requests


@pytest.mark.parametrize("lost", ["user", "candidates"])
def test_what_is_missing_is_named(lost: str):
    served, _, _ = build()
    body = {name: value for name, value in GOOD.items() if name != lost}
    reply = ask(served, "POST", "/v1/rank", json=body)
    assert (reply.status_code, sentence(reply)) == (422, f"{lost} is missing; give it")


@pytest.mark.parametrize("value", [[1], 5, "text", None, True])
def test_a_body_that_is_no_object_is_refused(value: Any):
    served, _, _ = build()
    for page in ("/v1/rank", "/v1/prefetch", "/v1/reload"):
        headers = {"content-type": "application/json"}
        reply = ask(served, "POST", page, content=json.dumps(value), headers=headers)
        assert reply.status_code == 422
        assert "the body is" in sentence(reply)


def test_strings_become_the_keys_that_training_made_of_them():
    served, fake, _ = build()
    texts = ["SKU-1", "東京", ""]
    body = {**GOOD, "long": {"items": texts}, "candidates": texts}
    assert ask(served, "POST", "/v1/rank", json=body).status_code == 200
    expected = text_keys(texts).tolist()
    assert fake.requests[0].candidates_C.tolist() == expected
    assert fake.requests[0].long.items_N.tolist() == expected


@pytest.mark.parametrize("mixed", [[1, "a"], ["a", 1]])
def test_numbers_and_strings_do_not_mix(mixed: list[Any]):
    served, _, _ = build()
    reply = ask(served, "POST", "/v1/rank", json={**GOOD, "candidates": mixed})
    assert reply.status_code == 422
    place = mixed.index("a")
    assert sentence(reply) == f'candidates[{place}] is "a"; it should be a valid integer'


def test_a_number_in_quotes_is_no_string_of_the_data():
    served, _, _ = build()
    reply = ask(served, "POST", "/v1/rank", json={**GOOD, "long": {"items": ["a", "-7"]}})
    assert reply.status_code == 422
    assert sentence(reply) == 'items[1] is "-7"; it should be a whole number, unquoted'


def test_negative_ids_are_let_through_where_the_model_has_them():
    served, fake, _ = build(http=HttpSettings(negative_ids=True))
    assert ask(served, "POST", "/v1/rank", json={**GOOD, "candidates": [-4]}).status_code == 200
    assert fake.requests[0].candidates_C.tolist() == [-4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"long": {"items": [1] * 51}}, "51 events"),
        ({"long": {"items": [1] * 30}, "short": {"items": [1] * 21}}, "51 events"),
        ({"candidates": [1] * 11}, "11 candidates"),
    ],
)
def test_too_many_are_too_large(change: dict[str, Any], says: str):
    served, fake, _ = build()
    reply = ask(served, "POST", "/v1/rank", json={**GOOD, **change})
    assert reply.status_code == 413
    assert says in sentence(reply)
    assert not fake.requests
    most = {"long": {"items": [1] * 30}, "short": {"items": [1] * 20}, "candidates": [1] * 10}
    assert ask(served, "POST", "/v1/rank", json={**GOOD, **most}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "", "application/xml", "multipart/form-data"])
def test_other_types_of_bodies_are_not_read(kind: str):
    served, _, _ = build()
    for page in ("/v1/rank", "/v1/prefetch", "/v1/reload"):
        headers = {"content-type": kind}
        reply = ask(served, "POST", page, content=json.dumps(GOOD), headers=headers)
        assert reply.status_code == 415
        assert "application/json" in sentence(reply)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        (ShedError("the queue is full; wait", 2.2), 503, "queue is full"),
        (DataError("a ranking has no time; say when it is asked"), 422, "no time"),
        (RunError("the instance has failed"), 500, "its log"),
        (ZeroDivisionError("secret of the code"), 500, "its log"),
        (TimeoutError(), 504, "deadline"),
    ],
)
def test_a_fault_of_the_service_becomes_a_status(
    fault: Exception, status: int, says: str, raises: bool
):
    served, fake, _ = build()
    fake.fault, fake.raises = fault, raises
    reply = ask(served, "POST", "/v1/rank", json=GOOD)
    assert reply.status_code == status
    assert says in sentence(reply)
    assert "secret" not in reply.text
    assert reply.headers.get("retry-after") == ("3" if status == 503 else None)


def test_a_shed_signal_says_when_to_come_again():
    served, fake, _ = build()
    fake.fault = ShedError("closing")
    reply = ask(served, "POST", "/v1/prefetch", json={"user": "u", "history": {"items": []}})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_an_instance_that_closes_says_that_another_may_answer():
    served, fake, _ = build()
    fake.fault = ClosingError("closed before it came to this")
    reply = ask(served, "POST", "/v1/rank", json=GOOD)
    assert (reply.status_code, reply.headers["x-nestpipe-draining"]) == (503, "1")
    assert "ask another" in sentence(reply)


def test_a_deadline_that_passes_is_told_and_the_work_goes_on():
    served, fake, _ = build()
    fake.hold = True
    reply = ask(served, "POST", "/v1/rank", json={**GOOD, "deadline_ms": 1})
    assert reply.status_code == 504
    assert "allow more time" in sentence(reply)
    assert not fake.held[0].cancelled()


def test_time_with_the_router_counts():
    served, fake, _ = build()
    headers = {"x-nestpipe-waited-ms": "30"}
    ask(served, "POST", "/v1/rank", json={**GOOD, "deadline_ms": 50}, headers=headers)
    for nonsense in ("-5", "nan", "x", "inf"):
        headers = {"x-nestpipe-waited-ms": nonsense}
        ask(served, "POST", "/v1/rank", json={**GOOD, "deadline_ms": 50}, headers=headers)
    found = [request.deadline_s for request in fake.requests]
    assert found[0] == pytest.approx(0.02)
    assert all(one is not None and 0 < one <= 0.05 for one in found)


def test_without_the_token_nothing_but_health_is_there():
    served, fake, _ = build(token=TOKEN)
    for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        for method, page in [
            ("POST", "/v1/rank"),
            ("POST", "/v1/prefetch"),
            ("POST", "/v1/reload"),
            ("POST", "/v1/health"),
            ("GET", "/metrics"),
            ("GET", "/docs"),
            ("GET", "/openapi.json"),
            ("GET", "/nothing"),
        ]:
            reply = ask(served, method, page, json=GOOD, headers=wrong)
            assert reply.status_code == 401, page
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "token" in sentence(reply)
        reply = ask(served, "GET", "/v1/health", headers=wrong)
        assert reply.json() == {"ready": True, "draining": False, "version": None}
    assert not fake.requests
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(served, "POST", "/v1/rank", json=GOOD, headers=right).status_code == 200
    assert ask(served, "GET", "/v1/health", headers=right).json()["version"] == "v1"


def test_metrics_tell_what_the_service_counts_and_how_long_answers_took():
    served, _, _ = build()
    ask(served, "POST", "/v1/rank", json=GOOD)
    ask(served, "GET", "/there/is/no/such/page")
    reply = ask(served, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'nestpipe_http_seconds_count{page="/v1/rank",status="200"} 1.0' in reply.text
    assert 'nestpipe_http_seconds_count{page="other",status="404"} 1.0' in reply.text
    assert 'nestpipe_rank_seconds_count{path="hbm_hit"} 1.0' in reply.text
    found = read_stats(reply.text)
    assert (found["shed"], found["path_hbm_hit"], found["http_requests"]) == (3.0, 1.0, 0.0)
    assert found["http_body_bytes"] == 0.0


def test_pages_that_are_not_there_and_methods_that_are_not():
    served, _, _ = build()
    reply = ask(served, "GET", "/v1/nothing")
    assert (reply.status_code, sentence(reply)) == (404, "there is no GET /v1/nothing; see /docs")
    reply = ask(served, "GET", "/v1/rank")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"


def test_another_checkpoint_is_served_when_asked():
    served, _, reload = build()
    reply = ask(served, "POST", "/v1/reload", json={"checkpoint": "runs/b"})
    assert reply.json() == {"version": "of runs/b"}
    assert ask(served, "POST", "/v1/reload", json={}).status_code == 200
    assert reload.asked == ["runs/b", None]


def test_a_broken_checkpoint_leaves_the_old_one():
    served, _, _ = build()
    reply = ask(served, "POST", "/v1/reload", json={"checkpoint": "broken"})
    assert (reply.status_code, sentence(reply)) == (
        409,
        "'broken' is not a checkpoint; name another",
    )
    assert ask(served, "GET", "/v1/health").json()["version"] == "v1"
    assert ask(served, "POST", "/v1/rank", json=GOOD).status_code == 200


def test_two_reloads_at_once_are_one_too_many_and_rankings_go_on():
    began, end = threading.Event(), threading.Event()

    def slow(checkpoint: str | None) -> str:
        began.set()
        end.wait()
        return "v2"

    service = Fake()
    served = instance_app(service, SETTINGS, HttpSettings(), version=lambda: "v", reload=slow)

    async def both() -> list[int]:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = asyncio.create_task(client.post("/v1/reload", json={}))
            await asyncio.to_thread(began.wait)
            second = await client.post("/v1/reload", json={})
            ranking = await client.post("/v1/rank", json=GOOD)
            end.set()
            return [(await first).status_code, second.status_code, ranking.status_code]

    assert asyncio.run(both()) == [200, 409, 200]


def test_a_broken_instance_is_not_ready():
    served, _, _ = build(healthy=lambda: False)
    reply = ask(served, "GET", "/v1/health")
    assert (reply.status_code, reply.json()["ready"]) == (503, False)


def test_while_draining_what_was_accepted_is_answered_and_nothing_else():
    served, fake, _ = build()
    fake.hold = True

    async def story() -> None:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            accepted = asyncio.create_task(client.post("/v1/rank", json=GOOD))
            while not fake.held:
                await asyncio.sleep(0)
            draining = asyncio.create_task(served.drain(60))
            await asyncio.sleep(0)
            health = await client.get("/v1/health")
            assert health.status_code == 503
            assert health.json() == {"ready": False, "draining": True, "version": "v1"}
            late = await client.post("/v1/rank", json=GOOD)
            assert late.status_code == 503
            assert (late.headers["retry-after"], late.headers["connection"]) == ("1", "close")
            assert (await client.get("/metrics")).status_code == 200
            assert not draining.done()
            fake.held[0].set_result(fake.answer(fake.requests[0]))
            assert (await accepted).status_code == 200
            assert await draining
            assert fake.drained == 1

    asyncio.run(story())


def test_a_drain_that_takes_too_long_is_given_up():
    served, fake, _ = build()
    fake.hold = True

    async def story() -> bool:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            accepted = asyncio.create_task(client.post("/v1/rank", json=GOOD))
            while not fake.held:
                await asyncio.sleep(0)
            done = await served.drain(0.01)
            fake.held[0].set_result(fake.answer(fake.requests[0]))
            await accepted
            return done

    assert not asyncio.run(story())


def test_a_flood_is_shed_and_nothing_else_happens():
    served, fake, _ = build(http=HttpSettings(requests=20))
    fake.hold = True

    async def flood() -> list[httpx.Response]:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            signal = {"user": "u", "history": {"items": [1]}}
            tasks = [
                asyncio.create_task(
                    client.post("/v1/rank", json=GOOD)
                    if number % 2
                    else client.post("/v1/prefetch", json=signal)
                )
                for number in range(400)
            ]
            done, held = await asyncio.wait(tasks, timeout=0.5)
            assert served.limits.requests == len(held) <= 20
            for request, future in zip(fake.requests, fake.held, strict=True):
                future.set_result(fake.answer(request))
            return [task.result() for task in done] + [await task for task in held]

    replies = asyncio.run(flood())
    assert {reply.status_code for reply in replies} == {200, 503}
    assert all("retry-after" in reply.headers for reply in replies if reply.status_code == 503)
    assert (served.limits.requests, served.limits.body_bytes) == (0, 0)
    assert served.limits.stats()["http_shed_requests"] > 0


def test_bodies_in_hand_never_take_more_memory_than_allowed():
    http = HttpSettings(body_mb=0.01, bodies_mb=0.02)
    served, fake, _ = build(http=http)
    fake.hold = True
    most = 0

    async def flood() -> list[int]:
        nonlocal most
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            padding = b" " * 5000
            content = json.dumps(GOOD).encode() + padding
            headers = {"content-type": "application/json"}
            tasks = [
                asyncio.create_task(client.post("/v1/rank", content=content, headers=headers))
                for _ in range(30)
            ]
            done, held = await asyncio.wait(tasks, timeout=0.3)
            most = served.limits.body_bytes
            for request, future in zip(fake.requests, fake.held, strict=True):
                future.set_result(fake.answer(request))
            return [task.result().status_code for task in done] + [
                (await task).status_code for task in held
            ]

    statuses = asyncio.run(flood())
    assert 5000 < most <= http.bodies_bytes
    assert (statuses.count(200), set(statuses)) == (most // 5000, {200, 503})
    assert served.limits.body_bytes == 0


def test_the_page_of_the_api_names_the_limits_of_this_service():
    served, _, _ = build()
    page = ask(served, "GET", "/openapi.json").json()
    schemas = page["components"]["schemas"]
    numbers, texts = schemas["HistoryBody"]["properties"]["items"]["anyOf"]
    assert (numbers["maxItems"], texts["maxItems"]) == (50, 50)
    numbers, texts = schemas["RankBody"]["properties"]["candidates"]["anyOf"]
    assert (numbers["maxItems"], texts["maxItems"]) == (10, 10)
    assert numbers["items"]["minimum"] == 0
    assert texts["items"]["type"] == "string"
    assert MEDIA_TYPE in page["paths"]["/v1/rank"]["post"]["requestBody"]["content"]
    assert set(page["paths"]) == {
        "/v1/prefetch", "/v1/rank", "/v1/reload", "/v1/health", "/metrics",
    }  # fmt: skip
    assert ask(served, "GET", "/docs").status_code == 200


COLUMNS: dict[str, Any] = {
    "user": "u",
    "candidates": [7, 8],
    "features": {"user": [42]},
    "candidate_features": {"genre": [[1], []]},
    "values": {"features": [0.5, 2.0], "price": 3},
    "candidate_values": {"rank": [1, 2]},
}


def test_a_model_without_a_prefix_is_asked_with_columns_and_no_history():
    served, fake, _ = build(needs_history=False)
    assert ask(served, "POST", "/v1/rank", json=COLUMNS).status_code == 200
    context = fake.requests[0].context
    assert context.keys["user"].tolist() == [42]
    assert [of.tolist() for of in context.candidate_keys["genre"]] == [[1], []]
    assert context.values["features"].tolist() == [0.5, 2.0]
    assert context.values["price"].shape == ()
    assert context.candidate_values["rank"].shape == (2,)
    assert len(fake.requests[0].long) == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"features": {"user": [-1]}}, "feature user holds -1; give ids of 0 or above"),
        ({"features": {"user": [0.5]}}, "features.user[0] is 0.5; it should be a valid integer"),
        ({"values": {"features": [1e39]}}, "values.features"),
        ({"candidate_values": {"rank": [[1], [1, 2]]}}, "candidate_values.rank does not fit 2"),
        ({"candidate_values": {"rank": [1]}}, "candidate_values.rank does not fit 2 candidates"),
        ({"candidate_features": {"genre": [[1] * 51, []]}}, "has too many keys; give fewer"),
    ],
)
def test_columns_that_cannot_be_used_are_told(change: dict[str, Any], told: str):
    served, _, _ = build(needs_history=False)
    reply = ask(served, "POST", "/v1/rank", json={**COLUMNS, **change})
    assert reply.status_code in (413, 422)
    assert told in sentence(reply)


def test_a_ranker_refuses_columns_that_it_would_not_read():
    served, _, _ = build()
    reply = ask(served, "POST", "/v1/rank", json={**GOOD, "features": {"user": [1]}})
    assert reply.status_code == 422
    assert "features is for models without a prefix" in sentence(reply)
