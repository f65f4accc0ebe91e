"""`nestpipe draw`, `check` and `show`: draw and prove a schedule, show a run."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestpipe.cli.options import (
    STDOUT,
    Batches,
    JsonFile,
    console,
    looks_like_path,
    read_text,
    schedule_from,
    with_plan_options,
    write_json,
    write_text,
)
from nestpipe.dashboard.server import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    Address,
    RunServer,
    beside_training,
    checked_token,
    listen,
    report_page,
    url_of,
)
from nestpipe.dashboard.view import RunFolder, page_data
from nestpipe.errors import ConfigError, NestpipeError, PlanError, ScheduleError
from nestpipe.schedule import (
    PLANS,
    PlanOptions,
    nominal_trace,
    redundant_edges,
    to_text,
    violations,
)
from nestpipe.schedule import check as prove
from nestpipe.trace import Trace, grid, read_chrome, svg, to_chrome

if TYPE_CHECKING:
    from nestpipe.comm import Communicator
    from nestpipe.train.config import JobConfig


class Format(StrEnum):
    """What to draw."""

    TEXT = "text"
    SVG = "svg"
    TRACE = "trace"
    SCHEDULE = "schedule"


@with_plan_options(micro_batches=2)
def draw(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN",
            help=f"A plan ({', '.join(PLANS)}), a schedule file, or a measured trace (JSON).",
        ),
    ],
    batches: Batches = 3,
    *,
    options: PlanOptions,
    format: Annotated[  # noqa: A002 - the option is called so
        Format,
        typer.Option(
            help="A grid; a picture; a file for Perfetto; the schedule as text that reads back."
        ),
    ] = Format.TEXT,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - for stdout.")
    ] = STDOUT,
    width: Annotated[
        int, typer.Option(help="Columns of the text grid; 0: those of the terminal.")
    ] = 0,
) -> None:
    """Draw a plan, a schedule file or a measured trace.

    Example: nestpipe draw nested --batches 3 --micro-batches 2 --format svg -o nested.svg
    """
    if format is Format.SCHEDULE:
        if _is_trace(source):
            raise PlanError(f"{source!r} is a trace, which has no edges; draw it as text or svg")
        write_text(output, to_text(schedule_from(source, options, batches)))
        return
    trace = _trace(source, options, batches)
    match format:
        case Format.SVG:
            write_text(output, svg(trace, title=_title(source, trace), rank=None))
        case Format.TRACE:
            write_text(output, json.dumps(to_chrome(trace)) + "\n")
        case _:
            color = output == STDOUT and sys.stdout.isatty()
            write_text(output, grid(trace, width=width or console().width, color=color) + "\n")


def _is_trace(source: str) -> bool:
    if source in PLANS or not looks_like_path(source):
        return False
    return read_text(Path(source)).lstrip()[:1] in ("{", "[")


def _trace(source: str, options: PlanOptions, batches: int) -> Trace:
    if _is_trace(source):
        return read_chrome(source)
    return nominal_trace(schedule_from(source, options, batches))


def _title(source: str, trace: Trace) -> str:
    plan, micro_batches = trace.facts.get("plan", source), trace.facts.get("micro_batches", 1)
    return f"{plan}, {micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}"


REFUSED = 1
"""Exit status of a schedule that the checker refuses."""


@with_plan_options(micro_batches=2)
def check(
    source: Annotated[
        str,
        typer.Argument(metavar="PLAN", help=f"A plan ({', '.join(PLANS)}) or a schedule file."),
    ],
    batches: Batches = 8,
    *,
    options: PlanOptions,
    stale: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="Accept this plan although it is stale."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Prove from its edges that a schedule is exact and cannot hang; exit 1 where it is not.

    Example: nestpipe check nested --micro-batches 8 --retrieval new
    """
    schedule = schedule_from(source, options, batches)
    if json is not None:
        found = list(violations(schedule, stale=stale))
        write_json(
            json,
            {
                "plan": schedule.shape.plan,
                "exact": not found and not schedule.shape.stale,
                "ops": len(schedule),
                "edges": len(schedule.edges),
                "violations": [
                    {
                        "rule": v.rule,
                        "sentence": v.sentence,
                        "ops": [str(op) for op in v.ops],
                        "missing": [str(op) for op in v.missing] if v.missing else None,
                    }
                    for v in found
                ],
            },
        )
        raise typer.Exit(REFUSED if found else 0)
    try:
        prove(schedule, stale=stale)
    except ScheduleError as error:
        typer.echo(f"refused: {error}")
        raise typer.Exit(REFUSED) from None
    verdict = "stale, as asked for, and cannot hang" if schedule.shape.stale else "exact"
    typer.echo(
        f"{schedule.shape.plan} is {verdict}: {len(schedule)} ops of {schedule.batches} batches, "
        f"{len(schedule.edges)} edges, {len(redundant_edges(schedule))} of them implied by others"
    )


# A run, live or finished: `nestpipe show`, and `train --dashboard`.


TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the token of the page, or set NESTPIPE_TOKEN; needed beyond loopback.",
    ),
]


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or its record.")],
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the page as one HTML file instead; - for stdout."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help=f"Port; 0: any. Left out: {DEFAULT_PORT}, or any that is free."
        ),
    ] = None,
    token_file: TokenFile = None,
) -> None:
    """Show a run as a web page, finished or still running, until Ctrl-C.

    Example: nestpipe show runs/today

    Example: nestpipe show runs/today --html report.html

    Example: nestpipe show runs/today --host 0.0.0.0 --port 8907 --token-file token.txt
    """
    folder = RunFolder(run)
    if html is not None:
        write_text(html, report_page(page_data(folder.read())))
        return
    address = Address(host, DEFAULT_PORT if port is None else port, chosen=port is not None)
    token = checked_token(address, token_file, "--host 127.0.0.1")
    folder.read()  # refuse now a folder that no page could show
    with RunServer(listen(address), folder, token) as server:
        typer.echo(f"showing {run} at {url_of(server.socket)}; Ctrl-C ends it")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


@dataclass(frozen=True, slots=True)
class Watching:
    """How a run is shown while it goes on, and after it has ended."""

    address: Address | None = None
    token: str | None = None
    report: Path | None = None

    @classmethod
    def asked_for(
        cls, config: JobConfig, dashboard: str | None, report: Path | None, token_file: Path | None
    ) -> Watching:
        """Read the flags of `train`; refuses at once what would fail later."""
        address = None if dashboard is None else Address.parsed(dashboard)
        if (address is not None or report is not None) and config.run.record == "off":
            flag = "--dashboard" if address is not None else "--report"
            raise ConfigError(f"run.record is 'off', which {flag} reads; leave one of them out")
        if address is None:
            return cls(report=report)
        token = checked_token(address, token_file, f"--dashboard {DEFAULT_HOST}:{address.port}")
        return cls(address, token, report)

    @contextmanager
    def recording(self, config: JobConfig, comm: Communicator) -> Generator[JobConfig]:
        """The config of a run that is recorded where it must be; all ranks call it."""
        asked_for = self.address is not None or self.report is not None
        if not asked_for or config.run.record_folder is not None:
            yield config
            return
        from nestpipe.train.checkpoint import gathered_from_first

        with ExitStack() as held:
            own = ""
            if comm.rank == 0:
                own = held.enter_context(tempfile.TemporaryDirectory(prefix="nestpipe-run-"))
            folder = str(gathered_from_first(comm, own))
            yield replace(config, run=replace(config.run, record=folder))

    @contextmanager
    def shown(self, config: JobConfig, comm: Communicator) -> Generator[None]:
        """Inside, rank 0 has the page served; at the end it writes the report."""
        from nestpipe.train.checkpoint import raise_everywhere

        folder = config.run.record_folder
        with ExitStack() as held:

            def serve() -> None:
                if comm.rank == 0 and self.address is not None and folder is not None:
                    listening = listen(self.address)
                    sys.stderr.write(f"dashboard: {url_of(listening)}\n")
                    held.enter_context(beside_training(folder.parent, listening, self.token))

            raise_everywhere(comm, serve)
            try:
                yield
            finally:
                if comm.rank == 0 and self.report is not None and folder is not None:
                    _write_report(folder, self.report)


def _write_report(folder: Path, report: Path) -> None:
    """A report that cannot be written must not hide how the run ended."""
    try:
        write_text(str(report), report_page(page_data(RunFolder(folder.parent).read())))
    except NestpipeError as error:
        sys.stderr.write(f"warning: no report: {error}\n")
