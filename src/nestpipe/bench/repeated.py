"""Data of a benchmark: drawn before the clock starts, then repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nestpipe.batch import Batch


class Repeated:
    """A source that yields given batches in turn, so many in all."""

    def __init__(self, batches: Sequence[Batch], count: int) -> None:
        self._batches = batches
        self._count = count

    def batches(self, **_: int) -> Iterator[Batch]:
        return (self._batches[i % len(self._batches)] for i in range(self._count))

    def empty(self) -> Batch:
        return self._batches[0].empty()
