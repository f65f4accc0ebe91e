"""The tables that `nestpipe simulate` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from nestpipe.schedule import Plan
from nestpipe.sim import PaperRow, Point
from nestpipe.sim.published import UNRECONCILED

EXPOSED_SHOWN = 3
"""How many of the most exposed kinds a row names."""


def curve_table(points: Sequence[Point], plan: Plan) -> Table:
    """One row per scale."""
    shape = plan.shape
    table = Table(
        title=f"{shape.plan}, {shape.micros} micro-batches, retrieval {shape.retrieval}",
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


def _most_exposed(exposed_ms: Mapping[str, float]) -> str:
    ranked = sorted(exposed_ms.items(), key=lambda item: -item[1])[:EXPOSED_SHOWN]
    return ", ".join(f"{kind} {ms:,.1f}" for kind, ms in ranked if ms >= 0.05)


def paper_table(rows: Sequence[PaperRow]) -> Table:
    """Simulated figures with the published ones in brackets."""
    table = Table(
        title="Simulated (published) figures, 512 samples per worker",
        caption="ms per step; speed-up over TorchRec; error of the step; ~ derived, not printed "
        "there; c calibrated on a figure of this row, p predicted",
    )
    table.add_column("system", no_wrap=True)
    for name in ("workers", "step", "error", "lookup", "exchange", "speed-up", "efficiency %"):
        table.add_column(name, justify="right")
    table.add_column("")
    previous = ""
    for row in rows:
        if previous and row.system != previous:
            table.add_section()
        error = row.error_percent("step_ms")
        table.add_row(
            row.system if row.system != previous else "",
            f"{row.workers:,}",
            _beside(row, "step_ms", ".0f"),
            "" if error is None else f"{error:+.1f} %",
            _beside(row, "lookup_ms", ".0f"),
            _beside(row, "exposed_comm_ms", ".0f"),
            _beside(row, "speedup", ".2f"),
            _beside(row, "scaling_efficiency", ".1f"),
            row.kind[0],
        )
        previous = row.system
    return table


def _beside(row: PaperRow, name: str, form: str) -> str:
    known = getattr(row.published, name)
    text = format(getattr(row, name), form)
    if known is None:
        return text
    derived = "~" if name in row.published.derived else ""
    return f"{text} ({derived}{format(known, form)})"


def print_unreconciled(terminal: Console) -> None:
    """What the published figures leave open."""
    terminal.print("\nWhat does not reconcile, and was not tuned away:")
    for sentence in UNRECONCILED:
        terminal.print(f"- {sentence}", markup=False)
