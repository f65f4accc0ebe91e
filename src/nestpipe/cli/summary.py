"""The table at the end of `nestpipe train`: where the time of a step went, and what it moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from nestpipe.train.summary import Summary


def summary_table(summary: Summary, plan: str) -> Table:
    """The time of each kind of op; what is exposed adds up to the step."""
    table = Table(title=f"An average step of {plan}: {summary.step_ms:,.2f} ms")
    table.add_column("op")
    for name in ("ms", "hidden", "exposed"):
        table.add_column(name, justify="right")
    for kind, time in summary.kinds.items():
        table.add_row(kind, *(f"{ms:,.2f}" for ms in (time.ms, time.hidden_ms, time.exposed_ms)))
    table.add_row("(no op)", "", "", f"{summary.idle_ms:,.2f}")
    table.add_section()
    hidden = sum(time.hidden_ms for time in summary.kinds.values())
    table.add_row("step", "", f"{hidden:,.2f}", f"{summary.step_ms:,.2f}")
    return table


def summary_lines(summary: Summary) -> str:
    """What bounds the step and what moves in it, line by line."""
    shared = summary.shared_keys
    return "\n".join(
        [
            f"busiest lane: {summary.busiest_lane}, {summary.busiest_ms:,.2f} ms; "
            f"pipeline efficiency {summary.efficiency:.2f}",
            "keys shared with the batch before: "
            + (f"{100 * shared:.1f} %" if shared is not None else "not compared by this plan"),
            f"rows per batch and rank: {summary.rows_read:,.0f} read, "
            f"{summary.rows_refreshed:,.0f} refreshed, {summary.rows_written:,.0f} written",
            f"keys asked for per batch and rank: {summary.keys_asked:,.0f}",
            f"sent per batch and rank: {_size(summary.bytes_sent)}",
            f"times: mean of {summary.batches} steady batches over all ranks",
        ]
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"
