"""What each op costs on one worker, from its sizes and the hardware.

Shapes of the formulas: bytes over bandwidth, plus a fixed cost per message, times contention.
No formula knows of plans: how much of a cost is exposed is for the replay to find out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import log2
from typing import cast

from nestpipe.config import fraction, not_negative, positive
from nestpipe.errors import ConfigError
from nestpipe.schedule import Exchange, Merge, Retrieval, Shape
from nestpipe.schedule.schedule import Kind

# The machines, and the work that one worker has per batch.


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The accelerator of one worker."""

    tflops: float = 100.0
    """Sustained speed of dense forward and backward, in 1e12 operations per second."""
    mkeys_per_s: float = 1000.0
    """Speed of finding unique keys, in millions of keys per second."""
    memory_gb_per_s: float = 800.0
    """Device memory: refreshing and updating rows."""
    swap_ms: float = 0.1
    """Fixed cost of handing the row buffers over from one batch to the next."""

    def __post_init__(self) -> None:
        for name in ("tflops", "mkeys_per_s", "memory_gb_per_s"):
            positive(name, getattr(self, name))
        not_negative("swap_ms", self.swap_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The share of the host that one worker has: loader, bus and DRAM."""

    samples_per_s: float = 50_000.0
    """How many samples the loader threads read, decode and pin per second."""
    pcie_gb_per_s: float = 25.0
    """Host-to-device copy of samples."""
    gather_gb_per_s: float = 10.0
    """Rows from the host store into the device buffer."""
    scatter_gb_per_s: float = 10.0
    """Rows from the device buffer back into the host store."""
    contention_per_worker: float = 0.0
    """By which fraction all of the above slow down for each worker of the cluster."""

    def __post_init__(self) -> None:
        for name in ("samples_per_s", "pcie_gb_per_s", "gather_gb_per_s", "scatter_gb_per_s"):
            positive(name, getattr(self, name))
        not_negative("contention_per_worker", self.contention_per_worker)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The network, as one worker sees it."""

    gb_per_s: float = 12.5
    """Between nodes, for one worker, while nothing contends."""
    node_gb_per_s: float = 150.0
    """Inside a node."""
    workers_per_node: int = 8
    """Workers that share a node."""
    message_us: float = 20.0
    """Fixed cost of one collective."""
    message_us_per_peer: float = 0.2
    """Fixed cost of one collective for each peer in it."""
    setup_us_per_peer: float = 1.0
    """Once per batch and peer: agreeing on sizes and posting receive buffers."""
    contention: tuple[float, ...] = ()
    """Slowdown between nodes, 1 + c1*P + c2*P^2 ..., where P is the number of effective peers."""
    group_relief: float = 1.0
    """How much a smaller group helps against contention: P = relief*group + (1-relief)*workers."""

    def __post_init__(self) -> None:
        for name in ("gb_per_s", "node_gb_per_s", "workers_per_node"):
            positive(name, getattr(self, name))
        for name in ("message_us", "message_us_per_peer", "setup_us_per_peer"):
            not_negative(name, getattr(self, name))
        fraction("group_relief", self.group_relief)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """How unequal workers are; collectives wait for the slowest."""

    jitter: float = 0.0
    """Spread (sigma of a log-normal factor) of every op that a worker does on its own."""
    slow_share: float = 0.0
    """Share of workers that are slow all the time."""
    slow_factor: float = 1.0
    """How many times longer a slow worker takes."""
    seed: int = 0
    """Seed of the random factors."""

    @property
    def none(self) -> bool:
        """Whether all workers are alike."""
        return not self.jitter and (not self.slow_share or self.slow_factor == 1.0)

    def __post_init__(self) -> None:
        not_negative("jitter", self.jitter)
        fraction("slow_share", self.slow_share)
        positive("slow_factor", self.slow_factor)
        not_negative("seed", self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One worker's batch, and the model it goes through."""

    samples: int = 512
    """Samples per worker and batch."""
    sample_kb: float = 16.0
    """Size of one sample as it is copied to the device."""
    keys_per_sample: int = 1024
    """Sparse keys of one sample."""
    unique_share: float = 0.3
    """Unique keys of a worker's batch over all its keys."""
    owner_share: float = 0.6
    """Unique keys at an owner over the keys that its requesters sent."""
    shared_share: float = 0.3
    """Share of a batch's working set that the batch before had too."""
    pool_batches: float = 16.0
    """Retrieval `pooled`: batches whose rows, each once, fill the pool on the device. A row that
    none of them has must be read, and another one written."""
    split_growth: float = 0.0
    """Growth of the exchanged rows for each doubling of the micro-batches (keys met again), where
    each micro-batch asks for its own."""
    merge_from_host: float = 1.0
    """Of the rows that are merged and only other groups touched: the share that must be read from
    host memory and written back, as NestPipe does it (2D parallelism)."""
    dim: int = 512
    """Width of a row."""
    weight_bytes: int = 4
    """Bytes of one weight."""
    state_bytes: int = 4
    """Bytes of optimizer state per row."""
    gflop_per_sample: float = 100.0
    """Dense forward and backward of one sample, in 1e9 operations."""
    dense_mb: float = 0.0
    """Dense parameters whose reduction is not hidden under the backward pass."""

    def __post_init__(self) -> None:
        for name in ("samples", "keys_per_sample", "dim", "weight_bytes"):
            positive(name, getattr(self, name))
        for name in ("gflop_per_sample", "pool_batches"):
            positive(name, getattr(self, name))
        for name in ("sample_kb", "state_bytes", "split_growth", "dense_mb"):
            not_negative(name, getattr(self, name))
        for name in ("unique_share", "owner_share", "shared_share", "merge_from_host"):
            fraction(name, getattr(self, name))

    @property
    def keys(self) -> float:
        return self.samples * self.keys_per_sample

    @property
    def unique_keys(self) -> float:
        """Keys that a worker asks for, each once."""
        return self.keys * self.unique_share

    @property
    def owned_rows(self) -> float:
        """Rows that an owner holds for a batch; owners are taken as equally loaded."""
        return self.unique_keys * self.owner_share

    @property
    def row_bytes(self) -> float:
        return self.dim * self.weight_bytes

    @property
    def stored_row_bytes(self) -> float:
        """A row with the optimizer state that travels with it."""
        return self.row_bytes + self.state_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A hardware file: the machines and the work."""

    compute: Compute = field(default_factory=Compute)
    host: Host = field(default_factory=Host)
    network: Network = field(default_factory=Network)
    stragglers: Stragglers = field(default_factory=Stragglers)
    workload: Workload = field(default_factory=Workload)


def shards_of(workers: int, groups: int) -> int:
    """Workers in each group that shares one copy of the tables."""
    if workers < 1:
        raise ConfigError(f"cannot simulate {workers} workers; ask for at least 1")
    if groups < 1 or workers % groups:
        raise ConfigError(
            f"{workers} workers cannot form {groups} equal groups; "
            "choose a number of groups that divides them"
        )
    return workers // groups


def to_toml(cluster: Cluster) -> str:
    """The cluster as a hardware file that reads back."""
    lines: list[str] = []
    sections = cast("dict[str, dict[str, float | tuple[float, ...]]]", asdict(cluster))
    for section, entries in sections.items():
        lines.append(f"[{section}]")
        for name, value in entries.items():
            lines.append(f"{name} = {list(value) if isinstance(value, tuple) else value}")
        lines.append("")
    return "\n".join(lines)


# The cost of an op.


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
    moved = moved_share(work, shape)
    foreign = work.merge_from_host * foreign_rows(work, shape, scale.groups)
    row_bytes = (work.owned_rows * moved + foreign) * work.stored_row_bytes
    return {
        K.PREFETCH: busy * 1000 * work.samples / host.samples_per_s,
        K.COPY: busy * _transfer_ms(work.samples * work.sample_kb * 1024, host.pcie_gb_per_s),
        K.RETRIEVE: busy * _transfer_ms(row_bytes, host.gather_gb_per_s),
        K.WRITEBACK: busy * _transfer_ms(row_bytes, host.scatter_gb_per_s),
    }


def moved_share(work: Workload, shape: Shape) -> float:
    """Of a batch's rows, the part that is read from host memory; as many are written there.

    A pool of the rows of n batches lacks what batch n+1 adds to them; one of a single batch would
    lack what the buffer before lacks.
    """
    if shape.pooled:
        n = work.pool_batches
        return distinct_growth(work, n + 1) - distinct_growth(work, n)
    return 1 - work.shared_share if shape.retrieval is Retrieval.NEW else 1.0


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
        K.NORM: _all_reduce_ms(network, 0, scale.shards, node),
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
