"""The loop of `nestpipe train` on one rank: train, evaluate, save, report."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import (
    Retention,
    flat,
    name_of,
    paths_in,
    prune,
    read_manifest,
    sign_of,
    step_of,
    verified,
)
from nestpipe.comm import Communicator, LocalCommunicator, connect
from nestpipe.comm.peer_failure import StopRequest
from nestpipe.dashboard.record import RunRecorder
from nestpipe.data import Ranking, StreamingSource
from nestpipe.embedding.store.protocol import default_threads
from nestpipe.errors import CheckpointError, ConfigError, UnjudgedError
from nestpipe.models import HstuRetriever
from nestpipe.trace import ShortTraceError, Span, Trace
from nestpipe.train.background import BackgroundWriter
from nestpipe.train.checkpoint import LostParentError, gathered_from_first, raise_everywhere
from nestpipe.train.config import JobConfig, RunConfig
from nestpipe.train.evaluate import evaluate, popularity, popularity_auc
from nestpipe.train.job import Job
from nestpipe.train.loggers import MetricLoggers, Summary, Traffic, peak_tflops, recorded, summarise
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer, choose_device

log = logging.getLogger("nestpipe.train")

LEAVE_S = 5.0
"""How long one of several ranks that fails waits for a checkpoint that has begun."""
MOST_TRACED = 16
"""Ranks whose traces are gathered at the end; of a larger run rank 0's is enough to look at."""
Tell = Callable[[StepReport], None]
TellMetrics = Callable[[int, str, Mapping[str, float]], None]
"""Called with the step, the split, and what the evaluation found there."""


class Adaptation(Protocol):
    """Changes the settings of a run between batches; every rank has one."""

    next_stop: int
    """The step at which it wants to be asked."""

    def decide(self) -> None:
        """No batch is in flight: settings may change. All ranks call it at the same step."""
        ...

    def finish(self) -> None:
        """The run has ended."""
        ...


def _tell_nobody(step: int, split: str, metrics: Mapping[str, float]) -> None:
    pass


@dataclass(frozen=True, slots=True)
class SavingCost:
    """What checkpoints cost a run."""

    checkpoints: int = 0
    gigabytes: float = 0.0
    """Written by all ranks."""
    waited_s: float = 0.0
    """Seconds that training stood still: for copies, for the one before, for a full one."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to."""

    steps: int
    loss: float
    """Mean of the last tenth of the steps."""
    samples_per_s: float
    metrics: dict[str, float]
    checkpoint: str | None
    summary: Summary | None
    """Where the time of a step went; None where the run was too short to say."""
    trace: Trace
    """The last batches, of every rank where ranks are few."""
    stopped: bool = False
    """Whether a signal ended it before its time."""
    split: str | None = None
    """What it was evaluated on."""
    early: EarlyStopping | None = None
    """How evaluations went, where a run ends with the best."""
    best_checkpoint: str | None = None
    saving: SavingCost = SavingCost()
    """What its checkpoints cost."""


@dataclass(slots=True)
class EarlyStopping:
    """The best evaluation so far, and how many have come since; a checkpoint keeps all of it."""

    metric: str
    patience: int
    min_delta: float
    best: float = math.nan
    best_step: int = 0
    since: int = 0
    """Evaluations after the best one."""

    @classmethod
    def of(cls, run: RunConfig, loaded: Mapping[str, float]) -> EarlyStopping | None:
        """As the config says, on from what a checkpoint has kept."""
        if not run.early_stop:
            return None
        made = cls(run.early_stop, run.patience, run.min_delta)
        if (best := loaded.get(f"best_{run.early_stop}")) is not None:
            made.best, made.best_step = best, int(loaded["best_step"])
            made.since = int(loaded["evaluations_since_best"])
        return made

    def hear(self, metrics: Mapping[str, float], step: int) -> bool:
        """Whether this evaluation is the best so far; one that is no number is not."""
        if self.metric not in metrics:
            known = ", ".join(metrics)
            raise ConfigError(
                f"run.early_stop is {self.metric!r}, which the evaluation does not have; it has "
                f"{known}"
            )
        value, sign = metrics[self.metric], sign_of(self.metric)
        better = not self.best_step or sign * (value - self.best) > self.min_delta
        if better and not math.isnan(value):
            self.best, self.best_step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    @property
    def ended(self) -> bool:
        return self.since >= self.patience

    @property
    def kept(self) -> dict[str, float]:
        """What a checkpoint says of it among its metrics."""
        if not self.best_step:
            return {}
        return {
            f"best_{self.metric}": self.best,
            "best_step": float(self.best_step),
            "evaluations_since_best": float(self.since),
        }


def use_threads(run: RunConfig) -> str:
    """Let torch have this rank's share of the cores; says how many that is, and why."""
    share = default_threads()
    if run.threads:
        torch.set_num_threads(run.threads)
        return f"threads of each rank: {run.threads}, as set"
    if "OMP_NUM_THREADS" in os.environ:
        return f"threads of each rank: {torch.get_num_threads()}, as OMP_NUM_THREADS says"
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return (
        f"threads of each rank: {torch.get_num_threads()}, the cores of this machine over {ranks} "
        f"{'rank' if ranks == '1' else 'ranks'}; set run.threads for another number"
    )


def communicator(config: JobConfig) -> Communicator:
    """The group that torchrun has started, or this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return LocalCommunicator()
    cuda = choose_device(config.run.device).type == "cuda"
    return connect("nccl" if cuda else "gloo", timeout_s=config.run.timeout_s)


@contextmanager
def claimed(folder: str, comm: Communicator) -> Generator[None]:
    """Hold a run's folder of checkpoints: one run writes there at a time, and it can write.

    All ranks call it; what rank 0 is refused, all are.
    """
    with ExitStack() as held:

        def claim() -> None:
            if folder and comm.rank == 0:
                held.enter_context(disk.locked(Path(folder)))
                with disk.explained(f"to {folder!r}"):
                    disk.remove_leftovers(Path(folder))
                disk.check_writable(Path(folder))

        raise_everywhere(comm, claim)
        yield


def train_job(
    job: Job,
    tell: Tell,
    tell_metrics: TellMetrics = _tell_nobody,
    *,
    adapt: Callable[[], Adaptation] | None = None,
) -> TrainResult:
    """Train, evaluate and save as the config says.

    On rank 0 `tell` is called after every step, `tell_metrics` after every evaluation. `adapt`
    makes what changes settings during the run, where `run.adaptive` asks for it.
    """
    run, comm = job.config.run, job.trainer.comm
    if run.adaptive and adapt is None:
        raise ConfigError(
            "run.adaptive is true, and nothing adapts; pass adapt=partial(AdaptiveRun, job) of "
            "nestpipe.planner, or set run.adaptive = false"
        )
    stop = StopRequest(run.grace_s)
    stop.describe = getattr(comm, "where", stop.describe)
    with claimed(run.checkpoint, comm):
        raise_everywhere(comm, lambda: _refuse_newer(job))
        if run.evicted:
            evicted = EvictedStream(Path(run.evicted), job.trainer)
            raise_everywhere(comm, evicted.open)
            job.trainer.on_evicted = evicted.write
        # Without a place to save there is nothing to wait for.
        with stop.on_signals() if run.checkpoint else nullcontext():
            job.trainer.stop_wanted = lambda: stop.wanted
            job.trainer.fault_folder = Path(run.checkpoint) / "faults" if run.checkpoint else None
            return train_steps(job, tell, tell_metrics, adapt if run.adaptive else None)


KEYS_OF_A_LINE = 10_000


class EvictedStream:
    """The keys of rows that left, as files for others: one for each boundary at which some did.

    A file has its name only when it is whole. A run that goes on from an earlier step writes the
    same files again.
    """

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self._folder, self._trainer = folder, trainer

    def open(self) -> None:
        """Notice a folder that cannot be written before training."""
        if self._trainer.lifecycle is None:
            raise ConfigError(
                "run.evicted is set but no table has a row policy, so no row leaves; set ttl or "
                "evict in [lifecycle]"
            )
        if self._trainer.comm.rank == 0:
            disk.check_writable(self._folder, "evicted keys")

    def write(self, step: int, keys: Mapping[str, Tensor]) -> None:
        """Gather the keys of all ranks on one, which writes them."""
        shards, found = self._trainer.mesh.shards, dict[str, Tensor]()
        for table, mine in keys.items():
            of_ranks = cast("list[int]", shards.all_gather_values(len(mine)))
            first, nothing = shards.rank == 0, [0] * shards.size
            gathered = mine.new_empty(sum(of_ranks) if first else 0)
            to_first = [len(mine), *nothing[1:]]
            shards.all_to_all(gathered, mine, of_ranks if first else nothing, to_first)
            found[table] = gathered.sort().values

        def publish() -> None:
            if self._trainer.comm.rank == 0 and any(map(len, found.values())):
                with disk.explained(f"the keys that left at step {step}"):
                    self._publish(step, found)

        raise_everywhere(self._trainer.comm, publish)

    def _publish(self, step: int, keys: Mapping[str, Tensor]) -> None:
        path = self._folder / f"evicted-{step:08d}.jsonl"
        hidden = path.with_name(f".{path.name}")
        hidden.unlink(missing_ok=True)
        lines = (
            json.dumps({"step": step, "table": table, "keys": part.tolist()}).encode() + b"\n"
            for table, of_table in keys.items()
            for part in (of_table.split(KEYS_OF_A_LINE) if len(of_table) else ())
        )
        disk.write_bytes(hidden, lines)
        hidden.replace(path)
        disk.sync_folder(self._folder)


def _refuse_newer(job: Job) -> None:
    """A run that begins before checkpoints that are there already would mix with them."""
    folder, step = Path(job.config.run.checkpoint), job.trainer.progress.step
    if not job.config.run.checkpoint or job.trainer.comm.rank != 0:
        return
    for path in paths_in(folder)[::-1]:
        if step_of(path) <= step:
            return
        try:
            verified(path)
        except UnjudgedError as error:
            raise CheckpointError(f"this run begins at step {step}, and {error}") from None
        except CheckpointError:  # it is damaged, and this run writes it again
            continue
        raise CheckpointError(
            f"{str(folder)!r} already holds {path.name}, and this run begins at step {step}; go on "
            "from there with --resume, or choose another folder"
        )


def train_steps(
    job: Job,
    tell: Tell,
    tell_metrics: TellMetrics = _tell_nobody,
    adapt: Callable[[], Adaptation] | None = None,
) -> TrainResult:
    """The run itself, in a folder that nobody else writes to; ends early where a rank wants to."""
    trainer, run = job.trainer, job.config.run
    early = EarlyStopping.of(run, trainer.loaded_metrics)
    checkpoints, seen = RunCheckpoints(job, early), _Figures()
    adaptation = adapt() if adapt is not None else None
    if adaptation is None:
        trainer.note_settings("as the config has it, without --adaptive")
    folder = run.log if trainer.comm.rank == 0 else ""
    loggers_opened = MetricLoggers(run.loggers, folder, flat(asdict(job.config)))
    with (
        loggers_opened as loggers,
        recorded(trainer, run.record_folder, {"steps": total_steps(job)}) as recorder,
        checkpoints.finished_on_failure(),
    ):
        on_step = _logged(_told(job, tell, seen, recorder), loggers, job)
        evaluations = _Evaluations(job, early, loggers, recorder, tell_metrics)
        while not (_finished(job) or _over(job) or (early is not None and early.ended)):
            epoch = trainer.progress.epoch
            with seen.timed():
                trainer.fit(
                    job.train,
                    steps=_until_next_stop(job, adaptation),
                    epochs=run.epochs if run.eval_every else epoch + 1,
                    on_step=on_step,
                )
            if adaptation is not None and trainer.progress.step >= adaptation.next_stop:
                adaptation.decide()
            best = evaluations.evaluate_if_due(epoch)
            now_saved = best or _due(job, run.checkpoint_every) or trainer.idle
            if now_saved and not (_finished(job) or _over(job)):
                checkpoints.save(evaluations.of_this_step)
        checkpoints.save(evaluations.of_this_step, last=True)
    if adaptation is not None:
        adaptation.finish()
    return _result(job, seen, evaluations.newest, checkpoints, early)


@dataclass(slots=True)
class _Evaluations:
    """The evaluations of a run: made when they are due, logged, recorded and reported."""

    job: Job
    early: EarlyStopping | None
    loggers: MetricLoggers
    recorder: RunRecorder | None
    tell: TellMetrics
    newest: dict[str, float] = field(default_factory=dict[str, float])
    """The metrics of the last one."""
    step: int = -1
    """The step at which it was made."""

    @property
    def of_this_step(self) -> dict[str, float]:
        """The metrics of the trainer as it is now; empty where it was not evaluated."""
        return self.newest if self.step == self.job.trainer.progress.step else {}

    def evaluate_if_due(self, epoch: int) -> bool:
        """Evaluate, where training has gone on since `epoch`; whether it is the best so far."""
        job, trainer, split = self.job, self.job.trainer, self.job.eval_split
        due = (_eval_due(job, epoch) or _finished(job) or _over(job)) and not trainer.stopped
        found = evaluate(trainer, job.held_out()) if due and split is not None else {}
        if not found:  # nothing is due, or a rank wanted to stop meanwhile
            return False
        step = trainer.progress.step
        self.newest, self.step = found | trainer.take_train_metrics(), step
        named = {_named(split, name): value for name, value in self.newest.items()}
        self.loggers.log(named, step)
        if trainer.comm.rank == 0:
            self.tell(step, str(split), self.newest)
            if self.recorder is not None:
                self.recorder.on_evaluation(step, str(split), self.newest)
        return self.early is not None and self.early.hear(self.newest, step)


@dataclass(slots=True)
class _Figures:
    """What the steps of a run have told."""

    losses: list[float] = field(default_factory=list[float])
    samples: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Generator[None]:
        """What runs inside counts as training, where it does not fail."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    @property
    def loss(self) -> float:
        """Mean of the last tenth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail) if tail else math.nan


def _told(job: Job, tell: Tell, seen: _Figures, recorder: RunRecorder | None) -> Tell:
    def on_step(report: StepReport) -> None:
        seen.losses.append(report.loss)
        seen.samples += report.samples
        if recorder is not None:
            recorder.on_step(report)
        if job.trainer.comm.rank == 0:
            tell(report)

    return on_step


def _result(
    job: Job,
    seen: _Figures,
    metrics: dict[str, float],
    checkpoints: RunCheckpoints,
    early: EarlyStopping | None,
) -> TrainResult:
    trainer = job.trainer
    if not trainer.stopped and job.eval_split is not None:
        metrics = metrics | _baseline(job)
    trace = _gathered_trace(trainer)
    outcome = TrainResult(
        trainer.progress.step,
        seen.loss,
        seen.samples / seen.seconds if seen.seconds else 0.0,
        metrics,
        str(checkpoints.last) if checkpoints.last else None,
        _summary(trainer, trace),
        trace,
        trainer.stopped,
        job.eval_split,
        early,
        checkpoints.best,
        checkpoints.cost(),
    )
    trainer.close()
    return outcome


def _gathered_trace(trainer: Trainer) -> Trace:
    """The traces of all ranks in one, or rank 0's own where together they would be long."""
    comm, trace = trainer.comm, trainer.trace
    if comm.size > MOST_TRACED:
        return trace
    mine = [[s.kind, s.lane, s.batch, s.micro, s.rank, s.start, s.end] for s in trace.spans]
    ranks = cast("list[list[list[Any]]]", comm.all_gather_values(mine))
    return Trace(tuple(Span(*span) for of_rank in ranks for span in of_rank), trace.facts)


def _summary(trainer: Trainer, trace: Trace) -> Summary | None:
    gathered = trainer.comm.all_gather_values(asdict(trainer.traffic))
    ranks = [Traffic(**of_rank) for of_rank in cast("list[dict[str, Any]]", gathered)]
    cuda = trainer.device.type == "cuda"
    name = torch.cuda.get_device_name(trainer.device) if cuda else ""
    settings = trainer.settings
    peak = peak_tflops(name, settings.precision, settings.peak_tflops)
    try:
        return summarise(trace, Traffic.total(ranks), peak)
    except ShortTraceError:
        return None


def total_steps(job: Job) -> int | None:
    """Batches that the whole run will have; None where the data has no known size."""
    run, samples = job.config.run, job.train.num_samples
    if samples is None:
        return run.steps or None
    every = run.epochs * -(-samples // run.batch)
    return min(every, run.steps) if run.steps else every


class RunCheckpoints:
    """The checkpoints of one run, written in the background where training goes on after them."""

    def __init__(self, job: Job, early: EarlyStopping | None = None) -> None:
        run, trainer = job.config.run, job.trainer
        self._job, self._folder, self._early = job, Path(run.checkpoint), early
        self.last = self._begun_from()
        """The newest checkpoint of this run, written or about to be."""
        increments = (run.full_every or math.inf) if run.incremental else 0
        background = run.checkpoint and (run.incremental or run.checkpoint_every)
        self._writer = None
        if background:
            here = run.snapshot_on_device
            self._writer = BackgroundWriter(self._folder, trainer.mesh, increments, on_device=here)
        self._count, self._num_bytes, self._seconds = 0, 0, 0.0
        self._tracked = self._writer is not None and (self.last is not None or self._has_no_rows())
        """Whether it is known which rows differ from those of `last`, or from none."""
        if self._tracked:
            trainer.track_rows()

    def _begun_from(self) -> Path | None:
        """The checkpoint that the run goes on from, where it is in the run's own folder."""
        run, trainer = self._job.config.run, self._job.trainer
        path, loaded = self._folder / name_of(trainer.progress.step), trainer.loaded_from
        # One of that name may be of another run.
        there = bool(run.checkpoint) and loaded is not None and loaded.resolve() == path.resolve()
        return path if gathered_from_first(trainer.comm, there) else None

    def _has_no_rows(self) -> bool:
        """Whether all rows that will be there are yet to be written."""
        trainer = self._job.trainer
        mine = sum(count for store in trainer.stores for count in store.num_rows())
        return not any(cast("list[int]", trainer.comm.all_gather_values(mine)))

    def save(self, metrics: dict[str, float], *, last: bool = False) -> None:
        """A checkpoint of this step that says by itself how to go on, evaluate and serve.

        The last one is there when this returns.
        """
        if not self._job.config.run.checkpoint:
            return
        self.wait()
        if self.last is None or self.last.name != name_of(self._job.trainer.progress.step):
            self._save(metrics, last=last)
        if last:
            self.wait()
            if self.last is None:  # its parent was lost
                self._save(metrics, last=True)
            # A run that was ended while it pruned, and has nothing left to train, prunes too.
            raise_everywhere(self._job.trainer.comm, self._prune)

    def _save(self, metrics: dict[str, float], *, last: bool) -> None:
        run, trainer = self._job.config.run, self._job.trainer
        kept = self._early.kept if self._early is not None else {}
        about = {"config": asdict(self._job.config), "metrics": {**metrics, **kept}}
        # Nothing goes on beside the last one; of the others only rows touched since are copied.
        if self._writer is not None and self._tracked and (run.incremental or not last):
            try:
                self.last = trainer.save_in_background(self._writer, self.last, **about)
            except LostParentError as error:
                self._lose_parent(error)
            else:
                self._count += 1
                return
        began = time.perf_counter()
        self.last = trainer.save(self._folder, **about)
        self._seconds += time.perf_counter() - began
        self._count += 1
        if trainer.comm.rank == 0:
            self._num_bytes += read_manifest(self.last).num_bytes
        if self._writer is not None:
            trainer.track_rows()
            self._tracked = True
        raise_everywhere(trainer.comm, self._prune)

    def _lose_parent(self, error: LostParentError) -> None:
        """The next checkpoint is written from memory alone."""
        if self._job.trainer.comm.rank == 0:
            log.warning("%s; the next checkpoint is written from memory", error)
        self.last, self._tracked = None, False

    def _prune(self) -> None:
        run = self._job.config.run
        if self._job.trainer.comm.rank != 0 or run.retention == Retention() or self.last is None:
            return
        protect = [name_of(self._early.best_step)] if self._early is not None else []
        last = step_of(self.last)
        prune(self._folder, run.retention, time.time(), last=last, protect=protect)

    def wait(self) -> None:
        """Until all that was begun is written; then old ones may go."""
        if self._writer is None:
            return
        try:
            self._writer.wait()
        except LostParentError as error:
            self._lose_parent(error)
        raise_everywhere(self._job.trainer.comm, self._prune)

    @property
    def best(self) -> str | None:
        """The checkpoint of the best evaluation, where a run ends with it."""
        early, run = self._early, self._job.config.run
        if early is None or not early.best_step or not run.checkpoint:
            return None
        return str(self._folder / name_of(early.best_step))

    @contextmanager
    def finished_on_failure(self) -> Generator[None]:
        """Where training fails inside, let the checkpoint that has begun be written first.

        Other ranks may be lost, and rank 0 would wait for their files: it does so briefly.
        """
        try:
            yield
        except BaseException:
            if self._writer is not None:
                alone = self._job.trainer.comm.size == 1
                self._writer.finish(self._job.config.run.grace_s if alone else LEAVE_S)
            raise

    def cost(self) -> SavingCost:
        """What the checkpoints have cost so far; all ranks ask."""
        written, waited = self._num_bytes, self._seconds
        if self._writer is not None:
            written, waited = written + self._writer.num_bytes, waited + self._writer.seconds
        of_ranks = cast("list[int]", self._job.trainer.comm.all_gather_values(written))
        return SavingCost(self._count, sum(of_ranks) / 1e9, waited)


def _finished(job: Job) -> bool:
    run, progress = job.config.run, job.trainer.progress
    return progress.epoch >= run.epochs or 0 < run.steps <= progress.step


def _over(job: Job) -> bool:
    """Whether the run was asked to end, or follows a stream that has nothing more."""
    trainer = job.trainer
    return trainer.stopped or (trainer.idle and job.config.data.stream.on_idle == "end")


def _baseline(job: Job) -> dict[str, float]:
    """What putting the most popular items first would have reached, for models of histories."""
    model = job.trainer.model
    if isinstance(job.train, StreamingSource):
        return {}  # a stream is not read again to count its items
    if isinstance(job.train, Ranking):
        held_out = job.held_out()
        assert isinstance(held_out, Ranking), "all splits of a job are of one kind"
        return {"popularity_auc": popularity_auc(job.train, held_out)}
    if not isinstance(model, HstuRetriever):
        return {}
    ranks = popularity(job.train, job.held_out(), model)
    return {f"baseline_{name}": ranks.values[name] for name in ("hr@10", "ndcg@10")}


def _until_next_stop(job: Job, adaptation: Adaptation | None = None) -> int | None:
    """Steps until something else than training is due."""
    run, step = job.config.run, job.trainer.progress.step
    stops = [every - step % every for every in (run.eval_every, run.checkpoint_every) if every]
    if adaptation is not None:
        stops.append(max(1, adaptation.next_stop - step))
    if run.steps:
        stops.append(run.steps - step)
    return min(stops) if stops else None


def _eval_due(job: Job, epoch: int) -> bool:
    """Whether to evaluate now, where training has gone on since `epoch`."""
    every = job.config.run.eval_every
    return _due(job, every) if every else job.trainer.progress.epoch > epoch


def _due(job: Job, every: int) -> bool:
    return every > 0 and job.trainer.progress.step % every == 0


def _named(split: str | None, name: str) -> str:
    """How a log names a metric of the evaluation, or of the training before it."""
    task, _, metric = name.rpartition("/")
    if not metric.startswith("train_"):
        return f"{split}/{name}"
    return "/".join(filter(None, ("train", task, metric.removeprefix("train_"))))


def _logged(on_step: Tell, loggers: MetricLoggers, job: Job) -> Tell:
    """Tell the loggers too, of every step; now and then of AUC and entropy, which cost a wait."""
    if not loggers:
        return on_step
    config, trainer = job.config, job.trainer

    def both(report: StepReport) -> None:
        figures = {
            "train/loss": report.loss,
            "train/rows_read": float(report.rows_read),
            "train/lr_rows": config.rows.lr * config.rows.factor(report.step),
            "train/lr_dense": config.dense.lr * config.dense.factor(report.step),
        }
        if config.run.clip_norm:
            figures["train/grad_norm"] = report.grad_norm
        if config.run.log_every and report.step % config.run.log_every == 0:
            running = trainer.running_metrics()
            figures |= {_named(None, name): value for name, value in running.items()}
        loggers.log(figures, report.step)
        on_step(report)

    return both
