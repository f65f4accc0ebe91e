"""`nestpipe bench groups`: one dimension and groups of ranks on the same work."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from nestpipe.cli.options import JsonFile
from nestpipe.cli.output import STDOUT, console, write_json
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.bench.groups import GroupReading


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
    from nestpipe.config import build, override

    chosen = build(PipelineCase, override(asdict(case_of(case)), set_ or []))
    check_groups(groups, chosen.ranks)
    variants = group_variants(groups, _numbers(intervals))
    readings = measure_groups(chosen, variants, hosts=hosts)
    if json is not None:
        results = [asdict(reading) for reading in readings]
        write_json(json, {"case": asdict(chosen), "hosts": hosts, "results": results})
    if json != STDOUT:
        console().print(_table(f"{chosen.ranks} ranks of {chosen.batch} samples", readings))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"intervals are {text!r}; give whole numbers from 1 on, such as 1,4,16")
    return numbers


def _table(title: str, readings: list[GroupReading]) -> Table:
    table = Table(title=title, caption="x: gain over one dimension.", box=SIMPLE_HEAD)
    table.add_column("")
    for name in ("step, ms", "x", "MB sent per rank", "of one dimension"):
        table.add_column(name, justify="right")
    one = readings[0]
    for reading in readings:
        table.add_row(
            reading.variant.name,
            f"{reading.step_ms:,.0f}",
            f"{one.step_ms / reading.step_ms:.2f}",
            f"{reading.sent_mb:.2f}",
            f"{100 * reading.sent_mb / one.sent_mb:.0f} %",
        )
    return table
