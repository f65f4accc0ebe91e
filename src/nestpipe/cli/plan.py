"""`nestpipe plan`, `simulate --job` and `bench simulate`: settings and machines for a job.

All three begin with a short profile of the job. The last shows how right the predictions are.
"""

from __future__ import annotations

import json as json_text
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nestpipe.cli.options import (
    STDOUT,
    ConfigFile,
    JsonFile,
    Settings,
    console,
    figures_table,
    ignore_torch_warnings,
    launch_ranks,
    progress_bar,
    read_job,
    read_text,
    short_ms,
    starts_ranks,
    try_writing,
    write_json,
    write_text,
)
from nestpipe.config import build, read
from nestpipe.errors import ConfigError, ParseError

if TYPE_CHECKING:
    from nestpipe.bench.planning import AdaptiveReading, GridReading, Place, SitePrediction
    from nestpipe.comm import Communicator
    from nestpipe.planner import JobBench, PlanChoice
    from nestpipe.planner.fleet import SiteAnswer
    from nestpipe.sim.job_costs import JobProfile
    from nestpipe.train.config import JobConfig


def plan_job(
    config: ConfigFile = None,
    settings: Settings = None,
    ranks: Annotated[
        int | None, typer.Option(show_default="1", help="Rank processes to start on this machine.")
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Predict from a hardware file for --ranks workers; run nothing."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            show_default="8",
            help="Batches of each serial run of the profile, twice.",
        ),
    ] = None,
    check: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default="10",
            help="Run the best few for N steps each, twice, and keep the fastest; 0 runs none.",
        ),
    ] = None,
    allow_rounding: Annotated[
        bool,
        typer.Option(
            "--allow-rounding", help="Also consider bfloat16 between ranks, which loses bits."
        ),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use a saved profile instead of running the job."),
    ] = None,
    save_profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Keep the profile, for plan and simulate.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the config with the chosen settings (TOML)."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Choose the fastest settings for a job, from a short profile of it on its ranks.

    Runs the job for a few dozen steps under strict serial, predicts every plan and setting by the
    simulator, runs the best few, and prints the choice, its reason and its gain with a range.

    Example: nestpipe plan config.toml --ranks 2 --out planned.toml

    Example: torchrun --nproc-per-node 4 -m nestpipe plan config.toml --out planned.toml

    Example: nestpipe plan config.toml --hardware cluster.toml --ranks 1536
    """
    job_config = read_job(config, settings)
    given = read_text(config) if config is not None else ""
    try_writing(out, json, save_profile)
    if hardware is not None or profile is not None:
        also_given = {"--check": check, "--steps": steps, "--save-profile": save_profile}
        if profile is not None:
            also_given["--ranks"] = ranks
        for flag, value in also_given.items():
            if value:
                raise ConfigError(
                    f"{flag} is {value}, but nothing runs with --hardware or --profile; "
                    "leave it out"
                )
        workers = 1 if ranks is None else ranks
        choice = _from_files(job_config, workers, hardware, profile, allow_rounding)
    else:
        if ranks is not None and starts_ranks(ranks):
            raise typer.Exit(launch_ranks(ranks))
        choice = _from_runs(job_config, steps, check, allow_rounding, save_profile)
        if choice is None:  # rank 0 broadcasts it
            return
    if out is not None:
        write_text(out, _planned(given, settings, choice))
    if json is not None:
        write_json(json, choice.as_json())
    if STDOUT not in (json, out):
        started = (
            f" --ranks {ranks}" if ranks is not None and ranks > 1 and hardware is None else ""
        )
        _show(choice, allow_rounding=allow_rounding, out=out and f"{out}{started}")


def _from_files(
    config: JobConfig, ranks: int, hardware: Path | None, profile: Path | None, rounding: bool
) -> PlanChoice:
    """The choice where nothing runs."""
    from nestpipe.planner import HardwarePredictor, ProfilePredictor, candidate_of, choose

    if profile is not None:
        if hardware is not None:
            raise ConfigError("--profile and --hardware both say what ops cost; give one of them")
        known = read_profile(profile)
        _refuse_other_job(known, config, str(profile), rounding)
        start = candidate_of(config, known.device, known.ranks)
        with progress_bar("predicting", None) as advance:
            return choose(ProfilePredictor(known, rounding=rounding), start, tell=advance)
    assert hardware is not None
    from nestpipe.sim import Cluster
    from nestpipe.train.trainer import choose_device

    starts_ranks(ranks)  # refuses numbers that are none
    described = read(hardware)
    refuse_offer(described, hardware)
    cluster = build(Cluster, described)
    samples = max(1, config.run.batch // ranks)
    work = replace(cluster.workload, samples=samples, dim=config.model.dim)
    device = choose_device(config.run.device).type
    cluster = replace(cluster, workload=work)
    predictor = HardwarePredictor(cluster, ranks, device, rounding=rounding)
    start = replace(candidate_of(config, device, ranks), first=1.0, last=1.0)
    with progress_bar("predicting", None) as advance:
        return choose(predictor, start, draws=4, tell=advance)


def _refuse_other_job(known: JobProfile, config: JobConfig, name: str, rounding: bool) -> None:
    """A profile is valid for batches of its own size, in the settings that it ran."""
    batch = config.run.batch
    if batch // known.ranks != known.samples:
        raise ConfigError(
            f"{name!r} was measured with {known.samples} samples for each of {known.ranks} ranks, "
            f"and run.batch is {batch}; profile again, or set "
            f"run.batch={known.samples * known.ranks}"
        )
    if rounding and all(run.form.comm_dtype == "float32" for run in known.runs):
        raise ConfigError(
            f"{name!r} has no run with bfloat16 between ranks, so --allow-rounding cannot tell; "
            "leave it out, or profile again with it"
        )


def refuse_offer(described: Mapping[str, object], path: Path) -> None:
    """Refuse an offer here: a hardware file describes either one cluster or what could be
    bought."""
    if "machines" in described or "networks" in described:
        raise ConfigError(
            f"'{path}' is an offer for simulate --job, and no hardware file of one cluster; "
            "`nestpipe simulate --print-hardware` prints one"
        )


def read_profile(path: Path) -> JobProfile:
    """The profile that `--save-profile` wrote."""
    from nestpipe.sim.job_costs import profile_from_json

    try:
        value = json_text.loads(read_text(path))
    except ValueError as error:
        raise ParseError(
            f"{str(path)!r} is not JSON ({error}); give a file of --save-profile"
        ) from None
    return profile_from_json(value, str(path))


def _from_runs(
    config: JobConfig,
    steps: int | None,
    check: int | None,
    rounding: bool,
    save_profile: str | None,
) -> PlanChoice | None:
    """Profile the job on this rank and its peers; only rank 0 has the choice."""
    ignore_torch_warnings()
    from nestpipe.planner import candidate_of, job_bench, thought
    from nestpipe.planner.profile import CHECK_STEPS, PROFILE_STEPS
    from nestpipe.train.loop import communicator, use_threads

    use_threads(config.run)
    comm = communicator(config)
    with job_bench(config, comm) as bench:
        known = profiled(bench, PROFILE_STEPS if steps is None else steps, rounding)
        if save_profile is not None and comm.rank == 0:
            write_json(save_profile, known.as_json())
        start = candidate_of(config, known.device, known.ranks)
        with _first_ranks_bar(comm, "predicting") as advance:
            choice = thought(known, start, comm, rounding=rounding, tell=advance)
        if check != 0:
            choice = _checked(bench, choice, check or CHECK_STEPS)
    comm.barrier()
    comm.close()
    return choice


@contextmanager
def _first_ranks_bar(comm: Communicator, what: str) -> Generator[Callable[[object], None]]:
    """A bar on rank 0; the others show nothing."""
    if comm.rank != 0:
        yield lambda _: None
        return
    with progress_bar(what, None) as advance:
        yield advance


def profiled(bench: JobBench, steps: int, rounding: bool = False) -> JobProfile:
    """The profile of a job, with a bar on rank 0."""
    from nestpipe.planner import profile_job

    with _first_ranks_bar(bench.comm, "profiling: serial runs") as advance:
        return profile_job(bench, steps=steps, rounding=rounding, tell=advance)


def _checked(bench: JobBench, choice: PlanChoice | None, steps: int) -> PlanChoice | None:
    """The choice after the best few have run; all ranks run them."""
    from nestpipe.planner import run_off

    with _first_ranks_bar(bench.comm, "checking: short runs") as advance:
        return run_off(bench, choice, steps=steps, tell=advance)


def _planned(given: str, settings: list[str] | None, choice: PlanChoice) -> str:
    """The config to train with: the file's text, what --set said, and the choice."""
    from nestpipe.planner import config_text

    return config_text(given, choice.chosen.candidate, choice.note(), settings or [])


def _show(choice: PlanChoice, *, allow_rounding: bool, out: str | None) -> None:
    terminal = console()
    terminal.print(choice_table(choice))
    terminal.print(choice.reason(), markup=False, soft_wrap=True)
    if not allow_rounding and choice.chosen.candidate.comm_dtype == "float32":
        terminal.print(
            "float32 between ranks, so no bit is lost; --allow-rounding also tries bfloat16.",
            markup=False,
        )
    if out is not None:
        terminal.print(f"written; train with: nestpipe train {out}", markup=False)


def choice_table(choice: PlanChoice) -> Table:
    """The best candidates, the config's own settings, and the fastest serial."""
    table = figures_table(
        f"{choice.looked_at} settings predicted",
        "step: predicted, ms; gain: over the fastest serial;\n"
        "range: of 4 in 5 draws of the measured costs;\n"
        "busy: of the busiest lane, over the step; measured: by --check, ms",
        "settings",
        ("step", "gain", "range", "busy", "lane", "measured"),
    )
    table.columns[0].no_wrap = False
    rows = {row.candidate: row for row in (*choice.rows, choice.today, choice.serial)}
    for row in rows.values():
        run = row.figures
        mark = "* " if row.candidate == choice.chosen.candidate else "  "
        table.add_row(
            mark + str(row.candidate),
            short_ms(run.step_ms),
            f"{row.gain:.2f}x",
            f"{row.low:.2f}..{row.high:.2f}" if row.drawn else "",
            f"{run.pipeline_efficiency:.2f}",
            run.busiest_lane,
            "" if row.measured_ms is None else short_ms(row.measured_ms),
        )
    return table


# `nestpipe bench plan`: the choice beside a grid that really runs.


NETWORKS = "100mbit,400mbit,2gbit"
BENCH_JOB = ("run.batch=1024", "run.threads=1", "model.dim=256", "data.synthetic.num_tables=8")
"""Without a config: about as much to send as to compute, on links of some 100 Mbit/s."""
ADAPTIVE_JOB = ("pipeline.plan=nested", "pipeline.retrieval=new")
"""The plan whose micro-batches follow the trace."""


def bench_plan(
    config: ConfigFile = None,
    settings: Settings = None,
    ranks: Annotated[int, typer.Option(min=2, help="Hosts, each a rank; needs root.")] = 2,
    rates: Annotated[
        str, typer.Option(help="Speeds of the hosts' links, separated by commas.")
    ] = NETWORKS,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a round that count.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each point of the grid.")] = 3,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive", help="Adaptive runs from bad settings instead, beside fixed settings."
        ),
    ] = False,
    json: JsonFile = None,
) -> None:
    """Run the choice of `nestpipe plan` beside a small exhaustive grid, on hosts with shaped links.

    Prints the best step of the grid over that of the choice, for each network: 1 and more means
    that nothing in the grid is faster. With --adaptive runs begin with too few and with too many
    micro-batches, and what they settle on runs beside fixed ones; each run is also replayed.

    Example: nestpipe bench plan --rates 100mbit,2gbit --rounds 2
    """
    from nestpipe.bench.machines import bits_per_s

    base = [*BENCH_JOB, *(ADAPTIVE_JOB if adaptive else ())] if config is None else []
    job_config = read_job(config, [*base, *(settings or [])])
    networks = [rate.strip() for rate in rates.split(",")]
    for rate in networks:
        bits_per_s(rate)
    from nestpipe.bench.planning import run_adaptive, run_grid

    try_writing(json)
    found: list[GridReading] = []
    adapted: list[AdaptiveReading] = []
    with progress_bar("networks", len(networks)) as advance:
        for rate in networks:
            if adaptive:
                adapted += run_adaptive(job_config, rate, ranks, steps=steps, rounds=rounds)
            else:
                found.append(run_grid(job_config, rate, ranks, steps=steps, rounds=rounds))
            advance(rate)
            if json is not None and (json != STDOUT or rate == networks[-1]):
                readings = [seen.as_json() for seen in (*found, *adapted)]
                write_json(json, {"ranks": ranks, "networks": readings})
    if json != STDOUT:
        console().print(adaptive_table(adapted) if adaptive else grid_table(found, ranks))


def adaptive_table(found: Sequence[AdaptiveReading]) -> Table:
    """Two rows for each network, one for each start."""
    table = figures_table(
        "what adaptive runs settle on, beside fixed numbers of micro-batches",
        "ratio: the best fixed step over that of the settings in the end, of one call; batches:\n"
        "until it had settled; steps: measured, ms; replay: under serial, bit for bit",
        "link",
        ("from", "batches", "ratio", "in the end", "best", "replay"),
    )
    table.add_column("settled on; the best fixed", overflow="fold")
    for seen in found:
        last = seen.choices[-1] if seen.settled else "nothing"
        table.add_row(
            seen.rate,
            str(seen.choices[0].micro_batches),
            str(seen.steps),
            f"{seen.ratio:.2f}",
            short_ms(seen.measured[seen.last]),
            short_ms(seen.measured[seen.best]),
            seen.difference or "identical",
            f"{last}; {seen.best.micro_batches}",
        )
    return table


def grid_table(found: Sequence[GridReading], ranks: int) -> Table:
    """One row for each network."""
    from nestpipe.bench.planning import small_grid

    table = figures_table(
        f"what plan chooses beside a grid of {len(small_grid())} settings, {ranks} hosts",
        "ratio: the grid's best step over that of the choice, of one call; unchecked: over the "
        "best by\nprediction alone, as with --check 0; steps: measured, ms",
        "link",
        ("ratio", "unchecked", "choice", "best", "predicted"),
    )
    table.add_column("chosen, then the grid's best", overflow="fold")
    for seen in found:
        table.add_row(
            seen.rate,
            f"{seen.ratio:.2f}",
            f"{seen.unchecked_ratio:.2f}",
            short_ms(seen.measured[seen.chosen]),
            short_ms(seen.measured[seen.best]),
            short_ms(seen.predicted_ms),
            f"{seen.chosen}\n{seen.best}",
        )
    return table


USUAL_WORKERS = (2, 4, 8, 16, 32, 64)
"""Default numbers of workers, as far as batches divide among them."""
LEAST_EACH = 4
"""Samples of a worker."""
SHOWN = 24
NEAR = 1.1
"""Times the lowest cost: what is so close to the cheapest may be taken for its speed."""


def answer_job(
    config: Path,
    hardware: Path | None,
    profile: Path | None,
    ranks: int,
    workers: Sequence[int],
    groups: Sequence[int],
    per_worker: bool,
    json: str | None,
) -> None:
    """Print what a job costs on everything that a hardware file offers."""
    if hardware is None:
        raise ConfigError("--job needs --hardware FILE with machines and networks; see configs/")
    from nestpipe.planner.fleet import FleetPredictor, Offer, answer, sites

    described = read(hardware)
    if not {"machines", "networks"} & set(described):
        raise ConfigError(
            f"'{hardware}' is a hardware file of one cluster; --job takes an offer of [[machines]] "
            "and [[networks]], such as configs/offer.toml"
        )
    offer = build(Offer, described)
    job_config = read_job(config, None)
    try_writing(json)
    batch = job_config.run.batch
    workers = workers or [n for n in USUAL_WORKERS if per_worker or LEAST_EACH * n <= batch]
    if not per_worker:
        _refuse_too_many(workers, batch)
    if profile is None:
        if ranks == 1 and "RANK" not in os.environ:
            raise ConfigError("ranks is 1, and one rank sends nothing; profile 2 ranks or more")
        if starts_ranks(ranks):
            raise typer.Exit(launch_ranks(ranks))
    known = read_profile(profile) if profile is not None else _measured(job_config)
    if known is None:  # rank 0 broadcasts it
        return
    predictor = FleetPredictor(
        known, offer.profile, global_batch=job_config.run.batch, per_worker=per_worker
    )
    places = sites(offer, workers, groups)
    if not places:
        raise ConfigError(f"no number of workers can form {list(groups)} groups; add --groups 1")
    with progress_bar("simulating sites", len(places)) as advance:
        found: list[SiteAnswer] = []
        for site in places:
            found.append(answer(predictor, site))
            advance(site)
    found.sort(key=lambda one: (one.cost(one.figures.step_ms), one.figures.step_ms))
    if json is not None:
        write_json(json, {"answers": [one.as_json() for one in found]})
    if json != STDOUT:
        console().print(answers_table(found))
        console().print("\n".join(sentences(found)), markup=False, soft_wrap=True)


def _refuse_too_many(workers: Sequence[int], batch: int) -> None:
    for count in workers:
        if count > batch // LEAST_EACH:
            raise ConfigError(
                f"workers is {count} and run.batch {batch}: fewer than {LEAST_EACH} samples for "
                "each; name "
                "fewer --workers, or let batches grow with --batch-per-worker"
            )


def _measured(config: JobConfig) -> JobProfile | None:
    """The profile of the job on this rank and its peers; None on all but rank 0."""
    ignore_torch_warnings()
    from nestpipe.planner import job_bench
    from nestpipe.planner.profile import PROFILE_STEPS
    from nestpipe.train.loop import communicator, use_threads

    use_threads(config.run)
    comm = communicator(config)
    with job_bench(config, comm) as bench:
        known = profiled(bench, PROFILE_STEPS)
    comm.barrier()
    comm.close()
    return known if comm.rank == 0 else None


def answers_table(found: Sequence[SiteAnswer]) -> Table:
    """The cheapest first."""
    table = figures_table(
        f"{len(found)} sites, the cheapest first",
        "step: ms; cost: of a billion samples; each with its range over what is assumed; decides: "
        "which\nassumption moves it most; host memory for the tables is not looked at",
        "machines",
        ("workers", "groups", "step", "range", "samples/s", "cost", "its range"),
    )
    table.columns[0].no_wrap = False
    table.add_column("plan; decides", overflow="fold")
    for one in found[:SHOWN]:
        site, step = one.site, one.figures.step_ms
        micros = f" x{one.candidate.micro_batches}" if one.candidate.micro_batches > 1 else ""
        table.add_row(
            f"{site.machines} {site.machine.name}, {site.link.name}",
            f"{site.workers:,}",
            str(site.groups),
            short_ms(step),
            f"{short_ms(one.low_ms)}..{short_ms(one.high_ms)}",
            f"{one.figures.samples_per_s:,.0f}",
            f"{one.cost(step):,.2f}",
            f"{one.cost(one.low_ms):,.2f}..{one.cost(one.high_ms):,.2f}",
            "; ".join(filter(None, (f"{one.candidate.plan}{micros}", one.decides))),
        )
    return table


def sentences(found: Sequence[SiteAnswer]) -> list[str]:
    """The recommendation, in words."""
    cheapest = found[0]
    low = cheapest.cost(cheapest.figures.step_ms)
    near = [one for one in found if one.cost(one.figures.step_ms) <= NEAR * low]
    fastest = max(near, key=lambda one: one.figures.samples_per_s)
    overall = max(found, key=lambda one: one.figures.samples_per_s)
    lines = [f"Cheapest: {_named(cheapest)}."]
    if fastest is not cheapest:
        lines.append(f"Fastest within 10 % of that cost: {_named(fastest)}.")
    if overall not in (cheapest, fastest):
        lines.append(f"Fastest of all: {_named(overall)}.")
    overlap = [one for one in found[1:] if one.cost(one.low_ms) < cheapest.cost(cheapest.high_ms)]
    if overlap:
        lines.append(
            f"{len(overlap)} of the others could be as cheap, for all that is assumed; measure "
            "before you buy."
        )
    return lines


def _named(one: SiteAnswer) -> str:
    site = one.site
    step = one.figures.step_ms
    return (
        f"{site.workers:,} workers on {site.machines} {site.machine.name}, {site.link.name}, "
        f"{site.groups} group{'' if site.groups == 1 else 's'}: "
        f"{one.figures.samples_per_s:,.0f} samples/s, {one.cost(step):,.2f} a billion samples, "
        f"bound by {one.figures.busiest_lane}"
    )


# `nestpipe bench simulate`


def bench_simulate(
    config: ConfigFile = None,
    settings: Settings = None,
    fitted: Annotated[
        str, typer.Option(help="Hosts and speed of their links that the profile is made on.")
    ] = "2x200mbit",
    others: Annotated[
        str, typer.Option(help="What is predicted from it and then run, separated by commas.")
    ] = "2x100mbit,2x1gbit,4x200mbit",
    steps: Annotated[int, typer.Option(min=2, help="Steps of a round that count.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each candidate.")] = 2,
    save_profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Keep the profile.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Predict a job's step on other links and ranks from one profile, then run it there.

    Lists predicted against measured steps of runs that the prediction was not fitted on, the worst
    first. Hosts are network namespaces with shaped links; needs root.

    Example: nestpipe bench simulate --fitted 2x200mbit --others 2x1gbit,4x200mbit
    """
    base = [] if config is not None else list(BENCH_JOB)
    job_config = read_job(config, [*base, *(settings or [])])
    start, places = place(fitted), [place(one) for one in others.split(",")]
    from nestpipe.bench.planning import validate

    try_writing(save_profile, json)
    with progress_bar("sites", 1 + len(places)) as advance:
        found = validate(
            job_config,
            start,
            places,
            steps=steps,
            rounds=rounds,
            keep=lambda value: write_json(save_profile, value) if save_profile else None,
            tell=advance,
        )
    if json is not None:
        write_json(json, {"fitted": fitted, "sites": [one.as_json() for one in found]})
    if json != STDOUT:
        console().print(errors_table(found, fitted))


def place(text: str) -> Place:
    """Hosts and their links, from a text such as `2x200mbit`."""
    from nestpipe.bench.machines import bits_per_s

    count, times, rate = text.strip().partition("x")
    if not times or not count.isdecimal() or int(count) < 2:
        raise ConfigError(f"{text.strip()!r} is no site; write hosts and speed, like 2x200mbit")
    bits_per_s(rate)
    return int(count), rate


def errors_table(found: Sequence[SitePrediction], fitted: str) -> Table:
    """The worst first."""
    table = figures_table(
        f"steps predicted from a profile on {fitted}, and measured",
        "ms; range: of the prediction, over all that is assumed; error: over the measured step",
        "site",
        ("predicted", "range", "measured", "error"),
    )
    table.add_column("settings", overflow="fold")
    for one in found:
        table.add_row(
            f"{one.ranks}x{one.rate}",
            short_ms(one.predicted_ms),
            "..".join(map(short_ms, one.range_ms)),
            short_ms(one.measured_ms),
            f"{100 * one.error:+.0f} %",
            str(one.candidate),
        )
    return table
