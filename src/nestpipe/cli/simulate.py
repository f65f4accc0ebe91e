"""`nestpipe simulate`: scaling curves for any config, and the published table."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.options import (
    Buffers,
    EarlyRows,
    ExchangeForm,
    JsonFile,
    Micros,
    RetrievalForm,
    Stages,
)
from nestpipe.cli.output import STDOUT, console, progress_bar, write_json, write_text
from nestpipe.cli.simulate_tables import (
    curve_table,
    groups_answer,
    groups_table,
    paper_table,
    print_2d,
    print_assumptions,
    print_unreconciled,
)
from nestpipe.config import build, read
from nestpipe.errors import ConfigError
from nestpipe.schedule import PLANS, Exchange, Merge, Plan, PlanOptions, Retrieval
from nestpipe.sim import (
    Cluster,
    FittedCosts,
    Layout,
    Scale,
    chart,
    choice_as_json,
    choose_groups,
    costs,
    curve_as_json,
    fit,
    paper_choices,
    paper_cluster,
    paper_rows,
    replay,
    rows_as_json,
    scaling_curve,
    shards_of,
    to_toml,
    usual_groups,
)
from nestpipe.sim.paper.published import SCALES
from nestpipe.sim.paper.systems import SYSTEMS
from nestpipe.sim.report import whole_intervals
from nestpipe.sim.scaling import plan_for
from nestpipe.trace import read_chrome, write_chrome

MOST_WORKERS = 100_000
MOST_BETWEEN = 1000
"""Batches between two merges; all of them are replayed."""
AUTO = "auto"

simulate_app = typer.Typer(rich_markup_mode=None)


@simulate_app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    plan_name: Annotated[
        str, typer.Option("--plan", help=f"The plan to replay: {', '.join(PLANS)}.")
    ] = "nested",
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, separated by commas.")
    ] = "1,8,64,512,1536,4096",
    micro_batches: Micros = 8,
    retrieval: RetrievalForm = Retrieval.WHOLE,
    stages: Stages = 4,
    exchange: ExchangeForm = Exchange.MICRO,
    speculative_rows: EarlyRows = False,
    buffers: Buffers = 2,
    groups: Annotated[
        str,
        typer.Option(
            help="Groups of workers with a copy of the tables each (2D); several numbers, or auto: "
            "which is best."
        ),
    ] = "1",
    merge_every: Annotated[
        int, typer.Option(help="Groups merge their copies every so many batches; 0: never.")
    ] = 1,
    merge: Annotated[
        Merge,
        typer.Option(help="What they merge: touched rows, averaged, or every batch's gradients."),
    ] = Merge.AVERAGED,
    layout: Annotated[
        Layout,
        typer.Option(help="Neighbours in a node: replicas of a shard, or shards of a group."),
    ] = Layout.AUTO,
    batches: Annotated[int, typer.Option(help="Batches to replay, at least 12.")] = 40,
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hardware file (TOML); default: the paper's cluster."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override the hardware file."),
    ] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Fit the costs to this measured trace; may be repeated."),
    ] = None,
    json: JsonFile = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the curve.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write worker 0 at the last scale, for Perfetto."),
    ] = None,
    print_hardware: Annotated[
        bool, typer.Option("--print-hardware", help="Print the hardware file in use, and stop.")
    ] = False,
) -> None:
    """Replay a plan on more and more workers and print how it scales.

    Example: nestpipe simulate --plan nested --micro-batches 8 --workers 128,1536 --svg scaling.svg

    Example: nestpipe simulate --groups auto --workers 1536,4096 --merge-every 4

    Example: nestpipe simulate --exchange window --set workload.split_growth=0.1

    Example: nestpipe simulate paper
    """
    if context.invoked_subcommand is not None:
        return
    cluster = _cluster(hardware, settings or [])
    if print_hardware:
        write_text(STDOUT, to_toml(cluster))
        return
    if not 0 <= merge_every <= MOST_BETWEEN:
        raise ConfigError(
            f"merge-every is {merge_every}; give a number of batches from 0 to {MOST_BETWEEN:,}"
        )
    if merge is Merge.EXACT and merge_every != 1:
        raise ConfigError(
            f"merge-every is {merge_every} and the copies are exact, so they merge in every batch; "
            "use --merge-every 1 or --merge averaged"
        )
    options = PlanOptions(
        micro_batches=micro_batches,
        retrieval=retrieval,
        stages=stages,
        exchange=exchange,
        merge_every=merge_every,
        merge=merge,
        speculative_rows=speculative_rows,
        buffers=buffers,
    )
    plan_for(plan_name, options, 1)  # refuses what cannot be, before anything is read
    numbers = _numbers("workers", workers, MOST_WORKERS)
    if batches < 12:
        raise ConfigError(f"{batches} batches have no steady state; replay at least 12")
    fitted = fit([read_chrome(path) for path in from_trace]) if from_trace else None
    choices = _choices(groups, numbers)
    if choices is not None:
        if svg is not None or trace is not None:
            raise ConfigError(
                f"groups is {groups!r}, and a drawing or a trace is of one number; give one number "
                "of groups or drop --svg and --trace"
            )
        _choose(plan_name, options, cluster, choices, layout, batches, fitted, json)
        return
    scales = [Scale(number, int(groups), layout) for number in numbers]
    chosen = plan_for(plan_name, options, int(groups))
    of_each = whole_intervals(batches, chosen.shape.merge_every)
    with progress_bar("simulating", of_each * len(scales)) as advance:
        points = scaling_curve(
            chosen, cluster, scales, batches=batches, fitted=fitted, progress=advance
        )
    if svg is not None:
        title = f"{plan_name}, {micro_batches} micro-batches: where a step's time goes"
        write_text(svg, chart(points, title))
    if trace is not None:
        _write_trace(trace, chosen, cluster, scales[-1], fitted, batches)
    if json is not None:
        value: dict[str, object] = {"points": curve_as_json(points), "hardware": asdict(cluster)}
        write_json(json, value | ({"fitted": _fitted_as_json(fitted)} if fitted else {}))
    if json != STDOUT and svg != STDOUT:
        console().print(curve_table(points, chosen))
        if fitted is not None:
            console().print(_fit_note(fitted, chosen, scales))


@simulate_app.command()
def paper(json: JsonFile = None) -> None:
    """Simulate the published table (128 to 1,536 workers) beside the published figures.

    The same systems at 4,096 workers follow, with the curves extended.

    Example: nestpipe simulate paper --json table.json
    """
    with progress_bar("simulating", len(SYSTEMS) * (len(SCALES) + 1)) as advance:
        rows = paper_rows(progress=advance)
    with progress_bar("comparing groups", None) as advance:
        choices = paper_choices(progress=advance)
    if json is not None:
        write_json(json, rows_as_json(rows, choices))
    if json != STDOUT:
        terminal = console()
        terminal.print(paper_table(rows))
        print_2d(terminal, rows, choices)
        print_assumptions(terminal)
        print_unreconciled(terminal)


def _cluster(hardware: Path | None, settings: list[str]) -> Cluster:
    given = asdict(paper_cluster()) if hardware is None else read(hardware)
    return build(Cluster, given, overrides=settings)


def _numbers(name: str, text: str, most: int) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= most:
            raise ConfigError(
                f"{name} cannot be {word!r}; "
                f"give whole numbers from 1 to {most:,}, separated by commas"
            )
    return [int(word) for word in words]


def _choices(text: str, workers: list[int]) -> dict[int, list[int]] | None:
    """The numbers of groups to compare for each number of workers; None where there is but one."""
    if text.strip() == AUTO:
        return {number: usual_groups(number) for number in workers}
    groups = _numbers("groups", text, MOST_WORKERS)
    for number in workers:
        for count in groups:
            shards_of(number, count)
    return dict.fromkeys(workers, groups) if len(groups) > 1 else None


def _choose(
    plan_name: str,
    options: PlanOptions,
    cluster: Cluster,
    choices: dict[int, list[int]],
    layout: Layout,
    batches: int,
    fitted: FittedCosts | None,
    json: str | None,
) -> None:
    """Compare numbers of groups, and say which is best."""
    replicated = sum(len([m for m in groups if m > 1]) for groups in choices.values())
    alone = len(choices) + sum(groups.count(1) for groups in choices.values())
    longer = whole_intervals(batches, options.merge_every)
    with progress_bar("simulating", batches * alone + longer * replicated) as advance:
        found = [
            choose_groups(
                *(plan_name, options, cluster, workers, groups),
                layout=layout,
                batches=batches,
                fitted=fitted,
                progress=advance,
            )
            for workers, groups in choices.items()
        ]
    if json is not None:
        value: dict[str, object] = {
            "choices": [choice_as_json(choice) for choice in found],
            "hardware": asdict(cluster),
        }
        write_json(json, value | ({"fitted": _fitted_as_json(fitted)} if fitted else {}))
    if json == STDOUT:
        return
    terminal = console()
    for choice in found:
        terminal.print(groups_table(choice, plan_name, options))
        terminal.print(groups_answer(choice, cluster.workload), markup=False)
    if fitted is not None:
        scales = [Scale(c.workers, row.groups) for c in found for row in c.rows]
        most = max(scale.groups for scale in scales)
        terminal.print(_fit_note(fitted, plan_for(plan_name, options, most), scales))


def _write_trace(
    file: Path,
    chosen: Plan,
    cluster: Cluster,
    scale: Scale,
    fitted: FittedCosts | None,
    batches: int,
) -> None:
    """Worker 0 of one scale, for Perfetto."""
    if fitted is not None:
        used = fitted.at(chosen, cluster, scale)
    else:
        used = costs(cluster, chosen.shape, scale)
    played = replay(chosen, used, scale, batches=batches, stragglers=cluster.stragglers)
    write_chrome(played.trace, file)


def _fitted_as_json(fitted: FittedCosts) -> dict[str, object]:
    return {
        "workers": fitted.scale.workers,
        "per_batch_ms": {str(kind): ms for kind, ms in fitted.per_batch.items()},
        "per_micro_ms": {
            str(kind): {"fixed": fixed, "shared": shared}
            for kind, (fixed, shared) in fitted.per_micro.items()
        },
        "not_in_trace": [str(kind) for kind in fitted.missing],
    }


def _fit_note(fitted: FittedCosts, chosen: Plan, scales: list[Scale]) -> str:
    """What the fit could not know, in words."""
    notes = [f"Costs were fitted to a run of {fitted.scale.workers} workers."]
    used = {slot.kind for slot in chosen.tick}
    unknown = [str(kind) for kind in fitted.missing if kind in used]
    if unknown:
        notes.append(f"Not in the trace, so taken to cost nothing: {', '.join(unknown)}.")
    if any(scale != fitted.scale for scale in scales):
        notes.append("Other numbers of workers follow the hardware description.")
    return " ".join(notes)
