"""`ShardedTables`: what every op of a schedule does with rows, for one rank.

The way of a batch: `dedup`, `counts`, `keys`, `union`, `retrieve`, (`sync`), then per micro-batch
`rows`, `spread` inside the dense op, `grads`, and at last `update` and `writeback`. Each method is
one op; who calls it, and when, is the schedule's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.groups import TableGroup
from nestpipe.embedding.letters import (
    expected_numbers,
    in_rank_order,
    joined,
    letters_to_owners,
    open_letters,
)
from nestpipe.embedding.messages import exchange
from nestpipe.embedding.native_store import NativeStore
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.requests import Request, make_request
from nestpipe.embedding.routing import Asked
from nestpipe.embedding.spread import spread_rows
from nestpipe.embedding.store import RowStore
from nestpipe.embedding.working_set import WorkingSet, make_working_set
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.kernels.native_rows import Gradients, Places
from nestpipe.kernels.rows import Bags, Rows, add_bags, empty_rows, sum_bags, use_native
from nestpipe.schedule.schedule import Shape

# Shapes: P rows that come for a micro-batch, K rows of a working set, D weights, W weights and
# state, R ranks, M micro-batches, C tables of a group, G groups


@dataclass(slots=True)
class InFlight:
    """What is known of one batch, group by group."""

    requests: list[list[Request]] = field(default_factory=list[list[Request]])
    """[group][micro]"""
    asked_keys: list[Tensor] = field(default_factory=list[Tensor])
    """[group] (R, M, C) keys that each rank asks this one for ..."""
    asked_rows: list[Tensor] = field(default_factory=list[Tensor])
    """... and rows that it wants for them."""
    asked: list[Asked] = field(default_factory=list[Asked])
    working: list[WorkingSet] = field(default_factory=list[WorkingSet])
    received: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """[micro][group] (P, D) rows."""
    gradients: dict[int, dict[int, tuple[Tensor, list[Tensor]]]] = field(default_factory=dict)
    """[micro][group] the gradients of those rows: other ranks' and this one's, where the model used
    them."""
    sums: list[Gradients] = field(default_factory=list[Gradients])
    """[group] row gradients so far."""


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
        *,
        in_place: bool = False,
    ) -> None:
        """`in_place`: use and update rows where the store has them, if `can_work_in_place`."""
        self.groups = list(groups)
        self.stores = list(stores)
        self.optimizer = optimizer
        self.comm = comm
        self.shape = shape
        self.device = device
        self.in_place = in_place and can_work_in_place(shape, device, stores)
        self.flights: dict[int, InFlight] = {}
        self.buffers: dict[int, list[Tensor | Places]] = {}
        """[batch][group] (K, W) rows with state on the device, or where they live."""

    # Routing

    def dedup(self, batch: int, micro_keys: Sequence[Mapping[str, Jagged]]) -> None:
        """Find the unique keys of every micro-batch and order them by owner."""
        self._check_features(micro_keys[0])
        requests = [
            [make_request(keys, group, self.comm.rank, self.comm.size) for keys in micro_keys]
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
        parts = [torch.stack([r.key_counts_RC for r in of], 1) for of in flight.requests]
        parts += [torch.stack([r.row_counts_RC for r in of], 1) for of in flight.requests]
        flat = [part.reshape(ranks, -1) for part in parts]
        sent = torch.cat([*flat, torch.full((ranks, 1), samples)], 1).to(self.device)
        received = torch.empty_like(sent)
        ones = [1] * ranks
        self.comm.all_to_all(received, sent, ones, ones)
        *asked, all_samples = torch.split(received.cpu(), [*(f.shape[1] for f in flat), 1], 1)
        cubes = [part.reshape(ranks, micros, -1) for part in asked]
        flight.asked_keys = cubes[: len(self.groups)]
        flight.asked_rows = cubes[len(self.groups) :]
        return int(all_samples.sum())

    def keys(self, batch: int) -> None:
        """Send every owner its keys, by micro-batch and table, then the lengths of sums."""
        flight = self.flights[batch]
        letters = [letters_to_owners(of, self.comm.rank) for of in flight.requests]
        expected = [
            expected_numbers(keys, rows)
            for keys, rows in zip(flight.asked_keys, flight.asked_rows, strict=True)
        ]
        own = [letter[-1] for letter in letters]
        sent = [
            joined(letter[:-1], like=of_self) for letter, of_self in zip(letters, own, strict=True)
        ]
        received = [
            of_self.new_empty(sum(numbers) - numbers[self.comm.rank])
            for numbers, of_self in zip(expected, own, strict=True)
        ]
        exchange(
            self.comm,
            sent,
            [in_rank_order([len(part) for part in letter], self.comm.rank) for letter in letters],
            received,
            expected,
        )
        flight.asked = [
            open_letters(torch.cat([theirs, mine]), keys, rows, self.comm.rank)
            for theirs, mine, keys, rows in zip(
                received, own, flight.asked_keys, flight.asked_rows, strict=True
            )
        ]

    def union(self, batch: int) -> None:
        """Unite what was asked for into the working set; compare it with the one before."""
        flight = self.flights[batch]
        before = self.flights.get(batch - 1) if self.shape.buffers > 1 else None
        flight.working = [
            make_working_set(asked, before.working[g] if before else None)
            for g, asked in enumerate(flight.asked)
        ]
        flight.asked = []

    # Rows between host memory and the device

    def retrieve(self, batch: int) -> int:
        """Rows with state from host memory into the idle buffer; returns how many were read."""
        read = 0
        buffers: list[Tensor | Places] = []
        for store, working in zip(self.stores, self.flights[batch].working, strict=True):
            width = store.layout.width
            if self.in_place:
                assert isinstance(store, NativeStore)
                buffers.append(store.locate(working.keys_K, working.table_counts))
                read += working.size
                continue
            buffer_KW = empty_rows(working.size, width, self.device)
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
        for working, now_KW, before_KW in zip(
            self.flights[batch].working,
            self.buffers[batch],
            self.buffers[batch - 1],
            strict=True,
        ):
            assert isinstance(now_KW, Tensor)
            assert isinstance(before_KW, Tensor)
            now_KW[working.shared_K] = before_KW[working.shared_before]
            refreshed += len(working.shared_K)
        return refreshed

    def writeback(self, batch: int) -> int:
        """Rows that leave the device into host memory; returns how many."""
        written = 0
        stays = self.flights.get(batch + 1) if self.shape.retrieval == "new" else None
        flight, buffers = self.flights[batch], self.buffers[batch]
        for g, (store, working) in enumerate(zip(self.stores, flight.working, strict=True)):
            keys_K, counts, rows_KW = working.keys_K, working.table_counts, buffers[g]
            written += working.size
            if isinstance(rows_KW, Places):
                continue
            if stays is not None and stays.working:
                mask_K = torch.ones(working.size, dtype=torch.bool, device=self.device)
                mask_K[stays.working[g].shared_before] = False
                keys_K, rows_KW = keys_K[mask_K], rows_KW[mask_K]
                counts = working.counts_where(mask_K)
                written += len(keys_K) - working.size
            store.scatter(keys_K.cpu(), counts, rows_KW.cpu().contiguous())
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
        flight, rank = self.flights[batch], self.comm.rank
        sent: list[Tensor] = []
        received: list[Tensor] = []
        sent_splits = [working.serve_counts[micro] for working in flight.working]
        received_splits = [of[micro].rows_per_owner for of in flight.requests]
        for g, (group, working) in enumerate(zip(self.groups, flight.working, strict=True)):
            own = sent_splits[g][rank]
            sent_PD = empty_rows(sum(sent_splits[g]) - own, group.dim, self.device)
            received_PD = empty_rows(sum(received_splits[g]), group.dim, self.device)
            others = len(received_PD) - own
            sum_bags(
                working.serve[micro],
                weights_of(self.buffers[batch][g], group.dim),
                [sent_PD, received_PD[others:]],
            )
            sent.append(sent_PD)
            received.append(received_PD)
        others = [
            _of_others(rows, splits, rank)
            for rows, splits in zip(received, received_splits, strict=True)
        ]
        exchange(self.comm, sent, sent_splits, others, received_splits)
        flight.received[micro] = received

    def spread(self, batch: int, micro: int) -> dict[str, Tensor]:
        """The rows of every feature, as the model sees them."""
        flight = self.flights[batch]
        gradients = flight.gradients[micro] = {}
        seen: dict[str, Tensor] = {}
        for g, of in enumerate(flight.requests):
            own = flight.working[g].serve_counts[micro][self.comm.rank]
            deliver = partial(_keep, gradients, g)
            seen.update(spread_rows(flight.received[micro][g], of[micro], deliver, own))
        return seen

    def grads(self, batch: int, micro: int) -> None:
        """Row gradients back to their owners, added up by requester in rank order."""
        flight, rank = self.flights[batch], self.comm.rank
        made, rows = flight.gradients.pop(micro), flight.received.pop(micro)
        gradients = [
            made[g] if g in made else _none(of, flight.working[g].serve_counts[micro][rank])
            for g, of in enumerate(rows)
        ]
        sent = [to_others for to_others, _ in gradients]
        sent_splits = [of[micro].rows_per_owner for of in flight.requests]
        received_splits = [working.serve_counts[micro] for working in flight.working]
        received = [
            empty_rows(sum(splits) - splits[rank], group.dim, self.device)
            for splits, group in zip(received_splits, self.groups, strict=True)
        ]
        exchange(self.comm, sent, sent_splits, received, received_splits)
        for g, working in enumerate(flight.working):
            _, own = gradients[g]
            self._add_up(flight, g, working.gather_back[micro], [received[g], *own])

    def _add_up(self, flight: InFlight, g: int, bags: Bags, gradients: list[Tensor]) -> None:
        """Add the gradients of a micro-batch; a single one is summed by the update itself."""
        native = use_native(self.device)
        if native and self.shape.micros == 1:
            flight.sums.append(Gradients(gradients, bags.rows_T, bags.ends_S1))
        elif g == len(flight.sums):
            sums_KD = empty_rows(len(bags), self.groups[g].dim, self.device)
            sum_bags(bags, gradients, [sums_KD])
            flight.sums.append(Gradients([sums_KD], None, None))
        else:
            add_bags(bags, gradients, flight.sums[g].rows[0])

    def update(self, batch: int, weight: float, step: int) -> None:
        """One optimizer application per row, on the gradient divided by the batch's weight."""
        flight = self.flights[batch]
        for group, sums, rows in zip(self.groups, flight.sums, self.buffers[batch], strict=True):
            if use_native(self.device):
                self.optimizer.update_native(rows, group.dim, [sums], 1 / weight, step)
            else:
                assert isinstance(rows, Tensor)
                self.optimizer.update(rows, sums.rows[0].mul_(1 / weight), step)
            if group.tables[0].dtype == "bfloat16":
                # As the host store would: else rows that stay on the device would be finer.
                assert isinstance(rows, Tensor)
                weights_KD = rows[:, : group.dim]
                weights_KD.copy_(weights_KD.bfloat16())
        flight.sums = []


def can_work_in_place(shape: Shape, device: torch.device, stores: Sequence[RowStore]) -> bool:
    """Whether rows can be used where the store has them: one batch at a time, same memory."""
    return (
        shape.buffers == 1
        and use_native(device)
        and all(isinstance(s, NativeStore) and s.layout.dtype == "float32" for s in stores)
    )


def weights_of(rows: Tensor | Places, dim: int) -> Rows:
    """The weights of rows that carry their state."""
    return rows if isinstance(rows, Places) else [rows[:, :dim]]


def _of_others(rows_PD: Tensor, splits: Sequence[int], rank: int) -> Tensor:
    """What other ranks have of some rows; this rank's own come last."""
    return rows_PD[: len(rows_PD) - splits[rank]]


def _keep(
    gradients: dict[int, tuple[Tensor, list[Tensor]]], g: int, sent: Tensor, own: list[Tensor]
) -> None:
    gradients[g] = sent, own


def _none(rows_PD: Tensor, own: int) -> tuple[Tensor, list[Tensor]]:
    """The gradients of rows that the model did not use."""
    zeros_PD = torch.zeros_like(rows_PD)
    return zeros_PD[: len(rows_PD) - own], [zeros_PD[len(rows_PD) - own :]]
