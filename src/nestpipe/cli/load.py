"""`nestpipe load`: an open-loop load test of the ranking service, and advice from a request log."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.options import JsonFile
from nestpipe.config import build
from nestpipe.errors import ConfigError
from nestpipe.loadtest.settings import ARMS, TOLERANCE, LoadSettings, arms_of, check_tolerance

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
    """Send requests when they are due, whatever the answers, and tell what became of them.

    Both legs of each request are sent: the signal, then after retrieval and pre-processing the
    ranking. An answer counts where it is in time and rests on the whole history.

    Exit status 1: the driver was late, so the run shows nothing.

    Example: nestpipe load --random layers=4,dim=64,heads=2 --rate 20 --length 512 --arms A,B,C,D

    Example: nestpipe load --checkpoint out/run --find length --arms B,D --rate 50 --plot p99.svg

    Example: nestpipe load --url http://127.0.0.1:8000 --rate 100 --seconds 30 --json -

    Example: nestpipe load --advise requests.csv --costs costs.json --target-ms 50
    """
    from nestpipe.cli import load_jobs as jobs

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
    jobs.require("torch", "safetensors")
    if write_log is not None:
        jobs.write_requests(write_log, chosen)
        return
    model = jobs.Model(checkpoint, random, device, dtype, instances, threads)
    if write_costs is not None:
        jobs.write_costs(write_costs, model, chosen)
    elif advise is not None:
        jobs.advise_on(advise, costs, model, chosen, json)
    elif find is not None:
        values = range(chosen.workload.seed, chosen.workload.seed + seeds)
        aim = jobs.Aim(find.value, list(values), tolerance)
        where = jobs.Where(model, compared, url, token_file)
        if not jobs.find_most(where, aim, chosen, json, plot):
            raise typer.Exit(NOT_VALID)
    elif not jobs.compare(jobs.Where(model, compared, url, token_file), chosen, json, plot):
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
