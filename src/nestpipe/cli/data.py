"""`nestpipe data`: describe a data set, and write synthetic ones."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table as RichTable

from nestpipe.cli.options import STDOUT, JsonFile, console, progress_bar, write_json
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.data.describe import DataReading, DescribedTable, Description, Facts

MB = 1 << 20

data_app = typer.Typer(
    help="Look at data sets, and write made-up ones.", rich_markup_mode=None, no_args_is_help=True
)


@data_app.command()
def describe(
    path: Annotated[
        str, typer.Argument(help="A file or a folder, or a topic: kafka://host:9092/topic.")
    ],
    kind: Annotated[
        Literal["auto", "parquet", "movielens", "kuairand", "criteo", "stream"],
        typer.Option(help="The format; auto goes by the files' names."),
    ] = "auto",
    max_broken: Annotated[
        int, typer.Option(min=0, help="Broken rows to count before giving up.")
    ] = 1000,
    json: JsonFile = None,
) -> None:
    """Describe a path: format, rows, columns, ranges, times and broken rows.

    Example: nestpipe data describe ml-1m/ratings.dat

    Example: nestpipe data describe kuairand-pure --json facts.json
    """
    with _extra_needed():
        from nestpipe.data.describe import describe as read
        from nestpipe.data.describe import detect, find_tables
        from nestpipe.data.text import total_bytes
    if path.startswith("kafka://"):
        _describe_topic(path, json)
        return
    where = Path(path)
    # A stream's folder holds Parquet.
    chosen = detect(where) if kind == "auto" else "parquet" if kind == "stream" else kind
    tables = find_tables(where, chosen)
    size = total_bytes([file for table in tables for file in table.files])
    with progress_bar("reading (MB)", size // MB + 1) as advance:
        done = 0

        def more(count: int) -> None:
            nonlocal done
            for _ in range((done + count) // MB - done // MB):
                advance()
            done += count

        found = read(where, chosen, tables, max_broken, more)
    if json is not None:
        write_json(json, found.as_json())
    if json != STDOUT:
        _print(found)


def _describe_topic(path: str, json: str | None) -> None:
    """Facts that Kafka reports without reading messages."""
    from nestpipe.data.config import StreamConfig
    from nestpipe.data.logs import KafkaTopic

    topic = KafkaTopic(path, StreamConfig())
    bounds = topic.bounds()
    if json is not None:
        facts = [{"partition": p, "first": low, "end": high} for p, (low, high) in bounds.items()]
        write_json(json, {"path": path, "kind": "stream", "partitions": facts})
    if json != STDOUT:
        total = sum(high - low for low, high in bounds.values())
        rich = RichTable(title=f"stream: {topic.name}, {total:,} messages", title_justify="left")
        for name in ("partition", "first", "end", "messages"):
            rich.add_column(name, justify="right")
        for partition, (low, high) in bounds.items():
            rich.add_row(str(partition), f"{low:,}", f"{high:,}", f"{high - low:,}")
        console().print(rich)


@data_app.command()
def synth(
    folder: Annotated[Path, typer.Argument(help="Where the Parquet files go.")],
    samples: Annotated[int, typer.Option(help="Samples to write.")],
    kind: Annotated[
        Literal["ctr", "sequence"],
        typer.Option(help="Features with a click, or users' sequences of items."),
    ] = "ctr",
    seed: Annotated[int, typer.Option(help="Which made-up world.")] = 0,
    files: Annotated[int, typer.Option(help="Files to spread the samples over.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier data set.")] = False,
    json: JsonFile = None,
) -> None:
    """Write a synthetic data set with a planted signal, as Parquet.

    Example: nestpipe data synth out/clicks --samples 1000000 --files 4

    Example: nestpipe data synth out/users --samples 50000 --kind sequence --seed 7
    """
    with _extra_needed():
        from nestpipe.data import SyntheticConfig
        from nestpipe.data.synthetic import num_pieces, write
    world = SyntheticConfig(flavour=kind, samples=samples, seed=seed)
    if not 1 <= files <= samples:
        raise ConfigError(f"{samples} samples cannot fill {files} files; use 1 to {samples}")
    with progress_bar("writing", num_pieces(samples, files)) as advance:
        written = write(folder, world, files=files, force=force, progress=advance)
    if json is not None:
        write_json(json, {"files": [str(file) for file in written], "samples": samples})
    if json != STDOUT:
        size = sum(file.stat().st_size for file in written) / MB
        console().print(f"wrote {samples:,} samples to {folder}: {files} files, {size:,.1f} MB")


def bench_data(
    form: Annotated[
        Literal["both", "clicks", "sequences"],
        typer.Option(help="Clicks (26 lists, 13 floats), users' sequences, or both."),
    ] = "both",
    samples: Annotated[int, typer.Option(help="Samples of each.")] = 1_000_000,
    ranks: Annotated[int, typer.Option(help="Read the share of one of this many ranks.")] = 1,
    batch: Annotated[int, typer.Option(help="Samples of a batch and rank.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each.")] = 3,
    json: JsonFile = None,
) -> None:
    """Read shuffled batches from Parquet, in turns with a plain Arrow scan of the same columns.

    Figures are per second of processor time, so of one core, and made-up data is written first.

    Example: nestpipe bench data --samples 300000 --json -
    """
    from nestpipe.data.describe import DataCase, measure_data

    forms: tuple[Literal["clicks", "sequences"], ...] = ("clicks", "sequences")
    cases = [
        DataCase(form=one, samples=samples, ranks=ranks, batch=batch, rounds=rounds)
        for one in forms
        if form in (one, "both")
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        progress_bar("reading", sum(case.rounds + 2 for case in cases)) as advance,
    ):
        found = [measure_data(case, Path(folder), advance) for case in cases]
    if json is not None:
        write_json(json, [{**asdict(one), "ratio": one.ratio} for one in found])
    if json != STDOUT:
        console().print(_readings_table(found))
        for one in found:
            if one.ranks > one.shards:
                console().print(
                    f"{one.ranks} ranks share {one.shards} shards of the {one.form}, so each reads "
                    "more than its part; more --samples make more shards, 8 at most."
                )


def _readings_table(found: list[DataReading]) -> RichTable:
    rich = RichTable(title="samples per second of one core", title_justify="left")
    rich.add_column("data")
    for name in ("ranks", "shards", "Arrow scan", "batches", "ratio"):
        rich.add_column(name, justify="right")
    for one in found:
        figures = (f"{one.scan:,.0f}", f"{one.batches:,.0f}", f"{one.ratio:.2f}")
        rich.add_row(one.form, str(one.ranks), str(one.shards), *figures)
    return rich


@contextmanager
def _extra_needed() -> Generator[None]:
    """Say in one sentence what to install where torch or pyarrow is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this needs {error.name}, which is not installed; run pip install 'nestpipe[train]'"
        ) from None


def _print(found: Description) -> None:
    terminal = console()
    for table in found.tables:
        terminal.print(_rich(table, found.kind))
        if table.times is not None:
            terminal.print(f"Times: {table.times[0]} to {table.times[1]}")
    said = str(found.broken)
    terminal.print(f"{said[0].upper()}{said[1:]}.", markup=False)


def _rich(table: DescribedTable, kind: str) -> RichTable:
    more = "" if len(table.files) == 1 else f" in {len(table.files)} files"
    rich = RichTable(title=f"{kind}: {table.name}, {table.rows:,} rows{more}", title_justify="left")
    for name in ("column", "type"):
        rich.add_column(name, overflow="fold")
    for name in ("min", "max", "distinct", "empty"):
        rich.add_column(name, justify="right", overflow="ellipsis", max_width=20)
    for facts in table.columns.values():
        rich.add_row(facts.name, facts.type, *_cells(facts))
    return rich


def _cells(facts: Facts) -> list[str]:
    distinct = f"{facts.distinct.count:,}"
    if not facts.distinct.exact:
        distinct = f"about {distinct}"
    return [_short(facts.least), _short(facts.most), distinct, f"{facts.empty:,}"]


def _short(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
