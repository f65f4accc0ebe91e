"""Rows between host memory and the device: read, refreshed and written back.

`retrieve` fills the idle buffer while the active one is in use; `sync` copies the rows that both
batches have, after the active batch's update; `writeback` saves the rows that leave. While a batch
is in flight it is remembered where its rows live, so that writing them needs no search.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from nestpipe.embedding.routing.owners import WorkingSet
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.native import Places, copy_rows
from nestpipe.kernels.rows.row_copy_tma import aligned_rows
from nestpipe.kernels.rows.segments import empty_rows, use_native
from nestpipe.schedule.schedule import Retrieval, Shape

# Shapes: K rows of a working set, n some of them, W weights and state

_CPU = torch.device("cpu")


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
        """`in_place`: rows may be made where they will live as soon as they are looked up.

        `pin`: then a GPU may read and write them there itself.
        """
        self._stores = stores
        self._shape = shape
        self._device = device
        self._located = in_place and native_wanted() and all(map(can_locate, stores))
        self.in_place = self._located and shape.buffers == 1 and use_native(device)
        """Whether rows are not copied at all: one batch at a time, all in the same memory."""
        self._by_gpu = self._located and pin and device.type == "cuda" and has_triton()
        self._rows: dict[int, list[Tensor | Places]] = {}
        """[batch][group] (K, W) rows on the device, or where they live."""
        self._places: dict[int, list[Places]] = {}
        """[batch][group] where the rows live, if that is known ..."""
        self._addresses_there: dict[int, list[Tensor]] = {}
        """... and the same on the device, where the GPU moves rows."""

    def of(self, batch: int) -> list[Tensor | Places]:
        return self._rows[batch]

    def retrieve(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Rows from host memory into the idle buffer; returns how many were read."""
        read = [self._new_positions(of_store) for of_store in working]
        if self._located:
            self._places[batch] = [
                self._locate(batch, g, read[g], w) for g, w in enumerate(working)
            ]
        if self._by_gpu:
            self._open_to_gpu(batch)
        if self.in_place:
            self._rows[batch] = list(self._places[batch])
        else:
            self._rows[batch] = [self._read(batch, g, read[g], w) for g, w in enumerate(working)]
            self._take_over(batch, working)
        return sum(
            of_store.size if new is None else len(new[0])
            for new, of_store in zip(read, working, strict=True)
        )

    def _open_to_gpu(self, batch: int) -> None:
        """Let the GPU know where rows live, in memory that it can reach."""
        if all(store.pin() for store in self._stores if isinstance(store, NativeStore)):
            places = self._places[batch]
            self._addresses_there[batch] = [self._sent(p.addresses_K) for p in places]
            return
        self._by_gpu = False
        warnings.warn(
            "the system does not let the GPU reach rows in host memory, so the host copies them: "
            "slower; raise the limit on locked memory (ulimit -l), or set pin_rows = false",
            stacklevel=2,
        )

    def _new_positions(self, working: WorkingSet) -> tuple[Tensor, list[int]] | None:
        """Rows to read and how many of each table; None: all."""
        if self._shape.retrieval is not Retrieval.NEW:
            return None
        here_K = working.shared_K
        if working.taken is not None:
            here_K = torch.cat([here_K, working.taken.positions_K])
        return working.without(here_K) if len(here_K) else None

    def _locate(
        self, batch: int, g: int, new: tuple[Tensor, list[int]] | None, working: WorkingSet
    ) -> Places:
        store = self._stores[g]
        assert isinstance(store, NativeStore)
        if new is None:
            return store.locate(working.keys_K, working.table_counts)
        new_n, counts = new
        addresses_K = torch.empty_like(working.keys_K)
        addresses_K[new_n] = store.locate(working.keys_K[new_n], counts).addresses_K
        if len(working.shared_K):
            before = self._places[batch - 1][g].addresses_K
            addresses_K[working.shared_K] = before[working.shared_before]
        if (taken := working.taken) is not None:
            addresses_K[taken.positions_K] = self._places[batch - 2][g].addresses_K[taken.older]
        return Places(addresses_K, store.layout.width)

    def _read(
        self, batch: int, g: int, new: tuple[Tensor, list[int]] | None, working: WorkingSet
    ) -> Tensor:
        store = self._stores[g]
        new_n, counts = new or (None, working.table_counts)
        if self._by_gpu:
            rows_KW = aligned_rows(working.size, store.layout.width, self._device)
            self._move(batch, g, new_n, rows_KW, to_places=False)
            return rows_KW
        rows_KW = empty_rows(working.size, store.layout.width, self._device)
        if self._located and not rows_KW.is_cuda:
            self._copy(batch, g, new_n, rows_KW, new_n, to_places=False)
            return rows_KW
        keys_n = working.keys_K if new_n is None else working.keys_K[new_n]
        direct = new_n is None and not rows_KW.is_cuda
        rows_nW = rows_KW if direct else self._staging(len(keys_n), store)
        if self._located:
            self._copy(batch, g, new_n, rows_nW, None, to_places=False)
        else:
            store.gather(keys_n, counts, rows_nW)
        if new_n is not None:
            rows_KW.index_copy_(0, self._on_device(new_n), self._on_device(rows_nW))
        elif not direct:
            rows_KW.copy_(rows_nW, non_blocking=True)
        return rows_KW

    def _take_over(self, batch: int, working: Sequence[WorkingSet]) -> None:
        """Rows that may not be in host memory yet, from the buffer where they still are."""
        for g, of_store in enumerate(working):
            if (taken := of_store.taken) is None:
                continue
            now_KW, older_KW = self._rows[batch][g], self._rows[batch - 2][g]
            assert isinstance(now_KW, Tensor)
            assert isinstance(older_KW, Tensor)
            rows = older_KW.index_select(0, taken.older_there)
            now_KW.index_copy_(0, taken.positions_there, rows)

    def sync(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Rows that the batch before had too, from its buffer; returns how many.

        Those that were taken over from an older one count too.
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
            refreshed += 0 if of_store.taken is None else len(of_store.taken.positions_K)
        return refreshed

    def writeback(
        self, batch: int, working: Sequence[WorkingSet], then: Sequence[WorkingSet] | None
    ) -> int:
        """Rows that leave the device into host memory; returns how many.

        `then` is the working set of the next batch, where what it shares stays.
        """
        written = 0
        for g, of_store in enumerate(working):
            rows_KW = self._rows[batch][g]
            if isinstance(rows_KW, Places):
                written += of_store.size
                continue
            leaving_n, counts = (
                (None, of_store.table_counts)
                if then is None
                else of_store.without(then[g].shared_before)
            )
            written += of_store.size if leaving_n is None else len(leaving_n)
            self._write(batch, g, leaving_n, counts, of_store, rows_KW)
        return written

    def _write(
        self,
        batch: int,
        g: int,
        leaving_n: Tensor | None,
        counts: list[int],
        working: WorkingSet,
        rows_KW: Tensor,
    ) -> None:
        if batch in self._addresses_there:
            self._move(batch, g, leaving_n, rows_KW, to_places=True)
            return
        if self._located and not rows_KW.is_cuda:
            self._copy(batch, g, leaving_n, rows_KW, leaving_n, to_places=True)
            return
        if leaving_n is not None:
            rows_KW = rows_KW.index_select(0, self._on_device(leaving_n))
        rows_nW = self._on_host(rows_KW, g)
        if self._located:
            self._copy(batch, g, leaving_n, rows_nW, None, to_places=True)
        else:
            keys_n = working.keys_K if leaving_n is None else working.keys_K[leaving_n]
            self._stores[g].scatter(keys_n, counts, rows_nW)

    def forget(self, batch: int) -> None:
        """Drop the rows of a batch."""
        self._rows.pop(batch, None)
        self._places.pop(batch, None)
        self._addresses_there.pop(batch, None)

    def _move(
        self, batch: int, g: int, which_n: Tensor | None, rows_KW: Tensor, *, to_places: bool
    ) -> None:
        """Let the GPU copy some of the batch's rows between a buffer and where they live."""
        from nestpipe.kernels.rows.row_copy_triton import copy_rows_by_gpu

        positions_n = None if which_n is None else self._sent(which_n)
        addresses_K = self._addresses_there[batch][g]
        alone = not self._shape.retrieves_ahead
        copy_rows_by_gpu(addresses_K, positions_n, rows_KW, to_places=to_places, alone=alone)

    def _sent(self, numbers: Tensor) -> Tensor:
        """The same numbers on the device; the host does not wait for them."""
        staging = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        return staging.copy_(numbers).to(self._device, non_blocking=True)

    def _copy(
        self,
        batch: int,
        g: int,
        which_n: Tensor | None,
        rows: Tensor,
        positions_n: Tensor | None,
        *,
        to_places: bool,
    ) -> None:
        """Copy some of the batch's rows between host memory and where they live."""
        store = self._stores[g]
        assert isinstance(store, NativeStore)
        copy_rows(
            self._places[batch][g].at(which_n),
            rows,
            positions_n=positions_n,
            to_places=to_places,
            threads=store.threads,
        )

    def _staging(self, rows: int, store: RowStore) -> Tensor:
        pinned = self._device.type == "cuda"
        return empty((rows, store.layout.width), torch.float32, _CPU, pinned=pinned)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _on_host(self, rows_nW: Tensor, g: int) -> Tensor:
        if not rows_nW.is_cuda:
            return rows_nW
        staging_nW = self._staging(len(rows_nW), self._stores[g])
        staging_nW.copy_(rows_nW, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return staging_nW


def can_locate(store: RowStore) -> bool:
    """Whether a store can say where its rows live, as plain float32 numbers."""
    return isinstance(store, NativeStore) and store.layout.dtype == "float32"


def has_triton() -> bool:
    """Whether kernels for a GPU can be compiled; torch's builds for GPUs bring it along."""
    return find_spec("triton") is not None
