"""`nestpipe serve` as its users start it, and the checkpoint of random weights that it serves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from nestpipe.checkpoint.folder import write_checkpoint
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.errors import RunError
from nestpipe.loadtest.run import RandomModel
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.http.client import Client
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.types import AdmissionOutcome, Answer, RankRequest, Signal

START_S = 600.0
"""How long a service may take to be ready."""
STOP_S = 60.0
THREADS = 256
"""Rankings on their way at once."""


def write_random(folder: Path, sizes: RandomModel) -> Path:
    """A checkpoint as `nestpipe train` writes them, of weights that follow from the sizes."""
    model = HstuRankModel.random(sizes.config, sizes.items, sizes.seed, "cpu")
    weights = model.ranker.state_dict()
    keys_K = torch.arange(1, sizes.items + 1)
    about = Manifest(
        step=0,
        tables=({"name": "items", "dim": sizes.dim, "dtype": "float32"},),
        model={"kind": "ranker", "config": asdict(sizes.config)},
    )
    return write_checkpoint(
        folder,
        about,
        {f"model.{name}": tensor for name, tensor in weights.items()},
        {"items": (keys_K, model.rows.rows(keys_K.numpy()))},
    )


class Started:
    """A running `nestpipe serve`: what it has said, where its parts are."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nestpipe", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None, "its words are asked for"
        with self.process.stderr as lines:
            for line in lines:
                with self._more:
                    self._lines.append(line)
                    self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def heard(self, pattern: str, timeout_s: float = START_S) -> list[re.Match[str]]:
        """All that it said of this so far; waits for the first."""
        found: list[re.Match[str]] = []

        def said() -> bool:
            found[:] = re.finditer(pattern, "".join(self._lines))
            return bool(found) or self._ended

        with self._more:
            self._more.wait_for(said, timeout_s)
        if not found:
            last = self._lines[-1].strip() if self._lines else "nothing"
            raise RunError(f"the service did not start; its last words were: {last}")
        return found

    @property
    def url(self) -> str:
        return self.heard(r"serving at (\S+)")[0][1]

    def instances(self) -> dict[str, str]:
        """URLs by name."""
        found = self.heard(r"(instance-\d+) is ready at (\S+),")
        return {one[1]: one[2] for one in found}

    def kill(self, name: str) -> None:
        """SIGKILL to the process of that name, as it is now."""
        found = self.heard(rf"{name} is (?:ready|back) at \S+, process (\d+)")
        os.kill(int(found[-1][1]), signal.SIGKILL)

    def stop(self) -> int:
        """Let it answer what it accepted; the exit status."""
        self.process.terminate()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._reader.join()
        return status


class Behind:
    """A `RankService` before which a router stands; its numbers are those of all instances."""

    def __init__(self, started: Started, front: Client, instances: Mapping[str, Client]) -> None:
        self.started = started
        self.instances = instances
        self._front = front

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        return self._front.prefetch(signal)

    def rank(self, request: RankRequest) -> Future[Answer]:
        return self._front.rank(request)

    def stats(self) -> dict[str, float]:
        """Of those that answer: one may have been killed."""
        found: list[dict[str, float]] = []
        for one in self.instances.values():
            with suppress(RunError):
                found.append(one.stats())
        return totals(found)

    def retries(self) -> float:
        """Rankings that the built-in router asked for at a second instance; nginx does not say."""
        return self._front.stats().get("router_retries", 0.0)

    def drain(self, timeout_s: float) -> bool:
        return self._front.drain(timeout_s)


@contextmanager
def serving(
    checkpoint: Path, router: str, instances: int, settings: Mapping[str, object]
) -> Generator[Behind]:
    """The service from its start to its end; instances compute on one thread each."""
    arguments = [str(checkpoint), "--instances", str(instances), "--port", "0"]
    arguments += ["--router", router, "--device", "cpu"]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={json.dumps(value)}"]
    started = Started(arguments)
    try:
        with ExitStack() as stack:
            front = stack.enter_context(Client(started.url, threads=THREADS))
            own = {
                name: stack.enter_context(Client(url, threads=1))
                for name, url in started.instances().items()
            }
            yield Behind(started, front, own)
    finally:
        started.stop()
