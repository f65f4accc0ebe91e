"""The driver's priority: taken where the system allows it, and given back."""

from __future__ import annotations

import os
import threading

import pytest

from nestpipe.loadtest.run import prioritised_driver

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setscheduler"), reason="this system has no real-time priorities"
)


def policy() -> int:
    """Of the calling thread, by itself or of one that it starts."""
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def policy_of_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(policy()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("inherited", [False, True])
def test_the_driver_runs_first_and_its_threads_only_where_asked(inherited: bool):
    before = policy()
    with prioritised_driver(with_new_threads=inherited) as prompt:
        assert policy() == (os.SCHED_FIFO if prompt else before)
        first = os.SCHED_FIFO if prompt and inherited else before
        assert policy_of_new_thread() == first
    assert policy() == before


def test_without_the_right_to_it_the_driver_runs_as_before(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    before = policy()
    with prioritised_driver() as prompt:
        assert not prompt
        assert policy() == before


def test_a_failure_gives_the_priority_back_too():
    before = policy()
    with pytest.raises(ZeroDivisionError), prioritised_driver():
        _ = 1 / 0
    assert policy() == before
