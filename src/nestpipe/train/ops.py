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
from nestpipe.comm.mesh import Mesh
from nestpipe.data.sampling.clustering import How, micro_batches
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.errors import RunError
from nestpipe.models.protocol import RecModel
from nestpipe.runtime import StopSignal
from nestpipe.schedule import Merge
from nestpipe.schedule.op import Kind, Op
from nestpipe.train.grad_buckets import EarlySums

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
    rows_written: int
    """Rows that this rank read from host memory, refreshed from batches before, and wrote."""
    keys_asked: int = 0
    """Keys that this rank asked owners for, itself included."""


@dataclass(slots=True)
class _InFlight:
    """One batch between its prefetch and its write-back.

    On a GPU it keeps alive what a stream may still use.
    """

    on_host: list[Batch]
    """The micro-batches, as they were read ..."""
    micros: list[Batch] = field(default_factory=list[Batch])
    """... and on the device."""
    samples: int = 0
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """The summed loss of each micro-batch, on the device."""
    weight: float = 0.0
    totals: Tensor = field(default_factory=lambda: torch.zeros(2))
    """Loss and weight of the global batch, and the weight of each group, on the device."""
    asked: int = 0
    read: int = 0
    refreshed: int = 0
    kept: list[object] = field(default_factory=list[object])

    def totals_here(self, mesh: Mesh) -> Tensor:
        """Summed loss and weight of this rank; with several groups also the weight of each."""
        loss = torch.stack([part.float() for part in self.losses]).sum(0, keepdim=True)
        weights = [self.weight]
        if mesh.groups > 1:
            weights += [self.weight * (group == mesh.group) for group in range(mesh.groups)]
        # As arguments of kernels: a copy from the host would hold up the issuing thread.
        return torch.cat([loss, *(loss.new_full((1,), weight) for weight in weights)])


@dataclass(slots=True)
class TrainingWork:
    """The functions behind the ops, and the state that they share."""

    model: nn.Module
    tables: ShardedTables
    dense_optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    """This rank's part of each global batch; may end before that of other ranks."""
    empty: Batch
    mesh: Mesh
    device: torch.device
    cut: Cut
    first_step: int = 0
    """Batches that were trained before this run (a checkpoint's)."""
    on_step: Callable[[StepReport], None] = lambda report: None
    end: StopSignal = field(default_factory=StopSignal)
    """Where the run ends: at a number of batches, or where no rank has samples left."""
    data_ended: bool = False
    """Whether it was the data that ended."""
    flights: dict[int, _InFlight] = field(default_factory=dict[int, _InFlight])
    early_sums: EarlySums | None = None
    """Sums the dense gradients where that is done apart."""
    times: Tensor = field(default_factory=lambda: torch.ones(()))
    """What the gradients of the batch in update are multiplied by."""

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
            K.STALE_MASK: lambda op: self.tables.stale_mask(op.batch),
            K.RETRIEVE: self.retrieve,
            K.SYNC: self.sync,
            K.SWAP: lambda op: None,
            K.PATCH: lambda op: self.tables.patch(op.batch),
            K.ROWS: lambda op: self.tables.rows(op.batch, op.micro or 0),
            K.DENSE: self.dense,
            K.GRADS: lambda op: self.tables.grads(op.batch, op.micro or 0),
            K.REDUCE: self.reduce,
            K.UPDATE: self.update,
            K.REPLICA_SYNC: lambda op: self.tables.replica_sync(op.batch),
            K.WRITEBACK: self.writeback,
        }

    def prefetch(self, op: Op) -> None:
        batch = next(self.batches, self.empty)
        micros = self.cut.of(batch, self._model, self.tables.table_of)
        if self.device.type == "cuda":
            micros = [micro.pin_memory() for micro in micros]
        self.flights[op.batch] = _InFlight(micros)

    def copy(self, op: Op) -> None:
        flight = self.flights[op.batch]
        flight.micros = [micro.to(self.device, non_blocking=True) for micro in flight.on_host]

    def dedup(self, op: Op) -> None:
        keys = [self._model.sparse_keys(micro) for micro in self.flights[op.batch].on_host]
        self.tables.dedup(op.batch, keys)

    def counts(self, op: Op) -> None:
        flight = self.flights[op.batch]
        mine = sum(micro.size for micro in flight.on_host)
        flight.samples = self.tables.counts(op.batch, mine)
        flight.asked = self.tables.keys_asked(op.batch)
        if flight.samples == 0:
            self.data_ended = True
            self.end.found_at(op.batch)

    def retrieve(self, op: Op) -> None:
        self.flights[op.batch].read = self.tables.retrieve(op.batch)

    def sync(self, op: Op) -> None:
        if op.batch == 0:  # nothing to refresh: it may come before all else of the batch
            return
        self.flights[op.batch].refreshed = self.tables.sync(op.batch)

    def dense(self, op: Op) -> None:
        flight, micro = self.flights[op.batch], op.micro or 0
        rows = self.tables.lookup(op.batch, micro)
        loss = self._model.dense(rows, flight.micros[micro])
        flight.losses.append(loss.total.detach())
        flight.weight += loss.weight
        if self.early_sums is not None and micro == self.tables.shape.micro_batches - 1:
            flight.totals = flight.totals_here(self.mesh)
            self.early_sums.sum_totals(flight.totals)
            with self.early_sums.during_backward(early=self.tables.shape.overlaps):
                loss.total.backward()
        else:
            loss.total.backward()

    def reduce(self, op: Op) -> None:
        """Dense gradients, summed over all ranks, and with them the batch's loss and weight.

        Those that are summed apart are on their way, with the totals; here they are applied.
        """
        if self.early_sums is not None:
            self.early_sums.finish()
            self._step_dense()
            return
        flight, parameters = self.flights[op.batch], self._parameters
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        totals = flight.totals_here(self.mesh)
        flat = torch.cat([*(g.reshape(-1) for g in gradients), totals])
        self.mesh.world.all_reduce(flat)
        _set_gradients(parameters, flat)
        flight.totals = flat[-len(totals) :]
        flight.kept += [gradients, flat]

    def update(self, op: Op) -> None:
        flight = self.flights[op.batch]
        step = self.first_step + op.batch + 1
        if self.device.type == "cpu":
            _check_loss(flight.totals, step)
        if self.early_sums is not None:
            self.early_sums.wait_for_totals()
        # Samples may weigh nothing: then nothing moves.
        times = torch.where(flight.totals == 0, 1.0, flight.totals).reciprocal_()
        self.times = times[1]
        if self.early_sums is None:
            self._step_dense()
        self.tables.update(op.batch, times[self._weight_of_rows], step)

    @property
    def _weight_of_rows(self) -> int:
        """Which of the totals row gradients are divided by: all samples', or those of the group."""
        shape = self.tables.shape
        apart = shape.merge_every > 0 and shape.merge is Merge.AVERAGED
        return 2 + self.mesh.group if apart else 1

    def _step_dense(self) -> None:
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(self.times)
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)

    def writeback(self, op: Op) -> None:
        """Save rows, and tell of the batch: here the host knows that it is done."""
        flight = self.flights[op.batch]
        step = self.first_step + op.batch + 1
        loss = _check_loss(flight.totals, step)
        written = self.tables.writeback(op.batch)
        # Another stream may still hold what the batch before used; this one's update is over.
        self.flights.pop(op.batch)
        moved = flight.read, flight.refreshed, written, flight.asked
        self.on_step(StepReport(step, loss, flight.samples, *moved))

    @property
    def _model(self) -> RecModel:
        return self.model  # type: ignore[return-value]


def _set_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    start = 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        parameter.grad = part.view_as(parameter)
        start += parameter.numel()


def _check_loss(totals: Tensor, step: int) -> float:
    """The mean loss of a batch from its sum and weight; refuses to go on with a broken one."""
    total, weight = totals[:2].tolist()
    loss = total / (weight or 1.0)
    if not math.isfinite(loss):
        raise RunError(f"the loss of step {step} is {loss}; lower the learning rates")
    return loss


# How a batch is cut into micro-batches: how many samples each gets, and which.


@dataclass(frozen=True, slots=True)
class Cut:
    """The same for every batch of a run."""

    count: int
    how: How = "contiguous"
    first: float = 1.0
    last: float = 1.0
    """Sizes of the first and the last micro-batch over that of those in the middle."""

    def of(self, batch: Batch, model: RecModel, table_of: Mapping[str, str]) -> list[Batch]:
        """The micro-batches; `table_of` says which features share keys."""
        if self.count == 1:
            return [batch]
        sizes = micro_sizes(batch.size, self.count, self.first, self.last)
        if self.how == "contiguous":
            return batch.split(sizes)
        # Keys that a model draws at random for each sample only blur who belongs together.
        keys = getattr(model, "query_keys", model.sparse_keys)(batch)
        return micro_batches(batch, keys, sizes, self.how, table_of=table_of)


def micro_sizes(total: int, count: int, first: float = 1.0, last: float = 1.0) -> list[int]:
    """Samples of each micro-batch: at the ends `first` and `last` times those in the middle."""
    weights = [1.0] * count
    weights[0], weights[-1] = first, last
    due = [total * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in due]
    # What rounding left over goes where it is missed most, earlier ones first.
    order = sorted(range(count), key=lambda i: (sizes[i] - due[i], i))
    for i in order[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
