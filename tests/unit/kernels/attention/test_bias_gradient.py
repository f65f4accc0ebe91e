"""The kernel for gradients of bias tables, compiled for the host, against every pair by itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.attention.bias_gradient import can_sum, sum_hard_tiles
from support.emulated_kernels import biases_on_emulated_gpu

SCALE = 0.5
HEADS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of some lengths, their candidates, tables, and tiles."""

    lengths: list[int]
    targets: list[int] | None = None
    positions: int = 9
    buckets: int = 12
    width: int = 16
    value_width: int = 24
    window: int | None = None
    queries: int = 64
    keys: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def tiles(self) -> tuple[int, int, int]:
        longest = max(self.lengths)
        return len(self.lengths), -(-longest // self.queries), -(-longest // self.keys)


CASES = {
    "one row": Case([1]),
    "edges": Case([64, 65, 63, 0, 16, 130], [0, 64, 1, 0, 16, 5]),
    "candidates": Case([100, 70], [40, 70]),
    "window": Case([150, 40], [20, 0], window=17),
    "own row alone": Case([70], [20], window=0),
    "many positions": Case([140, 90], [9, 0], positions=512, buckets=0),
    "time alone": Case([100, 30], [5, 0], positions=0, buckets=64),
    "one bucket each": Case([70], [3], positions=1, buckets=1),
    "wide": Case([70], positions=40, width=136, value_width=130, keys=32),
    "large tiles": Case([200, 70], [3, 0], queries=128, keys=64),
    "half precision": Case([90, 33], [7, 0], dtype=torch.float16),
}


def make_problem(case: Case) -> tuple[Any, Tensor, Tensor]:
    """What the kernel is given; the gradient of the output; which tiles are hard."""
    generator = torch.Generator().manual_seed(len(case.lengths))
    total = sum(case.lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def rows(width: int) -> Tensor:
        # Heads begin at 16 bytes; what lies between them is no number.
        apart = -(-width // 8) * 8 + 8
        mixed = torch.full((total, HEADS, apart), float("nan"))
        mixed[:, :, :width] = draw(total, HEADS, width)
        return mixed.to(case.dtype)[:, :, :width]

    times = torch.randint(0, 1 << 40, (total,), generator=generator)
    times >>= torch.randint(0, 41, (total,), generator=generator)
    bias = SimpleNamespace(
        half_position_HP=draw(HEADS, case.positions) if case.positions else None,
        half_time_HQ=draw(HEADS, case.buckets) if case.buckets else None,
        times_T=times if case.buckets else None,
        num_positions=max(case.positions, 1),
        num_buckets=max(case.buckets, 1),
    )
    problem = SimpleNamespace(
        q_THA=rows(case.width),
        k_THA=rows(case.width),
        v_THV=rows(case.value_width),
        offsets_B=torch.tensor([0, *itertools.accumulate(case.lengths)]),
        num_targets_B=None if case.targets is None else torch.tensor(case.targets),
        bias=bias,
        tiles=SimpleNamespace(
            backward_queries=SimpleNamespace(queries=case.queries, keys=case.keys)
        ),
        heads=HEADS,
        width=case.width,
        value_width=case.value_width,
        window=case.window,
        scale=SCALE,
    )
    hard = (torch.rand(case.tiles, generator=generator) < 0.8).to(torch.int8)
    return problem, rows(case.value_width), hard


def sees(query: int, key: int, history: int, window: int | None) -> bool:
    distance = min(query, history) - min(key, history)
    return (key == query or key < min(query, history)) and (window is None or distance <= window)


def by_pairs(case: Case, problem: Any, grad: Tensor, hard: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, from the definition: twice the slope of SiLU at the score, times its gradient."""
    positions_HP = torch.zeros(HEADS, max(case.positions, 1), dtype=torch.float64)
    times_HQ = torch.zeros(HEADS, max(case.buckets, 1), dtype=torch.float64)
    q, k, v, g = (x.double() for x in (problem.q_THA, problem.k_THA, problem.v_THV, grad))
    start = 0
    for sample, length in enumerate(case.lengths):
        history = length - (case.targets[sample] if case.targets else 0)
        own = slice(start, start + length)
        score = torch.einsum("ihd,jhd->ijh", q[own], k[own]) * SCALE
        slope = torch.einsum("ihd,jhd->ijh", g[own], v[own])
        for i, j in itertools.product(range(length), repeat=2):
            marked = hard[sample, i // case.queries, j // case.keys]
            if not (marked and sees(i, j, history, case.window)):
                continue
            distance = min(min(i, history) - min(j, history), max(case.positions, 1) - 1)
            bucket, x = 0, score[i, j]
            if case.positions:
                x = x + 2 * problem.bias.half_position_HP[:, distance]
            if case.buckets:
                passed = int(problem.bias.times_T[start + i] - problem.bias.times_T[start + j])
                bucket = min(max(passed, 0).bit_length(), case.buckets - 1)
                x = x + 2 * problem.bias.half_time_HQ[:, bucket]
            sigmoid = torch.sigmoid(x)
            found = 2 * slope[i, j] * sigmoid * (1 + x * (1 - sigmoid))
            positions_HP[:, distance] += found
            times_HQ[:, bucket] += found
        start += length
    return positions_HP, times_HQ


def sums_of(problem: Any, grad: Tensor, hard: Tensor) -> list[Tensor | None]:
    """The kernel's sums, its parts added in order."""
    with biases_on_emulated_gpu() as called:
        assert can_sum(problem)
        parts = sum_hard_tiles(problem, grad, hard)
    assert called == ["nestpipe_bias_gradient"]
    return [None if x is None else x.view(HEADS, -1, x.shape[1]).sum(1) for x in parts]


@pytest.mark.parametrize("name", CASES)
def test_every_pair_of_a_hard_tile_is_in_the_sums_of_its_buckets(name: str):
    case = CASES[name]
    problem, grad, hard = make_problem(case)
    found = sums_of(problem, grad, hard)
    wanted = by_pairs(case, problem, grad, hard)
    for got, right, size in zip(found, wanted, (case.positions, case.buckets), strict=True):
        assert (got is None) == (size == 0)
        if got is not None:
            assert (got - right).abs().max() <= 1e-5 * right.abs().max().clamp(min=1)


def test_the_same_input_gives_the_same_bits_whatever_thread_comes_first():
    problem, grad, hard = make_problem(CASES["edges"])
    first, again = (sums_of(problem, grad, hard) for _ in range(2))
    for one, two in zip(first, again, strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


def test_what_the_kernel_does_not_know_is_left_to_its_twin():
    with biases_on_emulated_gpu():
        for change in ("dtype", "tile", "memory", "targets"):
            problem, _, _ = make_problem(CASES["candidates"])
            assert can_sum(problem)
            if change == "dtype":
                problem.q_THA = problem.q_THA.float()
            elif change == "tile":
                problem.tiles.backward_queries.queries = 32
            elif change == "memory":
                problem.bias.num_positions = 20_000
            else:
                problem.num_targets_B = problem.num_targets_B.int()
            assert not can_sum(problem), change
