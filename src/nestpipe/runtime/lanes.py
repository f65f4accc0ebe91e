"""Lanes: what a run asks of them, and lanes as the caller itself or as threads.

A lane takes an op, runs it after others, and says when it is done. It may be a thread, a CUDA
stream, or the caller. Either way ops start in the order in which they are submitted to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self, cast

import torch

from nestpipe.schedule import Kind, Lane, Op

Act = Callable[[Op], None]
"""Does one op."""
Work = Mapping[Kind, Act]
"""What each kind of op does; the caller of a run knows."""


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
        returned, whether their ops have ended or not. Without `marked` only this lane waits
        for the event. An act `on_host` has nothing to do with a device: the op has ended when it
        has returned and all before it has ended. An act that is `idle` has nothing to do at all,
        and is not called. `again`: the event of an op so long ago that nothing waits for it;
        it may be used again for this one. Raises the first failure of any lane, once there is
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


class _HostMark:
    def wait(self) -> None:
        """It had ended when its thread came past it."""


_HOST_MARK = _HostMark()


class HostPlace:
    """The thread alone: an op has ended when its act returns."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def visit(self) -> None:
        """Any thread can run its ops."""

    def wait_for(self, marks: Sequence[Mark]) -> None:
        """All of them have ended."""

    def mark(self, again: Mark | None = None) -> Mark:
        return _HOST_MARK


def _host_place(lane: Lane) -> Place:
    return HostPlace()


class ThreadLanes:
    """One thread per lane; the `net` lane being one of them, collectives keep their order.

    May be entered again after it was left; `place_of` is asked each time.
    """

    def __init__(
        self,
        place_of: Callable[[Lane], Place] = _host_place,
        inline: frozenset[Lane] = frozenset(),
    ) -> None:
        """`inline`: lanes without a thread, whose ops the issuing one runs itself."""
        self._place_of = place_of
        self._inline = inline

    def __enter__(self) -> Self:
        self._halt = Halt()
        self._lanes = {lane: self._lane(lane) for lane in Lane}
        return self

    def _lane(self, lane: Lane) -> LaneThread | InlineQueue:
        queue = InlineQueue if lane in self._inline else LaneThread
        return queue(lane, self._place_of(lane), self._halt)

    def __getitem__(self, lane: Lane) -> LaneThread | InlineQueue:
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


# A lane's thread: takes ops in the order of issue, lets each wait for others, notes its end.


class Mark(Protocol):
    """A point in a lane's work that the host can wait for, once the thread has come past it."""

    def wait(self) -> None:
        """Block the calling thread until all that the lane did before has ended."""
        ...


class Place(Protocol):
    """Where the ops of one lane run: the thread alone, or the thread and its CUDA stream."""

    def entered(self) -> AbstractContextManager[object]:
        """What the lane's thread is in while it works."""
        ...

    def visit(self) -> None:
        """Let the calling thread run one op of the lane, and then those of others."""
        ...

    def wait_for(self, marks: Sequence[Mark]) -> None:
        """Let what comes next run after the marks, which this or other lanes have set."""
        ...

    def mark(self, again: Mark | None = None) -> Mark:
        """Mark the end of all that ran here so far; `again`: an old mark to use again."""
        ...


class Halt:
    """Whether lanes skip what they have not started, and the first failure."""

    def __init__(self) -> None:
        self.called = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def call(self, failure: BaseException | None = None) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = failure
            self.called = True

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self._failure is not None:
            raise self._failure


class Gate:
    """Opens once, and lets all pass from then on; lighter than an event of `threading`."""

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Once or again; one thread alone opens it."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self) -> None:
        if not self.is_open:
            with self._lock:  # free from now on; each who waited lets the next one in
                pass


@dataclass(slots=True)
class _End:
    """The end of one op: first its thread is past it, then whatever the thread started."""

    started: Gate = field(default_factory=Gate)
    awaited: Sequence[Mark] = ()
    """Set before `started`: what has ended on the device when the op starts there."""
    issued: Gate = field(default_factory=Gate)
    marks: Sequence[Mark] = ()
    """Set before `issued`; none where the op was skipped or has failed."""
    own: Mark | None = None
    """The mark that was made for this op: an op of a much later batch may use it again."""

    def wait(self) -> None:
        self.issued.wait()
        for mark in self.marks:
            mark.wait()


_PASSED = Gate()
"""That of ops which the issuing thread has called already."""
_PASSED.open()


def _marks_of(ends: Sequence[_AnyEnd]) -> list[Mark]:
    """What these ops left, each once."""
    marks: list[Mark] = []
    for end in ends:
        for mark in end.marks:
            if mark not in marks:
                marks.append(mark)
    return marks


class _AllGates:
    """Open when those of some ops are."""

    __slots__ = ("_ends",)

    def __init__(self, ends: Sequence[_AnyEnd]) -> None:
        self._ends = ends

    @property
    def is_open(self) -> bool:
        return all(end.issued.is_open for end in self._ends)

    def wait(self) -> None:
        for end in self._ends:
            end.issued.wait()


class _NothingDone:
    """The end of an op that has nothing to do: it is over when all that it waits for is."""

    __slots__ = ("_before", "generations", "issued", "own", "started")

    def __init__(self, before: Sequence[_AnyEnd]) -> None:
        self.generations = _still_needed(before)
        """What it hands on: what earlier ops without work wait for, oldest first, then its own."""
        self._before = [end for ends in self.generations for end in ends]
        self.issued = _AllGates(self._before)
        self.started, self.own = _PASSED, None

    @property
    def marks(self) -> Sequence[Mark]:
        return _marks_of(self._before)

    @property
    def awaited(self) -> Sequence[Mark]:
        return self.marks

    def wait(self) -> None:
        for end in self._before:
            end.wait()


def _still_needed(before: Sequence[_AnyEnd]) -> list[list[_End]]:
    """What an op without work hands on, by age, without ends that a later one on a stream implies.

    It may wait for another such op, and that for the one before: what they hand on must not grow
    from batch to batch.
    """
    generations = [of for end in before if isinstance(end, _NothingDone) for of in end.generations]
    generations.append([end for end in before if isinstance(end, _End)])
    implied: set[object] = set()
    kept: list[list[_End]] = []
    for ends in reversed(generations):
        kept.append([end for end in ends if _stream_of(end) not in implied])
        implied |= {stream for end in ends if (stream := _stream_of(end)) is not None}
    return [ends for ends in reversed(kept) if ends]


def _stream_of(end: _End) -> object:
    """The stream on which an op was issued that has a mark of its own there; None: not known."""
    if not end.issued.is_open or end.own is None:
        return None
    return getattr(end.own, "stream", end.own)


_AnyEnd = _End | _NothingDone


def _set_marks(end: _End, place: Place, again: Event | None, *, wanted: bool) -> None:
    """Mark the end of an op, by a mark of a much earlier one where there is one."""
    if wanted:
        end.own = place.mark(getattr(again, "own", None))
        end.marks = (end.own,)


@dataclass(slots=True)
class _Task:
    act: Act
    op: Op
    after: Sequence[_AnyEnd]
    alongside: _AnyEnd | None
    behind: Sequence[_AnyEnd]
    marked: bool
    on_host: bool
    again: Event | None
    end: _End = field(default_factory=_End)

    def run(self, lane: Lane, place: Place, halt: Halt) -> None:
        end = self.end
        try:
            for before in self.after:
                before.issued.wait()
            for before in self.behind:
                before.issued.wait()
            if self.alongside is not None:
                self.alongside.started.wait()
            if not halt.called:
                marks = _marks_of(self.after)
                marks += self.alongside.awaited if self.alongside is not None else ()
                if not self.on_host:
                    place.wait_for(marks)
                end.awaited = marks
                end.started.open()
                self.act(self.op)
                if self.on_host:
                    end.marks = marks
                else:
                    _set_marks(end, place, self.again, wanted=self.marked)
        except BaseException as error:  # noqa: BLE001  raised again by the issuing thread
            name_failure(error, self.op, lane)
            halt.call(error)
        finally:
            # Also after a failure: a thread that waits for it wakes up and finds the halt.
            end.started.open()
            end.issued.open()


def _do_nothing(op: Op) -> None:
    """The act of an op that has nothing to do."""


class InlineQueue:
    """A lane whose ops the issuing thread runs itself, each before `submit` returns.

    For ops that only put work on a stream: a thread of their own would have to wait for Python.
    """

    def __init__(self, lane: Lane, place: Place, halt: Halt) -> None:
        self._lane = lane
        self._place = place
        self._halt = halt

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
        # Lanes of one set, so all are ours. What was issued inline before has been called.
        ends = cast("Sequence[_AnyEnd]", after)
        for end in ends:
            end.issued.wait()
        for end in cast("Sequence[_AnyEnd]", behind):
            end.issued.wait()
        self._halt.check()
        marks = _marks_of(ends)
        if alongside is not None:
            marks += cast("_AnyEnd", alongside).awaited
        try:
            if on_host or idle:
                if not idle:
                    act(op)
                return _End(_PASSED, marks, _PASSED, marks)
            self._place.visit()
            self._place.wait_for(marks)
            act(op)
            end = _End(_PASSED, marks, _PASSED)
            _set_marks(end, self._place, again, wanted=marked)
            return end
        except BaseException as error:
            name_failure(error, op, self._lane)
            self._halt.call(error)
            raise

    def no_more(self) -> None:
        """Nothing is left."""

    def join(self) -> None:
        """Nothing is left."""


class LaneThread:
    """One worker and the tasks before it."""

    def __init__(self, lane: Lane, place: Place, halt: Halt) -> None:
        self._lane = lane
        self._place = place
        self._halt = halt
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"lane {lane}", daemon=True)
        self._thread.start()

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
        self._halt.check()
        # Lanes of one set, so all are ours.
        ends = cast("Sequence[_AnyEnd]", after)
        if idle and alongside is None and not behind:
            return _NothingDone(ends)
        task = _Task(
            act if not idle else _do_nothing,
            op,
            ends,
            cast("_AnyEnd | None", alongside),
            cast("Sequence[_AnyEnd]", behind),
            marked,
            on_host,
            again,
        )
        self._tasks.put(task)
        return task.end

    def no_more(self) -> None:
        self._tasks.put(None)

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        # Asking sets this thread's share of torch.set_num_threads, and sums depend on it: without
        # it some libraries would take the number of cores.
        torch.get_num_threads()
        with ExitStack() as inside:
            try:
                inside.enter_context(self._place.entered())
            except BaseException as error:  # noqa: BLE001  raised again by the issuing thread
                self._halt.call(error)
            while (task := self._tasks.get()) is not None:
                task.run(self._lane, self._place, self._halt)
