"""What each op of a training schedule does, for one rank.

The executor calls `work[op.kind](op)`; everything about rows is `ShardedTables`, everything about
the dense half is ordinary PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.tables import ShardedTables
from nestpipe.errors import RunError
from nestpipe.models.protocol import RecModel
from nestpipe.runtime import End
from nestpipe.schedule.op import Kind, Op

K = Kind


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one finished batch says of itself."""

    step: int
    """Batches finished since the very first one, this one included."""
    loss: float
    """Mean over the global batch."""
    samples: int
    """Samples of the global batch."""
    rows_read: int
    rows_refreshed: int
    """Rows that this rank read from host memory and refreshed from the batch before."""
    rows_written: int
    """Rows that it wrote for the batch two before this one: write-back runs behind."""


@dataclass(slots=True)
class _InFlight:
    """One batch between its prefetch and its update."""

    micros: list[Batch]
    samples: int = 0
    loss: float = 0.0
    weight: float = 0.0
    read: int = 0
    refreshed: int = 0


@dataclass(slots=True)
class TrainingWork:
    """The functions behind the ops, and the state that they share."""

    model: nn.Module
    tables: ShardedTables
    dense_optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    """This rank's part of each global batch; may end before that of other ranks."""
    empty: Batch
    comm: Communicator
    device: torch.device
    first_step: int = 0
    """Batches that were trained before this run (a checkpoint's)."""
    on_step: Callable[[StepReport], None] = lambda report: None
    end: End = field(default_factory=End)
    """Where the run ends: at a number of batches, or where no rank has samples left."""
    data_ended: bool = False
    """Whether it was the data that ended."""
    flights: dict[int, _InFlight] = field(default_factory=dict[int, _InFlight])
    written: dict[int, int] = field(default_factory=dict[int, int])
    """Rows written for each batch that no report has told yet."""

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def functions(self) -> Mapping[Kind, Callable[[Op], None]]:
        """The work of every kind of op."""
        return {
            K.PREFETCH: self.prefetch,
            K.COPY: self.copy,
            K.DEDUP: self.dedup,
            K.COUNTS: self.counts,
            K.KEYS: lambda op: self.tables.keys(op.batch),
            K.UNION: lambda op: self.tables.union(op.batch),
            K.RETRIEVE: self.retrieve,
            K.SYNC: self.sync,
            K.SWAP: lambda op: None,
            K.ROWS: lambda op: self.tables.rows(op.batch, op.micro or 0),
            K.DENSE: self.dense,
            K.GRADS: lambda op: self.tables.grads(op.batch, op.micro or 0),
            K.REDUCE: self.reduce,
            K.UPDATE: self.update,
            K.WRITEBACK: self.writeback,
        }

    def prefetch(self, op: Op) -> None:
        batch = next(self.batches, self.empty)
        count = self.tables.shape.micros
        micros = [batch] if count == 1 else batch.split(even_sizes(batch.size, count))
        if self.device.type == "cuda":
            micros = [micro.pin_memory() for micro in micros]
        self.flights[op.batch] = _InFlight(micros)

    def copy(self, op: Op) -> None:
        flight = self.flights[op.batch]
        flight.micros = [micro.to(self.device, non_blocking=True) for micro in flight.micros]

    def dedup(self, op: Op) -> None:
        keys = [self._model.sparse_keys(micro) for micro in self.flights[op.batch].micros]
        self.tables.dedup(op.batch, keys)

    def counts(self, op: Op) -> None:
        flight = self.flights[op.batch]
        mine = sum(micro.size for micro in flight.micros)
        flight.samples = self.tables.counts(op.batch, mine)
        if flight.samples == 0:
            self.data_ended = True
            self.end.found_at(op.batch)

    def retrieve(self, op: Op) -> None:
        self.flights[op.batch].read = self.tables.retrieve(op.batch)

    def sync(self, op: Op) -> None:
        self.flights[op.batch].refreshed = self.tables.sync(op.batch)

    def dense(self, op: Op) -> None:
        flight, micro = self.flights[op.batch], op.micro or 0
        rows = self.tables.spread(op.batch, micro)
        loss = self._model.dense(rows, flight.micros[micro])
        loss.total.backward()
        flight.loss += float(loss.total.detach())
        flight.weight += loss.weight

    def reduce(self, op: Op) -> None:
        """Dense gradients and the batch's loss and weight, summed over all ranks."""
        flight = self.flights[op.batch]
        parameters = self._parameters
        totals = torch.tensor([flight.loss, flight.weight], device=self.device)
        flat = torch.cat([*_flat_gradients(parameters), totals])
        self.comm.all_reduce(flat)
        _unflatten_gradients(parameters, flat)
        flight.loss, flight.weight = flat[-2:].tolist()

    def update(self, op: Op) -> None:
        flight = self.flights.pop(op.batch)
        weight = flight.weight or 1.0
        step = self.first_step + op.batch + 1
        loss = flight.loss / weight
        if not math.isfinite(loss):
            raise RunError(f"the loss of step {step} is {loss}; lower the learning rates")
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.div_(weight)
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)
        self.tables.update(op.batch, weight, step)
        # With two buffers, this batch's rows came into the place that those two before had left.
        written = self.written.pop(op.batch - 2, 0)
        self.on_step(StepReport(step, loss, flight.samples, flight.read, flight.refreshed, written))

    def writeback(self, op: Op) -> None:
        self.written[op.batch] = self.tables.writeback(op.batch)

    @property
    def _model(self) -> RecModel:
        return self.model  # type: ignore[return-value]


def even_sizes(total: int, parts: int) -> list[int]:
    """Sizes that differ by one at most, the larger ones first."""
    small, extra = divmod(total, parts)
    return [small + (i < extra) for i in range(parts)]


def _flat_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [
        p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in parameters
    ]


def _unflatten_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    start = 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        parameter.grad = part.view_as(parameter)
        start += parameter.numel()
