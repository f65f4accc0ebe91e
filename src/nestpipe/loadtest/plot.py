"""Pictures of a load test; matplotlib is asked for only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import Run
from nestpipe.loadtest.report import percentile
from nestpipe.loadtest.search import SearchStep

KINDS = (".png", ".svg", ".pdf")
SIZE = (9.0, 5.0)


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be drawn, before the work is done."""
    if path.suffix not in KINDS:
        raise ConfigError(f"cannot draw {str(path)!r}; end its name in {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed; run pip install matplotlib"
        ) from None


def full_length_curve(run: Run, warmup_s: float = 0.0) -> tuple[list[float], list[float]]:
    """Milliseconds, and the share of all requests that had a full-length answer by then."""
    records = [record for record in run.records if record.visit.signal_s >= warmup_s]
    times_ms = sorted(r.latency_ms for r in records if r.full and r.latency_ms is not None)
    return times_ms, [(place + 1) / len(records) for place in range(len(times_ms))]


def p99_curve(steps: Sequence[SearchStep]) -> tuple[list[float], list[float]]:
    """Values that a search tried, and the median P99 of their runs, where there is one."""
    points: list[tuple[float, float]] = []
    for step in steps:
        found = [told.latency.p99_ms for told in step.reports if told.latency is not None]
        if found:
            points.append((step.value, percentile(found, 0.5)))
    points.sort()
    return [value for value, _ in points], [p99_ms for _, p99_ms in points]


def plot_latencies(
    path: Path, runs: Mapping[str, Run], target_ms: float, warmup_s: float = 0.0
) -> None:
    """A curve per arm: cut answers never count, so it ends at the share of full-length ones."""
    figure, axes = _axes()
    for name, run in runs.items():
        times_ms, shares = full_length_curve(run, warmup_s)
        if times_ms:
            axes.step(times_ms, shares, where="post", label=name)
        else:
            axes.plot([], [], label=f"{name} (none at full length)")
    axes.axvline(target_ms, color="0.5", linestyle="--", label=f"target, {target_ms:g} ms")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("time from when the ranking was due, ms")
    axes.set_ylabel("share of requests answered at full length")
    _save(figure, axes, path)


def plot_search(
    path: Path, found: Mapping[str, Sequence[SearchStep]], target_ms: float, what: str
) -> None:
    """P99 of every value that was tried, a line per arm; filled where the target was kept."""
    figure, axes = _axes()
    for name, steps in found.items():
        values, p99_ms = p99_curve(steps)
        (line,) = axes.plot(values, p99_ms, label=name)
        kept = {step.value for step in steps if step.kept}
        for value, height in zip(values, p99_ms, strict=True):
            face = line.get_color() if value in kept else "white"
            axes.plot(value, height, "o", color=line.get_color(), markerfacecolor=face)
    axes.axhline(target_ms, color="0.5", linestyle="--", label=f"target, {target_ms:g} ms")
    axes.set_yscale("log")
    axes.set_xlabel(what)
    axes.set_ylabel("P99, ms (filled: target kept at full length)")
    _save(figure, axes, path)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, color="0.9")
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        ) from None
