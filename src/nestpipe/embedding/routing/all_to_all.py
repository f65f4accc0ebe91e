"""Messages between ranks: the wire format of requests, and a fused all-to-all.

There is one collective per op, however many tables and stores there are. Only what goes to other
ranks takes part; the caller keeps its own share.

A message of requests holds the keys of every micro-batch, then the lengths of sums, as 64-bit
numbers. In a window it also holds the last micro-batch that uses each row that is not a sum: its
gradient comes with that one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.routing.lists import OwnerRequests, peers_then_self
from nestpipe.embedding.routing.requests import Request
from nestpipe.kernels import host_memory
from nestpipe.kernels.rows.segments import concat, to_wire

# Shapes: n rows of one store, D its width, R ranks, M micro-batches, C tables

Splits = Sequence[Sequence[int]]
"""For each store, rows per rank; what it says of this rank itself does not count."""
_IN_ONE = 4
"""Micro-batches are counted in 16 bits."""


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
    None: as they are. Without any store, on all ranks, nothing is sent.
    """
    if comm.size == 1 or not sent:
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


def pack_requests(requests: Sequence[Request], rank: int) -> list[Tensor]:
    """One message for each rank, this one last."""
    ranks = len(requests[0].key_counts_RC)
    order = peers_then_self(rank, ranks)
    parts = [_split(r.keys_A, r.key_counts_RC, order) for r in requests]
    if any(len(r.lengths_L) for r in requests):
        parts += [_split(r.lengths_L, _lengths_sent(*_counts(r)), order) for r in requests]
    lasts = [
        _split(r.window.lasts_Q, _lasts_sent(*_counts(r)), order)
        for r in requests
        if r.window is not None
    ]
    if lasts:
        parts.append([_packed(torch.cat([of[peer] for of in lasts])) for peer in range(ranks)])
    return [concat([of[peer] for of in parts]) for peer in range(ranks)]


def message_sizes(
    key_counts_RMC: Tensor, row_counts_RMC: Tensor, *, window: bool = False
) -> list[int]:
    """How long the message of each rank is."""
    return _sizes(key_counts_RMC, row_counts_RMC, window).sum(1).tolist()


def unpack_requests(
    messages: Tensor,
    key_counts_RMC: Tensor,
    row_counts_RMC: Tensor,
    rank: int,
    *,
    window: bool = False,
) -> OwnerRequests:
    """Keys, lengths and last uses apart; messages come from peers in order, then from itself."""
    counts = key_counts_RMC, row_counts_RMC
    order = peers_then_self(rank, len(key_counts_RMC))
    sizes = _sizes(*counts, window)[order]
    if not int(sizes[:, 1:].sum()) and not window:
        return OwnerRequests(messages, messages[:0], *counts, rank)
    parts = torch.split(messages, sizes.reshape(-1).tolist())
    keys, lengths = torch.cat(parts[::3]), torch.cat(parts[1::3])
    if not window:
        return OwnerRequests(keys, lengths, *counts, rank)
    rows = _lasts_sent(*counts).sum((1, 2))[order].tolist()
    lasts = [_unpacked(part, count) for part, count in zip(parts[2::3], rows, strict=True)]
    return OwnerRequests(keys, lengths, *counts, rank, torch.cat(lasts))


def in_rank_order(of_peers: Sequence[int], rank: int) -> list[int]:
    """Numbers that came by peer, by rank."""
    found = dict(zip(peers_then_self(rank, len(of_peers)), of_peers, strict=True))
    return [found[r] for r in range(len(of_peers))]


def _sizes(key_counts_RMC: Tensor, row_counts_RMC: Tensor, window: bool) -> Tensor:
    """(R, 3) numbers in the message of each rank: keys, lengths, last uses."""
    counts = key_counts_RMC, row_counts_RMC
    lasts = _lasts_sent(*counts).sum((1, 2))
    packed = lasts.add(_IN_ONE - 1).div(_IN_ONE, rounding_mode="floor")
    keys, lengths = key_counts_RMC.sum((1, 2)), _lengths_sent(*counts).sum((1, 2))
    return torch.stack([keys, lengths, packed if window else torch.zeros_like(packed)], 1)


def _packed(small: Tensor) -> Tensor:
    """Small numbers, several in one: they travel with keys of 64 bits."""
    room = torch.zeros(-(-len(small) // _IN_ONE) * _IN_ONE, dtype=torch.int16)
    room[: len(small)] = small
    return room.view(torch.int64)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    return packed.view(torch.int16)[:count].long()


def _counts(request: Request) -> tuple[Tensor, Tensor]:
    return request.key_counts_RC, request.row_counts_RC


def _split(numbers: Tensor, counts_RC: Tensor, order: list[int]) -> Sequence[Tensor]:
    """What goes to each peer."""
    return torch.split(numbers, counts_RC.sum(1)[order].tolist())


def _lengths_sent(key_counts: Tensor, row_counts: Tensor) -> Tensor:
    """Sums have a length each; where there are as many rows as keys, all would be one."""
    return torch.where(row_counts < key_counts, row_counts, 0)


def _lasts_sent(key_counts: Tensor, row_counts: Tensor) -> Tensor:
    """A sum belongs to one micro-batch; any other row may be used by several."""
    return torch.where(row_counts < key_counts, 0, row_counts)
