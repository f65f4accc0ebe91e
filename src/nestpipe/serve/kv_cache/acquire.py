"""The question that both legs ask for a prefix, and the answers that it can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from nestpipe.serve.kv_cache.device_pool import Entry


class Purpose(StrEnum):
    """Who asks."""

    SIGNAL = "signal"
    """The early leg: a prefix that is nowhere is to be computed."""
    RANK = "rank"
    """The late leg: it never computes, so a lost signal still finds what host memory has."""
    RANK_AND_KEEP = "rank_and_keep"
    """A ranking that computes its prefix where it is nowhere, so that it can be kept."""


@dataclass(frozen=True, slots=True)
class Promised:
    """For a signal: it is there or on its way, and will be kept for the ranking."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Use:
    """For a ranking: read it now, then say `released`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Wait:
    """For a ranking: it is on its way; the ticket comes back when it is there."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Load:
    """It comes from host memory because of this call; a ranking waits as above."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Fill:
    """It is computed because of this call; a ranking waits as above."""

    entry: Entry


class Miss(StrEnum):
    """There is no prefix for this call."""

    NOWHERE = "nowhere"
    NO_ROOM = "no_room"
    """All device memory is promised."""
    TOO_LATE = "too_late"
    """It is on its way, but not in time."""


Acquired = Promised | Use | Wait | Load | Fill | Miss


class FillQueue:
    """Entries that wait for work: those that a ranking waits for first, then by age."""

    def __init__(self) -> None:
        self._awaited: dict[Entry, None] = {}
        self._promised: dict[Entry, None] = {}

    def __len__(self) -> int:
        return len(self._awaited) + len(self._promised)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._awaited
        yield from self._promised

    def push(self, entry: Entry) -> None:
        (self._awaited if entry.waiters else self._promised)[entry] = None

    def hurry(self, entry: Entry) -> None:
        """A ranking waits for it now; one that has left the line stays out of it."""
        if entry in self._promised:
            del self._promised[entry]
            self._awaited[entry] = None

    def remove(self, entry: Entry) -> None:
        self._awaited.pop(entry, None)
        self._promised.pop(entry, None)

    def first(self) -> Entry | None:
        return next(iter(self), None)

    @property
    def awaited(self) -> bool:
        """Whether a ranking waits for the first."""
        return bool(self._awaited)
