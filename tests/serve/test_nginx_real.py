"""A real nginx, with the configuration that is written for it, before three small servers."""

from __future__ import annotations

import http.client
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nestpipe.serve.http.launch import nginx_config
from support.programs import find

NGINX = find("nginx")
pytestmark = pytest.mark.needs("nginx")

USERS = [f"user-{number}" for number in range(120)]


class Talk(BaseHTTPRequestHandler):
    """Answers with the server's name; a moody server may close the door, or say that it is busy."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # head and body in one packet: two would wait for each other

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = self.server
        assert isinstance(server, Server)
        if server.mood == "hangs up":
            self.close_connection = True
            return
        status = 503 if server.mood == "busy" else 200
        text = f"{server.name} {len(body)}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


class Server(ThreadingHTTPServer):
    """One instance: a port and a mood."""

    daemon_threads = True
    mood = "well"

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Talk)
        self.thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.open: set[socket.socket] = set()
        self.thread.start()

    @property
    def name(self) -> str:
        return str(self.server_port)

    def process_request(self, request, client_address) -> None:
        assert isinstance(request, socket.socket)
        self.open.add(request)
        super().process_request(request, client_address)

    def kill(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        self.shutdown()
        self.thread.join()
        self.server_close()
        for connection in self.open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it was closed already


@dataclass
class Front:
    """nginx, and what is behind it."""

    port: int
    servers: list[Server]
    lost: list[str] = field(default_factory=list)

    def ask(self, path: str, user: str | None, body: bytes = b"{}", method: str = "POST"):
        """Status and text of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            headers = {} if user is None else {"X-User": user}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def place(self, path: str, user: str) -> str:
        """The name of the server that answered."""
        status, text = self.ask(path, user)
        if status != 200:
            self.lost.append(f"{path} of {user}: {status} {text}")
            return "nobody"
        return text.split()[0]

    def places(self, path: str) -> dict[str, str]:
        return {user: self.place(path, user) for user in USERS}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def nginx(folder: Path, config: str, port: int) -> Iterator[None]:
    """nginx in the foreground until the end of the block."""
    assert NGINX is not None
    (folder / "nginx.conf").write_text(config)
    command = [NGINX, "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, "-g", "daemon off;"], stderr=log)
    try:
        wait_for(port, process, folder / "log")
        yield
    finally:
        process.terminate()
        process.wait(20)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until somebody listens there."""
    for _ in range(500):
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            threading.Event().wait(0.02)
        else:
            return
    raise AssertionError("nginx does not listen: " + log.read_text())


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    servers, port = [Server() for _ in range(3)], free_port()
    config = nginx_config(
        [f"127.0.0.1:{server.name}" for server in servers],
        f"127.0.0.1:{port}",
        fail_s=60.0,
        body_mb=0.25,
    )
    with nginx(tmp_path, config, port):
        yield Front(port, servers)
    for server in servers:
        server.kill()


def test_a_user_always_reaches_the_same_instance_with_both_legs_and_users_spread(front: Front):
    signals, rankings = front.places("/v1/prefetch"), front.places("/v1/rank")
    assert signals == rankings == front.places("/v1/rank")
    assert not front.lost
    shares = Counter(rankings.values())
    assert set(shares) == {server.name for server in front.servers}
    assert min(shares.values()) > len(USERS) / 3 * 0.5


def test_a_killed_instance_loses_no_request_and_moves_only_its_own_users(front: Front):
    before = front.places("/v1/rank")
    dead = front.servers[0]
    dead.kill()
    after, signals = front.places("/v1/rank"), front.places("/v1/prefetch")
    assert not front.lost
    assert after == signals
    moved = {user for user in USERS if before[user] != after[user]}
    assert moved == {user for user in USERS if before[user] == dead.name}
    assert len({after[user] for user in moved}) == 2, "its users spread over the others"


def test_killing_under_load_loses_no_ranking(front: Front):
    """Four threads ask over and over while one instance is killed between their requests."""
    started, answers, stop = threading.Semaphore(0), Counter[str](), threading.Event()
    lock = threading.Lock()

    def ask(number: int) -> None:
        turn = 0
        while not stop.is_set():
            place = front.place("/v1/rank", USERS[(number + 4 * turn) % len(USERS)])
            with lock:
                answers[place] += 1
            turn += 1
            started.release()

    threads = [threading.Thread(target=ask, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        assert started.acquire(timeout=20)
    front.servers[1].kill()
    for _ in range(200):
        assert started.acquire(timeout=20)
    stop.set()
    for thread in threads:
        thread.join()
    assert not front.lost
    assert set(answers) == {server.name for server in front.servers}


@pytest.mark.parametrize("mood", ["hangs up", "busy"])
def test_an_instance_that_hangs_up_or_is_busy_is_stood_in_for(front: Front, mood: str):
    before = front.places("/v1/rank")
    bad = front.servers[2]
    bad.mood = mood
    after = front.places("/v1/rank")
    assert not front.lost
    assert bad.name not in after.values()
    assert all(after[user] == before[user] for user in USERS if before[user] != bad.name)


def test_one_survivor_answers_all(front: Front):
    front.servers[0].kill()
    front.servers[2].kill()
    assert set(front.places("/v1/rank").values()) == {front.servers[1].name}
    assert not front.lost


def test_a_body_arrives_whole_at_the_instance_that_stands_in(front: Front):
    front.servers[0].mood = front.servers[1].mood = "hangs up"
    for user in USERS[:20]:
        assert front.ask("/v1/rank", user, b"x" * 200_000) == (
            200,
            f"{front.servers[2].name} 200000",
        )


def test_health_and_metrics_need_no_user(front: Front):
    for path in ("/v1/health", "/metrics"):
        assert front.ask(path, None, b"", "GET")[0] == 200


def test_what_is_wrong_is_refused_before_an_instance_sees_it(front: Front):
    status, text = front.ask("/v1/rank", None)
    assert (status, "give the header X-User" in text) == (400, True)
    assert front.ask("/v1/prefetch", "")[0] == 400
    assert front.ask("/v1/other", "u")[0] == 404
    assert front.ask("/v1/rank", "u", b"x" * 300_000)[0] == 413


def test_the_user_may_stand_in_the_query(tmp_path: Path):
    servers, port = [Server() for _ in range(2)], free_port()
    places = [f"127.0.0.1:{server.name}" for server in servers]
    with nginx(tmp_path, nginx_config(places, f"127.0.0.1:{port}", key="query user"), port):
        front = Front(port, servers)
        for user in USERS[:20]:
            signal, ranking = (
                front.ask(f"/v1/{leg}?user={user}", None) for leg in ("prefetch", "rank")
            )
            assert signal == ranking
            assert signal[0] == 200
        assert front.ask("/v1/rank", "u")[0] == 400
    for server in servers:
        server.kill()
