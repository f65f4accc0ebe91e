"""The owner's side of routing: the working set of a batch, and which rank gets which row."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.embedding.routing import native as native_routing
from nestpipe.embedding.routing import reference as plain_routing
from nestpipe.embedding.routing.all_to_all import stale_only, stale_rows
from nestpipe.embedding.routing.lists import KeyUnion, KnownKeys, Neighbours, OwnerRequests
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.segments import Segments, lists_on, segments_on

if TYPE_CHECKING:
    from nestpipe.embedding.replicas import ReplicaUnion

# Shapes: K unique keys of the owner, n some of them, R ranks, M micro-batches, C tables


@dataclass(frozen=True, slots=True)
class ReplicaRows:
    """Which rows of a working set are the batch's own, and which are merged; on the device."""

    own: Tensor
    merged: Tensor
    groups: Tensor
    """How many groups touched each row that is merged ..."""
    of_groups: list[Tensor]
    """... and which of those rows each group touched."""


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """Rows carried over from the batch before the last, which the last one has not."""

    positions_K: Tensor
    """Their positions now ..."""
    older: Tensor
    """... and where they stood there; both on the host ..."""
    positions_there: Tensor
    older_there: Tensor
    """... and both again on the device."""


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Some rows of a working set, or all of them."""

    positions_n: Tensor | None
    """Which, in ascending order; None: all."""
    table_counts: list[int]
    """How many of each table."""

    def __len__(self) -> int:
        return sum(self.table_counts)

    def of(self, numbers_K: Tensor) -> Tensor:
        """(n,) the numbers of the selected rows, from those of all."""
        return numbers_K if self.positions_n is None else numbers_K[self.positions_n]


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The owner's rows of one batch, table by table; keys and counts are on the host."""

    known: KnownKeys
    """The keys of the rows; with an index where later batches look for theirs among them."""
    serve: list[Segments]
    """For each micro-batch, the rows to send as sums of these, other ranks first."""
    serve_counts: list[list[int]]
    """For each micro-batch, how many rows go to each requester, in rank order."""
    gather_back: list[Segments]
    """For each micro-batch, the gradients of each row, by requester in rank order."""
    back_counts: list[list[int]]
    """For each micro-batch, how many gradients come from each requester, in rank order."""
    shared_K: Tensor
    """Positions whose rows the batch before had too ..."""
    shared_before: Tensor
    """... and where they stood there; both on the host ..."""
    shared_there: Tensor
    shared_before_there: Tensor
    """... and both again on the device."""
    carried_over: CarriedOver | None = None
    """Rows that come from the batch before the last, where three buffers allow that."""
    replica_rows: ReplicaRows | None = None
    """Where the batch merges replicas."""
    stale_P: Tensor | None = None
    """With speculative rows: which of the first micro-batch are stale when they are sent ..."""
    stale: Segments | None = None
    """... and those alone, to be sent again; both on the host."""

    @property
    def keys_K(self) -> Tensor:  # noqa: N802 - its shape
        return self.known.keys_K

    @property
    def table_counts(self) -> list[int]:
        """Rows of each table."""
        return self.known.table_counts

    @property
    def size(self) -> int:
        return self.keys_K.shape[0]

    @property
    def all_rows(self) -> RowSelection:
        return RowSelection(None, self.table_counts)

    def without(self, positions: Tensor) -> RowSelection:
        """All other rows."""
        return RowSelection(*_routing().others(positions, self.table_counts))


def union_of(asked: OwnerRequests) -> KeyUnion:
    """The unique keys that all requesters of this rank's group asked for."""
    return _routing().union_of(asked)


def make_working_set(
    asked: OwnerRequests,
    before: WorkingSet | None,
    device: torch.device,
    *,
    union: KeyUnion | None = None,
    replica: ReplicaUnion | None = None,
    speculative: bool = False,
    older: WorkingSet | None = None,
    compared: bool = False,
) -> WorkingSet:
    """What an owner works on: all that it was asked for, and what its replicas merge.

    `replica`: the union over groups, in batches that merge replicas. `speculative`: rows of the
    first micro-batch are sent before their refresh, so find the stale ones. `older`: the working
    set of the batch before the last, where rows are carried over from it. `compared`: later
    batches will be compared with this one.
    """
    union = replica.union if replica is not None else union or union_of(asked)
    found = _neighbours(union, before, older)
    shared_K, shared_before = found.shared_K, found.shared_before
    moved = segments_on(device, [*union.serve, *union.gather_back])
    shared_there, shared_before_there = lists_on(device, [shared_K, shared_before])
    micros = len(union.serve)
    stale_P = stale_rows(union.serve[0], shared_K, len(union.keys_K)) if speculative else None
    serve_counts = asked.row_counts_RMC.sum(2).T.tolist()
    return WorkingSet(
        known=_known(union, compared=compared),
        serve=moved[:micros],
        serve_counts=serve_counts,
        gather_back=moved[micros:],
        back_counts=serve_counts if asked.lasts_Q is None else asked.gradient_counts(),
        shared_K=shared_K,
        shared_before=shared_before,
        shared_there=shared_there,
        shared_before_there=shared_before_there,
        carried_over=None if older is None else _carried_over(found, device),
        replica_rows=None if replica is None else _on(device, replica),
        stale_P=stale_P,
        stale=None if stale_P is None else stale_only(union.serve[0], stale_P),
    )


def _neighbours(union: KeyUnion, before: WorkingSet | None, older: WorkingSet | None) -> Neighbours:
    nothing = union.keys_K[:0]
    if before is None:
        return Neighbours(nothing, nothing, nothing, nothing)
    known = None if older is None else older.known
    return _routing().neighbours(union.keys_K, union.table_counts, before.known, known)


def _known(union: KeyUnion, *, compared: bool) -> KnownKeys:
    keys_K, counts = union.keys_K, union.table_counts
    return KnownKeys(
        keys_K, counts, _routing().index_of(keys_K, counts) if compared else keys_K[:0]
    )


def _carried_over(found: Neighbours, device: torch.device) -> CarriedOver:
    carried = [found.carried_K, found.carried_older]
    return CarriedOver(*carried, *lists_on(device, carried))


def _on(device: torch.device, replica: ReplicaUnion) -> ReplicaRows:
    return ReplicaRows(
        own=replica.own_K.to(device),
        merged=replica.merged_U.to(device),
        groups=replica.groups_U.to(device),
        of_groups=[part.to(device) for part in replica.of_groups],
    )


def _routing() -> ModuleType:
    return native_routing if native_wanted() else plain_routing
