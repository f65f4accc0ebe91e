"""Where the figures of a run go: one protocol, and a class for each place.

TensorBoard and JSON lines are built in; Weights & Biases and MLflow are extras. Rank 0 alone logs.
The record that the dashboard shows is written by every rank, each its own.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nestpipe.checkpoint import disk
from nestpipe.dashboard.record import FAILED, FINISHED, STOPPED, RunRecorder
from nestpipe.errors import ConfigError, NestpipeError
from nestpipe.schedule import Kind
from nestpipe.trace import Span
from nestpipe.train.checkpoint import raise_everywhere
from nestpipe.train.summary import SharedKeys

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer

LoggerName = Literal["tensorboard", "jsonl", "wandb", "mlflow"]
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

        self._writer = SummaryWriter(str(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


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
            self._mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
        self._mlflow.start_run()
        self._mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, figures: Mapping[str, float], step: int) -> None:
        # Names of MLflow have no `@`, as in `hr@10`.
        named = {name.replace("@", "_at_"): value for name, value in figures.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: Mapping[LoggerName, Callable[[Path, Mapping[str, object]], MetricLogger]] = {
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


class MetricLoggers:
    """Several loggers as one; none at all on ranks that do not log."""

    def __init__(
        self, names: Sequence[LoggerName], folder: str, config: Mapping[str, object]
    ) -> None:
        self._loggers = [_KINDS[name](Path(folder), config) for name in names] if folder else []

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log(figures, step)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()

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
        return self._trainer.spans.recent(batches)

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
        return {"tables": self._trainer.row_counts(), **pool}


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
