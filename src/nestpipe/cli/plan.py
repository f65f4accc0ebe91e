"""`nestpipe plan`, `simulate --job` and `bench simulate`: settings and machines for a job.

All three begin with a short profile of the job. The last shows how right the predictions are.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
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
    launch_ranks,
    progress_bar,
    quieten,
    read_job,
    read_text,
    short_ms,
    starts_ranks,
    write_json,
    write_text,
)
from nestpipe.config import build, read
from nestpipe.errors import ConfigError, ParseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nestpipe.bench.planning import GridReading, Place, SitePrediction
    from nestpipe.comm import Communicator
    from nestpipe.planner import Candidate, JobBench, PlanChoice
    from nestpipe.planner.fleet import SiteAnswer
    from nestpipe.sim.job_costs import JobProfile
    from nestpipe.train.job import JobConfig

CHECKED = 3
"""Candidates that `--check` runs, besides `serial` and what the config says."""


def plan_job(
    config: ConfigFile = None,
    settings: Settings = None,
    ranks: Ranks = 1,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Predict from a hardware file for --ranks workers; run nothing."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Batches of each serial run of the profile, twice.")
    ] = 8,
    check: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Run the best few for N steps each, and keep the fastest."
        ),
    ] = 0,
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
    simulator, and prints the choice, its reason and its gain with a range.

    Example: nestpipe plan config.toml --ranks 2 --check 20 --out planned.toml

    Example: torchrun --nproc-per-node 4 -m nestpipe plan config.toml --out planned.toml

    Example: nestpipe plan config.toml --hardware cluster.toml --ranks 1536
    """
    job_config = read_job(config, settings)
    given = read_text(config) if config is not None else ""
    if hardware is not None or profile is not None:
        if check:
            raise ConfigError(
                f"--check is {check}, but nothing runs with --hardware or --profile; leave it out"
            )
        choice = _from_files(job_config, ranks, hardware, profile)
    else:
        if starts_ranks(ranks):
            raise typer.Exit(launch_ranks(ranks))
        choice = _from_runs(job_config, steps, check, allow_rounding, save_profile)
        if choice is None:  # rank 0 tells
            return
    if out is not None:
        write_text(out, _planned(given, settings, choice))
    if json is not None:
        write_json(json, choice.as_json())
    if STDOUT not in (json, out):
        _show(choice, allow_rounding=allow_rounding, out=out)


def _from_files(
    config: JobConfig, ranks: int, hardware: Path | None, profile: Path | None
) -> PlanChoice:
    """The choice where nothing runs."""
    from nestpipe.planner import HardwarePredictor, ProfilePredictor, choose

    if profile is not None:
        if hardware is not None:
            raise ConfigError("--profile and --hardware both say what ops cost; give one of them")
        known = read_profile(profile)
        start = _today(config, known.device, known.ranks)
        with progress_bar("predicting", None) as advance:
            return choose(ProfilePredictor(known), start, tell=advance)
    assert hardware is not None
    from nestpipe.config import build, read
    from nestpipe.sim import Cluster
    from nestpipe.train.trainer import choose_device

    cluster = build(Cluster, read(hardware))
    samples = max(1, config.run.batch // ranks)
    work = replace(cluster.workload, samples=samples, dim=config.model.dim)
    device = choose_device(config.run.device).type
    predictor = HardwarePredictor(replace(cluster, workload=work), ranks, device)
    start = replace(_today(config, device, ranks), first=1.0, last=1.0)
    with progress_bar("predicting", None) as advance:
        return choose(predictor, start, draws=4, tell=advance)


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
    config: JobConfig, steps: int, check: int, rounding: bool, save_profile: str | None
) -> PlanChoice | None:
    """Profile the job on this rank and its peers; only rank 0 has the choice."""
    quieten()
    from nestpipe.planner import job_bench
    from nestpipe.train.loop import communicator, use_threads

    use_threads(config.run)
    comm = communicator(config)
    with job_bench(config, comm) as bench:
        known = profiled(bench, steps, rounding)
        if save_profile is not None and comm.rank == 0:
            write_json(save_profile, known.as_json())
        choice = _thought(known, config, comm)
        if check:
            choice = _checked(bench, choice, check)
    comm.barrier()
    comm.close()
    return choice


def profiled(bench: JobBench, steps: int, rounding: bool = False) -> JobProfile:
    """The profile of a job, with a bar on rank 0."""
    from nestpipe.planner import profile_job

    if bench.comm.rank != 0:
        return profile_job(bench, steps=steps, rounds=2, rounding=rounding)
    with progress_bar("profiling: serial runs", None) as advance:
        return profile_job(bench, steps=steps, rounds=2, rounding=rounding, tell=advance)


def _thought(known: JobProfile, config: JobConfig, comm: Communicator) -> PlanChoice | None:
    """Rank 0 searches; the others wait until it has found something."""
    from nestpipe.planner import ProfilePredictor, choose
    from nestpipe.planner.profile import FirstThinks, heard

    if comm.rank != 0:
        heard(comm)
        return None
    waiting = FirstThinks(comm)
    with progress_bar("predicting", None) as advance:

        def tell(candidate: object) -> None:
            waiting.still()
            advance(candidate)

        start = _today(config, known.device, known.ranks)
        choice = choose(ProfilePredictor(known), start, tell=tell)
    waiting.say({})
    return choice


def _checked(bench: JobBench, choice: PlanChoice | None, steps: int) -> PlanChoice | None:
    """The choice after the best few have run; all ranks run them."""
    from nestpipe.planner import Candidate, check_candidates, checked

    named: list[dict[str, Any]] = []
    if choice is not None:
        rows = [*choice.rows[:CHECKED], choice.today, choice.serial]
        named = [asdict(c) for c in dict.fromkeys(row.candidate for row in rows)]
    told: Any = bench.comm.all_gather_values(named)[0]
    candidates = [Candidate(**one) for one in told]
    if choice is None:
        check_candidates(bench, candidates, steps=steps, rounds=2)
        return None
    with progress_bar("checking: short runs", 3 * len(candidates)) as advance:
        measured = check_candidates(bench, candidates, steps=steps, rounds=2, tell=advance)
    return checked(choice, measured)


def _today(config: JobConfig, device: str, ranks: int) -> Candidate:
    """The job's own settings, where `auto` stands for what `train` would choose."""
    from nestpipe.planner import Candidate
    from nestpipe.train.config import choose_pipeline

    chosen = choose_pipeline(config.pipeline, device, ranks).pipeline
    own = ("groups", "threads", "device_memory")
    names = [name for name in Candidate.__slots__ if name not in own]
    values: dict[str, Any] = {name: getattr(chosen, name) for name in names}
    values |= {name: str(values[name]) for name in ("retrieval", "exchange")}  # of enums
    return Candidate(**values, groups=config.parallel.groups)


def _planned(given: str, settings: list[str] | None, choice: PlanChoice) -> str:
    """The config to train with: the file's text, what --set said, and the choice."""
    from nestpipe.planner import config_text

    best = choice.chosen
    note = f"Chosen by `nestpipe plan`: {best.candidate}; predicted {best.gain:.2f}x over serial."
    return config_text(given, best.candidate, note, settings or [])


def _show(choice: PlanChoice, *, allow_rounding: bool, out: str | None) -> None:
    terminal = console()
    terminal.print(choice_table(choice))
    terminal.print(choice.reason(), markup=False, soft_wrap=True)
    if not allow_rounding:
        terminal.print(
            "float32 between ranks, so no bit is lost; --allow-rounding also tries bfloat16.",
            markup=False,
        )
    if out is not None:
        terminal.print(f"written: {out}; train with: nestpipe train {out}", markup=False)


def choice_table(choice: PlanChoice) -> Table:
    """The best candidates, what the config says, and the fastest serial."""
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
            f"{row.low:.2f}..{row.high:.2f}",
            f"{run.pipeline_efficiency:.2f}",
            run.busiest_lane,
            "" if row.measured_ms is None else short_ms(row.measured_ms),
        )
    return table


# `nestpipe bench plan`: the choice beside a grid that really runs.


NETWORKS = "100mbit,400mbit,2gbit"
BENCH_JOB = ("run.batch=1024", "run.threads=1", "model.dim=256", "data.synthetic.num_tables=8")
"""Without a config: about as much to send as to compute, on links of some 100 Mbit/s."""


def bench_plan(
    config: ConfigFile = None,
    settings: Settings = None,
    ranks: Annotated[int, typer.Option(min=2, help="Hosts, each a rank; needs root.")] = 2,
    rates: Annotated[
        str, typer.Option(help="Speeds of the hosts' links, separated by commas.")
    ] = NETWORKS,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a round that count.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each point of the grid.")] = 3,
    json: JsonFile = None,
) -> None:
    """Run what `nestpipe plan` chooses beside an exhaustive small grid, on hosts with shaped links.

    Prints the best step of the grid over that of the choice, for each network: 1 and more means
    that nothing in the grid is faster.

    Example: nestpipe bench plan --rates 100mbit,2gbit --rounds 2
    """
    from nestpipe.bench.machines import bits_per_s

    base = [] if config is not None else list(BENCH_JOB)
    job_config = read_job(config, [*base, *(settings or [])])
    networks = [rate.strip() for rate in rates.split(",")]
    for rate in networks:
        bits_per_s(rate)
    from nestpipe.bench.planning import run_grid

    found: list[GridReading] = []
    with progress_bar("networks", len(networks)) as advance:
        for rate in networks:
            found.append(run_grid(job_config, rate, ranks, steps=steps, rounds=rounds))
            advance(rate)
    if json is not None:
        write_json(json, {"ranks": ranks, "networks": [seen.as_json() for seen in found]})
    if json != STDOUT:
        console().print(grid_table(found, ranks))


def grid_table(found: Sequence[GridReading], ranks: int) -> Table:
    """One row for each network."""
    from nestpipe.bench.planning import small_grid

    table = figures_table(
        f"what plan chooses beside a grid of {len(small_grid())} settings, {ranks} hosts",
        "ratio: the grid's best step over that of the choice, of one call; checked: over the "
        "fastest\nof the three best by prediction, as --check keeps it; steps: measured, ms",
        "link",
        ("ratio", "checked", "choice", "best", "predicted"),
    )
    table.add_column("chosen, then the grid's best", overflow="fold")
    for seen in found:
        table.add_row(
            seen.rate,
            f"{seen.ratio:.2f}",
            f"{seen.checked_ratio:.2f}",
            short_ms(seen.measured[seen.chosen]),
            short_ms(seen.measured[seen.best]),
            short_ms(seen.predicted_ms),
            f"{seen.chosen}\n{seen.best}",
        )
    return table


PROFILE_STEPS = 8
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

    offer = build(Offer, read(hardware))
    job_config = read_job(config, None)
    if not per_worker:
        _refuse_too_many(workers, job_config.run.batch)
    if profile is None and starts_ranks(ranks):
        raise typer.Exit(launch_ranks(ranks))
    known = read_profile(profile) if profile is not None else _measured(job_config)
    if known is None:  # rank 0 tells
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
        if count > batch // 4:
            raise ConfigError(
                f"workers is {count} and run.batch {batch}: fewer than 4 samples for each; name "
                "fewer --workers, or let batches grow with --batch-per-worker"
            )


def _measured(config: JobConfig) -> JobProfile | None:
    """The profile of the job on this rank and its peers; None on all but rank 0."""
    quieten()
    from nestpipe.planner import job_bench
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
        "step: ms, with its range over what is assumed; cost: of a billion samples; decides: what\n"
        "the range is for; host memory for the tables is not looked at",
        "machines",
        ("workers", "groups", "step", "range", "samples/s", "cost", "its range"),
    )
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
    """Which to buy, in words."""
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

    with progress_bar("sites", 1 + len(places)) as advance:
        found = validate(job_config, start, places, steps=steps, rounds=rounds, tell=advance)
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
        "ms; error: of the prediction, over the measured step",
        "site",
        ("predicted", "measured", "error"),
    )
    table.add_column("settings", overflow="fold")
    for one in found:
        table.add_row(
            f"{one.ranks}x{one.rate}",
            short_ms(one.predicted_ms),
            short_ms(one.measured_ms),
            f"{100 * one.error:+.0f} %",
            str(one.candidate),
        )
    return table
