"""The question that both legs ask for a prefix, and the answers that it can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nestpipe.serve.slots import Entry


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


Step = Promised | Use | Wait | Load | Fill | Miss
