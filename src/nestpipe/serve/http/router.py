"""The built-in router: both legs of a user to the same instance, with retries on the next one.

Users are spread over instances by consistent hashing, over the members that are healthy. It keeps
nothing about users, so any number of routers over the same members agree.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from itertools import chain
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from nestpipe.config import positive
from nestpipe.errors import ConfigError, NestpipeError, RunError, ShedError
from nestpipe.serve.types import AdmissionOutcome, Clock

POINTS = 160
"""Points of each member on the ring."""


def place(text: str) -> int:
    """The point of a text on the ring of 2^64: the same in every process and release."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"nestpipe.ring")
    return int.from_bytes(digest.digest(), "big")


class Ring:
    """A consistent hash ring; a user belongs to the first member at or after the user's point.

    A value: it never changes, and depends on the set of members alone.
    """

    def __init__(self, members: Iterable[str]):
        self.members = tuple(sorted(set(members)))
        points = sorted(
            (place(f"{member}#{point}"), member)
            for member in self.members
            for point in range(POINTS)
        )
        self._places = [where for where, _ in points]
        self._holders = [member for _, member in points]

    def walk(self, user: str) -> Iterator[str]:
        """Every member once, from the owner on along the ring."""
        seen: set[str] = set()
        start = bisect_left(self._places, place(user))
        for step in range(len(self._holders)):
            member = self._holders[(start + step) % len(self._holders)]
            if member not in seen:
                seen.add(member)
                yield member
            if len(seen) == len(self.members):
                return

    def owner(self, user: str) -> str:
        """The member that both legs of a user go to."""
        for member in self.walk(user):
            return member
        raise RunError("there is no instance to send a user to; add one")

    def order(self, user: str) -> tuple[str, ...]:
        """The owner, then the others in the order of fallback."""
        return tuple(self.walk(user))


@dataclass(frozen=True, slots=True)
class Era:
    """A ring, and since when it is current."""

    since: float
    ring: Ring


class Membership:
    """The rings of the last `life_s` seconds, so that legs in flight still meet after a change.

    A signal goes to the user's owner on every ring that counts; a ranking goes to the owner on the
    oldest of them, the ring that was current `life_s` ago. Whatever changed in between, a ranking
    that comes at most `life_s` after its signal therefore finds a member that had the signal.
    Only users whose owner changed are signalled twice, and only for `life_s`.

    Reading is safe from any thread; changes must come one at a time.
    """

    def __init__(self, members: Iterable[str], life_s: float):
        self.life_s = life_s
        self._eras = (Era(float("-inf"), Ring(members)),)

    @property
    def ring(self) -> Ring:
        """The current one."""
        return self._eras[-1].ring

    def change(self, members: Iterable[str], now: float) -> None:
        """Replace the members."""
        ring = Ring(members)
        if ring.members != self.ring.members:
            self._eras = (*self._counting(now), Era(now, ring))

    def rings(self, now: float) -> tuple[Ring, ...]:
        """The rings that count, newest first."""
        return tuple(era.ring for era in reversed(self._counting(now)))

    def owners(self, user: str, now: float) -> tuple[str, ...]:
        """Members that a signal goes to, each once; the ranking goes to the last of them."""
        owners = (next(ring.walk(user), None) for ring in reversed(self.rings(now)))
        oldest_first = list(dict.fromkeys(owner for owner in owners if owner is not None))
        return tuple(reversed(oldest_first))

    def members(self, now: float) -> frozenset[str]:
        """All members that may still be sent a leg."""
        return frozenset(member for ring in self.rings(now) for member in ring.members)

    def _counting(self, now: float) -> tuple[Era, ...]:
        """Without the eras that ended more than `life_s` ago."""
        eras = self._eras
        ends = [later.since for later in eras[1:]] + [float("inf")]
        return tuple(era for era, end in zip(eras, ends, strict=True) if end >= now - self.life_s)


@dataclass(slots=True)
class _Record:
    faults: int = 0
    """Consecutive."""
    probe_at: float | None = None
    """When an unhealthy member may be probed again; None: it is healthy."""


class Health:
    """Health of members: unhealthy after some faults in a row, then probed; thread-safe."""

    def __init__(self, members: Iterable[str], faults: int, probe_s: float):
        self._faults = faults
        self._probe_s = probe_s
        self._records = {member: _Record() for member in members}
        self._lock = threading.Lock()

    def usable(self, member: str, now: float) -> bool:
        """Whether to send a request there; a due probe is given to one caller only."""
        with self._lock:
            record = self._records.get(member)
            if record is None or record.probe_at is None:
                return record is not None
            due = now >= record.probe_at
            if due:
                record.probe_at = now + self._probe_s
            return due

    def alive(self, member: str) -> bool:
        """Whether it is healthy, without using up a probe."""
        with self._lock:
            record = self._records.get(member)
            return record is not None and record.probe_at is None

    def answered(self, member: str) -> None:
        """It answered: it is healthy."""
        with self._lock:
            if record := self._records.get(member):
                record.faults, record.probe_at = 0, None

    def failed(self, member: str, now: float) -> None:
        """One more fault; enough of them in a row make it unhealthy."""
        with self._lock:
            if record := self._records.get(member):
                record.faults += 1
                if record.faults >= self._faults:
                    record.probe_at = now + self._probe_s

    def mark_dead(self, member: str, now: float) -> None:
        """A health check failed."""
        with self._lock:
            if record := self._records.get(member):
                record.faults, record.probe_at = self._faults, now + self._probe_s

    def add(self, member: str) -> None:
        """A new member is healthy; the record of a known one is reset."""
        with self._lock:
            self._records[member] = _Record()

    def remove(self, member: str) -> None:
        with self._lock:
            self._records.pop(member, None)


class ForUser(Protocol):
    """What a router must know of a signal."""

    @property
    def user(self) -> str: ...


class RankForUser(ForUser, Protocol):
    """What a router must know of a ranking."""

    def after(self, waited_s: float) -> Self:
        """The same ranking, once so much of its time is spent."""
        ...


SignalT = TypeVar("SignalT", bound=ForUser)
RankT = TypeVar("RankT", bound=RankForUser)
AnswerT = TypeVar("AnswerT")
SignalT_contra = TypeVar("SignalT_contra", bound=ForUser, contravariant=True)
RankT_contra = TypeVar("RankT_contra", bound=RankForUser, contravariant=True)


class Backend(Protocol[SignalT_contra, RankT_contra, AnswerT]):
    """An instance as a router sees it: it takes signals and rankings of one form."""

    def prefetch(self, signal: SignalT_contra) -> AdmissionOutcome: ...

    def rank(self, request: RankT_contra) -> Future[AnswerT]: ...

    def drain(self, timeout_s: float) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """How instances are chosen, and when one is unhealthy."""

    affinity: Literal["user", "random"] = "user"
    """`user`: by consistent hashing; `random`: each leg anywhere, to show what affinity gives."""
    life_s: float = 0.5
    """Longest time between the legs of a request; a former ring counts for so long."""
    faults: int = 2
    """Faults in a row after which an instance is unhealthy."""
    probe_s: float = 1.0
    """Interval at which one request probes an unhealthy instance."""
    seed: int = 0
    """Seed of the random choices."""

    def __post_init__(self) -> None:
        for name in ("life_s", "faults", "probe_s"):
            positive(name, getattr(self, name))
        if self.affinity not in ("user", "random"):
            raise ConfigError(f"affinity is {self.affinity!r}; give user or random")


class Router(Generic[SignalT, RankT, AnswerT]):
    """Sends both legs of a user to one of several backends; may be called from any thread.

    Of a request it reads the user alone, so that requests and answers may have any form: those of
    `nestpipe.serve.types`, or HTTP bodies that pass through unread.

    A backend that hangs must give up by itself: only what fails or answers moves a ranking on.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend[SignalT, RankT, AnswerT]],
        settings: RouterSettings,
        clock: Clock,
    ):
        self._settings = settings
        self._clock = clock
        self._backends = dict(backends)
        self._leaving: dict[str, float] = {}
        """Members that are gone from the ring, and when nothing can be on its way to them."""
        self._membership = Membership(backends, settings.life_s)
        self._health = Health(backends, settings.faults, settings.probe_s)
        self._random = random.Random(settings.seed)
        self._counts: Counter[str] = Counter()
        self._first_choices: Counter[str] = Counter()
        self._in_flight = 0
        self._draining = False
        self._changed = threading.Condition()
        """Guards all of the above that changes."""

    def prefetch(self, signal: SignalT) -> AdmissionOutcome:
        """Send the signal to the instance that its ranking will go to; lost if that fails."""
        self._count("signals")
        if self._draining:
            return AdmissionOutcome.FAILED
        now = self._clock.now()
        places = self._owners_now(self._orders(signal.user, now), self._usable_at(now))
        outcomes = [self._prefetch_at(place, signal) for place in dict.fromkeys(places)]
        return next(
            (one for one in outcomes if one is not AdmissionOutcome.FAILED), AdmissionOutcome.FAILED
        )

    def _prefetch_at(self, member: str, signal: SignalT) -> AdmissionOutcome:
        try:
            outcome = self._backend(member).prefetch(signal)
        except Exception as fault:  # noqa: BLE001  the ranking will do without
            self._count_fault(member, fault)
            self._count("lost_signals")
            return AdmissionOutcome.FAILED
        self._health.answered(member)
        return outcome

    def rank(self, request: RankT) -> Future[AnswerT]:
        """Rank at the first instance that answers, in the user's order."""
        line = self._candidates(request.user)
        answer: Future[AnswerT] = Future()
        answer.set_running_or_notify_cancel()
        with self._changed:
            self._counts["rankings"] += 1
            draining = self._draining
            self._in_flight += not draining
        if draining:
            answer.set_exception(ShedError("the service is closing; ask again in a second"))
        else:
            _RoutedRanking(self, request, answer, line).try_next()
        return answer

    def add(self, member: str, backend: Backend[SignalT, RankT, AnswerT]) -> None:
        """Add a member; it gets its share of the users within `life_s`."""
        with self._changed:
            self._backends[member] = backend
            self._leaving.pop(member, None)
            self._health.add(member)
            ring = self._membership.ring
            self._membership.change({*ring.members, member}, self._clock.now())

    def remove(self, member: str) -> None:
        """Remove a member; keep it running for `life_s` more, legs in flight end there."""
        with self._changed:
            now, ring = self._clock.now(), self._membership.ring
            if member in ring.members:
                self._membership.change({*ring.members} - {member}, now)
                self._leaving[member] = now + self._settings.life_s

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the current ring."""
        return self._membership.ring.members

    def check(self, healthy: Callable[[str], bool]) -> None:
        """Check the health of every member; a check that fails or raises marks it unhealthy."""
        self._forget()
        for member in tuple(self._backends):
            try:
                is_up = healthy(member)
            except Exception:  # noqa: BLE001  whatever it is, it is not well
                is_up = False
            if is_up:
                self._health.answered(member)
            else:
                self._health.mark_dead(member, self._clock.now())

    def stats(self) -> dict[str, float]:
        """The router's own counters, without those of instances."""
        members = self.members
        with self._changed:
            counts = dict(self._counts)
            shares = [self._first_choices[member] for member in members]
            counts["in_flight"] = self._in_flight
        counts["members"] = len(members)
        counts["members_alive"] = sum(map(self._health.alive, members))
        imbalance = max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
        own = {f"router_{name}": float(count) for name, count in counts.items()}
        return {**own, "router_imbalance": imbalance}

    def drain(self, timeout_s: float) -> bool:
        """Shed new requests, wait for those in flight, then drain every instance."""
        start = self._clock.now()
        with self._changed:
            self._draining = True
            done = self._changed.wait_for(lambda: not self._in_flight, timeout_s)
        for backend in tuple(self._backends.values()):
            left_s = max(0.0, timeout_s - (self._clock.now() - start))
            try:
                done = backend.drain(left_s) and done
            except Exception:  # noqa: BLE001  a dead one finishes nothing
                done = False
        return done

    def _orders(self, user: str, now: float) -> list[tuple[str, ...]]:
        """Members in the user's order, for every ring that counts, the oldest first."""
        self._forget()
        if self._settings.affinity == "random":
            members = list(self.members)
            with self._changed:
                self._random.shuffle(members)
            return [tuple(members)]
        return [ring.order(user) for ring in reversed(self._membership.rings(now))]

    def _owners_now(
        self, orders: list[tuple[str, ...]], usable: Callable[[str], bool]
    ) -> Iterator[str]:
        """The first healthy member on each ring: there signal and ranking meet."""
        for order in orders:
            yield from filter(None, [next(filter(usable, order), None)])

    def _candidates(self, user: str) -> Iterator[str]:
        """Members to try, each once: healthy ones in the user's order, then the others.

        Read one by one, each time by what is known then: members may come while a ranking waits.
        """
        asked: set[str] = set()
        while True:
            now = self._clock.now()
            orders = [
                tuple(member for member in order if member not in asked)
                for order in self._orders(user, now)
            ]
            last_resort = chain.from_iterable(reversed(orders))
            living = self._owners_now(orders, self._usable_at(now))
            member = next(chain(living, last_resort), None)
            if member is None:
                return
            asked.add(member)
            yield member

    def _usable_at(self, now: float) -> Callable[[str], bool]:
        """Health at one moment, the same for a whole request."""
        return cache(lambda member: self._health.usable(member, now))

    def _backend(self, member: str) -> Backend[SignalT, RankT, AnswerT]:
        backend = self._backends.get(member)
        if backend is None:
            raise RunError(f"instance {member} has left; ask the next one")
        return backend

    def _forget(self) -> None:
        """Drop members that left `life_s` ago."""
        if not self._leaving:
            return
        now = self._clock.now()
        with self._changed:
            for member in [name for name, until in self._leaving.items() if now > until]:
                del self._leaving[member], self._backends[member]
                self._first_choices.pop(member, None)
                self._health.remove(member)

    def _count_fault(self, member: str, fault: BaseException) -> None:
        """Overload and bad input do not count against the health of a member."""
        if _is_refusal(fault):
            self._health.answered(member)
        else:
            self._health.failed(member, self._clock.now())

    def _count(self, name: str) -> None:
        with self._changed:
            self._counts[name] += 1

    def _ended(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()


def _is_refusal(fault: BaseException) -> bool:
    """Whether a healthy instance refused: bad input, or overload."""
    refused = isinstance(fault, NestpipeError) and fault.exit_status == 2
    return refused or isinstance(fault, ShedError)


class _RoutedRanking(Generic[RankT, AnswerT]):
    """One ranking and its retries."""

    def __init__(
        self,
        router: Router[Any, RankT, AnswerT],
        request: RankT,
        answer: Future[AnswerT],
        line: Iterator[str],
    ):
        self._router = router
        self._request = request
        self._answer = answer
        self._candidates = line
        self._start = router._clock.now()
        self._asked = 0
        self._shed: ShedError | None = None
        self._fault: BaseException | None = None

    def try_next(self) -> None:
        member = next(self._candidates, None)
        if member is None:
            return self._fail(self._shed or self._no_answer())
        self._asked += 1
        if self._asked == 1:
            with self._router._changed:
                self._router._first_choices[member] += 1
        else:
            self._router._count("retries")
        try:
            waited_s = self._router._clock.now() - self._start
            future = self._router._backend(member).rank(self._request.after(waited_s))
        except Exception as fault:  # noqa: BLE001  the next one may answer
            return self._failed(member, fault)
        future.add_done_callback(partial(self._done, member))

    def _done(self, member: str, future: Future[AnswerT]) -> None:
        if future.cancelled():
            return self._failed(member, RunError(f"instance {member} dropped the ranking"))
        fault = future.exception()
        if fault is not None:
            return self._failed(member, fault)
        self._router._health.answered(member)
        self._answer.set_result(future.result())
        self._router._ended()

    def _failed(self, member: str, fault: BaseException) -> None:
        """Bad input and a second overload are final; other faults go to the next member."""
        self._router._count_fault(member, fault)
        if isinstance(fault, ShedError):
            if self._shed is not None:
                return self._fail(fault)
            self._shed = fault
        elif _is_refusal(fault):
            return self._fail(fault)
        else:
            self._fault = fault
        self.try_next()

    def _no_answer(self) -> RunError:
        error = RunError(
            f"none of {self._asked} instances answered ({self._fault}); look at their logs"
            if self._asked
            else "there is no instance to send a ranking to; add one"
        )
        error.__cause__ = self._fault
        return error

    def _fail(self, error: BaseException) -> None:
        self._router._count("sheds" if isinstance(error, ShedError) else "errors")
        self._answer.set_exception(error)
        self._router._ended()
