"""`Trainer`: a model, its tables and a communicator, ready to train, evaluate and save."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.checkpoint import disk
from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.comm.communicator import make_mesh
from nestpipe.comm.process_group import DistributedCommunicator
from nestpipe.config import Table
from nestpipe.config.sections import first_match, rates_of, refuse_idle
from nestpipe.data import PinsBatches, Source, StreamingSource
from nestpipe.data.clustering import WorkOf, deal_evenly
from nestpipe.embedding.device_tables import DeviceTables, can_route_on_device
from nestpipe.embedding.lifecycle import AdmittedRows, Lifecycle, RowLifecycle
from nestpipe.embedding.optimizers import RowOptimizer, row_optimizer
from nestpipe.embedding.pool import RowPool, free_memory, pool_sizes, pools_on_one_device
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.embedding.store import RowStore, SsdOptions, open_store, ssd_options
from nestpipe.embedding.store.protocol import ReadOnlyRows
from nestpipe.embedding.table_groups import TableGroup, group_tables, mean_features
from nestpipe.errors import ConfigError
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.segments import COMM_DTYPES
from nestpipe.models.compiled import CompiledDense
from nestpipe.models.metrics import CLICK_BINS, read_click_sums
from nestpipe.models.protocol import KnowsWork, RecModel
from nestpipe.runtime import Lanes, StopSignal, Work, lanes_for, name_collectives, run, spans_for
from nestpipe.runtime.cuda import RECORD_EVERY
from nestpipe.runtime.executor import KEEP_BATCHES
from nestpipe.schedule import (
    Kind,
    Merge,
    Op,
    Plan,
    Retrieval,
    check,
    with_gradient_norm,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.trace import Trace
from nestpipe.train.background import BackgroundWriter, TrackedStore
from nestpipe.train.checkpoint import RunState, load_checkpoint, put_rows, save_checkpoint
from nestpipe.train.config import (
    DenseSettings,
    PipelineSettings,
    TrainSettings,
    choose_pipeline,
)
from nestpipe.train.dense import DenseGraphs, GradBuckets, ShardedDense
from nestpipe.train.loggers import Traffic
from nestpipe.train.ops import (
    MicroBatchSplitter,
    OnKeys,
    StepReport,
    TrainingWork,
    drop_dense_faults,
)


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


class EpochReader:
    """Batches of an epoch that are being read, from where training stands.

    A run that ends in the middle of an epoch, for a checkpoint or an evaluation, leaves it for the
    next: reading anew would decode and shuffle the same window of samples once more.
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
        self.taken += 1
        return batch


class Trainer:
    """One rank's trainer; every rank makes one and calls the same methods."""

    plan_reason: str
    """Why it has this plan, as a sentence."""
    progress: Progress = Progress()
    trace: Trace = Trace(())
    """When each op of the last batches ran, by this rank's clock."""
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
        settings = settings or TrainSettings()
        self.comm = comm or LocalCommunicator()
        self.device = choose_device(settings.device)
        self.settings, self.plan_reason = _with_plan(settings, self.device, self.comm.size)
        self.model = _checked(model).to(self.device)
        _share_first_weights(self.model, self.comm)
        self.mesh = make_mesh(self.comm, settings.parallel.groups, settings.parallel.layout)
        tables = self.settings.rows.tuned(tables)
        self.groups = group_tables(tables, owner_sums=self.settings.pipeline.owners_add_up)
        sharded = settings.parallel.dense == "sharded"
        self.shards = shard_dense(self.model, self.comm) if sharded else None
        """The dense half, where each rank has a part of it."""
        self.plan = self._checked_plan()
        self.lanes = lanes or self._make_lanes()
        self.spans = spans_for(self.device, self.comm.rank)
        self.traced_from = 0
        """Batches trained before the first one of `spans`."""
        self.traffic = Traffic()
        """What this rank has moved for training, ever."""
        self._sent_before: int | None = None
        """What it had sent when the ops began that run now; None: none do."""
        self.around = around
        """Put around the work of every op, for runs that start from now on."""
        self.row_optimizer = _row_optimizer(self.settings, self.groups)
        self.dense_optimizer = _dense_optimizer(self.model, self.settings.dense)
        self._pools: list[RowPool] = []
        self._stores = [TrackedStore(store) for store in self._open_stores()]
        self.lifecycle = self._open_lifecycle()
        """What is known of rows whose tables have a policy; None: no table has one."""
        self.on_evicted: Callable[[int, dict[str, Tensor]], None] = lambda step, keys: None
        """Told at each boundary: the step, and this rank's keys by table whose rows have left."""
        apart = self.plan.shape.separate_dense_group
        self._grad_buckets = GradBuckets(_trained(self.model)) if apart else None
        compiled = CompiledDense(self.model, self.device) if settings.compile else None
        self.dense_half = self.shards or compiled
        """The model's `dense` in another form, which training and evaluation call; None: itself."""
        self._graphs = self._make_graphs()
        self._work_of = _work_of(self.model, self.settings.pipeline.balance)
        self.about_model: Mapping[str, Any] = {}
        """What its checkpoints say of the model, so that others can make it again: a kind and its
        config. Empty: what a shipped model says of itself."""
        self.about_data = ""
        """Tells the files apart that it trains on; checkpoints keep it."""
        self.loaded_metrics: dict[str, float] = {}
        """The metrics of the checkpoint that it goes on from."""
        self.choices: list[dict[str, Any]] = []
        """Of an adaptive run: its settings so far, each from a step on; checkpoints keep them."""
        self.stop_wanted: Callable[[], bool] = lambda: False
        """Asked before each batch: whether to end after those that have begun."""
        self.on_keys: OnKeys = lambda batch, keys: None
        """Told of each batch which keys this rank's micro-batches ask for, before they are sent."""
        self._seen: dict[str, Tensor] = {}
        """What `click_sums` made of this rank's batches, by task, since it was last taken."""

    def _make_graphs(self) -> DenseGraphs | None:
        """Replays of the dense half, where it can be captured."""
        # A graph reads sums where the exchange has put them; means are made after that.
        on_gpu = self.device.type == "cuda" and not mean_features(self.groups)
        capturable = on_gpu and getattr(self.model, "capturable", False)
        # Compiled code has few launches left to save, and it is not ours to know what it captures.
        if not (capturable and self.settings.cuda_graphs and self.dense_half is None):
            return None
        drop_faults = partial(drop_dense_faults, clip=self.settings.non_finite == "clip")
        # Gradients of several ranks are looked at when they have been summed.
        alone = self.comm.size == 1
        return DenseGraphs(self.model, drop_faults if alone else None, self.settings.precision)

    def _make_lanes(self) -> Lanes:
        """Where the ops of the plan run."""
        by_device = self.routes_on_device(self.plan)
        return lanes_for(
            self.plan.shape, self.device, by_device=by_device, alone=self.comm.size == 1
        )

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

    def change_pipeline(
        self, pipeline: PipelineSettings, *, device_memory: str | None = None
    ) -> None:
        """Train the next batches with other settings, and a pool of another size if given.

        No batch is in flight between two `fit`. Results are those of a trainer that has had these
        settings for these batches; how owners add up rows is settled for good when it is made.
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
        if resized or not self.plan.shape.pooled:
            for pool in self._pools:
                pool.flush()
            self._pools = []
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

    def pool_memory(self) -> tuple[float, float]:
        """Bytes of this rank's pools, and what it could have if they took all that is free."""
        mine = sum(pool.num_bytes() for pool in self._pools)
        sharing = pools_on_one_device(self.device, self.comm.size)
        return mine, mine + free_memory(self.device) / sharing

    def _open_stores(self) -> list[RowStore]:
        settings, shards = self.settings, self.mesh.shards.size
        layouts = [
            group.layout(self.row_optimizer, seed=settings.seed, ranks=shards)
            for group in self.groups
        ]
        ssd: Sequence[SsdOptions | None] = [None] * len(layouts)
        if settings.store == "ssd":
            sharing = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.comm.size)))
            ssd = ssd_options(settings.store_path, settings.host_memory, layouts, sharing)
        threads = settings.store_threads or None
        native = settings.native and native_wanted()
        return [
            open_store(layout, native=native, threads=threads, ssd=options)
            for layout, options in zip(layouts, ssd, strict=True)
        ]

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
        """Whether keys of that plan are routed by the device, so that its ops wait for nobody."""
        if any(table.has_lifecycle for group in self.groups for table in group.tables):
            return False  # who notes keys is the host
        comm_dtype = COMM_DTYPES[self.settings.pipeline.comm_dtype]
        return can_route_on_device(self.groups, plan.shape, self.device, self.mesh, comm_dtype)

    @property
    def stores(self) -> list[RowStore]:
        """The host stores, one for each group of tables, with all rows as they are now."""
        for pool in self._pools:
            pool.flush()
        return list(self._stores)

    def row_counts(self) -> dict[str, int]:
        """Rows of each table in this rank's host store; those in a pool alone do not count."""
        return {
            table.name: count
            for group, store in zip(self.groups, self._stores, strict=True)
            for table, count in zip(group.tables, store.num_rows(), strict=True)
        }

    def training_bytes_sent(self) -> int:
        """Bytes that this rank has sent for training, while ops run too."""
        before = self._sent_before
        running = 0 if before is None else self.comm.bytes_sent - before
        return self.traffic.bytes_sent + running

    def pool_slots(self) -> tuple[int, int]:
        """Slots of this rank's pools that are taken, as the host last heard, and all of them."""
        slots = sum(pool.num_slots for pool in self._pools)
        return slots - sum(pool.free_known for pool in self._pools), slots

    def make_tables(self, plan: Plan) -> ShardedTables:
        """The tables as ops of that plan see them that only read; they never insert rows."""
        return self._sharded(plan, self.stores)

    def _open_lifecycle(self) -> Lifecycle | None:
        """Only for tables with a policy."""
        threads = self.settings.store_threads or None
        of_groups = [
            RowLifecycle(
                group,
                store,
                group.max_rows(self.row_optimizer),
                self.mesh.shards,
                native=self.settings.native and native_wanted(),
                threads=threads,
            )
            if any(table.has_lifecycle for table in group.tables)
            else None
            for group, store in zip(self.groups, self._stores, strict=True)
        ]
        if not any(of_groups):
            return None
        parallel = self.settings.parallel
        if parallel.groups > 1 and parallel.merge is not Merge.EXACT:
            raise ConfigError(
                f"parallel.merge is {str(parallel.merge)!r} and a table has a row policy, which "
                "needs all groups to see the same keys; set parallel.merge = 'exact'"
            )
        return Lifecycle(of_groups, self.settings.lifecycle_every)

    @property
    def _training_stores(self) -> list[RowStore]:
        """The host stores as training sees them.

        It cannot write to those of frozen tables, and rows of some keys are not stored.
        """
        policies = self.lifecycle.of_groups if self.lifecycle is not None else []
        seen: list[RowStore] = []
        for g, (group, store) in enumerate(zip(self.groups, self._stores, strict=True)):
            policy = policies[g] if policies else None
            if policy is not None and policy.selects:
                seen.append(AdmittedRows(store, policy))
            else:
                seen.append(store if group.trainable else ReadOnlyRows(store))
        return seen

    def _make_training_tables(self, plan: Plan) -> ShardedTables | DeviceTables:
        if plan.shape.retrieval is not Retrieval.POOLED:
            return self._sharded(plan, self._training_stores, training=True)
        self._pools = self._pools or self._open_pools()
        for pool in self._pools:
            pool.begin_run(plan.shape.buffers)
        if self.routes_on_device(plan):
            return DeviceTables(
                self.groups,
                self._pools,
                self.row_optimizer,
                self.mesh.shards,
                plan.shape,
                self.device,
                COMM_DTYPES[self.settings.pipeline.comm_dtype],
            )
        return self._sharded(plan, self._training_stores, training=True)

    def _open_pools(self) -> list[RowPool]:
        stores = self._training_stores
        layouts = [store.layout for store in stores]
        sharing = pools_on_one_device(self.device, self.comm.size)
        sizes = pool_sizes(self.settings.device_memory, layouts, self.device, sharing)
        return [
            RowPool(store, slots, self.device, pin=self.settings.pin_rows)
            for store, slots in zip(stores, sizes, strict=True)
        ]

    def _sharded(
        self, plan: Plan, stores: Sequence[RowStore], *, training: bool = False
    ) -> ShardedTables:
        return ShardedTables(
            self.groups,
            stores,
            self.row_optimizer,
            self.mesh,
            plan.shape,
            self.device,
            in_place=training and self.settings.in_place,
            pin=training and self.settings.pin_rows,
            comm_dtype=COMM_DTYPES[self.settings.pipeline.comm_dtype],
            pools=self._pools if training else (),
            lifecycle=self.lifecycle if training else None,
        )

    def fit(
        self,
        source: Source,
        *,
        steps: int | None = None,
        epochs: int = 1,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> Progress:
        """Train until so many epochs are done, or so many more steps; returns how far it came.

        Goes on where the trainer stands, also in the middle of an epoch after a checkpoint. The
        epoch of a stream has no end; it ends where the stream has nothing more for a while.
        """
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

    def _until_boundary(self, most: int | None) -> int | None:
        """Steps to train before rows come and go, at most `most`."""
        if self.lifecycle is None:
            return most
        steps = self.lifecycle.next_boundary - self.progress.step
        return steps if most is None else min(steps, most)

    def _sweep(self) -> None:
        """Let rows come and go; no batch is in flight."""
        assert self.lifecycle is not None
        for pool in self._pools:
            pool.flush()
        evicted = self.lifecycle.sweep(self.progress.step)
        keys = {of.table: of.keys for of in evicted}
        for group, pool in zip(self.groups, self._pools, strict=False):  # only with `pooled`
            for number, table in enumerate(group.tables):
                pool.forget_rows(number, keys.get(table.name, torch.empty(0, dtype=torch.int64)))
        self.on_evicted(self.progress.step, keys)

    def _fit_epoch(
        self, source: Source, most: int | None, on_step: Callable[[StepReport], None]
    ) -> bool:
        """Train on what is left of the epoch, at most so many steps; whether it ended."""
        reading = self._reading_from(source)
        work = self._work(source, reading, most, on_step)
        self._run(work)
        # Who looks at rows now, or saves them, finds the same in every group.
        if work.tables.merge_is_due:
            for pool in self._pools:
                pool.flush()
            work.tables.merge_rest(self._training_stores)
            for pool in self._pools:
                pool.clear()
        trained = work.end()
        assert trained is not None, "a run ends only when its end is known"
        self.progress = replace(
            self.progress,
            step=self.progress.step + trained,
            position=self.progress.position + trained,
            samples=self.progress.samples + trained * self.settings.batch,
        )
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
        settings, step = self.settings, self.progress.step
        return TrainingWork(
            model=self.model,
            tables=tables,
            dense_optimizer=self.dense_optimizer,
            batches=batches,
            empty=source.empty(),
            mesh=self.mesh,
            device=self.device,
            splitter=self._splitter(),
            first_step=step,
            on_step=self._counted(on_step, step),
            end=StopSignal(most),
            stop_wanted=self.stop_wanted,
            check_sums=step == 0 and not _is_shipped(self.model),
            precision=settings.precision,
            non_finite=settings.non_finite,
            keep_batch=self._keep_batch,
            dense_schedule=settings.dense.factor,
            clip_norm=settings.clip_norm,
            clip_rows=settings.clip_rows,
            shards=self.shards,
            on_seen=self._count_seen,
            on_keys=self.on_keys,
            grad_buckets=self._grad_buckets,
            dense_half=self.dense_half,
            graphs=self._graphs if isinstance(tables, DeviceTables) else None,
        )

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

    def _run(self, work: TrainingWork) -> None:
        """Do all of the plan's ops, and note when they ran and what they moved."""
        if self._grad_buckets is not None:
            self._grad_buckets.begin_run()
        functions = self.around(work.functions())
        if self.comm.size > 1:
            functions = name_collectives(functions, self.comm.op_label)
        self._sent_before = sent = self.comm.bytes_sent
        self.comm.barrier()  # the traces of all ranks begin here
        self.traced_from = self.progress.step
        trace = run(
            self.plan,
            functions,
            self.lanes,
            batches=work.end,
            spans=self.spans,
            host_acts=work.host_acts,
            idle=partial(_idle_and_untraced, work) if self.device.type == "cuda" else None,
            facts={
                "workers": self.comm.size,
                "samples_per_worker": self.settings.batch // self.comm.size,
            },
        )
        if self.device.type == "cuda":
            # The GPU may still write rows into host memory, where anybody may look for them now.
            torch.cuda.synchronize(self.device)
        work.check_rest()
        self._sent_before = None
        self.traffic.bytes_sent += self.comm.bytes_sent - sent
        # A run cut short, by a checkpoint or the end of the data, would tell less.
        self.trace = max(trace, self.trace, key=_num_batches)

    def _counted(
        self, on_step: Callable[[StepReport], None], first_step: int
    ) -> Callable[[StepReport], None]:
        """Count what each step moves, before the caller hears of it."""
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

    def _count_seen(self, seen: Mapping[str, Tensor]) -> None:
        """Add up, on the stream that tells of a batch; only who reads the sums waits for them."""
        for task, sums in seen.items():
            if sums.is_cuda:  # another stream made them
                sums.record_stream(torch.cuda.current_stream())
            self._seen[task] = self._seen[task] + sums if task in self._seen else sums.clone()

    def running_metrics(self) -> dict[str, float]:
        """AUC and normalised entropy of what this rank trained on since they were last taken.

        From the predictions of the steps themselves, each before its update. Waits for the device.
        """
        return _read_seen(self._seen)

    def take_train_metrics(self) -> dict[str, float]:
        """The same over all ranks, which all call it; the next ones begin anew."""
        told = cast("list[list[str]]", self.comm.all_gather_values(sorted(self._seen)))
        every: dict[str, Tensor] = {}
        for task in sorted({task for of_rank in told for task in of_rank}):
            none = torch.zeros(2 * CLICK_BINS + 3, dtype=torch.float64, device=self.device)
            every[task] = self._seen.get(task, none)
            self.comm.all_reduce(every[task])
        self._seen = {}
        return _read_seen(every)

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

    def track_rows(self, *, on: bool = True) -> None:
        """Note which rows are written from now on, for the next checkpoint; or no longer."""
        for pool in self._pools:
            pool.flush()  # what they hold was written before
        for store in self._stores:
            store.track(on=on)

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
        began = time.perf_counter()
        for pool in self._pools:
            pool.flush()
        writer.seconds += time.perf_counter() - began
        state = self._state(config, metrics)
        return writer.begin(
            parent,
            state,
            self.model,
            self.dense_optimizer,
            self.groups,
            self._stores,
            self.lifecycle,
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
            self._stores,
            self.mesh,
            self.row_optimizer.name,
            self.settings.dense.optimizer,
            self.lifecycle,
        )
        self.loaded_from = Path(checkpoint)
        self.loaded_metrics = dict(state.metrics)
        self.choices = [dict(one) for one in state.choices]
        for pool in self._pools:
            pool.clear()
        if self.lifecycle is not None:
            self.lifecycle.restore(state.lifecycle, state.step)
        # A checkpoint of format 1 counts batches alone.
        samples = state.position * self.settings.batch if state.samples < 0 else state.samples
        place = (state.step, state.epoch, state.position, samples)
        self.progress = Progress(*place, dict(state.cursor))

    def rows_of(self, table: str, keys: Tensor) -> Tensor:
        """Weights of some rows, the same on every rank; for looking, not for training."""
        for group, store in zip(self.groups, self.stores, strict=True):
            for number, declared in enumerate(group.tables):
                if declared.name == table:
                    counts = [0] * len(group.tables)
                    counts[number] = len(keys)
                    rows = torch.empty(len(keys), store.layout.width)
                    store.gather(keys.contiguous(), counts, rows)
                    home = group.table_owners[number]
                    shards = self.mesh.shards
                    mine = owner_of(keys, number, shards.size, home) == shards.rank
                    weights = torch.where(mine[:, None], rows[:, : group.dim], 0.0).contiguous()
                    weights = weights.to(self.device)
                    shards.all_reduce(weights)
                    return weights.cpu()
        raise ConfigError(f"there is no table {table!r}; the tables are {self.table_names}")

    def put_rows(
        self, table: str, keys: Tensor, weights: Tensor, state: Tensor | None = None
    ) -> None:
        """Insert rows, or replace them; every rank is given the same and keeps what it owns.

        Without their state, rows begin with a fresh one, as if they had not been trained yet.
        """
        for g, (group, store) in enumerate(zip(self.groups, self._stores, strict=True)):
            for number, declared in enumerate(group.tables):
                if declared.name == table:
                    for pool in self._pools:
                        pool.flush()
                    mine = put_rows(group, number, store, self.mesh.shards, keys, weights, state)
                    policy = self.lifecycle.of_groups[g] if self.lifecycle is not None else None
                    if policy is not None:
                        policy.put(number, mine, self.progress.step)
                    for pool in self._pools:
                        pool.clear()
                    return
        raise ConfigError(f"there is no table {table!r}; the tables are {self.table_names}")

    @property
    def table_names(self) -> list[str]:
        return [table.name for group in self.groups for table in group.tables]

    def close(self) -> None:
        """Give the rows' memory back."""
        self._left_open = None
        if self._grad_buckets is not None:
            self._grad_buckets.close()
        self._pools = []
        if self.lifecycle is not None:
            self.lifecycle.close()
        for store in self._stores:
            store.close()


def _is_shipped(model: nn.Module) -> bool:
    # A program of ours that runs as `python -m` is called __main__; its spec has its name.
    spec = getattr(sys.modules.get(type(model).__module__), "__spec__", None)
    return (spec.name if spec else type(model).__module__).startswith("nestpipe.")


def _read_seen(seen: Mapping[str, Tensor]) -> dict[str, float]:
    return {
        f"{task}/train_{name}" if task else f"train_{name}": value
        for task, sums in seen.items()
        for name, value in read_click_sums(sums).items()
    }


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


def _num_batches(trace: Trace) -> int:
    return len({span.batch for span in trace.spans})


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, RecModel):
        raise ConfigError(
            f"{type(model).__name__} is not a model for NestPipe; give it the methods "
            "`sparse_keys(batch)` and `dense(rows, batch)`"
        )
    return model


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


def shard_dense(model: nn.Module, comm: Communicator) -> ShardedDense | None:
    """The model with its parameters sharded over all ranks; None where there is nothing to cut."""
    if comm.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return None
    if not isinstance(comm, DistributedCommunicator):
        raise ConfigError(
            "parallel.dense is 'sharded', which needs ranks that are processes; start them with "
            "--ranks or torchrun"
        )
    return ShardedDense(model, comm)


def refuse_overlap(plan: Plan, device: torch.device) -> None:
    """On GPUs collectives of the dense half and of the plan must have one order on all ranks."""
    if device.type == "cuda" and plan.shape.overlaps:
        raise ConfigError(
            f"parallel.dense is 'sharded' and pipeline.plan {plan.name!r}, whose collectives could "
            "meet those of the dense half on a GPU in another order on each rank; use plan "
            "'serial', or dense = 'replicated'"
        )


def _share_first_weights(model: nn.Module, comm: Communicator) -> None:
    """Every rank starts with the dense weights of rank 0, whatever its own random state was."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if comm.rank != 0:
                tensor.zero_()
            comm.all_reduce(tensor)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _with_plan(
    settings: TrainSettings, device: torch.device, ranks: int
) -> tuple[TrainSettings, str]:
    """The settings with the plan that `auto` stands for here, and why it is that one."""
    sharded = settings.parallel.dense == "sharded"
    choice = choose_pipeline(settings.pipeline, device.type, ranks, sharded=sharded)
    return replace(settings, pipeline=choice.pipeline), choice.reason


def _row_optimizer(settings: TrainSettings, groups: Sequence[TableGroup]) -> RowOptimizer:
    """How rows move; a table whose rate would take all of a weight is refused."""
    rows, parallel = settings.rows, settings.parallel
    scale = rows.scale or float(parallel.groups if parallel.merge == "averaged" else 1)
    made = row_optimizer(
        *(rows.optimizer, rows.lr, rows.eps, scale),
        betas=(rows.betas[0], rows.betas[1]),
        weight_decay=rows.weight_decay,
        schedule=rows.factor,
    )
    for group in groups:
        _refuse_whole_decay(group.tuned(made), group)
    return made


def _refuse_whole_decay(optimizer: RowOptimizer, group: TableGroup) -> None:
    if optimizer.lr * optimizer.weight_decay >= 1:
        raise ConfigError(
            f"rows.weight_decay is {optimizer.weight_decay} and the rate of table "
            f"{group.tables[0].name!r} {optimizer.lr}: a step would take all of a weight; lower one"
        )


def _dense_optimizer(model: nn.Module, settings: DenseSettings) -> torch.optim.Optimizer:
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    groups = _parameter_groups(model, settings)
    parameters = [parameter for group in groups for parameter in group["params"]]
    # One launch for all parameters, where torch has it for the device.
    on_gpu = bool(parameters) and all(p.is_cuda and p.is_floating_point() for p in parameters)
    fused = {"fused": True} if on_gpu and settings.optimizer != "adagrad" else {}
    options: dict[str, Any] = {}
    if settings.optimizer in ("adam", "adamw"):
        options["betas"] = settings.betas
    if settings.eps and settings.optimizer != "sgd":
        options["eps"] = settings.eps
    # An optimizer without parameters is refused by torch; a model may well have none.
    if not parameters:
        groups = [{"params": [nn.Parameter(torch.zeros(0))], "lr": settings.lr}]
    optimizer = kinds[settings.optimizer](groups, **options, **fused)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def _parameter_groups(model: nn.Module, settings: DenseSettings) -> list[dict[str, Any]]:
    """Parameters that share a rate and a decay, in the order of their first one."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    names, rates = [name for name, _ in named], rates_of(settings.rates)
    refuse_idle("dense.rates", rates, names, "parameter")
    refuse_idle("dense.no_decay", settings.no_decay, names, "parameter")
    kept = dict.fromkeys(settings.no_decay, 1.0)
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        lr = first_match(rates, name) or settings.lr
        decay = settings.weight_decay if first_match(kept, name) is None else 0.0
        found.setdefault((lr, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr, "weight_decay": decay}
        for (lr, decay), parameters in found.items()
    ]
