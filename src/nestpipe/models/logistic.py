"""Logistic regression: one weight per key and per dense feature; the baseline of click models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.config import Table
from nestpipe.jagged import Jagged
from nestpipe.models.protocol import Loss

# Shapes: B samples, F dense features


class LogisticRegression(nn.Module):
    """Reads what `Dlrm` reads, and adds up instead of multiplying."""

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

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_B = self.bias + sum(rows[name].squeeze(1) for name in self.features)
        if self.linear is not None:
            logits_B = logits_B + self.linear(batch.dense["features"]).squeeze(1)
        label_B = batch.dense["label"]
        total = functional.binary_cross_entropy_with_logits(logits_B, label_B, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits_B).detach(), label_B)
