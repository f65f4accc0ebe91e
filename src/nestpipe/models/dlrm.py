"""DLRM: dense features through an MLP, dot products between all vectors, an MLP on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.config import Table, not_negative, positive
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.models.protocol import Loss, full_precision

# Shapes: B samples, F dense features, D embedding width, N vectors that interact


@dataclass(frozen=True, kw_only=True, slots=True)
class DlrmConfig:
    """The shape of a DLRM."""

    features: tuple[str, ...] = ("user", "item")
    """Categorical features; each has a table of its own, with its name."""
    dense_features: int = 13
    """Columns of `dense["features"]`; 0: there is no such input and no bottom MLP."""
    dim: int = 16
    """Width of every row, and of the bottom MLP's output."""
    bottom: tuple[int, ...] = (64, 32)
    """Hidden layers of the MLP on the dense features."""
    top: tuple[int, ...] = (64, 32)
    """Hidden layers of the MLP on the dot products."""
    pooling: Literal["sum", "mean", "none"] = "sum"
    """`sum`, `mean`: any number of keys per sample and feature; `none`: exactly one, which costs
    less."""

    def __post_init__(self) -> None:
        not_negative("dense_features", self.dense_features)
        positive("dim", self.dim)
        for name, widths in (("bottom", self.bottom), ("top", self.top)):
            for width in widths:
                positive(name, width)
        if len(set(self.features)) < len(self.features):
            raise ConfigError(f"features are {self.features}; name each one once")
        if self.num_vectors < 2:
            raise ConfigError("features are too few for a dot product; name another one")

    @property
    def num_vectors(self) -> int:
        return len(self.features) + bool(self.dense_features)


class Dlrm(nn.Module):
    """A click model; the loss is binary cross-entropy, its weight the number of samples.

    Reads `sparse[feature]` for each feature, `dense["features"]` (B, F) and `dense["label"]` (B,).
    """

    capturable = True
    """Equal shapes launch equal kernels: see `train/dense.py`."""
    _pairs: Tensor

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.config = config
        self.bottom = None
        num_pairs = config.num_vectors * (config.num_vectors - 1) // 2
        inputs = num_pairs
        if config.dense_features:
            self.bottom = mlp([config.dense_features, *config.bottom, config.dim])
            inputs += config.dim
        self.top = mlp([inputs, *config.top, 1])
        row, column = torch.tril_indices(config.num_vectors, config.num_vectors, offset=-1)
        self.register_buffer("_pairs", row * config.num_vectors + column, persistent=False)

    def tables(self) -> list[Table]:
        """One table per feature."""
        config = self.config
        return [Table(name=f, dim=config.dim, pooling=config.pooling) for f in config.features]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {feature: batch.sparse[feature] for feature in self.config.features}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_B = full_precision(self.logits(rows, batch))
        labels_B = batch.dense["label"].to(logits_B.dtype)
        total = functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="sum")
        return Loss(total, float(batch.size), torch.sigmoid(logits_B.detach()), labels_B)

    def shard_units(self) -> list[nn.Module]:
        """The layers."""
        return [module for module in self.modules() if isinstance(module, nn.Linear)]

    def score(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) log-odds of a click, for serving."""
        return self.logits(rows, batch)

    def logits(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) log-odds of a click."""
        vectors = [self._one_per_sample(feature, rows, batch) for feature in self.config.features]
        outputs = []
        if self.bottom is not None:
            outputs = [self.bottom(batch.dense["features"].to(vectors[0].dtype))]
        stacked_BND = torch.stack([*outputs, *vectors], dim=1)
        dots_BNN = torch.bmm(stacked_BND, stacked_BND.transpose(1, 2))
        outputs.append(dots_BNN.flatten(1).index_select(1, self._pairs))
        return self.top(torch.cat(outputs, dim=1)).squeeze(1)

    def _one_per_sample(self, feature: str, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        if rows[feature].shape[0] != batch.size:
            raise DataError(
                f"feature {feature} has {rows[feature].shape[0]} rows for {batch.size} samples; "
                'set pooling = "sum", or give each sample one key'
            )
        return rows[feature]


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with a ReLU between them, none after the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Logistic regression: one weight per key and per dense feature; the baseline of click models.


# Shapes: B samples, F dense features


class LogisticRegression(nn.Module):
    """Reads what `Dlrm` reads, and adds up instead of multiplying."""

    capturable = True

    def __init__(self, features: tuple[str, ...], dense_features: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(dense_features, 1) if dense_features else None
        self.bias = nn.Parameter(torch.zeros(1))

    def tables(self) -> list[Table]:
        """A table of single weights per feature; they start at zero."""
        return [Table(name=f, dim=1, pooling="sum", init_std=0.0) for f in self.features]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in self.features}

    def score(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) log-odds of a click."""
        logits_B = self.bias + sum(rows[name].squeeze(1) for name in self.features)
        if self.linear is not None:
            logits_B = logits_B + full_precision(self.linear(batch.dense["features"])).squeeze(1)
        return logits_B

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_B = self.score(rows, batch)
        label_B = batch.dense["label"]
        total = functional.binary_cross_entropy_with_logits(logits_B, label_B, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits_B).detach(), label_B)
