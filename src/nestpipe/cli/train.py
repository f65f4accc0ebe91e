"""`nestpipe train` and `nestpipe eval`: one rank of a run, or the start of all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nestpipe.cli.options import (
    LOG_EVERY_S,
    STDOUT,
    ConfigFile,
    JsonFile,
    Ranks,
    Settings,
    console,
    launch_ranks,
    quieten,
    read_job,
    starts_ranks,
    summary_lines,
    summary_table,
    write_json,
)
from nestpipe.errors import ConfigError
from nestpipe.trace import write_chrome

if TYPE_CHECKING:
    from nestpipe.train.job import Job
    from nestpipe.train.loop import TrainResult
    from nestpipe.train.ops import StepReport


def train(
    config: ConfigFile = None,
    settings: Settings = None,
    ranks: Ranks = 1,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Go on from a checkpoint, or a folder's newest good one; auto: from "
            "run.checkpoint, or begin.",
        ),
    ] = None,
    override: Annotated[
        bool,
        typer.Option(
            "--override", help="With --resume: allow changed settings that change results."
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write when the last batches' ops ran, for Perfetto."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Train a model; without a config, a small one on generated data.

    Example: nestpipe train --set run.epochs=2 --set pipeline.micro_batches=2 --ranks 2

    Example: nestpipe train --set pipeline.plan=nested --trace trace.json

    Example: nestpipe train config.toml --set run.checkpoint=runs/today --resume auto

    Example: torchrun --nproc-per-node 2 --max-restarts 3 -m nestpipe train c.toml --resume auto
    """
    job_config = read_job(config, settings, checkpoint=resume)
    if trace is not None:
        _check_folder_of(trace)
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    quieten()
    from nestpipe.comm.peer_failure import mark_stopped
    from nestpipe.train.job import prepare
    from nestpipe.train.loop import claimed, communicator

    comm = communicator(job_config)
    with claimed(job_config.run.checkpoint, comm):
        job = prepare(job_config, comm, resume, override=override)
        outcome = _trained(job, json)
    if comm.rank == 0:
        if trace is not None:
            write_chrome(outcome.trace, trace)
        _show(outcome, comm.size, job.trainer.plan.name, json)
    comm.close()
    if outcome.stopped:
        mark_stopped(comm.rank)


def _trained(job: Job, json: str | None) -> TrainResult:
    from nestpipe.train.loop import total_steps, train_job

    trainer = job.trainer
    said = [trainer.plan_reason, *([trainer.mesh.reason] if trainer.mesh.groups > 1 else [])]
    if trainer.comm.rank == 0 and json != STDOUT:
        console().print("\n".join(said), markup=False, soft_wrap=True)
    with _progress(total_steps(job), trainer.progress.step, trainer.comm.rank) as tell:
        return train_job(job, tell)


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a folder of them.")],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another config than the one it was trained with."),
    ] = None,
    settings: Settings = None,
    ranks: Ranks = 1,
    json: JsonFile = None,
) -> None:
    """Evaluate a checkpoint on the held-out split.

    Example: nestpipe eval runs/demo

    Example: nestpipe eval runs/demo --set run.eval_split=validation
    """
    job_config = read_job(config, settings, checkpoint=str(checkpoint))
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    quieten()
    from nestpipe.train.evaluate import evaluate as measure
    from nestpipe.train.job import prepare
    from nestpipe.train.loop import communicator

    comm = communicator(job_config)
    job = prepare(job_config, comm, str(checkpoint), exact=False)
    metrics = measure(job.trainer, job.held_out())
    if comm.rank == 0:
        if json is not None:
            write_json(json, metrics)
        if json != STDOUT:
            console().print(_metrics_table("evaluation", metrics))
    job.trainer.close()
    comm.close()


@contextmanager
def _progress(total: int | None, done: int, rank: int) -> Generator[Callable[[StepReport], None]]:
    """A bar with loss, speed and time left on a terminal; now and then a line in a log."""
    if rank != 0:
        yield lambda report: None
        return
    if not sys.stderr.isatty():
        yield _plain_lines(total)
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[speed]:,.0f} samples/s"),
        TimeRemainingColumn(),
    )
    start, samples = time.monotonic(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=done, loss=float("nan"), speed=0.0)

        def tell(report: StepReport) -> None:
            nonlocal samples
            samples += report.samples
            speed = samples / (time.monotonic() - start)
            bar.update(task, completed=report.step, loss=report.loss, speed=speed)

        yield tell


def _plain_lines(total: int | None) -> Callable[[StepReport], None]:
    spoke = start = time.monotonic()
    samples = 0

    def tell(report: StepReport) -> None:
        nonlocal spoke, samples
        samples += report.samples
        now = time.monotonic()
        if now - spoke >= LOG_EVERY_S:
            spoke = now
            of = f" of {total}" if total else ""
            speed = samples / (now - start)
            sys.stderr.write(
                f"step {report.step}{of}: loss {report.loss:.4f}, {speed:,.0f} samples/s\n"
            )

    return tell


def _check_folder_of(trace: Path) -> None:
    """Refuse now what could not be written when training is done."""
    if trace.is_dir() or not trace.parent.is_dir():
        raise ConfigError(f"cannot write the trace to '{trace}'; name a file in an existing folder")


def _show(outcome: TrainResult, ranks: int, plan: str, json: str | None) -> None:
    if json is not None:
        value: dict[str, Any] = {
            "steps": outcome.steps,
            "ranks": ranks,
            "loss": outcome.loss,
            "samples_per_s": outcome.samples_per_s,
            "metrics": outcome.metrics,
            "checkpoint": outcome.checkpoint,
            "stopped": outcome.stopped,
            "waited_for_checkpoints_s": outcome.saving.waited_s,
            "checkpoints": asdict(outcome.saving),
            "plan": plan,
            "pipeline": asdict(outcome.summary) if outcome.summary else None,
        }
        write_json(json, value)
    if json == STDOUT:
        return
    ranked = "1 rank" if ranks == 1 else f"{ranks} ranks"
    figures = {"train loss": outcome.loss, "samples/s": outcome.samples_per_s, **outcome.metrics}
    console().print(_metrics_table(f"{outcome.steps} steps on {ranked}", figures))
    if outcome.summary:
        console().print(summary_table(outcome.summary, plan))
        console().print(summary_lines(outcome.summary), markup=False)
    if outcome.checkpoint:
        cost = outcome.saving
        said = f"checkpoint: {outcome.checkpoint}"
        if cost.checkpoints:
            said += (
                f"\ncheckpoints written: {cost.checkpoints}, {cost.gigabytes:.3g} GB; training "
                f"stood still for {cost.waited_s:.1f} s"
            )
        console().print(said, markup=False, soft_wrap=True)
    if outcome.stopped:
        console().print("stopped by a signal; --resume auto goes on from there", markup=False)


def _metrics_table(title: str, figures: dict[str, float]) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4f}")
    return table
