"""`nestpipe bench hstu`: attention alone, the encoder, and a whole step of a sequence model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestpipe.cli.options import STDOUT, JsonFile, console, figures_table, summary_lines, write_json
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from nestpipe.bench.hstu.parts import AttentionReading, HstuCase, KernelTime

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
    """All figures; a file has each as soon as it is known, so that a call may be stopped."""

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
        """All are there."""
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
