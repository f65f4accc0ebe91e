"""Threads that copy prefixes between device and host memory, beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from nestpipe.errors import RunError
from nestpipe.serve.engine.cost_model import Work
from nestpipe.serve.engine.state import Desk, Task
from nestpipe.serve.kv_cache.device_pool import Entry
from nestpipe.serve.kv_cache.reload import ReloadsByLayer
from nestpipe.serve.types import KV


class CopyStream:
    """A CUDA stream of its own for the copies of one thread, so that they run beside the model."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, device: torch.device) -> AbstractContextManager[object]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)


class Copies:
    """What those threads do next: a reload that somebody waits for, else a copy out."""

    def __init__(self, desk: Desk, threads: int) -> None:
        self.desk = desk
        self._most_out = max(1, threads - 1)
        """Copies out at once: a reload shall find a thread."""
        self._num_out = 0
        self._device = torch.device("cpu")
        """Where prefixes come from, and go back to."""

    def next_task(self, stream: CopyStream) -> Task | None:
        """With the lock held."""
        cache, now = self.desk.cache, self.desk.now()
        if load := cache.next_load(now):
            return partial(self.load, *load, stream)
        if self._num_out < self._most_out and (copy := cache.next_copy(now)):
            self._num_out += 1
            return partial(self.copy_out, *copy, stream)
        return None

    def load(self, entry: Entry, host: KV, stream: CopyStream) -> None:
        """Bring a prefix back; where that fails, those who wait for it are answered without."""
        desk, start = self.desk, self.desk.now()
        with stream(self._device):
            kv = self._try(lambda: self._bring(entry, host), "a prefix did not come back")
        with desk.change:
            now = desk.now()
            if kv is None:
                desk.do_without(desk.cache.failed(entry), now)
                desk.leave_in_line(entry)
            else:
                desk.have_prefix(desk.cache.loaded(entry, kv, now), now)
            desk.change.notify_all()
        if kv is not None:
            desk.predictions.observe_one(Work.RELOAD, (now - start) * 1e3, entry.num_bytes)

    def _bring(self, entry: Entry, host: KV) -> KV:
        """All of it, complete; by layers, rankings read it from the moment that it has begun."""
        model = entry.need.model
        if not (self.desk.settings.reload_by_layer and isinstance(model, ReloadsByLayer)):
            return _checked(model.to_device(host), entry)
        reload = model.begin_reload(host)
        begun, desk = _checked(reload.kv, entry), self.desk
        with desk.change:
            now = desk.now()
            desk.have_prefix(desk.cache.begun(entry, begun, now), now)
            desk.change.notify_all()
        return reload.run()

    def copy_out(self, entry: Entry, kv: KV, stream: CopyStream) -> None:
        """Keep a prefix for a user who may return."""
        self._device = kv.keys_LNHA.device
        with stream(self._device):
            host = self._try(lambda: entry.need.model.to_host(kv), "a prefix could not be kept")
        with self.desk.change:
            self._num_out -= 1
            self.desk.cache.copied(entry, host, self.desk.now())
            self.desk.change.notify_all()

    def _try(self, copy: Callable[[], KV], what: str) -> KV | None:
        try:
            return copy()
        except Exception as error:  # noqa: BLE001  nobody depends on a copy
            self.desk.warn(what, error)
            return None


def _checked(kv: KV, entry: Entry) -> KV:
    """What came back, if it is what the memory was set aside for."""
    if len(kv) != entry.key.length or kv.num_bytes > entry.num_bytes:
        raise RunError(
            f"{len(kv)} events in {kv.num_bytes} bytes came back for {entry.key.length} in "
            f"{entry.num_bytes}; this is a fault of the model"
        )
    return kv
