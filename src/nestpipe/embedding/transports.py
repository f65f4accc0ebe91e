"""Buffers of the batches in flight, and how rows move between a store and them.

`choose_transport` picks one for each store, once, by what the store can do, the device, and the
shape of the schedule:

- `SlotTransport`: the store keeps rows on the device; they are copied there, slot to buffer.
- `InPlaceTransport`: one batch at a time on the host; rows are used where they live, uncopied.
- `GpuTransport`: the GPU copies rows by itself, from and to pinned host memory.
- `PointerTransport`: host threads copy rows from and to known addresses.
- `KeyTransport`: the store gathers and scatters rows by key. It needs no ability, and is the twin
  that all others are compared with.

A new tier brings a store with the right ability, or a transport of its own and a line in
`choose_transport`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nestpipe.embedding.routing.owners import RowSelection, WorkingSet
from nestpipe.embedding.store.protocol import DeviceRows, RowLocator, RowPinner, RowStore
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.cuda import aligned_rows
from nestpipe.kernels.rows.native import RowPointers, copy_rows
from nestpipe.kernels.rows.segments import empty_rows, use_native
from nestpipe.schedule import Retrieval, Shape

if TYPE_CHECKING:
    from nestpipe.embedding.pool import SlotRows

# Shapes: K rows of a working set, n some of them, W weights and state

BufferRows = Tensor | RowPointers
"""The rows of a batch: (K, W) numbers in a buffer, or where the store has them."""


class RowTransport(Protocol):
    """Moves the rows of one store; batches come in order, several of them are in flight."""

    def read(self, batch: int, working: WorkingSet, new: RowSelection) -> BufferRows:
        """Rows of a batch's working set: those of `new` are read, the others left as they are.

        Rows that are not new must be in the buffer of one of the two batches before.
        """
        ...

    def write(
        self, batch: int, working: WorkingSet, leaving: RowSelection, rows: BufferRows
    ) -> None:
        """Give rows that leave the device back to the store."""
        ...

    def forget(self, batch: int) -> None:
        """Drop what is known of a batch."""
        ...


def choose_transport(
    store: RowStore, shape: Shape, device: torch.device, *, in_place: bool, pin: bool
) -> RowTransport:
    """The fastest way for a store's rows.

    `in_place`: rows may be inserted as soon as they are looked up, hence located. `pin`: then a
    GPU may read and write them where they live.
    """
    can, width = store.abilities, store.layout.width
    if can.device is not None and can.device.rows_SW.device == device:
        return SlotTransport(can.device)
    if not in_place or can.locate is None or not native_wanted():
        return KeyTransport(store, Staging(width, device))
    pointers = BatchPointers(can.locate)
    if shape.buffers == 1 and use_native(device):
        return InPlaceTransport(pointers)
    by_host = PointerTransport(pointers, Staging(width, device))
    if pin and can.pin is not None and device.type == "cuda" and has_triton():
        return GpuTransport(by_host, can.pin, device, alone=not shape.retrieves_ahead)
    return by_host


def has_triton() -> bool:
    """Whether kernels for a GPU can be compiled; torch's builds for GPUs bring it along."""
    return find_spec("triton") is not None


class Staging:
    """Host memory between a store and a buffer; pinned where the buffer is on a GPU."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.device = device

    @property
    def needed(self) -> bool:
        """Whether a store on the host cannot reach the buffer itself."""
        return self.device.type == "cuda"

    def buffer(self, count: int) -> Tensor:
        """(count, W) room for rows on the device."""
        return empty_rows(count, self.width, self.device)

    def rows(self, count: int) -> Tensor:
        """(count, W) room for rows on the host."""
        return empty((count, self.width), torch.float32, torch.device("cpu"), pinned=self.needed)

    def put(self, rows_nW: Tensor, rows_KW: Tensor, chosen: RowSelection) -> None:
        """Rows on the host into their places in a buffer."""
        if chosen.positions_n is None:
            rows_KW.copy_(rows_nW, non_blocking=True)
        else:
            rows_KW.index_copy_(0, self._there(chosen.positions_n), self._there(rows_nW))

    def take(self, rows_KW: Tensor, chosen: RowSelection) -> Tensor:
        """(n, W) rows of a buffer on the host; waits for a GPU."""
        if chosen.positions_n is not None:
            rows_KW = rows_KW.index_select(0, self._there(chosen.positions_n))
        if not self.needed:
            return rows_KW
        rows_nW = self.rows(len(rows_KW)).copy_(rows_KW, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return rows_nW

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class KeyTransport:
    """Rows gathered and scattered by key: what any store can do."""

    def __init__(self, store: RowStore, staging: Staging) -> None:
        self._store = store
        self._staging = staging

    def read(self, batch: int, working: WorkingSet, new: RowSelection) -> Tensor:
        rows_KW = self._staging.buffer(working.size)
        straight = new.positions_n is None and not self._staging.needed
        rows_nW = rows_KW if straight else self._staging.rows(len(new))
        self._store.gather(new.of(working.keys_K), new.table_counts, rows_nW)
        if not straight:
            self._staging.put(rows_nW, rows_KW, new)
        return rows_KW

    def write(
        self, batch: int, working: WorkingSet, leaving: RowSelection, rows: BufferRows
    ) -> None:
        assert isinstance(rows, Tensor)
        rows_nW = self._staging.take(rows, leaving)
        self._store.scatter(leaving.of(working.keys_K), leaving.table_counts, rows_nW)

    def forget(self, batch: int) -> None:
        """Nothing is known of any batch."""


class BatchPointers:
    """Where the rows of the batches in flight live, so that writing them needs no search."""

    def __init__(self, locator: RowLocator) -> None:
        self._locator = locator
        self._of: dict[int, RowPointers] = {}

    def locate(self, batch: int, working: WorkingSet, new: RowSelection) -> RowPointers:
        """Ask the store for new rows only: where the others live is known from earlier batches."""
        found = self._locator.locate(new.of(working.keys_K), new.table_counts)
        if new.positions_n is not None:
            addresses_K = torch.empty_like(working.keys_K)
            addresses_K[new.positions_n] = found.addresses_K
            if len(working.shared_K):
                before = self._of[batch - 1].addresses_K
                addresses_K[working.shared_K] = before[working.shared_before]
            if (carried := working.carried_over) is not None:
                addresses_K[carried.positions_K] = self._of[batch - 2].addresses_K[carried.older]
            found = RowPointers(addresses_K, found.width)
        self._of[batch] = found
        return found

    def copy(
        self,
        batch: int,
        chosen: RowSelection,
        rows: Tensor,
        positions_n: Tensor | None,
        *,
        to_store: bool,
    ) -> None:
        """Copy chosen rows of a batch between where they live and positions of a host tensor."""
        copy_rows(
            self._of[batch].at(chosen.positions_n),
            rows,
            positions_n=positions_n,
            to_store=to_store,
            threads=self._locator.threads,
        )

    def forget(self, batch: int) -> None:
        self._of.pop(batch, None)


class InPlaceTransport:
    """Rows are used and updated where the store has them: nothing is copied or written back."""

    def __init__(self, pointers: BatchPointers) -> None:
        self._pointers = pointers

    def read(self, batch: int, working: WorkingSet, new: RowSelection) -> RowPointers:
        return self._pointers.locate(batch, working, new)

    def write(
        self, batch: int, working: WorkingSet, leaving: RowSelection, rows: BufferRows
    ) -> None:
        """Rows are where they belong."""

    def forget(self, batch: int) -> None:
        self._pointers.forget(batch)


class PointerTransport:
    """Host threads copy rows from and to their addresses, through staging memory for a GPU."""

    def __init__(self, pointers: BatchPointers, staging: Staging) -> None:
        self.pointers = pointers
        self._staging = staging

    def read(self, batch: int, working: WorkingSet, new: RowSelection) -> Tensor:
        self.pointers.locate(batch, working, new)
        return self.copy_located(batch, working.size, new)

    def copy_located(self, batch: int, size: int, new: RowSelection) -> Tensor:
        """Rows of a batch whose addresses are known, in a new buffer of `size` rows."""
        rows_KW = self._staging.buffer(size)
        if not self._staging.needed:
            self.pointers.copy(batch, new, rows_KW, new.positions_n, to_store=False)
            return rows_KW
        rows_nW = self._staging.rows(len(new))
        self.pointers.copy(batch, new, rows_nW, None, to_store=False)
        self._staging.put(rows_nW, rows_KW, new)
        return rows_KW

    def write(
        self, batch: int, working: WorkingSet, leaving: RowSelection, rows: BufferRows
    ) -> None:
        assert isinstance(rows, Tensor)
        if not self._staging.needed:
            self.pointers.copy(batch, leaving, rows, leaving.positions_n, to_store=True)
            return
        rows_nW = self._staging.take(rows, leaving)
        self.pointers.copy(batch, leaving, rows_nW, None, to_store=True)

    def forget(self, batch: int) -> None:
        self.pointers.forget(batch)


class GpuTransport:
    """The GPU reads and writes rows in pinned host memory; no core copies, nobody waits.

    Where the system refuses to pin, also later in a run, the host copies from then on.
    """

    def __init__(
        self, by_host: PointerTransport, pinner: RowPinner, device: torch.device, *, alone: bool
    ) -> None:
        """`alone`: nothing else runs on the GPU while rows are read."""
        self._by_host = by_host
        self._pinner = pinner
        self._device = device
        self._alone = alone
        self._refused = False
        self._addresses: dict[int, Tensor] = {}
        """[batch] where rows live, for the GPU; batches that the host copies are not here."""

    def read(self, batch: int, working: WorkingSet, new: RowSelection) -> Tensor:
        pointers = self._by_host.pointers.locate(batch, working, new)
        if not self._pin():
            return self._by_host.copy_located(batch, working.size, new)
        self._addresses[batch] = self._sent(pointers.addresses_K)
        rows_KW = aligned_rows(working.size, pointers.width, self._device)
        self._copy(batch, new, rows_KW, to_store=False)
        return rows_KW

    def write(
        self, batch: int, working: WorkingSet, leaving: RowSelection, rows: BufferRows
    ) -> None:
        assert isinstance(rows, Tensor)
        if batch in self._addresses:
            self._copy(batch, leaving, rows, to_store=True)
        else:
            self._by_host.write(batch, working, leaving, rows)

    def forget(self, batch: int) -> None:
        self._addresses.pop(batch, None)
        self._by_host.forget(batch)

    def _pin(self) -> bool:
        """Open rows to the GPU that were added since; False once the system has refused."""
        if not self._refused and not self._pinner.pin():
            self._refused = True
            warnings.warn(
                "the system does not let the GPU reach rows in host memory, so the host copies "
                "them: slower; raise the limit on locked memory (ulimit -l), or set "
                "pin_rows = false",
                stacklevel=2,
            )
        return not self._refused

    def _copy(self, batch: int, chosen: RowSelection, rows_KW: Tensor, *, to_store: bool) -> None:
        from nestpipe.kernels.rows.row_copy_triton import copy_rows_by_gpu

        positions_n = None if chosen.positions_n is None else self._sent(chosen.positions_n)
        copy_rows_by_gpu(
            self._addresses[batch], positions_n, rows_KW, to_store=to_store, alone=self._alone
        )

    def _sent(self, numbers: Tensor) -> Tensor:
        """The same numbers on the device; the host does not wait for them."""
        staging = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        return staging.copy_(numbers).to(self._device, non_blocking=True)


class SlotTransport:
    """Rows that the store keeps on the device, copied there between slots and buffers."""

    def __init__(self, store: DeviceRows) -> None:
        self._store = store

    def read(self, batch: int, working: WorkingSet, new: RowSelection) -> Tensor:
        slots_n = self._store.slots(new.of(working.keys_K), new.table_counts)
        rows_nW = self._store.rows_SW.index_select(0, slots_n)
        if new.positions_n is None:
            return rows_nW
        rows_KW = empty_rows(working.size, rows_nW.shape[1], rows_nW.device)
        return rows_KW.index_copy_(0, new.positions_n.to(rows_nW.device), rows_nW)

    def write(
        self, batch: int, working: WorkingSet, leaving: RowSelection, rows: BufferRows
    ) -> None:
        assert isinstance(rows, Tensor)
        slots_n = self._store.slots(leaving.of(working.keys_K), leaving.table_counts)
        if leaving.positions_n is not None:
            rows = rows.index_select(0, leaving.positions_n.to(rows.device))
        self._store.rows_SW.index_copy_(0, slots_n, rows)

    def forget(self, batch: int) -> None:
        """Nothing is known of any batch."""


# The buffers that they fill.


class HeldRows(Protocol):
    """The rows, with their state, that the batches in flight have on the device."""

    @property
    def poison(self) -> bool:
        """Whether room is filled with NaN before it is read into, which a late reader finds."""
        ...

    @poison.setter
    def poison(self, wanted: bool, /) -> None: ...

    @property
    def compares(self) -> bool:
        """Whether the working set of a batch is compared with that of the batch before."""
        ...

    def admit(self, batch: int, working: list[WorkingSet]) -> list[WorkingSet]:
        """Make room for a batch; returns its working sets with the places of rows to send."""
        ...

    def of(self, batch: int) -> Sequence[BufferRows | SlotRows]:
        """The rows of a batch, group by group."""
        ...

    def retrieve(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Read rows from the stores; returns how many."""
        ...

    def sync(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Refresh rows that the batch before had too; returns how many."""
        ...

    def writeback(
        self, batch: int, working: Sequence[WorkingSet], then: Sequence[WorkingSet] | None
    ) -> int:
        """Write rows that leave the device into their stores; returns how many.

        `then` is the working set of the next batch, where what it shares stays.
        """
        ...

    def forget(self, batch: int) -> None:
        """Drop the rows of a batch."""
        ...


class RowBuffers:
    """The rows, with their state, of the batches in flight: each batch has a buffer."""

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
        self.compares = shape.buffers > 1

    def admit(self, batch: int, working: list[WorkingSet]) -> list[WorkingSet]:
        """A buffer has room for every row of its batch."""
        return working

    def of(self, batch: int) -> Sequence[BufferRows]:
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
