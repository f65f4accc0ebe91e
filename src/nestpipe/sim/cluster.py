"""What a simulation needs to know: the machines, and the work that one worker has per batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import cast

from nestpipe.config import fraction, not_negative, positive
from nestpipe.errors import ConfigError


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
        for name in ("samples", "keys_per_sample", "dim", "weight_bytes", "gflop_per_sample"):
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
