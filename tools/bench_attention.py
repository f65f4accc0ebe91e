"""Times the fused attention on one GPU, beside torch's in the same run, by replays of CUDA graphs.

    python tools/bench_attention.py --out attention.json
    python tools/bench_attention.py --only forward,keys --widths 128
    python tools/bench_attention.py --only tiles --sizes 4x4096,32x512 --rep 10
    python tools/bench_attention.py --chosen --only check,nan,sdpa,forward,queries,keys,bias,whole
    python tools/bench_attention.py --only hopper --out hopper.json

`hopper` is the kernel of Hopper's warp groups: checked first, then each pass with each of its
tiles, then everything through autograd beside Triton's kernels and torch's. It is never part of a
run that does not name it. A wrong barrier waits for ever, so whatever runs it has a process with a
time limit, and readings show when they are taken.

Parts: check (against the plain form in float64), nan (where a result is not a number), sdpa, the
passes forward, queries, keys, only-keys and values, bias, whole (through autograd), jagged, short.
Passes try the tiles below and keep the fastest for the parts after them; with --chosen they try
the tiles that users get, alone. Every check, and the table of every width, has a process of its
own: a kernel that writes where it must not ends the process it is in. Keys and values go in one
pass, `keys`, or in two. A tile that does not compile or does not fit is reported and left out.
TFLOP/s count half of the square: 2 products forward, 7 for both directions, whatever the kernels
compute again. torch's figure is that of its fastest backend and layout. `tiles` stands for all
passes. Of each tile it is said whether results have the bits of the tile that users get.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.errors import TritonError

from nestpipe.kernels.attention import fused_launch as launch
from nestpipe.kernels.attention import hopper_launch
from nestpipe.kernels.attention.fused import attention_by_kernels
from nestpipe.kernels.attention.fused_launch import Problem, Tiles, TileShape
from nestpipe.kernels.attention.hopper_launch import GroupTile, GroupTiles
from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention

HEADS, BATCH, LENGTH = 4, 4, 4096
TILES_ALONE = "tiles"
POSITIONS, TIME_BUCKETS = 64, 32
PASSES = {"forward": 2, "queries": 3, "keys": 4, "only-keys": 3, "values": 2, "bias": 2}
"""Matrix products of each."""
PARTS = ["check", "nan", "sdpa", *PASSES, "whole", "jagged", "short"]
HOPPER = "hopper"
TRIED = "hopper tile"
BOUND = 1e-2
"""Of the largest value, for bfloat16."""
FAILURES = (RuntimeError, TritonError)
"""What a tile that does not fit raises; it must not end the others."""

# Queries, keys, warps, stages, registers. Compiled ahead for sm_90 (Triton 3.6): nearly none spills
# more than 100 bytes. With biases and heads of 256, 64x64 w8 s2 of queries and of keys spill
# nothing, where the chosen ones spill 90 bytes. Narrow tiles with short queues and 168 registers
# let three programs share a processor.
TILES: dict[tuple[str, int], list[TileShape]] = {
    ("forward", 128): [
        TileShape(64, 64, 4, 3, 168),
        TileShape(64, 64, 4, 3),
        TileShape(64, 64, 4, 4, 168),
        TileShape(128, 64, 8, 3),
        TileShape(128, 128, 8, 2),
        TileShape(128, 128, 8, 3),
    ],
    ("queries", 128): [
        TileShape(128, 64, 8, 3),
        TileShape(128, 64, 8, 2),
        TileShape(128, 32, 8, 3),
        TileShape(64, 64, 4, 2),
        TileShape(64, 64, 4, 3),
        TileShape(64, 32, 4, 3),
    ],
    ("keys", 128): [
        TileShape(32, 64, 4, 3),
        TileShape(32, 64, 4, 4),
        TileShape(32, 128, 8, 3),
        TileShape(64, 64, 8, 2),
    ],
    ("only-keys", 128): [
        TileShape(64, 64, 4, 2),
        TileShape(64, 64, 4, 3),
        TileShape(64, 128, 8, 2),
    ],
    ("values", 128): [
        TileShape(64, 64, 4, 3, 168),
        TileShape(64, 128, 8, 3),
        TileShape(128, 64, 4, 2),
    ],
    ("forward", 256): [
        TileShape(128, 64, 8, 2),
        TileShape(128, 32, 8, 4),
        TileShape(128, 32, 8, 3),
        TileShape(64, 32, 4, 3),
        TileShape(64, 64, 4, 2),
    ],
    ("queries", 256): [
        TileShape(128, 32, 8, 2),
        TileShape(64, 64, 8, 2),
        TileShape(64, 32, 8, 3),
        TileShape(64, 32, 4, 2),
    ],
    ("keys", 256): [
        TileShape(32, 64, 8, 2),
    ],
    ("only-keys", 256): [
        TileShape(32, 128, 8, 2),
        TileShape(64, 64, 8, 2),
        TileShape(32, 64, 4, 2),
        TileShape(32, 128, 8, 3),
    ],
    ("values", 256): [
        TileShape(64, 128, 8, 2),
        TileShape(32, 128, 8, 3),
        TileShape(32, 64, 4, 3),
        TileShape(64, 64, 4, 3),
    ],
}
SHORT_TILES = [
    TileShape(64, 64, 4, 3, 168),
    TileShape(64, 64, 4, 2, 168),
    TileShape(64, 32, 4, 3, 168),
    TileShape(128, 64, 8, 2),
    TileShape(128, 64, 8, 2, 128),
]
"""Tried for the forward pass of short sequences of width 128."""

# Rows of a tile, tiles of b and of c, whether own rows are in registers, whether programs stay.
# Compiled ahead for sm_90 (Triton 3.6); spills in bytes are those of the whole function.
HOPPER_TILES: dict[tuple[str, int], list[GroupTile]] = {
    ("forward", 64): [GroupTile(128, 3, 3), GroupTile(128, 2, 2), GroupTile(64, 4, 4)],
    ("queries", 64): [GroupTile(128, 3, 3), GroupTile(64, 4, 4)],
    ("keys", 64): [GroupTile(64, 4, 4), GroupTile(128, 3, 3)],
    ("forward", 128): [
        GroupTile(128, 2, 2),
        GroupTile(128, 2, 2, held=True),
        GroupTile(128, 2, 2, held=True, persistent=True),
        GroupTile(128, 2, 2, persistent=True),
        GroupTile(64, 4, 4),
    ],
    ("queries", 128): [
        GroupTile(128, 2, 2),
        GroupTile(128, 2, 2, persistent=True),
        GroupTile(64, 4, 4),
        GroupTile(64, 2, 2),
    ],
    ("keys", 128): [
        GroupTile(64, 4, 4),
        GroupTile(64, 2, 2),
        GroupTile(64, 4, 4, persistent=True),
        GroupTile(32, 6, 6),
    ],
    ("only-keys", 128): [GroupTile(64, 4, 4), GroupTile(128, 2, 2)],
    ("values", 128): [GroupTile(128, 2, 2), GroupTile(128, 2, 2, held=True)],
    ("forward", 256): [
        GroupTile(64, 2, 2),
        GroupTile(64, 2, 3),
        GroupTile(64, 2, 2, persistent=True),
        GroupTile(32, 4, 4),
    ],
    ("queries", 256): [GroupTile(64, 2, 1), GroupTile(32, 3, 3), GroupTile(32, 4, 2)],
    ("only-keys", 256): [GroupTile(64, 2, 1), GroupTile(32, 3, 3)],
    ("values", 256): [GroupTile(64, 2, 2), GroupTile(64, 2, 3), GroupTile(32, 4, 4)],
}
HOPPER_SIZES = ("4x4096", "32x4096", "32x256")

FIELDS = {
    "forward": "forward",
    "queries": "backward_queries",
    "keys": "backward_keys",
    "only-keys": "backward_keys",
    "values": "backward_values",
}


def tiles_to_try(part: str, width: int, *, chosen: bool) -> list[TileShape]:
    """All of the table above, or the one that users get; none where users have no such pass."""
    if not chosen:
        return TILES[part, width]
    tiles = Tiles.of(torch.bfloat16, width)
    absent = ("keys",) if tiles.backward_values else ("only-keys", "values")
    return [] if part in absent else [getattr(tiles, FIELDS[part])]


@dataclass(frozen=True, slots=True)
class World:
    """Inputs of one size, drawn once."""

    lengths: list[int]
    width: int
    biased: bool = False
    targets: list[int] | None = None
    window: int | None = None
    positions: int = POSITIONS

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(1)
        shape = (4, sum(self.lengths), HEADS, self.width)
        q, k, v, grad = torch.randn(*shape, generator=generator, device="cuda").bfloat16()
        return q, k, v, grad

    def bias(self) -> RelativeBias:
        if not self.biased:
            return RelativeBias()
        generator = torch.Generator("cuda").manual_seed(2)
        tables = torch.randn(
            HEADS, self.positions + TIME_BUCKETS, generator=generator, device="cuda"
        )
        position, times = tables.split([self.positions, TIME_BUCKETS], 1)
        return RelativeBias(position * 0.3, times * 0.3, self.times())

    def times(self) -> Tensor:
        """Sessions: most gaps are seconds to minutes, one in ten is hours to weeks."""
        generator = torch.Generator().manual_seed(3)
        parts = []
        for length in self.lengths:
            power = 9 * torch.rand(length, generator=generator)
            pause = torch.rand(length, generator=generator) < 0.1
            gaps = 2 ** torch.where(pause, 12 + power, power)
            parts.append(torch.cumsum(gaps.long(), 0))
        return torch.cat(parts).cuda()

    def arguments(self) -> dict[str, Any]:
        ends = [0, *itertools.accumulate(self.lengths)]
        return {
            "offsets_B": torch.tensor(ends, device="cuda"),
            "targets": None if self.targets is None else torch.tensor(self.targets, device="cuda"),
            "longest": max(self.lengths),
        }

    def problem(
        self, rows: tuple[Tensor, ...], bias: RelativeBias | None = None, *, hopper: bool = False
    ) -> Problem:
        about = self.arguments()
        q, k, v = rows[:3]
        bias = self.bias() if bias is None else bias
        prepared = launch.prepare_bias(bias, about["offsets_B"], about["longest"])
        rule = (float(LENGTH), self.width**-0.5, self.window, about["longest"])
        samples = (about["offsets_B"], about["targets"])
        return launch.make_problem((q, k, v), samples, prepared, rule, hopper=hopper)

    @property
    def name(self) -> str:
        """How many samples of which length."""
        return f"{len(self.lengths)}x{max(self.lengths)}"

    def flops(self, products: int) -> float:
        """Half of the square, `products` matrix products."""
        return products * HEADS * self.width * float(sum(n * n for n in self.lengths))


_aside: Path | None = None
"""In a process that may be killed: where records go as they are made."""


@dataclass(slots=True)
class Report:
    """What was found: lines for people, records for programs."""

    target: Path | None = None
    """Written at each merge, so that a call which is stopped leaves what it had."""
    lines: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    best: dict[tuple[str, int], TileShape] = field(default_factory=dict)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def merge(self, other: Report) -> None:
        self.lines += other.lines
        self.records += other.records
        self.best.update(other.best)
        self.keep()

    def keep(self) -> None:
        """Write the records, but for those that only tell which tiles are right."""
        if self.target is not None:
            records = [r for r in self.records if r["part"] != TRIED]
            figures = {"device": torch.cuda.get_device_name(), "records": records}
            self.target.write_text(json.dumps(figures, indent=1), encoding="utf-8")

    def add(self, part: str, **record: Any) -> None:
        self.records.append({"part": part, **record})
        print(part, record, flush=True)
        if _aside is not None and part != TRIED:
            with _aside.open("a", encoding="utf-8") as notes:
                notes.write(json.dumps(self.records[-1]) + "\n")


def graph_ms(work: Callable[[], Any], rep: int = 30) -> float:
    """Of one call on the device, by replays of a graph of many: the host's time is not in it."""
    return triton.testing.do_bench_cudagraph(work, rep=rep, return_mode="median")


def tflops(world: World, products: int, ms: float) -> float:
    """Of `products` matrix products over half of the square."""
    return world.flops(products) / ms / 1e9


def pass_of(part: str, problem: Problem, grad: Tensor) -> Callable[[], Any]:
    """One kernel, ready to be timed."""
    tiles, biased = problem.tiles, problem.bias.half_position_HP is not None
    grad_k, grad_v = torch.empty_like(problem.k_THA), torch.empty_like(problem.v_THV)

    def half(tile: TileShape | None, *grads: Tensor | None) -> Callable[[], Any]:
        def work() -> Any:
            launch.run_backward_part(problem, grad, tile or tiles.backward_keys, *grads)
            return grads

        return work

    def bias(*, twin: bool) -> Callable[[], Any]:
        _, sums_HXQ = launch.run_backward_queries(problem, grad, sum_scores=True)
        assert sums_HXQ is not None
        tables = (problem.bias.half_position_HP, problem.bias.half_time_HQ)
        return lambda: launch.run_bias_gradients(problem, grad, sums_HXQ, tables, twin=twin)

    return {
        "forward": lambda: lambda: launch.run_forward(problem),
        "queries": lambda: lambda: launch.run_backward_queries(problem, grad, sum_scores=biased),
        "keys": lambda: half(tiles.backward_keys, grad_k, grad_v),
        "only-keys": lambda: half(tiles.backward_keys, grad_k, None),
        "values": lambda: half(tiles.backward_values, None, grad_v),
        "bias": lambda: bias(twin=False),
        "twin": lambda: bias(twin=True),
    }[part]()


def try_tile(job: tuple[str, int, bool, TileShape]) -> str | None:
    """In a process of its own: fills the compiler's cache. What went wrong, or None."""
    part, width, biased, tile = job
    try:
        world = World([300, 70], width, biased)
        rows = world.rows()
        problem = world.problem(rows).with_tiles(**{FIELDS[part]: tile})
        pass_of(part, problem, rows[3])()
        torch.cuda.synchronize()
    except FAILURES as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return None


def compile_ahead(jobs: list[Any], workers: int, limit_s: float) -> set[Any]:
    """The jobs that work; the others are reported and left out."""
    good: set[Any] = set()
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(try_tile, job): job for job in jobs}
    try:
        for done in as_completed(futures, timeout=limit_s):
            job = futures[done]
            problem = "process died" if done.exception() else done.result()
            if problem is None:
                good.add(job)
            else:
                print("left out", job, problem, flush=True)
    except TimeoutError:
        print("left out: tiles that take too long to compile", flush=True)
    _end(pool)
    return good


def jobs_of(
    parts: list[str], widths: list[int], *, chosen: bool
) -> list[tuple[str, int, bool, TileShape]]:
    """Without bias for each tile; with biases for each, too, where that part is wanted."""
    jobs = []
    for part, width in TILES:
        for tile in tiles_to_try(part, width, chosen=chosen) if width in widths else []:
            if part in parts:
                jobs.append((part, width, False, tile))
            if "bias" in parts:
                jobs.append((part, width, True, tile))
    if "short" in parts and 128 in widths and not chosen:
        jobs += [("forward", 128, False, tile) for tile in SHORT_TILES]
    return list(dict.fromkeys(jobs))


def results_of(work: Callable[[], Any]) -> list[Tensor]:
    """Copies of what a pass writes."""
    found = work()
    found = found if isinstance(found, tuple) else (found,)
    return [x.clone() for x in found if x is not None]


def sweep(
    part: str, world: World, good: list[Any], report: Report, rep: int
) -> tuple[TileShape, float] | None:
    """The fastest tile of a pass and its time."""
    rows, products = world.rows(), PASSES[part]
    problem = world.problem(rows)
    known = results_of(pass_of(part, problem, rows[3])) if chosen_tile(part, world.width) else []
    found: list[tuple[float, TileShape]] = []
    for job in good:
        if job[:3] != (part, world.width, world.biased):
            continue
        tile = job[3]
        work = pass_of(part, problem.with_tiles(**{FIELDS[part]: tile}), rows[3])
        try:
            bits = results_of(work)
            ms = graph_ms(work, rep)
        except FAILURES as error:
            print("left out", part, tile, str(error).splitlines()[0][:150], flush=True)
            continue
        found.append((ms, tile))
        # Sums by bucket have another shape where a block has other queries.
        pairs = zip(bits[:1] if part == "queries" else bits, known, strict=False)
        same = all(torch.equal(a, b) for a, b in pairs) if known else None
        report.add(
            part, size=world.name, width=world.width, biased=world.biased, tile=asdict(tile),
            ms=round(ms, 4), executed_tflops=round(tflops(world, products, ms), 1), same_bits=same,
        )  # fmt: skip
        mark = " <- chosen" if tile == chosen_tile(part, world.width) else ""
        rate, shape = tflops(world, products, ms), shown(tile)
        report.say(f"  {part:9} {shape:22} {1e3 * ms:7.1f} us {rate:5.0f} same {same}{mark}")
    if not found:
        return None
    ms, tile = min(found, key=lambda pair: pair[0])
    report.best[part + "+bias" * world.biased, world.width] = tile
    return tile, ms


def chosen_tile(part: str, width: int) -> TileShape | None:
    """The tile that users get; None: they have no such pass."""
    found = tiles_to_try(part, width, chosen=True)
    return found[0] if found else None


def shown(tile: TileShape) -> str:
    """A tile in few letters."""
    registers = f" r{tile.registers}" if tile.registers else ""
    return f"{tile.queries}x{tile.keys} w{tile.warps} s{tile.stages}{registers}"


def time_sdpa(world: World) -> dict[str, tuple[float, float]]:
    """Milliseconds forward, and forward with backward, of each backend and layout."""
    found = {}
    for layout, backend in itertools.product(
        ["rows first", "heads first"],
        [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    ):
        shape = (len(world.lengths), world.lengths[0], HEADS, -1)
        rows = [x.view(shape).transpose(1, 2) for x in world.rows()]
        if layout == "heads first":
            rows = [x.contiguous() for x in rows]
        q, k, v = (x.detach().requires_grad_() for x in rows[:3])

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, grad: Tensor = rows[3]) -> None:
            torch.autograd.grad(forward(q, k, v), (q, k, v), grad)

        try:
            with sdpa_kernel(backend):
                with torch.no_grad():
                    ms = graph_ms(forward)
                found[f"{backend.name} {layout}"] = ms, graph_ms(both)
        except FAILURES as error:
            print("left out", backend, layout, str(error).splitlines()[0][:150], flush=True)
    return found


def report_sdpa(world: World, report: Report) -> None:
    """All of torch's, then the fastest of each direction."""
    found = time_sdpa(world)
    for name, (forward_ms, both_ms) in found.items():
        report.add("sdpa", width=world.width, name=name, forward_ms=forward_ms, both_ms=both_ms)
        report.say(f"d={world.width} SDPA {name}: {_rates(world, forward_ms, both_ms)}")
    if found:
        best = _rates(world, min(f for f, _ in found.values()), min(b for _, b in found.values()))
        report.say(f"{world.name} d={world.width} SDPA best: {best}")


def time_whole(world: World, report: Report, *, hopper: bool = False) -> None:
    """Through autograd with the tiles that users get."""
    q, k, v, grad = world.rows()
    bias = world.bias()
    tables = [t for t in (bias.position_HP, bias.time_HQ) if t is not None]
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *tables)]
    q, k, v = leaves[:3]
    if tables:
        bias = RelativeBias(leaves[3], leaves[4], bias.times_T)
    about = world.arguments()

    def forward() -> Tensor:
        return attention_by_kernels(
            q, k, v, about["offsets_B"], norm=float(LENGTH), scale=world.width**-0.5,
            bias=bias, longest=about["longest"], hopper=hopper,
        )  # fmt: skip

    with torch.no_grad():
        forward_ms = graph_ms(forward)
    both_ms = graph_ms(lambda: torch.autograd.grad(forward(), leaves, grad))
    form = "hopper" if hopper else "fused"
    report.add(
        "whole", form=form, size=world.name, width=world.width, biased=world.biased,
        forward_ms=forward_ms, both_ms=both_ms,
    )  # fmt: skip
    biases = " both biases" if world.biased else ""
    name = f"{world.name} d={world.width}{biases} WHOLE {form} with default tiles"
    report.say(f"{name}: {_rates(world, forward_ms, both_ms)}")


def tables_of(
    width: int, biased: bool, parts: list[str], good: list[Any], sizes: list[list[int]], rep: int
) -> Report:
    """One table for each size, in one process."""
    report = Report()
    for lengths in sizes:
        report.merge(table_of(World(lengths, width, biased), parts, good, rep))
    return report


def table_of(world: World, parts: list[str], good: list[Any], rep: int) -> Report:
    """Full-length sequences: torch, then every pass with its fastest tile."""
    report, width, biased = Report(), world.width, world.biased
    name = f"{world.name} d={width}{' both biases' if biased else ''}"
    if "whole" in parts:
        time_whole(world, report)
    if not biased and "sdpa" in parts:
        report_sdpa(world, report)
    times: dict[str, float] = {}
    for part in PASSES:
        if part == "bias" or not (part in parts or biased):
            continue
        if fastest := sweep(part, world, good, report, rep):
            tile, times[part] = fastest
            rate, shape = tflops(world, PASSES[part], times[part]), shown(tile)
            report.say(f"{name} {part}: {times[part]:.3f} ms, {rate:.0f} executed, {shape}")
    if biased:
        rows = world.rows()
        best = best_problem(world, rows, report)
        times["bias"], twin = (graph_ms(pass_of(p, best, rows[3])) for p in ("bias", "twin"))
        report.add("bias", width=width, ms=times["bias"], twin_ms=twin)
        report.say(f"{name} bias: {times['bias']:.3f} ms, its twin {twin:.3f} ms")
    both = total_ms(times)
    if both is not None:
        report.say(f"{name} FUSED: {_rates(world, times['forward'], both)}")
    return report


def total_ms(times: dict[str, float]) -> float | None:
    """Of all passes; keys and values in one pass or in two, whichever is faster."""
    never = float("inf")
    two = times.get("only-keys", never) + times.get("values", never)
    together = min(times.get("keys", never), two)
    total = together + times.get("forward", never) + times.get("queries", never)
    return total + times.get("bias", 0.0) if total < never else None


def best_problem(world: World, rows: tuple[Tensor, ...], report: Report) -> Problem:
    """With the fastest tiles so far; keys and values in one pass or two, as users have them."""
    problem = world.problem(rows)
    halves = ("keys",) if problem.tiles.backward_values is None else ("only-keys", "values")
    best = {
        FIELDS[part]: tile
        for (part, width), tile in report.best.items()
        if width == world.width and part.endswith("+bias") == world.biased
        for part in [part.removesuffix("+bias")]
        if part in ("forward", "queries", *halves)
    }
    return problem.with_tiles(**best)


def _rates(world: World, forward_ms: float, both_ms: float) -> str:
    return f"{tflops(world, 2, forward_ms):.0f} forward, {tflops(world, 7, both_ms):.0f} both"


def other_sizes(part: str, width: int, best: dict[tuple[str, int], TileShape]) -> Report:
    """Jagged or short sequences, with the fastest tiles of the sweeps."""
    report = Report(best=best)
    generator = torch.Generator().manual_seed(4)
    jagged = torch.randint(256, LENGTH + 1, (32,), generator=generator).tolist()
    sizes = {
        "jagged": {"32 of 256..4096": jagged, "32 of 4096": [LENGTH] * 32},
        "short": {"32 of 256": [256] * 32, "512 of 256": [256] * 512, "512 of 200": [200] * 512},
    }[part]
    for name, biased in itertools.product(sizes, (False, True)):
        world = World(sizes[name], width, biased)
        rows = world.rows()
        problem = best_problem(world, rows, report)
        halves = ["keys"] if problem.tiles.backward_values is None else ["only-keys", "values"]
        passes = ["forward", "queries", *halves, *(["bias"] if biased else [])]
        times = {p: graph_ms(pass_of(p, problem, rows[3])) for p in passes}
        report.add(part, width=width, name=name, biased=biased, ms=times)
        rates = _rates(world, times["forward"], sum(times.values()))
        report.say(f"d={width} {name}{' both biases' if biased else ''}: {rates}")
    return report


def sweep_short() -> Report:
    """Forward tiles for short sequences, and whether the block of queries changes a bit."""
    report = Report()
    for lengths in ([256] * 512, [200] * 512):
        world = World(lengths, 128)
        rows = world.rows()
        first = None
        for tile in SHORT_TILES:
            problem = world.problem(rows).with_tiles(forward=tile)
            try:
                out = launch.run_forward(problem)
                ms = graph_ms(pass_of("forward", problem, rows[3]))
            except FAILURES as error:
                print("left out", tile, str(error).splitlines()[0][:150], flush=True)
                continue
            first = out if first is None else first
            same, rate = torch.equal(out, first), tflops(world, 2, ms)
            report.add("short tile", lengths=lengths[0], tile=asdict(tile), ms=ms, same_bits=same)
            shape = f"{tile.queries}x{tile.keys} w{tile.warps} s{tile.stages} r{tile.registers}"
            report.say(f"d=128 512 of {lengths[0]}: {rate:.0f} forward, {shape}, same {same}")
    return report


SMALL = World([128, 63, 32, 64], 16, True, None, 5)
NAN_CASES: dict[str, tuple[World, int, bool, TileShape | None]] = {
    "as found": (SMALL, 32, True, None),
    "no window": (replace(SMALL, window=None), 32, True, None),
    "same widths": (SMALL, 16, True, None),
    "wider": (replace(SMALL, width=64), 64, True, None),
    "no bias": (replace(SMALL, biased=False), 32, True, None),
    "no bias, same widths": (replace(SMALL, biased=False), 16, True, None),
    "narrow values": (replace(SMALL, width=64), 16, True, None),
    "memory not filled": (SMALL, 32, False, None),
    "keys 64x64 w4 s2": (SMALL, 32, True, TileShape(64, 64, 4, 2)),
}
"""Small samples with small windows; width of values, whether new memory holds NaN, tile of keys."""


def find_nan(name: str) -> Report:
    """Which results of a variant are not numbers, and how far off the others are."""
    world, value_width, fill, tile = NAN_CASES[name]
    torch.use_deterministic_algorithms(fill)
    report = Report()
    report.say(f"nan, {name}: {_nan_counts(world, value_width, tile)}")
    return report


def _nan_counts(world: World, value_width: int, tile: TileShape | None) -> str:
    q, k, v, grad = world.rows()
    v, grad = (torch.cat([x, x], 2)[:, :, :value_width].contiguous() for x in (v, grad))
    bias = RelativeBias(world.bias().position_HP)
    problem = world.problem((q, k, v), bias)
    if tile is not None:
        problem = problem.with_tiles(backward_keys=tile)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    about = world.arguments()
    wanted = hstu_attention(
        leaves[0], leaves[1], leaves[2], about["offsets_B"], norm=float(LENGTH),
        scale=world.width**-0.5,
        bias=RelativeBias(None if bias.position_HP is None else bias.position_HP.double()),
        max_attention=world.window,
    )  # fmt: skip
    wanted.backward(grad.double())
    found = []
    for _ in range(2):
        grad_q, _ = launch.run_backward_queries(problem, grad)
        found += [launch.run_forward(problem), grad_q, *launch.run_backward_keys(problem, grad)]
    parts = []
    for got, right in zip(found, [wanted.detach(), *(x.grad for x in leaves)] * 2, strict=True):
        assert right is not None
        rows = torch.unique(got.isnan().nonzero()[:, 0]).tolist()
        error = float((got.double() - right).nan_to_num().abs().max() / right.abs().max())
        parts.append(f"{int(got.isnan().sum())} rows {rows[:3]}..{rows[-3:]} else {error:.1e}")
    return "; ".join(parts)


CHECKS = [
    World([700, 0, 1, 333], 128),
    World([700, 0, 1, 333], 128, True, [100, 0, 1, 33]),
    World([700, 128], 64, True, None, 100),
    World([500, 256, 64], 256, True, [100, 0, 64], 200),
    World([300, 64], 16, True),
    World([1500], 128, True, None, None, 1000),
]


def check(world: World, *, hopper: bool = False) -> Report:
    """Output and gradients against the plain form in float64; the same bits when run again."""
    torch.use_deterministic_algorithms(hopper, warn_only=True)  # then new memory holds NaN
    report = Report()
    q, k, v, grad = world.rows()
    bias = world.bias()
    leaves = [q, k, v, *(t for t in (bias.position_HP, bias.time_HQ) if t is not None)]

    def results(form: Any, dtype: torch.dtype | None) -> list[Tensor]:
        taken = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        tables = RelativeBias()
        if world.biased:
            tables = RelativeBias(taken[3], taken[4], world.times())
        about = world.arguments()
        out = form(
            *taken[:3], about["offsets_B"], norm=64.0, scale=world.width**-0.5,
            mask=Mask(about["targets"]), bias=tables, max_attention=world.window,
            longest=about["longest"],
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, taken, grad.to(out.dtype))]

    kernels = partial(attention_by_kernels, hopper=hopper)
    found, again = results(kernels, None), results(kernels, None)
    wanted = results(hstu_attention, torch.float64)
    errors = [
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, wanted, strict=True)
    ]
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    ok = same and max(errors) <= BOUND
    name = "hopper check" if hopper else "check"
    report.add(name, world=asdict(world), errors=errors, same_bits=same, ok=ok)
    shown = " ".join(f"{e:.1e}" for e in errors)
    verdict = "ok" if ok else "WRONG" if same else "WRONG, and other bits when run again"
    report.say(f"{name} d={world.width} {world.lengths}: {verdict} {shown}")
    return report


HOPPER_CHECKS = [
    World([700, 0, 1, 333], 128),
    World([128, 64, 129, 256, 65], 64, False, [0, 64, 1, 200, 3]),
    World([700, 0, 1, 333], 128, True, [100, 0, 1, 33]),
    World([700, 128], 64, True, None, 100),
    World([500, 256, 64], 256, False, [100, 0, 64], 200),
    World([700, 31], 256, True),
    World([4096, 3000], 128),
]


def hopper_pass(
    part: Any, problem: Problem, tile: GroupTile, grad: Tensor
) -> Callable[[], list[Tensor]]:
    """One start of the kernel; with biases that of the queries sums scores' gradients, too."""
    biased = problem.bias.half_position_HP is not None
    sums = hopper_launch.bucket_sums(problem) if biased and part == "queries" else None
    return partial(hopper_launch.run_part, problem, part, tile, grad, sums)


def hopper_errors(part: Any, world: World, tiles: list[GroupTile]) -> list[float]:
    """Of each tile, the worst error beside Triton's kernels; NaN if bits change when run again."""
    rows = world.rows()
    problem, grad = world.problem(rows, hopper=True), rows[3]
    known = results_of(pass_of(part, world.problem(rows), grad))
    errors = []
    for tile in tiles:
        work = hopper_pass(part, problem, tile, grad)
        found, again = [x.clone() for x in work()], work()
        same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        # Triton's pass of queries also sums scores' gradients by bucket, which come last.
        pairs = zip(found, known, strict=False)
        apart_by = [(a - b).float().abs().max() / b.float().abs().max() for a, b in pairs]
        errors.append(float(torch.stack(apart_by).max()) if same else float("nan"))
    return errors


def try_hopper(part: str, width: int, biased: bool, tile: GroupTile) -> Report:
    """Compiles a pass and compares it with Triton's; it is good if there is a record of it."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    report, world = Report(), World([700, 1, 0, 333], width, biased)
    (error,) = hopper_errors(part, world, [tile])
    name = f"d={width}{' biased' if biased else ''} {part} {shown_group(tile)}"
    if error <= 2 * BOUND:  # both are rounded
        report.add(TRIED, key=(part, width, biased, tile), error=error)
    else:
        report.say(f"LEFT OUT {name}: {error:.1e} beside Triton's kernels")
    return report


def time_hopper(part: Any, width: int, biased: bool, tiles: list[GroupTile]) -> Report:
    """Each tile of one pass at each size, beside Triton's kernel; lines show as they are found."""
    report = Report()
    for size in HOPPER_SIZES:
        samples, length = map(int, size.split("x"))
        world = World([length] * samples, width, biased)
        rows, name = world.rows(), f"{size} d={width}{' biased' if biased else ''} {part:9}"
        triton_ms = graph_ms(pass_of(part, world.problem(rows), rows[3]), 10)
        problem = world.problem(rows, hopper=True)
        for tile in tiles:
            work = hopper_pass(part, problem, tile, rows[3])
            ms = graph_ms(work, 10)
            rates = [tflops(world, PASSES[part], x) for x in (ms, triton_ms)]
            report.add(
                "hopper pass", size=size, width=width, biased=biased, name=part, ms=ms,
                tile=asdict(tile), triton_ms=triton_ms,
            )  # fmt: skip
            line = f"{name} {shown_group(tile):14} {rates[0]:5.0f}, Triton's {rates[1]:5.0f}"
            report.say(line)
            print(line, flush=True)
    return report


def time_hopper_whole(width: int, biased: bool) -> Report:
    """Through autograd with the tiles that users get: the kernel, Triton's, torch's."""
    report = Report()
    for size in HOPPER_SIZES:
        samples, length = map(int, size.split("x"))
        world = World([length] * samples, width, biased)
        for hopper in (True, False):
            time_whole(world, report, hopper=hopper)
            print(report.lines[-1], flush=True)
        if not biased:
            report_sdpa(world, report)
            print(report.lines[-1], flush=True)
    return report


def shown_group(tile: GroupTile) -> str:
    """A tile in few letters."""
    words = " held" * tile.held + " stays" * tile.persistent
    return f"{tile.rows} {tile.b_stages}+{tile.c_stages}{words}"


def hopper_jobs(widths: list[int]) -> list[tuple[str, int, bool, GroupTile]]:
    """Every tile without bias; with biases those that users get and the narrow ones."""
    jobs = [
        (part, width, False, tile)
        for (part, width), tiles in HOPPER_TILES.items()
        for tile in tiles
        if width in widths
    ]
    for part, width in HOPPER_TILES:
        tiles = GroupTiles.of(width, timed=True)
        absent = ("keys",) if tiles.values else ("only-keys", "values")
        field = {"only-keys": "keys"}.get(part, part)
        if width in widths and part not in absent:
            narrow = [tile for tile in HOPPER_TILES[part, width] if tile.rows == 32]
            jobs += [(part, width, True, tile) for tile in (getattr(tiles, field), *narrow)]
    return list(dict.fromkeys(jobs))


def run_hopper(options: argparse.Namespace, report: Report) -> None:
    """Checks, then tiles side by side, then their times one after the other."""
    if HOPPER not in options.only:
        return
    began = time.perf_counter()
    jobs = hopper_jobs(options.widths)
    checks = [(100, partial(check, hopper=True), world) for world in HOPPER_CHECKS]
    tries = [(100, try_hopper, *job) for job in jobs]
    with ThreadPoolExecutor(options.workers) as pool:
        for found in pool.map(lambda job: apart(*job), [*checks, *tries]):
            report.merge(found)
            print("\n".join(found.lines), flush=True)
    good = [r["key"] for r in report.records if r["part"] == TRIED]
    report.records = [r for r in report.records if r["part"] != TRIED]
    print(f"hopper: {len(good)} of {len(jobs)} tiles are right", flush=True)
    works: list[tuple[Any, ...]] = [
        (60, time_hopper_whole, width, biased)
        for width, biased in itertools.product(options.widths, (False, True))
    ]
    for key in dict.fromkeys(job[:3] for job in good):
        tiles = [job[3] for job in good if job[:3] == key]
        works.append((20 + 6 * len(tiles), time_hopper, *key, tiles))
    for work in works:
        if time.perf_counter() - began + work[0] > options.limit:
            report.say(f"LEFT OUT for want of time: {work[1].__name__} {work[2:5]}")
        else:
            report.merge(apart(*work))


def report_of(aside: Path, work: Callable[..., Report], *arguments: Any) -> Report:
    """What `work` reports, or why it could not; not every error can leave its process."""
    global _aside
    _aside = aside
    try:
        return work(*arguments)
    except Exception as error:  # noqa: BLE001  one part must not end the others
        return failed(work, arguments, error)


def failed(work: Callable[..., Report], arguments: tuple[Any, ...], error: Exception) -> Report:
    """One line, which also shows at once."""
    report, text = Report(), (str(error) or "no answer in time").splitlines()[0][:150]
    name = getattr(work, "func", work).__name__
    report.say(f"FAILED {name} {arguments[:4]}: {type(error).__name__}: {text}")
    print(report.lines[-1], flush=True)
    return report


def apart(limit_s: float, work: Callable[..., Report], *arguments: Any) -> Report:
    """What `work` reports, from a process of its own; if that fails, a line that says so, and what
    it had found before."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with tempfile.NamedTemporaryFile(prefix="attention-") as notes:
        aside = Path(notes.name)
        try:
            return pool.submit(report_of, aside, work, *arguments).result(limit_s)
        except (BrokenProcessPool, TimeoutError) as error:
            report = failed(work, arguments, error)
            lines = aside.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be cut
            report.records += [json.loads(line) for line in lines]
            return report
        finally:
            _end(pool)


def _end(pool: ProcessPoolExecutor) -> None:
    """Kill its process, which may wait for a kernel that never ends."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Checked options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas between")
    parser.add_argument("--widths", default="128,256", help="head widths, with commas between")
    parser.add_argument("--chosen", action="store_true", help="only the tiles that users get")
    parser.add_argument("--out", type=Path, help="file for all figures as JSON")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile tiles")
    parser.add_argument("--compile-limit", type=float, default=150, help="seconds for all tiles")
    parser.add_argument("--limit", type=float, default=560, help="seconds for part hopper")
    parser.add_argument("--sizes", default="4x4096", help="of the tables: samples x rows")
    parser.add_argument("--rep", type=int, default=30, help="ms of one of ten readings of a tile")
    options = parser.parse_args(arguments)
    options.only = options.only.replace(TILES_ALONE, ",".join(p for p in PASSES if p != "bias"))
    options.sizes = [
        [int(rows)] * int(samples)
        for samples, rows in (size.split("x") for size in options.sizes.split(","))
    ]
    options.only, options.widths = (
        options.only.split(","),
        [int(w) for w in options.widths.split(",")],
    )
    if unknown := set(options.only) - {*PARTS, HOPPER}:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}")
    known = {64, 128, 256} if options.only == [HOPPER] else {128, 256}
    if unknown := set(options.widths) - known:
        parser.error(f"no tiles for width {min(unknown)}; choose from {sorted(known)}")
    return options


def main(arguments: list[str]) -> int:
    """Runs the parts in order and prints the table last."""
    options = parse(arguments)
    report, began = Report(options.out), time.perf_counter()
    if not torch.cuda.is_available():
        print("torch finds no GPU on this machine; run this where there is one", file=sys.stderr)
        return 2
    for step in (run_checks, run_hopper, run_tables, run_sizes):
        step(options, report)
        report.keep()
    print(f"\n{torch.cuda.get_device_name()}, {time.perf_counter() - began:.0f} s, TFLOP/s")
    print("\n".join(report.lines))
    return 0


def run_checks(options: argparse.Namespace, report: Report) -> None:
    """Side by side: nothing is timed."""
    jobs: list[tuple[Any, ...]] = []
    if "check" in options.only:
        jobs += [(check, world) for world in CHECKS]
    if "nan" in options.only:
        jobs += [(find_nan, name) for name in NAN_CASES]
    with ThreadPoolExecutor(options.workers) as pool:
        for found in pool.map(lambda job: apart(60, *job), jobs):
            report.merge(found)
            print("\n".join(found.lines), flush=True)


def run_tables(options: argparse.Namespace, report: Report) -> None:
    """Compiles side by side, then times one table after the other."""
    parts, widths = options.only, options.widths
    jobs, began = jobs_of(parts, widths, chosen=options.chosen), time.perf_counter()
    done = compile_ahead(jobs, options.workers, options.compile_limit) if jobs else set()
    good = [job for job in jobs if job in done]
    print(f"compiled {len(good)} of {len(jobs)} in {time.perf_counter() - began:.0f} s", flush=True)
    if not {"sdpa", "whole", *PASSES} & set(parts):
        return
    for width, biased in itertools.product(widths, [False, True]):
        if not biased or "bias" in parts:
            given = (width, biased, parts, good, options.sizes, options.rep)
            report.merge(apart(120, tables_of, *given))


def run_sizes(options: argparse.Namespace, report: Report) -> None:
    """Jagged and short sequences."""
    if "short" in options.only and 128 in options.widths and not options.chosen:
        report.merge(apart(60, sweep_short))
    for part, width in itertools.product(("jagged", "short"), options.widths):
        if part in options.only:
            report.merge(apart(60, other_sizes, part, width, report.best))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
