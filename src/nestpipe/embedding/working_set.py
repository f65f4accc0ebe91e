"""The owner's side of routing: the rows it needs for a batch, and whom each goes to."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from nestpipe.embedding import native_routing, plain_routing
from nestpipe.embedding.again import marked, marks_of
from nestpipe.embedding.replicas import Wide
from nestpipe.embedding.routing import Asked, United
from nestpipe.kernels.native import native_wanted
from nestpipe.kernels.rows import Bags, bags_on, lists_on

# Shapes: K unique keys of the owner, n some of them, R ranks, M micro-batches, C tables


@dataclass(frozen=True, slots=True)
class WideThere:
    """What of a working set is the batch's own, and what replicas merge; all on the device."""

    own: Tensor
    merged: Tensor
    groups: Tensor
    """How many groups touched each row that is merged ..."""
    of_groups: list[Tensor]
    """... and which of those rows each group touched."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Rows that the batch before the last has too, and the last one has not."""

    positions_K: Tensor
    """Their positions now ..."""
    older: Tensor
    """... and where they stood there; both on the host ..."""
    positions_there: Tensor
    older_there: Tensor
    """... and both again on the device."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The owner's rows of one batch, table by table; keys and counts are on the host."""

    keys_K: Tensor
    table_counts: list[int]
    """Rows of each table."""
    serve: list[Bags]
    """For each micro-batch, the rows to send as sums of these, other ranks first."""
    serve_counts: list[list[int]]
    """For each micro-batch, how many rows go to each requester, in rank order."""
    gather_back: list[Bags]
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
    taken: Taken | None = None
    """Where rows are taken over from the batch before the last."""
    wide: WideThere | None = None
    """Where the batch merges replicas."""
    marks_P: Tensor | None = None
    """Where rows are sent early: which of the first micro-batch must be sent again ..."""
    marked: Bags | None = None
    """... and those alone; both on the host."""

    @property
    def size(self) -> int:
        return self.keys_K.shape[0]

    def without(self, positions: Tensor) -> tuple[Tensor, list[int]]:
        """(n,) all other positions, and how many of each table."""
        return _routing().others(positions, self.table_counts)


def take_over(united: United, shared_K: Tensor, older: WorkingSet, device: torch.device) -> Taken:
    """What a batch takes over from the one before the last, where that has working set `older`."""
    routing = _routing()
    new_n, counts = routing.others(shared_K, united.table_counts)
    here_m, there_m = routing.match(united.keys_K[new_n], counts, older.keys_K, older.table_counts)
    taken_K = new_n[here_m]
    return Taken(taken_K, there_m, *lists_on(device, [taken_K, there_m]))


def unite(asked: Asked) -> United:
    """What all requesters of this rank's group asked for."""
    return _routing().unite(asked)


def make_working_set(
    asked: Asked,
    before: WorkingSet | None,
    device: torch.device,
    *,
    united: United | None = None,
    wide: Wide | None = None,
    early: bool = False,
    older: WorkingSet | None = None,
) -> WorkingSet:
    """What an owner works on: all that it was asked for, and more where it is `wide`.

    `early`: mark the rows of the first micro-batch that are of no use before their refresh.
    `older`: the working set of the batch before the last, where rows are taken over from it.
    """
    routing = _routing()
    united = wide.united if wide is not None else united or unite(asked)
    nothing = united.keys_K[:0]
    shared_K, shared_before = (
        routing.match(united.keys_K, united.table_counts, before.keys_K, before.table_counts)
        if before is not None
        else (nothing, nothing)
    )
    moved = bags_on(device, [*united.serve, *united.gather_back])
    shared_there, shared_before_there = lists_on(device, [shared_K, shared_before])
    micros = len(united.serve)
    marks_P = marks_of(united.serve[0], shared_K, len(united.keys_K)) if early else None
    serve_counts = asked.row_counts_RMC.sum(2).T.tolist()
    return WorkingSet(
        keys_K=united.keys_K,
        table_counts=united.table_counts,
        serve=moved[:micros],
        serve_counts=serve_counts,
        gather_back=moved[micros:],
        back_counts=serve_counts if asked.lasts_Q is None else asked.gradient_counts(),
        shared_K=shared_K,
        shared_before=shared_before,
        shared_there=shared_there,
        shared_before_there=shared_before_there,
        taken=None if older is None else take_over(united, shared_K, older, device),
        wide=None if wide is None else _on(device, wide),
        marks_P=marks_P,
        marked=None if marks_P is None else marked(united.serve[0], marks_P),
    )


def _on(device: torch.device, wide: Wide) -> WideThere:
    return WideThere(
        own=wide.own_K.to(device),
        merged=wide.merged_U.to(device),
        groups=wide.groups_U.to(device),
        of_groups=[part.to(device) for part in wide.of_groups],
    )


def _routing() -> ModuleType:
    return native_routing if native_wanted() else plain_routing
