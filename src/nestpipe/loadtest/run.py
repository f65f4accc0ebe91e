"""One run of one arm, from its requests to its figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from nestpipe.loadtest.arms import Arm
from nestpipe.loadtest.driver import SIGNAL_THREADS, RealPace, Run, by_threads, drive
from nestpipe.loadtest.report import Report, report
from nestpipe.loadtest.settings import LoadSettings
from nestpipe.loadtest.target import open_arm
from nestpipe.loadtest.workload import Leg, legs, visits
from nestpipe.serve.engine.cost_model import Costs
from nestpipe.serve.process.worker import gc_frozen
from nestpipe.serve.types import Clock, RankModel, RankService

SWITCH_S = 0.0005
"""Longest time for which a computing thread keeps Python's lock from the driver; usually 5 ms."""
PRIORITY = 1
"""The lowest real-time priority: above everything that computes."""

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
        gc_frozen(),
        open_arm(arm, serve, bench.models, bench.costs, bench.clock) as service,
        prompt_threads(),
        prompt_driver(),
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


@contextmanager
def prompt_driver(*, with_new_threads: bool = False) -> Generator[bool]:
    """Let this thread run as soon as it wakes, where the system allows it; whether it does.

    Else, on a machine whose cores all compute, a thread that wakes may wait for the end of
    another's time slice, 3 ms and more: the driver would be late. Threads that it starts meanwhile
    have the same priority if `with_new_threads`.
    """
    if not hasattr(os, "sched_setscheduler"):
        yield False
        return
    alone = 0 if with_new_threads else os.SCHED_RESET_ON_FORK
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | alone, os.sched_param(PRIORITY))
    except OSError:
        yield False  # it takes a right that ordinary users do not have
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy | alone, parameter)


def run_service(
    name: str, service: RankService, clock: Clock, settings: LoadSettings, progress: Progress
) -> tuple[Report, Run]:
    """Serve all requests by a service that runs elsewhere."""
    sent = list(legs(settings.workload, visits(settings.workload)))
    done = drive_service(service, sent, clock, progress)
    return _report(name, done, settings), done


def drive_service(
    service: RankService, sent: Sequence[Leg], clock: Clock, progress: Progress = lambda: None
) -> Run:
    """Send these legs to a service that runs elsewhere."""
    with ThreadPoolExecutor(SIGNAL_THREADS) as pool, prompt_driver(with_new_threads=True):
        send = by_threads(service, pool)
        return drive(service, sent, RealPace(clock), send=send, progress=progress)


def _report(name: str, done: Run, settings: LoadSettings) -> Report:
    return report(
        name,
        done,
        target_ms=settings.serve.target_ms,
        seconds=settings.workload.seconds,
        warmup_s=settings.workload.warmup_s,
    )
