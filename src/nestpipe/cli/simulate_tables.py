"""The tables that `nestpipe simulate` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nestpipe.schedule import Exchange, Merge, Plan, PlanOptions
from nestpipe.sim import GroupChoice, PaperChoice, PaperRow, Point, Workload
from nestpipe.sim.paper.published import BEYOND, LARGEST, NESTPIPE, NESTPIPE_2D, UNRECONCILED
from nestpipe.sim.paper.systems import ASSUMPTIONS, StepRange
from nestpipe.sim.scaling import BASE_WORKERS

EXPOSED_SHOWN = 3
"""How many of the most exposed kinds a row names."""


def curve_table(points: Sequence[Point], plan: Plan) -> Table:
    """One row per scale."""
    shape = plan.shape
    window = ", exchange window" if shape.exchange is Exchange.WINDOW else ""
    table = Table(
        title=f"{shape.plan}, {shape.micro_batches} micro-batches, "
        f"retrieval {shape.retrieval}{window}",
        caption="times in ms per step; efficiency relative to the first row",
    )
    table.add_column("workers", justify="right")
    for name in ("step", "samples/s", "efficiency", "utilisation", "lookup", "exchange"):
        table.add_column(name, justify="right")
    table.add_column("most exposed")
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
    table = Table(
        title=f"{choice.workers:,} workers in groups: {name}, "
        f"{options.micro_batches} micro-batches, {_merging(options)}",
        caption="ms per step; exposed: all but compute, and how much of it is merging; efficiency: "
        f"over {min(BASE_WORKERS, choice.workers)} workers in one group; merged: MB per worker "
        "and batch",
    )
    for column in ("groups x workers", "step", "exposed", "merging", "efficiency", "samples/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("merged", justify="right")
    table.add_column("")
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
    """Which number of groups is best, in words, and what was left out."""
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
    """Simulated figures, the published ones below them."""
    table = Table(
        title="Simulated and published figures, 512 samples per worker",
        caption="ms per step; range: under other assumptions that fit as well; gain over TorchRec; "
        "scaling efficiency in %; error of the step. ~ derived, not printed there; c calibrated on "
        "a figure of this row, p predicted, e extrapolated; * a number of micro-batches inferred "
        "from NestPipe's own figures",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("workers", no_wrap=True)
    for name in ("step", "error", "range", "lookup", "exchange", "gain", "scaling"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
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
    # Past the published scales assumptions decide: a single figure would say too much.
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
    """What groups of workers bring at the largest published scale, and past it."""
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
    """What no published figure fixes, and what was tried instead."""
    terminal.print("\nAssumed, and what else fits (the ranges):")
    for one in ASSUMPTIONS:
        own = "; not independent of NestPipe" if one.from_nestpipe else ""
        terminal.print(f"- {one.name}: {one.taken}; or {one.others}{own}.", markup=False)


def print_unreconciled(terminal: Console) -> None:
    """What the published figures leave open."""
    terminal.print("\nWhat does not reconcile, and was not tuned away:")
    for sentence in UNRECONCILED:
        terminal.print(f"- {sentence}", markup=False)
