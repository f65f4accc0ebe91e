"""`Arrival`: which layers of a prefix have come, between the thread that copies and who reads."""

from __future__ import annotations

import threading

import torch

from nestpipe.errors import RunError


class Arrival:
    """Layers come in order, from one thread; any number of threads may wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event | None] = []
        self._failed = False
        self._change = threading.Condition()

    def add(self, event: torch.cuda.Event | None) -> None:
        """The next layer is there; with an event, once the device has come to that."""
        with self._change:
            self._events.append(event)
            self._change.notify_all()

    def fail(self) -> None:
        """What has not come will not: nobody shall wait for it, or make do with less."""
        with self._change:
            self._failed = True
            self._change.notify_all()

    def wait_for(self, layer: int) -> None:
        """Return when what this thread asks of the device next may read the layer.

        On a GPU the thread waits only until the copy was asked for. That the copy is made before
        it is read is left to the device: its present stream of this thread waits for the event.
        """
        with self._change:
            self._change.wait_for(lambda: self._failed or layer < len(self._events))
            if self._failed:
                raise RunError("a prefix came back only in part; compute it again")
            event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
