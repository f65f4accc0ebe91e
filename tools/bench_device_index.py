#!/usr/bin/env python3
"""Keys and rows in device memory: build, check and time every kernel on one GPU.

    PYTHONPATH=src python tools/bench_device_index.py --out device_index.json

The work is that of DynamicEmb's published benchmark: 10 tables of 1,677,721 rows, 104,857 samples,
one key each, keys by a power law of 1.05, 128 float32 weights a row. Times are medians of CUDA
events over batches that rotate. Constants of `row_sums.cu` are tried in copies of the source.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from nestpipe.embedding.optimizers import RowOptimizer, row_optimizer
from nestpipe.kernels import build
from nestpipe.kernels.index import library
from nestpipe.kernels.index.dedup import Owners, dedup
from nestpipe.kernels.index.device_index import DeviceIndex, FirstValues, KeyCells
from nestpipe.kernels.index.segments import (
    Pooling,
    TermGradients,
    look_up,
    plain_segment_sums,
    sort_segments,
    update_segments,
)
from nestpipe.kernels.rows.cuda import aligned_rows
from nestpipe.kernels.rows.native import OptimizerStruct, optimizer_struct

# Shapes: N keys of a batch, S slots, O outputs, D weights of a row, W weights and state

CUDA = torch.device("cuda")
TABLES, SAMPLES, ROWS, DIM = 10, 104_857, 1_677_721, 128
BATCHES, WARM, TIMES = 6, 6, 30
MARKS_MS = {
    "find_or_insert": 0.05,
    "dedup, 8 ranks": 0.2,
    "step, sgd": 0.8,
    "step, adam": 1.1,
}
"""What each is to stay below."""
OPTIMIZERS = ("sgd", "adam", "rowwise_adagrad", "adagrad")
PARTS = (
    *("limits", "index", "evictions", "segments"),
    *(*OPTIMIZERS, "variants", "pooled", "many tables"),
)
VARIANTS = [
    {"kMostAtOnce": at_once, "kLeastBlocks": blocks}
    for at_once, blocks in ((4, 4), (4, 5), (2, 4), (2, 5), (2, 6), (1, 6), (1, 8))
]


@dataclass(frozen=True, slots=True)
class World:
    """A pool with all rows in it, and batches of keys."""

    index: DeviceIndex
    cells: KeyCells
    batches: list[Tensor]
    slots: list[Tensor]
    """[batch] of each key"""


def powers(amount: int, rows: int, draw: torch.Generator) -> Tensor:
    """Keys by a power law of 1.05, as the peers draw them."""
    share = torch.rand(amount, generator=draw, device=CUDA, dtype=torch.float64)
    return (((rows**-0.05 - 1) * share + 1) ** -20).long().sub_(1).clamp_(0, rows - 1)


def even_cells(tables: int, each: int) -> KeyCells:
    """Tables with as many keys each."""
    return KeyCells(torch.arange(1, tables + 1, device=CUDA) * each)


def make_world(tables: int = TABLES, each: int = SAMPLES, rows: int = ROWS) -> World:
    """All rows are in the index, as in a table that fits."""
    draw = torch.Generator(CUDA).manual_seed(0)
    index = DeviceIndex(tables * rows, CUDA)
    chunk = min(rows, 500_000)
    for start in range(0, rows, chunk):
        keys_N = torch.arange(start, min(start + chunk, rows), device=CUDA)
        index.find_or_insert(keys_N.repeat(tables), even_cells(tables, len(keys_N)), 0)
    cells = even_cells(tables, each)
    batches = [torch.cat([powers(each, rows, draw) for _ in range(tables)]) for _ in range(BATCHES)]
    slots = [index.find_or_insert(keys_N, cells, 1).slots_N for keys_N in batches]
    assert int(index.counters[0]) == 0, "some rows are not in the index"
    assert all(bool((slots_N >= 0).all()) for slots_N in slots), "some keys have no slot"
    return World(index, cells, batches, slots)


def timed(work: Callable[[int], object], times: int = TIMES) -> float:
    """Milliseconds of one call, the median; the call gets the number of a batch."""
    for i in range(WARM):
        work(i % BATCHES)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    ends[0].record()
    for i in range(times):
        work(i % BATCHES)
        ends[i + 1].record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(ends))


def replayed(work: Callable[[int], object]) -> float:
    """The same where the device has no launch to wait for: a CUDA graph for each batch."""
    for i in range(BATCHES):
        work(i)
    torch.cuda.synchronize()
    graphs: list[torch.cuda.CUDAGraph] = []
    for i in range(BATCHES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(i)
        graphs.append(graph)
    return timed(lambda i: graphs[i].replay())


def submitted(work: Callable[[int], object]) -> float:
    """Milliseconds that the host takes to submit one call."""
    torch.cuda.synchronize()
    spent: list[float] = []
    for i in range(TIMES):
        began = time.perf_counter()
        work(i % BATCHES)
        spent.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
    return median(spent)


def struct_of(optimizer: RowOptimizer, step: int = 1) -> OptimizerStruct:
    """The optimizer at a step, for kernels."""
    return optimizer_struct(
        optimizer.name,
        lr=optimizer.lr,
        eps=optimizer.eps,
        betas=optimizer.betas,
        adam_scale=optimizer.adam_scale(step),
        scale=optimizer.scale,
    )


def drawn(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, device=CUDA)


Figures = dict[str, float]


def time_limits() -> Figures:
    """What the memory can do."""
    source, target = drawn(1 << 28), drawn(1 << 28)
    ms = timed(lambda _: target.copy_(source))
    return {"copy of 1 GiB, TB/s": 2 * source.numel() * 4 / ms * 1e-9}


def time_index(world: World) -> Figures:
    """Every call of the index."""
    index, cells = world.index, world.cells
    found: Figures = {}
    batch = count(2)

    def find_or_insert(i: int) -> None:
        index.find_or_insert(world.batches[i], cells, next(batch))

    found["find_or_insert"] = replayed(find_or_insert)
    found["find_or_insert, eager"] = timed(find_or_insert)
    found["find_or_insert, host"] = submitted(find_or_insert)
    found["find"] = replayed(lambda i: index.find(world.batches[i], cells))
    fresh = [DeviceIndex(2 * len(world.batches[0]), CUDA) for _ in range(WARM + TIMES)]
    indexes = iter(fresh)
    found["find_or_insert, all new"] = timed(
        lambda i: next(indexes).find_or_insert(world.batches[i], cells, 0)
    )
    hot_N = torch.full_like(world.batches[0], 7)
    found["find_or_insert, one key"] = timed(lambda _: index.find_or_insert(hot_N, cells, 9999))
    ends_C = cells.ends_G
    for ranks in (1, 8, 64):
        found[f"dedup, {ranks} ranks"] = replayed(
            lambda i, ranks=ranks: dedup(world.batches[i], ends_C, Owners(ranks, 0))
        )
    found["dedup, 8 ranks, host"] = submitted(
        lambda i: dedup(world.batches[i], ends_C, Owners(8, 0))
    )
    found["dedup, 8 ranks, one key"] = replayed(lambda _: dedup(hot_N, ends_C, Owners(8, 0)))
    mixed = [
        keys_N * 1000 + torch.arange(len(keys_N), device=CUDA) % 10 for keys_N in world.batches
    ]
    found["torch.unique with inverse"] = timed(
        lambda i: torch.unique(mixed[i], return_inverse=True)
    )
    return found


def time_evictions(world: World) -> Figures:
    """A pool of a tenth of the rows: victims, erase, rebuild, new keys, every batch."""
    slots = TABLES * ROWS // 10
    index, cells = DeviceIndex(slots, CUDA), world.cells
    parts: dict[str, list[float]] = {}
    draw = torch.Generator(CUDA).manual_seed(1)
    missing = 0
    for batch in range(12):
        keys_N = torch.cat([powers(SAMPLES, 8_000_000, draw) for _ in range(TABLES)])
        marks: dict[str, torch.cuda.Event] = {}

        def mark(name: str, to: dict[str, torch.cuda.Event] = marks) -> None:
            to[name] = torch.cuda.Event(enable_timing=True)
            to[name].record()

        mark("begin")
        victims_V = index.choose_victims(batch - 1, len(keys_N) // 2)
        mark("choose_victims, 1.7 M slots")
        index.erase(victims_V, index.num_victims)
        mark("erase")
        index.rebuild()
        mark("rebuild where needed")
        index.find_or_insert(keys_N, cells, batch)
        mark("find_or_insert with misses")
        torch.cuda.synchronize()
        missing += int(index.counters[3])
        names = list(marks)
        for a, b in pairwise(names):
            parts.setdefault(b, []).append(marks[a].elapsed_time(marks[b]))
    found = {name: median(times[4:]) for name, times in parts.items()}
    found["rebuild where needed, longest"] = max(parts["rebuild where needed"])
    found["misses a batch"] = float(int(index.num_new))
    found["keys without a slot"] = float(missing)
    big = world.index
    found["choose_victims, 16.8 M slots"] = timed(lambda _: big.choose_victims(1, 100_000), 10)
    found["rebuild, 16.8 M slots"] = timed(lambda _: big.rebuild(0.0), 10)
    return found


def time_segments(world: World) -> Figures:
    """Sort and cut."""
    slots = world.index.num_slots
    found = {"sort and cut": replayed(lambda i: sort_segments(world.slots[i], slots))}
    found["torch.sort of slots"] = timed(lambda i: torch.sort(world.slots[i], stable=True))
    counts = sort_segments(world.slots[0], slots).counts.tolist()
    found["pieces"], found["long segments"] = map(float, counts)
    lengths = torch.unique(world.slots[0], return_counts=True)[1]
    found["longest segment"] = float(lengths.max())
    found["unique keys"] = float(len(lengths))
    return found


def time_rows(world: World, name: str) -> Figures:
    """Lookup and update with one optimizer, checked at full size first."""
    optimizer = row_optimizer(name, lr=0.1)
    slots, width = world.index.num_slots, DIM + optimizer.state_dim(DIM)
    rows_SW = aligned_rows(slots, width, CUDA)
    rows_SW.normal_(0, 0.01)
    rows_SW[:, DIM:].abs_()
    out_OD, gradients_OD = drawn(TABLES * SAMPLES, DIM), drawn(TABLES * SAMPLES, DIM) * 1e-3
    segments = [sort_segments(slots_N, slots) for slots_N in world.slots]
    struct, times = struct_of(optimizer), torch.ones(1, device=CUDA)
    gradients = TermGradients(gradients_OD)
    found: Figures = {}
    check_update(world, optimizer, rows_SW, gradients)
    if name == "sgd":
        found["lookup"] = replayed(lambda i: look_up(rows_SW, world.slots[i], out_OD))
        found["lookup by torch"] = timed(
            lambda i: torch.index_select(rows_SW, 0, world.slots[i], out=out_OD)
        )
    found[f"update, {name}"] = replayed(
        lambda i: update_segments(segments[i], gradients, rows_SW, struct, times)
    )
    first = FirstValues(
        torch.arange(TABLES, device=CUDA),
        torch.full((TABLES,), 0.01, dtype=torch.float64, device=CUDA),
        DIM,
        width - DIM,
    )

    def step(i: int) -> None:
        made = world.index.find_or_insert(world.batches[i], world.cells, 10_000)
        world.index.write_first_rows(first, rows_SW, made.new_slots_N, world.index.num_new)
        look_up(rows_SW, made.slots_N, out_OD)
        of_batch = sort_segments(made.slots_N, slots)
        update_segments(of_batch, gradients, rows_SW, struct, times)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found[f"step, {name}"] = timed(step)
    found[f"step, {name}, memory MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    found[f"step, {name}, graph"] = replayed(step)
    found[f"step, {name}, host"] = submitted(step)
    if name == "sgd":
        all_slots = torch.arange(500_000, dtype=torch.int32, device=CUDA)
        amount = torch.tensor([500_000], dtype=torch.int32, device=CUDA)
        found["first values of 500,000 rows"] = timed(
            lambda _: world.index.write_first_rows(first, rows_SW, all_slots, amount)
        )
        hot_N = torch.full_like(world.slots[0], 7)
        hot = sort_segments(hot_N, slots)
        found["update, sgd, one row"] = timed(
            lambda _: update_segments(hot, gradients, rows_SW, struct, times)
        )
    return found


def check_update(
    world: World, optimizer: RowOptimizer, rows_SW: Tensor, gradients: TermGradients
) -> None:
    """One batch at full size: all rows have the bits of the plain update."""
    slots_N = world.slots[0]
    ids_S, sums_SD = plain_segment_sums(slots_N, gradients)
    twin_SW = rows_SW[ids_S.long()]
    optimizer.update(twin_SW, sums_SD, 1)
    segments = sort_segments(slots_N, world.index.num_slots)
    update_segments(segments, gradients, rows_SW, struct_of(optimizer))
    same = torch.equal(rows_SW[ids_S.long()], twin_SW)
    assert same, f"{optimizer.name}: rows differ from those of the plain update"


def time_pooled() -> Figures:
    """A DLRM's tables: 26 x 16,384 samples x 10 keys, summed, 64 weights, row-wise AdaGrad."""
    tables, samples, keys, dim = 26, 16_384, 10, 64
    world = make_world(tables, samples * keys, 1_000_000)
    slots, outputs = world.index.num_slots, tables * samples
    optimizer = row_optimizer("rowwise_adagrad")
    rows_SW = aligned_rows(slots, dim + 1, CUDA)
    rows_SW.normal_(0, 0.01)
    rows_SW[:, dim:].abs_()
    ends_O1 = torch.arange(outputs + 1, dtype=torch.int32, device=CUDA) * keys
    of_term = torch.arange(outputs, dtype=torch.int32, device=CUDA).repeat_interleave(keys)
    weights_T = torch.rand(outputs * keys, device=CUDA)
    out_OD, gradients = drawn(outputs, dim), TermGradients(drawn(outputs, dim) * 1e-3)
    struct, times = struct_of(optimizer), torch.ones(1, device=CUDA)
    segments = [sort_segments(s, slots, of_term) for s in world.slots]
    weighted = [sort_segments(s, slots) for s in world.slots]
    scaled = TermGradients(gradients.rows_OD, of_term, None, weights_T)

    def step(i: int) -> None:
        made = world.index.find_or_insert(world.batches[i], world.cells, 10_000)
        look_up(rows_SW, made.slots_N, out_OD, Pooling(ends_O1))
        of_batch = sort_segments(made.slots_N, slots, of_term)
        update_segments(of_batch, gradients, rows_SW, struct, times)

    name = "26 tables x 10 keys"
    return {
        f"{name}: find_or_insert": replayed(
            lambda i: world.index.find_or_insert(world.batches[i], world.cells, 10_000)
        ),
        f"{name}: lookup": replayed(
            lambda i: look_up(rows_SW, world.slots[i], out_OD, Pooling(ends_O1))
        ),
        f"{name}: lookup, weighted": replayed(
            lambda i: look_up(
                rows_SW, world.slots[i], out_OD, Pooling(ends_O1, weights_T=weights_T)
            )
        ),
        f"{name}: sort and cut": replayed(lambda i: sort_segments(world.slots[i], slots, of_term)),
        f"{name}: update": replayed(
            lambda i: update_segments(segments[i], gradients, rows_SW, struct, times)
        ),
        f"{name}: update, weighted": replayed(
            lambda i: update_segments(weighted[i], scaled, rows_SW, struct, times)
        ),
        f"{name}: step": timed(step),
        f"{name}: step, graph": replayed(step),
    }


def time_many_tables() -> Figures:
    """A million keys in 1 to 1,000 tables."""
    found: Figures = {}
    for tables in (1, 100, 1000):
        each = 1_000_000 // tables
        world = make_world(tables, each, each)
        found[f"find_or_insert, {tables} tables"] = replayed(
            lambda i, world=world: world.index.find_or_insert(world.batches[i], world.cells, 3)
        )
        found[f"dedup, 8 ranks, {tables} tables"] = replayed(
            lambda i, world=world: dedup(world.batches[i], world.cells.ends_G, Owners(8, 0))
        )
    return found


def build_variant(folder: Path, variant: dict[str, int]) -> Path:
    """`row_sums.cu` with other constants, as a library of its own."""
    text = (build.CUDA_SOURCES / "row_sums.cu").read_text(encoding="utf-8")
    for name, value in variant.items():
        text, changed = re.subn(rf"(constexpr int {name} = )\d+;", rf"\g<1>{value};", text)
        assert changed == 1, f"row_sums.cu has no constant {name}"
    text = text.replace('"../native/', f'"{build.CUDA_SOURCES.parent}/native/')
    stem = "_".join(f"{name}{value}" for name, value in variant.items())
    source, made = folder / f"{stem}.cu", folder / f"{stem}.so"
    source.write_text(text, encoding="utf-8")
    command = [str(build.find_nvcc()), *build.CUDA_FLAGS, f"-I{build.CUDA_SOURCES}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    return made


@contextmanager
def row_sums_of(made: Path) -> Iterator[None]:
    """Lookups and updates by the kernels of another library."""
    own, other = library.loaded(CUDA), ctypes.CDLL(str(made))
    names = ("nestpipe_look_up", "nestpipe_update_segments")
    kept = {name: getattr(own, name) for name in names}
    for name in names:
        function = getattr(other, name)
        function.argtypes, function.restype = kept[name].argtypes, kept[name].restype
        setattr(own, name, function)
    try:
        yield
    finally:
        for name in names:
            setattr(own, name, kept[name])


def time_variants(world: World, made: dict[str, Path]) -> dict[str, Figures]:
    """Lookup, updates by SGD, row-wise AdaGrad and Adam for each pair of constants."""
    found: dict[str, Figures] = {name: {} for name in made}
    out_OD, gradients = drawn(TABLES * SAMPLES, DIM), TermGradients(drawn(TABLES * SAMPLES, DIM))
    slots = world.index.num_slots
    segments = [sort_segments(slots_N, slots) for slots_N in world.slots]
    times = torch.ones(1, device=CUDA)
    for name in ("sgd", "rowwise_adagrad", "adam"):
        optimizer = row_optimizer(name)
        rows_SW = aligned_rows(slots, DIM + optimizer.state_dim(DIM), CUDA)
        rows_SW.normal_(0, 0.01)
        rows_SW[:, DIM:].abs_()
        struct = struct_of(optimizer)
        for variant, path in made.items():
            with row_sums_of(path):
                if name == "sgd":
                    found[variant]["lookup"] = replayed(
                        lambda i, rows=rows_SW: look_up(rows, world.slots[i], out_OD)
                    )
                found[variant][name] = replayed(
                    lambda i, rows=rows_SW, struct=struct: update_segments(
                        segments[i], gradients, rows, struct, times
                    )
                )
        del rows_SW
        torch.cuda.empty_cache()
    return found


def run_tests() -> str:
    """The last line of the tests on the GPU."""
    tests = Path(__file__).parents[1] / "tests" / "gpu" / "test_device_index.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.stdout.write(result.stdout[-6000:] + result.stderr[-2000:])
    return (result.stdout.strip().splitlines() or ["no output"])[-1]


def collect(made: dict[str, Path], wanted: Sequence[str]) -> dict[str, object]:
    """All figures; a part that fails leaves its error and the others go on."""
    parts: dict[str, object] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            parts[name] = work()
        except Exception as error:  # noqa: BLE001 - the other parts are worth the GPU's time
            parts[name] = {"failed": f"{type(error).__name__}: {error}"[:600]}
        sys.stdout.write(f"{name}: {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()
        torch.cuda.empty_cache()

    world = make_world()
    every: dict[str, Callable[[], object]] = {
        "limits": time_limits,
        "index": lambda: time_index(world),
        "evictions": lambda: time_evictions(world),
        "segments": lambda: time_segments(world),
        **{of: partial(time_rows, world, of) for of in OPTIMIZERS},
        "variants": lambda: time_variants(world, made),
        "pooled": time_pooled,
        "many tables": time_many_tables,
    }
    for name in wanted:
        note(name, every[name])
    return parts


def show(parts: dict[str, object]) -> None:
    """A line for each figure, marks beside those that have one."""
    for part, figures in parts.items():
        sys.stdout.write(f"-- {part}\n")
        if not isinstance(figures, dict):
            sys.stdout.write(f"  {figures}\n")
            continue
        for name, value in figures.items():
            if isinstance(value, dict):
                line = ", ".join(f"{key} {ms:.3f}" for key, ms in value.items())
                sys.stdout.write(f"  {name}: {line}\n")
            elif isinstance(value, float):
                mark = MARKS_MS.get(name)
                beside = "" if mark is None else f"  (mark {mark}{', missed' * (value > mark)})"
                sys.stdout.write(f"  {name}: {value:.4g}{beside}\n")
            else:
                sys.stdout.write(f"  {name}: {value}\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="File for all figures, as JSON.")
    parser.add_argument("--no-tests", action="store_true", help="Skip tests/gpu.")
    parser.add_argument("--parts", default=",".join(PARTS), help="Some of them, by commas.")
    given = parser.parse_args(arguments)
    given.parts = given.parts.split(",")
    if strange := set(given.parts) - set(PARTS):
        parser.error(f"there is no part {min(strange)!r}; the parts are {', '.join(PARTS)}")
    return given


def main() -> None:
    """Build, check, time, tell."""
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU; run this on a machine that has one")
    began = time.monotonic()
    variants = VARIANTS if "variants" in options.parts else []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        jobs = [pool.submit(build_variant, Path(folder), variant) for variant in variants]
        library.loaded(CUDA)
        names = [", ".join(f"{key} {value}" for key, value in v.items()) for v in variants]
        made = {name: job.result() for name, job in zip(names, jobs, strict=True)}
        sys.stdout.write(f"built: {time.monotonic() - began:.1f} s\n")
        tests = "not run" if options.no_tests else run_tests()
        sys.stdout.write(f"tests: {tests} ({time.monotonic() - began:.1f} s)\n")
        parts: dict[str, object] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "tests": tests,
        }
        parts.update(collect(made, options.parts))
    parts["seconds"] = time.monotonic() - began
    options.out.write_text(json.dumps(parts, indent=1), encoding="utf-8")
    show(parts)


if __name__ == "__main__":
    main()
