"""`nestpipe simulate --job`: machines for a job; and `bench simulate`, how right that is."""

from __future__ import annotations

from collections.abc import Sequence
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
    launch_ranks,
    progress_bar,
    quieten,
    read_job,
    short_ms,
    starts_ranks,
    write_json,
)
from nestpipe.cli.planning.plan import BENCH_JOB, profiled, read_profile
from nestpipe.config import build, read
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.bench.planning.validate import Place, SitePrediction
    from nestpipe.planner.fleet import SiteAnswer
    from nestpipe.sim.job_costs import JobProfile
    from nestpipe.train.job import JobConfig

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
    from nestpipe.bench.planning.validate import validate

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
