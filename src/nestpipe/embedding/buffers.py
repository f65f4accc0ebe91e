"""The rows of the batches in flight: read, refreshed and written back in the schedule's order.

`retrieve` fills the idle buffer while the active one is in use. `sync` copies the rows that both
batches have, after the active batch's update. `writeback` saves the rows that leave. How rows get
from a store into a buffer and back is the transport's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.embedding.routing.owners import RowSelection, WorkingSet
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.embedding.transports import BufferRows, choose_transport
from nestpipe.schedule import Retrieval, Shape

# Shapes: K rows of a working set, W weights and state


class RowBuffers:
    """The rows, with their state, of the batches in flight."""

    def __init__(
        self,
        stores: Sequence[RowStore],
        shape: Shape,
        device: torch.device,
        *,
        in_place: bool,
        pin: bool,
    ) -> None:
        """`in_place` and `pin`: what transports may do, see `choose_transport`."""
        self._only_new = shape.retrieval is Retrieval.NEW
        self._transports = [
            choose_transport(store, shape, device, in_place=in_place, pin=pin) for store in stores
        ]
        self._rows: dict[int, list[BufferRows]] = {}
        """[batch][group]"""
        self.poison = False
        """Fill a buffer with NaN before it is read into, so that a late reader is found out."""
        self._num_buffers = shape.buffers

    def of(self, batch: int) -> list[BufferRows]:
        return self._rows[batch]

    def retrieve(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Rows from the stores into the idle buffer; returns how many were read."""
        if self.poison:
            self._poison(batch - self._num_buffers)
        new = [self._new_rows(of_store) for of_store in working]
        self._rows[batch] = [
            transport.read(batch, of_store, chosen)
            for transport, of_store, chosen in zip(self._transports, working, new, strict=True)
        ]
        self._carry_over(batch, working)
        return sum(map(len, new))

    def _new_rows(self, working: WorkingSet) -> RowSelection:
        """Rows that no buffer has."""
        here_K = working.shared_K
        if working.carried_over is not None:
            here_K = torch.cat([here_K, working.carried_over.positions_K])
        return working.without(here_K) if self._only_new and len(here_K) else working.all_rows

    def _poison(self, batch: int) -> None:
        """Rows that the plan lets `retrieve` overwrite; memory is taken anew, so they linger."""
        for rows in self._rows.get(batch, []):
            if isinstance(rows, Tensor):
                rows.fill_(math.nan)

    def _carry_over(self, batch: int, working: Sequence[WorkingSet]) -> None:
        """Rows that may not be back in their store yet, from the buffer where they still are."""
        for g, of_store in enumerate(working):
            if (carried := of_store.carried_over) is None:
                continue
            now_KW, older_KW = self._rows[batch][g], self._rows[batch - 2][g]
            assert isinstance(now_KW, Tensor)
            assert isinstance(older_KW, Tensor)
            rows = older_KW.index_select(0, carried.older_there)
            now_KW.index_copy_(0, carried.positions_there, rows)

    def sync(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Rows that the batch before had too, from its buffer; returns how many.

        Rows that were carried over from an older batch count too.
        """
        if batch - 1 not in self._rows:
            return 0
        refreshed = 0
        for of_store, now_KW, before_KW in zip(
            working, self._rows[batch], self._rows[batch - 1], strict=True
        ):
            assert isinstance(now_KW, Tensor)
            assert isinstance(before_KW, Tensor)
            shared = before_KW.index_select(0, of_store.shared_before_there)
            now_KW.index_copy_(0, of_store.shared_there, shared)
            refreshed += len(of_store.shared_K)
            if of_store.carried_over is not None:
                refreshed += len(of_store.carried_over.positions_K)
        return refreshed

    def writeback(
        self, batch: int, working: Sequence[WorkingSet], then: Sequence[WorkingSet] | None
    ) -> int:
        """Rows that leave the device into their stores; returns how many.

        `then` is the working set of the next batch, where what it shares stays.
        """
        written = 0
        for g, (transport, of_store) in enumerate(zip(self._transports, working, strict=True)):
            leaving = of_store.all_rows if then is None else of_store.without(then[g].shared_before)
            transport.write(batch, of_store, leaving, self._rows[batch][g])
            written += len(leaving)
        return written

    def forget(self, batch: int) -> None:
        """Drop the rows of a batch."""
        self._rows.pop(batch, None)
        for transport in self._transports:
            transport.forget(batch)
