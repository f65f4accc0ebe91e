"""Where results go: the terminal, a file, or standard output for another program."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nestpipe.errors import ConfigError

STDOUT = "-"
LOG_EVERY_S = 5.0


def console() -> Console:
    """The terminal, or a plain log of 100 columns when output is piped."""
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


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
