"""The slow twin of every other set of lanes: each op runs at once, on the calling thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from nestpipe.runtime.lanes import Act, Event, name_failure
from nestpipe.schedule import Lane, Op


class _Ended:
    def wait(self) -> None:
        """It has ended before anyone could ask."""


_ENDED = _Ended()


def _no_device() -> None:
    """What was called has ended."""


@dataclass(frozen=True, slots=True)
class _InlineLane:
    begin: Callable[[], None]

    def submit(
        self, act: Act, op: Op, after: Sequence[Event], behind: Event | None = None
    ) -> Event:
        """Run the op; what it waits for was issued earlier and has ended."""
        try:
            self.begin()
            act(op)
        except BaseException as error:
            name_failure(error, op)
            raise
        return _ENDED


class InlineLanes:
    """Every op in issue order; on a GPU all of them go to the caller's current stream.

    There the host would run ahead of the device: `finish` waits for it, before each op of the lanes
    `on_host`, so that nothing overlaps.
    """

    def __init__(
        self, finish: Callable[[], None] = _no_device, on_host: frozenset[Lane] = frozenset()
    ) -> None:
        self._on_host = on_host
        self._host, self._device = _InlineLane(finish), _InlineLane(_no_device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left to wait for."""

    def __getitem__(self, lane: Lane) -> _InlineLane:
        return self._host if lane in self._on_host else self._device
