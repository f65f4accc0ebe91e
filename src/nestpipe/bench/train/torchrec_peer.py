# pyright: reportMissingImports=false, reportArgumentType=false
"""TorchRec on CPU ranks, on the same case; an optional peer (`make bench-deps`)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.bench.train.cases import Case
from nestpipe.errors import ConfigError


def make_step(case: Case, batches: Sequence[Batch], lr: float) -> Callable[[int], None]:
    """A function that trains TorchRec on batch i; needs a Gloo process group."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        import torchrec  # noqa: F401
    except ImportError:
        raise ConfigError(
            "TorchRec is not installed; run `make bench-deps`, or leave it out with --no-peer"
        ) from None
    model = _sharded(case, lr)
    dense = [p for name, p in model.named_parameters() if "head" in name]
    optimizer = torch.optim.SGD(dense, lr=1e-3)
    inputs = [(_jagged(case, batch), batch) for batch in batches]

    def step(i: int) -> None:
        keys, batch = inputs[i % len(inputs)]
        optimizer.zero_grad()
        logits = model(keys, batch.dense["features"])
        nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"]).backward()
        optimizer.step()

    return step


def _jagged(case: Case, batch: Batch) -> Any:
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(case.features),
        values=torch.cat([batch.sparse[name].values for name in case.features]),
        lengths=torch.cat([batch.sparse[name].lengths for name in case.features]).int(),
    )


class _Peer(nn.Module):
    """The case as a TorchRec model."""

    def __init__(self, case: Case, embeddings: nn.Module) -> None:
        super().__init__()
        self.case = case
        self.embeddings = embeddings
        self.head = case.make_head()

    def forward(self, keys: Any, features_BF: Tensor) -> Tensor:
        found = self.embeddings(keys)
        rows = found.values() if self.case.pooled else found[self.case.features[0]].values()
        return self.head([rows], features_BF)


def _sharded(case: Case, lr: float) -> nn.Module:
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    kinds = (
        (EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingBagCollectionSharder, "table_wise")
        if case.pooled
        else (EmbeddingCollection, EmbeddingConfig, EmbeddingCollectionSharder, "row_wise")
    )
    collection, config, sharder, sharding = kinds
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr, "eps": 1e-8}
    declared = [
        config(name=name, embedding_dim=case.dim, num_embeddings=case.rows, feature_names=[name])
        for name in case.features
    ]
    model = _Peer(case, collection(device=torch.device("meta"), tables=declared))
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu", local_world_size=world),
        constraints={
            name: ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
            for name in case.features
        },
    )
    sharders = [sharder(fused_params=fused)]
    group = dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(model, sharders, group)  # type: ignore[arg-type]
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,  # type: ignore[arg-type]
    )
