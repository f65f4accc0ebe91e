"""The two halves of a model: which keys it wants, and what it does with their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.jagged import Jagged


@dataclass(frozen=True, slots=True)
class Loss:
    """What a model says of a (micro-)batch."""

    total: Tensor
    """Sum (not mean) of the samples' losses; the trainer divides by the global batch's weight."""
    weight: float
    """By how much the sum counts: the number of samples, or of predicted positions."""
    predictions: Tensor | None = None
    """(P,) probabilities, for metrics; detached."""
    labels: Tensor | None = None
    """(P,) what the predictions should have been."""


@runtime_checkable
class RecModel(Protocol):
    """An ordinary `nn.Module` with two methods; nothing is traced or patched."""

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        """The keys of each feature."""
        ...

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        """The loss, given each feature's rows.

        `rows[feature]` is (T, D), a row per key in the order of the feature's values; or (B, D)
        where its table pools, the sum of each sample's rows.
        """
        ...
