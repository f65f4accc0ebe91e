"""`nestpipe bench train`: samples per second beside TorchRec, in the same processes."""

from __future__ import annotations

import json as json_module
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nestpipe.cli.options import JsonFile
from nestpipe.cli.output import STDOUT, console, write_json
from nestpipe.errors import ConfigError, RunError

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
        console().print(_table(results))


def _run(case: str, ranks: int, options: list[str]) -> dict[str, Any]:
    from nestpipe.comm import launch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "nestpipe.bench.train", case, *options, "--out", str(out)]
        status = launch(ranks, command)
        if status == ConfigError.exit_status:
            raise typer.Exit(status)
        if status != 0:
            raise RunError(f"the benchmark of {case} ended with status {status}; see above")
        return json_module.loads(out.read_text())


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="samples per second, all ranks")
    for name in ("case", "NestPipe", "TorchRec", "ratio"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for result in results:
        theirs, ratio = result["torchrec_samples_per_s"], result["ratio"]
        table.add_row(
            result["config"],
            f"{result['nestpipe_samples_per_s']:,.0f}",
            "" if theirs is None else f"{theirs:,.0f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    return table
