"""Lanes as threads: one worker for each, which takes its ops in the order of issue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self, cast

import torch

from nestpipe.runtime.lanes import Act, Event, name_failure
from nestpipe.schedule import Lane, Op


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

    def mark(self) -> Mark:
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

    def mark(self) -> Mark:
        """Mark the end of all that ran here so far."""
        ...


class Halt:
    """Whether the lanes shall skip what they have not started, and the failure that is to blame."""

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


@dataclass(slots=True)
class _End:
    """The end of one op: first its thread is past it, then whatever the thread started."""

    started: threading.Event = field(default_factory=threading.Event)
    awaited: Sequence[Mark] = ()
    """Set before `started`: what has ended on the device when the op starts there."""
    issued: threading.Event = field(default_factory=threading.Event)
    mark: Mark | None = None
    """Set before `issued`; stays None where the op was skipped or has failed."""

    def wait(self) -> None:
        self.issued.wait()
        if self.mark is not None:
            self.mark.wait()


_PASSED = threading.Event()
"""That of ops which the issuing thread has called already."""
_PASSED.set()


@dataclass(frozen=True, slots=True)
class _Task:
    act: Act
    op: Op
    after: Sequence[_End]
    alongside: _End | None
    behind: Sequence[_End]
    end: _End = field(default_factory=_End)

    def run(self, lane: Lane, place: Place, halt: Halt) -> None:
        try:
            for end in (*self.after, *self.behind):
                end.issued.wait()
            if self.alongside is not None:
                self.alongside.started.wait()
            if not halt.called:
                marks = [end.mark for end in self.after if end.mark is not None]
                marks += self.alongside.awaited if self.alongside is not None else ()
                place.wait_for(marks)
                self.end.awaited = marks
                self.end.started.set()
                self.act(self.op)
                self.end.mark = place.mark()
        except BaseException as error:  # noqa: BLE001  raised again by the issuing thread
            name_failure(error, self.op, lane)
            halt.call(error)
        finally:
            # Also after a failure: whoever waits for it wakes up and finds the halt.
            self.end.started.set()
            self.end.issued.set()


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
    ) -> Event:
        # Lanes of one set, so all are ours. What was issued inline before has been called.
        ends = cast("Sequence[_End]", after)
        for end in (*ends, *cast("Sequence[_End]", behind)):
            if not end.issued.is_set():
                end.issued.wait()
        self._halt.check()
        marks = [end.mark for end in ends if end.mark is not None]
        if alongside is not None:
            marks += cast("_End", alongside).awaited
        try:
            self._place.visit()
            self._place.wait_for(marks)
            act(op)
            return _End(_PASSED, marks, _PASSED, self._place.mark())
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
    ) -> Event:
        self._halt.check()
        # Lanes of one set, so all are ours.
        task = _Task(
            act,
            op,
            cast("Sequence[_End]", after),
            cast("_End | None", alongside),
            cast("Sequence[_End]", behind),
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
