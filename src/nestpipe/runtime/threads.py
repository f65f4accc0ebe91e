"""Lanes as threads: one worker for each, which takes its ops in the order of issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from nestpipe.runtime.worker import Halt, LaneThread, Mark, Place
from nestpipe.schedule import Lane


class _Ended:
    def wait(self) -> None:
        """It had ended when its thread came past it."""


_ENDED = _Ended()


class HostPlace:
    """The thread alone: an op has ended when its act returns."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for(self, marks: Sequence[Mark]) -> None:
        """All of them have ended."""

    def mark(self) -> Mark:
        return _ENDED


def _host_place(lane: Lane) -> Place:
    return HostPlace()


class ThreadLanes:
    """One thread per lane; the `net` lane being one of them, collectives keep their order.

    May be entered again after it was left; `place_of` is asked each time.
    """

    def __init__(self, place_of: Callable[[Lane], Place] = _host_place) -> None:
        self._place_of = place_of

    def __enter__(self) -> Self:
        self._halt = Halt()
        self._lanes = {lane: LaneThread(lane, self._place_of(lane), self._halt) for lane in Lane}
        return self

    def __getitem__(self, lane: Lane) -> LaneThread:
        return self._lanes[lane]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._halt.call()
        for lane in self._lanes.values():
            lane.no_more()
        try:
            self._join()
        except BaseException:  # an interrupt while waiting
            self._halt.call()
            self._join()
            raise
        if error is None:
            self._halt.check()

    def _join(self) -> None:
        for lane in self._lanes.values():
            lane.join()
