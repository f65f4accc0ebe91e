"""`nestpipe train` and `nestpipe eval`: one rank of a run, or the start of all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nestpipe.cli.draw import TokenFile, Watching
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
    from nestpipe.train.loop import EarlyStopping, Tell, TellMetrics, TrainResult
    from nestpipe.train.ops import StepReport
    from nestpipe.train.trainer import Trainer


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
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Let micro-batches and the pool follow the trace; the choices are recorded.",
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write when the last batches' ops ran, for Perfetto."),
    ] = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:PORT]",
            help="Serve a page that shows the run; left out: on this machine alone.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write that page as one HTML file when the run ends."),
    ] = None,
    token_file: TokenFile = None,
    json: JsonFile = None,
) -> None:
    """Train a model; without a config, a small one on generated data.

    Example: nestpipe train --set run.epochs=2 --set pipeline.micro_batches=2 --ranks 2

    Example: nestpipe train --set pipeline.plan=nested --trace trace.json

    Example: nestpipe train config.toml --set run.checkpoint=runs/today --resume auto

    Example: nestpipe train config.toml --adaptive --set run.checkpoint=runs/today --ranks 2

    Example: nestpipe train config.toml --dashboard --report report.html

    Example: torchrun --nproc-per-node 2 --max-restarts 3 -m nestpipe train c.toml --resume auto
    """
    overrides = [*(settings or []), *(["run.adaptive=true"] if adaptive else [])]
    job_config = read_job(config, overrides, checkpoint=resume)
    if job_config.run.adaptive:
        from nestpipe.planner.adaptive import choices_file

        choices_file(job_config)  # refuses now what could not be recorded later
    for file, what in ((trace, "trace"), (report, "report")):
        if file is not None:
            _check_folder_of(file, what)
    watched = Watching.asked_for(job_config, dashboard, report, token_file)
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    quieten()
    from nestpipe.comm.peer_failure import mark_stopped
    from nestpipe.train.job import prepare
    from nestpipe.train.loop import claimed, communicator, use_threads

    threads = use_threads(job_config.run)
    comm = communicator(job_config)
    with (
        watched.recording(job_config, comm) as recording,
        claimed(job_config.run.checkpoint, comm),
    ):
        job = prepare(recording, comm, resume, override=override)
        with watched.shown(recording, comm):
            outcome = _trained(job, json, threads)
    if comm.rank == 0:
        if trace is not None:
            write_chrome(outcome.trace, trace)
        _show(outcome, comm.size, job.trainer.plan.name, json)
    comm.close()
    if outcome.stopped:
        mark_stopped(comm.rank)


def _trained(job: Job, json: str | None, threads: str) -> TrainResult:
    from nestpipe.train.loop import total_steps, train_job

    trainer = job.trainer
    said = [trainer.plan_reason, *([trainer.mesh.reason] if trainer.mesh.groups > 1 else [])]
    said += [trainer.dense_half.reason] if trainer.dense_half is not None else []
    said += [threads, _split_sentence(job), *_stream_sentence(job)]
    if trainer.comm.rank == 0 and json != STDOUT:
        console().print("\n".join(said), markup=False, soft_wrap=True)
    with _progress(total_steps(job), trainer) as (tell, tell_metrics):
        if not job.config.run.adaptive:
            return train_job(job, tell, tell_metrics)
        from nestpipe.planner import AdaptiveRun

        def say(line: str) -> None:
            sys.stderr.write(f"adaptive, {line}\n")

        return train_job(job, tell, tell_metrics, adapt=lambda: AdaptiveRun(job, say))


def _stream_sentence(job: Job) -> list[str]:
    """How long a run waits that has no end of its own."""
    data = job.config.data
    if data.kind != "stream":
        return []
    then = "the run ends" if data.stream.on_idle == "end" else "it saves and waits on"
    return [
        f"following {data.path}: after {data.stream.idle_s:g} s without enough for a batch {then}"
    ]


def _split_sentence(job: Job) -> str:
    split = job.eval_split
    if split is None:
        return "no evaluation: the data has no validation or test split"
    every = job.config.run.eval_every
    when = f"every {every} batches and at the end" if every else "after each epoch"
    chosen = job.config.run.eval_split
    why = "; the data has no validation split" if (chosen, split) == ("auto", "test") else ""
    return f"evaluation on the {split} split, {when}{why}"


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
    from nestpipe.train.loop import communicator, use_threads

    use_threads(job_config.run)
    comm = communicator(job_config)
    job = prepare(job_config, comm, str(checkpoint), exact=False)
    metrics = measure(job.trainer, job.held_out())
    if comm.rank == 0:
        if json is not None:
            write_json(json, metrics)
        if json != STDOUT:
            console().print(_metrics_table(f"evaluation on the {job.eval_split} split", metrics))
    job.trainer.close()
    comm.close()


@contextmanager
def _progress(total: int | None, trainer: Trainer) -> Generator[tuple[Tell, TellMetrics]]:
    """A bar with loss, speed and time left on a terminal; now and then a line in a log.

    Evaluations are lines of their own in both.
    """
    if trainer.comm.rank != 0:
        yield lambda report: None, lambda step, split, metrics: None
        return
    if not sys.stderr.isatty():
        yield _plain_lines(total, trainer), _metric_line(sys.stderr.write)
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[running]}"),
        TextColumn("{task.fields[speed]:,.0f} samples/s"),
        TimeRemainingColumn(),
    )
    start, samples, spoke = time.monotonic(), 0, 0.0
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True) as bar:
        done = trainer.progress.step
        task = bar.add_task(
            "", total=total, completed=done, loss=float("nan"), speed=0.0, running=""
        )

        def tell(report: StepReport) -> None:
            nonlocal samples, spoke
            samples += report.samples
            now = time.monotonic()
            if now - spoke >= LOG_EVERY_S:
                spoke = now
                bar.update(task, running=_running(trainer).removeprefix(", "))
            bar.update(task, completed=report.step, loss=report.loss, speed=samples / (now - start))

        yield tell, _metric_line(lambda line: shown.print(line.rstrip(), markup=False))


def _plain_lines(total: int | None, trainer: Trainer) -> Tell:
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
                f"step {report.step}{of}: loss {report.loss:.4f}{_running(trainer)}, "
                f"{speed:,.0f} samples/s\n"
            )

    return tell


def _running(trainer: Trainer) -> str:
    """How this rank's training batches were predicted since the last evaluation."""
    found = trainer.running_metrics().items()
    words = {"auc": "AUC", "normalised_entropy": "NE"}
    named = ((name.replace("train_", ""), value) for name, value in found)
    parts = [
        f"{task + ' ' if task else ''}{words.get(metric, metric)} {value:.4f}"
        for (task, _, metric), value in ((name.rpartition("/"), value) for name, value in named)
    ]
    return "".join(f", {part}" for part in parts)


def _metric_line(write: Callable[[str], object]) -> TellMetrics:
    """A line for each evaluation, with the split that it was on."""

    def tell(step: int, split: str, metrics: Mapping[str, float]) -> None:
        left_out = ("baseline", "samples")
        shown = [
            (n, v) for n, v in metrics.items() if not n.rpartition("/")[2].startswith(left_out)
        ]
        told = ", ".join(f"{name} {value:.4f}" for name, value in shown)
        write(f"step {step}, {split} split: {told}\n")

    return tell


def _early_sentence(early: EarlyStopping) -> str:
    best = f"best {early.metric} {early.best:.4f} at step {early.best_step}"
    if not early.ended:
        return best
    return f"{best}; stopped after {early.since} evaluations without a better one"


def _check_folder_of(file: Path, what: str) -> None:
    """Refuse now what could not be written when training is done."""
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"cannot write the {what} to '{file}'; name a file in an existing folder")


def _show(outcome: TrainResult, ranks: int, plan: str, json: str | None) -> None:
    if json is not None:
        value: dict[str, Any] = {
            "steps": outcome.steps,
            "ranks": ranks,
            "loss": outcome.loss,
            "samples_per_s": outcome.samples_per_s,
            "metrics": outcome.metrics,
            "checkpoint": outcome.checkpoint,
            "split": outcome.split,
            "best_checkpoint": outcome.best_checkpoint,
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
    on = f", evaluated on the {outcome.split} split" if outcome.split else ""
    console().print(_metrics_table(f"{outcome.steps} steps on {ranked}{on}", figures))
    if outcome.early is not None:
        console().print(_early_sentence(outcome.early), markup=False, soft_wrap=True)
    if outcome.best_checkpoint:
        console().print(f"best checkpoint: {outcome.best_checkpoint}", markup=False, soft_wrap=True)
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
