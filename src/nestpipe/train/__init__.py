"""Training, evaluation and checkpoints."""

from nestpipe.deprecated import old_names
from nestpipe.train.config import (
    DenseSettings,
    JobConfig,
    ParallelSettings,
    PipelineSettings,
    RowSettings,
    TrainSettings,
)
from nestpipe.train.evaluate import evaluate
from nestpipe.train.job import Job, make_job
from nestpipe.train.loggers import Summary, Traffic, summarise
from nestpipe.train.loop import TrainResult, train_job
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer

__all__ = [
    "DenseSettings",
    "Job",
    "JobConfig",
    "ParallelSettings",
    "PipelineSettings",
    "RowSettings",
    "StepReport",
    "Summary",
    "Traffic",
    "TrainResult",
    "TrainSettings",
    "Trainer",
    "evaluate",
    "make_job",
    "summarise",
    "train_job",
]

__getattr__ = old_names(__name__)
