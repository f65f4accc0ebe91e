"""`nestpipe bench`: the speed of the parts, beside their alternatives."""

from __future__ import annotations

import json as json_module
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nestpipe.cli.options import (
    STDOUT,
    ConfigFile,
    JsonFile,
    Ranks,
    Settings,
    console,
    figures_table,
    ignore_torch_warnings,
    launch_ranks,
    progress_bar,
    read_job,
    starts_ranks,
    write_json,
)
from nestpipe.errors import ConfigError, RunError

if TYPE_CHECKING:
    from nestpipe.bench.checkpoint import (
        CheckpointCase,
        CheckpointReading,
        DashboardCase,
        DashboardReading,
    )
    from nestpipe.bench.clustering import ClusteringReading
    from nestpipe.bench.dlrm import DispatchReading, SideBySide
    from nestpipe.bench.groups import GroupReading
    from nestpipe.bench.store import SsdCase, StoreCase
    from nestpipe.train.config import JobConfig

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
    where: Annotated[
        str, typer.Option(help="Where rows live: in memory (host), or beyond it (ssd).")
    ] = "host",
    gb: Annotated[float, typer.Option(help="Rows in the store, in GB.")] = 4.0,
    dim: Annotated[int, typer.Option(help="Width of a row in float32 numbers.")] = 128,
    threads: Annotated[
        int | None, typer.Option(help="Threads of both; default: every core.")
    ] = None,
    keys: Annotated[
        int | None, typer.Option(help="Keys of a batch; default: 200,000, on an SSD 50,000.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="host: time for the timed rounds.")] = 10.0,
    path: Annotated[Path | None, typer.Option(help="ssd: a folder on the disk.")] = None,
    cache: Annotated[float, typer.Option(help="ssd: share of the rows in memory.")] = 0.1,
    depth: Annotated[
        int, typer.Option(help="ssd: reads and writes at once, of store and disk.")
    ] = 32,
    rounds: Annotated[int, typer.Option(help="ssd: timed rounds.")] = 10,
    json: JsonFile = None,
) -> None:
    """Read and write random rows of a store, in turns with the alternative.

    host: beside torch.index_select. Twice the memory of --gb is needed: the tensor beside the
    store is as large. ssd: beside the disk itself, with blocks, threads and a file of the same
    size, right after each batch. The ratio compares with the disk's time for the same reads and
    writes.

    Example: nestpipe bench store --gb 4 --json -

    Example: nestpipe bench store --where ssd --path /nvme --gb 4 --cache 0.1 --json -
    """
    from nestpipe.bench.store import SsdCase, StoreCase
    from nestpipe.embedding.store.protocol import default_threads

    threads = default_threads() if threads is None else threads
    if where == "ssd":
        if path is None:
            raise ConfigError("where is 'ssd' but there is no --path; name a folder on the disk")
        case = SsdCase(
            path=path,
            gb=gb,
            dim=dim,
            cache=cache,
            depth=depth,
            threads=threads,
            keys=keys or 50_000,
            rounds=rounds,
        )
        _bench_ssd(case, json)
    elif where == "host":
        of = StoreCase(gb=gb, dim=dim, threads=threads, keys=keys or 200_000, seconds=seconds)
        _bench_host(of, json)
    else:
        raise ConfigError(f"where is {where!r}; use host or ssd")


def _bench_host(case: StoreCase, json: str | None) -> None:
    from nestpipe.bench.store import measure_store

    with progress_bar("filling the store", case.fills) as advance:
        reading = measure_store(case, progress=advance)
    if json is not None:
        write_json(json, asdict(reading))
    if json != STDOUT:
        title = f"{case.rows:,} rows of {case.dim} numbers, {case.threads} threads"
        table = figures_table(title, "", "", ("GB/s", "rows/s"))
        row_gb = case.dim * 4 / 1e9
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


def _bench_ssd(case: SsdCase, json: str | None) -> None:
    from nestpipe.bench.store import measure_ssd

    with progress_bar("rows on an SSD", case.steps) as advance:
        reading = measure_ssd(case, progress=advance)
    if json is not None:
        write_json(json, asdict(reading))
    if json == STDOUT:
        return
    title = (
        f"{case.rows:,} rows of {case.dim} numbers, {100 * case.cache:g} % in memory, "
        f"depth {case.depth}"
    )
    table = figures_table(title, "", "", ("MB/s", "rows/s", "of the disk's speed"))
    row_mb = case.dim * 4 / 1e6
    for name, rate, ratio in (
        ("gather by key", reading.gather_rows_per_s, f"{reading.gather_ratio:.2f}"),
        ("scatter the same keys", reading.writeback_rows_per_s, ""),
        ("scatter other keys", reading.scatter_rows_per_s, f"{reading.scatter_ratio:.2f}"),
        ("insert new rows", reading.insert_rows_per_s, ""),
    ):
        table.add_row(name, f"{rate * row_mb:,.0f}", f"{rate:,.0f}", ratio)
    block = reading.read_block
    for name, rate in (
        (f"disk: reads of {block} B", reading.disk_reads_per_s),
        (f"disk: writes of {block} B", reading.disk_row_writes_per_s),
    ):
        table.add_row(name, f"{rate * block / 1e6:,.0f}", f"{rate:,.0f}", "")
    table.add_row(
        f"disk: writes of {reading.write_block} B", f"{reading.disk_writes_mb_per_s:,.0f}", "", ""
    )
    console().print(table)
    console().print(
        f"in memory: {100 * reading.hit_share:.0f} % of rows asked for; memory "
        f"{reading.bytes / 1e9:.2f} GB, file {reading.file_bytes / 1e9:.2f} GB"
    )
    console().print(
        f"written per round (three calls): {reading.written_mb_per_round:.1f} MB, "
        f"{100 * reading.moved_share:.0f} % of it rows that moved"
    )


# `nestpipe bench train`: samples per second beside TorchRec, in the same processes.


CASE_NAMES = ("sequence", "dlrm1", "dlrm10")


def bench_train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="Time this job, in place of the cases."),
    ] = None,
    settings: Settings = None,
    cases: Annotated[
        str, typer.Option(help=f"Which of {', '.join(CASE_NAMES)}, separated by commas.")
    ] = ",".join(CASE_NAMES),
    ranks: Annotated[int, typer.Option(min=1, help="CPU ranks, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each system.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Batches in a round.")] = 6,
    plan: Annotated[
        str | None,
        typer.Option(help="The plan that ours runs; of a job several, separated by commas."),
    ] = None,
    peer: Annotated[bool, typer.Option(help="Time TorchRec too (`make bench-deps`).")] = True,
    json: JsonFile = None,
) -> None:
    """Time training on CPU ranks; both systems take turns, figures are of the median round.

    With a config, or --set, it times that job: its data, its device, its model, also your own. The
    plans take turns then, without a peer.

    Example: nestpipe bench train --cases sequence --rounds 5 --json -

    Example: nestpipe bench train --set model.kind=my_models:Towers --plan serial,nested
    """
    if config is not None or settings:
        _time_job(read_job(config, settings), plan, ranks, rounds, steps, json)
        return
    plan = plan or "serial"
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


def _time_job(
    job_config: JobConfig, plan: str | None, ranks: int, rounds: int, steps: int, json: str | None
) -> None:
    """Figures of a user's own job, one line for each plan."""
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    ignore_torch_warnings()
    from nestpipe.bench.train import time_job
    from nestpipe.train.loop import communicator

    plans = (plan or job_config.pipeline.plan).split(",")
    comm = communicator(job_config)
    total = (rounds + 1) * len(plans) if comm.rank == 0 else None
    with progress_bar("training in turns", total) as advance:
        results = time_job(job_config, comm, plans, rounds=rounds, steps=steps, progress=advance)
    if comm.rank == 0:
        if json is not None:
            write_json(json, {"results": results} if len(results) > 1 else results[0])
        if json != STDOUT:
            named = [{**one, "config": f"{one['config']}, {one['plan']}"} for one in results]
            console().print(train_table(named))
    comm.close()


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
        status = launch(command, ranks)
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
"""The systems of `bench train`: name in the table, and the key of our speed over it."""


ABOUT_PEERS = (
    "x: NestPipe over it;\n"
    "distinct keys: torch.unique before the lookup, since FBGEMM has no dedup on a CPU"
)


def train_table(results: list[dict[str, Any]]) -> Table:
    """Speeds of both systems, with and without dedup of the peer's keys."""
    peers = any(
        result[f"{key}_samples_per_s"] for result in results for key in SYSTEMS if key != "nestpipe"
    )
    table = figures_table(
        "samples per second, all ranks",
        "median over rounds; range: slowest and fastest round"
        + (f"; {ABOUT_PEERS}" if peers else ""),
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
    from nestpipe.comm.communicator import check_groups
    from nestpipe.config import build

    chosen = build(PipelineCase, asdict(case_of(case)), overrides=set_ or [])
    check_groups(groups, chosen.ranks)
    variants = group_variants(groups, _numbers("intervals", intervals))
    readings = measure_groups(chosen, variants, hosts=hosts)
    if json is not None:
        results = [asdict(reading) for reading in readings]
        write_json(json, {"case": asdict(chosen), "hosts": hosts, "results": results})
    if json != STDOUT:
        console().print(groups_table(f"{chosen.ranks} ranks of {chosen.batch} samples", readings))


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{name} are {text!r}; give whole numbers from 1 on, such as 1,4,16")
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


# `nestpipe bench dlrm`, `bench embedding` and `bench dispatch`: what a step on a GPU is made of.


Sizes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change another size of the case."),
]
OnDevice = Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of a round.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds of each system.")]
Peer = Annotated[
    Path | None,
    typer.Option(help="Folder of the peer's packages; default: where tools/lab.py unpacks them."),
]
NoPeer = Annotated[bool, typer.Option("--no-peer", help="Time NestPipe alone.")]
Limit = Annotated[float, typer.Option(help="Seconds after which a process is stopped.")]


def bench_dlrm(
    keys: Annotated[
        str, typer.Option(help="Keys of a feature and sample, separated by commas.")
    ] = "1,10",
    plans: Annotated[str, typer.Option(help="Our plans, separated by commas.")] = "nested",
    retrieval: Annotated[
        str, typer.Option(help="Forms of retrieval to run them in, separated by commas.")
    ] = "pooled",
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches of a batch, separated by commas.")
    ] = "1",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; several share one GPU.")] = 1,
    placement: Annotated[
        str, typer.Option(help="A table on one rank (table), or spread by rows (rows).")
    ] = "table",
    rows: Annotated[int, typer.Option(min=1, help="Different keys of a table.")] = 1_000_000,
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank.")] = 16_384,
    steps: Steps = 30,
    rounds: Rounds = 3,
    device: OnDevice = None,
    set_: Sizes = None,
    peer: Peer = None,
    no_peer: NoPeer = False,
    limit: Limit = 240.0,
    json: JsonFile = None,
) -> None:
    """Time a whole DLRM step: 26 pooled tables, beside TorchRec with its tables in device memory.

    Batches are drawn before the clock starts; both systems copy one from pinned memory every step.

    Example: nestpipe bench dlrm --keys 1,10 --plans nested,serial --json out/dlrm.json

    Example: nestpipe bench dlrm --ranks 2 --placement rows
    """
    from nestpipe.bench.dlrm import DlrmCase, compare_dlrm, find_packages
    from nestpipe.bench.pipeline_cases import Variant
    from nestpipe.config import build

    given = {"ranks": ranks, "placement": placement, "rows": rows, "batch": batch}
    given |= {"steps": steps, "rounds": rounds, "device": _device(device)}
    cases = [
        build(DlrmCase, {**given, "keys": number}, overrides=set_ or [])
        for number in _numbers("keys", keys)
    ]
    variants = [
        Variant(plan, form, number)
        for plan in plans.split(",")
        for form in retrieval.split(",")
        for number in _numbers("micro-batches", micro_batches)
    ]
    packages = None if no_peer else find_packages(peer, "torchrec")
    _note_missing_peer(no_peer, packages, "TorchRec")
    about = {"cases": [asdict(case) for case in cases]}
    keep = partial(_keep, json, about)
    found = compare_dlrm(cases, variants, packages, limit_s=limit, so_far=keep)
    case = cases[0]
    title = f"{case.features} tables of {case.rows:,} rows, {case.batch:,} samples x {case.ranks}"
    _show(json, about, title, found)


def bench_embedding(
    where: Annotated[
        str, typer.Option(help="Where rows live: hbm, cache or host, separated by commas.")
    ] = "hbm,cache",
    optimizer: Annotated[
        str, typer.Option(help="Row optimizers, separated by commas.")
    ] = "sgd,adam",
    plan: Annotated[str, typer.Option(help="Our plan.")] = "nested",
    tables: Annotated[int, typer.Option(min=1, help="Tables.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Samples; each has a key a table.")] = 104_857,
    rows: Annotated[
        int, typer.Option(min=0, help="Different keys of a table; 0: as --where has them.")
    ] = 0,
    dim: Annotated[int, typer.Option(min=1, help="Width of a row.")] = 128,
    share: Annotated[float, typer.Option(help="cache: part of all rows on the device.")] = 0.1,
    sweep: Annotated[
        str | None, typer.Option(metavar="SIZE=N,N", help="Go through values of one size.")
    ] = None,
    steps: Steps = 30,
    rounds: Rounds = 3,
    device: OnDevice = None,
    set_: Sizes = None,
    peer: Peer = None,
    no_peer: NoPeer = False,
    limit: Limit = 240.0,
    json: JsonFile = None,
) -> None:
    """Time forward, backward and update of rows alone, beside FBGEMM's table-batched embeddings.

    hbm: a pool larger than all rows. cache: rows on the host, a share of them in the pool. host:
    rows on the host, read and written batch by batch. Keys follow a power law.

    Example: nestpipe bench embedding --where hbm --optimizer sgd,adam --json out/embedding.json

    Example: nestpipe bench embedding --where hbm --optimizer sgd --sweep tables=1,10,100,1000
    """
    from nestpipe.bench.dlrm import find_packages
    from nestpipe.bench.embedding import EmbeddingCase, compare_embedding, sweep_cases
    from nestpipe.config import build

    given = {"plan": plan, "tables": tables, "samples": samples, "rows": rows, "dim": dim}
    given |= {"share": share, "steps": steps, "rounds": rounds, "device": _device(device)}
    cases = [
        build(EmbeddingCase, {**given, "where": place, "optimizer": name}, overrides=set_ or [])
        for place in where.split(",")
        for name in optimizer.split(",")
    ]
    cases = sweep_cases(cases, sweep) if sweep is not None else cases
    packages = None if no_peer else find_packages(peer, "fbgemm_gpu")
    _note_missing_peer(no_peer, packages, "FBGEMM")
    about = {"cases": [asdict(case) for case in cases]}
    keep = partial(_keep, json, about)
    found = compare_embedding(cases, packages, limit_s=limit, so_far=keep)
    title = f"{tables} tables, {tables * samples:,} lookups a step, D = {dim}"
    _show(json, about, title, found)


def bench_dispatch(
    keys: Annotated[int, typer.Option(min=1, help="Keys of a feature and sample.")] = 1,
    plan: Annotated[str, typer.Option(help="The plan.")] = "nested",
    retrieval: Annotated[str, typer.Option(help="The form of retrieval.")] = "pooled",
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a batch.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Different keys of a table.")] = 1_000_000,
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 16_384,
    steps: Annotated[int, typer.Option(min=1, help="Batches that count.")] = 50,
    device: OnDevice = None,
    set_: Sizes = None,
    json: JsonFile = None,
) -> None:
    """Measure the host's processor time per batch of the DLRM, by op: one rank, any plan. Beside it
    stands the same plan with empty ops: the executor alone.

    Example: nestpipe bench dispatch --plan nested --retrieval pooled --json -
    """
    from nestpipe.bench.dlrm import DlrmCase, measure_dispatch
    from nestpipe.bench.pipeline_cases import Variant
    from nestpipe.config import build

    given = {"keys": keys, "rows": rows, "batch": batch, "steps": steps, "device": _device(device)}
    case = build(DlrmCase, given, overrides=set_ or [])
    variant = Variant(plan, retrieval, micro_batches)
    reading = measure_dispatch(case, variant)
    if json is not None:
        write_json(json, {"case": asdict(case), "variant": asdict(variant), **reading.as_json()})
    if json != STDOUT:
        title = f"host time of {plan} {retrieval}, {micro_batches} micro-batches, ms per batch"
        console().print(dispatch_table(title, reading))


def bench_checkpoint(
    config: ConfigFile = None,
    settings: Settings = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    intervals: Annotated[int, typer.Option(min=1, help="Checkpoints of a turn.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Turns with, and as many without.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Full ones, not increments.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; default: a temporary folder.")
    ] = None,
    ranks: Ranks = 1,
    json: JsonFile = None,
) -> None:
    """Train with checkpoints in the background and without, in turns; compare throughput and bytes.

    A third kind of turn drains the pipeline where checkpoints would be, and writes none. So what is
    lost is told apart: the drained pipeline, what training waits for, and the thread that writes.

    Example: nestpipe bench checkpoint --every 100 --ranks 2 --json -

    Example: nestpipe bench checkpoint config.toml --set run.device=cuda --folder /data/bench
    """
    from nestpipe.bench.checkpoint import CheckpointCase, measure_checkpoints

    case = CheckpointCase(every=every, intervals=intervals, rounds=rounds, full=full)
    job, kinds = read_job(config, settings), 3
    lines = checkpoint_lines
    _train_in_turns(job, case, ranks, measure_checkpoints, lines, json, folder, kinds=kinds)


def bench_dashboard(
    config: ConfigFile = None,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Turns with, and as many without.")] = 7,
    ranks: Ranks = 1,
    json: JsonFile = None,
) -> None:
    """Train with a record and an open dashboard and without, in turns; compare throughput.

    Example: nestpipe bench dashboard --steps 200 --rounds 7 --json -

    Example: nestpipe bench dashboard config.toml --ranks 2 --set pipeline.plan=nested
    """
    from nestpipe.bench.checkpoint import DashboardCase, measure_dashboard

    case = DashboardCase(steps=steps, rounds=rounds)
    _train_in_turns(
        read_job(config, settings), case, ranks, measure_dashboard, dashboard_lines, json
    )


def _train_in_turns(
    job_config: JobConfig,
    case: Any,
    ranks: int,
    measure: Callable[..., Any],
    lines: Callable[[Any, Any], str],
    json: str | None,
    folder: Path | None = None,
    *,
    kinds: int = 2,
) -> None:
    """Measure a job with a feature and without it, in turns, on this rank or by starting all
    ranks."""
    if starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    ignore_torch_warnings()
    from nestpipe.train.checkpoint import gathered_from_first
    from nestpipe.train.job import prepare
    from nestpipe.train.loop import communicator, use_threads

    use_threads(job_config.run)
    comm = communicator(job_config)
    turns = kinds * case.rounds if comm.rank == 0 else None
    about = {"case": asdict(case), "ranks": comm.size, "config": asdict(job_config)}

    def keep(reading: Any) -> None:
        if comm.rank == 0 and json not in (None, STDOUT):
            write_json(json, {**about, **reading.as_json()})

    with tempfile.TemporaryDirectory(dir=folder) as own:
        job = prepare(job_config, comm)
        where = Path(gathered_from_first(comm, own))
        with progress_bar("training in turns", turns) as advance:
            reading = measure(job, where, case, progress=advance, so_far=keep)
        job.trainer.close()
    if comm.rank == 0:
        if json is not None:
            write_json(json, {**about, **reading.as_json()})
        if json != STDOUT:
            console().print(lines(reading, case), markup=False, soft_wrap=True)
    comm.close()


def dashboard_lines(reading: DashboardReading, case: DashboardCase) -> str:
    """The cost of the dashboard, in words."""
    turns = "\n".join(
        f"  {before:>12,.0f}  {after:>12,.0f}"
        for before, after in zip(reading.without, reading.with_it, strict=True)
    )
    low, high = reading.middle_half
    return (
        f"samples/s without and with the dashboard, {case.steps} steps a turn:\n{turns}\n"
        f"throughput lost: {reading.cost:.2%} (median; middle half {low:.2%} to {high:.2%})\n"
        f"the recorder took {reading.recorder_share:.2%} of a core, "
        f"the server with an open page {reading.server_share:.2%}\n"
        f"news given to the page: {reading.answers}"
    )


def checkpoint_lines(reading: CheckpointReading, case: CheckpointCase) -> str:
    """The cost of checkpoints, in words."""
    turns = "\n".join(
        f"  {without:>12,.0f}  {cut:>12,.0f}  {with_them:>12,.0f}"
        for without, cut, with_them in zip(
            reading.without, reading.cut, reading.with_them, strict=True
        )
    )
    kind, still = "a full checkpoint" if case.full else "an increment", reading.stood_still
    parts = (
        ("pipeline drained and filled", reading.drained_s),
        ("stood still for copies", still.for_copies),
        ("stood still for a flush of pools", still.for_flush),
        ("stood still for the checkpoint before", still.for_writes),
        ("slower beside the thread that writes", reading.beside_s),
    )
    lines = "\n".join(f"  {1e3 * seconds:>12,.1f}  {what}" for what, seconds in parts)
    interval_s = reading.interval_samples / median(reading.without)
    return (
        f"samples/s without checkpoints, with the pipeline drained every {case.every} steps, and "
        f"with {kind} there, turn by turn:\n{turns}\n"
        f"throughput lost: {reading.cost:.1%} (median); training stood still for "
        f"{1e3 * still.seconds:.1f} ms a checkpoint\n"
        f"ms beyond the {1e3 * interval_s:,.1f} ms of {case.every} steps:\n{lines}\n"
        f"written: {reading.bytes_written / 1e6:.2f} MB a checkpoint, {reading.bytes_ratio:.2f} x "
        f"the {reading.bytes_touched / 1e6:.2f} MB of touched rows"
    )


def _device(name: str | None) -> str:
    from nestpipe.train.trainer import choose_device

    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; use cpu or cuda")
    return choose_device(name or "auto").type


def _note_missing_peer(no_peer: bool, packages: Path | None, peer: str) -> None:
    if not no_peer and packages is None:
        sys.stderr.write(f"{peer} is not here, so NestPipe runs alone; --peer names its folder\n")


def _keep(json: str | None, about: dict[str, Any], found: SideBySide) -> None:
    """Write the figures so far to a file, if one is given, so that an interrupted call leaves
    them."""
    if json not in (None, STDOUT):
        write_json(json, {**about, "results": found.as_json()})


def _show(json: str | None, about: dict[str, Any], title: str, found: SideBySide) -> None:
    """Write and print the figures; then report missing ones as a failure."""
    if json is not None:
        write_json(json, {**about, "results": found.as_json()})
    for reading in found.readings:
        if reading.failed:
            what = f"{reading.system} {reading.form} on {reading.work}"
            sys.stderr.write(f"{what}: {reading.failed}\n")
    if json != STDOUT:
        console().print(sides_table(title, found))
    if found.failed:
        raise RunError(f"no figures of {', '.join(found.failed)}; see above")


def sides_table(title: str, found: SideBySide) -> Table:
    """Both systems, work by work."""
    table = figures_table(
        title,
        "median over rounds; range: fastest and slowest round; x: speed over the peer's fastest",
        "work, system",
        ("ms a step", "range", "samples/s", "x"),
    )
    for reading in sorted(found.readings, key=lambda reading: found.works.index(reading.work)):
        figures = ("-",) * 4
        if reading.rounds_ms:
            ratio = found.ratio(reading)
            figures = (
                _short(reading.step_ms),
                "..".join(map(_short, reading.range_ms)),
                f"{reading.samples_per_s:,.0f}",
                f"{ratio:.2f}x" if ratio else "",
            )
        table.add_row(f"{reading.work}, {reading.system} {reading.form}", *figures)
    return table


def _short(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:,.0f}"


def dispatch_table(title: str, reading: DispatchReading) -> Table:
    """Processor time by op, then of threads."""
    table = figures_table(
        title,
        "processor time; backward on a GPU runs in a thread of autograd's, among the others",
        "",
        ("training", "executor alone"),
    )
    both = (reading.training, reading.executor)
    for kind in reading.training.acts_ms:
        table.add_row(kind, *(f"{seen.acts_ms.get(kind, 0.0):.3f}" for seen in both))
    table.add_section()
    table.add_row("all acts", *(f"{sum(seen.acts_ms.values()):.3f}" for seen in both))
    table.add_row("between acts", *(f"{seen.between_ms:.3f}" for seen in both))
    table.add_row("issuing thread and lanes", *(f"{seen.threads_ms:.3f}" for seen in both))
    table.add_row("other threads", *(f"{seen.other_ms:.3f}" for seen in both))
    return table
