"""`ShardedTables`: what every op of a schedule does with rows, for one rank.

The life of a batch: `dedup`, `counts`, `keys`, `union`, `retrieve`, (`sync`), then per micro-batch
`rows`, `lookup` inside the dense op, `grads`, and at last `update` and `writeback`. Each method is
one op; the schedule decides when it runs.

Keys are routed in host memory, also for a GPU: message sizes are then known without waiting for the
device. Rows and gradients live on the device, in the buffers of the batches in flight. `retrieve`
fills the idle buffer while the active one is in use. `sync` copies the rows that both batches have,
after the active batch's update. `writeback` saves the rows that leave. How rows get from a store
into a buffer and back is the transport's business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nestpipe.comm.communicator import Mesh
from nestpipe.embedding.lifecycle import Lifecycle
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.pool import PoolRows, RowPool, SlotRows
from nestpipe.embedding.replicas import (
    Replicas,
    ReplicaUnion,
    merge_gradients,
    merge_rows,
    merge_stored,
)
from nestpipe.embedding.routing.all_to_all import (
    RowPatch,
    exchange,
    exchange_stale_mask,
    in_rank_order,
    message_sizes,
    pack_requests,
    send_patch,
    unpack_requests,
)
from nestpipe.embedding.routing.lists import KeyUnion, OwnerRequests
from nestpipe.embedding.routing.owners import WorkingSet, make_working_set, union_of
from nestpipe.embedding.routing.requests import (
    Request,
    lookup_rows,
    lookup_window,
    make_requests,
    make_window,
    requests_on,
)
from nestpipe.embedding.store.protocol import RowStore, round_weights
from nestpipe.embedding.table_groups import TableGroup, check_features
from nestpipe.embedding.transports import HeldRows, RowBuffers
from nestpipe.jagged import Jagged
from nestpipe.kernels.rows.native import Gradients, RowPointers
from nestpipe.kernels.rows.segments import (
    Rows,
    Segments,
    add_segments,
    concat,
    empty_rows,
    from_wire,
    lists_on,
    pointers_into,
    sum_segments,
    use_native,
)
from nestpipe.schedule import Exchange, Kind, Merge, Op, Retrieval, Shape

# Shapes: P rows that come for a micro-batch, K rows of a working set, D weights, W weights and
# state, R ranks, M micro-batches, C tables of a group, G groups


AnyRows = Tensor | RowPointers | SlotRows
"""The rows of a batch: in a buffer, where the host store has them, or in the slots of a pool."""
RowGradients = tuple[Tensor, list[Tensor]]
"""The gradients of rows that came: other ranks' in one piece, and this rank's own."""


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of a whole window that came, and their gradients so far."""

    rows_PD: Tensor
    gradients_PD: Tensor


@dataclass(slots=True)
class BatchState:
    """One batch, group by group.

    On a GPU one stream may still use a tensor when another has issued its last op. So all tensors
    stay here until the batch is forgotten, after the device has done its update.
    """

    requests: list[list[Request]]
    """[group][micro]"""
    asked_keys: list[Tensor] = field(default_factory=list[Tensor])
    """[group] (R, M, C) keys that each rank asks this one for ..."""
    asked_rows: list[Tensor] = field(default_factory=list[Tensor])
    """... and rows that it wants for them."""
    asked: list[OwnerRequests] = field(default_factory=list[OwnerRequests])
    unions: list[KeyUnion] = field(default_factory=list[KeyUnion])
    """[group] its keys, until the working set is made of them."""
    touched: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    """[table][replica] keys, in a batch that merges replicas."""
    working: list[WorkingSet] = field(default_factory=list[WorkingSet])
    patches: list[RowPatch] = field(default_factory=list[RowPatch])
    """[group] stale rows of the first micro-batch, which come again."""
    received: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """[micro][group] (P, D) rows."""
    gradients: dict[int, dict[int, RowGradients]] = field(
        default_factory=dict[int, dict[int, RowGradients]]
    )
    """[micro][group] the gradients of those rows, where the model used them."""
    windows: list[Window] = field(default_factory=list[Window])
    """[group] where micro-batches share rows."""
    sums: dict[int, Gradients] = field(default_factory=dict[int, Gradients])
    """[group] row gradients so far; frozen tables have none."""


class ShardedTables:
    """One rank's shard of all tables, and the batches in flight."""

    host_acts: frozenset[Kind] = frozenset()
    """Kinds of ops that leave the device alone: none of them all."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        stores: Sequence[RowStore],
        optimizer: RowOptimizer,
        mesh: Mesh,
        shape: Shape,
        device: torch.device,
        *,
        in_place: bool = False,
        pin: bool = False,
        comm_dtype: torch.dtype = torch.float32,
        pools: Sequence[RowPool] = (),
        lifecycle: Lifecycle | None = None,
    ) -> None:
        """`in_place`: use and update rows where the store has them, if that is possible.

        `pin`: where it is not, let a GPU copy them from there itself. `comm_dtype`: the type in
        which rows and their gradients travel. `pools`: one for each store, if retrieval is pooled.
        `lifecycle`: notes the keys that are trained, and says which have no row.
        """
        self.groups = list(groups)
        self.optimizers = [group.tuned(optimizer) for group in groups]
        self.mesh = mesh
        self.comm = mesh.shards
        """The ranks over which tables are sharded; keys, rows and gradients stay among them."""
        self.shape = shape
        self.device = device
        self.comm_dtype = comm_dtype
        self._lifecycle = lifecycle
        self.buffers: HeldRows = (
            PoolRows(pools)
            if shape.retrieval is Retrieval.POOLED
            else RowBuffers(list(stores), shape, device, in_place=in_place, pin=pin)
        )
        self.in_flight: dict[int, BatchState] = {}
        self.replicas = (
            Replicas(mesh.replica_keys, [len(group.tables) for group in groups], shape)
            if shape.merge_every
            else None
        )

    @property
    def table_of(self) -> dict[str, str]:
        """The table of each feature."""
        return {f.name: g.tables[f.table].name for g in self.groups for f in g.features}

    def acts(self) -> dict[Kind, Callable[[Op], None]]:
        """What ops do that are about rows alone."""
        return {
            Kind.KEYS: lambda op: self.keys(op.batch),
            Kind.UNION: lambda op: self.union(op.batch),
            Kind.REPLICA_KEYS: lambda op: self.replica_keys(op.batch),
            Kind.REPLICA_UNION: lambda op: self.replica_union(op.batch),
            Kind.STALE_MASK: lambda op: self.stale_mask(op.batch),
            Kind.PATCH: lambda op: self.patch(op.batch),
            Kind.ROWS: lambda op: self.rows(op.batch, op.micro or 0),
            Kind.GRADS: lambda op: self.grads(op.batch, op.micro or 0),
            Kind.REPLICA_SYNC: lambda op: self.replica_sync(op.batch),
        }

    def moves_nothing(self, batch: int) -> bool:
        """Whether `retrieve` of that batch is known to have nothing to do: never beforehand."""
        return False

    # Routing, in host memory

    def dedup(self, batch: int, micro_keys: Sequence[Mapping[str, Jagged]]) -> None:
        """Unique keys of every micro-batch, ordered by owner."""
        check_features(self.groups, micro_keys[0])
        rank, ranks = self.comm.rank, self.comm.size
        if self.shape.exchange is Exchange.WINDOW:
            requests = [
                make_window(micro_keys, group, rank, ranks, self.comm_dtype)
                for group in self.groups
            ]
        else:
            requests = [
                make_requests(micro_keys, group, rank, ranks, self.device, self.comm_dtype)
                for group in self.groups
            ]
        self.in_flight[batch] = BatchState([requests_on(self.device, of) for of in requests])

    def keys_asked(self, batch: int) -> int:
        """How many keys this rank asks for, itself included, in all micro-batches."""
        return sum(len(r.keys_A) for of in self.in_flight[batch].requests for r in of)

    def counts(self, batch: int, samples: int) -> int:
        """All-to-all of key counts; returns the number of samples of all ranks."""
        state = self.in_flight[batch]
        ranks, micros = self.comm.size, self.shape.micro_batches
        parts = [torch.stack([r.key_counts_RC for r in of], 1) for of in state.requests]
        parts += [torch.stack([r.row_counts_RC for r in of], 1) for of in state.requests]
        flat = [part.reshape(ranks, -1) for part in parts]
        sent = torch.cat([*flat, torch.full((ranks, 1), samples)], 1)
        received = torch.empty_like(sent)
        ones = [1] * ranks
        self.comm.all_to_all(received, sent, ones, ones)
        *asked, all_samples = torch.split(received, [*(f.shape[1] for f in flat), 1], 1)
        cubes = [part.reshape(ranks, micros, -1) for part in asked]
        state.asked_keys = cubes[: len(self.groups)]
        state.asked_rows = cubes[len(self.groups) :]
        return self._of_all_groups(int(all_samples.sum()))

    def _of_all_groups(self, samples: int) -> int:
        """The samples of all ranks, from those of this rank's group."""
        if self.mesh.groups == 1:
            return samples
        total = torch.tensor([samples if self.comm.rank == 0 else 0])
        self.mesh.world.all_reduce(total)
        return int(total)

    def keys(self, batch: int) -> None:
        """All-to-all of keys: one message per owner, see `all_to_all`."""
        state, rank = self.in_flight[batch], self.comm.rank
        window = self.shape.exchange is Exchange.WINDOW
        messages = [pack_requests(of, rank) for of in state.requests]
        expected = [
            message_sizes(keys, rows, window=window)
            for keys, rows in zip(state.asked_keys, state.asked_rows, strict=True)
        ]
        own = [message[-1] for message in messages]
        received = [
            of_self.new_empty(sum(numbers) - numbers[rank])
            for numbers, of_self in zip(expected, own, strict=True)
        ]
        exchange(
            self.comm,
            [concat(message[:-1], like=message[-1]) for message in messages],
            [in_rank_order([len(part) for part in message], rank) for message in messages],
            received,
            expected,
        )
        state.asked = [
            unpack_requests(torch.cat([theirs, mine]), keys, rows, rank, window=window)
            for theirs, mine, keys, rows in zip(
                received, own, state.asked_keys, state.asked_rows, strict=True
            )
        ]

    def union(self, batch: int) -> None:
        """Deduplicate what was asked for into the working set; compare it with the batch before.

        A batch that merges replicas does so in `replica_union`, with all that they touched.
        """
        state = self.in_flight[batch]
        state.unions = [union_of(asked) for asked in state.asked]
        if self.replicas is not None:
            self.replicas.note(batch, state.unions)
        if not self.shape.merges_replicas(batch):
            self._make_working_sets(batch, None)

    def replica_keys(self, batch: int) -> None:
        """Replicas tell each other which keys they touched since the last merge."""
        assert self.replicas is not None
        self.in_flight[batch].touched = self.replicas.exchange(batch)

    def replica_union(self, batch: int) -> None:
        """Widen the working set to all of these keys."""
        assert self.replicas is not None
        state = self.in_flight[batch]
        self._make_working_sets(batch, self.replicas.extend(state.unions, state.touched))
        state.touched = []

    def _make_working_sets(self, batch: int, replicas: Sequence[ReplicaUnion] | None) -> None:
        state = self.in_flight[batch]
        compared = self.buffers.compares
        before = self.in_flight.get(batch - 1) if compared else None
        older = self.in_flight.get(batch - 2) if self.shape.takes_over else None
        working = [
            make_working_set(
                asked,
                before.working[g] if before else None,
                self.device,
                union=state.unions[g],
                replica=replicas[g] if replicas else None,
                speculative=self.shape.speculative_rows,
                older=older.working[g] if older else None,
                compared=compared,
            )
            for g, asked in enumerate(state.asked)
        ]
        state.working = self.buffers.admit(batch, working)
        state.asked, state.unions = [], []

    def stale_mask(self, batch: int) -> None:
        """Owners tell which rows of the first micro-batch are stale when they are sent."""
        state = self.in_flight[batch]
        state.patches = exchange_stale_mask(self.comm, state, self.device)

    # Rows between host memory and the device

    def retrieve(self, batch: int) -> int:
        """Rows with state from their stores into the idle buffer; returns how many were read."""
        return self.buffers.retrieve(batch, self.in_flight[batch].working)

    def sync(self, batch: int) -> int:
        """Rows that the batch before had too, with state, from its buffer.

        Returns how many; rows carried over from an older batch count too.
        """
        return self.buffers.sync(batch, self.in_flight[batch].working)

    def writeback(self, batch: int) -> int:
        """Rows that leave the device into their stores; returns how many."""
        then = self.in_flight.get(batch + 1) if self.shape.retrieval is Retrieval.NEW else None
        staying = then.working if then is not None and then.working else None
        written = self.buffers.writeback(batch, self.in_flight[batch].working, staying)
        # With several buffers a batch's keys serve later unions, and its rows later batches.
        self.forget(batch - self.shape.buffers + 1)
        return written

    def forget(self, batch: int) -> None:
        """Drop the state of a batch."""
        self.buffers.forget(batch)
        self.in_flight.pop(batch, None)

    # The window

    def rows(self, batch: int, micro: int) -> None:
        """All-to-all of a micro-batch's rows, from owners to requesters."""
        state, rank = self.in_flight[batch], self.comm.rank
        sent_splits = [working.serve_counts[micro] for working in state.working]
        received_splits = [of[micro].rows_per_owner for of in state.requests]
        sent: list[Tensor] = []
        received: list[Tensor] = []
        from_others: list[Tensor] = []
        for g, (group, working) in enumerate(zip(self.groups, state.working, strict=True)):
            own = sent_splits[g][rank]
            sent_PD = empty_rows(sum(sent_splits[g]) - own, group.dim, self.device, self.comm_dtype)
            received_PD = self._place_of(state, g, micro)
            others = len(received_PD) - own
            weights = _weights_of(self.buffers.of(batch)[g], group.dim)
            out = [sent_PD, received_PD[others:]]
            sum_segments(working.serve[micro], weights, out, leaving=self.comm_dtype)
            sent.append(sent_PD)
            received.append(received_PD)
            from_others.append(received_PD[:others])
        exchange(self.comm, sent, sent_splits, from_others, received_splits, self.comm_dtype)
        state.received[micro] = received

    def _place_of(self, state: BatchState, g: int, micro: int) -> Tensor:
        """Where the rows of a micro-batch arrive; those of a window lie behind each other."""
        request, dim = state.requests[g][micro], self.groups[g].dim
        window, count = request.window, sum(request.rows_per_owner)
        if window is None:
            return empty_rows(count, dim, self.device)
        if g == len(state.windows):
            rows = window.window_rows
            state.windows.append(
                Window(empty_rows(rows, dim, self.device), empty_rows(rows, dim, self.device))
            )
        return state.windows[g].rows_PD[window.first_row : window.first_row + count]

    def patch(self, batch: int) -> None:
        """Send the stale rows of the first micro-batch again, refreshed by now."""
        rows = zip(self.buffers.of(batch), self.groups, strict=True)
        weights = [_weights_of(of_group, group.dim) for of_group, group in rows]
        send_patch(self.comm, self.in_flight[batch], weights, self.comm_dtype)

    def lookup(self, batch: int, micro: int) -> dict[str, Tensor]:
        """The rows of every feature, as the model sees them."""
        state = self.in_flight[batch]
        seen: dict[str, Tensor] = {}
        if state.windows:
            for window, of in zip(state.windows, state.requests, strict=True):
                if micro == 0:
                    # Not every row need get a gradient: a model may leave a feature unused.
                    window.gradients_PD.zero_()
                seen.update(lookup_window(window.rows_PD, of[micro], window.gradients_PD))
            return seen
        gradients = state.gradients[micro] = {}
        for g, of in enumerate(state.requests):
            own = state.working[g].serve_counts[micro][self.comm.rank]
            deliver = partial(_keep, gradients, g)
            seen.update(
                lookup_rows(state.received[micro][g], of[micro], deliver, own, self.comm_dtype)
            )
        return seen

    def grads(self, batch: int, micro: int) -> None:
        """All-to-all of row gradients, back to their owners; summed by requester in rank order.

        Those of frozen tables go nowhere.
        """
        state, rank, trained = self.in_flight[batch], self.comm.rank, self._trained
        gradients = [self._made(state, g, micro) for g in trained]
        received_splits = [state.working[g].back_counts[micro] for g in trained]
        received = [
            empty_rows(sum(splits) - splits[rank], self.groups[g].dim, self.device, self.comm_dtype)
            for splits, g in zip(received_splits, trained, strict=True)
        ]
        exchange(
            self.comm,
            [to_others for to_others, _ in gradients],
            [state.requests[g][micro].gradients_per_owner for g in trained],
            received,
            received_splits,
            self.comm_dtype,
        )
        for g, came, (_, own) in zip(trained, received, gradients, strict=True):
            self._add_up(state, g, state.working[g].gather_back[micro], [came, *own])
        if self.device.type == "cpu":
            # Nobody uses them any more; on a GPU another stream may.
            state.gradients.pop(micro, None)
            del state.received[micro]
            if micro == self.shape.micro_batches - 1:
                state.windows.clear()

    def _made(self, state: BatchState, g: int, micro: int) -> RowGradients:
        """The gradients that a micro-batch sends: of its rows, or of those last used by it."""
        own = state.working[g].back_counts[micro][self.comm.rank]
        window = state.requests[g][micro].window
        if window is not None:
            leaving_PD = empty_rows(len(window.leaving), self.groups[g].dim, self.device)
            sum_segments(window.leaving, [state.windows[g].gradients_PD], [leaving_PD])
        elif g in state.gradients[micro]:
            return state.gradients[micro][g]
        else:  # the model did not use them
            leaving_PD = torch.zeros_like(state.received[micro][g])
        others = len(leaving_PD) - own
        return leaving_PD[:others], [leaving_PD[others:]]

    def _add_up(
        self, state: BatchState, g: int, segments: Segments, gradients: list[Tensor]
    ) -> None:
        """Add the gradients of a micro-batch; a single one is summed by the update itself."""
        exact = self.replicas is not None and self.shape.merge is Merge.EXACT
        if use_native(self.device) and self.shape.micro_batches == 1 and not exact:
            rows = [from_wire(part, self.comm_dtype) for part in gradients]
            state.sums[g] = Gradients(rows, segments.rows_T, segments.ends_S1)
        elif g not in state.sums:
            sums_KD = empty_rows(len(segments), self.groups[g].dim, self.device)
            sum_segments(segments, gradients, [sums_KD], came=self.comm_dtype)
            state.sums[g] = Gradients([sums_KD], None, None)
        else:
            add_segments(segments, gradients, state.sums[g].rows[0], came=self.comm_dtype)

    def update(self, batch: int, times: float | Tensor, step: int) -> list[Tensor]:
        """One optimizer application per row, on its summed gradient times a number.

        The number may be a tensor on the device, of one element. Frozen tables stay as they are.
        Returns what `round_weights` found, on the device.
        """
        state, every = self.in_flight[batch], self.buffers.of(batch)
        beyond: list[Tensor] = []
        for g, group in enumerate(self.groups):
            if not group.trainable:
                continue
            working, rows = state.working[g], every[g]
            with self._without_gradients(g, working, rows, step):
                self._update_group(g, working, state.sums[g], rows, times, step)
                found = _round(group, rows)
                beyond += [] if found is None else [found]
        return beyond

    def _update_group(
        self,
        g: int,
        working: WorkingSet,
        sums: Gradients,
        rows: AnyRows,
        times: float | Tensor,
        step: int,
    ) -> None:
        merges = working.replica_rows if self.shape.merge is Merge.AVERAGED else None
        own, group = None if merges is None else merges.own, self.groups[g]
        optimizer = self.optimizers[g]
        if use_native(self.device):
            some = _some_of(rows, own)
            optimizer.update_native(some, group.dim, [sums], float(times), step)
        elif isinstance(rows, SlotRows):
            some = rows if own is None else rows.at(own)
            optimizer.update_times(some.rows_SW, sums.rows[0], times, step, slots_K=some.slots_K)
        else:
            assert isinstance(rows, Tensor)
            some = rows if own is None else rows.index_select(0, own)
            optimizer.update_times(some, sums.rows[0], times, step)
            if own is not None:
                rows.index_copy_(0, own, some)

    @contextmanager
    def _without_gradients(
        self, g: int, working: WorkingSet, rows: AnyRows, step: int
    ) -> Generator[None]:
        """Note the keys of a batch; rows of keys that have none in the store stay as they were."""
        if self._lifecycle is None:
            yield
            return
        dropped = self._lifecycle.touch(g, working.keys_K, working.table_counts, step)
        if dropped is None:
            yield
            return
        assert not isinstance(rows, RowPointers), "rows in place are in the store"
        (there,) = lists_on(self.device, [dropped])
        if isinstance(rows, SlotRows):
            some = rows.at(there)
            before = some.read()
            yield
            some.write(before)
        else:
            before = rows.index_select(0, there)
            yield
            rows.index_copy_(0, there, before)

    def replica_sync(self, batch: int) -> None:
        """Bring replicas in other groups together: gradients before `update`, or rows after it."""
        state, comm, trained = self.in_flight[batch], self.mesh.replicas, self._trained
        if not trained:
            return
        replicas = [r for g in trained if (r := state.working[g].replica_rows) is not None]
        if self.shape.merge is Merge.EXACT:
            merge_gradients(comm, [state.sums[g].rows[0] for g in trained], replicas)
            return
        of_batch = self.buffers.of(batch)
        every = [of_batch[g] for g in trained]
        groups = [self.groups[g] for g in trained]
        # How groups of ranks are counted depends on the kind of optimizer, not on its rate.
        merge_rows(comm, every, replicas, self.optimizers[0], [group.dim for group in groups])
        for group, rows in zip(groups, every, strict=True):
            _round(group, rows)

    @property
    def _trained(self) -> list[int]:
        """The groups of tables whose rows are updated."""
        return [g for g, group in enumerate(self.groups) if group.trainable]

    @property
    def merge_is_due(self) -> bool:
        """Whether the last batches of a run touched rows that replicas have not merged."""
        return self.replicas is not None and bool(self.replicas.pending)

    def merge_rest(self, stores: Sequence[RowStore]) -> None:
        """After a run: merge in host memory what its last batches touched."""
        assert self.replicas is not None
        rest = self.replicas.take_rest()
        for g in self._trained:
            merge_stored(
                *(self.mesh.replicas, stores[g], rest[g], self.optimizers[g]),
                *(self.groups[g].dim, self.device),
            )


def _weights_of(rows: AnyRows, dim: int) -> Rows:
    """The weights of rows that carry their state; those of a pool are numbered by slot."""
    if isinstance(rows, RowPointers):
        return rows
    return [(rows.rows_SW if isinstance(rows, SlotRows) else rows)[:, :dim]]


def _some_of(rows: AnyRows, positions: Tensor | None) -> Tensor | RowPointers:
    """Some rows, or all of them, as native code takes them."""
    if isinstance(rows, SlotRows):
        some = rows if positions is None else rows.at(positions)
        return pointers_into(some.rows_SW, some.slots_K)
    if positions is None:
        return rows
    return rows.at(positions) if isinstance(rows, RowPointers) else pointers_into(rows, positions)


def _round(group: TableGroup, rows: AnyRows) -> Tensor | None:
    """Round as the store would: rows that stay on the device must not be finer."""
    if group.dtype == "float32":
        return None
    if isinstance(rows, SlotRows):
        return rows.round_weights(group.dim, group.dtype)
    assert isinstance(rows, Tensor), "rows in place are float32"
    return round_weights(rows[:, : group.dim], group.dtype)


def _keep(gradients: dict[int, RowGradients], g: int, sent: Tensor, own: list[Tensor]) -> None:
    gradients[g] = sent, own
