"""A fused all-to-all: one collective per op, however many tables and stores there are.

Only what goes to other ranks takes part; the caller keeps its own share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.kernels import host_memory
from nestpipe.kernels.rows.segments import to_wire

# Shapes: n rows of one store, D its width, R ranks

Splits = Sequence[Sequence[int]]
"""For each store, rows per rank; what it says of this rank itself does not count."""


def exchange(
    comm: Communicator,
    sent: Sequence[Tensor],
    sent_splits: Splits,
    received: Sequence[Tensor],
    received_splits: Splits,
    comm_dtype: torch.dtype | None = None,
) -> None:
    """Fill `received` with the rows that other ranks sent, in rank order, for each store.

    Rows may be (n,) keys or (n, D) weights; all are of one type, and travel as `comm_dtype`;
    None: as they are.
    """
    if comm.size == 1:
        return
    theirs = _without(comm.rank, sent_splits)
    mine = _without(comm.rank, received_splits)
    comm_dtype = comm_dtype or sent[0].dtype
    if len(sent) == 1:
        _all_to_all(comm, received[0], sent[0], mine[0], theirs[0], comm_dtype)
        return
    widths = [_width(rows) for rows in sent]
    flat = _interleave([rows.reshape(-1) for rows in sent], theirs, widths)
    back_splits = _flat_splits(mine, widths)
    arrived = flat.new_empty(sum(back_splits))
    _all_to_all(comm, arrived, flat, back_splits, _flat_splits(theirs, widths), comm_dtype)
    _deinterleave(arrived, received, mine, widths)


def _all_to_all(
    comm: Communicator,
    received: Tensor,
    sent: Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
    comm_dtype: torch.dtype,
) -> None:
    arrived = received
    if received.dtype != comm_dtype:
        arrived = host_memory.empty(received.shape, comm_dtype, received.device)
    comm.all_to_all(arrived, to_wire(sent, comm_dtype), received_splits, sent_splits)
    if arrived is not received:
        received.copy_(arrived)


def _without(rank: int, splits: Splits) -> list[list[int]]:
    return [[0 if r == rank else rows for r, rows in enumerate(of)] for of in splits]


def _width(rows: Tensor) -> int:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return width


def _flat_splits(splits: Splits, widths: Sequence[int]) -> list[int]:
    """Numbers per rank, all stores together."""
    return [
        sum(of_store[rank] * width for of_store, width in zip(splits, widths, strict=True))
        for rank in range(len(splits[0]))
    ]


def _interleave(flats: Sequence[Tensor], splits: Splits, widths: Sequence[int]) -> Tensor:
    """Per rank, the parts of all stores behind each other."""
    parts = [
        torch.split(flat, [rows * width for rows in of_store])
        for flat, of_store, width in zip(flats, splits, widths, strict=True)
    ]
    ranks = range(len(splits[0]))
    return torch.cat([of_store[rank] for rank in ranks for of_store in parts])


def _deinterleave(
    flat: Tensor, received: Sequence[Tensor], splits: Splits, widths: Sequence[int]
) -> None:
    ranks = range(len(splits[0]))
    sizes = [
        of_store[rank] * width
        for rank in ranks
        for of_store, width in zip(splits, widths, strict=True)
    ]
    pieces = torch.split(flat, sizes)
    stores = len(splits)
    for s, rows in enumerate(received):
        rows.copy_(torch.cat([pieces[rank * stores + s] for rank in ranks]).view(rows.shape))
