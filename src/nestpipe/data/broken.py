"""Rows that cannot be read: counted, named by file and line, refused beyond a limit."""

from __future__ import annotations

from nestpipe.errors import DataError

KEPT = 5


class RowError(ValueError):
    """Why some row cannot be read; whoever knows its file and line tells `Broken` of it."""


class Broken:
    """The broken rows of one pass over the data."""

    def __init__(self, limit: int = 0, setting: str = "data.max_broken") -> None:
        self.limit = limit
        self.setting = setting
        self.count = 0
        self.first: list[str] = []
        """Where and why, for the first few."""

    def copy(self) -> Broken:
        """The same rows, to be counted on from here."""
        twin = Broken(self.limit, self.setting)
        twin.count, twin.first = self.count, list(self.first)
        return twin

    def add(self, where: str, reason: str) -> None:
        """Count a broken row, or refuse it: one sentence that names it."""
        self.count += 1
        if len(self.first) < KEPT:
            self.first.append(f"{where} ({reason})")
        if self.count <= self.limit:
            return
        if self.limit == 0:
            raise DataError(
                f"{where} is broken: {reason}; correct it, or let broken rows be skipped "
                f"with {self.setting}"
            )
        raise DataError(
            f"there are more broken rows than {self.setting} = {self.limit}, the first at "
            f"{', '.join(self.first)}; correct them or raise the limit"
        )

    def __str__(self) -> str:
        if not self.count:
            return "no broken rows"
        more = ", ..." if self.count > len(self.first) else ""
        return f"{self.count} broken rows skipped: {', '.join(self.first)}{more}"
