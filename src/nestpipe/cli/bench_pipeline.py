"""`nestpipe bench pipeline`: every plan on the same work, measured and predicted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from nestpipe.cli.options import STDOUT, JsonFile, console, figures_table, write_json
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.bench.pipeline_cases import PipelineCase
    from nestpipe.bench.pipeline_report import PointReport, VariantReport

DEFAULT_CASE = {"cpu": "network", "cuda": "paper"}


def bench_pipeline(
    case: Annotated[
        str | None,
        typer.Option(
            help="network, paper, host, curve or lab_a to lab_d; default: network, on a GPU paper."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: where the case belongs.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; default: the case's.")] = None,
    plans: Annotated[
        str | None, typer.Option(help="Plans, separated by commas; default: the case's.")
    ] = None,
    retrieval: Annotated[
        str, typer.Option(help="Forms of retrieval to run them in, separated by commas.")
    ] = "whole,new",
    exchange: Annotated[
        str, typer.Option(help="Forms of exchange, micro or window, separated by commas.")
    ] = "micro",
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Ranks as hosts with shaped links; needs root.")
    ] = False,
    rate: Annotated[
        str | None, typer.Option(help="Speed of a host's link, like 200mbit; default: the case's.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a size of the case."),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Keep the traces of all rounds and ranks in this folder.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Run every plan on the same work, in turns, and compare their steps.

    Beside each measured step stands the one that the simulator predicts from `serial` alone.

    Example: nestpipe bench pipeline --hosts --rate 150mbit --json out/pipeline.json

    Example: nestpipe bench pipeline --plans nested --retrieval new --exchange micro,window
    """
    from nestpipe.bench.pipeline_cases import variants_of
    from nestpipe.bench.pipeline_rank import run_pipeline

    chosen = _case(case, device, ranks, rate if hosts else None, set_ or [])
    if rate is not None and not hosts:
        raise ConfigError(f"rate is {rate!r} but ranks are not hosts; add --hosts or drop --rate")
    variants = variants_of(
        chosen,
        tuple((plans or chosen.plans).split(",")),
        tuple(retrieval.split(",")),
        tuple(exchange.split(",")),
    )
    with _folder(traces) as folder:
        points = run_pipeline(chosen, variants, Path(folder), hosts=hosts)
    if json is not None:
        write_json(json, _as_json(chosen, hosts, points))
    if json != STDOUT:
        for point in points:
            console().print(steps_table(chosen, point))
            console().print(lanes_table(point))
        if len(points) > 1:
            console().print(curve_table("strict", points, lambda seen: seen.over_strict))
            console().print(curve_table("async", points, lambda seen: seen.over_async))


def _case(
    name: str | None,
    device: str | None,
    ranks: int | None,
    rate: str | None,
    changes: Sequence[str],
) -> PipelineCase:
    from nestpipe.bench.pipeline_cases import PipelineCase, case_of
    from nestpipe.config import build

    if device not in (None, *DEFAULT_CASE):
        raise ConfigError(f"device is {device!r}; use {' or '.join(DEFAULT_CASE)}")
    found = case_of(name or DEFAULT_CASE[device or "cpu"])
    options = {"device": device, "ranks": ranks, "rate": rate}
    given = {key: value for key, value in options.items() if value is not None}
    return build(PipelineCase, {**asdict(found), **given}, overrides=changes)


def _folder(kept: Path | None) -> AbstractContextManager[str | Path]:
    """Where ranks leave their traces: a folder to keep, or one that goes away."""
    if kept is None:
        return tempfile.TemporaryDirectory(prefix="nestpipe-bench-")
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {str(kept)!r}: {error.strerror}; choose another") from None
    return nullcontext(kept)


def _as_json(case: PipelineCase, hosts: bool, points: Sequence[PointReport]) -> dict[str, object]:
    found = [point.as_json() for point in points]
    what = {"case": asdict(case), "hosts": hosts}
    return {**what, "points": found} if case.curve else {**what, **found[0]}


def steps_table(case: PipelineCase, point: PointReport) -> Table:
    """One row per variant: its step, what it gains over both baselines, what was predicted."""
    same = "" if case.device == "cuda" else ", which are the same loop on a CPU"
    table = figures_table(
        f"{case.name}: {case.ranks} ranks of {case.batch} samples ({case.device})",
        "step: ms, median over rounds; range: fastest and slowest round;\n"
        f"strict, async: gain over the fastest strict and async serial{same};\n"
        "predicted: by the simulator, from the traces of strict serial",
        "plan, rows, micro-batches",
        ("step", "range", "strict", "async", "predicted", "error"),
    )
    for seen in point.variants:
        error = seen.error
        table.add_row(
            " ".join(seen.variant.words),
            _ms(seen.step_ms),
            f"{_ms(min(seen.rounds_ms))}..{_ms(max(seen.rounds_ms))}",
            f"{seen.over_strict:.2f}x",
            f"{seen.over_async:.2f}x",
            "" if seen.predicted_ms is None else _ms(seen.predicted_ms),
            "" if error is None else f"{100 * error:+.0f} %",
        )
    return table


def lanes_table(point: PointReport) -> Table:
    """One row per variant: what bounds its step, and what of it no compute hides."""
    shares = ", ".join(f"{name} {100 * part:.0f} %" for name, part in point.shares.items())
    table = figures_table(
        "Where the time of a step goes",
        f"of the strict serial step: {shares};\n"
        "busy: of the busiest lane, over the step; lookup, exchange, idle: ms that nothing hides",
        "plan, rows, micro-batches",
        ("busy", "lane", "compute", "lookup", "exchange", "idle", "samples/s"),
    )
    for seen in point.variants:
        parts = (seen.compute_ms, seen.lookup_ms, seen.exchange_ms, seen.idle_ms)
        table.add_row(
            " ".join(seen.variant.words),
            f"{seen.efficiency:.2f}",
            seen.busiest_lane,
            *(_ms(part) for part in parts),
            f"{seen.samples_per_s:,.0f}",
        )
    return table


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def curve_table(
    loop: str, points: Sequence[PointReport], gain: Callable[[VariantReport], float]
) -> Table:
    """What each plan gains over the fastest serial, from much moving to much computing."""
    table = figures_table(
        f"gain over the fastest {loop} serial, by (lookup + exchange) / compute",
        "",
        "plan, rows, micro-batches",
        [f"{point.moved_over_compute:.2f}" for point in points],
    )
    for variant in (seen.variant for seen in points[0].variants if not seen.variant.serial):
        gains = [gain(s) for point in points for s in point.variants if s.variant == variant]
        table.add_row(" ".join(variant.words), *(f"{gained:.2f}" for gained in gains))
    return table
