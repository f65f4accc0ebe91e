"""Training, evaluation and checkpoints."""

from nestpipe.train.evaluate import evaluate
from nestpipe.train.job import Job, JobConfig, make_job
from nestpipe.train.loop import Outcome, train_job
from nestpipe.train.settings import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.summary import Summary, Traffic, summarise
from nestpipe.train.trainer import Trainer
from nestpipe.train.work import StepReport

__all__ = [
    "DenseSettings",
    "Job",
    "JobConfig",
    "Outcome",
    "PipelineSettings",
    "RowSettings",
    "StepReport",
    "Summary",
    "Traffic",
    "TrainSettings",
    "Trainer",
    "evaluate",
    "make_job",
    "summarise",
    "train_job",
]
