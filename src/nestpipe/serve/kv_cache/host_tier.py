"""The host tier: an LRU cache of prefixes with a TTL, and their reload layer by layer.

`HostTier` is plain state, without threads: the caller holds a lock and gives the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nestpipe.serve.types import KV, LayerEvents, PrefixKey


@dataclass(eq=False, slots=True)
class HostEntry:
    """One prefix in host memory; without contents while it is copied there."""

    num_bytes: int
    expires: float
    kv: KV | None = None
    reloads: int = 0
    """Reloads that read it, or are about to: it is not evicted under them."""

    @property
    def pinned(self) -> bool:
        return self.kv is None or self.reloads > 0


class HostTier:
    """LRU host cache with a TTL, bounded in bytes; room is made before a copy begins."""

    def __init__(self, bound: int, ttl_s: float) -> None:
        self.bound = bound
        self.ttl_s = ttl_s
        self.num_bytes = 0
        self.evicted = 0
        self.expired = 0
        self._kept: dict[PrefixKey, HostEntry] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: PrefixKey) -> bool:
        """Whether it is there, or being copied here."""
        return key in self._kept

    def holds(self, key: PrefixKey, now: float) -> bool:
        """Whether it can be reloaded."""
        kept = self._kept.get(key)
        if kept is None or kept.kv is None:
            return False
        return kept.pinned or kept.expires > now

    # Out of device memory

    def begin(self, key: PrefixKey, num_bytes: int, now: float) -> bool:
        """Reserve room for a copy; False if it is here already, or there is no room."""
        if key in self._kept or not self._make_room(num_bytes, now):
            return False
        self._kept[key] = HostEntry(num_bytes, now + self.ttl_s)
        self.num_bytes += num_bytes
        return True

    def finish(self, key: PrefixKey, kv: KV, now: float) -> None:
        """The copy is complete."""
        kept = self._kept[key]
        assert kept.kv is None, f"{key} was copied twice"
        kept.kv = kv
        self._touch(key, now)

    def cancel(self, key: PrefixKey) -> None:
        """The copy failed."""
        assert self._kept[key].kv is None, f"the copy of {key} has come"
        self._drop(key)

    # Back into device memory

    def pin(self, key: PrefixKey, now: float) -> None:
        """A reload will read it."""
        self._kept[key].reloads += 1
        self._touch(key, now)

    def read(self, key: PrefixKey) -> KV:
        """What a pinned entry holds."""
        kept = self._kept[key]
        assert kept.kv is not None, f"{key} is read before it was copied"
        assert kept.reloads, f"{key} is read without a pin"
        return kept.kv

    def num_layers(self, key: PrefixKey) -> int:
        """Of a prefix that can be reloaded."""
        kept = self._kept[key]
        assert kept.kv is not None, f"{key} is asked about before it was copied"
        return len(kept.kv.keys_LNHA)

    def unpin(self, key: PrefixKey) -> None:
        """The reload is over."""
        kept = self._kept[key]
        assert kept.reloads, f"{key} has no pin"
        kept.reloads -= 1

    # Leaving

    def drop_where(self, stale: Callable[[PrefixKey], bool]) -> None:
        """Drop what is stale, but not from under a copy."""
        for key in list(filter(stale, self._kept)):
            self.discard(key)

    def discard(self, key: PrefixKey) -> None:
        """Drop one, but not from under a copy."""
        if not self._kept[key].pinned:
            self._drop(key)

    def expire(self, now: float) -> None:
        """Drop entries whose TTL is over."""
        for key, kept in list(self._old(now)):
            if not kept.pinned:
                self.expired += 1
                self._drop(key)

    def _old(self, now: float) -> Iterator[tuple[PrefixKey, HostEntry]]:
        return takewhile(lambda pair: pair[1].expires <= now, self._kept.items())

    def _make_room(self, num_bytes: int, now: float) -> bool:
        self.expire(now)
        if num_bytes > self.bound:
            return False
        while self.num_bytes + num_bytes > self.bound:
            oldest = next((key for key, kept in self._kept.items() if not kept.pinned), None)
            if oldest is None:
                return False
            self.evicted += 1
            self._drop(oldest)
        return True

    def _touch(self, key: PrefixKey, now: float) -> None:
        kept = self._kept.pop(key)
        kept.expires = now + self.ttl_s
        self._kept[key] = kept

    def _drop(self, key: PrefixKey) -> None:
        self.num_bytes -= self._kept.pop(key).num_bytes


class Reload:
    """A prefix on its way from host to device memory, one layer after the other.

    Made and run by one thread, on its current stream.

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
        self._arrival = LayerEvents(device)
        self.kv = KV(
            torch.empty_like(host.keys_LNHA, device=device),
            torch.empty_like(host.values_LNHV, device=device),
            None if host.times_N is None else self._whole(host.times_N),
            self._arrival,
        )

    @torch.inference_mode()
    def run(self) -> KV:
        """Copy all layers; the complete prefix."""
        try:
            for layer in range(len(self._host.keys_LNHA)):
                self.copy(layer)
                self._arrival.add(self._event())
            self._synchronize()
        except BaseException:
            self._arrival.fail()
            raise
        return replace(self.kv, layer_events=None)

    def copy(self, layer: int) -> None:
        """Enqueue the copy of one layer; asynchronous from pinned memory."""
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
        """An event after all that is enqueued on this thread's stream."""
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
    """A model that reloads by layer; others reload by `to_device`."""

    def begin_reload(self, host: KV) -> Reload:
        """The copy that is to be run; `rank` may use its `kv` meanwhile."""
        ...
