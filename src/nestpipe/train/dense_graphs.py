"""Forward and backward of the dense half as one CUDA graph, for batches of shapes seen before.

A step of a few milliseconds is decided by how fast the host launches kernels: a DLRM has two
hundred of them. A graph replays all with one call, and the same kernels give the same bits. A model
says that it can be captured (`capturable = True`): its `dense` launches the same kernels for equal
shapes, never waits for the device, and the weight of its loss depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch, PackedColumns
from nestpipe.models.protocol import RecModel, in_precision

EAGER_FIRST = 3
"""Batches of a shape before it is captured: libraries choose their kernels meanwhile."""
MOST_GRAPHS = 4
"""Each keeps the memory of a step; batches of further shapes are launched kernel by kernel."""

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay leaves behind, until the next one."""

    total: Tensor
    weight: float
    seen_gradients: list[Tensor]
    faults: Tensor | None
    """Whether a gradient of a parameter was not finite; None: nobody looked."""
    measured: Mapping[str, tuple[Tensor, Tensor]]
    """Predictions and labels by task."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    seen: list[Tensor]
    columns: Mapping[torch.dtype, Tensor]
    gradients: list[Tensor | None]
    result: Replayed


class DenseGraphs:
    """The graphs of one model, by the shapes of their inputs."""

    def __init__(
        self,
        model: nn.Module,
        drop_faults: Callable[[Sequence[Tensor]], list[Tensor]] | None,
        precision: str = "fp32",
    ) -> None:
        """`drop_faults`: looks at the gradients of parameters, as a part of the graph."""
        self._model = model
        self._precision = precision
        self._drop_faults = drop_faults
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._met: dict[Key, int] = {}
        self._captured: dict[Key, _Captured] = {}

    def replay(
        self, seen: Sequence[Tensor], sizes: Sequence[Mapping[str, int]], batch: Batch
    ) -> Replayed | None:
        """Run both passes; None: not yet, launch it kernel by kernel.

        `seen` and `sizes`: for each group of tables, what the model sees of it and how many rows
        each feature has. Gradients of parameters are set, those of rows are returned.
        """
        if batch.packed is None:
            return None
        key = _key(seen, sizes, batch.packed)
        met = self._met[key] = self._met.get(key, 0) + 1
        if met <= EAGER_FIRST:
            return None
        if key not in self._captured:
            if len(self._captured) == MOST_GRAPHS:
                return None
            self._captured[key] = self._capture(seen, sizes, batch)
        captured = self._captured[key]
        inputs = [*captured.seen, *captured.columns.values()]
        given = [*seen, *(batch.packed.parts[dtype] for dtype in captured.columns)]
        for static, now in zip(inputs, given, strict=True):
            static.detach().copy_(now)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.result

    def _capture(
        self, seen: Sequence[Tensor], sizes: Sequence[Mapping[str, int]], batch: Batch
    ) -> _Captured:
        assert batch.packed is not None
        assert isinstance(self._model, RecModel)
        inputs = [part.clone().requires_grad_() for part in seen]
        columns = {dtype: part.clone() for dtype, part in batch.packed.parts.items()}
        there = PackedColumns(columns, batch.packed.layout).unpack(batch)
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        # Other lanes' threads go on meanwhile, so only this one's calls are looked at.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            rows: dict[str, Tensor] = {}
            for part, of in zip(inputs, sizes, strict=True):
                rows.update(zip(of, torch.split(part, list(of.values())), strict=True))
            with in_precision(inputs[0].device, self._precision):
                loss = self._model.dense(rows, there)
            loss.total.backward()
            gradients = [parameter.grad for parameter in self._parameters]
            made = [gradient for gradient in gradients if gradient is not None]
            found = self._drop_faults(made) if self._drop_faults is not None else []
        of_rows = [torch.zeros_like(p) if p.grad is None else p.grad for p in inputs]
        faults = found[0] if found else None
        result = Replayed(loss.total.detach(), loss.weight, of_rows, faults, loss.measured())
        return _Captured(graph, inputs, columns, gradients, result)


def _key(seen: Sequence[Tensor], sizes: Sequence[Mapping[str, int]], packed: PackedColumns) -> Key:
    """Everything that decides which kernels run, and on how much."""
    layout = packed.layout
    return (
        *(layout.size, layout.dense, layout.sparse),
        torch.is_grad_enabled(),
        tuple(tuple(part.shape) for part in seen),
        tuple(tuple(of.items()) for of in sizes),
    )
