"""The GPU's attention without a score matrix, against the plain form in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.attention.inference import attend, attend_with_past, kernel_serves
from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention
from nestpipe.models import Hstu, HstuConfig, PrefixParts, Tokens

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")
from nestpipe.kernels.attention.triton_forward import SPLIT_KEYS

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the largest value; bfloat16 tells 256 values apart between a power of two and the next."""
NORM, SCALE = 64.0, 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """Samples; their oldest `past` rows are a cache."""

    lengths: list[int]
    targets: list[int] | None = None
    past: list[int] | None = None
    positions: int = 64
    time_buckets: int = 0
    heads: int = 2
    width: int = 64
    value_width: int = 64


CASES = {
    "one row": Case([1]),
    "empty": Case([0, 0], [0, 0], [0, 0]),
    "odd": Case([65, 0, 1, 63, 127, 300], None, [64, 0, 0, 1, 100, 299]),
    "odd, candidates": Case([65, 0, 1, 63, 127, 300], [65, 0, 1, 2, 64, 150], [0, 0, 0, 61, 3, 9]),
    "no bias": Case([257, 31], [7, 0], [200, 31], positions=0),
    "time": Case([257, 31], [7, 0], [200, 30], positions=0, time_buckets=32),
    "both": Case([500, 90], [0, 90], [401, 0], positions=7, time_buckets=40),
    "one bucket": Case([300], [10], [129], positions=1, time_buckets=1),
    "far": Case([1500], [256], [1200], positions=1000),
    "narrow": Case([200, 77], [5, 5], [100, 70], width=5, value_width=3, time_buckets=8),
    "uneven": Case([200, 77], [5, 5], [100, 70], heads=3, width=20, value_width=130),
    "wide": Case([150, 20], [40, 1], [100, 2], heads=1, width=256, value_width=256),
    "long": Case([4096, 4000], [256, 0], [3800, 4000], time_buckets=16),
    "long, new": Case([4096, 1], [0, 0], [1024, 0], width=128, value_width=128),
    "splits": Case([5000, 2100, 300, 4096], [64, 40, 5, 0], [4900, 2040, 100, 4095]),
    "wide splits": Case([4200], [90], [2000], heads=1, width=256, value_width=256),
    "many": Case([300] * 40, [64] * 40, [200] * 40, heads=4, width=32, value_width=32),
}


def make_times(total: int, buckets: int) -> Tensor:
    """At and beside powers of two, many of them 0: differences at the edges of all buckets."""
    generator = torch.Generator().manual_seed(total)
    power = torch.randint(0, buckets + 2, (total,), generator=generator)
    beside = torch.randint(-1, 2, (total,), generator=generator)
    return torch.where(torch.rand(total, generator=generator) < 0.4, 0, 2**power + beside)


@dataclass(frozen=True, slots=True)
class World:
    """A case on the GPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int]
    past: list[int]
    arguments: dict[str, Any]

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
        bias = RelativeBias(
            draw(case.heads, case.positions) if case.positions else None,
            draw(case.heads, case.time_buckets) if case.time_buckets else None,
            make_times(total, case.time_buckets).cuda(),
        )
        targets = None if case.targets is None else torch.tensor(case.targets, device="cuda")
        arguments = {"norm": NORM, "scale": SCALE, "mask": Mask(targets), "bias": bias}
        return cls(q, k, v, case.lengths, case.past or [0] * len(case.lengths), arguments)

    @property
    def offsets(self) -> Tensor:
        return offsets(self.lengths)

    @property
    def new_offsets(self) -> Tensor:
        return offsets([n - old for n, old in zip(self.lengths, self.past, strict=True)])

    @property
    def places(self) -> tuple[Tensor, list[slice]]:
        """Of the new rows, and of each sample's older ones."""
        starts = [0, *itertools.accumulate(self.lengths)]
        older = [slice(a, a + old) for a, old in zip(starts, self.past, strict=False)]
        ranges = [torch.arange(part.stop, end) for part, end in zip(older, starts[1:], strict=True)]
        return torch.cat(ranges).cuda(), older

    def expected(self) -> Tensor:
        """One sample after the other, or the matrices would not fit."""
        bias, targets_B = self.arguments["bias"], self.arguments["mask"].num_targets_B
        position_HP, time_HQ = (
            None if table is None else table.double() for table in (bias.position_HP, bias.time_HQ)
        )
        found = []
        ends = self.offsets.tolist()
        for number, (a, b) in enumerate(itertools.pairwise(ends)):
            mask = Mask(None if targets_B is None else targets_B[number : number + 1])
            q, k, v = (x[a:b].double() for x in (self.q, self.k, self.v))
            part = RelativeBias(position_HP, time_HQ, bias.times_T[a:b])
            where = offsets([b - a])
            out = hstu_attention(q, k, v, where, norm=NORM, scale=SCALE, mask=mask, bias=part)
            found.append(out)
        return torch.cat(found)

    def in_one_piece(self) -> Tensor:
        return attend(self.q, self.k, self.v, self.offsets, **self.arguments)

    def new_rows_only(self) -> Tensor:
        queries = self.q[self.places[0]]
        offsets_B = self.new_offsets
        return attend(
            queries, self.k, self.v, self.offsets, query_offsets_B=offsets_B, **self.arguments
        )

    def after_a_past(self) -> Tensor:
        new, older = self.places
        q, k, v = self.q[new], self.k[new], self.v[new]
        past_k = [self.k[rows].contiguous() for rows in older]
        past_v = [self.v[rows].contiguous() for rows in older]
        return attend_with_past(q, k, v, past_k, past_v, self.new_offsets, **self.arguments)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")


def assert_near(found: Tensor, wanted: Tensor, bound: float) -> None:
    assert found.shape == wanted.shape
    if found.numel():
        assert (found.double() - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_it_is_the_plain_form(name: str, dtype: torch.dtype):
    world = World.of(CASES[name], dtype)
    assert kernel_serves(world.q)
    expected, (new, _) = world.expected(), world.places
    assert_near(world.in_one_piece(), expected, BOUND[dtype])
    assert_near(world.new_rows_only(), expected[new], BOUND[dtype])
    assert_near(world.after_a_past(), expected[new], BOUND[dtype])


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("candidates", [0, 1, 2, 16, 63, 64, 65, 200, 256])
def test_any_number_of_candidates(candidates: int, dtype: torch.dtype):
    case = Case([1000 + candidates, candidates], [candidates] * 2, [900, 0], time_buckets=12)
    world = World.of(case, dtype)
    expected, (new, _) = world.expected(), world.places
    assert_near(world.in_one_piece(), expected, BOUND[dtype])
    assert_near(world.after_a_past(), expected[new], BOUND[dtype])


def test_float64_goes_the_plain_way():
    world = World.of(CASES["both"], torch.float64)
    assert not kernel_serves(world.q)
    assert_near(world.in_one_piece(), world.expected(), 1e-12)
    assert_near(world.after_a_past(), world.expected()[world.places[0]], 1e-12)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_the_same_input_gives_the_same_bits(dtype: torch.dtype):
    world = World.of(CASES["many"], dtype)
    first = world.after_a_past()
    assert all(torch.equal(world.after_a_past(), first) for _ in range(5))


def test_other_samples_may_hold_anything():
    world = World.of(Case([100, 300, 50], [5, 5, 5]), torch.float32)
    clean = world.in_one_piece()
    broken = replace(world, **{name: getattr(world, name).clone() for name in "qkv"})
    for x in (broken.q, broken.k, broken.v):
        x[100:400] = float("nan")
    found = broken.in_one_piece()
    assert torch.equal(found[:100], clean[:100])
    assert torch.equal(found[400:], clean[400:])


def peak_of(work) -> tuple[Tensor, int]:
    """The result, and by how many bytes memory grew on the way."""
    work()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = work()
    torch.cuda.synchronize()
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_there_is_no_score_matrix(dtype: torch.dtype):
    length, heads = 8192, 8
    world = World.of(Case([length], [256], heads=heads, time_buckets=16), dtype)
    found, grown = peak_of(world.in_one_piece)
    scores = heads * length * length * found.element_size()
    assert grown <= 2 * found.numel() * found.element_size() + (1 << 20)
    assert grown < scores / 20


def test_a_past_is_not_copied():
    users, length, new, heads, width = 8, 16_384, 300, 8, 64
    world = World.of(
        Case([new] * users, [256] * users, heads=heads, width=width, value_width=width),
        torch.bfloat16,
    )
    past = torch.randn(2, users, length, heads, width, device="cuda", dtype=torch.bfloat16)
    arguments = {**world.arguments, "bias": replace(world.arguments["bias"], times_T=None)}

    def work() -> Tensor:
        rows = world.q, world.k, world.v, list(past[0]), list(past[1])
        return attend_with_past(*rows, world.offsets, longest=new, **arguments)

    _, grown = peak_of(work)
    parts = -(-(length + new) // SPLIT_KEYS) * world.q.numel() * 4  # what each split found
    assert grown < past.numel() * past.element_size() / 20 + parts


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_the_host_does_not_wait():
    world = World.of(CASES["both"], torch.bfloat16)
    world.in_one_piece()
    ends = world.offsets
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(world.q, world.k, world.v, ends, **world.arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_encoder_gives_the_same_in_parts_and_at_once(dtype: torch.dtype, bound: float):
    """All by the kernel, but the reference: that wants gradients, and float64 numbers."""
    torch.manual_seed(0)
    config = HstuConfig(blocks=3, heads=4, dim=64, max_len=512, time_buckets=10)
    encoder = Hstu(config).cuda().to(dtype)
    past, new, targets = [700, 0, 65], [80, 70, 20], [64, 70, 0]
    lengths = [a + b for a, b in zip(past, new, strict=True)]
    rows = torch.randn(sum(lengths), config.dim, device="cuda").to(dtype).split(lengths)
    times = torch.arange(sum(lengths), device="cuda").split(lengths)

    def tokens(times_of: list[Tensor], targets: list[int] | None = None) -> Tokens:
        lengths_B = torch.tensor([len(part) for part in times_of], device="cuda")
        targets_B = None if targets is None else torch.tensor(targets, device="cuda")
        return Tokens(lengths_B, targets_B, torch.cat(times_of))

    exact = Hstu(config).cuda().double()
    exact.load_state_dict(encoder.state_dict())
    about = tokens(list(times), targets)
    expected = exact(torch.cat(rows).double(), about).detach()
    with torch.inference_mode():
        found = encoder(torch.cat(rows), about)
        assert_near(found, expected, bound)
        made = [
            encoder.prefix(r[:old], tokens([t[:old]]))
            for r, t, old in zip(rows, times, past, strict=True)
        ]
        parts = PrefixParts(
            [torch.stack(prefix.keys) for prefix in made],
            [torch.stack(prefix.values) for prefix in made],
            [t[:old] for t, old in zip(times, past, strict=True)],
        )
        late = torch.cat([r[old:] for r, old in zip(rows, past, strict=True)])
        late_times = [t[old:] for t, old in zip(times, past, strict=True)]
        after = encoder(late, tokens(late_times, targets), parts)
    kept = [torch.arange(n) >= old for n, old in zip(lengths, past, strict=True)]
    assert_near(after, found.double()[torch.cat(kept).cuda()], bound)
