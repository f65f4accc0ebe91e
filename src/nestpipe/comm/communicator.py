"""The contract of a network, the serialization of messages, and groups of ranks.

Groups are two-dimensional parallelism: tables are sharded inside a group, replicated across groups.
Of T ranks, M groups of N = T / M: a group holds every row once, a shard of them on each of its N
ranks; the M ranks with the same shard, one in each group, are its replicas. With 8 ranks and M = 2:

    layout "replicas"   groups 0 2 4 6, 1 3 5 7   replicas 0 1, 2 3, 4 5, 6 7
    layout "shards"     groups 0 1 2 3, 4 5 6 7   replicas 0 4, 1 5, 2 6, 3 7
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.comm.peer_failure import OpLabel
from nestpipe.errors import ConfigError


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
        """Return once every rank has called this."""
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


# A group of one rank: the same calls, and no peer to wait for.


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
        """Nothing to wait for."""

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
    """Bytes that leave this rank in an exchange; its own part does not travel."""
    return (sum(sent_splits) - sent_splits[rank]) * row_bytes(sent)


def bytes_of_sum(tensor: Tensor, size: int) -> int:
    """Bytes that leave each rank in an all-reduce: two rounds of a ring, as in most backends."""
    return 2 * (size - 1) * tensor.numel() * tensor.element_size() // size


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as one row of bytes: what any backend can send, whatever the dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def encode(value: object) -> bytes:
    """A plain value as bytes; a value that JSON cannot represent is a TypeError."""
    return json.dumps(value).encode()


def decode(data: bytes) -> object:
    """Decode a peer's value: tuples have become lists, and the keys of dicts strings."""
    return json.loads(data)


LAYOUTS = ("replicas", "shards")
"""Which ranks are next to each other: those of a replica set, or those of a group."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's place among the groups, and its ways to the others."""

    world: Communicator
    """All ranks."""
    shards: Communicator
    """The ranks of this group, by shard: keys, rows and row gradients travel here."""
    replicas: Communicator
    """The ranks with this shard, by group: rows and gradients are merged here."""
    replica_keys: Communicator
    """The same ranks on a network of their own, so that another thread may use it."""
    groups: int
    """How many groups there are."""
    group: int
    """The number of this rank's group."""
    layout: str
    """`replicas` or `shards`: which ranks are next to each other."""
    reason: str
    """The choice, and why."""


def make_mesh(
    world: Communicator, groups: int = 1, layout: str = "auto", *, ranks_per_node: int | None = None
) -> Mesh:
    """Cut the ranks into `groups`; every rank calls this with the same arguments.

    Layout `auto` puts replicas next to each other where they then share a node, which keeps their
    merging inside it, and shards elsewhere. Nodes have `ranks_per_node` ranks; else as many as the
    launcher says (LOCAL_WORLD_SIZE), or all.
    """
    check_groups(groups, world.size)
    if layout not in ("auto", *LAYOUTS):
        raise ConfigError(f"unknown layout {layout!r}; use auto, replicas or shards")
    layout, why = _chosen(world, groups, layout, ranks_per_node)
    if groups == 1:  # nothing to cut, so also ranks that are a part of more may be a world
        alone = LocalCommunicator()
        return Mesh(world, world, alone, LocalCommunicator(), groups, 0, layout, why)
    group_sets, replica_sets = members(groups, world.size, layout)
    replicas = world.subgroup(replica_sets)
    return Mesh(
        world=world,
        shards=world.subgroup(group_sets),
        replicas=replicas,
        replica_keys=world.subgroup(replica_sets),
        groups=groups,
        group=replicas.rank,
        layout=layout,
        reason=why,
    )


def members(groups: int, ranks: int, layout: str) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each group, by shard, and of each replica set, by group."""
    check_groups(groups, ranks)
    if layout not in LAYOUTS:
        raise ConfigError(f"unknown layout {layout!r}; use replicas or shards")
    shards = ranks // groups
    next_to_each_other = groups if layout == "replicas" else shards
    runs = [list(range(r, r + next_to_each_other)) for r in range(0, ranks, next_to_each_other)]
    across = [list(range(r, ranks, next_to_each_other)) for r in range(next_to_each_other)]
    return (across, runs) if layout == "replicas" else (runs, across)


def check_groups(groups: int, ranks: int) -> None:
    """Refuse a number of groups that cannot all have the same number of ranks."""
    if groups < 1:
        raise ConfigError(f"groups is {groups}; use 1 or more")
    if ranks == 1 < groups:
        raise ConfigError(f"groups is {groups} and there is 1 rank; use 1")
    if ranks % groups:
        *fewer, most = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise ConfigError(
            f"groups is {groups} and there are {ranks} ranks; use a number that divides them: "
            f"{', '.join(fewer)} or {most}"
        )


def _chosen(
    world: Communicator, groups: int, layout: str, ranks_per_node: int | None
) -> tuple[str, str]:
    """The layout, and a sentence that says it with its reason."""
    if groups == 1:
        plain = "shards" if layout == "auto" else layout
        return plain, "one group: every row is on one rank, and nothing is replicated"
    shape = f"{groups} groups of {world.size // groups}"
    if layout != "auto":
        return layout, f"{shape}, {layout} next to each other: as asked for"
    node = _smallest_node(world) if ranks_per_node is None else ranks_per_node
    if node < 1:
        raise ConfigError(f"a node of {node} ranks cannot be; use 1 or more ranks per node")
    if _inside_nodes(groups, world.size, node):
        return "replicas", (
            f"{shape}, replicas next to each other: merging {groups} of them stays inside a node "
            f"of {node}"
        )
    return "shards", (
        f"{shape}, shards next to each other: runs of {groups} replicas do not fit in nodes "
        f"of {node}"
    )


def _inside_nodes(replicas: int, ranks: int, ranks_per_node: int) -> bool:
    """Whether no run of replicas begins in one node and ends in another."""
    firsts = range(0, ranks, replicas)
    return all(r // ranks_per_node == (r + replicas - 1) // ranks_per_node for r in firsts)


def _smallest_node(world: Communicator) -> int:
    """The same number on every rank, also where nodes have different numbers of them."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return min(int(str(ranks)) for ranks in world.all_gather_values(here))
