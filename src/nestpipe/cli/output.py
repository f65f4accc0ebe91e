"""Where results go: the terminal, a file, or standard output for another program."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.train.summary import Summary

STDOUT = "-"
LOG_EVERY_S = 5.0


def console() -> Console:
    """The terminal, or a plain log of 100 columns when output is piped."""
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def figures_table(title: str, caption: str, first: str, columns: Sequence[str]) -> Table:
    """A table of figures: a column of names, then numbers, with no wider gaps than two spaces.

    Nothing is wrapped or cut, so whoever adds columns keeps the rows within 100 columns.
    """
    table = Table(
        title=title,
        caption=caption,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def short_ms(value: float) -> str:
    """Milliseconds in at most six characters up to a quarter of an hour."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def write_text(target: str, text: str) -> None:
    """Write to a file, or to standard output where the target is `-`."""
    if target == STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise ConfigError(f"cannot write {target!r}: {reason}; choose another file") from None


def write_json(target: str, value: object) -> None:
    """Write plain values as JSON, to a file or to standard output."""
    write_text(target, json.dumps(value, indent=1) + "\n")


class Advance(Protocol):
    """Tells the progress bar that one more unit is done; takes and ignores which one."""

    def __call__(self, _: object = None) -> None: ...


@contextmanager
def progress_bar(label: str, total: int | None) -> Generator[Advance]:
    """A bar with time left on a terminal, on stderr; now and then a line in a log."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Progress(
            *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
        )
        with bar:
            task = bar.add_task(label, total=total)
            yield lambda _=None: bar.advance(task)
        return
    done, spoke = 0, time.monotonic()

    def plain(_: object = None) -> None:
        nonlocal done, spoke
        done += 1
        if time.monotonic() - spoke >= LOG_EVERY_S:
            spoke = time.monotonic()
            of = f" of {total}" if total is not None else ""
            sys.stderr.write(f"{label}: {done}{of}\n")

    yield plain


# The table at the end of `nestpipe train`: where the time of a step went, and what it moved.


def summary_table(summary: Summary, plan: str) -> Table:
    """The time of each kind of op; what is exposed adds up to the step."""
    table = Table(title=f"An average step of {plan}: {summary.step_ms:,.2f} ms")
    table.add_column("op")
    for name in ("ms", "hidden", "exposed"):
        table.add_column(name, justify="right")
    for kind, spent in summary.kinds.items():
        table.add_row(kind, *(f"{ms:,.2f}" for ms in (spent.ms, spent.hidden_ms, spent.exposed_ms)))
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
