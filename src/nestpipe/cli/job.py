"""What commands that run a job have in common: its config, its ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestpipe.config import build, override, read
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.train.job import JobConfig

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
    return build(JobConfig, override(given, settings or []))


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
