"""Lanes on a GPU: one host thread and one CUDA stream for each.

A thread issues the ops of its lane without waiting for the device: what an op waits for must have
been issued, and then it is the lane's stream that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from nestpipe.runtime.threads import ThreadLanes
from nestpipe.runtime.worker import LaneThread, Mark
from nestpipe.schedule import Lane

HOST_LANES = frozenset({Lane.LOADER, Lane.HOST, Lane.WRITE})
"""Lanes whose acts read and write host memory, which no stream can hold back."""
DEFAULT_PRIORITY, HIGH_PRIORITY = 0, -1


class DeviceEvent(Protocol):
    """As much of `torch.cuda.Event` as lanes use."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """As much of `torch.cuda.Stream` as lanes use."""

    def wait_event(self, event: Any, /) -> None: ...
    def record_event(self, event: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class StreamMark:
    """A point in the work of a stream."""

    stream: Stream
    event: DeviceEvent

    def wait(self) -> None:
        self.event.synchronize()


def _new_event() -> DeviceEvent:
    # A host thread that waits sleeps: it would spin on a core that other lanes need.
    return torch.cuda.Event(blocking=True)


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A thread and its stream: an op has ended when the stream has done what its act put there."""

    stream: Stream
    host_work: bool = False
    """Whether acts work on host memory: then each starts when all before it has ended."""
    new_event: Callable[[], DeviceEvent] = _new_event
    current: Callable[[Any], AbstractContextManager[object]] = torch.cuda.stream

    def entered(self) -> AbstractContextManager[object]:
        """The stream is the thread's current one; autograd's backward follows its forward there."""
        # Else each lane gets a team of threads for its small operations on the host, which spin
        # between them: with four ranks on 16 cores they took most of the machine.
        torch.set_num_threads(1)
        return self.current(self.stream)

    def wait_for(self, marks: Sequence[Mark]) -> None:
        for mark in marks:
            assert isinstance(mark, StreamMark), f"{mark} is of other lanes"
            if mark.stream is not self.stream:
                self.stream.wait_event(mark.event)
        if self.host_work:
            self.mark().wait()

    def mark(self) -> StreamMark:
        event = self.new_event()
        self.stream.record_event(event)
        return StreamMark(self.stream, event)


class CudaLanes:
    """A thread and a stream per lane; all streams but that of `compute` have high priority.

    The short kernels of exchange and routing would otherwise queue behind the long ones of dense
    compute. The streams live as long as the lanes: memory is cached by stream, so lanes that are
    entered again find theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places = {lane: _place(lane, device) for lane in Lane}
        self._threads = ThreadLanes(self._places.__getitem__)

    def __enter__(self) -> Self:
        before = StreamPlace(torch.cuda.current_stream(self._device)).mark()
        for place in self._places.values():
            place.stream.wait_event(before.event)
        self._threads.__enter__()
        return self

    def __getitem__(self, lane: Lane) -> LaneThread:
        return self._threads[lane]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the device too, unless the run failed: then it may never come to the end."""
        self._threads.__exit__(kind, error, traceback)
        if error is None:
            for place in self._places.values():
                place.mark().wait()


def _place(lane: Lane, device: torch.device) -> StreamPlace:
    priority = DEFAULT_PRIORITY if lane is Lane.COMPUTE else HIGH_PRIORITY
    return StreamPlace(torch.cuda.Stream(device, priority=priority), host_work=lane in HOST_LANES)
