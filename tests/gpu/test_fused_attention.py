"""The fused attention and its gradients on a GPU, against the plain form in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels.attention.fused import attention_by_kernels, train_attention
from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")

BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Of the largest value of each result. bfloat16 tells 256 values apart between a power of two and
the next; float16 four times as many, but the GPU's tanh has an error of 2**-10.9."""
NORM, SCALE = 64.0, 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of some lengths, their candidates, and the shape of heads and tables."""

    lengths: list[int]
    targets: list[int] | None = None
    positions: int = 64
    time_buckets: int = 0
    window: int | None = None
    heads: int = 2
    width: int = 64
    value_width: int = 64


CASES = {
    "one row": Case([1]),
    "empty": Case([0, 0], [0, 0]),
    "no bias": Case([257, 31], positions=0),
    "odd": Case([65, 0, 1, 63, 127, 300]),
    "edges": Case([64, 128, 129, 256, 32, 16], [0, 64, 1, 128, 32, 0], time_buckets=20),
    "candidates": Case([65, 0, 1, 63, 127, 300], [65, 0, 1, 2, 64, 150]),
    "time": Case([257, 31], [7, 0], positions=0, time_buckets=32),
    "both": Case([500, 90], [0, 90], positions=7, time_buckets=40),
    "one bucket": Case([300], [10], positions=1, time_buckets=1),
    "wide tables": Case([700, 128], [100, 3], positions=1000, time_buckets=64),
    "window": Case([700, 128, 3], [100, 3, 1], time_buckets=12, window=100),
    "own row alone": Case([300, 5], [20, 5], window=0),
    "window of a block": Case([1000], positions=0, window=256),
    "16": Case([200, 77], [5, 5], width=16, value_width=16, time_buckets=8),
    "32": Case([200, 77], [5, 5], width=32, value_width=32, heads=4),
    "96": Case([200, 77], [5, 5], width=96, value_width=96),
    "128": Case([300, 200], [40, 0], width=128, value_width=128, time_buckets=8),
    "192": Case([300, 77], [5, 5], width=192, value_width=192),
    "256": Case([300, 200], [40, 0], heads=1, width=256, value_width=256, time_buckets=8),
    "25": Case([200, 77], [5, 5], width=25, value_width=25, time_buckets=8),
    "50": Case([200, 77], [5, 5], heads=1, width=50, value_width=50),
    "uneven": Case([200, 77], [5, 5], heads=3, width=20, value_width=130),
    "long": Case([2500, 1111], [256, 0], time_buckets=16),
    "512 positions": Case([1300, 700], [100, 0], 512, time_buckets=64, width=128, value_width=128),
    "many": Case([300] * 20, [64] * 20, heads=4, width=32, value_width=32, time_buckets=9),
}


def make_times(lengths: list[int], buckets: int) -> Tensor:
    """Half of the samples in order, as histories are; the others at and beside powers of two."""
    generator = torch.Generator().manual_seed(sum(lengths))
    parts = []
    for number, length in enumerate(lengths):
        power = torch.randint(0, buckets + 2, (length,), generator=generator).clamp(max=40)
        beside = torch.randint(-1, 2, (length,), generator=generator)
        times = torch.where(torch.rand(length, generator=generator) < 0.4, 0, 2**power + beside)
        parts.append(torch.cumsum(times.clamp(0, 99), 0) if number % 2 else times)
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class World:
    """A case on the GPU; `leaves` are queries, keys, values and both tables."""

    case: Case
    leaves: tuple[Tensor | None, ...]
    grad: Tensor
    times: Tensor

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype) -> World:
        generator = torch.Generator("cuda").manual_seed(len(case.lengths))
        total = sum(case.lengths)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

        # As in the encoder: queries, keys and values are parts of the same rows.
        widths = [case.width, case.width, case.value_width]
        mixed = draw(total, case.heads * sum(widths)).split([case.heads * w for w in widths], 1)
        q, k, v = (part.unflatten(1, (case.heads, -1)) for part in mixed)
        position = draw(case.heads, case.positions) if case.positions else None
        time = draw(case.heads, case.time_buckets) if case.time_buckets else None
        times = make_times(case.lengths, case.time_buckets).cuda()
        leaves = (q, k, v, position, time)
        return cls(case, leaves, draw(total, case.heads, case.value_width), times)

    def run(self, form: Any = train_attention, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The output and all gradients."""
        return self.run_on(self.leaves, self.case, self.grad, self.times, form, dtype)

    def alone(self, number: int, form: Any = train_attention) -> list[Tensor]:
        """One sample in a batch of its own: the output, and gradients of its rows."""
        start, stop = sum(self.case.lengths[:number]), sum(self.case.lengths[: number + 1])
        targets = self.case.targets
        case = replace(
            self.case,
            lengths=[self.case.lengths[number]],
            targets=None if targets is None else [targets[number]],
        )
        q, k, v, *tables = self.leaves
        rows = [x[start:stop] for x in (q, k, v) if x is not None]
        leaves = (*rows, *tables)
        about = case, self.grad[start:stop], self.times[start:stop]
        return self.run_on(leaves, *about, form)[:4]

    @staticmethod
    def run_on(
        leaves: tuple[Tensor | None, ...],
        case: Case,
        grad: Tensor,
        times: Tensor,
        form: Any = train_attention,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        taken = [
            None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves
        ]
        targets = None if case.targets is None else torch.tensor(case.targets, device="cuda")
        out = form(
            *taken[:3],
            torch.tensor([0, *itertools.accumulate(case.lengths)], device="cuda"),
            norm=NORM,
            scale=SCALE,
            mask=Mask(targets),
            bias=RelativeBias(taken[3], taken[4], times if case.time_buckets else None),
            max_attention=case.window,
        )
        out.backward(grad.to(out.dtype))
        return [out.detach(), *(x.grad for x in taken if x is not None and x.grad is not None)]


def assert_near(found: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape
        if a.numel():
            error = (a.double() - b).abs().max()
            assert error <= bound * b.abs().max(), f"result {number}: {error / b.abs().max()}"


FLOAT32 = ["both", "window", "256"]
"""Slow to compile, so only a few."""
FLOAT16 = ["no bias", "candidates", "edges", "both", "window", "256"]


def pairs_of(names: list[str]) -> list[Any]:
    """Every case in bfloat16, some in other types."""
    others = {torch.float32: FLOAT32, torch.float16: FLOAT16}
    pairs = [(name, torch.bfloat16) for name in names]
    pairs += [(name, dtype) for dtype, some in others.items() for name in names if name in some]
    return [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, dtype in pairs]


@pytest.mark.parametrize(("name", "dtype"), pairs_of(list(CASES)))
def test_it_is_the_plain_form(name: str, dtype: torch.dtype):
    world = World.of(CASES[name], dtype)
    wanted = world.run(hstu_attention, torch.float64)
    assert_near(world.run(), wanted, BOUND[dtype])


def draw_case(seed: int, value_width: int) -> Case:
    """Lengths at and beside the edges of blocks."""
    draw = random.Random(seed)
    edges = [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]
    lengths = draw.choices(edges, k=draw.randint(1, 5))
    targets = [draw.randint(0, length) for length in lengths]
    return Case(
        lengths,
        draw.choice([None, targets]),
        positions=draw.choice([0, 7]),
        time_buckets=draw.choice([0, 20]),
        window=draw.choice([None, 0, 5, 64, 100]),
        width=16,
        value_width=value_width,
    )


@pytest.mark.parametrize("seed", range(40))
def test_lengths_candidates_and_windows_of_any_kind(seed: int):
    world = World.of(draw_case(seed, 16), torch.bfloat16)
    wanted = world.run(hstu_attention, torch.float64)
    assert_near(world.run(), wanted, BOUND[torch.bfloat16])


@pytest.mark.parametrize("seed", range(10))
def test_kernels_pad_values_of_another_width(seed: int):
    world = World.of(draw_case(seed, 32), torch.bfloat16)
    wanted = world.run(hstu_attention, torch.float64)
    assert_near(world.run(attention_by_kernels), wanted, BOUND[torch.bfloat16])


@pytest.mark.parametrize(("name", "dtype"), pairs_of(["both", "128", "256", "many", "long"]))
def test_the_same_input_gives_the_same_bits(name: str, dtype: torch.dtype):
    world = World.of(CASES[name], dtype)
    first = world.run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, world.run(), strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    pairs_of(["odd", "candidates", "both", "edges", "window", "128", "256"]),
)
def test_a_sample_has_the_same_bits_alone_and_in_any_batch(name: str, dtype: torch.dtype):
    world = World.of(CASES[name], dtype)
    together = world.run()[:4]
    ends = [0, *itertools.accumulate(world.case.lengths)]
    for number, (a, b) in enumerate(itertools.pairwise(ends)):
        for whole, alone in zip(together, world.alone(number), strict=True):
            assert torch.equal(whole[a:b], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_samples_may_hold_anything(dtype: torch.dtype):
    world = World.of(Case([100, 300, 50], [5, 5, 5], positions=0), dtype)
    clean = world.run()[:4]
    q, k, v, *tables = (None if x is None else x.clone() for x in world.leaves)
    grad = world.grad.clone()
    for x in (q, k, v, grad):
        assert x is not None
        x[100:400] = float("nan")
    found = replace(world, leaves=(q, k, v, *tables), grad=grad).run()[:4]
    for a, b in zip(found, clean, strict=True):
        assert torch.equal(a[:100], b[:100])
        assert torch.equal(a[400:], b[400:])


TABLES = ["both", "wide tables", "512 positions", "window", "edges", "128", "256", "long", "many"]


@pytest.mark.parametrize(("name", "dtype"), pairs_of(TABLES))
def test_gradients_of_tables_in_cuda_are_those_of_the_twin(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    from nestpipe.kernels.attention import fused_launch

    asked = []

    def can_sum(problem: Any) -> bool:
        asked.append(known(problem))
        return asked[-1]

    known = fused_launch.can_sum
    world = World.of(CASES[name], dtype)
    monkeypatch.setattr(fused_launch, "can_sum", can_sum)
    found = world.run()
    assert asked == [dtype != torch.float32]
    monkeypatch.setattr(fused_launch, "can_sum", lambda _: False)
    twin = world.run()
    assert all(torch.equal(a, b) for a, b in zip(found[:4], twin[:4], strict=True))
    # Both sum float32; tables have the rows' type, which may round a sum up or down.
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert_near(found[4:], [x.double() for x in twin[4:]], bound)


@pytest.mark.parametrize("name", ["no bias", "both", "128", "256", "window"])
def test_a_graph_holds_both_directions_and_gives_the_same_bits(name: str):
    world = World.of(CASES[name], torch.bfloat16)
    case = world.case
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in world.leaves]
    wanted = [x for x in leaves if x is not None]
    targets = None if case.targets is None else torch.tensor(case.targets, device="cuda")
    offsets = torch.tensor([0, *itertools.accumulate(case.lengths)], device="cuda")
    bias = RelativeBias(leaves[3], leaves[4], world.times if case.time_buckets else None)

    def both() -> list[Tensor]:
        q, k, v = wanted[:3]
        out = train_attention(
            q, k, v, offsets, norm=NORM, scale=SCALE, mask=Mask(targets), bias=bias,
            max_attention=case.window, longest=max(case.lengths), form="fused",
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, wanted, world.grad)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        both()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = both()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(held, world.run(), strict=True))


def test_no_score_is_kept():
    length, heads = 8192, 8
    world = World.of(Case([length], [256], heads=heads, time_buckets=16), torch.bfloat16)
    world.run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    world.run()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    scores = heads * length * length * 2
    rows = world.grad.numel() * 2
    assert grown <= 10 * rows + (64 << 20)
    assert grown < scores / 5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_the_host_does_not_wait():
    world = World.of(CASES["both"], torch.bfloat16)
    world.run()
    q, k, v, position, time = (
        None if x is None else x.detach().clone().requires_grad_() for x in world.leaves
    )
    assert q is not None
    assert k is not None
    assert v is not None
    offsets = torch.tensor([0, *itertools.accumulate(world.case.lengths)], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = train_attention(
            q, k, v, offsets, norm=NORM, bias=RelativeBias(position, time, world.times), longest=500
        )
        out.backward(world.grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The kernel of Hopper's warp groups

by_groups = partial(train_attention, form="hopper")
only_on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="warp groups are Hopper's",
)
GROUP_CASES = {
    "one row": Case([1]),
    "empty": Case([0, 0], [0, 0]),
    "no bias": Case([257, 31], positions=0),
    "edges": Case([64, 128, 129, 256, 63, 65], [0, 64, 1, 128, 32, 0], positions=0),
    "long": Case([2500, 1111], [256, 0], positions=0, width=128, value_width=128),
    "window": Case([700, 128, 3], [100, 3, 1], positions=0, window=100),
    "many": Case([300] * 20, [64] * 20, heads=4, positions=0),
    "wide": Case([300, 200], [40, 0], positions=0, width=256, value_width=256),
    "uneven": Case([200, 77], [5, 5], heads=3, positions=0, width=20, value_width=128),
    "by position": Case([500, 90], [0, 90], positions=7),
    "by time": Case([500, 90], [0, 90], positions=0, time_buckets=9),
    "both": Case([500, 90], [0, 90], positions=7, time_buckets=40),
    "wide tables": Case([700, 128], [100, 3], positions=1000, time_buckets=64),
    "both, 128": Case([300, 200], [40, 0], width=128, value_width=128, time_buckets=8),
    "both, 256": Case([300, 200], [40, 0], heads=1, width=256, value_width=256, time_buckets=8),
}


@only_on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GROUP_CASES)
def test_warp_groups_are_the_plain_form_and_repeat_their_bits(name: str, dtype: torch.dtype):
    world = World.of(GROUP_CASES[name], dtype)
    found = world.run(by_groups)
    assert_near(found, world.run(hstu_attention, torch.float64), BOUND[dtype])
    assert_near(found, [x.double() for x in world.run()], 2 * BOUND[dtype])
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(found, world.run(by_groups), strict=True))


@only_on_hopper
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("seed", range(12))
def test_warp_groups_with_lengths_candidates_and_windows_of_any_kind(seed: int, width: int):
    case = replace(draw_case(seed, width), width=width)
    world = World.of(case, torch.bfloat16)
    wanted = world.run(hstu_attention, torch.float64)
    assert_near(world.run(by_groups), wanted, BOUND[torch.bfloat16])


@only_on_hopper
@pytest.mark.parametrize("name", ["edges", "window", "long", "wide", "both"])
def test_warp_groups_give_a_sample_the_same_bits_alone_and_in_any_batch(name: str):
    world = World.of(GROUP_CASES[name], torch.bfloat16)
    together = world.run(by_groups)[:4]
    ends = [0, *itertools.accumulate(world.case.lengths)]
    for number, (a, b) in enumerate(itertools.pairwise(ends)):
        alone = world.alone(number, by_groups)
        assert all(torch.equal(x[a:b], y) for x, y in zip(together, alone, strict=True))


@only_on_hopper
@pytest.mark.parametrize("width", [64, 128, 256])
def test_warp_groups_do_not_look_at_other_samples(width: int):
    case = Case([100, 300, 50], [5, 5, 5], positions=0, width=width, value_width=width)
    world = World.of(case, torch.bfloat16)
    clean = world.run(by_groups)
    leaves = [None if x is None else x.clone() for x in world.leaves]
    grad = world.grad.clone()
    for x in (*leaves[:3], grad):
        assert x is not None
        x[100:400] = float("nan")
    found = replace(world, leaves=tuple(leaves), grad=grad).run(by_groups)
    for a, b in zip(found, clean, strict=True):
        assert torch.equal(a[:100], b[:100])
        assert torch.equal(a[400:], b[400:])


@only_on_hopper
def test_rings_order_and_the_way_of_starting_change_no_bit(monkeypatch: pytest.MonkeyPatch):
    from nestpipe.kernels.attention import hopper_launch

    world = World.of(GROUP_CASES["long"], torch.bfloat16)
    first = world.run(by_groups)
    tiles = hopper_launch.GroupTiles.of(128)
    other = replace(
        tiles,
        forward=replace(tiles.forward, held=True, persistent=True),
        queries=replace(tiles.queries, persistent=True),
        keys=replace(tiles.keys, b_stages=2, c_stages=3, persistent=True),
    )
    monkeypatch.setattr(hopper_launch.GroupTiles, "of", lambda *_, **__: other)
    monkeypatch.setattr(hopper_launch._starter(), "why_ordinary", "a test asks for it")
    assert all(torch.equal(a, b) for a, b in zip(first, world.run(by_groups), strict=True))


def test_who_asks_for_warp_groups_by_name_gets_them_or_an_error():
    world = World.of(CASES["96"], torch.bfloat16)
    with pytest.raises(ConfigError, match=r"'hopper', but .* use 'auto' or 'plain'"):
        world.run(by_groups)
