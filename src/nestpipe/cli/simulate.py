"""`nestpipe simulate`: scaling curves for any config, and the published table."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nestpipe.cli.options import (
    JsonFile,
    Micros,
    MirrorEvery,
    RetrievalForm,
    Stages,
    plan_options,
)
from nestpipe.cli.output import STDOUT, console, progress_bar, write_json, write_text
from nestpipe.cli.tables import curve_table, paper_table, print_unreconciled
from nestpipe.config import build, override, read
from nestpipe.errors import ConfigError
from nestpipe.schedule import PLANS, Plan, Retrieval, plan
from nestpipe.sim import (
    Cluster,
    FittedCosts,
    Scale,
    chart,
    costs,
    curve_as_json,
    fit,
    paper_cluster,
    paper_rows,
    replay,
    rows_as_json,
    scaling_curve,
    shards_of,
    to_toml,
)
from nestpipe.sim.paper import SYSTEMS
from nestpipe.sim.published import SCALES
from nestpipe.trace import read_chrome, write_chrome

MOST_WORKERS = 100_000

simulate_app = typer.Typer(rich_markup_mode=None)


@simulate_app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    plan_name: Annotated[
        str, typer.Option("--plan", help=f"The plan to replay: {', '.join(PLANS)}.")
    ] = "nested",
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, separated by commas.")
    ] = "1,8,64,512,1536,4096",
    micros: Micros = 8,
    retrieval: RetrievalForm = Retrieval.WHOLE,
    stages: Stages = 4,
    groups: Annotated[
        int, typer.Option(help="Groups of workers with a copy of the tables each (2D).")
    ] = 1,
    mirror_every: MirrorEvery = 0,
    batches: Annotated[int, typer.Option(help="Batches to replay, at least 12.")] = 40,
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hardware file (TOML); default: the paper's cluster."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override the hardware file."),
    ] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Fit the costs to this measured trace; may be repeated."),
    ] = None,
    json: JsonFile = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the curve.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write worker 0 at the last scale, for Perfetto."),
    ] = None,
    print_hardware: Annotated[
        bool, typer.Option("--print-hardware", help="Print the hardware file in use, and stop.")
    ] = False,
) -> None:
    """Replay a plan on more and more workers and print how it scales.

    Example: nestpipe simulate --plan nested --micros 8 --workers 128,512,1536 --svg scaling.svg

    Example: nestpipe simulate paper
    """
    if context.invoked_subcommand is not None:
        return
    cluster = _cluster(hardware, settings or [])
    if print_hardware:
        write_text(STDOUT, to_toml(cluster))
        return
    chosen = plan(plan_name, plan_options(micros, retrieval, stages, mirror_every))
    scales = _scales(workers, groups)
    if batches < 12:
        raise ConfigError(f"{batches} batches have no steady state; replay at least 12")
    fitted = fit([read_chrome(path) for path in from_trace]) if from_trace else None
    with progress_bar("simulating", batches * len(scales)) as advance:
        points = scaling_curve(
            chosen, cluster, scales, batches=batches, fitted=fitted, progress=advance
        )
    if svg is not None:
        title = f"{plan_name}, {micros} micro-batches: where a step's time goes"
        write_text(svg, chart(points, title))
    if trace is not None:
        _write_trace(trace, chosen, cluster, scales[-1], fitted, batches)
    if json is not None:
        value: dict[str, object] = {"points": curve_as_json(points), "hardware": asdict(cluster)}
        write_json(json, value | ({"fitted": _fitted_as_json(fitted)} if fitted else {}))
    if json != STDOUT and svg != STDOUT:
        console().print(curve_table(points, chosen))
        if fitted is not None:
            console().print(_fit_note(fitted, chosen, scales))


@simulate_app.command()
def paper(json: JsonFile = None) -> None:
    """Simulate the published table (128 to 1,536 workers) beside the published figures.

    Example: nestpipe simulate paper --json table.json
    """
    with progress_bar("simulating", len(SYSTEMS) * len(SCALES)) as advance:
        rows = paper_rows(progress=advance)
    if json is not None:
        write_json(json, rows_as_json(rows))
    if json != STDOUT:
        terminal = console()
        terminal.print(paper_table(rows))
        print_unreconciled(terminal)


def _cluster(hardware: Path | None, settings: list[str]) -> Cluster:
    given = asdict(paper_cluster()) if hardware is None else read(hardware)
    return build(Cluster, override(given, settings))


def _scales(text: str, groups: int) -> list[Scale]:
    scales: list[Scale] = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= MOST_WORKERS:
            raise ConfigError(
                f"workers cannot be {word.strip()!r}; "
                f"give whole numbers from 1 to {MOST_WORKERS:,}, separated by commas"
            )
        shards_of(int(word), groups)
        scales.append(Scale(int(word), groups))
    return scales


def _write_trace(
    file: Path,
    chosen: Plan,
    cluster: Cluster,
    scale: Scale,
    fitted: FittedCosts | None,
    batches: int,
) -> None:
    """Worker 0 of one scale, for Perfetto."""
    if fitted is not None:
        used = fitted.at(chosen, cluster, scale)
    else:
        used = costs(cluster, chosen.shape, scale)
    played = replay(chosen, used, scale, batches=batches, stragglers=cluster.stragglers)
    write_chrome(played.trace, file)


def _fitted_as_json(fitted: FittedCosts) -> dict[str, object]:
    return {
        "workers": fitted.scale.workers,
        "per_batch_ms": {str(kind): ms for kind, ms in fitted.per_batch.items()},
        "per_micro_ms": {
            str(kind): {"fixed": fixed, "shared": shared}
            for kind, (fixed, shared) in fitted.per_micro.items()
        },
        "not_in_trace": [str(kind) for kind in fitted.missing],
    }


def _fit_note(fitted: FittedCosts, chosen: Plan, scales: list[Scale]) -> str:
    """What the fit could not know, in words."""
    notes = [f"Costs were fitted to a run of {fitted.scale.workers} workers."]
    used = {slot.kind for slot in chosen.tick}
    unknown = [str(kind) for kind in fitted.missing if kind in used]
    if unknown:
        notes.append(f"Not in the trace, so taken to cost nothing: {', '.join(unknown)}.")
    if any(scale != fitted.scale for scale in scales):
        notes.append("Other numbers of workers follow the hardware description.")
    return " ".join(notes)
