"""Apps on real ports of this machine, called by the client, the router, and bad callers."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from nestpipe.errors import CheckpointError, ConfigError, DataError, RunError, ShedError
from nestpipe.serve.http.apps import ServedApp, instance_app, router_app
from nestpipe.serve.http.client import Client
from nestpipe.serve.http.router import Ring
from nestpipe.serve.http.worker import Server, bind_port, new_server
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

SETTINGS = ServeSettings(max_events=5000, max_candidates=1000)
TOKEN = "0123456789abcdef"
NO_EVENTS = History(np.zeros(0, np.int64))


class Fake:
    """Scores are ids, and say who made them."""

    def __init__(self, name: str = "one") -> None:
        self.name = name
        self.users: list[str] = []
        self.signals: list[str] = []
        self.fault: BaseException | None = None
        self.hold = False
        self.held: list[tuple[RankRequest, Future[Answer]]] = []
        self.came = threading.Event()

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        self.signals.append(signal.user)
        if self.fault:
            raise self.fault
        return AdmissionOutcome.ADMITTED

    def rank(self, request: RankRequest) -> Future[Answer]:
        self.users.append(request.user)
        future: Future[Answer] = Future()
        if self.fault:
            future.set_exception(self.fault)
        elif self.hold:
            self.held.append((request, future))
        else:
            future.set_result(self.answer(request))
        self.came.set()
        return future

    def answer(self, request: RankRequest) -> Answer:
        used = len(request.long) + len(request.short)
        scores_C = (request.candidates_C / 7).astype(np.float32)
        return Answer(scores_C, RankPath.DRAM_HIT, used, self.name)

    def stats(self) -> dict[str, float]:
        largest = 5.0 if self.name == "instance-0" else 3.0
        return {
            "path_dram_hit": float(len(self.users)), "broken": 0.0, "largest_batch": largest,
        }  # fmt: skip

    def drain(self, timeout_s: float) -> bool:
        return True


@dataclass
class Running:
    """A server on its own thread."""

    url: str
    server: Server
    served: ServedApp
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(self, act: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(act)


@contextmanager
def running(served: ServedApp, http: HttpSettings, port: int = 0) -> Iterator[Running]:
    listener = bind_port("127.0.0.1", port)
    server = new_server(served, http)
    loop: asyncio.AbstractEventLoop | None = None
    up = threading.Event()

    async def serve() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        begun = server.startup

        async def startup(sockets: list[socket.socket] | None = None) -> None:
            await begun(sockets)
            up.set()

        server.startup = startup
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    assert up.wait(60)
    assert loop is not None
    try:
        yield Running(url, server, served, loop, thread)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def an_instance(fake: Fake, http: HttpSettings, token: str | None = None) -> ServedApp:
    def reload(checkpoint: str | None) -> str:
        if checkpoint == "broken":
            raise CheckpointError("'broken' is not a checkpoint; name another")
        fake.name = checkpoint or "latest"
        return fake.name

    return instance_app(fake, SETTINGS, http, version=lambda: fake.name, reload=reload, token=token)


@contextmanager
def one(fake: Fake, http: HttpSettings | None = None, token: str | None = None):
    http = http or HttpSettings()
    with running(an_instance(fake, http, token), http) as found:
        yield found


def ranking(user: str = "u", deadline_s: float | None = None, count: int = 300) -> RankRequest:
    ids = np.arange(count, dtype=np.int64)
    times = History(ids, ids * 2)
    return RankRequest(user, times, times.last(3), ids[:50], 5, deadline_s)


def signal(user: str = "u") -> Signal:
    return Signal(user, ranking().long)


def test_the_client_gives_what_the_service_computed():
    fake = Fake()
    with one(fake) as at, Client(at.url) as client:
        assert client.prefetch(signal("a b")) is AdmissionOutcome.ADMITTED
        request = ranking("a b")
        answer = client.rank(request).result()
        assert np.array_equal(answer.scores_C, fake.answer(request).scores_C)
        assert (answer.path, answer.length_used, answer.version) == (RankPath.DRAM_HIT, 303, "one")
        assert client.health() == {"ready": True, "draining": False, "version": "one"}
        assert client.stats()["path_dram_hit"] == 1.0
        assert client.reload("b") == client.health()["version"] == "b"
        with pytest.raises(CheckpointError, match="broken"):
            client.reload("broken")
        assert client.drain(1)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (ShedError("full"), ShedError),
        (DataError("no time"), DataError),
        (TimeoutError(), TimeoutError),
        (ZeroDivisionError(), RunError),
    ],
)
def test_the_client_fails_as_the_service_did(fault: Exception, kind: type[Exception]):
    fake = Fake()
    fake.fault = fault
    with one(fake) as at, Client(at.url) as client, pytest.raises(kind):
        client.rank(ranking()).result()


def test_a_client_without_a_service_says_so():
    with one(Fake()) as at:
        url = at.url
    with Client(url) as client, pytest.raises(RunError, match="is it running"):
        client.rank(ranking()).result()


def test_a_client_needs_the_token():
    with one(Fake(), token=TOKEN) as at:
        with Client(at.url) as client, pytest.raises(DataError, match="token"):
            client.prefetch(signal())
        with Client(at.url, TOKEN) as client:
            assert client.prefetch(signal()) is AdmissionOutcome.ADMITTED


def test_a_port_that_is_taken_is_named():
    taken = bind_port("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with taken, pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
        bind_port("127.0.0.1", port)


def test_answers_are_not_held_back_for_an_acknowledgement():
    with one(Fake()) as at, connect(at) as caller:
        caller.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert caller.recv(1)
        (connection,) = at.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def said(connection: socket.socket) -> tuple[int, bytes]:
    """The status and body of what comes until the connection closes."""
    text = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            text += part
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def until(condition: Callable[[], object]) -> None:
    """Ask again and again, but not for ever."""
    nothing = threading.Event()
    for _ in range(6000):
        if condition():
            return
        nothing.wait(0.01)
    raise AssertionError("it did not come about")


def connect(at: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", at.port), timeout=60)


HEAD = "POST /v1/rank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_a_body_that_does_not_come_is_not_waited_for():
    fake = Fake()
    with one(fake, HttpSettings(body_timeout_s=1.0)) as at, connect(at) as slow:
        slow.sendall((HEAD + 'Content-Length: 100\r\n\r\n{"user"').encode())
        status, body = said(slow)
        assert status == 408
        assert "did not arrive" in json.loads(body)["error"]
        assert at.served.limits.requests == at.served.limits.body_bytes == 0
        assert at.served.limits.stats()["http_slow"] == 1
        with Client(at.url) as client:
            client.rank(ranking()).result()


@pytest.mark.parametrize("begin", ["", "POST /v1/rank HT", HEAD])
def test_headers_that_do_not_come_are_not_waited_for(begin: str):
    with one(Fake(), HttpSettings(header_timeout_s=0.05)) as at, connect(at) as slow:
        slow.sendall(begin.encode())
        assert said(slow)[0] == 0


def test_a_connection_that_was_used_must_not_dawdle_either():
    with one(Fake(), HttpSettings(header_timeout_s=1.0)) as at, connect(at) as slow:
        slow.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = b""
        while not heard.endswith(b"}"):
            heard += slow.recv(65536)
        assert b" 200 " in heard
        slow.sendall(b"GET /v1/he")
        assert said(slow)[0] == 0


def test_a_body_that_is_announced_too_large_is_not_read():
    with one(Fake(), HttpSettings(body_mb=0.001)) as at, connect(at) as large:
        large.sendall((HEAD + "Content-Length: 1001\r\n\r\n").encode())
        status, body = said(large)
        assert status == 413
        assert "1000 bytes at most" in json.loads(body)["error"]


def test_a_caller_who_sends_too_much_still_hears_why():
    with one(Fake(), HttpSettings(body_mb=0.001)) as at:
        for _ in range(3):
            headers = {"content-type": "application/json"}
            reply = httpx.post(
                f"{at.url}/v1/rank", content=b" " * 5_000_000, headers=headers, trust_env=False
            )
            assert reply.status_code == 413


def test_a_body_in_pieces_is_cut_off_when_it_is_too_large():
    with one(Fake(), HttpSettings(body_mb=0.001)) as at, connect(at) as large:
        large.sendall((HEAD + "Transfer-Encoding: chunked\r\n\r\n").encode())
        large.sendall(b"258\r\n" + b" " * 600 + b"\r\n")
        large.sendall(b"258\r\n" + b" " * 600 + b"\r\n")
        assert said(large)[0] == 413
        assert at.served.limits.body_bytes == 0


def test_a_connection_too_many_is_turned_away_and_told_when_to_come_again():
    with one(Fake(), HttpSettings(connections=1)) as at, connect(at) as first:
        first.sendall(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert first.recv(1)
        reply = httpx.get(f"{at.url}/v1/health", trust_env=False)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert "too many connections" in reply.json()["error"]


def test_headers_without_end_are_refused():
    with one(Fake()) as at, connect(at) as large:
        large.sendall((HEAD + "X-Long: " + "x" * 200_000).encode())
        assert said(large)[0] in (400, 0)  # 0: it hung up before all was sent
        with Client(at.url) as client:
            assert client.health()["ready"]


@pytest.mark.parametrize(
    "text",
    [b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", (HEAD + "Content-Length: -1\r\n\r\n").encode()],
)
def test_what_is_not_http_is_refused(text: bytes):
    with one(Fake()) as at, connect(at) as odd:
        odd.sendall(text)
        assert said(odd)[0] == 400


def test_a_caller_that_leaves_in_the_middle_leaves_nothing_behind():
    fake = Fake()
    with one(fake) as at:
        with connect(at) as gone:
            gone.sendall((HEAD + "Content-Length: 100\r\n\r\n{").encode())
        with Client(at.url) as client:
            client.rank(ranking()).result()
            until(lambda: not at.served.limits.requests)  # the server has heard of it
        assert at.served.limits.body_bytes == 0
        assert len(fake.users) == 1


def test_told_to_stop_it_answers_what_it_accepted_and_ends():
    fake = Fake()
    fake.hold = True
    with one(fake) as at, Client(at.url) as client:
        accepted = client.rank(ranking())
        assert fake.came.wait(60)
        at.call(at.server.stop)
        until(lambda: client.health()["draining"])
        with pytest.raises(RunError, match="draining"):
            client.prefetch(signal())
        assert at.thread.is_alive()
        request, future = fake.held[0]
        future.set_result(fake.answer(request))
        assert accepted.result().version == "one"
        at.thread.join(60)
        assert not at.thread.is_alive()
        assert not at.server.force_exit


def test_told_twice_it_ends_at_once():
    fake = Fake()
    fake.hold = True
    with one(fake) as at, Client(at.url) as client:
        accepted = client.rank(ranking())
        assert fake.came.wait(60)
        at.call(at.server.stop)
        at.call(at.server.stop)
        at.thread.join(60)
        assert not at.thread.is_alive()
        with pytest.raises(RunError):
            accepted.result()


@pytest.fixture
def two() -> Iterator[tuple[Running, dict[str, Fake], dict[str, Running]]]:
    """A router before two instances."""
    with ExitStack() as stack:
        fakes = {name: Fake(name) for name in ("instance-0", "instance-1")}
        http = HttpSettings(probe_s=0.05)
        places = {name: stack.enter_context(one(fake, http)) for name, fake in fakes.items()}
        urls = {name: place.url for name, place in places.items()}
        router = stack.enter_context(running(router_app(urls, SETTINGS, http), http))
        yield router, fakes, places


def test_both_legs_of_a_user_meet_at_the_instance_that_the_ring_names(two: Any):
    router, fakes, _ = two
    ring, users = Ring(fakes), [f"user {number}" for number in range(20)]
    with Client(router.url) as client:
        for user in users:
            assert client.prefetch(signal(user)) is AdmissionOutcome.ADMITTED
            assert client.rank(ranking(user)).result().version == ring.owner(user)
    for name, fake in fakes.items():
        expected = [user for user in users if ring.owner(user) == name]
        assert fake.users == fake.signals == expected
        assert expected


def test_the_router_reads_the_user_of_a_body_where_no_header_names_it(two: Any):
    router, fakes, _ = two
    ring = Ring(fakes)
    for number in range(6):
        body = {"user": f"user {number}", "long": {"items": [1]}, "candidates": [3]}
        reply = httpx.post(f"{router.url}/v1/rank", json=body, trust_env=False)
        assert reply.status_code == 200
        assert reply.json()["version"] == ring.owner(body["user"])


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"long": {"items": []}, "candidates": [1]}, 422, "user is missing"),
        ({"user": "u", "long": {"items": []}, "candidates": [-1]}, 422, "candidates holds -1"),
        ({"user": "u", "long": {"items": [1] * 5001}, "candidates": [1]}, 413, "5001 events"),
        ([], 422, "the body is []"),
    ],
)
def test_what_an_instance_refuses_the_caller_hears_in_its_words(
    two: Any, body: Any, status: int, says: str
):
    router, fakes, _ = two
    reply = httpx.post(f"{router.url}/v1/rank", json=body, trust_env=False)
    assert reply.status_code == status
    assert says in reply.json()["error"]
    assert not any(fake.users for fake in fakes.values())


def owned_by(name: str, fakes: dict[str, Fake]) -> str:
    ring = Ring(fakes)
    return next(f"u{n}" for n in range(100) if ring.owner(f"u{n}") == name)


def test_a_ranking_whose_instance_is_gone_is_answered_by_the_other(two: Any):
    router, fakes, places = two
    user = owned_by("instance-0", fakes)
    gone = places["instance-0"]
    gone.server.should_exit = gone.server.force_exit = True
    gone.thread.join(60)
    with Client(router.url) as client:
        for _ in range(5):
            assert client.rank(ranking(user)).result().version == "instance-1"
        assert client.prefetch(signal(user)) is AdmissionOutcome.ADMITTED
        assert client.health()["ready"]
        # It comes back at its place, and gets its users back.
        http = HttpSettings()
        back = running(an_instance(fakes["instance-0"], http), http, gone.port)
        with back:
            until(lambda: client.rank(ranking(user)).result().version == "instance-0")


def test_a_draining_instance_loses_no_ranking(two: Any):
    router, fakes, places = two
    user = owned_by("instance-0", fakes)
    fakes["instance-0"].hold = True
    with Client(router.url) as client:
        accepted = client.rank(ranking(user))
        assert fakes["instance-0"].came.wait(60)
        places["instance-0"].call(places["instance-0"].server.stop)
        until(lambda: places["instance-0"].served.limits.draining)
        assert client.rank(ranking(user)).result().version == "instance-1"
        request, future = fakes["instance-0"].held[0]
        future.set_result(fakes["instance-0"].answer(request))
        assert accepted.result().version == "instance-0"


def test_what_one_instance_sheds_the_other_may_take_and_both_is_final(two: Any):
    router, fakes, _ = two
    user = owned_by("instance-0", fakes)
    with Client(router.url) as client:
        fakes["instance-0"].fault = ShedError("full")
        assert client.rank(ranking(user)).result().version == "instance-1"
        fakes["instance-1"].fault = ShedError("full", 7)
        with pytest.raises(ShedError) as shed:
            client.rank(ranking(user)).result()
        assert shed.value.retry_after_s == 7


def test_with_no_instance_left_a_ranking_is_shed_and_health_says_so(two: Any):
    router, _, places = two
    for place in places.values():
        place.server.should_exit = place.server.force_exit = True
        place.thread.join(60)
    with Client(router.url) as client:
        with pytest.raises(ShedError, match="none of 2 instances answered"):
            client.rank(ranking()).result()
        assert client.prefetch(signal()) is AdmissionOutcome.FAILED
        until(lambda: not client.health()["ready"])


def test_the_router_adds_up_what_its_instances_count(two: Any):
    router, _, _ = two
    with Client(router.url) as client:
        for number in range(6):
            client.rank(ranking(f"user {number}")).result()
        found = client.stats()
    assert (found["path_dram_hit"], found["router_rankings"]) == (6.0, 6.0)
    assert (found["router_members_alive"], found["http_requests"]) == (2.0, 0.0)
    assert found["largest_batch"] == 5.0, "the largest of all, not their sum"


def test_a_reload_goes_to_every_instance_and_stops_at_a_broken_checkpoint(two: Any):
    router, fakes, _ = two
    with Client(router.url) as client:
        assert client.reload("b") == "b"
        assert [fake.name for fake in fakes.values()] == ["b", "b"]
        with pytest.raises(CheckpointError, match="broken"):
            client.reload("broken")
        until(lambda: client.health()["version"] == "b")


def test_the_token_goes_with_the_request_to_the_instance():
    http = HttpSettings(probe_s=0.05)
    with one(Fake(), http, TOKEN) as at:
        served = router_app({"instance-0": at.url}, SETTINGS, http, TOKEN)
        with running(served, http) as router, Client(router.url, TOKEN) as client:
            assert client.rank(ranking()).result().version == "one"
            assert client.stats()["path_dram_hit"] == 1.0
            assert client.health()["version"] == "one"
            with Client(router.url) as stranger, pytest.raises(DataError, match="token"):
                stranger.prefetch(signal())
