"""Real process groups: collectives of Gloo, and what is left of a run when a rank is lost."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("rank_program.py")
LAUNCH = """
import sys
from nestpipe.comm import launch
sys.exit(launch([sys.executable, *sys.argv[2:]], ranks=int(sys.argv[1])))
"""
START_S = 60.0
"""Enough for processes to import torch on a busy machine."""


def run_program(ranks: int, scenario: str) -> subprocess.CompletedProcess[str]:
    """`nestpipe.comm.launch` in a process of its own; what the ranks print is shown on failure."""
    command = [sys.executable, "-c", LAUNCH, str(ranks), str(PROGRAM), scenario]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    print(done.stdout, done.stderr, sep="\n")
    return done


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_processes(ranks: int):
    done = run_program(ranks, "collectives")
    assert done.returncode == 0
    assert done.stdout == "rank 0 has seen all\n", "only rank 0 prints"
    assert not done.stderr


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="other systems have no batch tasks")
def test_threads_of_gloo_take_no_core_from_a_thread_that_holds_their_lock():
    done = run_program(2, "threads_of_gloo")
    assert done.stdout == "rank 0 has seen its threads\n", done.stderr
    assert done.returncode == 0


def says_where_it_was(rank: int, said: str) -> bool:
    """On a busy machine the launcher may stop a rank before it has missed its peer itself."""
    return bool(re.search(rf"rank {rank} (lost its peers|was) in `rows 3\.1`", said))


def test_every_survivor_of_a_killed_rank_names_the_op():
    done = run_program(4, "one_is_killed_beside_threads")
    assert done.returncode == 137, "128 + SIGKILL"
    for rank in range(3):
        assert says_where_it_was(rank, done.stderr), f"rank {rank} said nothing"


def test_a_mistake_of_one_rank_is_shown_once_and_decides_the_status():
    done = run_program(2, "one_raises")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a rank's own mistake") == 1
    assert says_where_it_was(0, done.stderr)


def test_ranks_end_when_their_launcher_is_killed():
    """They have its standard error, so reading that ends only when both of them have ended."""
    done = run_program(2, "launcher_is_killed")
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert done.stderr.count("told to stop") == 2


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("scenario", ["one_is_killed", "one_stays_away"])
def test_survivors_without_a_launcher_exit_by_themselves(outcomes, scenario: str, ranks: int):
    """As on several machines, where the launcher of another one cannot stop them."""
    for rank in outcomes(PROGRAM, scenario, ranks=ranks, first=ranks - 1):
        assert rank.status == 3
        assert "in `rows 3.1` (all_to_all), after at most 4 s" in rank.said
        assert f"no sign of rank {ranks - 1}" in rank.said


def test_a_rank_that_waits_for_a_survivor_hears_of_the_loss_too(outcomes):
    """The one that sees it hangs up, so neither takes the other for lost."""
    ranks = outcomes(PROGRAM, "one_waits_for_a_survivor", ranks=3, first=2)
    for rank, call in zip(ranks, ("rows 3.1", "grads 3.0"), strict=True):
        assert rank.status == 3
        assert f"in `{call}` (all_to_all), after at most 4 s: no sign of rank 2" in rank.said
