"""The state of one batch between its first op and its last."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from nestpipe.embedding.routing.lists import OwnerRequests
from nestpipe.embedding.routing.owners import WorkingSet
from nestpipe.embedding.routing.requests import Request
from nestpipe.embedding.speculative import RowPatch
from nestpipe.kernels.rows.native import Gradients

# Shapes: P rows that come for a micro-batch, D weights, R ranks, M micro-batches, C tables

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
    sums: list[Gradients] = field(default_factory=list[Gradients])
    """[group] row gradients so far."""
