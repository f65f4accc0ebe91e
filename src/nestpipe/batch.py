"""`Batch`: the samples of one rank's part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.jagged import Jagged


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples by column: tensors with one row per sample, and lists of keys."""

    size: int
    """Samples; 0 is allowed, and happens where a rank has run out of data."""
    dense: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Features and labels, each (size, ...)."""
    sparse: Mapping[str, Jagged] = field(default_factory=dict[str, Jagged])
    """Lists of 64-bit keys."""

    def __post_init__(self) -> None:
        for name, tensor in self.dense.items():
            assert tensor.shape[0] == self.size, f"{name} has {tensor.shape[0]} rows"
        for name, jagged in self.sparse.items():
            assert jagged.num_samples == self.size, f"{name} has {jagged.num_samples} lists"

    def select(self, samples: Tensor) -> Batch:
        """Some samples, in the order asked for."""
        return self._map(
            int(samples.shape[0]), lambda dense: dense[samples], lambda keys: keys.select(samples)
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Neighbouring samples, without a copy."""
        return self._map(
            stop - start, lambda dense: dense[start:stop], lambda keys: keys.slice(start, stop)
        )

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """The batch cut into pieces of these sizes."""
        assert sum(sizes) == self.size, f"{sizes} do not add up to {self.size} samples"
        parts: list[Batch] = []
        start = 0
        for size in sizes:
            parts.append(self.slice(start, start + size))
            start += size
        return parts

    def empty(self) -> Batch:
        """A batch of the same columns without samples."""
        return self.slice(0, 0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._map(
            self.size,
            lambda dense: dense.to(device, non_blocking=non_blocking),
            lambda keys: keys.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        return self._map(self.size, Tensor.pin_memory, Jagged.pin_memory)

    def _map(
        self, size: int, on_dense: Callable[[Tensor], Tensor], on_keys: Callable[[Jagged], Jagged]
    ) -> Batch:
        return Batch(
            size,
            {name: on_dense(tensor) for name, tensor in self.dense.items()},
            {name: on_keys(jagged) for name, jagged in self.sparse.items()},
        )
