"""`nestpipe draw`: a schedule or a trace as text, picture or Perfetto file."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.options import (
    Batches,
    looks_like_path,
    read_text,
    schedule_from,
    with_plan_options,
)
from nestpipe.cli.output import STDOUT, console, write_text
from nestpipe.errors import PlanError
from nestpipe.schedule import PLANS, PlanOptions, nominal_trace, to_text
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
