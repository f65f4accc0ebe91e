"""One instance of the world, behind a network that its death cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Protocol, TypeVar
from unittest.mock import patch

from nestpipe.errors import RunError, ShedError
from nestpipe.serve.engine import instance as instance_module
from nestpipe.serve.engine import state as state_module
from nestpipe.serve.engine.admission import AdmissionControl, Costs, Fit, Work
from nestpipe.serve.engine.instance import Instance, new_state
from nestpipe.serve.engine.kv_cache import Acquired, Miss, Purpose
from nestpipe.serve.engine.kv_memory import Entry, Need
from nestpipe.serve.engine.state import EngineState
from nestpipe.serve.http import router as ring_module
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Answer,
    PrefixKey,
    RankRequest,
    ServeSettings,
    Signal,
)
from support.serving_world.model import FaultError, Model
from support.serving_world.turns import Change, Thread, Turns

T = TypeVar("T")


quick_place = cache(ring_module.place)
"""A pure function, and the same few names in every world."""


class BreakdownError(BaseException):
    """Ends a thread of an instance, which is then of no more use."""


class Around(Protocol):
    """What a member needs of its world."""

    turns: Turns
    settings: ServeSettings
    ms_per_event: float | None

    def tell(self, what: str) -> None: ...
    def blame(self, what: str) -> None: ...
    def trouble(self, member: Member, call: str, may_fail: bool) -> None: ...
    def post(self, member: Member, to: Future[Answer], answer: Future[Answer]) -> None: ...
    def asked_of(self, member: Member, number: int) -> None: ...
    def shed_by(self, member: Member, number: int) -> None: ...


@contextmanager
def taking_turns(world: Around) -> Iterator[None]:
    """Inside, instances are made with threads and locks that take turns."""

    def state_of(*parts: object) -> EngineState:
        state = new_state(*parts)  # pyright: ignore[reportArgumentType]
        state.change = Change(world.turns)  # pyright: ignore[reportAttributeAccessIssue]
        return state

    def warn(state: EngineState, what: str, error: Exception) -> None:
        state.count("faults")
        if not isinstance(error, FaultError):
            world.blame(f"{what}: {error!r}")

    threads = SimpleNamespace(Thread=partial(Thread, world.turns))
    with (
        patch.object(instance_module, "new_state", state_of),
        patch.object(state_module, "threading", threads),
        patch.object(EngineState, "warn", warn),
        patch.object(ring_module, "place", quick_place),
    ):
        yield


def costs(ms_per_event: float) -> Costs:
    rate = Fit(n=ms_per_event)
    fits = {Work.INLINE: rate, Work.PREFIX: rate, Work.CACHED: Fit(base=1.0)}
    return Costs({**fits, Work.RELOAD: Fit(base=2.0)})


@dataclass
class Promise:
    count: int
    until: float


class Promises:
    """What the cache of an instance has promised, noted at its door."""

    def __init__(self, member: Member) -> None:
        cache = member.state.cache
        self._life_s = cache.life_s
        self._of: dict[PrefixKey, Promise] = {}
        acquire, failed, discard, retire = cache.acquire, cache.failed, cache.discard, cache.retire

        def acquired(need: Need, purpose: Purpose, now: float, *rest: object) -> Acquired:
            step = acquire(need, purpose, now, *rest)  # pyright: ignore[reportArgumentType]
            self._note(need.key, purpose, step, now)
            return step

        def forgotten(act: Callable[[Entry], object], entry: Entry) -> object:
            self._of.pop(entry.key, None)
            return act(entry)

        def retired(version: str) -> None:
            self._of = {key: one for key, one in self._of.items() if key.version != version}
            retire(version)

        cache.acquire = acquired  # pyright: ignore[reportAttributeAccessIssue]
        cache.failed = partial(forgotten, failed)  # pyright: ignore[reportAttributeAccessIssue]
        cache.discard = partial(forgotten, discard)  # pyright: ignore[reportAttributeAccessIssue]
        cache.retire = retired

    def _note(self, key: PrefixKey, purpose: Purpose, step: Acquired, now: float) -> None:
        if purpose is Purpose.SIGNAL:
            if not isinstance(step, Miss):
                before = self._of.get(key, Promise(0, now))
                self._of[key] = Promise(before.count + 1, now + self._life_s)
        elif key in self._of:
            self._of[key].count -= 1

    def due(self, now: float) -> list[PrefixKey]:
        """Prefixes that must be there, or be on their way."""
        over = [key for key, one in self._of.items() if one.until <= now or one.count <= 0]
        for key in over:
            del self._of[key]
        return list(self._of)


class Member:
    """A real instance as its router sees it; once dead it is gone, with all that it held."""

    def __init__(self, name: str, world: Around, version: int) -> None:
        self.name = name
        self.world = world
        self.alive = True
        self.broken = False
        self.swapping: int | None = None
        """Version of the model that it is being given."""
        self.admission: AdmissionControl | None = None
        if world.ms_per_event is not None:
            priced, model = costs(world.ms_per_event), self.model(version)
            self.admission = AdmissionControl(world.settings, priced, model.kv_bytes, world.turns)
        self.instance = Instance(self.model(version), world.settings, self.admission, world.turns)
        self.state = self.instance._state
        self.promises = Promises(self)
        self._on_the_way: dict[Future[Answer], None] = {}
        for thread in self.instance._threads:
            actor = thread.actor  # pyright: ignore[reportAttributeAccessIssue]
            actor.name = actor.name.replace("nestpipe", name)

    def __repr__(self) -> str:
        return self.name

    @property
    def well(self) -> bool:
        return self.alive and not self.broken

    def model(self, version: int) -> Model:
        return Model(version, self._around, self.world.turns)

    @contextmanager
    def _around(self, call: str, reads: Sequence[KV | None]) -> Iterator[None]:
        """A call of the model takes time, in which anything may happen but to what it reads."""
        if self.state.change.held:  # pyright: ignore[reportAttributeAccessIssue]
            self.world.blame(f"{self}.{call} is called with the lock held")
        pasts = [kv for kv in reads if kv is not None]
        self.world.tell(f"{self}.{call} of {len(reads)}, {len(pasts)} with a prefix")
        self._find(call, pasts)
        self.world.turns.pause()
        self._find(call, pasts)
        self.world.trouble(self, call, call != "rank" or len(reads) > 1 or bool(pasts))
        yield

    def _find(self, call: str, pasts: list[KV]) -> None:
        """What is read must still be counted as memory that is used."""
        cache = self.state.cache
        if call == "to_device":
            assert cache.host_tier is not None
            held = [kept.kv for kept in cache.host_tier._kept.values() if kept.kv]
        else:
            held = [entry.kv for entry in cache.device_pool if entry.kv]
        if self.well and not all(
            any(kv.keys_LNHA is one.keys_LNHA for one in held) for kv in pasts
        ):
            self.world.blame(f"{self}.{call} reads a prefix that has been freed")

    # As its router sees it

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        self._reach()
        outcome = self._call(lambda: self.instance.prefetch(signal))
        self.world.tell(f"{self} has the signal of {signal.user}: {outcome}")
        return outcome

    def rank(self, request: RankRequest) -> Future[Answer]:
        self._reach()
        number = request.time  # the model reads no times
        assert number is not None
        self.world.asked_of(self, number)
        try:
            inner = self._call(lambda: self.instance.rank(request))
        except ShedError:
            self.world.shed_by(self, number)
            raise
        outer: Future[Answer] = Future()
        self._on_the_way[outer] = None
        inner.add_done_callback(partial(self._answered, outer, number))
        return outer

    def _answered(self, outer: Future[Answer], number: int, inner: Future[Answer]) -> None:
        """By a thread of the instance; others hear of it when it has been delivered."""
        if isinstance(inner.exception(), ShedError):  # it closes
            self.world.shed_by(self, number)
        self.world.post(self, outer, inner)

    def _call(self, act: Callable[[], T]) -> T:
        """Whatever it says is lost if it dies meanwhile; it says no in two ways only."""
        try:
            said = act()
        except (ShedError, RunError) as error:
            if isinstance(error, RunError) and not self.broken:
                self.world.blame(f"{self} is well and fails with {error!r}")
            self._reach()
            raise
        except Exception as error:
            self.world.blame(f"{self} refuses with {error!r}")
            raise
        self._reach()
        return said

    def _reach(self) -> None:
        if not self.alive:
            raise ConnectionError(f"{self} does not answer")

    def stats(self) -> dict[str, float]:
        return self.instance.stats()

    def drain(self, timeout_s: float) -> bool:
        self._reach()
        return self.instance.drain(timeout_s)

    # As the world sees it

    def deliver(self, to: Future[Answer], answer: Future[Answer]) -> None:
        """An answer arrives, unless the connection was cut before."""
        if to in self._on_the_way:
            del self._on_the_way[to]
            if (error := answer.exception()) is not None:
                to.set_exception(error)
            else:
                to.set_result(answer.result())

    def die(self) -> Callable[[], None]:
        """At once; returns what others then hear, one after the other."""
        self.alive = False
        self.state.closed = True
        self.state.change.call_all()  # pyright: ignore[reportAttributeAccessIssue]

        def cut() -> None:
            while self._on_the_way:
                lost = self._on_the_way.popitem()[0]
                lost.set_exception(ConnectionError(f"{self} died"))

        return cut
