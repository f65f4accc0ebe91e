"""`nestpipe bench clustering`: keys sent by micro-batches, cut in different ways."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nestpipe.cli.options import JsonFile
from nestpipe.cli.output import STDOUT, console, progress_bar, write_json
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.bench.clustering import ClusteringReading

DEFAULT_DATA = Path("data/ml-1m")


def bench_clustering(
    data: Annotated[
        Path | None,
        typer.Option(help=f"Folder with MovieLens' ratings.dat; default: {DEFAULT_DATA}."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Users of a batch.")] = 512,
    items: Annotated[int, typer.Option(help="The latest items of each user.")] = 200,
    micros: Annotated[str, typer.Option(help="Micro-batches, separated by commas.")] = "8,32",
    draws: Annotated[int, typer.Option(help="Batches of different users.")] = 5,
    json: JsonFile = None,
) -> None:
    """Count the keys that random, contiguous and clustered micro-batches send.

    Figures are means over the draws: keys sent over whole-batch dedup, fewer than random, how much
    of the excess over dedup is removed, tokens of the heaviest and lightest micro-batch beside
    the mean. `both` bounds tokens on both sides. Without MovieLens only generated users are cut.

    Example: nestpipe bench clustering --data data/ml-1m --json -
    """
    from nestpipe.bench.clustering import ClusteringCase, measure_clustering, steps

    case = ClusteringCase(samples=samples, items=items, parts=_parts(micros), draws=draws)
    movielens = data or (DEFAULT_DATA if DEFAULT_DATA.exists() else None)
    with progress_bar("clustering", steps(case, movielens is not None)) as advance:
        readings = measure_clustering(case, movielens, advance)
    if json is not None:
        results = [asdict(reading) for reading in readings]
        write_json(json, {"samples": samples, "items": items, "draws": draws, "results": results})
    if json != STDOUT:
        console().print(_table(readings, f"{samples} users, {items} items, {draws} draws"))
        if movielens is None:
            console().print(
                f"No MovieLens in {DEFAULT_DATA}: fetch ml-1m.zip from "
                "https://grouplens.org/datasets/movielens/1m/ (research use), unpack ratings.dat "
                "and name its folder with --data."
            )


def _parts(micros: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in micros.split(","))
    except ValueError:
        raise ConfigError(f"micros is {micros!r}; give whole numbers, such as 8,32") from None


def _table(readings: list[ClusteringReading], title: str) -> Table:
    table = Table(title=title)
    for name in ("data", "N", "cut"):
        table.add_column(name)
    for name in ("keys sent", "fewer", "removed", "tokens", "ms", "CPU ms"):
        table.add_column(name, justify="right")
    for reading in readings:
        table.add_row(
            reading.data,
            str(reading.parts),
            reading.how,
            f"{reading.ratio:.2f}x",
            f"{reading.fewer_percent:.1f} %",
            f"{round(reading.excess_removed_percent)} %",
            f"+{100 * reading.tokens_over:.0f} -{100 * reading.tokens_under:.0f} %",
            f"{reading.ms:.1f}",
            f"{reading.cpu_ms:.1f}",
        )
    return table
