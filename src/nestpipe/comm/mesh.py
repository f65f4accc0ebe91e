"""Two-dimensional parallelism: tables are sharded inside a group, replicated across groups.

Of T ranks, M groups of N = T / M: a group holds every row once, a shard of them on each of its N
ranks; the M ranks with the same shard, one in each group, are its replicas. With 8 ranks and M = 2:

    layout "replicas"   groups 0 2 4 6, 1 3 5 7   replicas 0 1, 2 3, 4 5, 6 7
    layout "shards"     groups 0 1 2 3, 4 5 6 7   replicas 0 4, 1 5, 2 6, 3 7
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nestpipe.comm.communicator import Communicator, LocalCommunicator
from nestpipe.errors import ConfigError

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
    """What was chosen, and why."""


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
