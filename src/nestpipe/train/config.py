"""How to train: the settings of a trainer, and the sections of a config file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from nestpipe.checkpoint.folder import Retention
from nestpipe.comm import DEFAULT_TIMEOUT_S
from nestpipe.config import RateOptions, RowPolicy, Table, not_negative, positive
from nestpipe.config.load import finite, fit_leaf, known_types, memory_size
from nestpipe.config.sections import first_match, rates_of, refuse_idle
from nestpipe.dashboard.record import FOLDER as RECORD_FOLDER
from nestpipe.data import DataConfig
from nestpipe.deprecated import renamed_fields
from nestpipe.errors import ConfigError
from nestpipe.models import EncoderOptions
from nestpipe.models.protocol import is_own
from nestpipe.schedule import (
    PLANS,
    Merge,
    PipelineOptions,
    Plan,
    PlanOptions,
    ReplicaOptions,
    Retrieval,
    plan,
    plan_options_of,
    usable,
    with_default,
)

MOST_TIMEOUT_S = 1e6
"""Eleven days: longer is a hang."""
MOST_THREADS = 1024
"""Of a rank: more would use up what the system has."""
AUTO = "auto"
"""The plan that leaves the choice to the run."""
AUTO_MICRO_BATCHES = 4
"""Enough for dense compute to hide most of an exchange, few enough to keep its messages long."""


@dataclass(frozen=True, kw_only=True)
class ParallelSettings(ReplicaOptions):
    """Two-dimensional parallelism: every group of ranks has all tables, sharded among them."""

    groups: int = 1
    """Groups of ranks; keys, rows and row gradients never leave one."""
    # Groups are exact by default: then they train as one group does.
    merge: Merge = with_default(ReplicaOptions, "merge", Merge.EXACT)
    merge_every: int = with_default(ReplicaOptions, "merge_every", 1)
    layout: Literal["auto", "replicas", "shards"] = "auto"
    """Which ranks are neighbours: the replicas of a shard, or the shards of a group; `auto`:
    replicas, where they fit into one machine."""
    dense: Literal["replicated", "sharded"] = "replicated"
    """The dense half: all of it on every rank, or a part of each parameter and of its optimizer
    state on each, by torch's FSDP. It changes only the order of sums."""

    def __post_init__(self) -> None:
        known_types(self)
        super().__post_init__()
        positive("groups", self.groups)
        positive("merge_every", self.merge_every)


@renamed_fields
@dataclass(frozen=True, kw_only=True)
class PipelineSettings(PipelineOptions):
    """The schedule of a run: how fast training is.

    The plan, the retrieval, the stages, speculative rows and buffers never change what comes out,
    but a pool turns `owner_sums` off. That, micro-batches, how samples are dealt to them, their
    sizes and their exchange change only the order of sums; a `comm_dtype` of bfloat16 rounds.
    """

    plan: str = AUTO
    """How ops overlap: one of the plans of `nestpipe draw`, or `auto`: the fastest for this device
    and number of ranks. The run says what it chose."""
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of rows and row gradients between ranks; bfloat16 halves what is sent."""
    owner_sums: Literal["auto", "off"] = "auto"
    """Whether owners add up the rows of a pooled feature before they send them, where that is fewer
    bytes; never with retrieval `pooled`. It changes the order of sums."""
    micro_batching: Literal["contiguous", "random", "clustered"] = "contiguous"
    """How samples are dealt to micro-batches; `clustered` puts those that share keys together."""
    balance: Literal["samples", "work"] = "samples"
    """What ranks and micro-batches have as much of: samples, or `work`, by the lengths of their
    histories. It is for models that know their work, and changes the order of sums."""
    first: float = 1.0
    """Size of the first micro-batch over that of those in the middle: no compute hides the exchange
    of its rows."""
    last: float = 1.0
    """Size of the last one: none hides the exchange of its gradients, but its backward pass hides
    the sum of dense gradients."""

    def __post_init__(self) -> None:
        known_types(self)
        super().__post_init__()
        if self.plan not in (AUTO, *PLANS):
            raise ConfigError(f"plan is {self.plan!r}; use one of {', '.join((AUTO, *PLANS))}")
        positive("first", self.first)
        positive("last", self.last)
        whole = self.retrieval is Retrieval.WHOLE
        refreshes = self.plan != AUTO and plan(self.plan).shape.refreshes_ahead
        if self.buffers == 3 and whole and refreshes:
            raise ConfigError(
                "buffers is 3 and retrieval 'whole'; a third buffer is for rows that are not read "
                "again, so set retrieval = 'new', or two buffers"
            )

    @property
    def owners_add_up(self) -> bool:
        """Whether `owner_sums` applies."""
        return self.owner_sums == "auto" and self.retrieval is not Retrieval.POOLED

    def make_plan(self, parallel: ParallelSettings | None = None) -> Plan:
        """The plan, with what several groups of ranks add to it; `choose_pipeline` comes first."""
        assert self.plan != AUTO, "nobody has chosen a plan"
        replicas = [parallel] if parallel is not None and parallel.groups > 1 else []
        options = PlanOptions(**dict(plan_options_of(self, *replicas)))
        return plan(self.plan, usable(self.plan, options))


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """The pipeline of a run, and a sentence that says why it is the one."""

    pipeline: PipelineSettings
    reason: str


def choose_pipeline(
    asked: PipelineSettings, device: str, ranks: int, *, sharded: bool = False
) -> PipelineChoice:
    """What `auto` stands for on that type of device, with that number of ranks in all.

    Every rank comes to the same answer. Settings that were changed from their defaults stay. Among
    GPUs a `sharded` dense half and the exchange of rows take turns.
    """
    if asked.plan != AUTO:
        return PipelineChoice(asked, f"plan {asked.plan}: as set")
    if device == "cuda" and sharded and ranks > 1:
        return PipelineChoice(
            replace(asked, plan="serial"),
            "plan serial: among GPUs the collectives of a sharded dense half must not overlap "
            "others",
        )
    if device == "cuda":
        return _choose_on_gpus(asked, ranks)
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if on_host < ranks:
        chosen = replace(asked, plan="nested", micro_batches=_micro_batches(asked))
        return PipelineChoice(
            chosen,
            f"plan nested, {chosen.micro_batches} micro-batches: compute hides the network between "
            f"hosts; set pipeline.plan for another",
        )
    share = "one rank has" if ranks == 1 else f"{ranks} ranks of one host share"
    return PipelineChoice(
        replace(asked, plan="serial"),
        f"plan serial: without a GPU {share} the same cores for all ops, and there is no network "
        "to hide; set pipeline.plan for another",
    )


def _choose_on_gpus(asked: PipelineSettings, ranks: int) -> PipelineChoice:
    usual = PipelineSettings()
    as_usual = (asked.retrieval, asked.buffers) == (usual.retrieval, usual.buffers)
    pooled = as_usual and not asked.speculative_rows
    retrieval = Retrieval.POOLED if pooled else asked.retrieval
    micro_batches = asked.micro_batches if ranks == 1 else _micro_batches(asked)
    chosen = replace(asked, plan="nested", retrieval=retrieval, micro_batches=micro_batches)
    stay = "rows stay in device memory, " if pooled else ""
    hidden = "compute hides lookup" if ranks == 1 else "compute hides lookup and exchange"
    split = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    return PipelineChoice(
        chosen,
        f"plan nested, retrieval {retrieval}, {split}: on a GPU {stay}{hidden}; set pipeline.plan "
        "for another",
    )


def _micro_batches(asked: PipelineSettings) -> int:
    """As many as asked for; where that is the default, enough to hide an exchange."""
    return asked.micro_batches if asked.micro_batches > 1 else AUTO_MICRO_BATCHES


RowOptimizerName = Literal[
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "adamw",
    "momentum_scaled_rowwise_adagrad",
    "touch_scaled_rowwise_adagrad",
]
DenseOptimizerName = Literal["sgd", "adagrad", "adam", "adamw"]


@dataclass(frozen=True, kw_only=True)
class RowSettings(RateOptions):
    """The optimizer of table rows. `rates` are by table."""

    optimizer: RowOptimizerName = "rowwise_adagrad"
    """How rows move: docs/optimizers.md."""
    lr: float = 0.05
    """Learning rate."""
    eps: float = 1e-8
    """Added to the root of AdaGrad's and Adam's second moment."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """adam, adamw: how much of the first and second moment stays in a step."""
    weight_decay: float = 0.0
    """Decoupled, with any optimizer: a row that a batch touches loses lr x this of its weights; the
    others lose nothing."""
    scale: float = 0.0
    """Scaled AdaGrad: what the second moment is divided by; 0: the number of averaged groups."""
    frozen: tuple[str, ...] = ()
    """Tables, by name or pattern, whose rows are read, and never updated or inserted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("lr", self.lr)
        positive("eps", self.eps)
        _check_moments(self.optimizer, self.lr, self.betas, self.weight_decay)
        if self.scale != 0 and self.scale < 1:
            raise ConfigError(f"scale is {self.scale}; give at least 1, or 0 for the groups")

    def tuned(self, tables: Sequence[Table]) -> list[Table]:
        """The tables, each with its rate and whether it is trained, where these settings say so."""
        names, patterns = [table.name for table in tables], rates_of(self.rates)
        refuse_idle("rows.rates", patterns, names, "table")
        refuse_idle("rows.frozen", self.frozen, names, "table")
        frozen = dict.fromkeys(self.frozen, 1.0)
        return [
            replace(
                table,
                lr=first_match(patterns, table.name) or table.lr,
                trainable=table.trainable and first_match(frozen, table.name) is None,
            )
            for table in tables
        ]


@dataclass(frozen=True, kw_only=True)
class DenseSettings(RateOptions):
    """The optimizer of everything that is not a row: torch's own. `rates` are by parameter."""

    optimizer: DenseOptimizerName = "adam"
    """The class of `torch.optim`."""
    lr: float = 1e-3
    """Learning rate."""
    eps: float = 0.0
    """adagrad, adam, adamw: added to the root of the second moment; 0: torch's default."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """adam, adamw: how much of the first and second moment stays in a step."""
    weight_decay: float = 0.0
    """As torch has it: decoupled with adamw, else added to the gradient."""
    no_decay: tuple[str, ...] = ()
    """Parameters, by name or pattern, that do not decay, such as `["*.bias"]`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("lr", self.lr)
        not_negative("eps", self.eps)
        _check_moments(self.optimizer, self.lr, self.betas, self.weight_decay)


def _check_moments(
    optimizer: str, lr: float, betas: tuple[float, ...], weight_decay: float
) -> None:
    finite("lr", lr)
    finite("weight_decay", weight_decay)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas is {list(betas)}; give two numbers from 0 to below 1")
    not_negative("weight_decay", weight_decay)
    if lr * weight_decay >= 1:
        raise ConfigError(
            f"weight_decay is {weight_decay} and lr {lr}: a step would take all of a weight; give "
            f"less than {1 / lr:g}"
        )
    if optimizer == "adamw" and not weight_decay:
        raise ConfigError(
            "weight_decay is 0 and optimizer 'adamw'; give one such as 0.01, or use 'adam'"
        )


@dataclass(frozen=True, kw_only=True)
class ExecutionSettings:
    """What every rank computes with, from a config file or from Python."""

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
    device_memory: str = "auto"
    """With retrieval `pooled`: memory for rows on the device of each rank; a size such as `40GB`, a
    share of what is free such as `0.4`, or `auto`, which takes half of it."""
    snapshot_on_device: bool = True
    """For a checkpoint in the background: copy the touched rows of a pool, and dense weights, on
    their device, and let its thread bring them to the host. Else training waits until they are
    there. The result is the same, bit for bit."""
    cuda_graphs: bool = True
    """On a GPU that routes its own keys: replay forward and backward of models that can be captured
    as one CUDA graph. The result is the same."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the model's products; `bf16`: torch's autocast. Weights, rows, their gradients and losses
    are float32 either way."""
    peak_tflops: float = 0.0
    """What the device can do at most, for the MFU that the run prints; 0: by the GPU's name."""
    store_threads: int = 0
    """Threads of the host store; 0: as many as torch uses."""
    store: Literal["host", "ssd"] = "host"
    """Where rows live that no batch uses: in host memory, or in a file with the hot ones in memory.
    The result is the same, bit for bit."""
    store_path: str = ""
    """With store `ssd`: a folder on a local SSD. The file there is scratch space and goes with the
    run."""
    host_memory: str = "auto"
    """With store `ssd`: memory of each rank for hot rows; a size such as `8GB`, a share of what is
    free such as `0.4`, or `auto`, which takes half of it. The index of keys comes on top."""
    non_finite: Literal["stop", "skip", "clip"] = "stop"
    """When a gradient is NaN or inf. `stop`: end the run and keep the batch; `skip`: that row, or
    all dense weights, get no gradient in this batch; `clip`: such numbers count as 0. A weight that
    float16 cannot hold also ends the run, or else is kept at 65,504."""
    clip_norm: float = 0.0
    """Scale the gradients of a batch down where their global norm is above this, those of rows and
    of dense weights together; 0: never."""
    clip_rows: bool = True
    """clip_norm: off: only dense gradients count and are scaled."""

    lifecycle_every: int = 100
    """Apply row policies every N batches, and earlier where a table may be full before. It has no
    effect on tables without a policy."""

    def __post_init__(self) -> None:
        known_types(self)
        positive("batch", self.batch)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed is {self.seed}; give a whole number of 64 bits")
        positive("lifecycle_every", self.lifecycle_every)
        not_negative("store_threads", self.store_threads)
        not_negative("peak_tflops", self.peak_tflops)
        memory_size("host_memory", self.host_memory, auto=0.5, free=lambda: 1.0)
        if self.store == "ssd" and not self.store_path:
            raise ConfigError(
                "store is 'ssd' but store_path is empty; name a folder on a local SSD there"
            )
        if self.store == "ssd" and not self.native:
            raise ConfigError("store is 'ssd', which needs native code; set native = true")
        not_negative("clip_norm", self.clip_norm)
        finite("clip_norm", self.clip_norm)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(ExecutionSettings):
    """Everything about a trainer that is not its data or its model."""

    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    rows: RowSettings = field(default_factory=RowSettings)
    dense: DenseSettings = field(default_factory=DenseSettings)
    compile: bool = False
    """Compile the dense half by `torch.compile`; a GPU then replays no CUDA graphs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        averaged = self.parallel.groups > 1 and self.parallel.merge is Merge.AVERAGED
        if self.clips_rows and averaged:
            raise ConfigError(
                f"clip_norm is {self.clip_norm} and parallel.merge 'averaged', where groups have "
                "gradients of their own; set merge = 'exact', or clip_rows = false"
            )
        if self.compile and self.parallel.dense == "sharded":
            raise ConfigError(
                "compile is true and parallel.dense 'sharded', whose parameters come and go inside "
                "the model; set compile = false, or dense = 'replicated'"
            )

    @property
    def clips_rows(self) -> bool:
        """Whether row gradients are clipped, by a norm that all ranks must know."""
        return self.clip_norm > 0 and self.clip_rows


# The sections of a config file.


LoggerName = Literal["tensorboard", "jsonl", "wandb", "mlflow"]


def known_logger(name: str, where: str) -> str:
    """A name that `run.loggers` may have: a word, or the factory of a user's own."""
    return name if is_own(name) else str(fit_leaf(LoggerName, name, where))


ModelKind = Literal["auto", "dlrm", "logistic", "hstu", "ranker"]
"""Models that are shipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """`[model]`: which model, and how large."""

    kind: str = "auto"
    """`auto`: hstu (next item) where the data has histories only, else dlrm (clicks).
    `logistic` is the baseline of click models; `ranker`, for histories, is served in two legs. Or
    your own: `package.module:factory`, looked for in the working directory, too."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What your own model gets, as `[model.config]`."""
    dim: int = 32
    """Width of a row."""
    init_std: float = 0.02
    """Spread of a new row's weights."""
    bottom: tuple[int, ...] = (64, 32)
    """dlrm: hidden layers on the dense features."""
    top: tuple[int, ...] = (128, 64)
    """dlrm: hidden layers on the dot products."""
    blocks: int = 2
    """hstu, ranker: blocks."""
    heads: int = 2
    """hstu, ranker: attention heads."""
    attention_dim: int = 32
    """hstu, ranker: width of a head's queries, keys and values."""
    max_len: int = 200
    """hstu, ranker: longest history that is expected."""
    num_items: int = 0
    """hstu, ranker: items are keys from 1 to this; 0: those that the data has, whatever keys."""
    negatives: int = 128
    """hstu, ranker: negative samples per sample."""
    positives: int = 4
    """ranker: positive candidates, the items that follow a history."""
    negative_pool: int = 0
    """hstu: draw N negatives per sample, of which each position takes about `negatives` of its own;
    0: all positions of a sample share them."""
    temperature: float = 0.05
    """hstu: what scores are divided by."""
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    compile: bool = False
    """Compile the dense half by `torch.compile`, for training and evaluation. It changes the order
    of sums; a GPU then replays no CUDA graphs."""

    def __post_init__(self) -> None:
        if not is_own(self.kind):
            fit_leaf(ModelKind, self.kind, "kind")
            if self.config:
                raise ConfigError(
                    f"config has {', '.join(self.config)}, but kind is {self.kind!r}; it is for a "
                    "model of your own, kind = 'package.module:factory'"
                )
        for name in ("dim", "blocks", "heads", "attention_dim", "max_len"):
            positive(name, getattr(self, name))
        for name in ("bottom", "top"):
            for width in getattr(self, name):
                positive(name, width)
        for name in ("negatives", "positives"):
            positive(name, getattr(self, name))
        positive("temperature", self.temperature)
        not_negative("num_items", self.num_items)
        not_negative("negative_pool", self.negative_pool)
        if 0 < self.negative_pool < self.negatives:
            raise ConfigError(
                f"negative_pool is {self.negative_pool}, fewer than the {self.negatives} of "
                "negatives; give more, or 0"
            )
        if self.kind == "ranker" and self.encoder.time == "next":
            raise ConfigError(
                "kind is 'ranker' and encoder.time 'next', which is for retrieval: candidates have "
                "the request's time; set encoder.time = 'own'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleConfig(RowPolicy):
    """`[lifecycle]`: which keys get a row and which rows leave; without it tables only grow."""

    tables: tuple[str, ...] = ()
    """Names of the tables that it is for; empty: all."""

    def applied(self, tables: Sequence[Table]) -> list[Table]:
        """The tables with this policy; a section that says nothing leaves them as they are."""
        names = [table.name for table in tables]
        if unknown := [name for name in self.tables if name not in names]:
            raise ConfigError(
                f"lifecycle.tables names {unknown[0]!r}, which is no table; the tables are "
                f"{', '.join(names)}"
            )
        policy = {known.name: getattr(self, known.name) for known in fields(RowPolicy)}
        if RowPolicy(**policy) == RowPolicy():
            return list(tables)
        chosen = self.tables or names
        return [replace(t, **policy) if t.name in chosen else t for t in tables]


@dataclass(frozen=True, kw_only=True)
class RunConfig(ExecutionSettings):
    """`[run]`: what to compute with, how long, and what is written on the way."""

    epochs: int = 1
    """Passes over the data."""
    steps: int = 0
    """Stop after this many batches; 0: only after the epochs."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that a rank waits for its peers in one collective before it gives up."""
    eval_every: int = 0
    """Evaluate every N batches, and at the end; 0: after each epoch."""
    eval_split: Literal["auto", "validation", "test"] = "auto"
    """What to evaluate on; `auto`: validation, or test where the data has no such split. The run
    says which."""
    early_stop: str = ""
    """End where this metric of the evaluation, e.g. `auc`, has not become better for `patience`
    evaluations; empty: never. The checkpoint of the best one is kept."""
    patience: int = 3
    """early_stop: evaluations in a row without a better one."""
    min_delta: float = 0.0
    """early_stop: by how much a better one is better."""
    checkpoint: str = ""
    """Folder for checkpoints; empty: none."""
    checkpoint_every: int = 0
    """Write a checkpoint every N batches; 0: only at the end."""
    incremental: bool = False
    """Checkpoints hold only rows touched since the one before; else all are full."""
    full_every: int = 10
    """incremental: write a full checkpoint after every N increments; 0: never."""
    keep_last: int = 0
    """Keep the newest N checkpoints; 0: no rule. Without any rule all are kept."""
    keep_hours: float = 0.0
    """Keep checkpoints not older than this; 0: no rule."""
    keep_best: str = ""
    """Keep also the checkpoint with the best value of this metric, e.g. `auc`."""
    grace_s: float = 25.0
    """After SIGTERM, SIGINT or SIGHUP, seconds to finish the batch, save and exit."""
    evicted: str = ""
    """Folder for the keys whose rows leave: a file of JSON lines for each boundary at which some
    did; empty: none."""
    record: str = "auto"
    """Folder for the record that `nestpipe show` and the dashboard read, `off`, or `auto`: the
    folder of checkpoints, or that of logs, where there is one."""
    log: str = ""
    """Folder for logs; empty: none."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """What is written there: `tensorboard`, `jsonl`, and with extras `wandb` and `mlflow`."""
    log_every: int = 50
    """Write AUC and normalised entropy of training every N batches; 0: never."""
    adaptive: bool = False
    """Let micro-batches, their sizes and the pool follow the measured trace while the run goes on.
    What is chosen is recorded; it changes only the order of sums."""
    adaptive_every: int = 32
    """adaptive: batches between two looks at the trace, until nothing more is gained."""
    threads: int = 0
    """Threads of each rank for torch's operations; 0: the cores over the ranks of the machine, or
    OMP_NUM_THREADS where that is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("epochs", self.epochs)
        positive("timeout_s", self.timeout_s)
        if self.timeout_s > MOST_TIMEOUT_S:
            raise ConfigError(f"timeout_s is {self.timeout_s}; give at most {MOST_TIMEOUT_S:,.0f}")
        for name in ("steps", "eval_every", "checkpoint_every", "keep_last", "full_every"):
            not_negative(name, getattr(self, name))
        for name in ("min_delta", "log_every", "threads"):
            not_negative(name, getattr(self, name))
        if self.threads > MOST_THREADS:
            raise ConfigError(f"threads is {self.threads}; give at most {MOST_THREADS:,}")
        for place, name in enumerate(self.loggers):
            known_logger(name, f"loggers[{place}]")
        positive("patience", self.patience)
        if self.adaptive_every < 8:
            raise ConfigError(
                f"adaptive_every is {self.adaptive_every}; give at least 8, for a steady state"
            )
        not_negative("keep_hours", self.keep_hours)
        positive("grace_s", self.grace_s)

    @property
    def record_folder(self) -> Path | None:
        """Where the record of the run goes; None: nowhere."""
        chosen = (self.checkpoint or self.log) if self.record == "auto" else self.record
        return Path(chosen) / RECORD_FOLDER if chosen not in ("", "off") else None

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay when a new one is written."""
        return Retention(
            last=self.keep_last, hours=self.keep_hours, best=self.keep_best or self.early_stop
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """A whole config file; every key has a default that works without any file."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    rows: RowSettings = field(default_factory=RowSettings)
    dense: DenseSettings = field(default_factory=DenseSettings)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)

    def settings(self) -> TrainSettings:
        shared = {known.name: getattr(self.run, known.name) for known in fields(ExecutionSettings)}
        return TrainSettings(
            **shared,
            pipeline=self.pipeline,
            parallel=self.parallel,
            rows=self.rows,
            dense=self.dense,
            compile=self.model.compile,
        )
