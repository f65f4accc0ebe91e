"""Lookup: from the rows that came to what a model sees, and gradients back, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.embedding.routing.requests import Request
from nestpipe.kernels.rows.segments import add_segments_at, empty_rows, sum_segments

# Shapes: P rows that came, D width

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
