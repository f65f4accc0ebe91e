"""`nestpipe bench`: how fast the parts are, beside what else could do their work."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from nestpipe.cli.options import JsonFile
from nestpipe.cli.output import STDOUT, console, progress_bar, write_json

bench_app = typer.Typer(
    help="Measure the parts of nestpipe beside their alternatives.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@bench_app.callback()
def _bench(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench_app.command()
def store(
    gb: Annotated[float, typer.Option(help="Rows in the store, in GB.")] = 4.0,
    dim: Annotated[int, typer.Option(help="Width of a row in float32 numbers.")] = 128,
    threads: Annotated[
        int | None, typer.Option(help="Threads of both; default: every core.")
    ] = None,
    keys: Annotated[int, typer.Option(help="Keys of a batch.")] = 200_000,
    seconds: Annotated[float, typer.Option(help="Time for the timed rounds.")] = 10.0,
    json: JsonFile = None,
) -> None:
    """Read and write random rows of the host store, in turns with torch.index_select.

    Twice the memory of --gb is needed: the tensor beside the store is as large.

    Example: nestpipe bench store --gb 4 --json -
    """
    from nestpipe.bench.store import StoreCase, measure_store
    from nestpipe.embedding.native_store import default_threads

    threads = default_threads() if threads is None else threads
    case = StoreCase(gb=gb, dim=dim, threads=threads, keys=keys, seconds=seconds)
    with progress_bar("filling the store", case.fills) as advance:
        reading = measure_store(case, progress=advance)
    if json is not None:
        write_json(json, asdict(reading))
    if json != STDOUT:
        table = Table(title=f"{case.rows:,} rows of {dim} numbers, {case.threads} threads")
        table.add_column("")
        table.add_column("GB/s", justify="right")
        table.add_column("rows/s", justify="right")
        row_gb = dim * 4 / 1e9
        for name, rate in (
            ("gather by key", reading.gather_gb_per_s),
            ("torch.index_select", reading.index_select_gb_per_s),
            ("scatter by key", reading.scatter_gb_per_s),
            ("insert new rows", reading.insert_rows_per_s * row_gb),
            ("gather keys never stored", reading.first_rows_per_s * row_gb),
        ):
            table.add_row(name, f"{rate:.2f}", f"{rate / row_gb:,.0f}")
        console().print(table)
        console().print(
            f"gather / index_select: {reading.ratio:.2f}; memory {reading.bytes / 1e9:.2f} GB"
        )
