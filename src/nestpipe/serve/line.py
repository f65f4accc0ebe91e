"""The order in which prefixes are computed or reloaded."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.serve.slots import Entry


class Line:
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
