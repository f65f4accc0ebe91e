"""`nestpipe simulate`: scaling curves for any config, and the published table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nestpipe.cli.options import (
    STDOUT,
    JsonFile,
    console,
    figures_table,
    progress_bar,
    with_plan_options,
    write_json,
    write_text,
)
from nestpipe.cli.plan import answer_job, refuse_offer
from nestpipe.config import build, read
from nestpipe.errors import ConfigError
from nestpipe.schedule import PLANS, Exchange, Merge, Plan, PlanOptions
from nestpipe.sim import (
    Cluster,
    FittedCosts,
    GroupChoice,
    Layout,
    PaperChoice,
    PaperRow,
    Point,
    Scale,
    Workload,
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
from nestpipe.sim.paper import (
    ASSUMPTIONS,
    BEYOND,
    LARGEST,
    NESTPIPE,
    NESTPIPE_2D,
    SCALES,
    SYSTEMS,
    UNRECONCILED,
    StepRange,
)
from nestpipe.sim.report import BASE_WORKERS, plan_for, whole_intervals
from nestpipe.trace import read_chrome, write_chrome

MOST_WORKERS = 100_000
MOST_BETWEEN = 1000
"""Batches between two merges; all of them are replayed."""
USUAL_WORKERS = "1,8,64,512,1536,4096"
AUTO = "auto"
EVERY_GROUPS = [1, 2, 4, 8]
"""The meaning of `auto` for a job: its groups are exact, each with all tables."""

simulate_app = typer.Typer(rich_markup_mode=None)


@simulate_app.callback(invoke_without_command=True)
@with_plan_options(micro_batches=8, merge_every=1)
def simulate(
    context: typer.Context,
    plan_name: Annotated[
        str, typer.Option("--plan", help=f"The plan to replay: {', '.join(PLANS)}.")
    ] = "nested",
    workers: Annotated[
        str | None,
        typer.Option(
            show_default=f"{USUAL_WORKERS}; --job: 2 to 64",
            help="Numbers of workers, separated by commas.",
        ),
    ] = None,
    *,
    options: PlanOptions,
    groups: Annotated[
        str,
        typer.Option(
            help="Groups of workers with a copy of the tables each (2D); several numbers, or auto: "
            "which is best."
        ),
    ] = "1",
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
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="Answer for this job on the machines of --hardware (an offer)."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="--job: its profile, by plan --save-profile."),
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="--job without --profile: profile it on this many ranks here.")
    ] = 2,
    batch_per_worker: Annotated[
        bool,
        typer.Option(
            "--batch-per-worker", help="--job: batches grow with the workers, unlike run.batch."
        ),
    ] = False,
    print_hardware: Annotated[
        bool, typer.Option("--print-hardware", help="Print the hardware file in use, and stop.")
    ] = False,
) -> None:
    """Replay a plan on more and more workers and print how it scales.

    Example: nestpipe simulate --plan nested --micro-batches 8 --workers 128,1536 --svg scaling.svg

    Example: nestpipe simulate --groups auto --workers 1536,4096 --merge-every 4

    Example: nestpipe simulate --exchange window --set workload.split_growth=0.1

    Example: nestpipe simulate --job job.toml --hardware configs/offer.toml --workers 2,4,8,16

    Example: nestpipe simulate paper
    """
    if context.invoked_subcommand is not None:
        return
    refuse_options(context, with_job=job is not None)
    if job is not None:
        counts = _numbers("workers", workers, MOST_WORKERS) if workers is not None else []
        every = groups.strip() == AUTO
        splits = EVERY_GROUPS if every else _numbers("groups", groups, MOST_WORKERS)
        answer_job(job, hardware, profile, ranks, counts, splits, batch_per_worker, json)
        return
    workers = USUAL_WORKERS if workers is None else workers
    cluster = _cluster(hardware, settings or [])
    if print_hardware:
        write_text(STDOUT, to_toml(cluster))
        return
    if options.merge_every > MOST_BETWEEN:
        raise ConfigError(f"merge_every is {options.merge_every}; use at most {MOST_BETWEEN:,}")
    if options.merge is Merge.EXACT and options.merge_every == 0:
        raise ConfigError("merge_every is 0 and merge 'exact'; use --merge-every 1")
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
        title = f"{plan_name}, {options.micro_batches} micro-batches: where a step's time goes"
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


FOR_BOTH = {"workers", "groups", "hardware", "json", "job"}
FOR_JOB = {"profile", "ranks", "batch_per_worker"}


def refuse_options(context: typer.Context, *, with_job: bool) -> None:
    """Refuse options that have no effect with `--job`, or without it."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in FOR_BOTH or source is None or source.name != "COMMANDLINE":
            continue
        flag = option.opts[0]
        if with_job and option.name not in FOR_JOB:
            raise ConfigError(
                f"{flag} does nothing with --job, which looks at plans, sites and sizes of its "
                "own; leave it out"
            )
        if not with_job and option.name in FOR_JOB:
            raise ConfigError(f"{flag} is for --job; name the job's config there, or drop it")


def _cluster(hardware: Path | None, settings: list[str]) -> Cluster:
    given = asdict(paper_cluster()) if hardware is None else read(hardware)
    if hardware is not None:
        refuse_offer(given, hardware)
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
    """The limits of the fit, in words."""
    notes = [f"Costs were fitted to a run of {fitted.scale.workers} workers."]
    used = {op.kind for op in chosen.schedule(chosen.shape.lookahead + 1).ops}
    unknown = [str(kind) for kind in fitted.missing if kind in used]
    if unknown:
        notes.append(f"Not in the trace, so taken to cost nothing: {', '.join(unknown)}.")
    if any(scale != fitted.scale for scale in scales):
        notes.append("Other numbers of workers follow the hardware description.")
    return " ".join(notes)


# The tables and lines that it prints.


EXPOSED_SHOWN = 3
"""How many of the most exposed kinds a row names."""


def curve_table(points: Sequence[Point], plan: Plan) -> Table:
    """One row per scale."""
    shape = plan.shape
    window = ", exchange window" if shape.exchange is Exchange.WINDOW else ""
    table = figures_table(
        f"{shape.plan}, {shape.micro_batches} micro-batches, retrieval {shape.retrieval}{window}",
        "times in ms per step; efficiency relative to the first row",
        "workers",
        ("step", "samples/s", "efficiency", "utilisation", "lookup", "exchange"),
    )
    table.add_column("most exposed", overflow="fold")
    for point in points:
        run = point.figures
        table.add_row(
            f"{run.workers:,}",
            f"{run.step_ms:,.1f}",
            f"{run.samples_per_s:,.0f}",
            f"{point.scaling_efficiency:.1f} %",
            f"{100 * run.utilisation:.1f} %",
            f"{run.lookup_ms:,.1f}",
            f"{run.exposed_comm_ms:,.1f}",
            _most_exposed(run.exposed_ms),
        )
    return table


def groups_table(choice: GroupChoice, name: str, options: PlanOptions) -> Table:
    """One row per number of groups, the best one marked."""
    table = figures_table(
        f"{choice.workers:,} workers in groups: {name}, {options.micro_batches} micro-batches, "
        f"{_merging(options)}",
        "ms per step; exposed: all but compute, and how much of it is merging; efficiency: "
        f"over {min(BASE_WORKERS, choice.workers)} workers in one group; merged: MB per worker "
        "and batch",
        "groups x workers",
        ("step", "exposed", "merging", "efficiency", "samples/s", "merged", ""),
    )
    for row in choice.rows:
        run = row.figures
        table.add_row(
            f"{row.groups:,} x {row.shards:,}",
            f"{run.step_ms:,.1f}",
            f"{row.exposed_ms:,.1f}",
            f"{row.exposed_merge_ms:,.1f}",
            f"{row.efficiency:.1f} %",
            f"{run.samples_per_s:,.0f}",
            f"{row.merged_bytes / 1e6:,.0f}",
            "best" if row is choice.best else "",
        )
    return table


def _merging(options: PlanOptions) -> str:
    if not options.merge_every:
        return "never merged"
    if options.merge is Merge.EXACT:
        return "gradients summed every batch"
    every = "batch" if options.merge_every == 1 else f"{options.merge_every} batches"
    return f"rows averaged every {every}"


def groups_answer(choice: GroupChoice, work: Workload) -> str:
    """The best number of groups, in words, and what was left out."""
    best, one = choice.best, next((row for row in choice.rows if row.groups == 1), None)
    gain = ""
    if one is not None and best is not one:
        faster = 100 * (one.figures.step_ms / best.figures.step_ms - 1)
        gain = f", {faster:.1f} % faster than one group"
    words = "1 group" if best.groups == 1 else f"{best.groups} groups of {best.shards:,}"
    lane = best.figures.busiest_lane
    limit = ", which groups do not relieve" if lane in ("host", "loader") else ""
    left_out = ""
    if work.merge_from_host == 0 and any(row.merged_bytes for row in choice.rows):
        left_out = (
            " Rows that only other groups touched are taken to be on the device "
            "(workload.merge_from_host is 0)."
        )
    return (
        f"Best for {choice.workers:,} workers: {words}{gain}; the busiest lane is {lane}{limit}."
        f"{left_out}"
    )


def _most_exposed(exposed_ms: Mapping[str, float]) -> str:
    ranked = sorted(exposed_ms.items(), key=lambda item: -item[1])[:EXPOSED_SHOWN]
    return ", ".join(f"{kind} {ms:,.1f}" for kind, ms in ranked if ms >= 0.05)


def paper_table(rows: Sequence[PaperRow]) -> Table:
    """Simulated figures, with the published ones below them."""
    table = figures_table(
        "Simulated and published figures, 512 samples per worker",
        "ms per step; range: under other assumptions that fit as well; gain over TorchRec; "
        "scaling efficiency in %; error of the step. ~ derived, not printed there; c calibrated on "
        "a figure of this row, p predicted, e extrapolated; * a number of micro-batches inferred "
        "from NestPipe's own figures",
        "workers",
        ("step", "error", "range", "lookup", "exchange", "gain", "scaling", ""),
    )
    previous = ""
    for row in rows:
        if row.system != previous:
            if previous:
                table.add_section()
            table.add_row(row.system)
        table.add_row(*_simulated_cells(row))
        if any(getattr(row.published, name) is not None for name in SHOWN):
            table.add_row(*_published_cells(row))
        previous = row.system
    return table


SHOWN = {
    "step_ms": ".0f",
    "lookup_ms": ".0f",
    "exposed_comm_ms": ".0f",
    "speedup": ".2f",
    "scaling_efficiency": ".1f",
}
"""Figures of the table, and how they are written."""


def _simulated_cells(row: PaperRow) -> list[str]:
    error, mark = row.error_percent("step_ms"), row.kind[0] + ("*" if row.inferred else "")
    # Past the published scales assumptions decide: a single figure would claim too much.
    shown = row.kind != "extrapolated"
    step, *others = (
        format(getattr(row, name), form) if shown else "" for name, form in SHOWN.items()
    )
    return [
        f"  {row.workers:,}",
        step,
        "" if error is None else f"{error:+.1f} %",
        _range(row.step_range) if row.step_range.decided_by or not shown else "",
        *others,
        mark,
    ]


def _published_cells(row: PaperRow) -> list[str]:
    """What was published of the row; a figure that was derived has a mark."""
    known = {name: getattr(row.published, name) for name in SHOWN}
    step, *others = (
        "" if value is None else _derived(row, name) + format(value, SHOWN[name])
        for name, value in known.items()
    )
    return ["    published", step, "", "", *others]


def _derived(row: PaperRow, name: str) -> str:
    return "~" if name in row.published.derived else ""


def _range(found: StepRange) -> str:
    low, high = f"{found.low_ms:,.0f}", f"{found.high_ms:,.0f}"
    return low if low == high else f"{low}..{high}"


def print_2d(terminal: Console, rows: Sequence[PaperRow], choices: Sequence[PaperChoice]) -> None:
    """The gain from groups of workers at the largest published scale, and past it."""
    at = {(row.system, row.workers): row for row in rows}
    row, known = at[NESTPIPE_2D, LARGEST], at[NESTPIPE_2D, LARGEST].published
    terminal.print(
        f"\n{NESTPIPE_2D} at {LARGEST:,} workers: {row.qps:,.0f} samples/s "
        f"(published {known.qps:,.0f}), efficiency {row.scaling_efficiency:.2f} % "
        f"({known.scaling_efficiency} %), All2All {row.all_to_all_ms:,.1f} ms "
        f"({known.all_to_all_ms} ms).",
        markup=False,
    )
    alone, grouped = at[NESTPIPE, BEYOND], at[NESTPIPE_2D, BEYOND]
    terminal.print(
        f"At {BEYOND:,} workers, extrapolated: {NESTPIPE} {_range(alone.step_range)} ms a step, "
        f"with 2D-SP {_range(grouped.step_range)} ms. {_decided(grouped.step_range)}",
        markup=False,
    )
    terminal.print("The best number of groups for NestPipe, rows averaged every batch:")
    for one in choices:
        best = one.choice.best
        terminal.print(
            f"- {one.choice.workers:,} workers, retrieval {one.retrieval}: {best.groups}, "
            f"{_range(one.step_range)} ms a step (busiest lane: {best.figures.busiest_lane}). "
            f"{_decided(one.step_range)}",
            markup=False,
        )


def _decided(found: StepRange) -> str:
    """Which assumptions make the range."""
    names = ", ".join(found.decided_by)
    return f"Decided by: {names}." if names else ""


def print_assumptions(terminal: Console) -> None:
    """Assumptions that no published figure fixes, and the alternatives that were tried."""
    terminal.print("\nAssumed, and what else fits (the ranges):")
    for one in ASSUMPTIONS:
        own = "; not independent of NestPipe" if one.from_nestpipe else ""
        terminal.print(f"- {one.name}: {one.taken}; or {one.others}{own}.", markup=False)


def print_unreconciled(terminal: Console) -> None:
    """Contradictions among the published figures."""
    terminal.print("\nWhat does not reconcile, and was not tuned away:")
    for sentence in UNRECONCILED:
        terminal.print(f"- {sentence}", markup=False)
