"""What the rest of NestPipe asks of a network, and the form in which tensors and values travel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.comm.peer_failure import OpLabel


class Communicator(Protocol):
    """Collectives among ranks; every rank calls the same ones in the same order.

    Tensors may be on the device or in host memory, whatever connects the devices.

    They are called from one thread at a time; with `separate_groups`, one for each network; a
    `subgroup` has networks of its own. When a peer is lost, or does not come within the timeout, a
    collective raises `RunError` with the name that `op_label` gave it. No collective may follow,
    in subgroups neither.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def op_label(self) -> OpLabel: ...

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows, keys and gradients that went from this rank to others, so far.

        A sum over all ranks counts as two rounds of a ring. What subgroups sent is included.
        """
        ...

    @property
    def separate_groups(self) -> bool:
        """Whether tensors in host memory have a network of their own, and may have a thread.

        Then `all_reduce_dense` has one too, except in a subgroup.
        """
        ...

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        """Exchange rows (first dimension): `sent_splits[r]` rows go to rank r, in rank order.

        `received` is filled in rank order. On a GPU it is ready for the current stream, not for
        the host.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, the same bits on every rank."""
        ...

    def all_reduce_dense(self, tensor: Tensor) -> None:
        """`all_reduce` that runs beside all others, where `separate_groups` says so.

        In a subgroup it is `all_reduce` and no more.
        """
        ...

    def all_gather_values(self, value: object) -> list[object]:
        """Small plain values (numbers, strings, lists, dicts) of every rank, in rank order.

        They travel as JSON: tuples come back as lists, the keys of dicts as strings.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def subgroup(self, partition: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of the subset that this rank is in; a subset of one costs no network.

        Every rank calls this with the same `partition`, each rank in exactly one subset, in the
        order that ranks are to have there. Each call makes new networks, so two subgroups of the
        same ranks may be used from two threads. They share `op_label`, and messages name ranks of
        the whole. Subgroups have no subgroups.
        """
        ...

    def close(self) -> None:
        """Leave the group; no collective may follow."""
        ...


# A group of one rank: the same calls, nobody to wait for.


class LocalCommunicator:
    """Collectives of a rank that is alone."""

    rank = 0
    size = 1
    bytes_sent = 0
    separate_groups = True

    def __init__(self, op_label: OpLabel | None = None) -> None:
        """As a part of a larger group it shares that group's `op_label`."""
        self.op_label = op_label or OpLabel()

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        """A copy."""
        check_exchange(received, sent, received_splits, sent_splits, self.size)
        assert list(received_splits) == list(sent_splits), (
            f"{sent_splits[0]} rows sent, {received_splits[0]} expected"
        )
        received.detach().copy_(sent.detach())

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over one rank: nothing changes."""

    def all_reduce_dense(self, tensor: Tensor) -> None:
        """The same."""

    def all_gather_values(self, value: object) -> list[object]:
        return [decode(encode(value))]

    def barrier(self) -> None:
        """Everyone is here."""

    def subgroup(self, partition: Sequence[Sequence[int]]) -> LocalCommunicator:
        own_subset(partition, self.rank, self.size)
        return LocalCommunicator(self.op_label)

    def close(self) -> None:
        """Nothing to leave."""


# A partition of the ranks: every rank is in exactly one subset.


def own_subset(partition: Sequence[Sequence[int]], rank: int, size: int) -> list[int]:
    """The subset that a rank is in, of all ranks 0 to `size` - 1."""
    ranks = sorted(r for subset in partition for r in subset)
    assert ranks == list(range(size)), (
        f"the partition {[list(s) for s in partition]} must hold each of {size} ranks once"
    )
    return next(list(subset) for subset in partition if rank in subset)


def check_agreement(asked: Sequence[object]) -> None:
    """Find our own mistake before a rank waits for peers that made another partition."""
    for rank, partition in enumerate(asked):
        assert partition == asked[0], (
            f"rank 0 asked for the partition {asked[0]}, rank {rank} for {partition}"
        )


# What travels: rows cut into one piece per rank, tensors as bytes, plain values as JSON.


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
        assert len(splits) == size, f"{name}_splits has {len(splits)} splits for {size} ranks"
        assert min(splits) >= 0, f"{name}_splits has a negative split: {list(splits)}"
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
