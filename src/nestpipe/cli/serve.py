"""`nestpipe serve` and `load`: the ranking service, an open-loop load test of it, and advice.

What serves, compares arms, searches and advises imports torch only when called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from nestpipe.cli.options import (
    STDOUT,
    JsonFile,
    console,
    figures_table,
    progress_bar,
    read_text,
    short_ms,
    write_json,
    write_text,
)
from nestpipe.config import build, override
from nestpipe.errors import CheckpointError, ConfigError, ParseError
from nestpipe.loadtest.settings import ARMS, TOLERANCE, LoadSettings, arms_of, check_tolerance

if TYPE_CHECKING:
    from nestpipe.loadtest.advise import Memory
    from nestpipe.loadtest.driver import Report, Run
    from nestpipe.loadtest.run import Found, SearchStep
    from nestpipe.loadtest.settings import Arm
    from nestpipe.serve.engine.admission import Costs
    from nestpipe.serve.engine.rank_model import HstuRankModel

MOST_INSTANCES = 64

Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting, e.g. target_ms=20; may be repeated."
    ),
]
HistoriesFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Parquet or npz file of user histories, so that requests may leave them out.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the token of callers, or set NESTPIPE_TOKEN; needed beyond loopback.",
    ),
]


def serve(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder: the newest that verifies.")
    ],
    instances: Annotated[
        int, typer.Option(help="Number of instances, each a process with the model.")
    ] = 2,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port of the service; instances take those after it. 0: any.")
    ] = 8900,
    router: Annotated[
        Literal["builtin", "nginx", "none"],
        typer.Option(help="Router that sends both legs of a user to the same instance."),
    ] = "builtin",
    settings: Assignments = None,
    histories: HistoriesFile = None,
    token_file: TokenFile = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Data type of weights and cached prefixes."),
    ] = "float32",
) -> None:
    """Serve a trained model over HTTP until SIGTERM or Ctrl-C.

    A ranker is asked in two legs; a DLRM, or a model of your own with `score`, in one. SIGHUP
    reloads the latest checkpoint of the folder.

    Example: nestpipe serve runs/ranker --instances 2 --port 8900 --set target_ms=20

    Example: nestpipe serve runs/clicks --set candidate_feature=item
    """
    _check(checkpoint, instances, port, histories)
    require("serving", "torch", "safetensors", "fastapi", "httpx", "prometheus_client", "uvicorn")
    from nestpipe.config.sections import read_token, require_token
    from nestpipe.serve.http import launch

    token = read_token(token_file, os.environ)
    require_token(host, token)
    role = _role(settings or []) | {"host": host, "port": port, "device": device, "dtype": dtype}
    role |= {"checkpoint": str(checkpoint), "histories": str(histories) if histories else None}
    service = launch.Service(
        instance=build(launch.Role, role), instances=instances, router=router, token=token
    )
    raise typer.Exit(launch.serve(service, _log_line))


def _role(assignments: list[str]) -> dict[str, Any]:
    """`target_ms=20` is a setting of instances, `http.requests=64` one of the HTTP service."""
    given = override({}, assignments)
    http = given.pop("http", {})
    if not isinstance(http, dict):
        raise ConfigError(f"http is {http}; write --set http.requests=64 and the like")
    return {"kind": "instance", "settings": given, "http": http}


def _check(checkpoint: Path, instances: int, port: int, histories: Path | None) -> None:
    """Refuse at once what would fail later."""
    if not checkpoint.exists():
        raise CheckpointError(f"there is no checkpoint '{checkpoint}'; check its name")
    if not checkpoint.is_dir():
        raise CheckpointError(f"'{checkpoint}' is no folder; name a checkpoint's folder")
    is_one = any((checkpoint / name).exists() for name in ("manifest.json", "run.json"))
    if not is_one and not any(checkpoint.glob("step-*")):
        raise CheckpointError(
            f"'{checkpoint}' holds no checkpoint; name a folder `step-...` or one that has some"
        )
    if not 1 <= instances <= MOST_INSTANCES:
        raise ConfigError(f"cannot start {instances} instances; ask for 1 to {MOST_INSTANCES}")
    if not 0 <= port <= 65535 - instances:
        raise ConfigError(f"port is {port}; give 1 to {65535 - instances}, or 0 for any")
    if histories is not None and not histories.is_file():
        raise ConfigError(f"there is no file '{histories}' of histories; check its name")


def _log_line(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


CLIENT_THREADS = 256
"""Rankings on their way at once to a service that runs elsewhere."""
SERVICE = "service"
"""Its name in tables."""
LENGTH_STEP = 64
LEAST_RATE, MOST_RATE = 0.5, 100_000.0

Measure = Callable[[LoadSettings, Callable[[], None]], "tuple[Report, Run]"]


@dataclass(frozen=True, slots=True)
class Model:
    """The model, as the command line names it, and how many instances serve it."""

    checkpoint: Path | None
    random: str | None
    device: str
    dtype: str
    instances: int
    threads: int | None

    def make(self, count: int) -> list[HstuRankModel]:
        """So many of the same: each instance has its own."""
        import torch

        from nestpipe.loadtest.run import model_maker, random_model

        cores = os.cpu_count() or 1
        torch.set_num_threads(self.threads or max(1, cores // self.instances))
        random = random_model(self.random or "")
        make = model_maker(self.checkpoint, random, device=self.device, dtype=self.dtype)
        return [make() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Where:
    """The target of the load: arms in this process, or the service behind a URL."""

    model: Model
    arms: list[Arm]
    url: str | None
    token_file: Path | None


@dataclass(frozen=True, slots=True)
class Aim:
    """The goal of a search: a length or a rate, its seeds, and its tolerance."""

    what: str
    seeds: list[int]
    tolerance: float


def compare(where: Where, settings: LoadSettings, json: str | None, plot: Path | None) -> bool:
    """Run every arm on the same requests; whether all runs are valid."""
    from nestpipe.loadtest.driver import as_json
    from nestpipe.loadtest.workload import reuse_share, visits

    _check_plot(plot)
    made = visits(settings.workload)
    with _measures(where, settings, settings.workload.length) as measures:
        done: dict[str, tuple[Report, Run]] = {}
        for name, measure in measures.items():
            with progress_bar(name, len(made)) as advance:
                done[name] = measure(settings, advance)
    reports = [report for report, _ in done.values()]
    if json is not None:
        about = {"settings": asdict(settings), "reuse_share": reuse_share(made)}
        write_json(json, {**about, "results": [as_json(report) for report in reports]})
    if plot is not None:
        from nestpipe.loadtest.driver import plot_latencies

        runs = {name: run for name, (_, run) in done.items()}
        plot_latencies(plot, runs, settings.serve.target_ms, settings.workload.warmup_s)
    if json != STDOUT:
        terminal = console()
        terminal.print(results_table(reports, settings, reuse_share(made)))
        terminal.print(paths_table(reports))
        for line in invalid_lines(reports):
            terminal.print(line, markup=False, soft_wrap=True)
    return all(report.valid for report in reports)


def search_limits(
    where: Where, aim: Aim, settings: LoadSettings, json: str | None, plot: Path | None
) -> bool:
    """Search every arm; whether the runs that decided were valid."""
    from nestpipe.loadtest.driver import as_json

    _check_plot(plot)
    what = aim.what
    found: dict[str, Found] = {}
    longest = settings.workload.length * (2 if what == "length" else 1)
    with _measures(where, settings, longest) as measures:
        for name, measure in measures.items():
            on_step = partial(_show_step, name, what, json)
            found[name] = _search(aim, settings, measure, on_step)
    if json is not None:
        results = [
            {
                "name": name,
                "value": one.value,
                "bounded": one.bounded,
                "steps": [
                    {
                        "value": step.value,
                        "kept": step.kept,
                        "runs": list(map(as_json, step.reports)),
                    }
                    for step in one.steps
                ],
            }
            for name, one in found.items()
        ]
        about = {"find": what, "tolerance": aim.tolerance, "settings": asdict(settings)}
        write_json(json, {**about, "results": results})
    if plot is not None:
        from nestpipe.loadtest.driver import plot_search

        axis = "events of a history" if what == "length" else "requests per second"
        steps = {name: one.steps for name, one in found.items()}
        plot_search(plot, steps, settings.serve.target_ms, axis)
    if json != STDOUT:
        console().print(found_table(what, found, settings))
    runs = [report for one in found.values() for step in one.steps for report in step.reports]
    # Overload can starve the driver of this process; such a run counts as one that failed.
    return any(report.valid for report in runs)


def advise_on(
    log: Path, costs: Path | None, model: Model, settings: LoadSettings, json: str | None
) -> None:
    """Read a log, measure or read the costs, and print what follows."""
    from nestpipe.loadtest.advise import Question, advise, read_log, sentences

    requests = read_log(log)
    longest = max(one.history_length for one in requests)
    known, kv_bytes = _read_costs(costs) if costs else _measure_costs(model, settings, longest)
    question = Question(
        costs=known,
        kv_bytes=lambda length: round(length * kv_bytes),
        settings=settings.serve,
        instances=model.instances,
        short=settings.workload.short,
        grow_by=settings.workload.grow_by,
    )
    with progress_bar("reading the log", None) as advance:
        advice = advise(requests, question, advance)
    said = sentences(advice, question)
    if json is not None:
        write_json(json, {**asdict(advice), "sentences": said})
    if json != STDOUT:
        terminal = console()
        terminal.print(memory_table(advice.memory))
        for line in advice_lines(said):
            terminal.print(line, markup=False, soft_wrap=True)


def measure_costs(path: Path, model: Model, settings: LoadSettings) -> None:
    """Measure the model's costs up to `--length`, for `--costs`."""
    from json import dumps, loads

    known, kv_bytes = _measure_costs(model, settings, settings.workload.length)
    held: dict[str, Any] = {**loads(known.to_json()), "kv_bytes_per_event": kv_bytes}
    write_text(str(path), dumps(held, indent=1) + "\n")
    if str(path) != STDOUT:
        console().print(f"wrote {path}", markup=False)


def write_requests(path: Path, settings: LoadSettings) -> None:
    """Write the workload as a log, for `--advise`."""
    from nestpipe.loadtest.advise import log_of, write_log
    from nestpipe.loadtest.workload import visits

    log = log_of(visits(settings.workload))
    write_log(path, log)
    console().print(f"wrote {len(log):,} requests to {path}", markup=False)


@contextmanager
def _measures(where: Where, settings: LoadSettings, longest: int) -> Generator[dict[str, Measure]]:
    """For each arm, or for the service, the function that runs it with given settings."""
    from nestpipe.loadtest.run import Bench, run_arm, run_service
    from nestpipe.serve.types import RealClock

    clock = RealClock()
    if where.url is not None:
        require("a load test", "httpx")
        from nestpipe.config.sections import read_token
        from nestpipe.serve.http.client import Client

        token = read_token(where.token_file, os.environ)
        with Client(where.url, token, threads=CLIENT_THREADS) as client:
            client.health()
            yield {SERVICE: partial(run_service, SERVICE, client, clock)}
        return
    models = where.model.make(where.model.instances)
    costs = _calibrate(models[0], settings, longest)

    def measure(arm: Arm, at: LoadSettings, advance: Callable[[], None]) -> tuple[Report, Run]:
        bench = Bench(settings=_fitting(at, models[0]), models=models, costs=costs, clock=clock)
        return run_arm(arm, bench, advance)

    yield {f"{arm.letter} {arm.name}": partial(measure, arm) for arm in where.arms}


def _fitting(settings: LoadSettings, model: HstuRankModel) -> LoadSettings:
    """Requests that this model can read: items that it knows, times where it wants them."""
    workload = settings.workload
    items = max(1, min(workload.items, model.rows.num_items))
    fitting = replace(workload, items=items, times=bool(model.config.time_buckets))
    return replace(settings, workload=fitting)


def _search(
    aim: Aim, settings: LoadSettings, measure: Measure, on_step: Callable[[SearchStep], None]
) -> Found:
    from nestpipe.loadtest.run import search

    what = aim.what
    exactly = partial(search, tolerance=aim.tolerance, seeds=aim.seeds, on_step=on_step)

    def attempt(value: float, seed: int) -> Report:
        change: dict[str, Any] = {"length": int(value)} if what == "length" else {"rate": value}
        at = replace(settings, workload=replace(settings.workload, seed=seed, **change))
        with progress_bar(f"{what} {value:g}, seed {seed}", None) as advance:
            return measure(at, advance)[0]

    workload = settings.workload
    if what == "rate":
        return exactly(attempt, workload.rate, low=LEAST_RATE, high=MOST_RATE)
    low = float((workload.short // LENGTH_STEP + 1) * LENGTH_STEP)
    high = float(workload.most_length)
    return exactly(attempt, float(workload.length), low=low, high=high, step=LENGTH_STEP)


def _show_step(name: str, what: str, json: str | None, step: SearchStep) -> None:
    if json != STDOUT:
        console().print(step_line(name, what, step), markup=False, soft_wrap=True)


def _calibrate(model: HstuRankModel, settings: LoadSettings, longest: int) -> Costs:
    from nestpipe.loadtest.run import measure_costs
    from nestpipe.serve.types import RealClock

    workload = settings.workload
    with progress_bar("measuring costs", None):
        return measure_costs(
            model,
            longest,
            workload.candidates,
            RealClock(),
            workload.short,
            settings.serve.chunk,
        )


def _measure_costs(model: Model, settings: LoadSettings, longest: int) -> tuple[Costs, float]:
    (made,) = model.make(1)
    return _calibrate(made, settings, longest), made.kv_bytes(1024) / 1024


def _read_costs(path: Path) -> tuple[Costs, float]:
    from json import loads

    from nestpipe.serve.engine.admission import Costs

    text = read_text(path)
    try:
        kv_bytes = float(loads(text)["kv_bytes_per_event"])
    except (ValueError, KeyError, TypeError):
        raise ParseError(
            f"{str(path)!r} holds no costs with kv_bytes_per_event; write it with --write-costs"
        ) from None
    return Costs.from_json(text), kv_bytes


def require(what: str, *modules: str) -> None:
    """Raise one sentence that names the missing package."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(
                f"{what} needs {module}, which is not installed; "
                "pip install 'nestpipe[serve,train]'"
            )


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    from nestpipe.loadtest.driver import check_plot

    check_plot(plot)


# The tables and lines that it prints.


PATHS = ("hbm_hit", "late_hit", "dram_hit", "miss_full", "miss_cut")


def results_table(reports: Sequence[Report], settings: LoadSettings, reuse: float) -> Table:
    """One row per arm: latencies, lengths of histories, and compliant throughput."""
    workload, target = settings.workload, f"{settings.serve.target_ms:g} ms"
    table = figures_table(
        f"{reports[0].requests:,} requests, {workload.rate:g}/s, {workload.length} events, "
        f"{workload.candidates} candidates, {reuse:.0%} of prefixes asked for again",
        f"P50, P99: ms; within: answered at full length in {target}; lengths are means.",
        "arm",
        ("P50", "P99", "used", "asked", "cut", "shed", "failed", "within", "within/s"),
    )
    for report in reports:
        p50, p99 = ("-", "-")
        if report.latency is not None:
            p50, p99 = short_ms(report.latency.p50_ms), short_ms(report.latency.p99_ms)
        table.add_row(
            report.name,
            p50,
            p99,
            f"{report.used.mean:,.0f}",
            f"{report.asked.mean:,.0f}",
            _share(report.cuts, report.requests),
            _share(report.sheds, report.requests),
            _share(report.errors + report.unanswered, report.requests),
            _share(report.compliant, report.requests),
            f"{report.compliant_per_s:.1f}",
        )
    return table


def paths_table(reports: Sequence[Report]) -> Table:
    """One row per arm: the sources of answers, and the outcomes of signals."""
    table = figures_table(
        "How rankings were answered: share of requests, and P99 in ms",
        "filled: signals whose prefix was computed; wasted: those whose ranking did not use it;\n"
        "host: reloads from host memory over requests; late: P99 of the driver's own delay, ms.",
        "arm",
        (*(path.replace("_", " ") for path in PATHS), "filled", "wasted", "host", "late"),
    )
    for report in reports:
        cells = [_path(report, path) for path in PATHS]
        host = "-" if report.host_hits is None else f"{report.host_hits:.0%}"
        table.add_row(
            report.name.split(" ")[0],
            *cells,
            _share(report.outcomes.get("admitted", 0), report.requests),
            _share(report.wasted, report.requests),
            host,
            short_ms(report.late_p99_ms),
        )
    return table


def invalid_lines(reports: Sequence[Report]) -> list[str]:
    """Why a run is not valid, line by line."""
    return [
        f"NOT VALID: in arm {report.name} the driver was {report.late_p99_ms:.1f} ms late at P99 "
        f"(at most {report.late_max_ms:.1f} ms), so requests did not come on time; use a "
        "lower rate, fewer threads or another machine for the driver."
        for report in reports
        if not report.valid
    ]


def step_line(name: str, what: str, step: SearchStep) -> str:
    """One step of a search."""
    runs: list[str] = []
    for report in step.reports:
        p99 = "none answered" if report.latency is None else f"P99 {report.latency.p99_ms:.1f} ms"
        spoilt = f", {report.spoilt:.1%} cut or shed" if report.spoilt else ""
        runs.append(p99 + spoilt + ("" if report.valid else ", driver late"))
    return f"{name}: {what} {step.value:g}: {'kept' if step.kept else 'missed'} ({'; '.join(runs)})"


def found_table(what: str, found: Mapping[str, Found], settings: LoadSettings) -> Table:
    """One row per arm: the most that keeps the target, and how it compares with the first arm."""
    workload = settings.workload
    fixed = f"{workload.rate:g}/s" if what == "length" else f"{workload.length} events"
    names = {"length": "longest length", "rate": "highest rate"}
    table = figures_table(
        f"{names[what]} with P99 within {settings.serve.target_ms:g} ms, {fixed}",
        "At most 1 % of requests cut, shed or failed; x: over the first arm.",
        "arm",
        (what, "x", "tried"),
    )
    first = next(iter(found.values())).value
    for name, one in found.items():
        value = "none" if one.value is None else f"{one.value:g}"
        value += "" if one.bounded or one.value is None else " or more"
        ratio = f"{one.value / first:.2f}" if one.value is not None and first else "-"
        table.add_row(name, value, ratio, str(len(one.steps)))
    return table


def memory_table(memory: Sequence[Memory]) -> Table:
    """One row per TTL."""
    parts = list(memory[0].mb_for)
    table = figures_table(
        "Users who return, and host memory of an instance for their prefixes",
        "seen: the user had come within that time; found: the prefix would be there; then MB "
        "for so much of it.",
        "time to live",
        ("seen", "found", *(f"{part}, MB" for part in parts)),
    )
    for row in memory:
        cells = [f"{row.mb_for[part]:,.1f}" for part in parts]
        table.add_row(f"{row.ttl_s:,.0f} s", f"{row.seen:.1%}", f"{row.reused:.1%}", *cells)
    return table


def advice_lines(sentences: Sequence[str]) -> list[str]:
    """The advice, a sentence to a line."""
    return [f"- {sentence}" for sentence in sentences]


def _share(count: int, of: int) -> str:
    return f"{count / of:.1%}" if of else "-"


def _path(report: Report, path: str) -> str:
    found = report.paths.get(path)
    return "-" if found is None else f"{found.count / report.requests:.0%} {found.p99_ms:.0f}"


NOT_VALID = 1
"""Exit status of a load test whose driver was late."""


class Find(StrEnum):
    """What to look for."""

    LENGTH = "length"
    RATE = "rate"


def load(
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Serve this ranker in this process.")
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Serve one with random weights; the default."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Load a service that runs already.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The token of that service; or set NESTPIPE_TOKEN."),
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Instances behind the router.")] = 1,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 50.0,
    seconds: Annotated[float, typer.Option(help="How long requests arrive.")] = 20.0,
    warmup: Annotated[
        float | None, typer.Option(help="Seconds that are not measured; default: a tenth.")
    ] = None,
    length: Annotated[int, typer.Option(help="Events of a history.")] = 1024,
    candidates: Annotated[int, typer.Option(help="Candidates of a request.")] = 128,
    target_ms: Annotated[float, typer.Option(help="P99 to be kept.")] = 50.0,
    arms: Annotated[
        str,
        typer.Option(
            help="Ways to serve the same requests: "
            + ", ".join(f"{arm.letter} {arm.name}" for arm in ARMS.values())
            + "."
        ),
    ] = "D",
    find: Annotated[
        Find | None,
        typer.Option(help="Search the longest length or the highest rate that keeps the target."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each value of a search.")] = 3,
    tolerance: Annotated[
        float, typer.Option(help="How close a search comes to the true value: 0.05 is 5 %.")
    ] = TOLERANCE,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of an instance's CPU work.")
    ] = None,
    advise: Annotated[
        Path | None,
        typer.Option(metavar="LOG", help="Say whether relay pays for this request log."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Costs that --write-costs wrote; default: measure."),
    ] = None,
    write_costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure costs, write them, and stop.")
    ] = None,
    write_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the requests as a log, and stop.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change a setting of serve or workload."
        ),
    ] = None,
    json: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw latencies or the search.")
    ] = None,
) -> None:
    """Send requests when they are due, whatever the answers, and report what became of them.

    Both legs of each request are sent: the signal, then after retrieval and pre-processing the
    ranking. An answer counts where it is in time and rests on the whole history.

    Exit status 1: the driver was late, so the run shows nothing.

    Example: nestpipe load --random layers=4,dim=64,heads=2 --rate 20 --length 512 --arms A,B,C,D

    Example: nestpipe load --checkpoint out/run --find length --arms B,D --rate 50 --plot p99.svg

    Example: nestpipe load --url http://127.0.0.1:8000 --rate 100 --seconds 30 --json -

    Example: nestpipe load --advise requests.csv --costs costs.json --target-ms 50
    """
    given = {
        "rate": rate,
        "seconds": seconds,
        "warmup_s": seconds / 10 if warmup is None else warmup,
        "length": length,
        "candidates": candidates,
    }
    sections = {"workload": given, "serve": {"target_ms": target_ms}}
    chosen = build(LoadSettings, sections, overrides=settings or [])
    compared = arms_of(arms)
    check_tolerance(tolerance)
    _refuse_contradictions(checkpoint, random, url, arms, advise)
    require("a load test", "torch", "safetensors")
    if write_log is not None:
        write_requests(write_log, chosen)
        return
    model = Model(checkpoint, random, device, dtype, instances, threads)
    if write_costs is not None:
        measure_costs(write_costs, model, chosen)
    elif advise is not None:
        advise_on(advise, costs, model, chosen, json)
    elif find is not None:
        values = range(chosen.workload.seed, chosen.workload.seed + seeds)
        aim = Aim(find.value, list(values), tolerance)
        where = Where(model, compared, url, token_file)
        if not search_limits(where, aim, chosen, json, plot):
            raise typer.Exit(NOT_VALID)
    elif not compare(Where(model, compared, url, token_file), chosen, json, plot):
        raise typer.Exit(NOT_VALID)


def _refuse_contradictions(
    checkpoint: Path | None, random: str | None, url: str | None, arms: str, advise: Path | None
) -> None:
    if checkpoint is not None and random is not None:
        raise ConfigError("both --checkpoint and --random are given; name one model")
    if url is None:
        return
    if checkpoint is not None or random is not None or advise is not None:
        raise ConfigError(
            f"--url {url} is a service with a model of its own; leave out --checkpoint, --random "
            "and --advise"
        )
    if arms != "D":
        raise ConfigError(
            f"--url {url} serves as it was started; leave out --arms {arms}, or compare arms in "
            "this process without --url"
        )
