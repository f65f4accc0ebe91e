"""The slow twin of every other set of lanes: each op runs at once, on the calling thread."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from nestpipe.runtime.lanes import Act, Event, name_failure
from nestpipe.schedule import Lane, Op


class _Ended:
    def wait(self) -> None:
        """It has ended before anyone could ask."""


_ENDED = _Ended()


class InlineLanes:
    """Every op in issue order; on a GPU all of them go to the caller's current stream."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left to wait for."""

    def __getitem__(self, lane: Lane) -> InlineLanes:
        return self

    def submit(self, act: Act, op: Op, after: Sequence[Event]) -> Event:
        """Run the op; what it waits for was issued earlier and has therefore ended."""
        try:
            act(op)
        except BaseException as error:
            name_failure(error, op)
            raise
        return _ENDED
