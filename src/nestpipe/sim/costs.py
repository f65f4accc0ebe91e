"""What each op costs on one worker, from its sizes and the hardware.

Shapes of the formulas: bytes over bandwidth, plus a fixed cost per message, times contention.
No formula knows of plans: how much of a cost is exposed is for the replay to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import log2

from nestpipe.schedule import Exchange, Merge, Retrieval, Shape
from nestpipe.schedule.op import Kind
from nestpipe.sim.cluster import Cluster, Network, Workload, shards_of

K = Kind
KEY_BYTES = 8
Costs = Mapping[Kind, float]
"""Milliseconds of one op of each kind; per micro-batch where the kind comes per micro-batch."""


class Layout(StrEnum):
    """Which workers are next to each other, and so in one node as far as they fit."""

    AUTO = "auto"
    """Replicas where all of a shard fit into a node, else shards."""
    REPLICAS = "replicas"
    """The same shard in different groups: merging stays in the node."""
    SHARDS = "shards"
    """The shards of a group: exchange stays in the node as far as it can."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many workers, and into how many groups with a copy of the tables each they are split."""

    workers: int
    groups: int = 1
    layout: Layout = Layout.AUTO

    @property
    def shards(self) -> int:
        return shards_of(self.workers, self.groups)

    def shards_in_node(self, workers_per_node: int) -> int:
        """Workers of one group in a node."""
        replicas_first = self._replicas_first(workers_per_node)
        room = max(1, workers_per_node // self.groups) if replicas_first else workers_per_node
        return min(self.shards, room)

    def replicas_in_node(self, workers_per_node: int) -> int:
        """Replicas of one shard in a node."""
        replicas_first = self._replicas_first(workers_per_node)
        room = workers_per_node if replicas_first else max(1, workers_per_node // self.shards)
        return min(self.groups, room)

    def _replicas_first(self, workers_per_node: int) -> bool:
        if self.layout is Layout.AUTO:
            return self.groups <= workers_per_node
        return self.layout is Layout.REPLICAS


def costs(cluster: Cluster, shape: Shape, scale: Scale) -> Costs:
    """Milliseconds of one op of each kind."""
    return {
        **_host_costs(cluster, shape, scale),
        **_network_costs(cluster, shape, scale),
        **_device_costs(cluster, shape, scale),
    }


def _host_costs(cluster: Cluster, shape: Shape, scale: Scale) -> dict[Kind, float]:
    host, work = cluster.host, cluster.workload
    busy = 1 + host.contention_per_worker * scale.workers
    moved = 1 - work.shared_share if shape.retrieval is Retrieval.NEW else 1.0
    foreign = work.merge_from_host * foreign_rows(work, shape, scale.groups)
    row_bytes = (work.owned_rows * moved + foreign) * work.stored_row_bytes
    return {
        K.PREFETCH: busy * 1000 * work.samples / host.samples_per_s,
        K.COPY: busy * _transfer_ms(work.samples * work.sample_kb * 1024, host.pcie_gb_per_s),
        K.RETRIEVE: busy * _transfer_ms(row_bytes, host.gather_gb_per_s),
        K.WRITEBACK: busy * _transfer_ms(row_bytes, host.scatter_gb_per_s),
    }


def _network_costs(cluster: Cluster, shape: Shape, scale: Scale) -> dict[Kind, float]:
    network, work = cluster.network, cluster.workload
    exchanged = (
        work.unique_keys * work.row_bytes * exchange_growth(work, shape) / shape.micro_batches
    )
    rows = all_to_all_ms(network, exchanged, scale)
    setup = network.setup_us_per_peer * (effective_peers(network, scale) - 1) / 1000
    node = network.workers_per_node
    merged = merged_bytes(work, shape, scale.groups)
    # Taken out of the device's buffer, and put back.
    copies = _transfer_ms(2 * merged, cluster.compute.memory_gb_per_s)
    return {
        K.COUNTS: all_to_all_ms(network, 0, scale) + setup,
        K.KEYS: all_to_all_ms(network, work.unique_keys * KEY_BYTES, scale),
        K.STALE_MASK: all_to_all_ms(network, work.unique_keys / shape.micro_batches, scale),
        K.PATCH: all_to_all_ms(network, exchanged * work.shared_share, scale),
        K.ROWS: rows,
        K.GRADS: rows,
        K.REPLICA_KEYS: _replica_keys_ms(network, work, shape, scale),
        K.TOTALS: _all_reduce_ms(network, 0, scale.workers, node),
        K.REDUCE: _all_reduce_ms(network, work.dense_mb * 1e6, scale.workers, node),
        K.REPLICA_SYNC: _all_reduce_ms(network, merged, scale.groups, scale.replicas_in_node(node))
        + copies,
    }


def exchange_growth(work: Workload, shape: Shape) -> float:
    """Rows that all micro-batches ask for over those of the unsplit batch.

    In a window none is asked for twice: then a batch has as many as it has unique keys. How the
    window deals them out, most to the first micro-batch, is not modelled: each gets an equal part.
    """
    if shape.exchange is Exchange.WINDOW:
        return 1.0
    return (1 + work.split_growth) ** log2(shape.micro_batches)


def _device_costs(cluster: Cluster, shape: Shape, scale: Scale) -> dict[Kind, float]:
    compute, work = cluster.compute, cluster.workload
    updated = updated_rows(work, shape, scale.groups)
    shared = updated * work.shared_share
    refresh = _transfer_ms(2 * shared * work.stored_row_bytes, compute.memory_gb_per_s)
    dense = work.samples * work.gflop_per_sample / compute.tflops / shape.micro_batches
    return {
        K.DEDUP: work.keys / compute.mkeys_per_s / 1000,
        K.UNION: work.unique_keys / compute.mkeys_per_s / 1000,
        K.REPLICA_UNION: merged_rows(work, shape, scale.groups) / compute.mkeys_per_s / 1000,
        K.SYNC: compute.swap_ms + refresh,
        K.SWAP: compute.swap_ms,
        K.DENSE: dense,
        # Weights and gradients are read, weights are written.
        K.APPLY: _transfer_ms(3 * work.dense_mb * 1e6, compute.memory_gb_per_s),
        K.UPDATE: _transfer_ms(2 * updated * work.stored_row_bytes, compute.memory_gb_per_s),
    }


def _replica_keys_ms(network: Network, work: Workload, shape: Shape, scale: Scale) -> float:
    """Every replica gets the keys that each of the others touched since the last merge."""
    if not merges(shape, scale.groups):
        return 0.0
    touched = work.owned_rows * distinct_growth(work, shape.merge_every)
    received = (scale.groups - 1) * touched * KEY_BYTES
    inside = scale.replicas_in_node(network.workers_per_node) == scale.groups
    speed = network.node_gb_per_s if inside else network.gb_per_s
    # Counts travel first.
    return 2 * message_ms(network, scale.groups) + _transfer_ms(received, speed)


def effective_peers(network: Network, scale: Scale) -> float:
    """Peers that contend for the network: those of the group, and partly everybody else."""
    relief = network.group_relief
    return relief * scale.shards + (1 - relief) * scale.workers


def contention(network: Network, scale: Scale) -> float:
    """How many times slower the network between nodes gets."""
    peers = effective_peers(network, scale)
    return 1 + sum(c * peers ** (i + 1) for i, c in enumerate(network.contention))


def all_to_all_ms(network: Network, num_bytes: float, scale: Scale) -> float:
    """An All2All in which each worker of a group receives so many bytes in all."""
    shards = scale.shards
    if shards == 1:
        return 0.0
    inside = scale.shards_in_node(network.workers_per_node)
    far = num_bytes * (shards - inside) / shards
    near = num_bytes * (inside - 1) / shards
    return (
        message_ms(network, shards)
        + _transfer_ms(far, network.gb_per_s) * contention(network, scale)
        + _transfer_ms(near, network.node_gb_per_s)
    )


def message_ms(network: Network, members: int) -> float:
    """The fixed cost of one collective."""
    return (network.message_us + network.message_us_per_peer * (members - 1)) / 1000


def _all_reduce_ms(network: Network, num_bytes: float, members: int, in_node: int) -> float:
    """Two rings: inside a node, then each of its workers between nodes with its part of the bytes.

    In a ring twice the bytes pass each worker, less its own share.
    """
    if members == 1:
        return 0.0
    inside = min(members, in_node)
    nodes = members / inside
    near = _transfer_ms(2 * num_bytes * (inside - 1) / inside, network.node_gb_per_s)
    far = _transfer_ms(2 * num_bytes / inside * (nodes - 1) / nodes, network.gb_per_s)
    return message_ms(network, members) + near + far


def _transfer_ms(num_bytes: float, gb_per_s: float) -> float:
    return num_bytes / gb_per_s / 1e6


# How much replicas have to merge in 2D parallelism: rows, and the bytes of a message.
#
# Every group of workers has a copy of the tables. A merge brings together what any of them touched
# since the one before: rows with their state (`averaged`), or the gradients of one batch (`exact`).


def distinct_growth(work: Workload, batches: float) -> float:
    """Distinct rows of so many batches over those of one.

    Two neighbours have 2 - `shared_share` times the rows of one; that every doubling grows by that
    factor is what a few hot keys and a long tail give. Batches of other groups count alike: they
    are as far from each other as batches of different times.
    """
    return batches ** log2(2 - work.shared_share)


def merges(shape: Shape, groups: int) -> bool:
    """Whether there are replicas, and the plan merges them."""
    return groups > 1 and shape.merge_every > 0


def merged_rows(work: Workload, shape: Shape, groups: int) -> float:
    """Rows of one shard that one merge brings together."""
    if not merges(shape, groups):
        return 0.0
    return work.owned_rows * distinct_growth(work, groups * shape.merge_every)


def merged_bytes(work: Workload, shape: Shape, groups: int) -> float:
    """What one worker puts into one merge."""
    exact = shape.merge is Merge.EXACT
    row_bytes = work.row_bytes if exact else work.stored_row_bytes
    return merged_rows(work, shape, groups) * row_bytes


def foreign_rows(work: Workload, shape: Shape, groups: int) -> float:
    """Rows of a shard that a batch fetches and writes only because they are merged; a mean."""
    if not merges(shape, groups):
        return 0.0
    return (merged_rows(work, shape, groups) - work.owned_rows) / shape.merge_every


def updated_rows(work: Workload, shape: Shape, groups: int) -> float:
    """Rows of a shard that `update` changes: where replicas are exact, those of every group."""
    if merges(shape, groups) and shape.merge is Merge.EXACT:
        return merged_rows(work, shape, groups)
    return work.owned_rows
