"""Threads that take turns: one runs at a time, and who is next is for a caller to say.

The code under test runs unchanged, with its threads and its lock. It can only be interrupted where
threads meet: at the lock, and wherever a test calls `pause`. So an order of turns is an order of
events, and the same order gives the same run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

PATIENCE_S = 60.0
"""No turn takes that long, unless it hangs."""


class AbandonedError(BaseException):
    """Ends a thread whose world has ended before it."""


class _Worker:
    """A real thread, used for one actor after the other: to start one takes longer than a turn."""

    free: list[_Worker] = []  # noqa: RUF012  shared on purpose

    def __init__(self) -> None:
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.job: Callable[[], object] = lambda: None
        self.error: BaseException | None = None
        self.done = False
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._go.acquire()
            try:
                self.job()
            except AbandonedError:
                pass
            except BaseException as error:  # noqa: BLE001  it is raised where turns are given
                self.error = error
            self.done = True
            self._back.release()

    def give_turn(self) -> None:
        self._go.release()
        assert self._back.acquire(timeout=PATIENCE_S), "a turn does not end"

    def end_turn(self) -> None:
        self._back.release()
        self._go.acquire()


class Actor:
    """Something that goes on in its own time: a thread of an instance, or a call from outside."""

    def __init__(self, name: str, job: Callable[[], object]) -> None:
        self.name = name
        self.worker = _Worker.free.pop() if _Worker.free else _Worker()
        self.worker.job, self.worker.done, self.worker.error = job, False, None
        self.done = False
        self.called = True
        """False while it waits to be called ..."""
        self.until: float | None = None
        """... or for this time."""


class Turns:
    """All actors of a world. The clock is theirs too: it moves when it is told to."""

    def __init__(self, chance: Random, interrupt: float) -> None:
        self.chance = chance
        self.interrupt = interrupt
        """How often an actor that comes to a lock lets others go first."""
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.time = 0.0
        self._over = False

    def now(self) -> float:
        return self.time

    def add(self, name: str, job: Callable[[], object]) -> Actor:
        actor = Actor(name, job)
        self.actors.append(actor)
        return actor

    def ready(self) -> list[Actor]:
        """Who can go on now."""
        return [
            actor
            for actor in self.actors
            if actor.called or (actor.until is not None and actor.until <= self.time)
        ]

    def next_time(self) -> float | None:
        """When somebody who waits goes on without being called."""
        return min((actor.until for actor in self.actors if actor.until is not None), default=None)

    def go(self, actor: Actor) -> None:
        """One turn: until it pauses, waits or ends."""
        self.current = actor
        try:
            actor.worker.give_turn()
        finally:
            self.current = None
        if actor.worker.done:
            actor.done = True
            self.actors.remove(actor)
            _Worker.free.append(actor.worker)
            if actor.worker.error is not None:
                raise actor.worker.error

    def pause(self) -> None:
        """Let others go first; for actors, elsewhere of no effect."""
        if self.current is not None:
            self._end_turn(self.current)

    def wait(self, until: float | None) -> bool:
        """Until somebody calls, or for that time; whether somebody did."""
        me = self.current
        assert me is not None, "only an actor can wait"
        me.called, me.until = False, until
        self._end_turn(me)
        called, me.called, me.until = me.called, True, None
        return called

    def _end_turn(self, me: Actor) -> None:
        if not self._over:
            me.worker.end_turn()
        if self._over:
            raise AbandonedError

    def abandon(self) -> None:
        """End whatever is left."""
        self._over = True
        for actor in list(self.actors):
            while not actor.done:
                with suppress(BaseException):
                    self.go(actor)


class Change:
    """A `threading.Condition` among actors."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._holder: Actor | None = None
        self._depth = 0
        self._waiting: list[Actor] = []

    @property
    def held(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        turns = self._turns
        if not self._depth and turns.chance.random() < turns.interrupt:
            turns.pause()
        assert not self._depth or self._holder is turns.current, "the lock is kept during a turn"
        self._holder = turns.current
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def wait(self, timeout: float | None = None) -> bool:
        assert self._depth == 1, "wait with the lock held, once"
        turns, me = self._turns, self._turns.current
        assert me is not None, "only an actor can wait"
        self._depth = 0
        self._waiting.append(me)
        called = turns.wait(None if timeout is None else turns.time + timeout)
        if not called:
            self._waiting.remove(me)
        self._holder, self._depth = me, 1
        return called

    def wait_for(self, there: Callable[[], bool], timeout: float | None = None) -> bool:
        end = None if timeout is None else self._turns.time + timeout
        while not there():
            if end is not None and self._turns.time >= end:
                return False
            self.wait(None if end is None else end - self._turns.time)
        return True

    def notify_all(self) -> None:
        assert self._depth, "notify with the lock held"
        self.call_all()

    def call_all(self) -> None:
        called, self._waiting = self._waiting, []
        for actor in called:
            actor.called = True


class Thread:
    """A `threading.Thread` that is an actor."""

    def __init__(self, turns: Turns, target: Callable[[], object], name: str, **_: Any) -> None:
        self._turns, self._target, self._name = turns, target, name
        self.actor: Actor | None = None

    def start(self) -> None:
        self.actor = self._turns.add(self._name, self._target)

    def join(self) -> None:
        while self.actor is not None and not self.actor.done:
            self._turns.pause()
