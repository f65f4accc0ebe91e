"""One collective per op, however many tables and stores there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator

# Shapes: n rows of one store, D its width, R ranks


def exchange(
    comm: Communicator,
    sent: Sequence[Tensor],
    sent_splits: Sequence[Sequence[int]],
    received_splits: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Exchange the rows of several stores at once; splits are rows per rank, for each store.

    Rows may be (n,) keys or (n, D) weights; all are of one type.
    """
    if len(sent) == 1:
        rows = sent[0]
        received = rows.new_empty((sum(received_splits[0]), *rows.shape[1:]))
        comm.all_to_all(received, rows.contiguous(), received_splits[0], sent_splits[0])
        return [received]
    widths = [rows[:1].numel() if len(rows) else _width(rows) for rows in sent]
    flat = _interleave([rows.reshape(-1) for rows in sent], sent_splits, widths)
    flat_splits = _flat_splits(sent_splits, widths)
    back_splits = _flat_splits(received_splits, widths)
    received = flat.new_empty(sum(back_splits))
    comm.all_to_all(received, flat, back_splits, flat_splits)
    parts = _deinterleave(received, received_splits, widths)
    return [part.reshape(-1, *rows.shape[1:]) for part, rows in zip(parts, sent, strict=True)]


def _width(rows: Tensor) -> int:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return width


def _flat_splits(splits: Sequence[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Numbers per rank, all stores together."""
    return [
        sum(of_store[rank] * width for of_store, width in zip(splits, widths, strict=True))
        for rank in range(len(splits[0]))
    ]


def _interleave(
    flats: Sequence[Tensor], splits: Sequence[Sequence[int]], widths: Sequence[int]
) -> Tensor:
    """Per rank, the parts of all stores behind each other."""
    parts = [
        torch.split(flat, [rows * width for rows in of_store])
        for flat, of_store, width in zip(flats, splits, widths, strict=True)
    ]
    ranks = range(len(splits[0]))
    return torch.cat([of_store[rank] for rank in ranks for of_store in parts])


def _deinterleave(
    flat: Tensor, splits: Sequence[Sequence[int]], widths: Sequence[int]
) -> list[Tensor]:
    ranks = range(len(splits[0]))
    sizes = [
        of_store[rank] * width
        for rank in ranks
        for of_store, width in zip(splits, widths, strict=True)
    ]
    pieces = torch.split(flat, sizes)
    stores = len(splits)
    return [torch.cat([pieces[rank * stores + s] for rank in ranks]) for s in range(stores)]
