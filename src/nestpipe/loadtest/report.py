"""The figures of a run: latencies, cache hits, lengths, requests within target; and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import Record, Run
from nestpipe.serve.types import AdmissionOutcome
from nestpipe.serve.types import Path as RankPath

if TYPE_CHECKING:
    from nestpipe.loadtest.run import SearchStep

LATE_SHARE = 0.1
"""Part of the target by which the driver may be late at P99; a run beyond that shows nothing."""
MOST_SPOILT = 0.01
"""Share of requests that may be cut, shed or fail where a target is said to be kept."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from when a ranking was due to its answer."""

    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Latency | None:
        if not values_ms:
            return None
        p50, p99 = percentile(values_ms, 0.5), percentile(values_ms, 0.99)
        return cls(len(values_ms), fmean(values_ms), p50, p99, max(values_ms))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Events of histories."""

    mean: float
    p50: float

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        return cls(fmean(lengths), percentile(lengths, 0.5)) if lengths else cls(0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The figures of one run."""

    name: str
    target_ms: float
    seconds: float
    """Of arrivals, those of the warm-up left out."""
    requests: int
    latency: Latency | None
    """Of all answers; None: there was none."""
    paths: dict[str, Latency]
    outcomes: dict[str, int]
    """What became of signals, by name; `lost` for those that never said."""
    cuts: int
    """Answers that rest on fewer events than asked for."""
    sheds: int
    errors: int
    """Other errors."""
    unanswered: int
    wasted: int
    """Prefixes computed for a signal whose own ranking did not use them."""
    reused: float
    """Share of requests whose prefix was there when the signal came, or came from host memory."""
    host_hits: float | None
    """Reloads from host memory over all requests; None: the service does not count them."""
    asked: Lengths
    used: Lengths
    """Of the answers."""
    compliant: int
    """Answers at full length within the target."""
    late_p99_ms: float
    """How late the driver was."""
    late_max_ms: float
    counted: dict[str, float]
    """Counters of the service."""

    @property
    def offered_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def compliant_per_s(self) -> float:
        """Requests per second that were answered at full length within the target."""
        return self.compliant / self.seconds

    @property
    def spoilt(self) -> float:
        """Share of requests that were cut, shed, failed or left without an answer."""
        bad = self.cuts + self.sheds + self.errors + self.unanswered
        return bad / self.requests if self.requests else 0.0

    @property
    def valid(self) -> bool:
        """Whether the driver sent the requests when they were due."""
        return self.late_p99_ms <= LATE_SHARE * self.target_ms

    @property
    def keeps_target(self) -> bool:
        """Whether P99 is within the target, and not by cutting or shedding."""
        p99_ms = self.latency.p99_ms if self.latency else float("inf")
        return self.valid and p99_ms <= self.target_ms and self.spoilt <= MOST_SPOILT


def report(name: str, run: Run, *, target_ms: float, seconds: float, warmup_s: float) -> Report:
    """The figures of a run; requests that arrived during the warm-up do not count."""
    records = [record for record in run.records if record.visit.signal_s >= warmup_s]
    answered = [record for record in records if record.answer is not None]
    late_ms = [record.late_ms for record in records] or [0.0]
    return Report(
        name=name,
        target_ms=target_ms,
        seconds=seconds - warmup_s,
        requests=len(records),
        latency=Latency.of(_latencies(answered)),
        paths=_by_path(answered),
        outcomes=dict(Counter(str(record.outcome or "lost") for record in records)),
        cuts=sum(record.cut for record in records),
        sheds=sum(record.shed for record in records),
        errors=sum(record.error is not None and not record.shed for record in records),
        unanswered=sum(record.latency_ms is None for record in records),
        wasted=sum(_wasted(record) for record in records),
        reused=sum(_reused(record) for record in records) / max(1, len(records)),
        host_hits=_host_hits(run),
        asked=Lengths.of([record.visit.asked for record in records]),
        used=Lengths.of([record.length_used for record in answered]),
        compliant=sum(record.within(target_ms) for record in records),
        late_p99_ms=percentile(late_ms, 0.99),
        late_max_ms=max(late_ms),
        counted=run.counted,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as so great a share of all values."""
    ordered = sorted(values)
    place = -(-round(share * 1000) * len(ordered) // 1000)
    return ordered[max(0, place - 1)]


def as_json(told: Report) -> dict[str, Any]:
    """All figures as plain values."""
    derived = ("offered_per_s", "compliant_per_s", "spoilt", "valid", "keeps_target")
    return {**asdict(told), **{name: getattr(told, name) for name in derived}}


def _host_hits(run: Run) -> float | None:
    reloads = run.counted.get("reloads")
    return None if reloads is None else reloads / max(1, len(run.records))


def _latencies(records: Sequence[Record]) -> list[float]:
    return [record.latency_ms for record in records if record.latency_ms is not None]


def _by_path(answered: Sequence[Record]) -> dict[str, Latency]:
    found: dict[str, Latency] = {}
    for path in RankPath:
        taken = [record for record in answered if record.answer and record.answer.path is path]
        latency = Latency.of(_latencies(taken))
        if latency is not None:
            found[str(path)] = latency
    return found


def _wasted(record: Record) -> bool:
    used = record.answer is not None and record.answer.path in (RankPath.HBM_HIT, RankPath.LATE_HIT)
    return record.outcome is AdmissionOutcome.ADMITTED and not used


def _reused(record: Record) -> bool:
    if record.answer is None:
        return False
    if record.answer.path is RankPath.DRAM_HIT:
        return True
    hit = record.answer.path in (RankPath.HBM_HIT, RankPath.LATE_HIT)
    return hit and record.outcome is AdmissionOutcome.ALREADY_CACHED


# Pictures; matplotlib is asked for only here.


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
