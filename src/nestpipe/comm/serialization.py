"""What travels: rows cut into one piece per rank, tensors as bytes, plain values as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor


def check_exchange(
    received: Tensor,
    sent: Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
    size: int,
) -> None:
    """Find our own mistakes in an exchange before a peer hangs on them."""
    for name, tensor, splits in (
        ("received", received, received_splits),
        ("sent", sent, sent_splits),
    ):
        assert len(splits) == size, f"{name}_splits has {len(splits)} parts for {size} ranks"
        assert min(splits) >= 0, f"{name}_splits has a negative part: {list(splits)}"
        assert sum(splits) == len(tensor), (
            f"{name} has shape {tuple(tensor.shape)}, its splits ask for {sum(splits)} rows"
        )
    assert received.is_contiguous(), "received must be contiguous: it is filled in place"
    ways = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in (sent, received)]
    assert ways[0] == ways[1], f"rows leave as {ways[0]} and cannot arrive as {ways[1]}"


def row_bytes(tensor: Tensor) -> int:
    """The size of one row, the rows being counted by the first dimension."""
    return tensor.shape[1:].numel() * tensor.element_size()


def bytes_to_others(sent: Tensor, sent_splits: Sequence[int], rank: int) -> int:
    """What leaves this rank in an exchange; what a rank keeps for itself does not travel."""
    return (sum(sent_splits) - sent_splits[rank]) * row_bytes(sent)


def bytes_of_sum(tensor: Tensor, size: int) -> int:
    """What leaves each rank in a sum over all: two rounds of a ring, as most backends do it."""
    return 2 * (size - 1) * tensor.numel() * tensor.element_size() // size


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as one row of bytes: what any backend can send, whatever the dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def encode(value: object) -> bytes:
    """A plain value as it travels; what JSON cannot say is a TypeError."""
    return json.dumps(value).encode()


def decode(data: bytes) -> object:
    """What a peer encoded: tuples have become lists, and the keys of dicts strings."""
    return json.loads(data)
