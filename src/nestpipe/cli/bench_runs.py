"""`nestpipe bench pipeline`, `bench relay` and `bench hstu`: plans, ways to rank, model parts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from nestpipe.cli.options import (
    STDOUT,
    JsonFile,
    console,
    figures_table,
    progress_bar,
    short_ms,
    summary_lines,
    write_json,
)
from nestpipe.cli.serve import require
from nestpipe.config import build, positive
from nestpipe.errors import ConfigError
from nestpipe.loadtest.settings import LoadSettings

if TYPE_CHECKING:
    from nestpipe.bench.hstu.parts import AttentionReading, HstuCase, KernelTime
    from nestpipe.bench.pipeline_cases import PipelineCase, PointReport, VariantReport
    from nestpipe.bench.relay_run import AskedSizes, RelayCase, Sizes
    from nestpipe.bench.relay_service import Reference, RelayReading

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
    """One row per variant: what bounds its step, and the time that no compute hides."""
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
    """The gain of each plan over the fastest serial, from moving-bound to compute-bound."""
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


NOT_SOUND = 1
"""Exit status where a request was lost or a score wrong."""
NO_NGINX = "nginx is skipped: there is none on this machine; apt-get install nginx-light"


def bench_relay(
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Serve this ranker.")
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Serve one with random weights; the default."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=128, help="Events of a history; default: by calibration.")
    ] = None,
    target_ms: Annotated[
        float | None, typer.Option(help="P99 to be kept; default: 100, or by the length.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second; default: 6 % of the time is used.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long requests arrive in a round.")] = 40.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which the arms take turns.")] = 4,
    candidates: Annotated[int, typer.Option(min=2, help="Candidates of a request.")] = 128,
    nginx: Annotated[
        bool, typer.Option("--nginx", help="Then the same again behind a real nginx.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change a setting of serve or workload."
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Rank inline and with relay at a length that inline cannot rank in time, over HTTP.

    Starts services of two instances with one thread each behind a router, sends all the same
    requests in turns, then kills an instance under load. Every answer is compared with the scores
    of the same model in this process.

    Exit status 1: a request was lost, or a score was wrong.

    Example: nestpipe bench relay --nginx --json out/relay.json
    """
    if checkpoint is not None and random is not None:
        raise ConfigError("both --checkpoint and --random are given; name one model")
    for name, value in (("target-ms", target_ms), ("rate", rate), ("seconds", seconds)):
        if value is not None:
            positive(f"--{name}", value)
    build(LoadSettings, {}, overrides=settings or [])  # refuse a wrong name before the work
    require(
        "a load test", "torch", "safetensors", "fastapi", "httpx", "prometheus_client", "uvicorn"
    )
    from nestpipe.bench.relay_run import AskedSizes, find_nginx
    from nestpipe.bench.relay_service import is_sound

    notes = [NO_NGINX] if nginx and find_nginx() is None else []
    fronts = ("builtin", "nginx") if nginx and not notes else ("builtin",)
    asked = AskedSizes(length=length, target_ms=target_ms, rate=rate)
    plan = _Plan(asked, seconds, rounds, candidates, fronts, settings or [])
    with _reference(checkpoint, random) as (path, reference):
        case, sizes = plan.case(path, reference)
        if json != STDOUT:
            console().print(_sizes_line(case, sizes), markup=False, soft_wrap=True)
        readings = _compare(case, reference)
    _show_case(case, sizes, readings, notes, json)
    if not is_sound(readings):
        raise typer.Exit(NOT_SOUND)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The command-line options of the comparison."""

    asked: AskedSizes
    seconds: float
    rounds: int
    candidates: int
    fronts: tuple[Any, ...]
    settings: list[str]

    def case(self, path: Path, reference: Reference) -> tuple[RelayCase, Sizes]:
        """Time the model, and choose the remaining settings."""
        from nestpipe.bench.relay_run import INSTANCES, RelayCase, choose, measure, sections
        from nestpipe.loadtest.settings import WorkloadSettings
        from nestpipe.serve.types import RealClock

        model, short = reference.model, WorkloadSettings().short
        with progress_bar("measuring costs", None):
            costs = measure(model, self.asked, self.candidates, short, RealClock())
        sizes = choose(costs, self.asked, self.candidates, short, INSTANCES)
        given = sections(sizes, self.seconds, self.candidates)
        items = max(1, min(WorkloadSettings().items, model.rows.num_items))
        given["workload"] |= {"items": items, "times": bool(model.config.time_buckets)}
        chosen = build(LoadSettings, given, overrides=self.settings)
        case = RelayCase(
            checkpoint=path,
            settings=chosen,
            cap=chosen.serve.cut_length,
            rounds=self.rounds,
            fronts=self.fronts,
        )
        return case, sizes


@contextmanager
def _reference(checkpoint: Path | None, random: str | None) -> Generator[tuple[Path, Reference]]:
    """The checkpoint that is served, and the same model here, on one thread as in an instance."""
    import torch

    from nestpipe.bench.relay_service import Reference, write_random
    from nestpipe.loadtest.run import random_model
    from nestpipe.serve.engine.rank_model import HstuRankModel

    sizes, before = random_model(random or ""), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="nestpipe-relay-") as folder:
            path = checkpoint or write_random(Path(folder), sizes)
            yield path, Reference(HstuRankModel.from_checkpoint(path, "cpu"))
    finally:
        torch.set_num_threads(before)


def _compare(case: RelayCase, reference: Reference) -> list[RelayReading]:
    from nestpipe.bench.relay_run import compare
    from nestpipe.serve.types import RealClock

    return compare(case, reference, RealClock(), progress_bar)


def _show_case(
    case: RelayCase,
    sizes: Sizes,
    readings: Sequence[RelayReading],
    notes: Sequence[str],
    json: str | None,
) -> None:
    from nestpipe.bench.relay_service import conclusion

    sentence = conclusion(readings, case.settings.workload.length)
    if json is not None:
        about = {
            "sizes": asdict(sizes),
            "settings": asdict(case.settings),
            "rounds": case.rounds,
            "notes": list(notes),
        }
        results = [one.as_json() for one in readings]
        write_json(json, {**about, "results": results, "conclusion": sentence})
    if json != STDOUT:
        terminal = console()
        terminal.print(times_table(case, readings))
        terminal.print(answers_table(readings))
        for line in [*notes, sentence]:
            terminal.print(line, markup=False, soft_wrap=True)


def _sizes_line(case: RelayCase, sizes: Sizes) -> str:
    workload = case.settings.workload
    return (
        f"{workload.length:,} events are predicted to rank in {sizes.inline_ms:.0f} ms inline, in "
        f"{sizes.cached_ms:.0f} ms with a prefix that takes {sizes.prefix_ms:.0f} ms; {case.cap} "
        f"events in {sizes.capped_ms:.0f} ms; target {case.settings.serve.target_ms:g} ms, "
        f"{workload.rate:g} requests/s, {case.minutes:.0f} minutes of requests"
    )


def times_table(case: RelayCase, readings: Sequence[RelayReading]) -> Table:
    """One row per front and arm: how fast, how long a history."""
    workload, target = case.settings.workload, f"{case.settings.serve.target_ms:g} ms"
    table = figures_table(
        f"{workload.rate:g} requests/s, {workload.length:,} events, {workload.candidates} "
        f"candidates, {case.rounds} rounds of {workload.seconds:g} s",
        f"P50, P99, late: ms; within: answered at full length in {target};\n"
        "asked, used: events, means; late: P99 of the driver's own delay.",
        "front: arm",
        ("requests", "P50", "P99", "within", "asked", "used", "late"),
    )
    for one in readings:
        report, latency = one.report, one.report.latency
        table.add_row(
            f"{one.front}: {report.name}",
            f"{report.requests:,}",
            short_ms(latency.p50_ms) if latency else "-",
            short_ms(latency.p99_ms) if latency else "-",
            f"{report.compliant / max(1, report.requests):.1%}",
            f"{report.asked.mean:,.0f}",
            f"{report.used.mean:,.0f}",
            short_ms(report.late_p99_ms),
        )
    return table


def answers_table(readings: Sequence[RelayReading]) -> Table:
    """One row per front and arm: where answers came from, and whether they are right."""
    table = figures_table(
        "How requests were answered, and whether their scores are right",
        "hbm, late, dram: with a prefix that was ready, on its way, still in host memory;\n"
        "reloads: prefixes from host memory, most of them for the signal; cut: answers that rest\n"
        "on fewer events than asked for; wrong: by more than 1e-5 of the scores' deviation.",
        "front: arm",
        ("hbm", "late", "dram", "inline", "reloads", "cut", "lost", "wrong", "compared"),
    )
    for one in readings:
        hits = one.hits
        table.add_row(
            f"{one.front}: {one.report.name}",
            *(str(hits[path]) for path in ("hbm_hit", "late_hit", "dram_hit")),
            str(hits["miss_full"] + hits["miss_cut"]),
            "-" if one.reloads is None else str(one.reloads),
            str(one.report.cuts),
            str(one.lost),
            str(one.scores.wrong),
            f"{one.scores.compared:,}",
        )
    return table


# The sequence model's parts.


PARTS = ("attention", "encoder", "step")


def bench_hstu(
    parts: Annotated[
        str, typer.Option(help="attention, encoder and step, separated by commas.")
    ] = "attention,encoder",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    length: Annotated[str, typer.Option(help="Rows of the longest, separated by commas.")] = "4096",
    lengths: Annotated[str, typer.Option(help="full, uniform or zipf.")] = "full",
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    head_dim: Annotated[str, typer.Option(help="Widths of a head, separated by commas.")] = "128",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the encoder.")] = 8,
    dim: Annotated[int, typer.Option(min=1, help="Width of a row.")] = 1024,
    bias: Annotated[str, typer.Option(help="none, both, or none,both.")] = "none,both",
    kind: Annotated[str, typer.Option(help="Blocks: hstu or fuxi.")] = "hstu",
    attention: Annotated[str, typer.Option(help="auto, fused, hopper or plain.")] = "auto",
    pointwise: Annotated[
        str, typer.Option(help="Steps between products: auto, fused, steps or plain.")
    ] = "auto",
    positions: Annotated[
        int, typer.Option(min=0, help="encoder, step: columns of the bias by position; 0: none.")
    ] = 64,
    profile: Annotated[
        bool, typer.Option("--profile", help="encoder: list the kernels that take longest.")
    ] = False,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Compute activations again.")
    ] = False,
    items: Annotated[int, typer.Option(min=1, help="step: different items.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    tasks: Annotated[
        int, typer.Option(min=0, help="step: tasks of a ranker with users; 0: the plain ranker.")
    ] = 0,
    users: Annotated[int, typer.Option(min=1, help="tasks: different users.")] = 50_000_000,
    table_dim: Annotated[int, typer.Option(min=1, help="tasks: width of a table's row.")] = 128,
    stored: Annotated[
        int, typer.Option(min=0, help="tasks: rows of each table stored beforehand.")
    ] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="tasks: ranks; all share one GPU.")] = 1,
    plans: Annotated[str, typer.Option(help="tasks: plans, separated by commas.")] = "nested",
    balance: Annotated[str, typer.Option(help="tasks: samples, work, or both.")] = "samples",
    retrieval: Annotated[str, typer.Option(help="tasks: pooled, new or whole.")] = "pooled",
    micro_batches: Annotated[int, typer.Option(min=1, help="tasks: slices of a batch.")] = 1,
    device_memory: Annotated[str, typer.Option(help="tasks: memory of a rank's pool.")] = "auto",
    warm: Annotated[
        int, typer.Option(min=0, help="tasks: steps before the clock; 0: behind the traced ones.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="tasks: steps of a round.")] = 30,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    peak: Annotated[float, typer.Option(help="TFLOP/s of the device; 0: by its name.")] = 0.0,
    limit: Annotated[
        float, typer.Option(help="tasks: seconds after which a process is stopped.")
    ] = 500.0,
    json: JsonFile = None,
) -> None:
    """Time HSTU's attention beside torch's, its encoder, and a training step on one rank.

    Published figures of peers stand beside where there are some for that size.

    Example: nestpipe bench hstu --parts attention --length 256,1024,4096 --head-dim 128,256

    Example: nestpipe bench hstu --parts encoder --batch 32 --lengths uniform --profile

    Example: nestpipe bench hstu --parts step --tasks 8 --batch 32 --head-dim 256 --items 50000000
    --positions 0 --plans nested,serial,sparse_dist --rounds 3
    """
    from nestpipe.bench.hstu.parts import HstuCase
    from nestpipe.config import build

    chosen = parts.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise ConfigError(f"there is no part {unknown[0]!r}; use {', '.join(PARTS)}")
    given: dict[str, Any] = {"batch": batch, "lengths": lengths, "heads": heads, "blocks": blocks}
    given |= {"dim": dim, "kind": kind, "attention": attention, "precision": precision}
    given |= {"pointwise": pointwise, "position_buckets": positions}
    given |= {"checkpoint_activations": checkpoint, "num_items": items, "rounds": rounds}
    given |= {"device": device, "peak_tflops": peak}
    cases = [
        build(HstuCase, {**given, "length": rows, "head_dim": width})
        for rows in _numbers("length", length)
        for width in _numbers("head_dim", head_dim)
    ]
    found = _Found(json, {"cases": [asdict(case) for case in cases]})
    if "attention" in chosen:
        _attention(cases, bias.split(","), found)
    if "encoder" in chosen:
        _encoder(cases, found, profile=profile)
    if "step" in chosen and tasks:
        own: dict[str, Any] = {"tasks": tasks, "users": users, "table_dim": table_dim}
        own |= {"stored": stored, "ranks": ranks, "retrieval": retrieval, "warm": warm}
        own |= {"micro_batches": micro_batches, "device_memory": device_memory, "steps": steps}
        _tasks(cases, own, plans.split(","), balance.split(","), found, limit)
    elif "step" in chosen:
        _step(cases, found)
    found.end()


@dataclass(frozen=True, slots=True)
class _Found:
    """All figures; each is written to the file as soon as it is known, so that a call may be
    stopped."""

    json: str | None
    figures: dict[str, Any]

    @property
    def printed(self) -> bool:
        """Whether tables go to standard output, where there is no JSON."""
        return self.json != STDOUT

    def add(self, part: str, *rows: dict[str, Any]) -> None:
        """One more reading."""
        self.figures.setdefault(part, []).extend(rows)
        if self.json is not None and self.printed:
            write_json(self.json, self.figures)

    def end(self) -> None:
        """Write the file once more: all figures are in."""
        if self.json is not None:
            write_json(self.json, self.figures)


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give numbers such as 256,4096") from None


def _attention(cases: Sequence[HstuCase], biases: Sequence[str], found: _Found) -> None:
    from dataclasses import fields

    from nestpipe.bench.hstu.parts import HstuCase, measure_attention
    from nestpipe.config import build

    names = [known.name for known in fields(HstuCase)]
    columns = ("forward", "backward", "both", "torch fwd", "torch both", "peer fwd", "peer bwd")
    table = figures_table(
        "attention, TFLOP/s",
        "peer: stated by NVIDIA for its kernel, H100; ms: both directions on the device, and as a "
        "call that the host awaits",
        "",
        (*columns, "ms", "call ms"),
    )
    for case in cases:
        for bias in biases:
            own = build(HstuCase, {**{n: getattr(case, n) for n in names}, "bias": bias})
            reading = measure_attention(own)
            of = {"length": case.length, "head_dim": case.head_dim, "bias": bias}
            found.add("attention", of | asdict(reading))
            about = f"{case.batch} x {case.length}, d {case.head_dim}, bias {bias}, {reading.form}"
            if reading.peer is not None:
                about += f" (torch: {reading.peer})"
            table.add_row(about, *_cells(reading))
    if found.printed:
        console().print(table)


def _cells(reading: AttentionReading) -> list[str]:
    forward, backward = reading.published or (None, None)
    figures = [reading.forward, reading.backward, reading.both]
    peers = [reading.peer_forward, reading.peer_both, forward, backward]
    times = [reading.both_ms, reading.call_both_ms]
    return [_figure(value) for value in (*figures, *peers, *times)]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _encoder(cases: Sequence[HstuCase], found: _Found, *, profile: bool) -> None:
    from nestpipe.bench.hstu.parts import measure_encoder

    table = figures_table("encoder, both directions", "", "", ("ms", "TFLOP/s", "MFU", "GB"))
    for case in cases:
        reading = measure_encoder(case, profile=profile)
        of = {"length": case.length, "head_dim": case.head_dim}
        found.add("encoder", of | asdict(reading))
        share = "" if reading.mfu is None else f"{100 * reading.mfu:.1f} %"
        about = f"{case.batch} x {case.length} {case.lengths}, {case.blocks} x {case.dim}"
        cells = (f"{reading.ms:.2f}", _figure(reading.tflops), share, _figure(reading.memory_gb))
        table.add_row(about, *cells)
        if profile and found.printed:
            _print_kernels(about, reading.kernels)
    if found.printed:
        console().print(table)


MOST_KERNELS = 24


def _print_kernels(about: str, kernels: Sequence[KernelTime]) -> None:
    """What a forward and backward pass spends on each group, and on its longest kernels."""
    from nestpipe.bench.hstu.parts import group_ms

    groups = ", ".join(f"{name} {ms:.2f} ms" for name, ms in group_ms(kernels).items())
    console().print(f"{about}: {groups}", markup=False)
    for kernel in kernels[:MOST_KERNELS]:
        line = f"{kernel.ms:8.3f} ms {kernel.calls:6.0f} x {kernel.group:12} {kernel.name[:70]}"
        console().print(line, markup=False, highlight=False)


def _step(cases: Sequence[HstuCase], found: _Found) -> None:
    from nestpipe.bench.hstu.parts import PUBLISHED_STEP, measure_step

    for case in cases:
        summary = measure_step(case)
        of = {"length": case.length, "head_dim": case.head_dim}
        found.add("step", of | asdict(summary))
        if found.printed:
            title = f"step of {case.batch} x {case.length}: {summary.step_ms:,.2f} ms"
            console().print(title, markup=False)
            console().print(summary_lines(summary), markup=False)
    if found.printed:
        console().print(PUBLISHED_STEP, markup=False)


def _tasks(
    cases: Sequence[HstuCase],
    given: dict[str, Any],
    plans: Sequence[str],
    balances: Sequence[str],
    found: _Found,
    limit_s: float,
) -> None:
    from dataclasses import fields

    from nestpipe.bench.hstu.parts import PUBLISHED_STEP, HstuCase
    from nestpipe.bench.hstu.tasks import TasksCase, compare_plans
    from nestpipe.config import build

    shared = {known.name for known in fields(TasksCase)} & {
        known.name for known in fields(HstuCase)
    }
    table = figures_table("step of several tasks", "", "", ("ms", "TFLOP/s", "MFU", "tokens", "GB"))
    for case in cases:
        own = {name: getattr(case, name) for name in shared} | given | {"items": case.num_items}
        variants = [
            build(TasksCase, {**own, "plan": plan, "balance": balance})
            for plan in plans
            for balance in balances
        ]
        for row in compare_plans(variants, limit_s):
            found.add("step", {"length": case.length, "head_dim": case.head_dim, **row})
            about = f"{row['plan']}, {row['ranks']} ranks, by {row['balance']}"
            table.add_row(about, *_task_cells(row))
    if found.printed:
        console().print(table)
        console().print(PUBLISHED_STEP, markup=False)


def _task_cells(row: dict[str, Any]) -> list[str]:
    if row["failed"]:
        return [f"failed: {row['failed']}", "", "", "", ""]
    share = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    figures = [_figure(row["tflops"]), share, f"{row['tokens']:,.0f}", _figure(row["memory_gb"])]
    return [f"{row['step_ms']:.2f}", *figures]
