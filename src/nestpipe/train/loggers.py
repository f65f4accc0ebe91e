"""What a run says of its pipeline, and where such figures go: one protocol, a class for each place.

A summary says where the time of a step goes, and how much moves in it. TensorBoard and JSON lines
are built in; Weights & Biases and MLflow are extras. Rank 0 alone logs. The record that the
dashboard shows is written by every rank, each its own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from nestpipe.checkpoint import disk
from nestpipe.comm import Communicator
from nestpipe.dashboard.record import FAILED, FINISHED, STOPPED, RunRecorder
from nestpipe.errors import ConfigError, NestpipeError
from nestpipe.jagged import Jagged
from nestpipe.models.metrics import CLICK_BINS, read_click_sums
from nestpipe.models.protocol import find_factory, is_own, kind_of
from nestpipe.schedule import Kind, Lane
from nestpipe.trace import (
    IDLE,
    USEFUL,
    ShortTraceError,
    Span,
    Trace,
    exposure,
    lane_busy,
    steady_interval,
)
from nestpipe.train.checkpoint import raise_everywhere
from nestpipe.train.config import LoggerName
from nestpipe.train.ops import StepReport

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer

log = logging.getLogger("nestpipe.train")


class RunningMetrics:
    """AUC and normalised entropy of training, from the predictions of the steps themselves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        """What `click_sums` made of this rank's batches, by task, since they were last taken."""

    def count(self, seen: Mapping[str, Tensor]) -> None:
        """Add the sums of a batch on the current stream, without waiting for them."""
        for task, sums in seen.items():
            if sums.is_cuda:  # another stream made them
                sums.record_stream(torch.cuda.current_stream())
            self._sums[task] = self._sums[task] + sums if task in self._sums else sums.clone()

    def of_this_rank(self) -> dict[str, float]:
        """The metrics of what this rank trained on; waits for the device."""
        return _read_sums(self._sums)

    def take(self, comm: Communicator) -> dict[str, float]:
        """The metrics over all ranks, which all call it; counting starts again at 0."""
        gathered = cast("list[list[str]]", comm.all_gather_values(sorted(self._sums)))
        every: dict[str, Tensor] = {}
        for task in sorted({task for of_rank in gathered for task in of_rank}):
            none = torch.zeros(2 * CLICK_BINS + 3, dtype=torch.float64, device=self._device)
            every[task] = self._sums.get(task, none)
            comm.all_reduce(every[task])
        self._sums = {}
        return _read_sums(every)


def _read_sums(by_task: Mapping[str, Tensor]) -> dict[str, float]:
    return {
        f"{task}/train_{name}" if task else f"train_{name}": value
        for task, sums in by_task.items()
        for name, value in read_click_sums(sums).items()
    }


@dataclass(slots=True)
class Traffic:
    """What one rank, or several together, moved in all batches so far."""

    batches: int = 0
    """Batches of all ranks that are counted here."""
    rows_read: int = 0
    rows_refreshed: int = 0
    rows_written: int = 0
    rows_compared: int = 0
    """Rows of the batches that could share some with the batch before."""
    keys_asked: int = 0
    bytes_sent: int = 0
    flops: float = 0.0

    def count(self, report: StepReport, *, rows: int, compared: bool) -> None:
        """Add a step that had `rows` rows; `compared`: to those of the batch before."""
        self.batches += 1
        self.rows_read += report.rows_read
        self.rows_refreshed += report.rows_refreshed
        self.rows_written += report.rows_written
        self.rows_compared += rows if compared else 0
        self.keys_asked += report.keys_asked
        self.flops += report.flops

    @classmethod
    def total(cls, ranks: Sequence[Traffic]) -> Traffic:
        """All ranks together."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: sum(getattr(rank, name) for rank in ranks) for name in names})


MOST_COMPARED = 1 << 16
"""Keys that are compared with those of the batch before; of more, a sample is taken."""


class SharedKeys:
    """How many keys of a batch the batch before had too, by samples, for plans that do not compare.

    `hear` is called for every batch and keeps two in a row; they are compared when read.
    """

    def __init__(self, table_of: Mapping[str, str]) -> None:
        self._table_of = table_of
        self._pair: list[tuple[int, Sequence[Mapping[str, Jagged]]]] = []
        self.shared = self.compared = 0

    def hear(self, batch: int, keys: Sequence[Mapping[str, Jagged]]) -> None:
        """Keep the batch, unless there are two already."""
        pair = self._pair
        if len(pair) < 2:
            follows = bool(pair) and pair[0][0] == batch - 1
            self._pair = [*pair, (batch, keys)] if follows else [(batch, keys)]

    def read(self) -> tuple[int, int]:
        """Keys that were shared and keys that were compared, ever."""
        if len(pair := self._pair) == 2:
            before, after = (self._of_tables(keys) for _, keys in pair)
            self._pair = []
            for table, keys in after.items():
                self.compared += len(keys)
                self.shared += int(np.isin(keys, before.get(table, keys[:0])).sum())
        return self.shared, self.compared

    def _of_tables(self, micros: Sequence[Mapping[str, Jagged]]) -> dict[str, np.ndarray]:
        found: dict[str, list[np.ndarray]] = {}
        for micro in micros:
            for feature, of in micro.items():
                table = self._table_of.get(feature, feature)
                found.setdefault(table, []).append(of.values.numpy())
        total = sum(len(part) for parts in found.values() for part in parts)
        return {
            table: np.unique(np.concatenate([_sample(part, total) for part in parts]))
            for table, parts in found.items()
        }


def _sample(keys: np.ndarray, total: int) -> np.ndarray:
    """Every N-th key, always the same ones; keys that follow each other are spread."""
    if total <= MOST_COMPARED:
        return keys
    bits = (total // MOST_COMPARED).bit_length()
    mixed = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return keys[mixed >> np.uint64(64 - bits) == 0]


@dataclass(frozen=True, slots=True)
class KindTime:
    """The time of one kind of op in a step, all micro-batches together."""

    ms: float
    hidden_ms: float
    """Under dense compute or updates: it cost nothing."""
    exposed_ms: float
    """Without any of them beside it: the step is so much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of an average step, by the mean over ranks."""

    batches: int
    """Batches of the steady part of the trace, over which times are taken."""
    step_ms: float
    kinds: Mapping[str, KindTime]
    """In the order of a batch's life."""
    idle_ms: float
    """No op ran at all."""
    busiest_lane: str
    busiest_ms: float
    """What that lane worked; waiting for a peer inside a collective is not work."""
    efficiency: float
    """The busiest lane's part of the step: 1.0 is a pipeline at the speed of that lane."""
    shared_keys: float | None
    """Part of a batch's keys that the batch before had too; None: the plan does not compare."""
    rows_read: float
    rows_refreshed: float
    rows_written: float
    keys_asked: float
    """Keys that a rank asks owners for, itself included."""
    bytes_sent: float
    tflops: float | None = None
    """TFLOP/s of a rank's model over the whole step; None: the model does not know its work."""
    mfu: float | None = None
    """The same over the device's peak; None: that is not known either."""


def summarise(trace: Trace, traffic: Traffic, peak_tflops: float | None = None) -> Summary:
    """The figures of a trace, which holds one rank or all, and of what was moved meanwhile.

    A trace of fewer than two batches has no steady part and raises `ShortTraceError`.
    """
    if not trace.spans:
        raise ShortTraceError("the trace is empty; train at least 2 batches")
    worked = without_waiting(trace)
    steps = [_step_of(trace.of_rank(r), worked.of_rank(r)) for r in trace.ranks]
    step_ms = fmean(step.ms for step in steps)
    lanes = _mean([step.lanes for step in steps])
    busiest = max(lanes, key=lambda lane: lanes[lane])
    batches = max(1, traffic.batches)
    compared = traffic.rows_compared
    tflops = traffic.flops / batches / (step_ms * 1e9) if traffic.flops else None
    return Summary(
        batches=steps[0].batches,
        step_ms=step_ms,
        kinds=_kinds(steps),
        idle_ms=fmean(step.exposed.get(IDLE, 0.0) for step in steps),
        busiest_lane=busiest,
        busiest_ms=lanes[busiest],
        efficiency=lanes[busiest] / step_ms,
        shared_keys=traffic.rows_refreshed / compared if compared else None,
        rows_read=traffic.rows_read / batches,
        rows_refreshed=traffic.rows_refreshed / batches,
        rows_written=traffic.rows_written / batches,
        keys_asked=traffic.keys_asked / batches,
        bytes_sent=traffic.bytes_sent / batches,
        tflops=tflops,
        mfu=tflops / peak_tflops if tflops is not None and peak_tflops else None,
    )


PEAK_TFLOPS: Mapping[str, tuple[float, float]] = {
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "B200": (2250.0, 75.0),
    "L40S": (362.0, 91.6),
    "A10": (125.0, 31.2),
    "T4": (65.0, 8.1),
}
"""By a part of the device's name, the more special first: dense bfloat16 (T4: float16) and float32
products, without sparsity, as the data sheets have them."""


def peak_tflops(device_name: str, precision: str, given: float = 0.0) -> float | None:
    """What a device can do at most; None where that is not known."""
    if given:
        return given
    found = next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)
    return None if found is None else found[0 if precision == "bf16" else 1]


def without_waiting(trace: Trace) -> Trace:
    """Collectives as long as on the rank that came to them last: the others waited for it first."""
    shortest: dict[str, float] = {}
    for span in trace.spans:
        if span.lane == Lane.NET:
            shortest[span.name] = min(span.duration, shortest.get(span.name, span.duration))
    spans = tuple(
        replace(span, start=span.end - shortest[span.name]) if span.lane == Lane.NET else span
        for span in trace.spans
    )
    return Trace(spans, trace.facts)


@dataclass(frozen=True, slots=True)
class _Step:
    """An average step of one rank."""

    batches: int
    ms: float
    lanes: Mapping[str, float]
    busy: Mapping[str, float]
    exposed: Mapping[str, float]


def _step_of(spans: Sequence[Span], worked: Sequence[Span]) -> _Step:
    start, end, batches = steady_interval(spans)
    split = exposure(spans, start, end)
    return _Step(
        batches,
        (end - start) / batches,
        {lane: ms / batches for lane, ms in lane_busy(worked, start, end).items()},
        {kind: ms / batches for kind, ms in split.busy.items()},
        {kind: ms / batches for kind, ms in split.exposed.items()},
    )


def _kinds(steps: Sequence[_Step]) -> dict[str, KindTime]:
    busy, exposed = _mean([s.busy for s in steps]), _mean([s.exposed for s in steps])
    times: dict[str, KindTime] = {}
    for kind in Kind:
        if kind in busy:
            shown = busy[kind] if kind in USEFUL else exposed.get(kind, 0.0)
            times[kind.value] = KindTime(busy[kind], max(0.0, busy[kind] - shown), shown)
    return times


def _mean(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    return {name: fmean(of_rank.get(name, 0.0) for of_rank in of_ranks) for name in names}


LINES = "metrics.jsonl"


class MetricLogger(Protocol):
    """Takes figures by name, such as `train/loss` or `validation/auc`, and the step they are of."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Note some figures; those of one step may come in several calls."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoardLogger:
    """Event files in a folder."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        leave_traceback_out()
        self._writer = SummaryWriter(str(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def leave_traceback_out() -> None:
    """A full disk is raised by the next call as well; the thread that writes would show it raw."""
    shown = threading.excepthook
    if shown.__module__ == __name__:
        return

    def show(failed: threading.ExceptHookArgs) -> None:
        of_tensorboard = type(failed.thread).__module__.startswith("tensorboard.")
        if not (of_tensorboard and isinstance(failed.exc_value, OSError)):
            shown(failed)

    threading.excepthook = show


class JsonLinesLogger:
    """A line for each call in `metrics.jsonl`; a run that goes on adds to it."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        with disk.explained(f"the log {str(folder)!r}"):
            disk.make_folder(folder)
            self._file = (folder / LINES).open("a", encoding="utf-8", buffering=1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        # JSON has no nan and no inf.
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        self._file.write(json.dumps({"step": step, **known}) + "\n")

    def close(self) -> None:
        self._file.close()


class WandbLogger:
    """A run of Weights & Biases; WANDB_PROJECT, WANDB_MODE and the like say which and where."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        wandb = _extra("wandb")
        disk.make_folder(folder)
        self._run = wandb.init(dir=str(folder), config=dict(config), resume="allow")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """A run of MLflow; MLFLOW_TRACKING_URI says where, else it is below the folder."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        self._mlflow = _extra("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # MLflow 3 refuses folders unless told; its databases need more than mlflow-skinny.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
        self._mlflow.start_run()
        self._mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        # Names of MLflow have no `@`, as in `hr@10`, and few other signs.
        named = {
            re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_")): value
            for name, value in figures.items()
        }
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: Mapping[str, Callable[[Path, Mapping[str, object]], MetricLogger]] = {
    "tensorboard": TensorBoardLogger,
    "jsonl": JsonLinesLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def _extra(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(
            f"run.loggers has {name!r}, which is not installed; install nestpipe[{name}], or leave "
            "it out"
        ) from None


BUILT_IN: frozenset[LoggerName] = frozenset({"tensorboard", "jsonl"})
"""Others are clients of services, out of reach at times, with exceptions of their own."""


def _opened(name: str, folder: Path, config: Mapping[str, object]) -> MetricLogger:
    make = find_factory(name, "run.loggers") if is_own(name) else _KINDS[name]
    try:
        made = make(folder, config)
    except Exception as error:
        if name in BUILT_IN or isinstance(error, NestpipeError):
            raise
        raise ConfigError(
            f"run.loggers has {name!r}, which does not start ({_first_line(error)}); set what it "
            "needs, or leave it out"
        ) from error
    if not (callable(getattr(made, "log", None)) and callable(getattr(made, "close", None))):
        raise ConfigError(
            f"run.loggers has {name!r}, which makes {kind_of(made)}; let it make an object with "
            "`log(figures, step)` and `close()`"
        )
    return cast("MetricLogger", made)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


class MetricLoggers:
    """Several loggers as one; none at all on ranks that do not log.

    Where a service, one of a user's own or the disk fails during a run, that log ends with a
    warning.
    """

    def __init__(self, names: Sequence[str], folder: str, config: Mapping[str, object]) -> None:
        self._loggers: dict[str, MetricLogger] = {}
        if folder:
            with disk.explained(f"the log {folder!r}"):
                disk.make_folder(Path(folder))
                for name in names:
                    self._loggers[name] = _opened(name, Path(folder), config)

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, logger in [*self._loggers.items()]:
            self._try(name, partial(logger.log, figures, step))

    def close(self) -> None:
        for name, logger in [*self._loggers.items()]:
            self._try(name, logger.close)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if name in BUILT_IN and not isinstance(error, OSError):
                raise
            del self._loggers[name]
            log.warning("the log of %s ends here: %s", name, _first_line(error))

    def __enter__(self) -> MetricLoggers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The record of a run, for the dashboard: what the trainer knows without waiting.


MOST_RECORDED = 64
"""Ranks that write a record; those of a larger run are like the first."""


class TrainerProbe:
    """What a trainer knows of itself at any moment."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        shape = trainer.plan.shape
        self._compares = shape.handover is Kind.SYNC
        self._shared = SharedKeys(
            {of.name: g.tables[of.table].name for g in trainer.groups for of in g.features}
        )
        if not self._compares:
            trainer.on_keys = self._shared.hear

    def spans(self, batches: int) -> Sequence[Span]:
        """Of batches by their step, which a trace counts anew where training goes on."""
        trainer = self._trainer
        before = trainer.traced_from
        found = trainer.spans.recent(batches)
        if trainer.traced_from != before:
            return ()
        return [replace(span, batch=before + 1 + span.batch) for span in found]

    def counters(self) -> Mapping[str, float]:
        traffic = self._trainer.traffic
        counted = traffic.rows_refreshed, traffic.rows_compared
        shared, compared = counted if self._compares else self._shared.read()
        return {
            "bytes_sent": self._trainer.training_bytes_sent(),
            "keys_shared": shared,
            "keys_compared": compared,
        }

    def gauges(self) -> Mapping[str, Any]:
        used, slots = self._trainer.pool_slots()
        pool = {"pool": {"used": used, "slots": slots}} if slots else {}
        settings = self._trainer.settings.pipeline
        now = {"micro_batches": settings.micro_batches} if self._trainer.choices else {}
        return {"tables": self._trainer.row_counts(), **pool, **now}

    def choices(self) -> Sequence[Mapping[str, Any]]:
        return [dict(choice) for choice in tuple(self._trainer.choices)]


@contextmanager
def recorded(
    trainer: Trainer, folder: Path | None, about: Mapping[str, Any]
) -> Generator[RunRecorder | None]:
    """Inside, the run is recorded; how it ends is the last that is written.

    All ranks call it; what one of them cannot write, all refuse.
    """
    opened: list[RunRecorder] = []

    def open_record() -> None:
        if folder is not None and trainer.comm.rank < MOST_RECORDED:
            opened.append(_open_record(trainer, folder, about))

    raise_everywhere(trainer.comm, open_record)
    if not opened:
        yield None
        return
    (recorder,) = opened
    recorder.start()
    try:
        yield recorder
    except BaseException as error:
        known = isinstance(error, NestpipeError)
        recorder.close(FAILED, str(error) if known else f"{type(error).__name__}: {error}")
        raise
    finally:
        trainer.on_keys = lambda batch, keys: None
    recorder.close(STOPPED if trainer.stopped else FINISHED)


def _open_record(trainer: Trainer, folder: Path, about: Mapping[str, Any]) -> RunRecorder:
    shape, comm = trainer.plan.shape, trainer.comm
    facts = {
        "plan": trainer.plan.name,
        "micro_batches": shape.micro_batches,
        "retrieval": shape.retrieval.value,
        "compares": shape.handover is Kind.SYNC,
        "ranks": comm.size,
        "groups": trainer.mesh.groups,
        "device": trainer.device.type,
        "batch": trainer.settings.batch,
        "model": type(trainer.model).__name__,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    with disk.explained(f"the record {str(folder)!r}"):
        return RunRecorder(
            folder,
            comm.rank,
            TrainerProbe(trainer),
            {**facts, **about},
            first_step=trainer.progress.step,
        )
