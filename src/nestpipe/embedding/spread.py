"""From unique rows to what a model sees, and gradients back, in a fixed order of summation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.requests import Request

# Shapes: U unique rows, O rows that the model sees, D width


class _Spread(torch.autograd.Function):
    """All features of a group at once: one pass over the rows, and one over the gradients."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, request: Request) -> Tensor:
        ctx.request = request
        if request.seen is None:
            return rows_UD.index_select(0, request.picked_T)
        return request.seen.sum(rows_UD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradients_OD,) = gradients
        return ctx.request.back.sum(gradients_OD.contiguous()), None


def spread_rows(rows_UD: Tensor, request: Request) -> dict[str, Tensor]:
    """Each feature's rows, or the sums of each sample's rows where its table pools."""
    seen_OD: Tensor = _Spread.apply(rows_UD, request)  # type: ignore[assignment]
    parts = torch.split(seen_OD, list(request.sizes.values()))
    return dict(zip(request.sizes, parts, strict=True))
