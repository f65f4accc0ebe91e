"""A signal ends training at a batch that all ranks agree on, saved, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.train import loop, train_job
from nestpipe.train.job import prepare
from support.thread_ranks import run_ranks
from unit.train.test_resume import assert_same, job_of, trained


@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_that_wants_to_stop_stops_all_at_the_same_batch(
    tmp_path: Path, plan: str, ranks: int
):
    pipeline = {"plan": plan}

    def one(comm: Any, *, stop_at: int, folder: str) -> tuple[int, bool]:
        job = prepare(job_of(tmp_path / folder, pipeline=pipeline), comm, "auto")
        reached = threading.Event()

        def tell(report: Any) -> None:
            if report.step == stop_at:
                reached.set()

        # A signal sets what is asked here; that it reaches rank 0 alone is the hard case.
        job.trainer.stop_wanted = reached.is_set
        outcome = loop.train_steps(job, tell)
        return outcome.steps, outcome.stopped

    # Ranks that are threads share torch's random state: both runs begin with the same weights.
    trained(job_of(tmp_path / "run", run={"steps": 1}))
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    straight = run_ranks(ranks, lambda comm: one(comm, stop_at=10**9, folder="straight"))
    assert straight == [(26, False)] * ranks
    first = run_ranks(ranks, lambda comm: one(comm, stop_at=9, folder="run"))
    assert len(set(first)) == 1
    assert first[0][1]
    assert 9 <= first[0][0] < 26
    last = run_ranks(ranks, lambda comm: one(comm, stop_at=10**9, folder="run"))
    assert last == [(26, False)] * ranks
    assert_same(tmp_path / "run", tmp_path / "straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_goes_on_bit_for_bit(tmp_path: Path, number: signal.Signals):
    before = signal.getsignal(number)  # a shell's background job ignores SIGINT
    trained(job_of(tmp_path / "straight"))

    def tell(report: Any) -> None:
        if report.step == 7:
            os.kill(os.getpid(), number)

    job = prepare(job_of(tmp_path / "run"), LocalCommunicator(), "auto")
    outcome = train_job(job, tell)
    assert outcome.stopped
    assert 7 <= outcome.steps < 26
    assert outcome.checkpoint is not None
    assert Path(outcome.checkpoint).is_dir()
    assert signal.getsignal(number) == before
    trained(job_of(tmp_path / "run"), "auto")
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_what_nohup_started_lives_on_when_the_terminal_closes():
    program = """
import os, signal
from nestpipe.comm.peer_failure import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop = StopRequest(100.0)
with stop.on_signals():
    os.kill(os.getpid(), signal.SIGHUP)
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGHUP)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
print(stop.wanted)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "False"], done.stderr


@pytest.mark.parametrize("again", [False, True])
def test_what_takes_too_long_or_is_told_twice_ends_at_once(again: bool):
    """In a process of its own, which never asks whether it should stop."""
    program = f"""
import os, signal, sys, time
from nestpipe.comm import peer_failure as stopping
stopping.AGAIN_S = 0.0
stop = stopping.StopRequest({100.0 if again else 0.2})
with stop.on_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.wanted:
        pass
    if {again}:
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
    signal.pause()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert ("told to stop again" if again else "not saved in 0.2 s") in done.stderr


@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_waits_for_a_lost_one_still_ends_in_time(again: bool):
    """Its main thread is in a call that does not return, where Python runs no handler."""
    program = f"""
import ctypes, os, signal, threading
from nestpipe.comm import peer_failure as stopping
stopping.AGAIN_S = 0.0
stop = stopping.StopRequest({100.0 if again else 0.2})
stop.describe = lambda: "rank 1 is in `all_reduce`"
with stop.on_signals():
    for after in (0.1, 0.3)[: {1 + again}]:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    why = "told to stop again" if again else "not saved in 0.2 s"
    assert done.stderr == f"error: rank 1 is in `all_reduce`; {why}\n"


def test_a_signal_to_a_forked_child_ends_the_child_alone():
    program = """
import os, signal
from nestpipe.comm.peer_failure import StopRequest
stop = StopRequest(100.0)
with stop.on_signals():
    ready, there = os.pipe()
    if (child := os.fork()) == 0:
        os.write(there, b"x")
        signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]))
print(stop.wanted)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [f"{signal.SIGTERM:d}", "False"]


def test_a_forked_child_that_lives_on_holds_nobody_up():
    program = """
import os, signal
from nestpipe.comm.peer_failure import StopRequest
with StopRequest(100.0).on_signals():
    if (child := os.fork()) == 0:
        signal.pause()
print("left")
os.kill(child, signal.SIGKILL)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "left\n", done.stderr


@pytest.mark.parametrize(
    ("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM), (2, signal.SIGHUP)]
)
def test_the_command_saves_and_exits_0(tmp_path: Path, ranks: int, number: signal.Signals):
    """A signal to the command; with several ranks, to their launcher."""
    folder = tmp_path / "run"
    settings = ["run.batch=8", "run.epochs=1000", "run.checkpoint_every=20", "model.dim=4"]
    settings += ["data.synthetic.samples=2000", "data.synthetic.num_tables=2", "run.device=cpu"]
    command = [sys.executable, "-m", "nestpipe", "train", "--ranks", str(ranks)]
    for setting in [*settings, f"run.checkpoint={folder}"]:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--resume", "auto"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        give_up = time.monotonic() + 120
        while not list(folder.glob("step-*")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(number)
        out, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert "stopped by a signal" in out
