"""`nestpipe verify`: the user's own job with `serial` and with a plan, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestpipe.cli.options import (
    STDOUT,
    ConfigFile,
    JsonFile,
    Ranks,
    Settings,
    console,
    launch_ranks,
    progress_bar,
    quieten,
    read_job,
    starts_ranks,
    write_json,
)
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.train.job import JobConfig
    from nestpipe.train.verify import Agreement, Verdict

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
    quieten()
    from nestpipe.train.loop import communicator
    from nestpipe.train.verify import verify_job, verify_one_dimension

    comm = communicator(job_config)
    job_config = _chosen(job_config, plan, comm.size)
    watch = _watch if comm.rank == 0 else _look_away
    if one_dimension:
        found = verify_one_dimension(job_config, comm, watch)
        proven, figures, lines = found.agrees, found.figures(), agreement_sentences(found)
    else:
        verdict = verify_job(job_config, comm, watch, seed)
        proven, figures, lines = verdict.identical, verdict.figures(), sentences(verdict)
    if comm.rank == 0:
        _show(figures, lines, json)
    # A launcher stops all ranks once one has ended with 1: the result is out before any does.
    comm.barrier()
    comm.close()
    if not proven:
        raise typer.Exit(1)


def _replay(run: Path, ranks: int, json: str | None) -> None:
    """Compare an adaptive run with `serial` in the settings that it recorded."""
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    quieten()
    job_config = read_job(None, None, checkpoint=str(run))
    from nestpipe.planner import replay_choices
    from nestpipe.train.loop import communicator, use_threads

    use_threads(job_config.run)
    comm = communicator(job_config)
    verdict = replay_choices(run, comm, _watch if comm.rank == 0 else _look_away)
    if comm.rank == 0:
        _show(verdict.figures(), replay_sentences(verdict, run), json)
    comm.barrier()
    comm.close()
    if not verdict.identical:
        raise typer.Exit(1)


def replay_sentences(verdict: Verdict, run: Path) -> list[str]:
    """What the replay of an adaptive run came to."""
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


def _watch(name: str, total: int | None) -> AbstractContextManager[Callable[[object], None]]:
    return progress_bar(f"training with {name}", total)


def _look_away(name: str, total: int | None) -> AbstractContextManager[Callable[[object], None]]:
    return nullcontext(lambda report: None)


def _show(figures: dict[str, Any], lines: list[str], json: str | None) -> None:
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
    """How much differs, and by how much."""
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
