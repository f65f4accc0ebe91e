"""The training benchmarks: sizes, data, and the dense half that both systems share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.config import Table
from nestpipe.jagged import Jagged
from nestpipe.models.protocol import Loss

# Shapes: B samples, L keys of a sample, C features, D width of a row


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark: how large everything is."""

    name: str
    features: tuple[str, ...]
    rows: int
    """Rows of each table."""
    keys: int
    """Keys of each feature and sample."""
    batch: int
    """Samples per rank."""
    pooled: bool
    dim: int = 64
    dense_features: int = 0

    def tables(self) -> list[Table]:
        pooling = "sum" if self.pooled else "none"
        placement = "table" if self.pooled else "rows"
        return [
            Table(name=name, dim=self.dim, pooling=pooling, placement=placement)
            for name in self.features
        ]

    def make_batch(self, generator: torch.Generator) -> Batch:
        """Log-uniform keys, random features and labels."""
        lengths_B = torch.full((self.batch,), self.keys)
        return Batch(
            self.batch,
            {
                "label": torch.randint(0, 2, (self.batch,), generator=generator).float(),
                "features": torch.rand(self.batch, self.dense_features, generator=generator),
            },
            {
                name: Jagged(log_uniform(self.batch * self.keys, self.rows, generator), lengths_B)
                for name in self.features
            },
        )

    def make_head(self) -> nn.Module:
        """The dense half; the same seed gives both systems the same weights."""
        torch.manual_seed(0)
        return DlrmHead(self) if self.pooled else SequenceHead(self)


_CATEGORIES = tuple(f"c{i}" for i in range(26))
CASES = {
    case.name: case
    for case in (
        Case("sequence", ("item",), 2_000_000, keys=50, batch=1024, pooled=False),
        Case("dlrm1", _CATEGORIES, 200_000, keys=1, batch=2048, pooled=True, dense_features=13),
        Case("dlrm10", _CATEGORIES, 200_000, keys=10, batch=2048, pooled=True, dense_features=13),
    )
}


def log_uniform(count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Keys from 0 to rows - 1 whose logarithm is uniform: a few hot ones, a long tail."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    top = torch.log(torch.tensor(float(rows), dtype=torch.float64))
    return torch.exp(uniform * top).long().sub_(1).clamp_(0, rows - 1)


class SequenceHead(nn.Module):
    """Every position through a dense layer, then the mean, then 64-256-256-1."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.keys = case.keys
        self.position = nn.Linear(case.dim, case.dim)
        self.top = nn.Sequential(
            nn.Linear(case.dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, rows: Sequence[Tensor], features_BF: Tensor) -> Tensor:
        (rows_TD,) = rows
        rows_BLD = rows_TD.view(len(features_BF), self.keys, -1)
        return self.top(torch.relu(self.position(rows_BLD)).mean(1)).squeeze(1)


class DlrmHead(nn.Module):
    """Dense features through a small MLP, dot products of all pairs, a top MLP."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(case.dense_features, 256), nn.ReLU(), nn.Linear(256, case.dim), nn.ReLU()
        )
        self.vectors = vectors = len(case.features) + 1
        first, second = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        self.top = nn.Sequential(
            nn.Linear(case.dim + len(first), 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, rows: Sequence[Tensor], features_BF: Tensor) -> Tensor:
        dense_BD = self.bottom(features_BF)
        vectors = torch.cat([dense_BD, *rows], 1).view(len(dense_BD), self.vectors, -1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        picked = products.index_select(1, self.get_buffer("pairs"))
        return self.top(torch.cat([dense_BD, picked], 1)).squeeze(1)


class BenchModel(nn.Module):
    """The case as a model of ours."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.head = case.make_head()

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        given = [rows[name] for name in self.case.features]
        logits = self.head(given, batch.dense["features"])
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.dense["label"], reduction="sum"
        )
        return Loss(total, batch.size)
