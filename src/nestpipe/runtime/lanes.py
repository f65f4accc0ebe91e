"""What a run asks of lanes: take an op, run it after others, say when it is done.

A lane may be a thread, a CUDA stream, or the caller itself. Whoever it is, ops start in the order
in which they are submitted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from nestpipe.schedule import Kind, Lane, Op

Act = Callable[[Op], None]
"""Does one op."""
Work = Mapping[Kind, Act]
"""What each kind of op does; handed to a run by whoever knows."""


class Event(Protocol):
    """The end of one op.

    Lanes of one set understand each other's events: a thread waits for one on the host, a stream
    lets its device wait.
    """

    def wait(self) -> None:
        """Block the calling thread until the op has ended, was skipped or has failed."""
        ...


class LaneQueue(Protocol):
    """One lane, as the issuing loop sees it."""

    def submit(
        self,
        act: Act,
        op: Op,
        after: Sequence[Event],
        *,
        alongside: Event | None = None,
        behind: Sequence[Event] = (),
        marked: bool = True,
        on_host: bool = False,
        idle: bool = False,
        again: Event | None = None,
    ) -> Event:
        """Run `act(op)` after all that was submitted before and after the events.

        The act is called when that of `alongside` has been called, and when those of `behind` have
        returned, whether their ops have ended or not. Without `marked` nobody but this lane waits
        for the event. An act `on_host` has nothing to do with a device: the op has ended when it
        has returned and all before it has ended. An act that is `idle` has nothing to do at all,
        and is not called. `again`: the event of an op so long ago that nobody asks about it; what
        it is made of may be used for this one. Raises the first failure of any lane, once there is
        one.
        """
        ...


class Lanes(Protocol):
    """All lanes of a rank, open between `__enter__` and `__exit__`.

    Leaving waits for everything submitted and raises the first failure; leaving by an exception
    skips what has not started. No thread outlives it.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    def __getitem__(self, lane: Lane, /) -> LaneQueue: ...


def name_failure(error: BaseException, op: Op, lane: Lane) -> None:
    """Say in the traceback which op it was, and where it ran."""
    error.add_note(f"in `{op}` on lane {lane}")


# The slow twin of every other set of lanes: each op runs at once, on the calling thread.


class _Ended:
    def wait(self) -> None:
        """It has ended before anyone could ask."""


ENDED: Event = _Ended()
"""Of an op that had ended before anyone could ask."""


def _no_device() -> None:
    """What was called has ended."""


@dataclass(frozen=True, slots=True)
class _InlineLane:
    lane: Lane
    begin: Callable[[], None]

    def submit(
        self,
        act: Act,
        op: Op,
        after: Sequence[Event],
        *,
        alongside: Event | None = None,
        behind: Sequence[Event] = (),
        marked: bool = True,
        on_host: bool = False,
        idle: bool = False,
        again: Event | None = None,
    ) -> Event:
        """Run the op; what it waits for was issued earlier and has ended."""
        try:
            self.begin()
            act(op)
        except BaseException as error:
            name_failure(error, op, self.lane)
            raise
        return ENDED


class InlineLanes:
    """Every op in issue order; on a GPU all of them go to the caller's current stream.

    There the host would run ahead of the device: `finish` waits for it, before each op of the lanes
    `on_host`, so that nothing overlaps.
    """

    def __init__(
        self, finish: Callable[[], None] = _no_device, on_host: frozenset[Lane] = frozenset()
    ) -> None:
        begin = {lane: finish if lane in on_host else _no_device for lane in Lane}
        self._lanes = {lane: _InlineLane(lane, begin[lane]) for lane in Lane}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left to wait for."""

    def __getitem__(self, lane: Lane) -> _InlineLane:
        return self._lanes[lane]
