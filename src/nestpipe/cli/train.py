"""`nestpipe train`, `eval` and `verify`: a job run, measured, and proven bit for bit."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
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
    ignore_torch_warnings,
    launch_ranks,
    progress_bar,
    read_job,
    refuse_unwritable,
    size_of,
    starts_ranks,
    summary_lines,
    summary_table,
    write_json,
)
from nestpipe.errors import ConfigError
from nestpipe.trace import write_chrome

if TYPE_CHECKING:
    from nestpipe.train.config import JobConfig
    from nestpipe.train.job import Job
    from nestpipe.train.loop import EarlyStopping, Tell, TellMetrics, TrainResult
    from nestpipe.train.ops import StepReport
    from nestpipe.train.trainer import Trainer
    from nestpipe.train.verify import Agreement, Verdict


log = logging.getLogger("nestpipe.train")


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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what is wrong with config and options, and train nothing."
        ),
    ] = False,
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
    if dry_run:
        _confirm_config(job_config, config, ranks)
        return
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    ignore_torch_warnings()
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
        _show(outcome, job, json)
    comm.close()
    if outcome.stopped:
        mark_stopped(comm.rank)


def _confirm_config(job_config: JobConfig, config: Path | None, ranks: int) -> None:
    """Confirm a config that has passed every check that needs no data, device or other ranks."""
    starts_ranks(ranks)
    job_config.settings()
    name = "the default config" if config is None else f"'{config}'"
    line = f"{name} is a config that train takes; its data was not opened"
    console().print(line, markup=False, soft_wrap=True)


def _trained(job: Job, json: str | None, threads: str) -> TrainResult:
    from nestpipe.train.job import idle_settings
    from nestpipe.train.loop import total_steps, train_job

    trainer = job.trainer
    lines = [trainer.plan_reason, *([trainer.mesh.reason] if trainer.mesh.groups > 1 else [])]
    lines += [trainer.dense_half.reason] if trainer.dense_half is not None else []
    lines += [threads, *_columns_sentence(job), _split_sentence(job), *_stream_sentence(job)]
    if trainer.comm.rank == 0 and json != STDOUT:
        console().print("\n".join(lines), markup=False, soft_wrap=True)
    if trainer.comm.rank == 0:
        for sentence in idle_settings(job.config, trainer.comm.size, trainer.model):
            log.warning("%s", sentence)
    with _progress(total_steps(job), trainer) as (tell, show_metrics):
        if not job.config.run.adaptive:
            return train_job(job, tell, show_metrics)
        from nestpipe.planner import AdaptiveRun

        def say(line: str) -> None:
            sys.stderr.write(f"adaptive, {line}\n")

        return train_job(job, tell, show_metrics, adapt=lambda: AdaptiveRun(job, say))


def _stream_sentence(job: Job) -> list[str]:
    """How long a run on a stream waits, which has no end of its own."""
    data = job.config.data
    if data.kind != "stream":
        return []
    enough = "a window" if data.stream.shuffle_window else "a batch"
    then = "the run ends" if data.stream.on_idle == "end" else "it saves and waits on"
    return [
        f"following {data.path}: after {data.stream.idle_s:g} s without enough for {enough} {then}"
    ]


def _columns_sentence(job: Job) -> list[str]:
    """The columns that were chosen by their types: one may be there by accident."""
    data, columns = job.config.data, job.train.columns
    named = data.parquet.sparse or data.parquet.dense or data.parquet.history
    if data.kind not in ("parquet", "stream") or named:
        return []
    keys = [column.name for column in columns if column.kind == "keys"]
    numbers = [name for column in columns if column.kind == "features" for name in column.fields]
    used = {"keys": keys, "numbers": numbers}
    used_as = [f"{what} {', '.join(names)}" for what, names in used.items() if names]
    return [
        f"columns by their types: {'; '.join(used_as)}; name them in data.parquet.sparse and dense "
        "for others"
    ]


def _split_sentence(job: Job) -> str:
    split = job.eval_split
    if split is None:
        return "no evaluation: the data has no validation or test split"
    every = job.config.run.eval_every
    when = f"every {every} batches and at the end" if every else "after each epoch"
    chosen = job.config.run.eval_split
    why = "; the data has no validation split" if (chosen, split) == ("auto", "test") else ""
    data = job.config.data
    held_out = data.validation_path if split == "validation" else data.test_path
    same = held_out and held_out == data.path and not data.test_every
    of = ", which is what it trains on," if same else ","
    return f"evaluation on the {split} split{of} {when}{why}"


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
    ignore_torch_warnings()
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
            which = f"{job.trainer.loaded_from} on the {job.eval_split} split"
            _print_metrics(f"evaluation of {which}", metrics)
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
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[running]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    start, samples, spoke = time.monotonic(), 0, 0.0
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True) as bar:
        done = trainer.progress.step
        task = bar.add_task(
            "", total=total, completed=done, loss="the first batch", speed="", running=""
        )

        def tell(report: StepReport) -> None:
            nonlocal samples, spoke
            samples += report.samples
            now = time.monotonic()
            if now - spoke >= LOG_EVERY_S:
                spoke = now
                bar.update(task, running=_running(trainer).removeprefix(", "))
            loss, speed = f"loss {report.loss:.4f}", f"{samples / (now - start):,.0f} samples/s"
            bar.update(task, completed=report.step, loss=loss, speed=speed)

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
    """Metrics of this rank's training predictions since the last evaluation."""
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
        line = ", ".join(f"{name} {value:.4f}" for name, value in shown)
        write(f"step {step}, {split} split: {line}\n")

    return tell


def _early_sentence(early: EarlyStopping) -> str:
    best = f"best {early.metric} {early.best:.4f} at step {early.best_step}"
    if not early.ended:
        return best
    return f"{best}; stopped after {early.since} evaluations without a better one"


def _check_folder_of(file: Path, what: str) -> None:
    """Refuse now a path that could not be written when training is done."""
    if not file.parent.is_dir():
        raise ConfigError(f"cannot write the {what} to '{file}'; name a file in an existing folder")
    refuse_unwritable(file, f"the {what}")


def _show(outcome: TrainResult, job: Job, json: str | None) -> None:
    ranks, plan = job.trainer.comm.size, job.trainer.plan.name
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
    if not outcome.samples_per_s:
        console().print(_nothing_sentence(outcome, job.config), markup=False, soft_wrap=True)
    else:
        on = f", evaluated on the {outcome.split} split" if outcome.split else ""
        speed = {"train loss": outcome.loss, "samples/s": outcome.samples_per_s}
        ran = f"{_count(outcome.steps, 'step')} on {_count(ranks, 'rank')}"
        _print_metrics(f"{ran}{on}", {**speed, **outcome.metrics})
    if outcome.early is not None:
        console().print(_early_sentence(outcome.early), markup=False, soft_wrap=True)
    if outcome.best_checkpoint:
        console().print(f"best checkpoint: {outcome.best_checkpoint}", markup=False, soft_wrap=True)
    if outcome.summary:
        console().print(summary_table(outcome.summary, plan))
        console().print(summary_lines(outcome.summary), markup=False)
    if outcome.checkpoint:
        cost = outcome.saving
        lines = f"checkpoint: {outcome.checkpoint}"
        if cost.checkpoints:
            lines += (
                f"\ncheckpoints written: {cost.checkpoints}, {size_of(1e9 * cost.gigabytes)}; "
                f"training stood still for {cost.waited_s:.1f} s"
            )
        console().print(lines, markup=False, soft_wrap=True)
    if outcome.stopped:
        console().print("stopped by a signal; --resume auto goes on from there", markup=False)


def _nothing_sentence(outcome: TrainResult, config: JobConfig) -> str:
    """Why a run had no batch to train."""
    step, run = outcome.steps, config.run
    if outcome.early is not None and outcome.early.ended:
        return (
            f"nothing to train after step {step}, where run.early_stop = {run.early_stop!r} ended "
            "the run; set a larger run.patience to go on"
        )
    by_steps = 0 < run.steps <= step
    if config.data.kind == "stream" and not by_steps:
        return f"nothing to train after step {step}: {config.data.path} has no whole batch more"
    ends = f"run.steps = {run.steps}" if by_steps else f"run.epochs = {run.epochs}"
    return f"nothing to train after step {step}, where {ends} ends; set more to go on"


def _print_metrics(title: str, figures: dict[str, float]) -> None:
    """The title is a line of its own: a narrow table would break it."""
    table = Table(show_header=False)
    for name, value in figures.items():
        whole = abs(value) >= 100 or name == "samples/s"
        table.add_row(name, f"{value:,.0f}" if whole else f"{value:.4f}")
    console().print(title, markup=False, soft_wrap=True)
    console().print(table)


DEFAULT_PLAN = "nested"


def verify(
    config: ConfigFile = None,
    settings: Settings = None,
    ranks: Ranks = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Batches to train; left out: what the config says.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help=f"Left out: the config's, or {DEFAULT_PLAN} where that is serial."),
    ] = None,
    one_dimension: Annotated[
        bool,
        typer.Option(
            "--one-dimension",
            help="Compare exact groups with serial in one dimension instead, but for rounding.",
        ),
    ] = False,
    delays: Annotated[
        str | None,
        typer.Option(
            metavar="SEED",
            help="Delay random ops of the compared run, so that a race is lost on purpose.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Train the recorded choices of an adaptive run again under serial, and compare "
            "with its checkpoint.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Prove that a plan changes no bit: train with serial and with the plan, compare everything.

    Compares rows, their optimizer state, dense weights and state, counters and losses. Exits with
    1 where anything differs, and says what.

    Example: nestpipe verify --steps 20 --ranks 2 --set pipeline.micro_batches=4

    Example: nestpipe verify config.toml --plan dual_buffer --json -

    Example: nestpipe verify --steps 20 --ranks 2 --delays 1

    Example: nestpipe verify --ranks 4 --set parallel.groups=2 --one-dimension

    Example: nestpipe verify --replay runs/today --ranks 2
    """
    if replay is not None:
        given = (config, settings, steps, plan, delays)
        if one_dimension or any(one is not None for one in given):
            raise ConfigError(
                "--replay takes its config, plan and steps from the run; leave the others out"
            )
        _replay(replay, ranks, json)
        return
    if one_dimension and delays is not None:
        raise ConfigError(
            f"--delays is {delays} with --one-dimension; delays are for the comparison of plans, "
            "so leave one of them out"
        )
    seed = None if delays is None else _seed(delays)
    job_config = read_job(config, [*(settings or []), *_overrides(steps, plan)])
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    ignore_torch_warnings()
    from nestpipe.train.loop import communicator
    from nestpipe.train.verify import verify_job, verify_one_dimension

    comm = communicator(job_config)
    job_config = _chosen(job_config, plan, comm.size)
    watch = _progress_of if comm.rank == 0 else _no_progress
    if one_dimension:
        found = verify_one_dimension(job_config, comm, watch)
        proven, figures, lines = found.agrees, found.figures(), agreement_sentences(found)
    else:
        verdict = verify_job(job_config, comm, watch, seed)
        proven, figures, lines = verdict.identical, verdict.figures(), sentences(verdict)
    if comm.rank == 0:
        _show_verdict(figures, lines, json)
    # A launcher stops all ranks once one has ended with 1: the result is out before any does.
    comm.barrier()
    comm.close()
    if not proven:
        raise typer.Exit(1)


def _replay(run: Path, ranks: int, json: str | None) -> None:
    """Compare an adaptive run with `serial` in the settings that it recorded."""
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    ignore_torch_warnings()
    job_config = read_job(None, None, checkpoint=str(run))
    from nestpipe.planner import replay_choices
    from nestpipe.train.loop import communicator, use_threads

    use_threads(job_config.run)
    comm = communicator(job_config)
    verdict = replay_choices(run, comm, _progress_of if comm.rank == 0 else _no_progress)
    if comm.rank == 0:
        _show_verdict(verdict.figures(), replay_sentences(verdict, run), json)
    comm.barrier()
    comm.close()
    if not verdict.identical:
        raise typer.Exit(1)


def replay_sentences(verdict: Verdict, run: Path) -> list[str]:
    """The result of the replay of an adaptive run."""
    of = f"{run} and serial in the settings that it recorded, {verdict.steps} steps"
    compared = f"{verdict.rows_compared:,} rows with optimizer state, {verdict.tensors_compared}"
    lines = [
        f"{'identical' if verdict.identical else 'different'}: {of}",
        f"compared bit for bit: {compared} tensors (dense weights and state, counters)",
    ]
    if not verdict.identical:
        lines.append(f"first difference: {verdict.first_difference}")
    return lines


def _overrides(steps: int | None, plan: str | None) -> list[str]:
    return [
        *([] if steps is None else [f"run.steps={steps}"]),
        *([] if plan is None else [f"pipeline.plan={plan}"]),
    ]


def _chosen(config: JobConfig, plan: str | None, ranks: int) -> JobConfig:
    """The job with the plan to prove; `serial` only where it is asked for by name."""
    from nestpipe.train.config import choose_pipeline
    from nestpipe.train.trainer import choose_device

    device = choose_device(config.run.device).type
    pipeline = choose_pipeline(config.pipeline, device, ranks).pipeline
    if plan is None and not pipeline.make_plan().shape.overlaps:
        pipeline = replace(pipeline, plan=DEFAULT_PLAN)
    return replace(config, pipeline=pipeline)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--delays is {text!r}; give a seed, a whole number from 0")
    return int(text)


def _progress_of(name: str, total: int | None) -> AbstractContextManager[Callable[[object], None]]:
    return progress_bar(f"training with {name}", total)


def _no_progress(name: str, total: int | None) -> AbstractContextManager[Callable[[object], None]]:
    return nullcontext(lambda report: None)


def _show_verdict(figures: dict[str, Any], lines: list[str], json: str | None) -> None:
    if json is not None:
        write_json(json, figures)
    if json != STDOUT:
        for line in lines:
            console().print(line, markup=False, soft_wrap=True)


def sentences(verdict: Verdict) -> list[str]:
    """The verdict in a few lines, for people."""
    job = (
        f"{_count(verdict.steps, 'step')} of {_count(verdict.micro_batches, 'micro-batch', 'es')} "
        f"on {_count(verdict.ranks, 'rank')}"
    )
    compared = (
        f"compared bit for bit: {_count(verdict.rows_compared, 'row')} with optimizer state, "
        f"{_count(verdict.tensors_compared, 'tensor')} (dense weights and state, counters, losses)"
    )
    if verdict.identical:
        return [f"identical: {verdict.plan} and serial, {job}", compared]
    return [
        f"different: {verdict.plan} is not serial, {job}",
        compared,
        f"first difference: {verdict.first_difference}",
        _extent(verdict),
    ]


def agreement_sentences(found: Agreement) -> list[str]:
    """How exact groups compare with one dimension, for people."""
    verdict = "the same but for rounding" if found.agrees else "different"
    replicas = "identical" if found.replicas_identical else "not identical"
    return [
        f"{verdict}: {_count(found.groups, 'group')} and one dimension, "
        f"{_count(found.steps, 'step')} on {_count(found.ranks, 'rank')}",
        f"compared: {_count(found.rows_compared, 'row')} with optimizer state, "
        f"{_count(found.tensors_compared, 'dense tensor')}; {found.rows_missing:,} rows missing",
        f"largest difference {found.largest_difference:.2g} of the largest number of its kind, "
        f"{found.bound:.0e} allowed; groups are {replicas} to the bit",
    ]


def _extent(verdict: Verdict) -> str:
    """The number of differences, and the largest."""
    most = verdict.largest_difference
    size = f"by at most {most:.3g}" if most is not None else "some by no finite number"
    step = verdict.first_different_step
    losses = f"losses differ from step {step} on" if step is not None else "no loss differs"
    return (
        f"{verdict.rows_different:,} of {verdict.rows_compared:,} rows and "
        f"{verdict.tensors_different:,} of {verdict.tensors_compared:,} tensors differ, {size}; "
        f"{losses}"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
