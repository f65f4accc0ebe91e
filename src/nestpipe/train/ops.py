"""What each op of a training schedule does, for one rank.

The executor calls `work[op.kind](op)`; everything about rows is `ShardedTables`, everything about
the dense half is ordinary PyTorch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm.communicator import Mesh
from nestpipe.comm.peer_failure import STOP
from nestpipe.data import HISTORY
from nestpipe.data.clustering import MicroBatchSplitter
from nestpipe.embedding.device_tables import DeviceTables
from nestpipe.embedding.routing.owners import WorkingSet
from nestpipe.embedding.routing.requests import averaged
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.embedding.table_groups import mean_features
from nestpipe.errors import LossError, RunError, remedy
from nestpipe.jagged import Jagged
from nestpipe.kernels.index.steady import StepNews
from nestpipe.kernels.rows.native import Gradients
from nestpipe.models import HstuRanker, HstuRetriever
from nestpipe.models.metrics import click_sums
from nestpipe.models.protocol import (
    KnowsWork,
    RecModel,
    in_precision,
    keys_of,
    loss_of,
    refuse_means,
    unread_weights,
)
from nestpipe.runtime import StopSignal
from nestpipe.schedule import Merge
from nestpipe.schedule.schedule import Kind, Op
from nestpipe.train.dense import DenseGraphs, DenseTraining, local, set_rates
from nestpipe.train.gradients import (
    GradBuckets,
    clip_factor,
    drop_dense_faults,
    drop_row_faults,
    fill_gradients,
    global_norm,
    grad_scale,
    grad_scales,
    not_finite,
    split_gradients,
    summed_rows,
)

log = logging.getLogger("nestpipe.train")

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
    faults: int = 0
    """Rows of this rank, and sets of dense weights, whose gradient was NaN or inf, and groups of
    tables of which a weight went beyond float16. Those of dense weights that have a network of
    their own count in the next step."""
    flops: float = 0.0
    """Of the model on this rank's samples, where the model knows its work."""
    grad_norm: float = math.nan
    """Global norm of the gradients, before they are clipped by it; nan: they are not. Where dense
    gradients alone are clipped, and summed in a network of their own, that of the step before."""


OnKeys = Callable[[int, Sequence[Mapping[str, Jagged]]], None]
OnRows = Callable[[int, Sequence[WorkingSet]], None]
NO_TOTALS = torch.zeros(2)
"""Before the loss of a batch is known; never written to."""
BACKWARD_HERE = True
"""Whether the thread that calls a backward pass on a GPU runs it; False: autograd's own does."""
GPU_SEEN_EVERY = 16
"""On a GPU every N-th batch counts for the metrics of training."""


@dataclass(slots=True)
class TrainingBatch:
    """One batch between its prefetch and its write-back.

    On a GPU it keeps alive what a stream may still use.
    """

    on_host: list[Batch]
    """The micro-batches, as they were read ..."""
    micros: list[Batch] = field(default_factory=list[Batch])
    """... and on the device."""
    lengths: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    """Keys of each sample, of each micro-batch and feature whose rows are averaged."""
    samples: int = 0
    flops: float = 0.0
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """The summed loss of each micro-batch, on the device."""
    weight: float = 0.0
    totals: Tensor = NO_TOTALS
    """Loss and weight of the global batch, and the weight of each group, on the device."""
    asked: int = 0
    read: int = 0
    refreshed: int = 0
    kept: list[object] = field(default_factory=list[object])
    faults: list[Tensor] = field(default_factory=list[Tensor])
    """How many gradients were not finite, on the device."""
    beyond: list[Tensor] = field(default_factory=list[Tensor])
    """[float16 group] whether a weight was too large for float16, on the device."""
    news: StepNews | None = None
    """The loss and such counts on their way to the host, where one rank has all of the batch."""
    dense_checked: bool = False
    """Whether that is known of the dense ones."""
    dense_fault: Tensor | None = None
    """Where those are sharded: not 0 if some rank has one that is not finite."""
    seen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Sums of predictions and labels by task, on the device: see `click_sums`."""
    norm: Tensor | None = None
    """The norm of the summed gradients, on the device, where rows are clipped by it ..."""
    mean_norm: Tensor | None = None
    """... and of their mean over the batch, which is reported."""

    def totals_here(self, mesh: Mesh) -> Tensor:
        """Summed loss and weight of this rank; with several groups also the weight of each."""
        first, *others = (part.float().reshape(1) for part in self.losses)
        loss = torch.stack([first, *others]).sum(0) if others else first
        weights = [self.weight]
        if mesh.groups > 1:
            weights += [self.weight * (group == mesh.group) for group in range(mesh.groups)]
        # As arguments of kernels: a copy from the host would hold up the issuing thread.
        return torch.cat([loss, *(loss.new_full((1,), weight) for weight in weights)])


@dataclass(slots=True)
class Applied:
    """What `apply` found in the dense gradients of a batch, on the device.

    `writeback` of the same batch does not wait for `apply`. That of the next batch comes after it,
    by way of the next `dense`.
    """

    faults: list[Tensor]
    """Whether gradients were not finite."""
    mean_norm: Tensor | None = None
    """Their norm, where they alone are clipped by it."""


@dataclass(frozen=True, slots=True)
class GradientRules:
    """What is done with gradients before they are applied."""

    non_finite: str = "stop"
    """With those that are NaN or inf: `stop`, `skip` or `clip`."""
    clip_norm: float = 0.0
    """The most that their norm may be; 0: anything."""
    clip_rows: bool = True
    """Whether row gradients count in the norm, and are scaled too."""

    @property
    def stops(self) -> bool:
        """Whether a gradient that is NaN or inf ends the run."""
        return self.non_finite == "stop"

    @property
    def clips_values(self) -> bool:
        """Whether only such values become 0, not the whole gradient that has them."""
        return self.non_finite == "clip"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHooks:
    """Functions of the caller that ops call."""

    on_step: Callable[[StepReport], None]
    """Gets the report of each finished batch, in order."""
    on_seen: Callable[[Mapping[str, Tensor]], None]
    """Gets what `click_sums` made of each batch, in order, by task."""
    on_keys: OnKeys
    """Gets the keys that the micro-batches of a batch ask for."""
    on_rows: OnRows
    """Gets the step and the rows of it that this rank owns, where keys are routed by hosts."""
    keep_batch: Callable[[int, Sequence[Batch]], Path | None]
    """Writes a batch for inspection; returns where, if anywhere."""
    stop_wanted: Callable[[], bool]
    """Whether this rank wants to end early."""


@dataclass(slots=True)
class TrainingWork:
    """The functions behind the ops, and the state that they share."""

    half: DenseTraining
    tables: ShardedTables | DeviceTables
    batches: Iterator[Batch]
    """This rank's part of each global batch; may end before that of other ranks."""
    empty: Batch
    mesh: Mesh
    device: torch.device
    splitter: MicroBatchSplitter
    rules: GradientRules
    hooks: StepHooks
    first_step: int
    """Batches that were trained before this run (a checkpoint's)."""
    end: StopSignal
    """Where the run ends: at a number of batches, or where no rank has samples left."""
    check_sums: bool
    """Whether the first loss is compared with those of its halves: a model that is not shipped."""
    global_batch: int
    """The most samples that a batch should have over all ranks; 0: any number."""
    weights: Mapping[str, str]
    """Columns of weights that the data has, and what of the config each follows from."""

    data_ended: bool = False
    """Whether it was the data that ended the run."""
    stopped: bool = False
    """Whether some rank wanted to end it."""
    in_flight: dict[int, TrainingBatch] = field(default_factory=dict[int, TrainingBatch])
    totals_to_apply: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """The totals of batches whose dense gradients are still to be applied by `apply`."""
    norms_to_apply: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """And the norms of all their gradients."""
    applied: dict[int, Applied] = field(default_factory=dict[int, Applied])
    """What `apply` found of batches; `writeback` of the batch after each reads it."""

    _parameters: list[nn.Parameter] = field(init=False)
    _by_dtype: dict[torch.dtype, list[nn.Parameter]] = field(init=False)
    """The same; float32 is always there, because totals travel with such gradients."""
    _works: KnowsWork | None = field(init=False)
    _max_len: int = field(init=False)
    """The longest history that a shipped encoder is made for; 0: nobody is to be told."""
    _without_gradient: set[str] | None = field(init=False, default=None)
    """Of the first batch of a model that is not shipped: features that got none so far."""
    _means: list[str] = field(init=False)
    """Features whose rows are averaged."""

    def __post_init__(self) -> None:
        # Found once: asking for a protocol, or going through features, takes as long as an op.
        self._parameters = [p for p in self.half.model.parameters() if p.requires_grad]
        self._by_dtype = {torch.float32: []}
        for parameter in self._parameters:
            self._by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self._max_len = 0
        if isinstance(self._model, HstuRetriever | HstuRanker) and self.mesh.world.rank == 0:
            self._max_len = self._model.config.max_len
        self._works = self.half.model if isinstance(self.half.model, KnowsWork) else None
        self._means = mean_features(self.tables.groups)

    def functions(self) -> Mapping[Kind, Callable[[Op], None]]:
        """The work of every kind of op."""
        return {
            K.PREFETCH: self.prefetch,
            K.COPY: self.copy,
            K.DEDUP: self.dedup,
            K.COUNTS: self.counts,
            K.RETRIEVE: self.retrieve,
            K.SYNC: self.sync,
            K.SWAP: lambda op: None,
            K.DENSE: self.dense,
            K.TOTALS: self.totals,
            K.REDUCE: self.reduce,
            K.NORM: self.norm,
            K.APPLY: self.apply,
            K.UPDATE: self.update,
            K.WRITEBACK: self.writeback,
            **self.tables.acts(),
        }

    @property
    def host_acts(self) -> frozenset[Kind]:
        """Kinds that leave the device alone: what a rank would exchange with itself."""
        return self.tables.host_acts

    def is_idle(self, op: Op) -> bool:
        """Whether the act of an op would do nothing, known before its turn."""
        return self.tables.moves_nothing(op.batch)

    def prefetch(self, op: Op) -> None:
        """Read a batch, split it into micro-batches, pin them; after the data, an empty one."""
        batch = next(self.batches, self.empty)
        if self._max_len and batch.size:
            self._warn_of_length(batch.sparse[HISTORY].lengths)
        micros = self.splitter.split(batch, query_keys(self._model), self.tables.table_of)
        if self.device.type == "cuda":
            micros = [micro.pin_memory() for micro in micros]
        flops = 0.0 if self._works is None else float(self._works.step_flops(batch).sum())
        self.in_flight[op.batch] = TrainingBatch(micros, flops=flops)

    def _warn_of_length(self, lengths_B: Tensor) -> None:
        """Tell once of histories for whose later positions the encoder has no weights."""
        if (longest := int(lengths_B.max())) > self._max_len:
            log.warning(
                "a history has %d items and model.max_len is %d, so later positions look alike; "
                "set a larger one, or let the data keep fewer items",
                *(longest, self._max_len),
            )
            self._max_len = 0

    def copy(self, op: Op) -> None:
        """The micro-batches onto the device."""
        state = self.in_flight[op.batch]
        state.micros = [micro.to(self.device, non_blocking=True) for micro in state.on_host]

    def dedup(self, op: Op) -> None:
        """Ask the model for its keys, and keep each key once, ordered by owner."""
        state = self.in_flight[op.batch]
        if isinstance(self.tables, DeviceTables):
            self._dedup_on_device(op, state, self.tables)
            return
        keys = [keys_of(self._model, micro) for micro in state.on_host]
        self.hooks.on_keys(op.batch, keys)
        state.lengths = [self._lengths_of_means(of) for of in keys]
        self.tables.dedup(op.batch, keys)

    def _dedup_on_device(self, op: Op, state: TrainingBatch, tables: DeviceTables) -> None:
        (on_host,), (there,) = state.on_host, state.micros
        joined = partial(join_on, self.device, on_host, there)
        keys, packed = keys_of(self._model, on_host), there.packed
        self.hooks.on_keys(op.batch, [keys])
        state.lengths = [self._lengths_of_means(keys)]
        if packed is not None and packed.has_lists(on_host, keys):
            tables.dedup_packed(op.batch, keys, packed, joined)
        else:
            tables.dedup(op.batch, [keys], joined)

    def _lengths_of_means(self, keys: Mapping[str, Jagged]) -> dict[str, Tensor]:
        return {name: keys[name].lengths for name in self._means if name in keys}

    def counts(self, op: Op) -> None:
        """Exchange numbers of keys and of samples; where no rank has a sample, the run ends."""
        state = self.in_flight[op.batch]
        mine = sum(micro.size for micro in state.on_host)
        total = self.tables.counts(op.batch, mine + STOP * self.hooks.stop_wanted())
        state.samples = total % STOP
        if state.samples > self.global_batch > 0:
            self._warn_of_samples(state.samples)
        state.asked = self.tables.keys_asked(op.batch)
        if total == 0 or total >= STOP:
            self.data_ended = state.samples == 0
            self.stopped = total >= STOP
            self.end.found_at(op.batch)

    def _warn_of_samples(self, samples: int) -> None:
        """Tell once of a source that gives every rank the whole batch, or has a size of its own."""
        if self.mesh.world.rank == 0:
            log.warning(
                "a batch has %d samples over %d ranks, and settings say %d: `batches` of the "
                "source gives a rank its share of `global_batch` samples, else ranks train the "
                "same ones",
                *(samples, self.mesh.world.size, self.global_batch),
            )
        self.global_batch = 0

    def retrieve(self, op: Op) -> None:
        """Read rows from the stores."""
        self.in_flight[op.batch].read = self.tables.retrieve(op.batch)
        if isinstance(self.tables, ShardedTables):
            working = self.tables.in_flight[op.batch].working
            self.hooks.on_rows(self.first_step + op.batch, working)

    def sync(self, op: Op) -> None:
        """Refresh rows that the batch before has, too."""
        if op.batch == 0:  # nothing to refresh: it may come before all else of the batch
            return
        assert isinstance(self.tables, ShardedTables)
        self.in_flight[op.batch].refreshed = self.tables.sync(op.batch)

    def dense(self, op: Op) -> None:
        """Forward and backward of a micro-batch.

        The last one of a batch hands its gradients over while they are made, where they have a
        network of their own.
        """
        self._both_passes(op)
        if self._without_gradient is not None:
            self._warn_of_rows(self._without_gradient)
            self._without_gradient = None

    def _both_passes(self, op: Op) -> None:
        if self.half.graphs is not None and self._replayed(op, self.half.graphs):
            return
        buckets, last = self.half.buckets, op == self.tables.shape.last_dense(op.batch)
        if self.half.shards is not None:
            self.half.shards.sum_gradients(complete=last)
        if buckets is None or not last:
            backward(self._forward(op), here=BACKWARD_HERE and self.mesh.world.size == 1)
            return
        with buckets.filling():
            loss = self._forward(op)
            self._hand_over_totals(op, buckets)
            with buckets.during_backward(as_they_come=self.tables.shape.overlaps):
                loss.backward()

    def _replayed(self, op: Op, graphs: DenseGraphs) -> bool:
        """Both passes as one graph, if there is one for these shapes."""
        assert isinstance(self.tables, DeviceTables)
        state, found = self.in_flight[op.batch], self.tables.in_flight[op.batch]
        seen = [of.seen_OD for of in found if of.seen_OD is not None]
        done = graphs.replay(seen, [of.sizes for of in found], state.micros[0])
        if done is None:
            return False
        for of, gradients_OD in zip(found, done.seen_gradients, strict=True):
            of.gradients_OD = gradients_OD
        # The graph writes it again in the next batch; by then it has been summed or told.
        state.losses.append(done.total)
        state.weight += done.weight
        self._count_predictions(op, state, done.measured)
        if done.faults is not None:
            # With other ranks the host looks later, when the graph may have written it again.
            state.faults.append(done.faults if self._updates_alone else done.faults.clone())
            state.dense_checked = True
        buckets = self.half.buckets
        if buckets is not None:
            with buckets.filling():
                self._hand_over_totals(op, buckets)
                with buckets.during_backward(as_they_come=False):
                    pass  # it is over: all gradients are there
        return True

    def _hand_over_totals(self, op: Op, buckets: GradBuckets) -> None:
        """Let `totals` sum the loss and the weight; `apply` divides by what comes of it."""
        state = self.in_flight[op.batch]
        state.totals = state.totals_here(self.mesh)
        self.totals_to_apply[op.batch] = state.totals
        buckets.hand_over_totals(state.totals)

    def _forward(self, op: Op) -> Tensor:
        """The summed loss of a micro-batch."""
        state, micro = self.in_flight[op.batch], op.micro or 0
        rows = self.tables.lookup(op.batch, micro)
        if lengths := state.lengths[micro]:
            there = {name: of.to(self.device, non_blocking=True) for name, of in lengths.items()}
            rows = averaged(rows, there)
        if self.check_sums:  # once, where a mean would be trained silently
            self.check_sums = False
            pooled = {f.name for g in self.tables.groups for f in g.features if f.pooled}
            refuse_means(self._model, rows, state.micros[micro], pooled, self.half.shards)
            self._warn_of_weights(rows, state.micros[micro])
            self._without_gradient = self._awaited(rows)
        with in_precision(self.device, self.half.precision):
            loss = loss_of(self._model, rows, state.micros[micro], self.half.form)
        state.losses.append(loss.total.detach())
        state.weight += loss.weight
        self._count_predictions(op, state, loss.measured())
        return loss.total

    def _awaited(self, rows: Mapping[str, Tensor]) -> set[str]:
        """Features whose rows are yet to get a gradient; the backward pass takes them out."""
        trained = {f.name for g in self.tables.groups if g.trainable for f in g.features}
        awaited = {name for name, of in rows.items() if name in trained and of.numel()}

        def came(gradient: Tensor | None, name: str) -> None:
            if gradient is not None:
                awaited.discard(name)

        for name in awaited:
            rows[name].register_hook(partial(came, name=name))
        return awaited

    def _warn_of_rows(self, features: set[str]) -> None:
        """Tell of rows that are looked up and would never be trained."""
        for name in sorted(features) if self.mesh.world.rank == 0 else ():
            log.warning(
                "`dense` of %s gives the rows of %r no gradient, so they stay as they are; use "
                "them, or declare their table with trainable=False",
                *(type(self._model).__name__, name),
            )

    def _warn_of_weights(self, rows: Mapping[str, Tensor], batch: Batch) -> None:
        """Tell of weights that the model was given and does not read, as it trains without them."""
        unread = unread_weights(self._model, rows, batch, list(self.weights), self.half.shards)
        for column in unread if self.mesh.world.rank == 0 else ():
            where = "dense" if column in batch.dense else "sparse"
            log.warning(
                "%s does nothing: `dense` of %s does not read batch.%s[%r]",
                *(self.weights[column], type(self._model).__name__, where, column),
            )

    def _count_predictions(
        self, op: Op, state: TrainingBatch, measured: Mapping[str, tuple[Tensor, Tensor]]
    ) -> None:
        """For the metrics of training; the host does not wait for the sums."""
        if self.device.type == "cuda" and op.batch % GPU_SEEN_EVERY:
            return  # launching it costs the host more than the device
        for task, (predictions, labels) in measured.items():
            sums = click_sums(predictions, labels)
            state.seen[task] = sums if task not in state.seen else state.seen[task] + sums

    def totals(self, op: Op) -> None:
        """The batch's loss and weight, summed over all ranks as soon as the loss is known."""
        assert self.half.buckets is not None
        totals = self.half.buckets.take_totals()
        if totals is not None:
            self.mesh.world.all_reduce_dense(totals)

    def reduce(self, op: Op) -> None:
        """Dense gradients, summed over all ranks.

        In a network of their own each bucket leaves when it is complete; else all of them leave
        together, with the totals.
        """
        if self.half.buckets is not None:
            for flat in self.half.buckets.take_buckets():
                self.mesh.world.all_reduce_dense(flat)
            return
        state, parameters = self.in_flight[op.batch], self._parameters
        if self._updates_alone:
            return
        if self.half.shards is not None:
            self._reduce_totals(state)
            return
        if self.mesh.world.size == 1:
            state.totals = state.totals_here(self.mesh)
            fill_gradients(parameters)
            return
        totals = state.totals_here(self.mesh)
        for dtype, alike in self._by_dtype.items():
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in alike]
            behind = [totals] if dtype == totals.dtype else []
            flat = torch.cat([*(g.reshape(-1) for g in gradients), *behind])
            self.mesh.world.all_reduce(flat)
            split_gradients(alike, flat)
            if behind:
                state.totals = flat[-len(totals) :]
            state.kept += [gradients, flat]

    def _reduce_totals(self, state: TrainingBatch) -> None:
        """The totals alone, and whether a gradient is not finite: a rank knows its own shards.

        The backward pass has summed the gradients.
        """
        totals = state.totals_here(self.mesh)
        fault = not_finite(self._dense_gradients(), self.device).to(totals.dtype)
        flat = torch.cat([totals, fault.reshape(1)])
        self.mesh.world.all_reduce(flat)
        state.totals, state.dense_fault = flat[:-1], flat[-1]
        state.kept.append(flat)

    def norm(self, op: Op) -> None:
        """The norm of all gradients: of rows that this rank owns, of its peers, of dense weights.

        What is not finite is taken out before, as it would be before an update.
        """
        assert isinstance(self.tables, ShardedTables)
        buckets, sums = self.half.buckets, self.tables.in_flight[op.batch].sums
        dense = list(buckets.summed().values()) if buckets is not None else self._dense_gradients()
        self._drop_faults(op, sums, dense=dense)
        for number, gradients in sums.items():
            sums[number] = Gradients([summed_rows(gradients)], None, None)
        squares = [of_group.rows[0] for of_group in sums.values()] if self.rules.clip_rows else []
        of_shards = self.mesh.world if self.half.shards is not None else None
        norm = global_norm(dense, squares, self.mesh.shards, self.device, of_shards).reshape(())
        self.in_flight[op.batch].norm = norm
        self.norms_to_apply[op.batch] = norm

    def apply(self, op: Op) -> None:
        """One optimizer application per dense parameter."""
        assert self.half.buckets is not None
        self.half.buckets.set_gradients()
        norm = self.norms_to_apply.pop(op.batch, None)
        times = grad_scales(self.totals_to_apply.pop(op.batch))[1]
        if norm is None:
            faults = drop_dense_faults(self._dense_gradients(), clip=self.rules.clips_values)
            if faults and self.device.type == "cpu" and self.rules.stops:
                raise self._fault(op)
            found = self.applied[op.batch] = Applied(faults)
            times, found.mean_norm = self._clip_dense(times)
            self._step_dense(op, times)
            return
        if norm.is_cuda:  # the stream that made it may take its memory once it is let go
            norm.record_stream(torch.cuda.current_stream())
        self._step_dense(op, times * clip_factor(norm * times, self.rules.clip_norm))

    @property
    def _updates_alone(self) -> bool:
        """Whether the host knows what gradients are divided by, without a sum over ranks."""
        return isinstance(self.tables, DeviceTables) and self.mesh.world.size == 1

    def _update_alone(self, op: Op, tables: DeviceTables) -> None:
        """`update` where one rank has all of the batch; the loss goes to the host by a kernel."""
        state, clip = self.in_flight[op.batch], self.rules.clips_values
        fill_gradients(self._parameters)
        if not state.dense_checked:
            self._drop_faults(op, {}, dense=self._dense_gradients())
        times = grad_scale(state.weight)
        dense_times, state.mean_norm = self._clip_dense(times)
        self._step_dense(op, dense_times)
        step = self.first_step + op.batch + 1
        state.news = tables.update_alone(op.batch, times, step, clip=clip)
        (loss,) = state.losses
        state.news.tell(loss.float(), state.faults[0] if state.faults else None)

    def update(self, op: Op) -> None:
        """One optimizer application per row, and per dense parameter where there is no `apply`."""
        if isinstance(self.tables, DeviceTables) and self.mesh.world.size == 1:
            self._update_alone(op, self.tables)
            return
        state = self.in_flight[op.batch]
        if self.device.type == "cpu":
            self._check_loss(op, state.totals)
        if state.norm is None:  # else `norm` has looked already
            dense = [] if self.half.buckets or state.dense_checked else self._dense_gradients()
            self._drop_faults(op, self._row_sums(op), dense=dense)
        scales = grad_scales(state.totals)
        clipped = self._clip_all(state, scales)
        if self.half.buckets is None:  # else `apply` does it
            self._update_dense(op, state, clipped)
        self._update_rows(op, state, clipped if self.rules.clip_rows else scales)

    def _clip_all(self, state: TrainingBatch, scales: Tensor) -> Tensor:
        """The factors of all gradients, made smaller where `norm` has found them too large."""
        if state.norm is None:
            return scales
        state.mean_norm = state.norm * scales[1]
        return scales * clip_factor(state.mean_norm, self.rules.clip_norm)

    def _update_dense(self, op: Op, state: TrainingBatch, scales: Tensor) -> None:
        """The dense parameters' part of `update`."""
        self.norms_to_apply.pop(op.batch, None)
        dense_times = scales[1]
        if state.norm is None:
            dense_times, state.mean_norm = self._clip_dense(dense_times)
        self._step_dense(op, dense_times)

    def _update_rows(self, op: Op, state: TrainingBatch, scales: Tensor) -> None:
        """The rows' part of `update`."""
        times, step = scales[self._weight_of_rows], self.first_step + op.batch + 1
        if isinstance(self.tables, DeviceTables):
            clip = self.rules.clips_values
            faults, state.beyond = self.tables.update(op.batch, times, step, clip=clip)
            state.faults += faults
        else:
            state.beyond = self.tables.update(op.batch, times, step)

    @property
    def _weight_of_rows(self) -> int:
        """Which of the totals row gradients are divided by: all samples', or those of the group."""
        shape = self.tables.shape
        apart = shape.merge_every > 0 and shape.merge is Merge.AVERAGED
        return 2 + self.mesh.group if apart else 1

    def _clip_dense(self, times: Tensor | float) -> tuple[Tensor | float, Tensor | None]:
        """The factor of dense gradients, where those alone are clipped; and their mean's norm."""
        if not self.rules.clip_norm:
            return times, None
        norm = (global_norm(self._dense_gradients(), [], None, self.device) * times).reshape(())
        return times * clip_factor(norm, self.rules.clip_norm), norm

    def _dense_gradients(self) -> list[Tensor]:
        """Gradients of dense parameters, or this rank's part of each."""
        return [local(p.grad) for p in self._parameters if p.grad is not None]

    def _step_dense(self, op: Op, times: Tensor | float) -> None:
        if not self._parameters:
            return
        # A number of the host is an argument of kernels: no graph holds it, and nothing waits.
        set_rates(self.half.optimizer, self.half.schedule(self.first_step + op.batch + 1))
        gradients = self._dense_gradients()
        if gradients:  # a model may have no weights at all
            torch._foreach_mul_(gradients, times)  # pyright: ignore[reportPrivateImportUsage]
        self.half.optimizer.step()
        self.half.optimizer.zero_grad(set_to_none=True)

    def writeback(self, op: Op) -> None:
        """Write rows back, and report the batch: by now the host knows that it is done."""
        state = self.in_flight[op.batch]
        loss, faults = self._checked_loss_and_faults(op, state)
        before = self.applied.pop(op.batch - 1, None)
        if before is not None:
            faults += self._late_faults(op.batch - 1, before)
            state.mean_norm = before.mean_norm if state.mean_norm is None else state.mean_norm
        written = self.tables.writeback(op.batch)
        self.hooks.on_seen(state.seen)
        # Another stream may still hold what the batch before used; this one's update is over.
        self.in_flight.pop(op.batch)
        self.hooks.on_step(
            StepReport(
                step=self.first_step + op.batch + 1,
                loss=loss,
                samples=state.samples,
                rows_read=state.read,
                rows_refreshed=state.refreshed,
                rows_written=written,
                keys_asked=state.asked,
                faults=faults,
                flops=state.flops,
                grad_norm=math.nan if state.mean_norm is None else float(state.mean_norm),
            )
        )

    def _checked_loss_and_faults(self, op: Op, state: TrainingBatch) -> tuple[float, int]:
        """The mean loss of a batch, and how many faults it had; those that end the run do so."""
        if state.news is not None:
            assert isinstance(self.tables, DeviceTables)
            total, faults, beyond = self.tables.read_news(state.news)
            loss = self._checked(op, total, state.weight)
        else:
            loss = self._check_loss(op, state.totals)
            faults = sum(int(count) for count in state.faults)
            beyond = sum(int(count) for count in state.beyond)
        if faults and self.rules.stops:
            raise self._fault(op)
        if beyond and self.rules.stops:
            raise self._fault(
                op,
                "weights",
                "beyond 65,504, where float16 ends",
                "lower the learning rates, or keep tables as bfloat16",
            )
        return loss, faults + beyond

    def check_rest(self) -> None:
        """After a run: look at what `apply` found of the last batch."""
        for batch in sorted(self.applied):
            self._late_faults(batch, self.applied.pop(batch))

    def _late_faults(self, batch: int, found: Applied) -> int:
        faults = sum(int(count) for count in found.faults)
        if faults and self.rules.stops:
            raise self._fault(Op(K.APPLY, batch))
        return faults

    def _drop_faults(self, op: Op, sums: dict[int, Gradients], *, dense: Sequence[Tensor]) -> None:
        """Before gradients are applied: take out what is NaN or inf, and count it.

        Ranks agree without an exchange: dense gradients are the same on all of them, or `reduce`
        has looked at all shards, and a row's gradient is its owner's alone. On a GPU the host does
        not wait: it reads the count when it reads the loss. A skipped gradient is 0: SGD and
        AdaGrad then move nothing.
        """
        state = self.in_flight.get(op.batch)
        faults = state.faults if state is not None else []
        clip = self.rules.clips_values
        known = state.dense_fault if state is not None else None
        faults += drop_dense_faults(dense, clip=clip, known=known)
        for number in sums:
            faults += drop_row_faults(sums, number, clip=clip)
        if self.device.type == "cpu" and faults and self.rules.stops:
            raise self._fault(op)

    def _row_sums(self, op: Op) -> dict[int, Gradients]:
        """Row gradients as `update` will apply them; a GPU's own tables look at them only then."""
        if isinstance(self.tables, DeviceTables):
            return {}
        return self.tables.in_flight[op.batch].sums

    def _check_loss(self, op: Op, totals: Tensor) -> float:
        """The mean loss of a batch from its sum and weight; one that is no number ends the run."""
        return self._checked(op, *totals[:2].tolist())

    def _checked(self, op: Op, total: float, weight: float) -> float:
        loss = total / (weight or 1.0)
        if not math.isfinite(loss) and self.rules.stops:
            step = self.first_step + op.batch + 1
            self.hooks.keep_batch(step, self.in_flight[op.batch].on_host)
            raise LossError(step, loss)
        return loss

    def _fault(
        self,
        op: Op,
        what: str = "gradients",
        how: str = "NaN or inf",
        advice: str = "",
    ) -> RunError:
        """The error that ends a run; the batch is kept where there is a place for it."""
        step = self.first_step + op.batch + 1
        advice = advice or f"{remedy(step)}, or set run.non_finite = 'skip'"
        state = self.in_flight.get(op.batch)
        kept = self.hooks.keep_batch(step, state.on_host) if state is not None else None
        where = f" (the batch is kept in {str(kept)!r})" if kept else ""
        return RunError(f"{what} of step {step} are {how}{where}; {advice}")

    @property
    def _model(self) -> RecModel:
        return self.half.model  # type: ignore[return-value]


def query_keys(model: RecModel) -> Callable[[Batch], Mapping[str, Jagged]]:
    """Keys that tell which samples belong together; those drawn at random would only blur it."""
    return getattr(model, "query_keys", model.sparse_keys)


def backward(loss: Tensor, *, here: bool) -> None:
    """A backward pass; `here`: the calling thread issues all of it, on a GPU too.

    Else autograd has a thread for each GPU: to wake it, and to be woken, costs a short pass most of
    its time. Each op runs on the stream of its forward op, whichever thread issues it.
    """
    with torch.autograd.set_multithreading_enabled(not here):
        loss.backward()


def join_on(device: torch.device, on_host: Batch, there: Batch, lists: list[Tensor]) -> Tensor:
    """Lists of keys, or of lengths, behind each other on the device.

    Columns that lie so in the batch are there already. What a model makes of them is copied.
    """
    if on_host.packed is not None and there.packed is not None:
        found = there.packed.same_place(on_host.packed, lists)
        if found is not None:
            return found
    joined = torch.cat(lists)
    return joined if device.type == "cpu" else joined.pin_memory().to(device, non_blocking=True)
