"""How to train: the settings of a run, besides its data and its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nestpipe.config import positive
from nestpipe.deprecated import renamed_fields
from nestpipe.errors import ConfigError
from nestpipe.schedule import (
    PLANS,
    Exchange,
    Merge,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    usable,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSettings:
    """Two-dimensional parallelism: every group of ranks has all tables, sharded among them."""

    groups: int = 1
    """Groups of ranks; keys, rows and row gradients never leave one."""
    merge: Literal["exact", "averaged"] = "exact"
    """How groups keep together: `exact` sums the row gradients of every batch over all groups;
    `averaged` lets each group train on its own samples, and averages the rows now and then."""
    merge_every: int = 1
    """averaged: batches from one time to the next."""
    layout: Literal["auto", "replicas", "shards"] = "auto"
    """Which ranks are neighbours: the replicas of a shard, or the shards of a group; `auto`:
    replicas, where they fit into one machine."""

    def __post_init__(self) -> None:
        positive("groups", self.groups)
        positive("merge_every", self.merge_every)
        if self.merge == "exact" and self.merge_every != 1:
            raise ConfigError(
                f"merge_every is {self.merge_every} and merge 'exact'; exact groups merge every "
                "batch, so leave it at 1, or use merge 'averaged'"
            )


@renamed_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """The schedule of a run: how fast training is.

    The plan and the retrieval never change what comes out; micro-batches, their cut, their
    sizes and their exchange change only the order of sums; a wire of bfloat16 rounds.
    """

    plan: str = "serial"
    """How ops overlap: one of the plans of `nestpipe draw`."""
    micro_batches: int = 1
    """Slices of one batch inside a frozen window; 1 turns the inner pipeline off."""
    retrieval: Literal["whole", "new"] = "whole"
    """Rows fetched per batch: the whole working set, or only what the device does not hold."""
    exchange: Literal["micro", "window"] = "micro"
    """Between ranks: each micro-batch asks for its own rows, or only for those that no earlier
    one of the batch has, and sends a row's gradient after its last use."""
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of rows and row gradients between ranks; bfloat16 halves what is sent."""
    micro_batching: Literal["contiguous", "random", "clustered"] = "contiguous"
    """How samples are dealt to micro-batches; `clustered`: those that share keys meet."""
    first: float = 1.0
    """Size of the first micro-batch over that of those in the middle: no compute hides the exchange
    of its rows."""
    last: float = 1.0
    """Size of the last one: none hides the exchange of its gradients, but its backward pass hides
    the sum of dense gradients."""

    speculative_rows: bool = False
    """nested: send the rows of the first micro-batch under the last one of the batch before, and
    then, when that is updated, once more those that it changed."""
    buffers: int = 2
    """dual_buffer and nested, of new rows: buffers of rows on the device. With 3, rows are written
    back while the next are read, and a row that skips one batch stays on the device."""

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise ConfigError(f"plan is {self.plan!r}; use one of {', '.join(PLANS)}")
        positive("micro_batches", self.micro_batches)
        positive("first", self.first)
        positive("last", self.last)
        if self.buffers not in (2, 3):
            raise ConfigError(f"buffers is {self.buffers}; use 2 or 3")
        whole = self.retrieval != "new"
        if self.buffers == 3 and whole and plan(self.plan).shape.refreshes_ahead:
            raise ConfigError(
                f"buffers is 3 and retrieval {self.retrieval!r}; a third buffer is for rows that "
                "are not read again, so set retrieval = 'new', or two buffers"
            )

    def make_plan(self, parallel: ParallelSettings | None = None) -> Plan:
        """The plan, with what several groups of ranks add to it."""
        replicas = parallel is not None and parallel.groups > 1
        options = PlanOptions(
            micro_batches=self.micro_batches,
            retrieval=Retrieval(self.retrieval),
            exchange=Exchange(self.exchange),
            merge_every=parallel.merge_every if parallel is not None and replicas else 0,
            speculative_rows=self.speculative_rows,
            buffers=self.buffers,
            merge=Merge(parallel.merge) if parallel is not None and replicas else Merge.AVERAGED,
        )
        return plan(self.plan, usable(self.plan, options))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """The optimizer of table rows."""

    optimizer: Literal[
        "sgd",
        "adagrad",
        "rowwise_adagrad",
        "adam",
        "momentum_scaled_rowwise_adagrad",
        "touch_scaled_rowwise_adagrad",
    ] = "rowwise_adagrad"
    lr: float = 0.05
    """Learning rate."""
    eps: float = 1e-8
    """Added to the root of AdaGrad's and Adam's second moment."""
    scale: float = 0.0
    """Scaled AdaGrad: what the second moment is divided by; 0: the number of averaged groups."""

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        positive("eps", self.eps)
        if self.scale != 0 and self.scale < 1:
            raise ConfigError(f"scale is {self.scale}; give at least 1, or 0 for the groups")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSettings:
    """The optimizer of everything that is not a row."""

    optimizer: Literal["sgd", "adagrad", "adam"] = "adam"
    lr: float = 1e-3
    """Learning rate."""

    def __post_init__(self) -> None:
        positive("lr", self.lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """Everything about a run that is not its data or its model."""

    batch: int = 512
    """Samples of a global batch, over all ranks."""
    seed: int = 0
    """Same seed, same data, same ranks, same micro-batches: the same bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where rows and dense weights are computed; `auto`: a GPU if there is one."""
    native: bool = True
    """Keep rows in the native host store; off: in its plain twin, slow and readable."""
    in_place: bool = True
    """Remember where rows of the batches in flight live, so that writing them needs no search; with
    one batch at a time on the host, use them right there. The result is the same, bit for bit."""
    pin_rows: bool = True
    """With a GPU and `in_place`: pin the rows in host memory, so that the GPU reads and writes them
    there itself. The system cannot use that memory for anything else. The result is the same."""
    store_threads: int = 0
    """Threads of the host store; 0: as many as torch uses."""
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    rows: RowSettings = field(default_factory=RowSettings)
    dense: DenseSettings = field(default_factory=DenseSettings)

    def __post_init__(self) -> None:
        positive("batch", self.batch)
