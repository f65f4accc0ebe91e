"""`Reload`: a prefix on its way from host to device memory, one layer after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nestpipe.serve.types import KV, Arrival


class Reload:
    """Made and run by one thread, on its present stream.

    `kv` may be given to `rank` as soon as it is made: its arrival says when each layer is there.
    """

    @torch.inference_mode()
    def __init__(self, host: KV, device: torch.device) -> None:
        """Sets device memory aside; brings the times at once, which `rank` reads before any layer.

        The memory belongs to the present stream, and the allocator gives it out again on that
        stream only: also where this fails half way, copies that are still under way end before
        others begin. Whoever reads it on another stream must have ended before it is freed.
        """
        self._host = host
        self._device = device
        self._arrival = Arrival(device)
        self.kv = KV(
            torch.empty_like(host.keys_LNHA, device=device),
            torch.empty_like(host.values_LNHV, device=device),
            None if host.times_N is None else self._whole(host.times_N),
            self._arrival,
        )

    @torch.inference_mode()
    def run(self) -> KV:
        """Bring all layers; the prefix without an arrival, complete when this returns."""
        try:
            for layer in range(len(self._host.keys_LNHA)):
                self.copy(layer)
                self._arrival.add(self._event())
            self._synchronize()
        except BaseException:
            self._arrival.fail()
            raise
        return replace(self.kv, arrival=None)

    def copy(self, layer: int) -> None:
        """Ask for one layer; from pinned memory this does not wait for the device."""
        for host, here in (
            (self._host.keys_LNHA, self.kv.keys_LNHA),
            (self._host.values_LNHV, self.kv.values_LNHV),
        ):
            here[layer].copy_(host[layer], non_blocking=True)

    def _whole(self, times_N: Tensor) -> Tensor:
        copied_N = torch.empty_like(times_N, device=self._device).copy_(times_N, non_blocking=True)
        self._synchronize()
        return copied_N

    def _event(self) -> torch.cuda.Event | None:
        """Comes when all that was asked of this thread's stream so far is done."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@runtime_checkable
class ReloadsByLayer(Protocol):
    """A model whose prefixes can come back one layer after the other; others do by `to_device`."""

    def begin_reload(self, host: KV) -> Reload:
        """The copy that is to be run; `rank` may use its `kv` meanwhile."""
        ...
