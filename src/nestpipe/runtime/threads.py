"""Lanes as threads: one worker for each, which takes its ops in the order of issue."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from nestpipe.runtime.lanes import Act, Event, name_failure
from nestpipe.schedule import Lane, Op


class _Halt:
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


@dataclass(frozen=True, slots=True)
class _Task:
    act: Act
    op: Op
    after: Sequence[Event]
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, halt: _Halt) -> None:
        try:
            for event in self.after:
                event.wait()
            if not halt.called:
                self.act(self.op)
        except BaseException as error:  # noqa: BLE001  raised again by the issuing thread
            name_failure(error, self.op)
            halt.call(error)
        finally:
            # Also after a failure: whoever waits for it wakes up and finds the halt.
            self.ended.set()


class _ThreadLane:
    """One worker and the tasks before it."""

    def __init__(self, name: str, halt: _Halt) -> None:
        self._halt = halt
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"lane {name}", daemon=True)
        self._thread.start()

    def submit(self, act: Act, op: Op, after: Sequence[Event]) -> Event:
        self._halt.check()
        task = _Task(act, op, after)
        self._tasks.put(task)
        return _Ended(task.ended)

    def no_more(self) -> None:
        self._tasks.put(None)

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run(self._halt)


@dataclass(frozen=True, slots=True)
class _Ended:
    _event: threading.Event

    def wait(self) -> None:
        self._event.wait()


class ThreadLanes:
    """One thread per lane; the `net` lane being one of them, collectives keep their order."""

    def __enter__(self) -> Self:
        self._halt = _Halt()
        self._lanes = {lane: _ThreadLane(lane, self._halt) for lane in Lane}
        return self

    def __getitem__(self, lane: Lane) -> _ThreadLane:
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
