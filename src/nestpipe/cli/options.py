"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestpipe.config import build, read
from nestpipe.errors import ConfigError, ParseError
from nestpipe.schedule import PLANS, PlanOptions, Schedule, from_text, plan

if TYPE_CHECKING:
    from nestpipe.train.job import JobConfig

MOST_BATCHES = 1000

Batches = Annotated[int, typer.Option("--batches", help="Batches.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the figures; - for stdout.")
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
    try:
        return from_text(read_text(Path(source)))
    except ParseError as error:
        raise ParseError(f"{source}: {error}") from None


def looks_like_path(source: str) -> bool:
    """Whether a word means a file rather than a plan."""
    return Path(source).exists() or "." in source or "/" in source


# What commands that run a job have in common: its config, its ranks.


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


def read_job(config: Path | None, settings: list[str] | None) -> JobConfig:
    """The config of a job: what the file says, with what the command line overrides."""
    try:
        from nestpipe.train.job import JobConfig
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training needs {error.name}, which is not installed; pip install 'nestpipe[train]'"
        ) from None
    given = read(config) if config is not None else {}
    return build(JobConfig, given, overrides=settings or [])


def starts_ranks(ranks: int) -> bool:
    """Whether this process is the one that starts the ranks, not a rank itself."""
    if ranks < 1:
        raise ConfigError(f"cannot start {ranks} ranks; ask for at least 1")
    return ranks > 1 and "RANK" not in os.environ


def launch_ranks(ranks: int) -> int:
    """Run this very command as so many ranks; returns the exit status."""
    from nestpipe.comm import launch

    return launch(ranks, [sys.executable, "-m", "nestpipe", *sys.argv[1:]])


def quieten() -> None:
    """Leave out what torch says of machines without a GPU."""
    import warnings

    warnings.filterwarnings("ignore", module="torch.*")
