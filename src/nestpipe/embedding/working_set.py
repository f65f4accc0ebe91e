"""The owner's side of routing: the rows it needs for a batch, and whom each goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding import native_routing, plain_routing
from nestpipe.embedding.routing import Asked
from nestpipe.kernels.rows import Bags, use_native

# Shapes: K unique keys of the owner, R ranks, M micro-batches, C tables


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The owner's rows of one batch, table by table."""

    keys_K: Tensor
    table_counts: list[int]
    """Rows of each table."""
    serve: list[Bags]
    """For each micro-batch, the rows to send as sums of these, other ranks first."""
    serve_counts: list[list[int]]
    """For each micro-batch, how many rows go to each requester, in rank order."""
    gather_back: list[Bags]
    """For each micro-batch, the gradients of each row, by requester in rank order."""
    shared_K: Tensor
    """Positions whose rows the batch before had too ..."""
    shared_before: Tensor
    """... and where they stood there."""

    @property
    def size(self) -> int:
        return self.keys_K.shape[0]

    def new_mask(self) -> Tensor:
        """(K,) which rows the batch before did not have."""
        mask_K = torch.ones(self.size, dtype=torch.bool, device=self.keys_K.device)
        mask_K[self.shared_K] = False
        return mask_K

    def counts_where(self, mask_K: Tensor) -> list[int]:
        """Rows of each table among those of the mask."""
        return [int(part.sum()) for part in torch.split(mask_K, self.table_counts)]


def make_working_set(asked: Asked, before: WorkingSet | None) -> WorkingSet:
    """Unite what all requesters asked for."""
    routing = native_routing if use_native(asked.keys_A.device) else plain_routing
    united = routing.unite(asked)
    nothing = united.keys_K[:0]
    shared_K, shared_before = (
        routing.match(united.keys_K, united.table_counts, before.keys_K, before.table_counts)
        if before is not None
        else (nothing, nothing)
    )
    return WorkingSet(
        keys_K=united.keys_K,
        table_counts=united.table_counts,
        serve=united.serve,
        serve_counts=asked.row_counts_RMC.sum(2).T.tolist(),
        gather_back=united.gather_back,
        shared_K=shared_K,
        shared_before=shared_before,
    )
