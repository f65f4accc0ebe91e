"""One run of one arm, from its requests to its figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from nestpipe.serve.costs import Costs
from nestpipe.serve.load_arms import Arm
from nestpipe.serve.load_driver import SIGNAL_THREADS, RealPace, Run, by_threads, drive
from nestpipe.serve.load_report import Report, report
from nestpipe.serve.load_settings import LoadSettings
from nestpipe.serve.load_target import open_arm
from nestpipe.serve.load_workload import legs, visits
from nestpipe.serve.types import Clock, RankModel, RankService

SWITCH_S = 0.0005
"""Longest time for which a computing thread keeps Python's lock from the driver; usually 5 ms."""

Progress = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Everything that the arms of a comparison share."""

    settings: LoadSettings
    models: Sequence[RankModel]
    """One for each instance."""
    costs: Costs
    clock: Clock


def run_arm(arm: Arm, bench: Bench, progress: Progress = lambda: None) -> tuple[Report, Run]:
    """Serve all requests in one arm, with instances that know nobody yet."""
    serve, workload = bench.settings.serve, bench.settings.workload
    sent = list(legs(workload, visits(workload), arm.cap(serve)))
    with (
        open_arm(arm, serve, bench.models, bench.costs, bench.clock) as service,
        prompt_threads(),
    ):
        done = drive(service, sent, RealPace(bench.clock), progress=progress)
    return _report(f"{arm.letter} {arm.name}", done, bench.settings), done


@contextmanager
def prompt_threads() -> Generator[None]:
    """Let the driver have Python's lock soon after it wakes, though instances compute beside it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def run_service(
    name: str, service: RankService, clock: Clock, settings: LoadSettings, progress: Progress
) -> tuple[Report, Run]:
    """Serve all requests by a service that runs elsewhere."""
    sent = list(legs(settings.workload, visits(settings.workload)))
    with ThreadPoolExecutor(SIGNAL_THREADS) as pool:
        send = by_threads(service, pool)
        done = drive(service, sent, RealPace(clock), send=send, progress=progress)
    return _report(name, done, settings), done


def _report(name: str, done: Run, settings: LoadSettings) -> Report:
    return report(
        name,
        done,
        target_ms=settings.serve.target_ms,
        seconds=settings.workload.seconds,
        warmup_s=settings.workload.warmup_s,
    )
