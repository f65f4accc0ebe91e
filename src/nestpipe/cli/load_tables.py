"""The tables and lines that `nestpipe load` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from nestpipe.loadtest.settings import LoadSettings

if TYPE_CHECKING:
    from nestpipe.loadtest.advise import Advice
    from nestpipe.loadtest.report import Report
    from nestpipe.loadtest.search import Found, Step

PATHS = ("hbm_hit", "late_hit", "dram_hit", "miss_full", "miss_cut")


def results_table(reports: Sequence[Report], settings: LoadSettings, reuse: float) -> Table:
    """One row per arm: how fast, how long a history, and what of it counts."""
    workload, target = settings.workload, f"{settings.serve.target_ms:g} ms"
    table = _table(
        f"{reports[0].requests:,} requests, {workload.rate:g}/s, {workload.length} events, "
        f"{workload.candidates} candidates, {reuse:.0%} of prefixes asked for again",
        f"within: answered at full length in {target}; lengths are means.",
        ("P50, ms", "P99, ms", "used", "asked", "cut", "shed", "failed", "within", "within/s"),
    )
    for told in reports:
        p50, p99 = ("-", "-")
        if told.latency is not None:
            p50, p99 = f"{told.latency.p50_ms:.1f}", f"{told.latency.p99_ms:.1f}"
        table.add_row(
            told.name,
            p50,
            p99,
            f"{told.used.mean:,.0f}",
            f"{told.asked.mean:,.0f}",
            _share(told.cuts, told.requests),
            _share(told.sheds, told.requests),
            _share(told.errors + told.unanswered, told.requests),
            _share(told.compliant, told.requests),
            f"{told.compliant_per_s:.1f}",
        )
    return table


def paths_table(reports: Sequence[Report]) -> Table:
    """One row per arm: where answers came from, and what became of signals."""
    table = _table(
        "How rankings were answered: share of requests, and P99 in ms",
        "filled: signals whose prefix was computed; wasted: those whose ranking did not use it;\n"
        "host: reloads from host memory over requests; late: P99 of the driver's own delay, ms.",
        (*(path.replace("_", " ") for path in PATHS), "filled", "wasted", "host", "late"),
    )
    for told in reports:
        cells = [_path(told, path) for path in PATHS]
        host = "-" if told.host_hits is None else f"{told.host_hits:.0%}"
        table.add_row(
            told.name.split(" ")[0],
            *cells,
            _share(told.outcomes.get("admitted", 0), told.requests),
            _share(told.wasted, told.requests),
            host,
            f"{told.late_p99_ms:.1f}",
        )
    return table


def invalid_lines(reports: Sequence[Report]) -> list[str]:
    """What must be known of runs that show nothing."""
    return [
        f"NOT VALID: in arm {told.name} the driver was {told.late_p99_ms:.1f} ms late at P99 (at "
        f"most {told.late_max_ms:.1f} ms), so requests did not come when they were due; use a "
        "lower rate, fewer threads or another machine for the driver."
        for told in reports
        if not told.valid
    ]


def step_line(name: str, what: str, step: Step) -> str:
    """One value that was tried."""
    runs: list[str] = []
    for told in step.reports:
        p99 = "none answered" if told.latency is None else f"P99 {told.latency.p99_ms:.1f} ms"
        spoilt = f", {told.spoilt:.1%} cut or shed" if told.spoilt else ""
        runs.append(p99 + spoilt + ("" if told.valid else ", driver late"))
    return f"{name}: {what} {step.value:g}: {'kept' if step.kept else 'missed'} ({'; '.join(runs)})"


def found_table(what: str, found: Mapping[str, Found], settings: LoadSettings) -> Table:
    """One row per arm: the most that keeps the target, and how it compares with the first arm."""
    workload = settings.workload
    fixed = f"{workload.rate:g}/s" if what == "length" else f"{workload.length} events"
    names = {"length": "longest length", "rate": "highest rate"}
    table = _table(
        f"{names[what]} with P99 within {settings.serve.target_ms:g} ms, {fixed}",
        "At most 1 % of requests cut, shed or failed; x: over the first arm.",
        (what, "x", "tried"),
    )
    first = next(iter(found.values())).value
    for name, one in found.items():
        value = "none" if one.value is None else f"{one.value:g}"
        value += "" if one.bounded or one.value is None else " or more"
        ratio = f"{one.value / first:.2f}" if one.value is not None and first else "-"
        table.add_row(name, value, ratio, str(len(one.steps)))
    return table


def memory_table(advice: Advice) -> Table:
    """One row per time to live."""
    parts = list(advice.memory[0].mb_for)
    table = _table(
        "Users who return, and host memory of an instance for their prefixes",
        "seen: the user had come within that time; found: the prefix would be there; then MB "
        "for so much of it.",
        ("seen", "found", *(f"{part}, MB" for part in parts)),
    )
    for row in advice.memory:
        cells = [f"{row.mb_for[part]:,.1f}" for part in parts]
        table.add_row(f"{row.ttl_s:,.0f} s", f"{row.seen:.1%}", f"{row.reused:.1%}", *cells)
    return table


def advice_lines(sentences: Sequence[str]) -> list[str]:
    """The advice, a sentence to a line."""
    return [f"- {sentence}" for sentence in sentences]


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _share(count: int, of: int) -> str:
    return f"{count / of:.1%}" if of else "-"


def _path(told: Report, path: str) -> str:
    found = told.paths.get(path)
    return "-" if found is None else f"{found.count / told.requests:.0%} {found.p99_ms:.0f}"
