"""`ShardedTables`: what every op of a schedule does with rows, for one rank.

The way of a batch: `dedup`, `counts`, `keys`, `union`, `retrieve`, (`sync`), then per micro-batch
`rows`, `spread` inside the dense op, `grads`, and at last `update` and `writeback`. Each method is
one op; who calls it, and when, is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.groups import TableGroup
from nestpipe.embedding.messages import exchange
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.requests import Request, make_request
from nestpipe.embedding.spread import spread_rows
from nestpipe.embedding.store import RowStore
from nestpipe.embedding.working_set import WorkingSet, make_working_set
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.schedule.schedule import Shape

# Shapes: U unique rows of a micro-batch, K rows of a working set, D weights, W weights and state,
# R ranks, M micro-batches, C tables of a group, G groups


@dataclass(slots=True)
class InFlight:
    """What is known of one batch, group by group."""

    requests: list[list[Request]] = field(default_factory=list[list[Request]])
    """[group][micro]"""
    asked_counts: list[Tensor] = field(default_factory=list[Tensor])
    """[group] (R, M, C) keys that each rank asks this one for."""
    asked: list[Tensor] = field(default_factory=list[Tensor])
    """[group] the keys, by requester, micro-batch, table."""
    working: list[WorkingSet] = field(default_factory=list[WorkingSet])
    sums: list[Tensor] = field(default_factory=list[Tensor])
    """[group] (K, D) row gradients summed so far."""
    received: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """[micro][group] (U, D) rows, leaves of the micro-batch's graph."""


class ShardedTables:
    """One rank's share of all tables, and the batches in flight."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        stores: Sequence[RowStore],
        optimizer: RowOptimizer,
        comm: Communicator,
        shape: Shape,
        device: torch.device,
    ) -> None:
        self.groups = list(groups)
        self.stores = list(stores)
        self.optimizer = optimizer
        self.comm = comm
        self.shape = shape
        self.device = device
        self.flights: dict[int, InFlight] = {}
        self.buffers: dict[int, list[Tensor]] = {}
        """[batch][group] (K, W) rows with state on the device."""

    # Routing

    def dedup(self, batch: int, micro_keys: Sequence[Mapping[str, Jagged]]) -> None:
        """Find the unique keys of every micro-batch and order them by owner."""
        self._check_features(micro_keys[0])
        requests = [
            [make_request(keys, group, self.comm.size) for keys in micro_keys]
            for group in self.groups
        ]
        self.flights[batch] = InFlight(requests=requests)

    def _check_features(self, keys: Mapping[str, Jagged]) -> None:
        known = {feature.name for group in self.groups for feature in group.features}
        if known != set(keys):
            odd = sorted(known ^ set(keys))[0]
            where = "no table has it" if odd in keys else "the model gives no keys for it"
            raise ConfigError(f"feature {odd!r} does not match: {where}; mend the table's features")

    def counts(self, batch: int, samples: int) -> int:
        """Tell every owner how many keys it will get; returns the samples of all ranks."""
        flight = self.flights[batch]
        ranks, micros = self.comm.size, self.shape.micros
        parts = [torch.stack([r.counts_RC for r in of], 1) for of in flight.requests]
        flat = [part.reshape(ranks, -1) for part in parts]
        sent = torch.cat([*flat, torch.full((ranks, 1), samples)], 1).to(self.device)
        received = torch.empty_like(sent)
        ones = [1] * ranks
        self.comm.all_to_all(received, sent, ones, ones)
        *asked, all_samples = torch.split(received.cpu(), [*(f.shape[1] for f in flat), 1], 1)
        flight.asked_counts = [part.reshape(ranks, micros, -1) for part in asked]
        return int(all_samples.sum())

    def keys(self, batch: int) -> None:
        """Send every owner the keys, by micro-batch and table."""
        flight = self.flights[batch]
        sent = [_by_owner(of, self.comm.size) for of in flight.requests]
        sent_splits = [
            [sum(r.per_owner[rank] for r in of) for rank in range(self.comm.size)]
            for of in flight.requests
        ]
        received_splits = [counts.sum((1, 2)).tolist() for counts in flight.asked_counts]
        flight.asked = exchange(self.comm, sent, sent_splits, received_splits)

    def union(self, batch: int) -> None:
        """Unite what was asked for into the working set; compare it with the one before."""
        flight = self.flights[batch]
        before = self.flights.get(batch - 1) if self.shape.buffers > 1 else None
        flight.working = [
            make_working_set(asked, counts, before.working[g] if before else None)
            for g, (asked, counts) in enumerate(zip(flight.asked, flight.asked_counts, strict=True))
        ]
        flight.asked = []

    # Rows between host memory and the device

    def retrieve(self, batch: int) -> int:
        """Rows with state from host memory into the idle buffer; returns how many were read."""
        read = 0
        buffers: list[Tensor] = []
        for store, working in zip(self.stores, self.flights[batch].working, strict=True):
            width = store.layout.width
            buffer_KW = torch.empty(working.size, width, device=self.device)
            if self.shape.retrieval == "new" and len(working.shared_K):
                mask_K = working.new_mask()
                keys, counts = working.keys_K[mask_K].cpu(), working.counts_where(mask_K)
                rows = torch.empty(len(keys), width)
                store.gather(keys, counts, rows)
                buffer_KW[mask_K] = rows.to(self.device)
            elif buffer_KW.is_cuda:
                keys, rows = working.keys_K.cpu(), torch.empty(working.size, width)
                store.gather(keys, working.table_counts, rows)
                buffer_KW.copy_(rows)
            else:
                keys = working.keys_K
                store.gather(keys, working.table_counts, buffer_KW)
            read += len(keys)
            buffers.append(buffer_KW)
        self.buffers[batch] = buffers
        return read

    def sync(self, batch: int) -> int:
        """Rows that the batch before had too, with state, from its buffer; returns how many."""
        refreshed = 0
        if batch - 1 not in self.buffers:
            return 0
        before = self.buffers[batch - 1]
        for g, working in enumerate(self.flights[batch].working):
            self.buffers[batch][g][working.shared_K] = before[g][working.shared_before]
            refreshed += len(working.shared_K)
        return refreshed

    def writeback(self, batch: int) -> int:
        """Rows that leave the device into host memory; returns how many."""
        written = 0
        stays = self.flights.get(batch + 1) if self.shape.retrieval == "new" else None
        flight, buffers = self.flights[batch], self.buffers[batch]
        for g, (store, working) in enumerate(zip(self.stores, flight.working, strict=True)):
            keys_K, counts, rows_KW = working.keys_K, working.table_counts, buffers[g]
            if stays is not None and stays.working:
                mask_K = torch.ones(working.size, dtype=torch.bool, device=self.device)
                mask_K[stays.working[g].shared_before] = False
                keys_K, rows_KW = keys_K[mask_K], rows_KW[mask_K]
                counts = working.counts_where(mask_K)
            store.scatter(keys_K.cpu(), counts, rows_KW.cpu().contiguous())
            written += len(keys_K)
        # With two buffers a batch's keys serve the next union, and its rows the next refresh.
        self.forget(batch - 1 if self.shape.buffers > 1 else batch)
        return written

    def forget(self, batch: int) -> None:
        """Drop all that is known of a batch."""
        self.buffers.pop(batch, None)
        self.flights.pop(batch, None)

    # The window

    def rows(self, batch: int, micro: int) -> None:
        """Owners send a micro-batch's rows to those who asked."""
        flight = self.flights[batch]
        sent: list[Tensor] = []
        for group, working, buffer_KW in zip(
            self.groups, flight.working, self.buffers[batch], strict=True
        ):
            weights_KD = buffer_KW[:, : group.dim]
            sent.append(weights_KD.index_select(0, working.serve[micro]))
        sent_splits = [working.serve_counts[micro] for working in flight.working]
        received_splits = [of[micro].per_owner for of in flight.requests]
        received = exchange(self.comm, sent, sent_splits, received_splits)
        flight.received[micro] = [rows.requires_grad_() for rows in received]

    def spread(self, batch: int, micro: int) -> dict[str, Tensor]:
        """The rows of every feature, as the model sees them."""
        flight = self.flights[batch]
        seen: dict[str, Tensor] = {}
        for g, of in enumerate(flight.requests):
            seen.update(spread_rows(flight.received[micro][g], of[micro]))
        return seen

    def grads(self, batch: int, micro: int) -> None:
        """Row gradients back to their owners, added up by requester in rank order."""
        flight = self.flights[batch]
        sent = [
            rows.grad if rows.grad is not None else torch.zeros_like(rows)
            for rows in flight.received.pop(micro)
        ]
        sent_splits = [of[micro].per_owner for of in flight.requests]
        received_splits = [working.serve_counts[micro] for working in flight.working]
        received = exchange(self.comm, sent, sent_splits, received_splits)
        parts = [
            working.gather_back[micro].sum(rows)
            for working, rows in zip(flight.working, received, strict=True)
        ]
        for sums_KD, part_KD in zip(flight.sums, parts, strict=False):
            sums_KD.add_(part_KD)
        flight.sums = flight.sums or parts

    def update(self, batch: int, weight: float, step: int) -> None:
        """One optimizer application per row, on the gradient divided by the batch's weight."""
        flight = self.flights[batch]
        for group, sums_KD, buffer_KW in zip(
            self.groups, flight.sums, self.buffers[batch], strict=True
        ):
            self.optimizer.update(buffer_KW, sums_KD.div_(weight), step)
            if group.tables[0].dtype == "bfloat16":
                # As the host store would: else rows that stay on the device would be finer.
                weights_KD = buffer_KW[:, : group.dim]
                weights_KD.copy_(weights_KD.bfloat16())
        flight.sums = []


def _by_owner(requests: Sequence[Request], ranks: int) -> Tensor:
    """The keys of all micro-batches, by owner first and micro-batch second."""
    if len(requests) == 1:
        return requests[0].keys_U
    parts = [torch.split(request.keys_U, request.per_owner) for request in requests]
    return torch.cat([of_micro[rank] for rank in range(ranks) for of_micro in parts])
