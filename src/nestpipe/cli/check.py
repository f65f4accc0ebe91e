"""`nestpipe check`: prove a plan or a schedule file, or say why it cannot be."""

from __future__ import annotations

from typing import Annotated

import typer

from nestpipe.cli.options import (
    Batches,
    JsonFile,
    schedule_from,
    with_plan_options,
)
from nestpipe.cli.output import write_json
from nestpipe.errors import ScheduleError
from nestpipe.schedule import PLANS, PlanOptions, redundant_edges, violations
from nestpipe.schedule import check as prove

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
