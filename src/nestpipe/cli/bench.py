"""`nestpipe bench`: how fast the parts are, beside what else could do their work."""

from __future__ import annotations

import json as json_module
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nestpipe.cli.options import STDOUT, JsonFile, console, figures_table, progress_bar, write_json
from nestpipe.errors import ConfigError, RunError

if TYPE_CHECKING:
    from nestpipe.bench.clustering import ClusteringReading
    from nestpipe.bench.groups import GroupReading

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
    from nestpipe.embedding.store.protocol import default_threads

    threads = default_threads() if threads is None else threads
    case = StoreCase(gb=gb, dim=dim, threads=threads, keys=keys, seconds=seconds)
    with progress_bar("filling the store", case.fills) as advance:
        reading = measure_store(case, progress=advance)
    if json is not None:
        write_json(json, asdict(reading))
    if json != STDOUT:
        title = f"{case.rows:,} rows of {dim} numbers, {case.threads} threads"
        table = figures_table(title, "", "", ("GB/s", "rows/s"))
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


# `nestpipe bench train`: samples per second beside TorchRec, in the same processes.


CASE_NAMES = ("sequence", "dlrm1", "dlrm10")


def bench_train(
    cases: Annotated[
        str, typer.Option(help=f"Which of {', '.join(CASE_NAMES)}, separated by commas.")
    ] = ",".join(CASE_NAMES),
    ranks: Annotated[int, typer.Option(min=1, help="CPU ranks, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each system.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Batches in a round.")] = 6,
    plan: Annotated[str, typer.Option(help="The plan that ours runs.")] = "serial",
    peer: Annotated[bool, typer.Option(help="Time TorchRec too (`make bench-deps`).")] = True,
    json: JsonFile = None,
) -> None:
    """Time training on CPU ranks; both systems take turns, figures are of the median round.

    Example: nestpipe bench train --cases sequence --rounds 5 --json -
    """
    results: list[dict[str, Any]] = []
    for case in cases.split(","):
        if case not in CASE_NAMES:
            raise ConfigError(f"unknown case {case!r}; use {', '.join(CASE_NAMES)}")
        sys.stderr.write(f"timing {case}: {rounds} rounds of {steps} batches on {ranks} ranks\n")
        options = ["--rounds", str(rounds), "--steps", str(steps), "--plan", plan]
        results.append(_run(case, ranks, [*options, *([] if peer else ["--no-peer"])]))
    if json is not None:
        write_json(json, {"results": results} if len(results) > 1 else results[0])
    if json != STDOUT:
        console().print(train_table(results))


def _run(case: str, ranks: int, options: list[str]) -> dict[str, Any]:
    from nestpipe.comm import launch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "nestpipe.bench.train",
            case,
            *options,
            "--out",
            str(out),
        ]
        status = launch(ranks, command)
        if status == ConfigError.exit_status:
            raise typer.Exit(status)
        if status != 0:
            raise RunError(f"the benchmark of {case} ended with status {status}; see above")
        return json_module.loads(out.read_text())


SYSTEMS = {
    "nestpipe": ("NestPipe", None),
    "torchrec": ("TorchRec", "ratio"),
    "torchrec_dedup": ("TorchRec, distinct keys", "ratio_dedup"),
}
"""What `bench train` times, its name in the table, and the key of our speed over it."""


def train_table(results: list[dict[str, Any]]) -> Table:
    """Speeds of both systems, with and without dedup of the peer's keys."""
    table = figures_table(
        "samples per second, all ranks",
        "median over rounds; range: slowest and fastest round; x: NestPipe over it;\n"
        "distinct keys: torch.unique before the lookup, since FBGEMM has no dedup on a CPU",
        "case, system",
        ("samples/s", "range", "x"),
    )
    for result in results:
        for key, (name, ratio) in SYSTEMS.items():
            if result[f"{key}_samples_per_s"] is None:
                continue
            low, high = result[f"{key}_samples_per_s_range"]
            table.add_row(
                f"{result['config']}, {name}",
                f"{result[f'{key}_samples_per_s']:,.0f}",
                f"{low:,.0f}..{high:,.0f}",
                f"{result[ratio]:.2f}x" if ratio else "",
            )
    return table


# `nestpipe bench groups`: one dimension and groups of ranks on the same work.


def bench_groups(
    groups: Annotated[int, typer.Option(min=2, help="Groups of ranks.")] = 2,
    intervals: Annotated[
        str, typer.Option(help="Intervals of averaged groups, separated by commas.")
    ] = "1,4,16",
    case: Annotated[str, typer.Option(help="A case of `nestpipe bench pipeline`.")] = "network",
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Ranks as hosts with shaped links; needs root.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a size of the case."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Time a step of `nested` and count what a rank sends, in one dimension and in groups.

    Example: nestpipe bench groups --hosts --intervals 1,4,16 --json out/groups.json
    """
    from nestpipe.bench.groups import group_variants, measure_groups
    from nestpipe.bench.pipeline_cases import PipelineCase, case_of
    from nestpipe.comm.mesh import check_groups
    from nestpipe.config import build

    chosen = build(PipelineCase, asdict(case_of(case)), overrides=set_ or [])
    check_groups(groups, chosen.ranks)
    variants = group_variants(groups, _numbers(intervals))
    readings = measure_groups(chosen, variants, hosts=hosts)
    if json is not None:
        results = [asdict(reading) for reading in readings]
        write_json(json, {"case": asdict(chosen), "hosts": hosts, "results": results})
    if json != STDOUT:
        console().print(groups_table(f"{chosen.ranks} ranks of {chosen.batch} samples", readings))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"intervals are {text!r}; give whole numbers from 1 on, such as 1,4,16")
    return numbers


def groups_table(title: str, readings: list[GroupReading]) -> Table:
    """One row per way to group the ranks."""
    table = figures_table(
        title,
        "median over rounds; range: fastest and slowest round; x: gain over one dimension",
        "groups",
        ("step, ms", "range", "x", "MB sent per rank", "of one dimension"),
    )
    one = readings[0]
    for reading in readings:
        table.add_row(
            reading.variant.name,
            f"{reading.step_ms:,.0f}",
            f"{min(reading.rounds_ms):,.0f}..{max(reading.rounds_ms):,.0f}",
            f"{one.step_ms / reading.step_ms:.2f}",
            f"{reading.sent_mb:.2f}",
            f"{100 * reading.sent_mb / one.sent_mb:.0f} %",
        )
    return table


# `nestpipe bench clustering`: keys sent by micro-batches, cut in different ways.


DEFAULT_DATA = Path("data/ml-1m")


def bench_clustering(
    data: Annotated[
        Path | None,
        typer.Option(help=f"Folder with MovieLens' ratings.dat; default: {DEFAULT_DATA}."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Users of a batch.")] = 512,
    items: Annotated[int, typer.Option(help="The latest items of each user.")] = 200,
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches, separated by commas.")
    ] = "8,32",
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

    case = ClusteringCase(samples=samples, items=items, parts=_parts(micro_batches), draws=draws)
    movielens = data or (DEFAULT_DATA if DEFAULT_DATA.exists() else None)
    with progress_bar("clustering", steps(case, movielens is not None)) as advance:
        readings = measure_clustering(case, movielens, advance)
    if json is not None:
        results = [asdict(reading) for reading in readings]
        write_json(json, {"samples": samples, "items": items, "draws": draws, "results": results})
    if json != STDOUT:
        console().print(
            clustering_table(readings, f"{samples} users, {items} items, {draws} draws")
        )
        if movielens is None:
            console().print(
                f"No MovieLens in {DEFAULT_DATA}: fetch ml-1m.zip from "
                "https://grouplens.org/datasets/movielens/1m/ (research use), unpack ratings.dat "
                "and name its folder with --data."
            )


def _parts(micro_batches: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in micro_batches.split(","))
    except ValueError:
        raise ConfigError(
            f"micro-batches is {micro_batches!r}; give whole numbers, such as 8,32"
        ) from None


def clustering_table(readings: list[ClusteringReading], title: str) -> Table:
    """One row per data set, number of micro-batches and way to cut."""
    columns = ("N", "cut", "keys sent", "fewer", "removed", "tokens", "ms", "CPU ms")
    table = figures_table(title, "", "data", columns)
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
