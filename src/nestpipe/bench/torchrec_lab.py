# pyright: reportMissingImports=false
"""TorchRec's train pipelines on the work of a pipeline case: the peer of the lab comparison.

Batches and dense layers are those of `bench/pipeline_model.py`. The table is sharded by rows, on a
GPU in host memory behind FBGEMM's device cache. The cache holds a share of the rows, and every
share that is asked for is timed with every pipeline.

Run as `python -m nestpipe.bench.torchrec_lab FOLDER`, with TorchRec's packages on PYTHONPATH. The
folder holds `peer.json`; rank 0 adds a line to `readings.jsonl` after each pipeline.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.bench.machines import launch_on_one_gpu, look_like_a_host
from nestpipe.bench.pipeline_cases import WARM_STEPS, PipelineCase
from nestpipe.bench.pipeline_model import Blocks, make_batches, make_model
from nestpipe.comm import launch
from nestpipe.train.config import DenseSettings, RowSettings

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
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
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
    world = dist.get_world_size()
    topology = Topology(
        world_size=world,
        local_world_size=1,
        compute_device=device.type,
        hbm_cap=MEMORY_PER_RANK,
        ddr_cap=MEMORY_PER_RANK,
    )
    sharders: list[Any] = [_sharder(case)]
    planner = EmbeddingShardingPlanner(topology=topology, constraints={TABLE: constraints})
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


def _bfloat16_codecs() -> object:
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
    from torchrec.distributed import train_pipeline
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    model = shard(task.case, share, device)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    lr = DenseSettings().lr
    optimizer = KeyedOptimizerWrapper(dense, lambda given: torch.optim.SGD(given, lr=lr))
    for name in CUDA_PIPELINES if device.type == "cuda" else CPU_PIPELINES:
        pipeline = getattr(train_pipeline, name)(model, optimizer, device)
        source = cycle(batches)
        for _ in range(WARM_STEPS):
            pipeline.progress(source)
        rounds = tuple(
            _time_round(pipeline, source, task.steps, device) for _ in range(task.rounds)
        )
        yield PeerReading(name, share, rounds)


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
    device = _connect(task.case)
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


def _connect(case: PipelineCase) -> torch.device:
    """Join the ranks; to TorchRec each is a host of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if case.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    look_like_a_host()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    """Start the ranks, or be one."""
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        run_rank(folder)
        return
    case = PeerTask.read(folder).case
    command = [sys.executable, "-m", "nestpipe.bench.torchrec_lab", str(folder)]
    start = launch_on_one_gpu if case.device == "cuda" else launch
    sys.exit(start(case.ranks, command))


if __name__ == "__main__":
    main()
