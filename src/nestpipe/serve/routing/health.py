"""Which instances are taken to be alive."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Record:
    faults: int = 0
    """In a row."""
    probe_at: float | None = None
    """When an instance that is taken to be dead may be tried again; None: it is alive."""


class Health:
    """Dead after some faults in a row, tried again now and then; safe from any thread."""

    def __init__(self, members: Iterable[str], faults: int, probe_s: float):
        self._faults = faults
        self._probe_s = probe_s
        self._records = {member: _Record() for member in members}
        self._lock = threading.Lock()

    def usable(self, member: str, now: float) -> bool:
        """Whether to send something there; of a dead one's probes only one caller hears yes."""
        with self._lock:
            record = self._records.get(member)
            if record is None or record.probe_at is None:
                return record is not None
            due = now >= record.probe_at
            if due:
                record.probe_at = now + self._probe_s
            return due

    def alive(self, member: str) -> bool:
        """What `usable` believes, without using up a probe."""
        with self._lock:
            record = self._records.get(member)
            return record is not None and record.probe_at is None

    def answered(self, member: str) -> None:
        """It is alive."""
        with self._lock:
            if record := self._records.get(member):
                record.faults, record.probe_at = 0, None

    def failed(self, member: str, now: float) -> None:
        """One more fault; the one too many makes it dead."""
        with self._lock:
            if record := self._records.get(member):
                record.faults += 1
                if record.faults >= self._faults:
                    record.probe_at = now + self._probe_s

    def mark_dead(self, member: str, now: float) -> None:
        """Somebody who asked it knows."""
        with self._lock:
            if record := self._records.get(member):
                record.faults, record.probe_at = self._faults, now + self._probe_s

    def add(self, member: str) -> None:
        """A new instance is alive until it shows otherwise; of a known one all is forgotten."""
        with self._lock:
            self._records[member] = _Record()

    def remove(self, member: str) -> None:
        with self._lock:
            self._records.pop(member, None)
