"""Threads that copy prefixes between device and host memory, beside the one that computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from nestpipe.errors import RunError
from nestpipe.serve.engine.cost_model import Work
from nestpipe.serve.engine.state import EngineState, Task
from nestpipe.serve.kv_cache.device_pool import Entry
from nestpipe.serve.kv_cache.host_tier import ReloadsByLayer
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


class Transfer:
    """What those threads do next: a reload that somebody waits for, else an offload."""

    def __init__(self, state: EngineState, threads: int) -> None:
        self._state = state
        self._max_offloads = max(1, threads - 1)
        """At once: a reload shall find a thread."""
        self._device = torch.device("cpu")
        """Where prefixes come from, and go back to."""

    def next_task(self, stream: CopyStream) -> Task | None:
        """With the lock held."""
        if load := self._state.next_reload():
            return partial(self.reload, *load, stream)
        if copy := self._state.next_offload(self._max_offloads):
            return partial(self.offload, *copy, stream)
        return None

    def reload(self, entry: Entry, host: KV, stream: CopyStream) -> None:
        """Bring a prefix back; where that fails, those who wait for it are answered without."""
        state, start = self._state, self._state.now()
        with stream(self._device):
            kv = self._try(lambda: self._bring(entry, host), "a prefix did not come back")
        spent_ms = (state.now() - start) * 1e3
        state.reloaded(entry, kv)
        if kv is not None:
            state.predictions.observe_one(Work.RELOAD, spent_ms, entry.num_bytes)

    def _bring(self, entry: Entry, host: KV) -> KV:
        """All of it, complete; by layers, rankings read it from the moment that it has begun."""
        model = entry.need.model
        if not (self._state.settings.reload_by_layer and isinstance(model, ReloadsByLayer)):
            return _checked(model.to_device(host), entry)
        reload = model.begin_reload(host)
        self._state.reload_begun(entry, _checked(reload.kv, entry))
        return reload.run()

    def offload(self, entry: Entry, kv: KV, stream: CopyStream) -> None:
        """Keep a prefix for a user who may return."""
        self._device = kv.keys_LNHA.device
        with stream(self._device):
            host = self._try(lambda: entry.need.model.to_host(kv), "a prefix could not be kept")
        self._state.offloaded(entry, host)

    def _try(self, copy: Callable[[], KV], what: str) -> KV | None:
        try:
            return copy()
        except Exception as error:  # noqa: BLE001  nobody depends on a copy
            self._state.warn(what, error)
            return None


def _checked(kv: KV, entry: Entry) -> KV:
    """What came back, if it is what the memory was set aside for."""
    if len(kv) != entry.key.length or kv.num_bytes > entry.num_bytes:
        raise RunError(
            f"{len(kv)} events in {kv.num_bytes} bytes came back for {entry.key.length} in "
            f"{entry.num_bytes}; this is a fault of the model"
        )
    return kv
