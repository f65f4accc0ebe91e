"""DLRM: dense features through an MLP, dot products between all vectors, an MLP on top."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.config import Table, not_negative, positive
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged, pool_rows
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
    weights: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For features whose keys have weights, the lists in `sparse` that hold them."""

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

    Reads `sparse[feature]` for each feature, `dense["features"]` (B, F) and `dense["label"]` (B,);
    where the data has `dense["weight"]`, a sample's loss is times that.
    """

    _pairs: Tensor

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.config = config
        self.capturable = not config.weights
        """Equal shapes launch equal kernels: see `train/dense.py`."""
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
        return [
            Table(
                name=name,
                dim=config.dim,
                features=() if name == f else (f,),
                pooling="none" if f in config.weights else config.pooling,
            )
            for f, name in table_names(config.features).items()
        ]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {feature: batch.sparse[feature] for feature in self.config.features}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_B = full_precision(self.logits(rows, batch))
        return click_loss(logits_B, batch)

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
        if weights := self.config.weights.get(feature):
            mean = self.config.pooling == "mean"
            return weighted_rows(rows[feature], batch, feature, weights, mean=mean)
        if rows[feature].shape[0] != batch.size:
            raise DataError(
                f"feature {feature} has {rows[feature].shape[0]} rows for {batch.size} samples; "
                'set pooling = "sum", or give each sample one key'
            )
        return rows[feature]


def table_names(features: Sequence[str]) -> dict[str, str]:
    """What the table of each feature is called: as the feature, with _ for what no name has.

    Columns of files are called `user id` or `price ($)`; tables name files and parameters.
    """
    found = {feature: feature for feature in features if feature.isidentifier()}
    for feature in features:
        name = re.sub(r"\W", "_", feature)
        name = name if name[:1].isidentifier() else f"_{name}"
        while feature not in found and name in found.values():
            name += "_"
        found.setdefault(feature, name)
    return {feature: found[feature] for feature in features}


def weighted_rows(
    rows_TD: Tensor, batch: Batch, feature: str, weights: str, *, mean: bool = False
) -> Tensor:
    """(B, D) each sample's rows, summed times the weights of their keys, or averaged by them."""
    keys = batch.sparse[feature]
    return pool_rows(rows_TD, keys.lengths, batch.sparse[weights].values, mean=mean)


def click_loss(logits_B: Tensor, batch: Batch) -> Loss:
    """Binary cross-entropy, each sample times its weight, 1 by default."""
    labels_B = batch.dense["label"].to(logits_B.dtype)
    weight_B = batch.dense["weight"].to(logits_B.dtype) if "weight" in batch.dense else None
    total = functional.binary_cross_entropy_with_logits(
        logits_B, labels_B, weight_B, reduction="sum"
    )
    return Loss(total, float(batch.size), torch.sigmoid(logits_B.detach()), labels_B)


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

    def __init__(
        self,
        features: tuple[str, ...],
        dense_features: int,
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        """`weights`: the lists that hold those of a feature's keys."""
        super().__init__()
        self.features = features
        self.weights = dict(weights or {})
        self.capturable = not self.weights
        self.linear = nn.Linear(dense_features, 1) if dense_features else None
        self.bias = nn.Parameter(torch.zeros(1))

    def tables(self) -> list[Table]:
        """A table of single weights per feature; they start at zero."""
        return [
            Table(
                name=name,
                dim=1,
                features=() if name == f else (f,),
                pooling="none" if f in self.weights else "sum",
                init_std=0.0,
            )
            for f, name in table_names(self.features).items()
        ]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in self.features}

    def score(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) log-odds of a click."""
        pooled = {
            name: weighted_rows(rows[name], batch, name, self.weights[name])
            if name in self.weights
            else rows[name]
            for name in self.features
        }
        logits_B = self.bias + sum(pooled[name].squeeze(1) for name in self.features)
        if self.linear is not None:
            logits_B = logits_B + full_precision(self.linear(batch.dense["features"])).squeeze(1)
        return logits_B

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        return click_loss(self.score(rows, batch), batch)
