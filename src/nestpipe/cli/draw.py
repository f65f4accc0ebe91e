"""`nestpipe draw` and `nestpipe check`: a schedule or a trace shown, a schedule proven."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.options import (
    STDOUT,
    Batches,
    JsonFile,
    console,
    looks_like_path,
    read_text,
    schedule_from,
    with_plan_options,
    write_json,
    write_text,
)
from nestpipe.errors import PlanError, ScheduleError
from nestpipe.schedule import (
    PLANS,
    PlanOptions,
    nominal_trace,
    redundant_edges,
    to_text,
    violations,
)
from nestpipe.schedule import check as prove
from nestpipe.trace import Trace, grid, read_chrome, svg, to_chrome


class Format(StrEnum):
    """What to draw."""

    TEXT = "text"
    SVG = "svg"
    TRACE = "trace"
    SCHEDULE = "schedule"


@with_plan_options(micro_batches=2)
def draw(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN",
            help=f"A plan ({', '.join(PLANS)}), a schedule file, or a measured trace (JSON).",
        ),
    ],
    batches: Batches = 3,
    *,
    options: PlanOptions,
    format: Annotated[  # noqa: A002 - the option is called so
        Format,
        typer.Option(
            help="A grid; a picture; a file for Perfetto; the schedule as text that reads back."
        ),
    ] = Format.TEXT,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - for stdout.")
    ] = STDOUT,
    width: Annotated[
        int, typer.Option(help="Columns of the text grid; 0: those of the terminal.")
    ] = 0,
) -> None:
    """Draw a plan, a schedule file or a measured trace.

    Example: nestpipe draw nested --batches 3 --micro-batches 2 --format svg -o nested.svg
    """
    if format is Format.SCHEDULE:
        if _is_trace(source):
            raise PlanError(f"{source!r} is a trace, which has no edges; draw it as text or svg")
        write_text(output, to_text(schedule_from(source, options, batches)))
        return
    trace = _trace(source, options, batches)
    match format:
        case Format.SVG:
            write_text(output, svg(trace, title=_title(source, trace), rank=None))
        case Format.TRACE:
            write_text(output, json.dumps(to_chrome(trace)) + "\n")
        case _:
            color = output == STDOUT and sys.stdout.isatty()
            write_text(output, grid(trace, width=width or console().width, color=color) + "\n")


def _is_trace(source: str) -> bool:
    if source in PLANS or not looks_like_path(source):
        return False
    return read_text(Path(source)).lstrip()[:1] in ("{", "[")


def _trace(source: str, options: PlanOptions, batches: int) -> Trace:
    if _is_trace(source):
        return read_chrome(source)
    return nominal_trace(schedule_from(source, options, batches))


def _title(source: str, trace: Trace) -> str:
    plan, micro_batches = trace.facts.get("plan", source), trace.facts.get("micro_batches", 1)
    return f"{plan}, {micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}"


REFUSED = 1
"""Exit status of a schedule that the checker refuses."""


@with_plan_options(micro_batches=2)
def check(
    source: Annotated[
        str,
        typer.Argument(metavar="PLAN", help=f"A plan ({', '.join(PLANS)}) or a schedule file."),
    ],
    batches: Batches = 8,
    *,
    options: PlanOptions,
    stale: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="Accept this plan although it is stale."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Prove from its edges that a schedule is exact and cannot hang; exit 1 where it is not.

    Example: nestpipe check nested --micro-batches 8 --retrieval new
    """
    schedule = schedule_from(source, options, batches)
    if json is not None:
        found = list(violations(schedule, stale=stale))
        write_json(
            json,
            {
                "plan": schedule.shape.plan,
                "exact": not found and not schedule.shape.stale,
                "ops": len(schedule),
                "edges": len(schedule.edges),
                "violations": [
                    {
                        "rule": v.rule,
                        "sentence": v.sentence,
                        "ops": [str(op) for op in v.ops],
                        "missing": [str(op) for op in v.missing] if v.missing else None,
                    }
                    for v in found
                ],
            },
        )
        raise typer.Exit(REFUSED if found else 0)
    try:
        prove(schedule, stale=stale)
    except ScheduleError as error:
        typer.echo(f"refused: {error}")
        raise typer.Exit(REFUSED) from None
    verdict = "stale, as asked for, and cannot hang" if schedule.shape.stale else "exact"
    typer.echo(
        f"{schedule.shape.plan} is {verdict}: {len(schedule)} ops of {schedule.batches} batches, "
        f"{len(schedule.edges)} edges, {len(redundant_edges(schedule))} of them implied by others"
    )
