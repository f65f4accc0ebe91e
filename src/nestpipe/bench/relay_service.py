"""The service of `nestpipe bench relay`: as its users start it, and what its answers showed.

It serves a checkpoint of random weights. Answers are compared with a reference, an instance may be
killed under load, and each arm leaves a record.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.checkpoint.folder import Manifest, write_checkpoint
from nestpipe.errors import RunError
from nestpipe.loadtest.driver import Report
from nestpipe.loadtest.run import RandomModel
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.http.client import Client
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    RankItem,
    RankPath,
    RankRequest,
    Scores,
    Signal,
)

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

    def await_lines(self, pattern: str, timeout_s: float = START_S) -> list[re.Match[str]]:
        """The lines that match so far; waits for the first."""
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
        return self.await_lines(r"serving at (\S+)")[0][1]

    def instances(self) -> dict[str, str]:
        """URLs by name."""
        found = self.await_lines(r"(instance-\d+) is ready at (\S+),")
        return {one[1]: one[2] for one in found}

    def kill(self, name: str) -> None:
        """SIGKILL to the process of that name, as it is now."""
        found = self.await_lines(rf"{name} is (?:ready|back) at \S+, process (\d+)")
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


# What the arms showed: are answers right, what did a kill do; a record of each, one sentence.


# Shapes: C candidates

EXACT = 1e-5
"""Largest difference of two scores, in standard deviations of the request's scores (float32)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers that were looked at, and those that were not what they should be."""

    compared: int = 0
    wrong: int = 0
    worst: float = 0.0
    """Largest difference of a score, in standard deviations."""

    def __add__(self, other: Compared) -> Compared:
        worst = max(self.worst, other.worst)
        return Compared(self.compared + other.compared, self.wrong + other.wrong, worst)


class Reference:
    """The same weights, without anything kept: computes each ranking once and remembers it."""

    def __init__(self, model: HstuRankModel) -> None:
        self.model = model
        self._known: dict[tuple[int, int, int], Scores] = {}

    def compare(self, which: tuple[int, int], request: RankRequest, answer: Answer) -> Compared:
        """An answer with the scores of the events that it says it rests on.

        `which` names the request: the seed of its round, its number there.
        """
        whole = request.long.joined(request.short)
        used = answer.length_used
        if not 0 < used <= len(whole) or answer.version != self.model.version:
            return Compared(1, 1, float("inf"))
        key = (*which, used)
        if key not in self._known:
            item = RankItem(whole.last(used), request.candidates_C, time=request.time)
            self._known[key] = self.model.full([item])[0]
        worst = deviation(answer.scores_C, self._known[key])
        return Compared(1, int(not worst <= EXACT), worst)


def deviation(scores_C: Scores, right_C: Scores) -> float:
    """The largest difference, in standard deviations of what is right; inf where it is none."""
    if scores_C.shape != right_C.shape:
        return float("inf")
    largest, unit = float(np.abs(scores_C - right_C).max()), float(right_C.std())
    if largest == 0:
        return 0.0
    return largest / unit if np.isfinite(largest) and unit > 0 else float("inf")


# An instance that is killed while it has a ranking in hand.


AFTER = 0.4
UNTIL = 0.8
"""Between these parts of the arrivals it is killed, as soon as it has a ranking in hand."""
POLL_S = 0.01
BACK_S = 120.0
"""How long an instance may take to be back."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and what followed."""

    instance: str
    in_hand: int
    """Rankings that it had when it was last asked."""
    retries: int | None
    """Rankings that the router asked for at another instance; None: nginx does not say."""
    back: bool
    """Whether it was started again."""


@contextmanager
def killed_under_load(
    service: Behind, name: str, seconds: float, *, tells: bool
) -> Generator[Callable[[], Kill]]:
    """Kill that instance while requests come; after the block, the function says what followed.

    `tells`: the router counts rankings that it had to ask for again.
    """
    ended = threading.Event()
    before = service.retries() if tells else 0.0
    with ThreadPoolExecutor(1) as pool:
        in_hand = pool.submit(_kill_when_busy, service, name, seconds, ended)

        def followed() -> Kill:
            retries = int(service.retries() - before) if tells else None
            return Kill(name, in_hand.result(), retries, _came_back(service, name))

        try:
            yield followed
        finally:
            ended.set()


def _kill_when_busy(service: Behind, name: str, seconds: float, ended: threading.Event) -> int:
    ended.wait(AFTER * seconds)
    in_hand = 0
    for _ in range(round((UNTIL - AFTER) * seconds / POLL_S)):
        in_hand = int(service.instances[name].stats()["open_rankings"])
        if in_hand or ended.wait(POLL_S):
            break
    service.started.kill(name)
    return in_hand


def _came_back(service: Behind, name: str) -> bool:
    with suppress(RunError):
        return bool(service.started.await_lines(rf"{name} is back", BACK_S))
    return False


FRONTS = {"builtin": "the built-in router", "nginx": "nginx"}


@dataclass(frozen=True, slots=True)
class RelayReading:
    """One arm behind one front, all rounds together."""

    front: str
    report: Report
    scores: Compared
    kill: Kill | None = None
    faults: tuple[str, ...] = ()
    """Distinct error messages of lost requests."""

    @property
    def lost(self) -> int:
        """Requests that got no scores."""
        return self.report.sheds + self.report.errors + self.report.unanswered

    @property
    def p99_ms(self) -> float:
        return self.report.latency.p99_ms if self.report.latency else float("inf")

    @property
    def hits(self) -> dict[str, int]:
        """Answers by path."""
        found = {path: self.report.paths.get(str(path)) for path in RankPath}
        return {str(path): one.count if one else 0 for path, one in found.items()}

    @property
    def reloads(self) -> int | None:
        """Prefixes from host memory, mostly for the signal; None: a killed instance forgets."""
        return None if self.kill else int(self.report.counted.get("reloads", 0))

    @property
    def signals(self) -> dict[str, int]:
        """Signals by what became of them; none where none were sent."""
        return {} if set(self.report.outcomes) == {"lost"} else dict(self.report.outcomes)

    def as_json(self) -> dict[str, Any]:
        report, latency = self.report, self.report.latency
        return {
            "front": self.front,
            "arm": report.name,
            "target_ms": report.target_ms,
            "requests": report.requests,
            "p50_ms": latency.p50_ms if latency else None,
            "p99_ms": latency.p99_ms if latency else None,
            "within_target": report.compliant / report.requests if report.requests else None,
            "keeps_target": report.keeps_target,
            "signals": self.signals,
            "hits": self.hits,
            "reloads": self.reloads,
            "cuts": report.cuts,
            "lost": self.lost,
            "faults": list(self.faults),
            "wrong": self.scores.wrong,
            "compared": self.scores.compared,
            "worst_deviation": self.scores.worst,
            "length_asked": report.asked.mean,
            "length_used": report.used.mean,
            "driver_late_p99_ms": report.late_p99_ms,
            "valid": report.valid,
            "killed": asdict(self.kill) if self.kill else None,
        }


def is_sound(readings: Sequence[RelayReading]) -> bool:
    """Whether no request was lost and no score wrong."""
    return not any(one.lost or one.scores.wrong for one in readings)


def conclusion(readings: Sequence[RelayReading], length: int) -> str:
    """One sentence: what relay did, what the kill did, whether scores were right."""
    fronts = list(dict.fromkeys(one.front for one in readings))
    parts = [_of_front(front, [one for one in readings if one.front == front]) for front in fronts]
    killed = [one for one in readings if one.kill]
    lost, asked = sum(one.lost for one in killed), sum(one.report.requests for one in killed)
    wrong = sum(one.scores.wrong for one in readings)
    compared = sum(one.scores.compared for one in readings)
    late = "" if all(one.report.valid for one in readings) else _late(readings)
    return (
        f"At {length:,} events and a P99 target of {readings[0].report.target_ms:g} ms, "
        f"{'; '.join(parts)}; with an instance killed under load {lost} of {asked} requests were "
        f"lost; {wrong} of {compared} answers had a wrong score{late}."
    )


def _of_front(front: str, readings: Sequence[RelayReading]) -> str:
    arms = {one.report.name: one for one in readings}
    inline, relays = arms["inline full"], [arms["relay"], arms["relay + host"]]
    kept = [one for one in relays if one.report.keeps_target]
    best = min(kept or relays, key=lambda one: one.p99_ms)
    where = f"behind {FRONTS[front]}"
    figures = f"P99 {best.p99_ms:.0f} ms, inline {inline.p99_ms:.0f} ms"
    if not kept:
        in_time = best.p99_ms <= best.report.target_ms
        spoilt = f", {best.report.spoilt:.1%} cut, shed or lost" if in_time else ""
        return f"{where} relay misses it ({figures}{spoilt})"
    names = " and ".join(one.report.name for one in kept)
    keep = "keeps" if len(kept) == 1 else "keep"
    also = ", and so does inline ranking" if inline.report.keeps_target else " where inline cannot"
    return f"{where} {names} {keep} it{also} ({figures})"


def _late(readings: Sequence[RelayReading]) -> str:
    worst = max(one.report.late_p99_ms for one in readings)
    return (
        f"; but the driver was up to {worst:.1f} ms late at P99, so this shows nothing: run it on "
        "an idle machine"
    )
