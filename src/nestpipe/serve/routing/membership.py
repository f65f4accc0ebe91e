"""Consistent hashing of users over instances, membership over time, and health."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from nestpipe.errors import RunError

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
