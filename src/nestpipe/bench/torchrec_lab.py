# pyright: reportMissingImports=false
"""NestPipe beside TorchRec: the lab configurations A to D and `paper` on one GPU, timed alike.

TorchRec's train pipelines are the peer of the lab comparison and of `nestpipe bench dlrm`. They run
in processes of their own, `python -m nestpipe.bench.torchrec_lab FOLDER`, with packages from a
folder of their own on PYTHONPATH. `tools/lab.py` brings them to the machine and calls this.

In the lab, batches and dense layers are those of `bench/pipeline_rank.py`. The table is sharded by
rows, on a GPU in host memory behind FBGEMM's device cache. The cache holds a share of the rows, and
every share that is asked for is timed with every pipeline.

The folder holds `peer.json`; rank 0 adds a line to `readings.jsonl` after each pipeline. A folder
of `run_jobs` holds jobs of the DLRM instead: its tables fit into device memory.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from socket import socket
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.bench.dlrm import BenchDlrm, DlrmCase
from nestpipe.bench.dlrm import make_batches as make_dlrm_batches
from nestpipe.bench.machines import (
    TASK,
    Job,
    do_jobs,
    launch_on_one_gpu,
    look_like_a_host,
    start_ranks,
)
from nestpipe.bench.pipeline_cases import (
    BASELINE_FORMS,
    EXACT_PLANS,
    LAST_STEPS,
    TIMED_STEPS,
    WARM_STEPS,
    PipelineCase,
    SerialLoop,
    Variant,
    case_of,
    check_names,
    serial_loops,
    steady,
    variant_of,
)
from nestpipe.bench.pipeline_rank import (
    Blocks,
    make_batches,
    make_model,
    measure_rounds,
    read_rounds,
)
from nestpipe.comm import launch
from nestpipe.errors import ConfigError
from nestpipe.schedule import Kind
from nestpipe.trace import Trace
from nestpipe.train.config import DenseSettings, RowSettings

# pyright: reportMissingImports=false


MODULE = "nestpipe.bench.torchrec_lab"
FEATURE, TABLE = "history", "item_rows"
MEMORY_PER_RANK = 60 << 30
"""Bytes that the planner may give to a table, on the device and on the host."""
OPTIMIZERS = {"rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adam": "ADAM", "sgd": "EXACT_SGD"}
"""FBGEMM's names of row optimizers."""
CPU_PIPELINES = ("TrainPipelineBase", "TrainPipelineSparseDist")
CUDA_PIPELINES = ("TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist")


@dataclass(frozen=True, slots=True)
class PeerTask:
    """What to time."""

    case: PipelineCase
    shares: tuple[float, ...]
    """Parts of the rows that the device cache holds, timed one after the other."""
    rounds: int
    steps: int
    """Steps on the clock in each round."""

    def write(self, folder: Path) -> None:
        (folder / "peer.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> PeerTask:
        given = json.loads((folder / "peer.json").read_text())
        case = PipelineCase(**given["case"])
        return cls(case, tuple(given["shares"]), given["rounds"], given["steps"])


@dataclass(frozen=True, slots=True)
class PeerReading:
    """The rounds of one pipeline with one size of the cache."""

    pipeline: str
    share: float
    rounds_ms: tuple[float, ...]
    """The mean step of each round."""


def read_readings(folder: Path) -> list[PeerReading]:
    """What rank 0 has timed; all that was done before a failure counts."""
    file = folder / "readings.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [PeerReading(r["pipeline"], r["share"], tuple(r["rounds_ms"])) for r in found]


class _SequenceModel(nn.Module):
    """The rows of every key, then the dense layers of the case; returns what a pipeline expects."""

    def __init__(self, case: PipelineCase, embeddings: nn.Module) -> None:
        super().__init__()
        dense = make_model(case)
        assert isinstance(dense, Blocks), f"no TorchRec twin of model {case.model!r}"
        self.embeddings, self.dense = embeddings, dense
        self.samples, self.autocast = case.batch, case.device == "cuda"

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor]]:
        rows_TD = self.embeddings(batch.history)[FEATURE].values()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            logits_B = self.dense.logits(rows_TD, self.samples)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B.float(), batch.label_B)
        return loss, (loss.detach(),)


def shard(case: PipelineCase, share: float, device: torch.device) -> nn.Module:
    """The case as a TorchRec model; rows and dense gradients are summed over all ranks."""
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import CacheParams

    table = EmbeddingConfig(
        name=TABLE, embedding_dim=case.dim, num_embeddings=case.rows, feature_names=[FEATURE]
    )
    model = _SequenceModel(case, EmbeddingCollection(device=torch.device("meta"), tables=[table]))
    model.dense.to(device)
    cached = device.type == "cuda"
    constraints = ParameterConstraints(
        sharding_types=["row_wise"],
        compute_kernels=["fused_uvm_caching" if cached else "fused"],
        cache_params=CacheParams(load_factor=share) if cached else None,
    )
    return _sharded(model, [_sharder(case)], {TABLE: constraints}, device)


def _sharded(
    model: nn.Module, sharders: list[Any], constraints: Mapping[str, Any], device: torch.device
) -> nn.Module:
    """The model with its tables on the ranks where the constraints allow them."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=1,
        compute_device=device.type,
        hbm_cap=MEMORY_PER_RANK,
        ddr_cap=MEMORY_PER_RANK,
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints=dict(constraints))
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)


def _sharder(case: PipelineCase) -> object:
    """Deduplicated keys, the row optimizer of the case, and its numbers between ranks."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder

    fused: dict[str, object] = {
        "optimizer": EmbOptimType[OPTIMIZERS[case.optimizer]],
        "learning_rate": RowSettings().lr,
    }
    on_gpu = case.device == "cuda"
    if on_gpu:
        fused["prefetch_pipeline"] = True
    return EmbeddingCollectionSharder(
        # FBGEMM has no dedup for a CPU.
        fused_params=fused,
        qcomm_codecs_registry=_bfloat16_codecs() if case.comm_dtype == "bfloat16" else None,
        use_index_dedup=on_gpu,
    )


def _bfloat16_codecs() -> Any:
    from torchrec.distributed import fbgemm_qcomm_codec as qcomm

    half = qcomm.CommType.BF16
    config = qcomm.QCommsConfig(forward_precision=half, backward_precision=half)
    return qcomm.get_qcomm_codecs_registry(config)


def peer_batches(case: PipelineCase, rank: int) -> list[Any]:
    """The batches of the case as TorchRec takes them, on a GPU in pinned memory."""
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    @dataclass
    class PeerBatch(Pipelineable):
        history: Any  # not `keys`: the tracer of a pipeline takes that for a method
        label_B: Tensor

        def to(self, device: torch.device, non_blocking: bool = False) -> PeerBatch:
            return PeerBatch(
                self.history.to(device, non_blocking), self.label_B.to(device, non_blocking=True)
            )

        def record_stream(self, stream: Any) -> None:
            self.history.record_stream(stream)
            self.label_B.record_stream(stream)

        def pin_memory(self) -> PeerBatch:
            return PeerBatch(self.history.pin_memory(), self.label_B.pin_memory())

    def made(batch: Batch) -> PeerBatch:
        history = batch.sparse[FEATURE]
        lengths_B = history.lengths.to(torch.int32)
        keys = KeyedJaggedTensor(keys=[FEATURE], values=history.values, lengths=lengths_B)
        found = PeerBatch(keys, batch.dense["label"])
        return found.pin_memory() if case.device == "cuda" else found

    return [made(batch) for batch in make_batches(case, rank)]


def time_share(
    task: PeerTask, share: float, batches: Sequence[Any], device: torch.device
) -> Iterator[PeerReading]:
    """Time every pipeline with one size of the cache."""
    model = shard(task.case, share, device)
    for name in CUDA_PIPELINES if device.type == "cuda" else CPU_PIPELINES:
        rounds = time_pipeline(name, model, batches, (WARM_STEPS, task.rounds, task.steps), device)
        yield PeerReading(name, share, rounds)


def time_pipeline(
    name: str,
    model: nn.Module,
    batches: Sequence[Any],
    sizes: tuple[int, int, int],
    device: torch.device,
) -> tuple[float, ...]:
    """The mean step in ms of each round; `sizes` are warm-up steps, rounds and steps of a round."""
    from torchrec.distributed import train_pipeline
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    warm, rounds, steps = sizes
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    lr = DenseSettings().lr
    optimizer = KeyedOptimizerWrapper(dense, lambda given: torch.optim.SGD(given, lr=lr))
    pipeline = getattr(train_pipeline, name)(model, optimizer, device)
    source = cycle(batches)
    for _ in range(warm):
        pipeline.progress(source)
    return tuple(_time_round(pipeline, source, steps, device) for _ in range(rounds))


def _time_round(pipeline: Any, source: Iterator[Any], steps: int, device: torch.device) -> float:
    """The mean step in ms; the device is empty at both ends."""
    begin = _meet(device)
    for _ in range(steps):
        pipeline.progress(source)
    return (_meet(device) - begin) * 1e3 / steps


def _meet(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter()


def run_rank(folder: Path) -> None:
    """One rank: every share of the cache, every pipeline."""
    task = PeerTask.read(folder)
    device = _connect(task.case.device)
    batches = peer_batches(task.case, dist.get_rank())
    for share in task.shares:
        for reading in time_share(task, share, batches, device):
            if dist.get_rank() == 0:
                with (folder / "readings.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(reading)) + "\n")
                sys.stderr.write(f"{reading}\n")
        # Tables of several shares do not fit at once.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _connect(device_type: str) -> torch.device:
    """Join the ranks; to TorchRec each is a host of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    look_like_a_host()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


# The DLRM: pooled tables in device memory, no cache.


def peer_dlrm(case: DlrmCase, device: torch.device) -> nn.Module:
    """The case as a TorchRec model, sharded as ours is."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.types import ParameterConstraints

    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=case.dim, num_embeddings=case.rows, feature_names=[name]
        )
        for name in case.names
    ]
    embeddings = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    model = _PooledModel(case, embeddings)
    model.dense.to(device)
    constraints = ParameterConstraints(
        sharding_types=[{"table": "table_wise", "rows": "row_wise"}[case.placement]],
        compute_kernels=["fused"],
    )
    optimizer = EmbOptimType[OPTIMIZERS["rowwise_adagrad"]]
    fused = {"optimizer": optimizer, "learning_rate": RowSettings().lr}
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=fused)]
    return _sharded(model, sharders, dict.fromkeys(case.names, constraints), device)


class _PooledModel(nn.Module):
    """Pooled rows of every feature, then the layers of our DLRM."""

    def __init__(self, case: DlrmCase, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.dense = embeddings, BenchDlrm(case)
        self.features, self.dim, self.autocast = case.features, case.dim, case.device == "cuda"

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor]]:
        pooled = self.embeddings(batch.sparse).values()
        pooled_BFD = pooled.view(-1, self.features, self.dim)
        dense = self.dense
        assert dense.bottom is not None, "the case has dense features"
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            bottom_BD = dense.bottom(batch.features_BF)
            vectors_BND = torch.cat([bottom_BD[:, None], pooled_BFD.to(bottom_BD.dtype)], 1)
            dots = torch.bmm(vectors_BND, vectors_BND.transpose(1, 2)).flatten(1)
            pairs = dots.index_select(1, dense.get_buffer("_pairs"))
            logits_B = dense.top(torch.cat([bottom_BD, pairs], 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B.float(), batch.label_B)
        return loss, (loss.detach(),)


def pooled_batches(case: DlrmCase, rank: int) -> list[Any]:
    """Our batches as TorchRec takes them, on a GPU in pinned memory."""
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    @dataclass
    class PooledBatch(Pipelineable):
        sparse: Any
        features_BF: Tensor
        label_B: Tensor

        def to(self, device: torch.device, non_blocking: bool = False) -> PooledBatch:
            dense = (self.features_BF, self.label_B)
            moved = (part.to(device, non_blocking=non_blocking) for part in dense)
            return PooledBatch(self.sparse.to(device, non_blocking=non_blocking), *moved)

        def record_stream(self, stream: Any) -> None:
            for part in (self.sparse, self.features_BF, self.label_B):
                part.record_stream(stream)

        def pin_memory(self) -> PooledBatch:
            parts = (self.sparse, self.features_BF, self.label_B)
            return PooledBatch(*(part.pin_memory() for part in parts))

    def made(batch: Batch) -> PooledBatch:
        every = [batch.sparse[name] for name in case.names]
        sparse = KeyedJaggedTensor(
            keys=list(case.names),
            values=torch.cat([keys.values for keys in every]),
            lengths=torch.cat([keys.lengths for keys in every]).to(torch.int32),
        )
        found = PooledBatch(sparse, batch.dense["features"], batch.dense["label"])
        return found.pin_memory() if case.device == "cuda" else found

    return [made(batch) for batch in make_dlrm_batches(case, rank)]


def time_dlrm(device: torch.device, job: Job) -> list[dict[str, Any]]:
    """One pipeline on the case of a job."""
    case, name = DlrmCase.from_json(job["case"]), job["pipeline"]
    model, batches = peer_dlrm(case, device), pooled_batches(case, dist.get_rank())
    sizes = (case.warm, case.rounds, case.steps)
    return [{"form": name, "rounds_ms": time_pipeline(name, model, batches, sizes, device)}]


def run_dlrm(folder: Path) -> None:
    """One rank of the DLRM, which may be the only one."""
    task = start_ranks(folder, MODULE)
    if "RANK" not in os.environ:
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    device = _connect(task["device"])
    do_jobs(folder, partial(time_dlrm, device))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    folder = Path(sys.argv[1])
    if (folder / TASK).exists():
        run_dlrm(folder)
        return
    if "RANK" in os.environ:
        run_rank(folder)
        return
    case = PeerTask.read(folder).case
    command = [sys.executable, "-m", MODULE, str(folder)]
    start = launch_on_one_gpu if case.device == "cuda" else launch
    sys.exit(start(command, case.ranks))


CONFIGS = ("A", "B", "C", "D", "paper")
SHARES = (0.02, 0.1, 0.3)
"""Shares of TorchRec's device cache; the fastest counts."""
TORCHREC, NESTPIPE = "TorchRec", "NestPipe"


@dataclass(frozen=True, slots=True)
class LabReading:
    """One way to run a configuration."""

    system: str
    pipeline: str
    step_ms: float
    """Median of the readings."""
    readings_ms: tuple[float, ...]
    parts_ms: Mapping[str, float]
    """NestPipe: compute, and what else is exposed, of a median step."""

    @property
    def range_ms(self) -> tuple[float, float]:
        """The fastest and the slowest reading."""
        return min(self.readings_ms), max(self.readings_ms)

    def samples_per_s(self, samples: int) -> float:
        return 1000 * samples / self.step_ms


@dataclass(frozen=True, slots=True)
class Peer:
    """Where TorchRec is, and how it is run."""

    site: Path
    """Folder of its packages."""
    shares: tuple[float, ...] = SHARES
    """Parts of the rows that its device cache holds; the fastest counts."""
    limit_s: float = 240.0
    """Seconds after which it is stopped; readings up to then count."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both systems on one configuration."""

    config: str
    case: PipelineCase
    readings: tuple[LabReading, ...]

    def best(self, system: str) -> LabReading | None:
        """The fastest of a system; of ours only what overlaps, `serial` being no contender."""
        found = [r for r in self.readings if r.system == system and "serial" not in r.pipeline]
        return _fastest(found)

    def serial(self, loop: SerialLoop) -> LabReading | None:
        """The fastest run of a baseline."""
        return _fastest([r for r in self.readings if r.pipeline.startswith(f"serial {loop}")])

    def over_serial(self, loop: SerialLoop) -> float | None:
        """Step of the fastest run of a baseline over our best step; None where one is missing."""
        ours, baseline = self.best(NESTPIPE), self.serial(loop)
        return baseline.step_ms / ours.step_ms if ours and baseline else None

    @property
    def ratio(self) -> float | None:
        """Our samples per second over TorchRec's, each at its best; None where one is missing."""
        ours, theirs = self.best(NESTPIPE), self.best(TORCHREC)
        return theirs.step_ms / ours.step_ms if ours and theirs else None

    @property
    def samples(self) -> int:
        return self.case.batch * self.case.ranks

    def as_json(self) -> dict[str, object]:
        return {
            "config": self.config,
            "case": asdict(self.case),
            "ratio": self.ratio,
            "over_strict_serial": self.over_serial(SerialLoop.STRICT),
            "over_async_serial": self.over_serial(SerialLoop.ASYNC),
            "readings": [
                {
                    **asdict(reading),
                    "range_ms": list(reading.range_ms),
                    "samples_per_s": reading.samples_per_s(self.samples),
                }
                for reading in self.readings
            ],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Comparison:
        """Read what `as_json` wrote."""
        readings = tuple(
            LabReading(
                seen["system"],
                seen["pipeline"],
                seen["step_ms"],
                tuple(seen["readings_ms"]),
                seen["parts_ms"],
            )
            for seen in given["readings"]
        )
        return cls(given["config"], PipelineCase(**given["case"]), readings)


def joined_parts(parts: Sequence[Comparison]) -> list[Comparison]:
    """One comparison of each configuration, from runs that each did a part."""
    found: dict[str, Comparison] = {}
    for part in parts:
        before = found.get(part.config)
        seen = part.readings if before is None else (*before.readings, *part.readings)
        found[part.config] = replace(part, readings=seen)
    return list(found.values())


def _fastest(readings: Sequence[LabReading]) -> LabReading | None:
    return min(readings, key=lambda reading: reading.step_ms, default=None)


def lab_case(config: str, steps: int = TIMED_STEPS) -> PipelineCase:
    """The case of a configuration, with `steps` steps on the clock."""
    if config not in CONFIGS:
        raise ConfigError(f"unknown configuration {config!r}; use {', '.join(CONFIGS)}")
    if steps < 1:
        raise ConfigError(f"steps is {steps}; put at least 1 on the clock")
    if config == "paper":
        return replace(case_of(config), steps=WARM_STEPS + steps + LAST_STEPS)
    case = case_of(f"lab_{config.lower()}")
    more = steps - TIMED_STEPS
    return replace(case, steps=case.steps + more, distinct=case.distinct + more)


def lab_variants(
    case: PipelineCase, plans: Sequence[str], forms: Sequence[str], micro_batches: Sequence[int]
) -> list[Variant]:
    """Our runs: each plan in each form, with each number of micro-batches.

    `serial` runs as strict and as async loop.
    """
    check_names(plans, forms)
    sized = [
        replace(case, micro_batches=number) for number in micro_batches
    ]  # refuses what cannot be
    found = [variant_of(of, plan, form) for plan, form, of in product(plans, forms, sized)]
    serial = [variant for variant in found if variant.serial]
    return [*serial_loops(case, serial), *(variant for variant in found if not variant.serial)]


def time_nestpipe(case: PipelineCase, variants: Sequence[Variant]) -> list[LabReading]:
    """Every variant in turns; each reading is a round's, from update to update."""
    timed = case.steps - WARM_STEPS - LAST_STEPS
    with tempfile.TemporaryDirectory(prefix="nestpipe-lab-") as name:
        folder = Path(name)
        measure_rounds(case, variants, folder, hosts=False)
        return [_reading(v, read_rounds(folder, case, 0, v), timed) for v in variants]


def _reading(variant: Variant, rounds: Sequence[Trace], timed: int) -> LabReading:
    steps_ms = tuple(timed_step(trace, WARM_STEPS, timed) for trace in rounds)
    seen, step_ms = steady(rounds), median(steps_ms)
    parts = {"compute": seen.compute, "lookup": seen.lookup, "exchange": seen.exchange}
    early = ", rows early" if variant.speculative_rows else ""
    third = ", 3 buffers" if variant.buffers == 3 else ""
    plan = f"{variant.plan} {variant.loop}" if variant.serial else variant.plan
    return LabReading(
        NESTPIPE,
        f"{plan} {variant.retrieval}, {variant.micro_batches} micro-batches{early}{third}",
        step_ms,
        steps_ms,
        {name: part * step_ms for name, part in {**parts, "idle": seen.idle}.items()},
    )


def timed_step(trace: Trace, warm: int, timed: int) -> float:
    """The mean of `timed` steps after `warm` ones, from update to update of the last rank."""
    ends: dict[int, float] = defaultdict(float)
    for span in trace.spans:
        if span.kind == Kind.UPDATE:
            ends[span.batch] = max(ends[span.batch], span.end)
    return (ends[warm + timed - 1] - ends[warm - 1]) / timed


def time_torchrec(peer: Peer, case: PipelineCase, rounds: int, steps: int) -> list[LabReading]:
    """Every pipeline of TorchRec with every share of its cache; those that ran before a failure.

    The failure itself is on standard error, where the ranks write.
    """
    with tempfile.TemporaryDirectory(prefix="nestpipe-lab-") as name:
        folder = Path(name)
        PeerTask(case, peer.shares, rounds, steps).write(folder)
        command = [sys.executable, "-m", "nestpipe.bench.torchrec_lab", str(folder)]
        paths = [os.environ.get("PYTHONPATH", ""), str(peer.site)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # It talks on standard output, which may be ours for JSON.
        with subprocess.Popen(command, env=environment, stdout=sys.stderr) as ranks:
            try:
                ranks.wait(peer.limit_s)
            except subprocess.TimeoutExpired:
                sys.stderr.write(f"TorchRec took more than {peer.limit_s:.0f} s; stopped\n")
                ranks.terminate()  # its launcher then ends the ranks
        found = read_readings(folder)
    return [
        LabReading(
            TORCHREC,
            f"{seen.pipeline}, cache {100 * seen.share:g} %",
            median(seen.rounds_ms),
            seen.rounds_ms,
            {},
        )
        for seen in found
    ]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the plan table: a plan, or TorchRec, in its fastest form on each workload."""

    name: str
    readings: Mapping[str, LabReading]
    """By workload; without those that it did not run on."""

    def as_json(self) -> dict[str, object]:
        found = {
            config: {
                "step_ms": seen.step_ms,
                "range_ms": list(seen.range_ms),
                "pipeline": seen.pipeline,
            }
            for config, seen in self.readings.items()
        }
        return {"name": self.name, "workloads": found}


def table_variants(case: PipelineCase, forms: Sequence[str]) -> list[Variant]:
    """The runs behind the plan table: overlapping plans in the given forms, baselines in these
    and in those that copy rows.

    `serial` has no use for micro-batches, so it has one.
    """
    plans = [plan for plan in EXACT_PLANS if plan != "serial"]
    return [
        *lab_variants(case, ["serial"], list(dict.fromkeys((*BASELINE_FORMS, *forms))), [1]),
        *lab_variants(case, plans, forms, [case.micro_batches]),
    ]


def plan_table(results: Sequence[Comparison]) -> list[TableRow]:
    """The fastest form of each plan and of TorchRec, by the median, on every workload."""
    starts = {
        **{f"{loop} serial": (NESTPIPE, f"serial {loop} ") for loop in SerialLoop},
        **{plan: (NESTPIPE, f"{plan} ") for plan in EXACT_PLANS if plan != "serial"},
        TORCHREC: (TORCHREC, ""),
    }
    rows: list[TableRow] = []
    for name, (system, start) in starts.items():
        found: dict[str, LabReading] = {}
        for result in results:
            ran = [
                r for r in result.readings if r.system == system and r.pipeline.startswith(start)
            ]
            if fastest := _fastest(ran):
                found[result.config] = fastest
        rows.append(TableRow(name, found))
    return rows


if __name__ == "__main__":
    main()
