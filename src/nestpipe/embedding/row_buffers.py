"""Rows between host memory and the device: read, refreshed and written back.

`retrieve` fills the idle buffer while the active one is in use; `sync` copies the rows that both
batches have, after the active batch's update; `writeback` saves the rows that leave.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.embedding.native_store import NativeStore
from nestpipe.embedding.store import RowStore
from nestpipe.embedding.working_set import WorkingSet
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.native_rows import Places
from nestpipe.kernels.rows import empty_rows, use_native
from nestpipe.schedule.schedule import Retrieval, Shape

# Shapes: K rows of a working set, n some of them, W weights and state

_CPU = torch.device("cpu")


class RowBuffers:
    """The rows, with their state, of the batches in flight."""

    def __init__(
        self, stores: Sequence[RowStore], shape: Shape, device: torch.device, *, in_place: bool
    ) -> None:
        self._stores = stores
        self._shape = shape
        self._device = device
        self.in_place = in_place and can_work_in_place(shape, device, stores)
        self._rows: dict[int, list[Tensor | Places]] = {}
        """[batch][group] (K, W) rows on the device, or where they live."""

    def of(self, batch: int) -> list[Tensor | Places]:
        return self._rows[batch]

    def retrieve(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Rows from host memory into the idle buffer; returns how many were read."""
        read = 0
        rows: list[Tensor | Places] = []
        for store, of_store in zip(self._stores, working, strict=True):
            if self.in_place:
                assert isinstance(store, NativeStore)
                rows.append(store.locate(of_store.keys_K, of_store.table_counts))
                read += of_store.size
            else:
                rows_KW, count = self._read(store, of_store)
                rows.append(rows_KW)
                read += count
        self._rows[batch] = rows
        return read

    def _read(self, store: RowStore, working: WorkingSet) -> tuple[Tensor, int]:
        rows_KW = empty_rows(working.size, store.layout.width, self._device)
        if self._shape.retrieval is Retrieval.NEW and len(working.shared_K):
            new_n, counts = working.without(working.shared_K)
            rows_nW = self._staging(len(new_n), store)
            store.gather(working.keys_K[new_n], counts, rows_nW)
            rows_KW.index_copy_(0, self._on_device(new_n), self._on_device(rows_nW))
            return rows_KW, len(new_n)
        staging_KW = self._staging(working.size, store) if rows_KW.is_cuda else rows_KW
        store.gather(working.keys_K, working.table_counts, staging_KW)
        if rows_KW.is_cuda:
            rows_KW.copy_(staging_KW, non_blocking=True)
        return rows_KW, working.size

    def sync(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Rows that the batch before had too, from its buffer; returns how many."""
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
        return refreshed

    def writeback(
        self, batch: int, working: Sequence[WorkingSet], then: Sequence[WorkingSet] | None
    ) -> int:
        """Rows that leave the device into host memory; returns how many.

        `then` is the working set of the next batch, where what it shares stays.
        """
        written = 0
        for g, (store, of_store) in enumerate(zip(self._stores, working, strict=True)):
            rows_KW = self._rows[batch][g]
            if isinstance(rows_KW, Places):
                written += of_store.size
                continue
            keys_n, counts, rows_nW = of_store.keys_K, of_store.table_counts, rows_KW
            if then is not None:
                leaving_n, counts = of_store.without(then[g].shared_before)
                keys_n = of_store.keys_K[leaving_n]
                rows_nW = rows_KW.index_select(0, self._on_device(leaving_n))
            store.scatter(keys_n, counts, self._on_host(rows_nW, store))
            written += len(keys_n)
        return written

    def forget(self, batch: int) -> None:
        """Drop the rows of a batch."""
        self._rows.pop(batch, None)

    def _staging(self, rows: int, store: RowStore) -> Tensor:
        pinned = self._device.type == "cuda"
        return empty((rows, store.layout.width), torch.float32, _CPU, pinned=pinned)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _on_host(self, rows_nW: Tensor, store: RowStore) -> Tensor:
        if not rows_nW.is_cuda:
            return rows_nW
        staging_nW = self._staging(len(rows_nW), store)
        staging_nW.copy_(rows_nW, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return staging_nW


def can_work_in_place(shape: Shape, device: torch.device, stores: Sequence[RowStore]) -> bool:
    """Whether rows can be used where the store has them: one batch at a time, same memory."""
    return (
        shape.buffers == 1
        and use_native(device)
        and all(isinstance(s, NativeStore) and s.layout.dtype == "float32" for s in stores)
    )
