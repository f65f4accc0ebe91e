"""The owner's side of routing: the rows it needs for a batch, and whom each goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.requests import unique_by_table
from nestpipe.kernels.rows import Bags, bags_of_targets

# Shapes: A keys asked for by anyone, K unique keys of the owner, R ranks, M micro-batches, C tables


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The owner's rows of one batch, in the order of (table, key)."""

    keys_K: Tensor
    table_counts: list[int]
    """Rows of each table."""
    serve: list[Tensor]
    """For each micro-batch, the position of every row to send, by requester."""
    serve_counts: list[list[int]]
    """For each micro-batch, how many rows go to each requester."""
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


def make_working_set(asked_A: Tensor, counts_RMC: Tensor, before: WorkingSet | None) -> WorkingSet:
    """Unite what all requesters asked for; `asked_A` comes by requester, micro-batch, table."""
    ranks, micros, tables = counts_RMC.shape
    pieces = torch.split(asked_A, counts_RMC.reshape(-1).tolist())
    keys, inverse = unique_by_table([torch.cat(pieces[table::tables]) for table in range(tables)])
    # Now the positions come by table, requester, micro-batch; bring each to its micro-batch.
    by_table = counts_RMC.permute(2, 0, 1).reshape(-1).tolist()
    places = torch.split(inverse, by_table)
    serve = [
        torch.cat(
            [
                places[(table * ranks + rank) * micros + micro]
                for rank in range(ranks)
                for table in range(tables)
            ]
        )
        for micro in range(micros)
    ]
    per_micro = counts_RMC.sum(2)
    keys_K, table_counts = torch.cat(keys), [len(k) for k in keys]
    shared_K, shared_before = _shared(keys, before)
    return WorkingSet(
        keys_K=keys_K,
        table_counts=table_counts,
        serve=serve,
        serve_counts=[per_micro[:, micro].tolist() for micro in range(micros)],
        gather_back=[bags_of_targets(positions, len(keys_K)) for positions in serve],
        shared_K=shared_K,
        shared_before=shared_before,
    )


def _shared(keys: list[Tensor], before: WorkingSet | None) -> tuple[Tensor, Tensor]:
    """Positions here and before of the rows that both batches have."""
    if before is None:
        nothing = torch.empty(0, dtype=torch.int64, device=keys[0].device)
        return nothing, nothing
    here: list[Tensor] = []
    there: list[Tensor] = []
    start = start_before = 0
    for now, old in zip(keys, torch.split(before.keys_K, before.table_counts), strict=True):
        if len(old):
            place = torch.searchsorted(old, now).clamp_(max=len(old) - 1)
            same = (old[place] == now).nonzero().squeeze(1)
            here.append(same + start)
            there.append(place[same] + start_before)
        start += len(now)
        start_before += len(old)
    nothing = torch.empty(0, dtype=torch.int64, device=keys[0].device)
    return torch.cat([nothing, *here]), torch.cat([nothing, *there])
