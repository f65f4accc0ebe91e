"""`Trainer`: a model, its tables and a communicator, ready to train, evaluate and save."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.checkpoint import disk
from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.comm.communicator import make_mesh
from nestpipe.config import Table
from nestpipe.data import PinsBatches, Source, StreamingSource
from nestpipe.data.clustering import MicroBatchSplitter, WorkOf, deal_evenly
from nestpipe.embedding.device_tables import DeviceTables, can_route_on_device
from nestpipe.embedding.lifecycle import Lifecycle
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.embedding.store import RowStore
from nestpipe.embedding.table_groups import group_tables, mean_features
from nestpipe.errors import ConfigError, DataError
from nestpipe.kernels.rows.segments import COMM_DTYPES
from nestpipe.models.protocol import KnowsWork, RecModel, kind_of
from nestpipe.runtime import Lanes, StopSignal, Work, lanes_for, name_collectives, run, spans_for
from nestpipe.runtime.cuda import RECORD_EVERY
from nestpipe.runtime.executor import KEEP_BATCHES, NO_RUN, EndedRun, LateSpans
from nestpipe.schedule import (
    Kind,
    Op,
    Plan,
    Retrieval,
    check,
    with_gradient_norm,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.trace import Trace
from nestpipe.train.background import BackgroundWriter
from nestpipe.train.checkpoint import RunState, load_checkpoint, save_checkpoint
from nestpipe.train.config import (
    PipelineSettings,
    TrainSettings,
    choose_pipeline,
)
from nestpipe.train.dense import (
    CompiledDense,
    DenseGraphs,
    DenseTraining,
    ShardedDense,
    dense_optimizer,
    refuse_overlap,
    shard_dense,
    share_first_weights,
    trained_parameters,
)
from nestpipe.train.gradients import GradBuckets, drop_dense_faults
from nestpipe.train.loggers import RunningMetrics, Traffic
from nestpipe.train.ops import (
    GradientRules,
    OnKeys,
    OnRows,
    StepHooks,
    StepReport,
    TrainingWork,
)
from nestpipe.train.table_storage import TableStorage

log = logging.getLogger("nestpipe.train")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trainer has come."""

    step: int = 0
    """Batches trained, ever."""
    epoch: int = 0
    position: int = 0
    """Global batches of the epoch that were trained ..."""
    samples: int = 0
    """... and where in the epoch's samples the next one begins."""
    cursor: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of a stream: the offset of each partition after the last trained sample."""

    def after(self, batches: int, samples: int) -> Progress:
        """So many batches later, in the same epoch."""
        return replace(
            self,
            step=self.step + batches,
            position=self.position + batches,
            samples=self.samples + samples,
        )


class EpochReader:
    """Batches of an epoch that are being read, from where training stands.

    A run that ends in the middle of an epoch, for a checkpoint or an evaluation, leaves it for the
    next: another reader would decode and shuffle the same window of samples again.
    """

    def __init__(self, source: Source, place: tuple[int, int], batches: Iterator[Batch]) -> None:
        """`place`: the epoch, and where in its samples the next batch begins."""
        self.source, self.place = source, place
        self.taken = 0
        """Batches since it was made, or left for another run."""
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        if not isinstance(batch, Batch):
            raise DataError(f"`batches` of the source gave {kind_of(batch)}; give a Batch")
        self.taken += 1
        return batch


class Trainer:
    """One rank's trainer; every rank makes one and calls the same methods."""

    plan_reason: str
    """Why it has this plan, as a sentence."""
    progress: Progress = Progress()
    poison_buffers: bool = False
    """Whether runs that start from now on fill row buffers with NaN before they use them again."""
    loaded_from: Path | None = None
    """The checkpoint that it goes on from."""
    fault_folder: Path | None = None
    """Where a batch with NaN or inf gradients is kept when it ends a run."""
    stopped: bool = False
    """Whether some rank wanted to stop, so that all have ended."""
    idle: bool = False
    """Whether the last `fit` ended because a stream had nothing more for a while."""
    _left_open: EpochReader | None = None
    """What the last run was reading, if it ended in the middle of an epoch."""

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        settings: TrainSettings | None = None,
        comm: Communicator | None = None,
        *,
        lanes: Lanes | None = None,
        around: Callable[[Work], Work] = lambda work: work,
    ) -> None:
        """Tests choose the lanes, and put something `around` the work, as `inject_delays` does."""
        settings = _checked_settings(settings or TrainSettings(), tables)
        self.comm = comm or LocalCommunicator()
        self.device = choose_device(settings.device)
        self.settings, self.plan_reason = _with_plan(settings, self.device, self.comm.size)
        self.model = _checked(model).to(self.device)
        share_first_weights(self.model, self.comm)
        self.mesh = make_mesh(self.comm, settings.parallel.groups, settings.parallel.layout)
        tuned = self.settings.rows.tuned(tables)
        self.groups = group_tables(tuned, owner_sums=self.settings.pipeline.owners_add_up)
        sharded = settings.parallel.dense == "sharded"
        self.shards = shard_dense(self.model, self.comm) if sharded else None
        """The dense half, where each rank has a part of it."""
        self.plan = self._checked_plan()
        self.lanes = lanes or self._make_lanes()
        self.spans = spans_for(self.device, self.comm.rank)
        self.around = around
        """Put around the work of every op, for runs that start from now on."""
        self._dense = self._dense_training()
        self._storage = TableStorage(self.groups, self.settings, self.mesh, self.device)
        self._work_of = _work_of(self.model, self.settings.pipeline.balance)
        self._init_records()
        self._init_hooks()

    def _init_records(self) -> None:
        """What runs count and checkpoints keep."""
        self.traced_from = 0
        """Batches trained before the first one of `spans`."""
        self._longest = NO_RUN
        """Of the runs since the trace was put back."""
        self.traffic = Traffic()
        """What this rank has moved for training, ever."""
        self._sent_before: int | None = None
        """What it had sent when the run began that goes on now; None: none does."""
        self._running = RunningMetrics(self.device)
        self.about_model: Mapping[str, Any] = {}
        """What its checkpoints say of the model, so that others can make it again: a kind and its
        config. Empty: what a shipped model says of itself."""
        self.about_data = ""
        """Tells the files apart that it trains on; checkpoints keep it."""
        self.loaded_metrics: dict[str, float] = {}
        """The metrics of the checkpoint that it goes on from."""
        self.choices: list[dict[str, Any]] = []
        """Of an adaptive run: its settings so far, each from a step on; checkpoints keep them."""

    def _init_hooks(self) -> None:
        """Functions that a caller may set for runs that start from now on."""
        self.on_evicted: Callable[[int, dict[str, Tensor]], None] = lambda step, keys: None
        """Gets at each boundary the step, and this rank's keys by table whose rows have left."""
        self.stop_wanted: Callable[[], bool] = lambda: False
        """Asked before each batch: whether to end after those that have begun."""
        self.on_keys: OnKeys = lambda batch, keys: None
        """Gets the keys that this rank's micro-batches ask for, before they are sent."""
        self.on_rows: OnRows = lambda step, rows: None
        """Gets the rows of each step that this rank owns, where keys are routed by hosts."""

    def close(self) -> None:
        """Give the rows' memory back."""
        self._left_open = None
        if self._dense.buckets is not None:
            self._dense.buckets.close()
        self._storage.close()

    # Training.

    def fit(
        self,
        source: Source,
        *,
        steps: int | None = None,
        epochs: int = 1,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> Progress:
        """Train until this many epochs are done, or for this many more steps.

        Starts where the trainer stands, also in the middle of an epoch after a checkpoint. The
        epoch of a stream has no end: training returns when the stream has been idle for a while.
        """
        if not callable(getattr(source, "batches", None)):
            raise ConfigError(
                f"{kind_of(source)} is no source; give `open_source(...)`, or an object with the "
                "methods `batches(...)` and `empty()`"
            )
        if steps is not None and steps < 0:
            raise ConfigError(f"steps is {steps}; give 0 or a number above it")
        if self.progress.epoch >= epochs and steps != 0:
            log.warning(
                "nothing is trained: epochs is %d, and %d are done; it counts from the start, so "
                "give %d for one more",
                *(epochs, self.progress.epoch, self.progress.epoch + 1),
            )
        self.model.train()
        left, self.idle = steps, False
        while self.progress.epoch < epochs and left != 0 and not self.stopped:
            before = self.progress.step
            most = self._until_boundary(left)
            if isinstance(source, StreamingSource):
                epoch_ended = False
                if not self._fit_decided(source, most, on_step):
                    break
            else:
                epoch_ended = self._fit_epoch(source, most, on_step)
            trained = self.progress.step - before
            if trained and self._until_boundary(None) == 0:
                self._sweep()
            left = None if left is None else left - trained
            if epoch_ended:
                if trained == 0 and self.progress.position == 0:
                    raise ConfigError("the data has no samples; check its path and its filters")
                epoch = self.progress.epoch + 1
                self.progress = replace(self.progress, epoch=epoch, position=0, samples=0)
        return self.progress

    def _fit_decided(
        self, source: StreamingSource, most: int | None, on_step: Callable[[StepReport], None]
    ) -> bool:
        """Wait for the next batches of a stream, and train on them; whether there were any."""
        outcome = source.decide(
            self.progress.cursor,
            rank=self.comm.rank,
            global_batch=self.settings.batch,
            gather=self.comm.all_gather_values,
            most=most,
            stop_wanted=self.stop_wanted,
        )
        self.idle, self.stopped = outcome == "idle", outcome == "stopped"
        if outcome != "decided":
            return False
        before = self.progress.step
        # A batch whose samples are all broken ends the block, and is not read again.
        nothing = self._fit_epoch(source, source.num_decided, on_step)
        trained = self.progress.step - before
        self.progress = replace(self.progress, cursor=source.cursor_after(trained + nothing))
        return True

    def _fit_epoch(
        self, source: Source, most: int | None, on_step: Callable[[StepReport], None]
    ) -> bool:
        """Train on what is left of the epoch, for at most this many steps; whether it ended."""
        reading = self._reading_from(source)
        work = self._work(source, reading, most, on_step)
        self._run(work)
        # Rows that are read or saved between runs are the same in every group.
        self._storage.merge_rest(work.tables)
        trained = work.end()
        assert trained is not None, "a run ends only when its end is known"
        self.progress = self.progress.after(trained, trained * self.settings.batch)
        self.stopped = work.stopped
        # Where the end was found late, batches behind it are read already, and lost to the next.
        goes_on = reading.taken == trained and not work.data_ended
        if goes_on and not isinstance(source, StreamingSource):  # that decides block by block
            reading.taken, reading.place = 0, self._place
            self._left_open = reading
        return work.data_ended

    def _work(
        self,
        source: Source,
        batches: Iterator[Batch],
        most: int | None,
        on_step: Callable[[StepReport], None],
    ) -> TrainingWork:
        """The acts of a run on what is left of the epoch."""
        tables = self._make_training_tables(self.plan)
        tables.buffers.poison = self.poison_buffers
        step, half = self.progress.step, self._dense
        return TrainingWork(
            half=half if isinstance(tables, DeviceTables) else replace(half, graphs=None),
            tables=tables,
            batches=batches,
            empty=source.empty(),
            mesh=self.mesh,
            device=self.device,
            splitter=self._splitter(),
            rules=GradientRules(
                self.settings.non_finite, self.settings.clip_norm, self.settings.clip_rows
            ),
            hooks=StepHooks(
                on_step=self._counted(on_step, step),
                on_seen=self._running.count,
                on_keys=self.on_keys,
                on_rows=self.on_rows,
                keep_batch=self._keep_batch,
                stop_wanted=self.stop_wanted,
            ),
            first_step=step,
            end=StopSignal(most),
            check_sums=step == 0 and not _is_shipped(self.model),
            global_batch=self.settings.batch,
            weights=_weights_of(source),
        )

    def _run(self, work: TrainingWork) -> None:
        """Do all of the plan's ops, and note when they ran and what they moved."""
        if self._dense.buckets is not None:
            self._dense.buckets.begin_run()
        functions = self.around(work.functions())
        if self.comm.size > 1:
            functions = name_collectives(functions, self.comm.op_label)
        self._sent_before = sent = self.comm.bytes_sent
        self.comm.barrier()  # the traces of all ranks begin here
        self.traced_from = self.progress.step
        spans = LateSpans(self.spans)
        run(
            self.plan,
            functions,
            self.lanes,
            batches=work.end,
            spans=spans,
            host_acts=work.host_acts,
            idle=partial(_idle_and_untraced, work) if self.device.type == "cuda" else None,
            facts={
                "workers": self.comm.size,
                "samples_per_worker": self.settings.batch // self.comm.size,
            },
        )
        if self.device.type == "cuda":
            # The GPU may still write rows into host memory, which others may read from now on.
            torch.cuda.synchronize(self.device)
        work.check_rest()
        self._sent_before = None
        self.traffic.bytes_sent += self.comm.bytes_sent - sent
        # Keep the longest: a run cut short by a checkpoint shows less.
        self._longest = max(spans.run, self._longest, key=lambda ended: ended.num_batches)

    @property
    def trace(self) -> Trace:
        """When each op of the last batches ran, by this rank's clock."""
        trace = self._longest.read()
        self.trace = trace
        return trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        num_batches = len({span.batch for span in trace.spans})
        self._longest = EndedRun(num_batches, lambda: trace)

    def _counted(
        self, on_step: Callable[[StepReport], None], first_step: int
    ) -> Callable[[StepReport], None]:
        """Count what each step moves, then call `on_step`."""
        shape = self.plan.shape

        def counted(report: StepReport) -> None:
            kept = report.rows_refreshed if shape.retrieval is Retrieval.NEW else 0
            self.traffic.count(
                report,
                rows=report.rows_read + kept,
                compared=shape.handover is Kind.SYNC and report.step > first_step + 1,
            )
            on_step(report)

        return counted

    def _until_boundary(self, most: int | None) -> int | None:
        """Steps to train before rows come and go, at most `most`."""
        if self.lifecycle is None:
            return most
        steps = self.lifecycle.next_boundary - self.progress.step
        return steps if most is None else min(steps, most)

    def _sweep(self) -> None:
        """Let rows come and go; no batch is in flight."""
        self.on_evicted(self.progress.step, self._storage.sweep(self.progress.step))

    # Reading.

    @property
    def _place(self) -> tuple[int, int]:
        return self.progress.epoch, self.progress.samples

    def _reading_from(self, source: Source) -> EpochReader:
        """What the run before has left open, where training goes on from there."""
        left, self._left_open = self._left_open, None
        if left is not None and left.source is source and left.place == self._place:
            return left
        return EpochReader(source, self._place, self._batches_left(source))

    def _batches_left(self, source: Source) -> Iterator[Batch]:
        """This rank's part of each batch of the epoch that is not trained yet."""
        if isinstance(source, PinsBatches):  # what is cut into micro-batches is copied anyway
            source.pinned = self.device.type == "cuda" and self.plan.shape.micro_batches == 1
        start, offset = divmod(self.progress.samples, self.settings.batch)
        deal = source.batches
        if self._work_of is not None and self.comm.size > 1:
            deal = partial(deal_evenly, source, self._work_of)
        batches = deal(
            global_batch=self.settings.batch,
            rank=self.comm.rank,
            ranks=self.comm.size,
            seed=self.settings.seed,
            epoch=self.progress.epoch,
            start=start,
            **({"offset": offset} if offset else {}),
        )
        return iter(batches)

    def _splitter(self) -> MicroBatchSplitter:
        """How a batch becomes micro-batches."""
        pipeline, count = self.settings.pipeline, self.plan.shape.micro_batches
        sizes = (pipeline.first, pipeline.last)
        return MicroBatchSplitter(count, pipeline.micro_batching, *sizes, self._work_of)

    def _keep_batch(self, step: int, micros: Sequence[Batch]) -> Path | None:
        """Write this rank's part of a batch, for inspection."""
        if self.fault_folder is None:
            return None
        tensors: dict[str, Tensor] = {}
        for n, micro in enumerate(micros):
            tensors |= {f"{n}.dense.{name}": tensor for name, tensor in micro.dense.items()}
            for name, jagged in micro.sparse.items():
                tensors[f"{n}.sparse.{name}.values"] = jagged.values
                tensors[f"{n}.sparse.{name}.lengths"] = jagged.lengths
        kept = self.fault_folder / f"batch-{step:08d}-rank-{self.comm.rank:05d}.safetensors"
        with disk.explained(f"the batch of step {step}"):
            disk.make_folder(self.fault_folder)
            kept.unlink(missing_ok=True)
            disk.write_tensors(kept, tensors, finite=False)
        return kept

    # The plan.

    def _checked_plan(self) -> Plan:
        """The plan of the settings as it runs here, proven."""
        settings, sharded = self.settings, self.shards is not None
        made = settings.pipeline.make_plan(settings.parallel)
        if sharded:
            refuse_overlap(made, self.device)
        # No rank has all of a sharded gradient: its norm is a sum over ranks, too.
        norm_first = settings.clips_rows or (sharded and settings.clip_norm > 0)
        placed = self.placed(with_gradient_norm(made) if norm_first else made)
        check(placed.schedule(2 * placed.shape.lookahead + 3), stale=placed.name)
        return placed

    def placed(self, plan: Plan) -> Plan:
        """The plan as it runs here.

        Beside GPUs, keys have a network of their own, also those of one rank: the union of a later
        batch does not wait for the rows of this one. Dense sums have one where there are several
        ranks.
        """
        if self.device.type != "cuda" or not self.comm.separate_groups:
            return plan
        alone = self.comm.size == 1
        if plan.shape.overlaps or not (alone and self.routes_on_device(plan)):
            plan = with_separate_key_group(plan)
        return plan if alone or self.shards is not None else with_separate_dense_group(plan)

    def routes_on_device(self, plan: Plan) -> bool:
        """Whether the device routes the keys of that plan: its ops then never wait for the host."""
        if any(table.has_lifecycle for group in self.groups for table in group.tables):
            return False  # the host notes the keys
        comm_dtype = COMM_DTYPES[self.settings.pipeline.comm_dtype]
        return can_route_on_device(self.groups, plan.shape, self.device, self.mesh, comm_dtype)

    def _make_lanes(self) -> Lanes:
        """Where the ops of the plan run."""
        by_device = self.routes_on_device(self.plan)
        return lanes_for(
            self.plan.shape, self.device, by_device=by_device, alone=self.comm.size == 1
        )

    def change_pipeline(
        self, pipeline: PipelineSettings, *, device_memory: str | None = None
    ) -> None:
        """Train the next batches with other settings, and a pool of another size if given.

        No batch is in flight between two `fit`. Results are those of a trainer that has had these
        settings for these batches; how owners add up rows cannot change.
        """
        if pipeline.owners_add_up != self.settings.pipeline.owners_add_up:
            raise ConfigError(
                f"retrieval cannot change to {str(pipeline.retrieval)!r} during a run, because "
                "owners add up rows in one of the forms only; set owner_sums = 'off'"
            )
        before = (self.plan.shape.overlaps, self.routes_on_device(self.plan))
        resized = device_memory not in (None, self.settings.device_memory)
        memory = device_memory if device_memory is not None else self.settings.device_memory
        self.settings = replace(self.settings, pipeline=pipeline, device_memory=memory)
        self._left_open = None  # the deal of samples may be another one
        self.plan = self._checked_plan()
        after = (self.plan.shape.overlaps, self.routes_on_device(self.plan))
        if after != before:
            self.lanes = self._make_lanes()
        self._storage.settings = self.settings
        if resized or not self.plan.shape.pooled:
            self._storage.close_pools()
        self.trace = Trace(())

    def note_settings(self, reason: str) -> None:
        """Where settings are recorded, record those that it has now, if they are others."""
        pipeline = self.settings.pipeline
        now = {
            "micro_batches": pipeline.micro_batches,
            "first": pipeline.first,
            "last": pipeline.last,
            "device_memory": self.settings.device_memory,
        }
        if self.choices and any(self.choices[-1].get(name) != now[name] for name in now):
            self.choices.append({"step": self.progress.step, **now, "reason": reason})

    # The dense half.

    @property
    def dense_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of all that is not a row."""
        return self._dense.optimizer

    @property
    def dense_half(self) -> ShardedDense | CompiledDense | None:
        """The model's `dense` in another form, which training and evaluation call; None: itself."""
        return self._dense.form

    def _dense_training(self) -> DenseTraining:
        """The form of the dense half that these settings ask for, and its optimizer."""
        settings = self.settings
        compiled = CompiledDense(self.model, self.device) if settings.compile else None
        form = self.shards or compiled
        optimizer = dense_optimizer(self.model, settings.dense)
        apart = self.plan.shape.separate_dense_group
        return DenseTraining(
            model=self.model,
            optimizer=optimizer,
            schedule=settings.dense.factor,
            precision=settings.precision,
            form=form,
            shards=self.shards,
            # Compiled code has few launches left to save; torch decides what it captures.
            graphs=self._make_graphs() if form is None else None,
            buckets=GradBuckets(trained_parameters(self.model)) if apart else None,
        )

    def _make_graphs(self) -> DenseGraphs | None:
        """Replays of the dense half, where it can be captured."""
        # A graph reads sums where the exchange has put them; means are made after that.
        on_gpu = self.device.type == "cuda" and not mean_features(self.groups)
        capturable = on_gpu and getattr(self.model, "capturable", False)
        if not (capturable and self.settings.cuda_graphs):
            return None
        drop_faults = partial(drop_dense_faults, clip=self.settings.non_finite == "clip")
        # Gradients of several ranks are looked at when they have been summed.
        alone = self.comm.size == 1
        return DenseGraphs(self.model, drop_faults if alone else None, self.settings.precision)

    # Rows.

    @property
    def row_optimizer(self) -> RowOptimizer:
        """The optimizer of rows; a table may have a rate of its own."""
        return self._storage.optimizer

    @property
    def lifecycle(self) -> Lifecycle | None:
        """What is known of rows whose tables have a policy; None: no table has one."""
        return self._storage.lifecycle

    @property
    def stores(self) -> list[RowStore]:
        """The host stores, one for each group of tables, with all rows as they are now."""
        return self._storage.stores

    @property
    def table_names(self) -> list[str]:
        return self._storage.table_names

    def make_tables(self, plan: Plan) -> ShardedTables:
        """The tables as ops of that plan see them that only read; they never insert rows."""
        return self._storage.for_reading(plan)

    def _make_training_tables(self, plan: Plan) -> ShardedTables | DeviceTables:
        return self._storage.for_training(plan, by_device=self.routes_on_device(plan))

    def rows_of(self, table: str, keys: Tensor) -> Tensor:
        """Weights of some rows, the same on every rank; for looking, not for training."""
        return self._storage.rows_of(table, keys)

    def put_rows(
        self, table: str, keys: Tensor, weights: Tensor, state: Tensor | None = None
    ) -> None:
        """Insert rows, or replace them; every rank is given the same and keeps what it owns.

        Without their state, rows begin with a fresh one, as if they had not been trained yet.
        """
        self._storage.put_rows(table, keys, weights, state, self.progress.step)

    def track_rows(self, *, on: bool = True) -> None:
        """Note which rows are written from now on, for the next checkpoint; or no longer."""
        self._storage.track(on=on)

    # What a run says of itself.

    def row_counts(self) -> dict[str, int]:
        """Rows of each table in this rank's host store; those in a pool alone do not count."""
        return self._storage.row_counts()

    def pool_slots(self) -> tuple[int, int]:
        """Slots of this rank's pools that are taken, as the host last heard, and all of them."""
        return self._storage.pool_slots()

    def pool_memory(self) -> tuple[float, float]:
        """Bytes of this rank's pools, and what it could have if they took all that is free."""
        return self._storage.pool_memory()

    def training_bytes_sent(self) -> int:
        """Bytes that this rank has sent for training, while ops run too."""
        before = self._sent_before
        running = 0 if before is None else self.comm.bytes_sent - before
        return self.traffic.bytes_sent + running

    def running_metrics(self) -> dict[str, float]:
        """AUC and normalised entropy of what this rank trained on since they were last taken.

        From the predictions of the steps themselves, each before its update. Waits for the device.
        """
        return self._running.of_this_rank()

    def take_train_metrics(self) -> dict[str, float]:
        """The same over all ranks, which all call it; counting starts again at 0."""
        return self._running.take(self.comm)

    # Checkpoints.

    def save(
        self,
        folder: Path | str,
        *,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Write a checkpoint below the folder; all ranks take part.

        It holds the config of a job and metrics where they are given.
        """
        return save_checkpoint(
            Path(folder),
            self._state(config, metrics),
            self.model,
            self.dense_optimizer,
            self.groups,
            self.stores,
            self.mesh,
            self.lifecycle,
        )

    def save_in_background(
        self,
        writer: BackgroundWriter,
        parent: Path | None,
        *,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Path:
        """Begin to write what changed since the parent, where `track_rows` was called then.

        Without a parent it must have been called before any row was there.
        """
        return writer.begin(
            parent,
            self._state(config, metrics),
            self.model,
            self.dense_optimizer,
            self.groups,
            self._storage.tracked,
            self.lifecycle,
            self._storage.pools,
        )

    def load(self, checkpoint: Path | str) -> None:
        """Go on from a checkpoint, whatever number of ranks wrote it.

        Every file is verified while it is read. After an error make a new trainer: this one may
        have a part of the rows.
        """
        state = load_checkpoint(
            Path(checkpoint),
            self.model,
            self.dense_optimizer,
            self.groups,
            self._storage.tracked,
            self.mesh,
            self.row_optimizer.name,
            self.settings.dense.optimizer,
            self.lifecycle,
        )
        self.loaded_from = Path(checkpoint)
        self.loaded_metrics = dict(state.metrics)
        self.choices = [dict(one) for one in state.choices]
        self._storage.clear_pools()
        if self.lifecycle is not None:
            self.lifecycle.restore(state.lifecycle, state.step)
        # A checkpoint of format 1 counts batches alone.
        samples = state.position * self.settings.batch if state.samples < 0 else state.samples
        place = (state.step, state.epoch, state.position, samples)
        self.progress = Progress(*place, dict(state.cursor))

    def _state(
        self, config: Mapping[str, Any] | None, metrics: Mapping[str, float] | None
    ) -> RunState:
        return RunState(
            **asdict(self.progress),
            optimizer=self.row_optimizer.name,
            dense_optimizer=self.settings.dense.optimizer,
            config=config or {},
            metrics=metrics or {},
            lifecycle=self.lifecycle.state() if self.lifecycle is not None else {},
            model=self.about_model,
            data=self.about_data,
            choices=self.choices,
        )


def _is_shipped(model: nn.Module) -> bool:
    # A program of ours that runs as `python -m` is called __main__; its spec has its name.
    spec = getattr(sys.modules.get(type(model).__module__), "__spec__", None)
    return (spec.name if spec else type(model).__module__).startswith("nestpipe.")


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but torch finds no GPU; use 'cpu' or 'auto'")
    return torch.device(name)


def _idle_and_untraced(work: TrainingWork, op: Op) -> bool:
    """Whether an op has nothing to do; those of batches that are traced run all the same."""
    return op.batch % RECORD_EVERY >= KEEP_BATCHES and work.is_idle(op)


def _checked_settings(settings: TrainSettings, tables: Sequence[Table]) -> TrainSettings:
    if not isinstance(settings, TrainSettings):
        raise ConfigError(f"settings is {kind_of(settings)}; give TrainSettings(...)")
    if strange := [table for table in tables if not isinstance(table, Table)]:
        raise ConfigError(f"tables has {kind_of(strange[0])}; give a list of Table(...)")
    return settings


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, RecModel):
        raise ConfigError(
            f"{type(model).__name__} is not a model for NestPipe; give it the methods "
            "`sparse_keys(batch)` and `dense(rows, batch)`"
        )
    for name, value in model.state_dict(keep_vars=True).items():
        if fault := _state_fault(value):
            raise ConfigError(f"{name!r} of {type(model).__name__} {fault}")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{name!r} of {type(model).__name__} is an {type(module).__name__} with "
                "sparse=True, whose gradients torch's optimizers do not take; leave sparse out, or "
                "make it a Table"
            )
    return model


def _state_fault(value: object) -> str:
    """Why ranks cannot share an entry of a model's `state_dict`, or checkpoints hold it."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, which no checkpoint holds; make it a buffer"
    if nn.parameter.is_lazy(value):
        return "has no shape yet; call the model once before it is trained, or give its layer sizes"
    if value.is_complex():
        return "has complex numbers; keep real and imaginary parts, as torch.view_as_real does"
    if any(
        size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        return "keeps one number for several entries; call .contiguous() on what was expanded"
    return ""


def _weights_of(source: Source) -> dict[str, str]:
    """The columns of weights of a source, and what of the config each follows from."""
    keys = {"weight": "data.parquet.sample_weight", "weights": "data.parquet.weights"}
    columns = getattr(source, "columns", ())  # one that a user wrote may have none
    return {
        c.name: f"{keys[c.kind]}{f' of {c.of!r}' * bool(c.of)}" for c in columns if c.kind in keys
    }


def _work_of(model: nn.Module, balance: str) -> WorkOf | None:
    """How much work a sample is, where that is balanced."""
    if balance == "samples":
        return None
    if not isinstance(model, KnowsWork):
        raise ConfigError(
            f"pipeline.balance is 'work' but {type(model).__name__} does not say how much work a "
            "sample is; use 'samples', or give the model a method `step_flops(batch)`"
        )
    return model.step_flops


def _with_plan(
    settings: TrainSettings, device: torch.device, ranks: int
) -> tuple[TrainSettings, str]:
    """The settings with the plan that `auto` stands for here, and why it is that one."""
    sharded = settings.parallel.dense == "sharded"
    choice = choose_pipeline(settings.pipeline, device.type, ranks, sharded=sharded)
    return replace(settings, pipeline=choice.pipeline), choice.reason
