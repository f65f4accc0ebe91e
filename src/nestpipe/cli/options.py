"""Shared parts of the commands: options, reading their values, and writing results."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from nestpipe.config import build, read
from nestpipe.errors import ConfigError, ParseError
from nestpipe.schedule import PLANS, PlanOptions, Schedule, from_text, plan

if TYPE_CHECKING:
    from nestpipe.train.config import JobConfig
    from nestpipe.train.loggers import Summary

MOST_BATCHES = 1000

Batches = Annotated[int, typer.Option("--batches", help="Batches.")]


def refuse_unwritable(file: Path, what: str) -> None:
    """Notice before long work that its outcome could not be written; nothing is made yet."""
    there = next(path for path in (file, *file.absolute().parents) if path.exists())
    if file.is_dir():
        fault = "it is a folder"
    elif there != file and not there.is_dir():
        fault = f"'{there}' is no folder"
    elif not os.access(there, os.W_OK):
        fault = f"'{there}' cannot be written"
    else:
        return
    raise ConfigError(f"cannot write {what} to '{file}': {fault}; choose another file")


def try_writing(*targets: str | None) -> None:
    """Refuse before long work files that could not be written after it, by opening each."""
    for target in targets:
        if target is None or target == STDOUT:
            continue
        is_new = not Path(target).exists()
        with _named(target):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            with Path(target).open("a"):
                pass
            if is_new:  # several ranks may look at once
                Path(target).unlink(missing_ok=True)


def _checked(file: str | None) -> str | None:
    if file not in (None, STDOUT):
        refuse_unwritable(Path(file), "the figures")
    return file


STDOUT = "-"
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", help="Write the figures; - for stdout.", callback=_checked
    ),
]


def with_plan_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every plan option; it takes all of them as `options`.

    A flag has the option's own default, but for those that the command chooses otherwise.
    """
    flags = [_flag(known, defaults.get(known.name, known.default)) for known in fields(PlanOptions)]

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        others = [p for name, p in signature.parameters.items() if name != "options"]

        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            options = PlanOptions(**{flag.name: given.pop(flag.name) for flag in flags})
            command(**given, options=options)

        place = list(signature.parameters).index("options")
        parameters = [*others[:place], *flags, *others[place:]]
        del wrapped.__wrapped__  # typer reads the annotations of what it wraps
        wrapped.__annotations__ = {each.name: each.annotation for each in parameters}
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapped

    return wrap


def _flag(known: Field[Any], default: object) -> inspect.Parameter:
    flag = typer.Option(f"--{known.name.replace('_', '-')}", help=known.metadata["help"])
    annotation = Annotated[type(default), flag]
    return inspect.Parameter(
        known.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def read_text(path: Path) -> str:
    """The text of a file that the user named."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}; check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{str(path)!r} is a folder; name a file in it") from None
    except UnicodeDecodeError:
        raise ParseError(f"{str(path)!r} is not a text file; give one in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}; check it") from None


def schedule_from(source: str, options: PlanOptions, batches: int) -> Schedule:
    """The schedule of a plan by its name, or that of a schedule file by its path."""
    if source in PLANS or not looks_like_path(source):
        if batches > MOST_BATCHES:
            raise ConfigError(f"{batches} batches are too many to look at; use 1 to {MOST_BATCHES}")
        return plan(source, options).schedule(batches)
    text = read_text(Path(source))
    try:
        return from_text(text)
    except ParseError as error:
        raise ParseError(f"{source}: {error}") from None


def looks_like_path(source: str) -> bool:
    """Whether a word means a file rather than a plan."""
    return Path(source).exists() or "." in source or "/" in source


# Shared by commands that run a job: its config, its ranks.


ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file; left out: generated data.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override the config; may be repeated."
    ),
]
Ranks = Annotated[int, typer.Option(help="Rank processes to start on this machine.")]


def read_job(
    config: Path | None, settings: list[str] | None, *, checkpoint: str | None = None
) -> JobConfig:
    """The config of a job: the file, with the overrides of the command line.

    Without a file it is the config of the checkpoint, or of the newest one in a folder; `auto`
    means the folder that the settings name.
    """
    try:
        from nestpipe.train.config import JobConfig
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training needs {error.name}, which is not installed; pip install 'nestpipe[train]'"
        ) from None
    given = read(config) if config is not None else {}
    job = build(JobConfig, given, overrides=settings or [])
    if config is not None or checkpoint is None:
        return job
    from nestpipe.train.job import AUTO, config_in

    saved = config_in(job.run.checkpoint if checkpoint == AUTO else checkpoint)
    return build(JobConfig, saved, overrides=settings or [])


def starts_ranks(ranks: int) -> bool:
    """Whether this process starts the ranks and is not a rank itself."""
    if ranks < 1:
        raise ConfigError(f"cannot start {ranks} ranks; ask for at least 1")
    return ranks > 1 and "RANK" not in os.environ


def launch_ranks(ranks: int) -> int:
    """Run this command once per rank; returns the exit status."""
    from nestpipe.comm import launch

    return launch([sys.executable, "-m", "nestpipe", *sys.argv[1:]], ranks)


def ignore_torch_warnings() -> None:
    """Hide torch's warnings about machines without a GPU."""
    import warnings

    warnings.filterwarnings("ignore", module="torch.*")


# Where results go: the terminal, a file, or standard output for another program.


LOG_EVERY_S = 5.0


def console() -> Console:
    """The terminal, or a plain log of 100 columns when output is piped."""
    return Console(width=None if sys.stdout.isatty() else 100, highlight=False)


def figures_table(title: str, caption: str, first: str, columns: Sequence[str]) -> Table:
    """A table of figures: a column of names, then numbers, with no wider gaps than two spaces.

    Nothing is wrapped or cut: keep the rows within 100 columns.
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
    with _named(target):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text, encoding="utf-8")


@contextmanager
def _named(target: str) -> Generator[None]:
    """Says in a sentence which file cannot be written, and why."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise ConfigError(f"cannot write {target!r}: {reason}; choose another file") from None


def write_json(target: str, value: object) -> None:
    """Write plain values as JSON, to a file or to standard output."""
    write_text(target, json.dumps(value, indent=1) + "\n")


class Advance(Protocol):
    """Advances the progress bar by one unit; takes and ignores the unit."""

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


# The table at the end of `nestpipe train`: the time of a step, and the bytes it moved.


def summary_table(summary: Summary, plan: str) -> Table:
    """The time of each kind of op; exposed times add up to the step."""
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
    """The bound of the step and its traffic, line by line."""
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
            f"sent per batch and rank: {size_of(summary.bytes_sent)}",
            f"times: mean of {summary.batches} steady batches over all ranks",
            *_model_speed(summary),
        ]
    )


def _model_speed(summary: Summary) -> list[str]:
    """The rate of the model's own products, where it knows them."""
    if summary.tflops is None:
        return []
    share = f", {100 * summary.mfu:.1f} % MFU" if summary.mfu is not None else ""
    small = summary.tflops < 0.1
    speed = f"{1000 * summary.tflops:,.3g} G" if small else f"{summary.tflops:,.3g} T"
    return [f"model: {speed}FLOP/s a rank{share}"]


def size_of(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} GB"
