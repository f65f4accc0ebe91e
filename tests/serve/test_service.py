"""`nestpipe serve` as its users start it: real processes, a tiny model of random weights."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from nestpipe.checkpoint.folder import Manifest, write_checkpoint
from nestpipe.errors import CheckpointError, DataError, NestpipeError, RunError, ShedError
from nestpipe.models import HstuConfig, HstuRanker
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.http.apps import ServedApp, instance_app
from nestpipe.serve.http.bodies import MEDIA_TYPE
from nestpipe.serve.http.client import Client, ranking_body, read_stats, signal_body
from nestpipe.serve.types import History, HttpSettings, RankItem, RankRequest, ServeSettings, Signal

CONFIG = HstuConfig(blocks=2, heads=2, dim=8, attention_dim=4, value_dim=4, max_len=64)
ITEMS = 50
SMALL = ["--set", "max_events=256", "--set", "max_candidates=64", "--set", "device_mb=16"]
TOKEN = "0123456789abcdef"


def write_random(folder: Path, step: int) -> Path:
    """Random weights, other ones for each step."""
    torch.manual_seed(step)
    weights = HstuRanker(CONFIG).state_dict()
    about = Manifest(
        step=step,
        tables=({"name": "items", "dim": CONFIG.dim, "dtype": "float32"},),
        model={"kind": "ranker", "config": asdict(CONFIG)},
    )
    return write_checkpoint(
        folder,
        about,
        {f"model.{name}": value for name, value in weights.items()},
        {"items": (torch.arange(ITEMS), torch.randn(ITEMS, CONFIG.dim))},
    )


class Started:
    """A running `nestpipe serve`, and what it has said so far."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nestpipe", "serve", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._more:
                    self._lines.append(line)
                    self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def heard(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Wait until it has said this, so many times."""
        found: list[re.Match[str]] = []

        def said() -> bool:
            found[:] = re.finditer(pattern, "".join(self._lines))
            return len(found) >= times or self._ended

        with self._more:
            assert self._more.wait_for(said, 120), f"{pattern!r} not in {self._lines}"
        assert len(found) >= times, f"{pattern!r} not in {self._lines}"
        return found[times - 1]

    @property
    def url(self) -> str:
        return self.heard(r"serving at (\S+)")[1]

    def pid(self, name: str) -> int:
        return int(self.heard(rf"{name} is (?:ready|back) at \S+, process (\d+)")[1])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[Started]:
    service = Started(*arguments, **environment)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.end()


def until(condition: Callable[[], object]) -> None:
    """Ask again and again, but not for ever."""
    nothing = threading.Event()
    for _ in range(6000):
        if condition():
            return
        nothing.wait(0.02)
    raise AssertionError("it did not come about")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("run"), 1)


def request(number: int, length: int = 100) -> RankRequest:
    random = np.random.default_rng(number)
    ids = random.integers(0, ITEMS, length + 30)
    long, short = History(ids[:length]), History(ids[length : length + 10])
    return RankRequest(f"user {number}", long, short, ids[length + 10 :])


def expected(model: HstuRankModel, asked: RankRequest) -> np.ndarray:
    return model.full([RankItem(asked.long.joined(asked.short), asked.candidates_C)])[0]


def close(scores: np.ndarray, right: np.ndarray) -> bool:
    return float(np.abs(scores - right).max()) <= 1e-5 * float(right.std())


BEHIND_NGINX = pytest.param("nginx", marks=pytest.mark.needs("nginx"))


@pytest.mark.parametrize("router", ["builtin", BEHIND_NGINX])
def test_both_legs_through_the_router_give_the_scores_of_the_model(checkpoint: Path, router: str):
    model = HstuRankModel.from_checkpoint(checkpoint, "cpu")
    options = ["--port", "0", "--router", router, "--set", "admission=false", *SMALL]
    with started(str(checkpoint), *options) as service, Client(service.url) as client:
        paths = set()
        for number in range(8):
            asked = request(number)
            client.prefetch(Signal(asked.user, asked.long))
            answer = client.rank(asked).result()
            assert close(answer.scores_C, expected(model, asked))
            assert (answer.length_used, answer.version) == (110, model.version)
            paths.add(answer.path)
        assert paths <= {"hbm_hit", "late_hit"}
        assert client.health()["ready"]
        assert service.end() == 0


def test_an_instance_killed_under_load_loses_no_request_and_comes_back(checkpoint: Path):
    model = HstuRankModel.from_checkpoint(checkpoint, "cpu")
    with started(str(checkpoint), "--port", "0", *SMALL) as service:
        asked = [request(number) for number in range(20)]
        right = {one.user: expected(model, one) for one in asked}
        enough, answered = threading.Event(), threading.Semaphore(0)

        def keep_asking(client: Client) -> int:
            count = 0
            while not enough.is_set():
                one = asked[count % len(asked)]
                client.prefetch(Signal(one.user, one.long))
                answer = client.rank(one).result()
                assert close(answer.scores_C, right[one.user])
                count += 1
                answered.release()
            return count

        def wait_for(count: int) -> None:
            for _ in range(count):
                assert answered.acquire(timeout=120)

        with Client(service.url) as client, ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking, client) for _ in range(4)]
            wait_for(40)
            os.kill(service.pid("instance-0"), signal.SIGKILL)
            service.heard(r"instance-0 was ended by SIGKILL; it is started again")
            wait_for(40)
            service.heard(r"instance-0 is back")
            wait_for(40)
            enough.set()
            assert sum(one.result() for one in asking) >= 120
            until(lambda: client.stats()["router_members_alive"] == 2)
        assert service.end() == 0


def test_told_to_stop_under_load_it_answers_what_it_accepted(checkpoint: Path):
    with started(str(checkpoint), "--port", "0", *SMALL) as service:
        stopped = threading.Event()

        def keep_asking(client: Client) -> list[NestpipeError]:
            """Until the service is gone; every answer before is a good one."""
            count, faults = 0, []
            while not faults:
                try:
                    client.rank(request(count)).result()
                except (RunError, ShedError) as error:
                    if not stopped.is_set():
                        raise
                    faults.append(error)
                count += 1
            return faults

        with Client(service.url) as client, ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking, client) for _ in range(4)]
            client.rank(request(1)).result()
            stopped.set()
            assert service.end() == 0
            for one in asking:
                # Turned away, or not connected; never cut off while waiting for an answer.
                assert re.search("draining|is it running", str(one.result()[0]))


def test_a_new_checkpoint_is_served_without_dropping_a_request(tmp_path: Path):
    first = write_random(tmp_path, 1)
    versions = [HstuRankModel.from_checkpoint(first, "cpu").version]
    with started(str(tmp_path), "--port", "0", *SMALL) as service:
        done = threading.Event()

        def keep_asking(client: Client) -> set[str]:
            seen, count = set(), 0
            while not done.is_set():
                seen.add(client.rank(request(count % 10)).result().version)
                count += 1
            return seen

        with Client(service.url) as client, ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(keep_asking, client) for _ in range(2)]
            assert client.health()["version"] == versions[0]
            for step in (2, 3):
                checkpoint = write_random(tmp_path, step)
                versions.append(HstuRankModel.from_checkpoint(checkpoint, "cpu").version)
                if step == 2:
                    assert client.reload(str(checkpoint)) == versions[1]
                else:
                    service.process.send_signal(signal.SIGHUP)
                    service.heard("now serving", times=2)
                until(lambda: client.health()["version"] == versions[-1])
            (checkpoint / "dense.safetensors").write_bytes(b"broken")
            with pytest.raises(CheckpointError, match="is damaged"):
                client.reload(str(checkpoint))
            with pytest.raises(CheckpointError, match="not a checkpoint"):
                client.reload(str(tmp_path / "nothing"))
            assert client.rank(request(0)).result().version == versions[-1]
            done.set()
            assert set().union(*(one.result() for one in asking)) <= set(versions)
        assert service.end(signal.SIGINT) == 0


def test_other_machines_need_the_token_and_users_of_the_file_no_history(
    checkpoint: Path, tmp_path: Path
):
    np.savez(
        tmp_path / "histories.npz",
        users=np.array(["known"]),
        lengths=np.array([3]),
        items=np.array([1, 2, 3]),
    )
    (tmp_path / "token").write_text(TOKEN)
    options = ["--host", "0.0.0.0", "--token-file", str(tmp_path / "token"), "--port", "0"]
    options += ["--histories", str(tmp_path / "histories.npz"), "--instances", "1"]
    with started(str(checkpoint), *options, *SMALL) as service:
        url = service.url
        with Client(url) as stranger, pytest.raises(DataError, match="token"):
            stranger.rank(request(1)).result()
        health = httpx.get(f"{url}/v1/health", trust_env=False).json()
        assert health == {"ready": True, "draining": False, "version": None}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as caller:
            reply = caller.post("/v1/rank", json={"user": "known", "candidates": [5, 6]})
            assert (reply.status_code, reply.json()["length_used"]) == (200, 3)
            reply = caller.post("/v1/rank", json={"user": "nobody", "candidates": [5]})
            assert reply.status_code == 404
            assert caller.post("/v1/prefetch", json={"user": "known"}).status_code == 200


def test_nobody_is_left_when_the_launcher_is_killed(checkpoint: Path):
    with started(str(checkpoint), "--port", "0", *SMALL) as service:
        places = [service.heard(r"is ready at http://(\S+):(\d+)", times)
                  for times in (1, 2, 3)]  # fmt: skip
        assert service.url
        service.process.kill()
        service.process.wait()
        for place in places:
            until(lambda place=place: not listens(place[1], int(place[2])))


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_flood_is_answered_or_shed_and_memory_keeps_its_bound():
    settings = ServeSettings(
        queue=4, batch=2, device_mb=0.1, host_mb=0.1, max_events=256, max_candidates=64,
        admission=False,
    )  # fmt: skip
    model = HstuRankModel.random(CONFIG, ITEMS, device="cpu")
    seen: list[dict[str, float]] = []

    async def flood(served: ServedApp) -> list[httpx.Response]:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def one(number: int) -> list[httpx.Response]:
                asked = request(number % 40)
                headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE}
                signal = signal_body(Signal(asked.user, asked.long))
                first = await client.post("/v1/prefetch", content=signal, headers=headers)
                body = ranking_body(asked)
                second = await client.post("/v1/rank", content=body, headers=headers)
                seen.append(read_stats((await client.get("/metrics")).text))
                return [first, second]

            pairs = await asyncio.gather(*(one(number) for number in range(200)))
            return [reply for pair in pairs for reply in pair]

    with Instance(model, settings) as instance:
        http = HttpSettings(requests=64)
        served = instance_app(
            instance, settings, http, version=lambda: model.version, reload=lambda _: ""
        )
        replies = asyncio.run(flood(served))
    assert {reply.status_code for reply in replies} == {200, 503}
    assert all("retry-after" in reply.headers for reply in replies if reply.status_code == 503)
    assert max(one["shed"] + one["http_shed_requests"] for one in seen) > 0
    assert max(one["device_bytes"] for one in seen) > 0
    for one in seen:
        assert one["device_bytes"] <= one["device_bytes_bound"] == int(0.1 * 2**20)
        assert one["host_bytes"] <= one["host_bytes_bound"]
        assert one["http_requests"] <= 64
        assert one["queue_rankings"] <= settings.queue


@pytest.mark.parametrize("broken", ["dense.safetensors", "manifest.json"])
def test_a_checkpoint_that_cannot_be_served_ends_it_with_a_sentence(tmp_path: Path, broken: str):
    folder = write_random(tmp_path, 1)
    (folder / broken).write_text("{}")
    with started(str(tmp_path), "--port", "0", *SMALL) as service:
        assert service.process.wait(120) == 2
        service.heard("error: .*checkpoint")
