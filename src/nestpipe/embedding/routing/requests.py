"""The requester's side: which rows a micro-batch wants, and what the model sees of those that come.

Without pooling, each unique key is asked for once. With pooling, owners may sum the rows of each
sample themselves, where that is fewer bytes on the network. Either way the answer is a list of
rows. The model sees segment sums of those, and gradients go back, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.embedding.routing import native as native_routing
from nestpipe.embedding.routing import reference as plain_routing
from nestpipe.embedding.routing.lists import WantedKeys
from nestpipe.embedding.table_groups import TableGroup
from nestpipe.jagged import Jagged
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.segments import (
    Segments,
    add_segments_at,
    concat,
    empty_rows,
    segments_on,
    sum_segments,
)

# Shapes: A keys that are sent, L sums among the rows that come back, Q the other rows, P all of
# them, n some rows, D width, R ranks, C tables of the group, M micro-batches

ROUTERS = ThreadPoolExecutor(2, "router", initializer=lambda: torch.set_num_threads(1))
"""Threads that route micro-batches for a GPU; they start with their first work."""


@dataclass(frozen=True, slots=True)
class InWindow:
    """What a micro-batch does with rows of its window, which are numbered over all of it."""

    window_rows: int
    """Rows of the whole window."""
    first_row: int
    """The number of the first row that this micro-batch asks for."""
    reused: Segments
    reused_n: Tensor
    """Rows of earlier micro-batches that this one uses too, and their gradients from what the
    model sees."""
    leaving: Segments
    """Rows whose last use this is, in the order in which their gradients are sent."""
    leaving_counts: list[int]
    """How many of them go to each owner, in rank order."""
    lasts_Q: Tensor
    """The last micro-batch that uses each row asked for now, where it is not a sum."""


@dataclass(frozen=True, slots=True)
class Request:
    """The keys of one micro-batch as they travel: the other ranks in order, this rank itself last.

    For each owner they come by table.
    """

    keys_A: Tensor
    lengths_L: Tensor
    """Keys of each sum that an owner takes, where it sends fewer rows than it gets keys."""
    key_counts_RC: Tensor
    """How many keys of each table go to each owner, on the host ..."""
    row_counts_RC: Tensor
    """... and how many rows come back."""
    seen: Segments
    """What the model sees, from the rows that came."""
    back: Segments
    """The gradient of each row that came, from those of what the model sees."""
    sizes: Mapping[str, int]
    """Rows that the model sees of each feature, in order."""
    straight: list[int] | None
    """Where each feature's rows begin among those that came, if all come just as they are seen."""
    window: InWindow | None = None
    """None: the rows of this micro-batch serve no other."""

    @property
    def rows_per_owner(self) -> list[int]:
        return self.row_counts_RC.sum(1).tolist()

    @property
    def gradients_per_owner(self) -> list[int]:
        return self.rows_per_owner if self.window is None else self.window.leaving_counts


def make_request(
    keys: Mapping[str, Jagged],
    group: TableGroup,
    rank: int,
    ranks: int,
    comm_dtype: torch.dtype = torch.float32,
) -> Request:
    """Find what a micro-batch needs and put it in the order in which it travels.

    `comm_dtype`: the type in which rows come.
    """
    wanted = _wanted([keys], group, rank, ranks, comm_dtype)
    routed = (native_routing if native_wanted() else plain_routing).request(wanted)
    sizes = _sizes(keys, group)
    return Request(
        routed.keys_A,
        routed.lengths_L,
        routed.key_counts_RC,
        routed.row_counts_RC,
        routed.seen,
        routed.back,
        sizes,
        _straight(routed.straight, group, sizes),
    )


def make_requests(
    micro_keys: Sequence[Mapping[str, Jagged]],
    group: TableGroup,
    rank: int,
    ranks: int,
    device: torch.device,
    comm_dtype: torch.dtype = torch.float32,
) -> list[Request]:
    """A request for each micro-batch: one after the other, or two at a time for a GPU.

    There one lane routes while the host's other cores have little to do.
    """

    def make(keys: Mapping[str, Jagged]) -> Request:
        return make_request(keys, group, rank, ranks, comm_dtype)

    return list(map(make, micro_keys) if device.type == "cpu" else ROUTERS.map(make, micro_keys))


def make_window(
    micro_keys: Sequence[Mapping[str, Jagged]],
    group: TableGroup,
    rank: int,
    ranks: int,
    comm_dtype: torch.dtype = torch.float32,
) -> list[Request]:
    """The same for all micro-batches of a window: what one has asked for, the later ones have.

    The batch is routed as a whole, so it asks for no key twice whatever the number of
    micro-batches, and then split.
    """
    routing = native_routing if native_wanted() else plain_routing
    sizes = [_sizes(keys, group) for keys in micro_keys]
    outputs_CM = torch.tensor(
        [
            [sum(of[f.name] for f in group.features if f.table == table) for of in sizes]
            for table in range(len(group.tables))
        ]
    )
    whole = routing.request(_wanted(micro_keys, group, rank, ranks, comm_dtype))
    slices = routing.split_window(whole, outputs_CM, rank)
    new = [int(s.row_counts_RC.sum()) for s in slices]
    return [
        Request(
            s.keys_A,
            s.lengths_L,
            s.key_counts_RC,
            s.row_counts_RC,
            s.seen,
            s.back,
            of,
            None,
            InWindow(
                sum(new),
                sum(new[:micro]),
                s.reused,
                s.reused_n,
                Segments(s.leaving_n),
                s.leaving_counts,
                s.lasts_Q,
            ),
        )
        for micro, (s, of) in enumerate(zip(slices, sizes, strict=True))
    ]


def requests_on(device: torch.device, requests: Sequence[Request]) -> list[Request]:
    """The same requests for rows that will come to a device; keys and counts stay on the host."""
    if device.type == "cpu":
        return list(requests)
    segments = [segments for r in requests for segments in (r.seen, r.back)]
    segments += [
        segments
        for r in requests
        if r.window is not None
        for segments in (r.window.reused, Segments(r.window.reused_n), r.window.leaving)
    ]
    moved = iter(segments_on(device, segments))
    there = [replace(r, seen=next(moved), back=next(moved)) for r in requests]
    return [r if r.window is None else replace(r, window=_on(r.window, moved)) for r in there]


def _on(window: InWindow, moved: Iterator[Segments]) -> InWindow:
    reused, reused_n, leaving = next(moved), next(moved).rows_T, next(moved)
    return replace(window, reused=reused, reused_n=reused_n, leaving=leaving)


def _sizes(keys: Mapping[str, Jagged], group: TableGroup) -> dict[str, int]:
    """How many rows the model sees of each feature."""
    return {
        f.name: keys[f.name].num_samples if f.pooled else len(keys[f.name].values)
        for f in group.features
    }


def _straight(
    of_tables: list[int], group: TableGroup, sizes: Mapping[str, int]
) -> list[int] | None:
    if min(of_tables) < 0:
        return None
    next_row = dict(enumerate(of_tables))
    starts: list[int] = []
    for feature in group.features:
        starts.append(next_row[feature.table])
        next_row[feature.table] += sizes[feature.name]
    return starts


def _wanted(
    micro_keys: Sequence[Mapping[str, Jagged]],
    group: TableGroup,
    rank: int,
    ranks: int,
    comm_dtype: torch.dtype,
) -> WantedKeys:
    """What several micro-batches need together; of a table, one micro-batch after the other."""
    tables = range(len(group.tables))
    of_table = [
        [(f, keys[f.name]) for keys in micro_keys for f in group.features if f.table == number]
        for number in tables
    ]
    return WantedKeys(
        keys=[concat([keys.values for _, keys in of]) for of in of_table],
        lengths=[
            concat([keys.lengths if f.pooled else torch.ones_like(keys.values) for f, keys in of])
            for of in of_table
        ],
        pooled=[group.owner_sums and any(f.pooled for f, _ in of) for of in of_table],
        table_owners=group.table_owners,
        row_bytes=group.dim * comm_dtype.itemsize,
        rank=rank,
        ranks=ranks,
    )


Deliver = Callable[[Tensor, list[Tensor]], None]
"""Takes the gradients of the rows that came: those of other ranks, in one piece, and this one's."""
Take = Callable[[Sequence[Tensor]], None]
"""Takes the gradients of what the model saw, feature by feature."""


class _Lookup(torch.autograd.Function):
    """All features of a group at once.

    Gradients leave by `take`, not as the gradient of an input: they go straight into the memory
    from which they are sent.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, came: list[Tensor], request: Request, take: Take
    ) -> tuple[Tensor, ...]:
        ctx.take = take
        (rows_PD,) = came
        if request.straight is not None:
            starts = zip(request.straight, request.sizes.values(), strict=True)
            return tuple(rows_PD[start : start + size] for start, size in starts)
        dim, device = rows_PD.shape[1], rows_PD.device
        seen_OD = empty_rows(sum(request.sizes.values()), dim, device)
        sum_segments(request.seen, came, [seen_OD])
        return torch.split(seen_OD, list(request.sizes.values()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.take([g if g.stride(1) == 1 else g.contiguous() for g in gradients])
        return None, None, None, None


def _of_rows(
    request: Request, gradients: Sequence[Tensor], own: int, comm_dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of the rows that came; those of the last `own` rows may stay where they are."""
    count, dim, device = len(request.back), gradients[0].shape[1], gradients[0].device
    others = count - own
    if request.straight is None:
        sent_PD, kept_PD = empty_rows(others, dim, device, comm_dtype), empty_rows(own, dim, device)
        sum_segments(request.back, gradients, [sent_PD, kept_PD], leaving=comm_dtype)
        return sent_PD, [kept_PD]
    sent_PD = empty_rows(others, dim, device)
    in_order = sorted(zip(request.straight, gradients, strict=True), key=lambda pair: pair[0])
    for start, gradient in in_order:
        if start < others:
            sent_PD[start : start + len(gradient)] = gradient
    return sent_PD, [gradient for start, gradient in in_order if start >= others]


def lookup_rows(
    rows_PD: Tensor,
    request: Request,
    deliver: Deliver,
    own: int,
    comm_dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Each feature's rows, or the sums of each sample's rows where its table pools.

    The last `own` rows are this rank's. Gradients of the others are delivered as `comm_dtype`, or
    as they are where nothing has to be summed.
    """
    return _lookup(
        rows_PD, request, lambda gradients: deliver(*_of_rows(request, gradients, own, comm_dtype))
    )


def averaged(rows: dict[str, Tensor], lengths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of each sample's rows as means, for features whose numbers of keys are given.

    It comes after every exchange, so plans and ranks do not change it; no keys give zeros.
    """
    means = {
        feature: rows[feature] / lengths_B.clamp(min=1).to(rows[feature].dtype)[:, None]
        for feature, lengths_B in lengths.items()
    }
    return {**rows, **means}


def lookup_window(rows_PD: Tensor, request: Request, gradients_PD: Tensor) -> dict[str, Tensor]:
    """The same from the rows of a window, and to their gradients so far."""
    return _lookup(
        rows_PD, request, lambda gradients: _add_to_window(request, gradients, gradients_PD)
    )


def _lookup(rows_PD: Tensor, request: Request, take: Take) -> dict[str, Tensor]:
    # Something that wants a gradient, so that the backward pass comes by.
    anchor = torch.zeros(0, requires_grad=True)
    seen: tuple[Tensor, ...] = _Lookup.apply(anchor, [rows_PD], request, take)  # type: ignore[assignment]
    return dict(zip(request.sizes, seen, strict=True))


def _add_to_window(request: Request, gradients: Sequence[Tensor], window_PD: Tensor) -> None:
    """Rows that are new in this micro-batch get their first gradient, the others one more."""
    window = request.window
    assert window is not None
    first = window.first_row
    sum_segments(request.back, gradients, [window_PD[first : first + len(request.back)]])
    add_segments_at(window.reused, gradients, window_PD, window.reused_n)
