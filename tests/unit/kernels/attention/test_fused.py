"""The fused attention's plain form, and its kernels where Triton interprets them on the host."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.kernels.attention import fused
from nestpipe.kernels.attention.fused import attention_by_kernels, train_attention
from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention
from nestpipe.models import HstuConfig, HstuRanker, HstuRetriever, SampledSoftmaxConfig
from support.emulated_kernels import biases_on_emulated_gpu
from support.examples import examples

NORM, SCALE = 16.0, 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of some lengths, their candidates, and the shape of heads and tables."""

    lengths: list[int]
    targets: list[int] | None = None
    positions: int = 3
    """Columns of the bias by position; 0: there is none."""
    time_buckets: int = 4
    window: int | None = None
    heads: int = 2
    width: int = 3
    value_width: int = 5
    dtype: torch.dtype = torch.float64
    in_order: bool = False
    """Whether times grow, as those of a history do."""

    def leaves(self) -> list[Tensor | None]:
        """Queries, keys, values and both tables, ready for gradients."""
        generator = torch.Generator().manual_seed(len(self.lengths))
        total = sum(self.lengths)
        shapes = [(total, self.heads, w) for w in (self.width, self.width, self.value_width)]
        shapes += [(self.heads, self.positions), (self.heads, self.time_buckets)]
        drawn = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
        return [x.to(self.dtype).requires_grad_() if x.shape[1] else None for x in drawn]

    def arguments(self, leaves: list[Tensor | None]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(9)
        total = sum(self.lengths)
        power = torch.randint(0, self.time_buckets + 2, (total,), generator=generator)
        beside = torch.randint(-1, 2, (total,), generator=generator)
        times = torch.where(torch.rand(total, generator=generator) < 0.4, 0, 2**power + beside)
        if self.in_order:
            times = torch.cumsum(times.clamp(0, 9), 0)
        targets = None
        if self.targets is not None:
            targets = torch.tensor(self.targets, dtype=torch.int64)
        bias = RelativeBias(leaves[3], leaves[4], times if self.time_buckets else None)
        return {
            "offsets_B": torch.tensor([0, *itertools.accumulate(self.lengths)]),
            "norm": NORM,
            "scale": SCALE,
            "mask": Mask(targets),
            "bias": bias,
            "max_attention": self.window,
        }


def results(form: Any, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradient of every leaf."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in case.leaves()]
    out = form(*leaves[:3], **case.arguments(leaves))
    generator = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=generator).to(case.dtype).to(dtype))
    return [out.detach(), *(x.grad for x in leaves if x is not None and x.grad is not None)]


def by_loops(case: Case) -> Tensor:
    """One pair at a time, from the definition."""
    leaves = case.leaves()
    q, k, v, position_HP, time_HQ = leaves
    assert q is not None
    assert k is not None
    assert v is not None
    times = case.arguments(leaves)["bias"].times_T
    out, start = torch.zeros_like(v), 0
    for length, num_targets in zip(case.lengths, case.targets or [0] * 99, strict=False):
        history = length - num_targets
        for i, j, h in itertools.product(range(length), range(length), range(case.heads)):
            distance = min(i, history) - min(j, history)
            within = case.window is None or distance <= case.window
            if not (within and (j == i or (j < i and j < history))):
                continue
            score = (q[start + i, h] * k[start + j, h]).sum() * SCALE
            if position_HP is not None:
                score = score + position_HP[h, min(distance, case.positions - 1)]
            if time_HQ is not None:
                passed = max(int(times[start + i] - times[start + j]), 0)
                score = score + time_HQ[h, min(passed.bit_length(), case.time_buckets - 1)]
            out[start + i, h] += functional.silu(score) / NORM * v[start + j, h]
        start += length
    return out.detach()


@pytest.mark.parametrize("window", [None, 0, 1, 3, 100])
@pytest.mark.parametrize("targets", [None, [2, 0, 3, 1]])
def test_the_plain_form_is_the_definition(targets: list[int] | None, window: int | None):
    case = Case([7, 0, 3, 4], targets, window=window)
    with torch.no_grad():
        expected = by_loops(case)
    torch.testing.assert_close(results(hstu_attention, case, torch.float64)[0], expected)


def test_a_window_has_the_right_gradients():
    case = Case([5, 0, 4], [1, 0, 2], window=2)
    leaves = [x for x in case.leaves() if x is not None]

    def attend(*inputs: Tensor) -> Tensor:
        return hstu_attention(*inputs[:3], **case.arguments(list(inputs)))

    assert torch.autograd.gradcheck(attend, leaves)


def test_the_host_goes_the_plain_way():
    case = Case([9, 2], [1, 1], window=4, dtype=torch.float32)
    pairs = zip(
        results(train_attention, case, torch.float32),
        results(hstu_attention, case, torch.float32),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@st.composite
def make_blocks(draw: st.DrawFn) -> tuple[int, int, int | None, int, int]:
    length = draw(st.integers(1, 60))
    history = draw(st.integers(0, length))
    window = draw(st.none() | st.integers(0, 70))
    return length, history, window, draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([1, 4]))


def sees(query: int, key: int, history: int, window: int | None) -> bool:
    distance = min(query, history) - min(key, history)
    return (key == query or key < min(query, history)) and (window is None or distance <= window)


@given(make_blocks())
@examples("most")
def test_every_pair_is_in_one_tile_and_full_tiles_need_no_mask(blocks):
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")
    length, history, window, num_queries, num_keys = blocks
    pairs = {(i, j) for i in range(length) for j in range(length) if sees(i, j, history, window)}
    # A query past the end is not stored by its own program, but would be added to keys.
    for tiles, end in (
        (tiles_of_queries(length, history, window, num_queries, num_keys), length),
        (tiles_of_keys(length, history, window, num_queries, num_keys), length + num_queries),
    ):
        found: list[tuple[int, int]] = []
        for first_query, first_key, full in tiles:
            inside = [
                (i, j)
                for i in range(first_query, min(first_query + num_queries, end))
                for j in range(first_key, first_key + num_keys)
            ]
            assert not full or pairs.issuperset(inside)
            found += [pair for pair in inside if pair in pairs]
        assert len(found) == len(set(found))
        assert set(found) == pairs


def tiles_of_queries(length, history, window, m, n):
    """First query, first key, and whether no mask is needed; as the kernels walk them."""
    from nestpipe.kernels.attention import fused_pairs as pairs

    def python(function):
        return plain_python(function, pairs)

    for first in range(0, length, m):
        stop = min(first + m, length)
        left, full_start, full_stop, own, num_left, num_right, num_masked = python(
            pairs.keys_of_queries
        )(first, stop, history, window, m, n)
        yield from ((first, key, True) for key in range(full_start, full_stop, n))
        for number in range(num_masked):
            where = (number, left, full_stop, own, num_left, num_right, n)
            yield first, python(pairs.masked_keys)(*where), False


def tiles_of_keys(length, history, window, m, n):
    from nestpipe.kernels.attention import fused_pairs as pairs

    for first in range(0, length, n):
        begin, full_start, full_stop, num_early, num_masked = plain_python(
            pairs.queries_of_keys, pairs
        )(first, length, history, window, m, n)
        yield from ((query, first, True) for query in range(full_start, full_stop, m))
        for number in range(num_masked):
            late = full_stop + (number - num_early) * m
            yield (begin + number * m if number < num_early else late), first, False


class PlainLanguage:
    """What the functions on whole numbers use of Triton's language."""

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def where(condition: bool, a: int, b: int) -> int:
        return a if condition else b


def plain_python(function, module):
    """A kernel's function of whole numbers, as Python runs it."""
    inner = function.fn
    scope = {**vars(module), "tl": PlainLanguage}
    return type(inner)(inner.__code__, scope, inner.__name__, inner.__defaults__)


INTERPRETED = [
    Case([40, 0, 17, 1], None, 0, 0, width=16, value_width=16, heads=1),
    Case([70, 0, 33, 1], [3, 0, 33, 1], 5, 8, width=16, value_width=24),
    Case([70, 0, 33, 1], [3, 0, 33, 1], 5, 8, window=7, width=16, value_width=24),
    Case([33, 32], None, 40, 40, window=40, width=20, value_width=8, heads=1),
    Case([64], [30], 1, 1, window=0, width=5, value_width=3, heads=1),
    # A block of queries ends in rows of the next sample, which no table may count.
    Case([200, 60], None, 5, 12, width=4, value_width=4, heads=1, in_order=True),
    Case([150, 40], [7, 0], 0, 12, width=4, value_width=40, heads=1, in_order=True),
    Case([150, 40], None, 5, 0, width=40, value_width=4, heads=1),
]


EDGES = [0, 1, 15, 16, 17, 31, 32, 33, 47]
"""Lengths at and beside the edges of blocks."""
WIDTHS = [16, 25, 32, 50, 64, 96, 128, 256]


def drawn_cases(count: int) -> Iterator[Case]:
    """Samples, candidates, tables, windows and widths by chance, the same every time."""
    rng = random.Random(7)
    for number in range(count):
        lengths = rng.choices(EDGES, k=rng.randint(1, 3))
        width = WIDTHS[number % len(WIDTHS)]
        yield Case(
            lengths,
            [rng.randint(0, length) for length in lengths] if rng.random() < 0.6 else None,
            positions=rng.choice([0, 1, 4, 40]),
            time_buckets=rng.choice([0, 1, 9]),
            window=rng.choice([None, None, 0, 5, 31]),
            heads=1,
            width=width,
            value_width=width,
            dtype=torch.float32,
            in_order=rng.random() < 0.5,
        )


def compare_the_kernels_on_the_host() -> None:
    """For a process of its own, with TRITON_INTERPRET=1."""
    # Not bfloat16: the interpreter takes its bits for whole numbers.
    halves = [replace(case, dtype=torch.float16) for case in INTERPRETED[:2]]
    singles = [replace(case, dtype=torch.float32) for case in INTERPRETED]
    drawn = list(drawn_cases(len(WIDTHS)))
    for case in [*singles, *drawn, *halves]:
        if not sum(case.lengths):
            continue
        bound = 2e-6 if case.dtype == torch.float32 else 3e-3
        if case in drawn:  # gradients of tables of one column nearly cancel
            bound = 1e-5
        found = results(attention_by_kernels, case, case.dtype)
        wanted = results(hstu_attention, case, torch.float64)
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9)
            print(case, number, float(error))
            assert error <= bound
            assert a.dtype == case.dtype
    compare_with_gradients_of_tables_in_cuda()
    compare_a_sample_alone_with_itself_in_a_batch()
    compare_padded_widths()
    compare_models()


def compare_with_gradients_of_tables_in_cuda() -> None:
    """Triton's kernels leave hard tiles to the one in CUDA, which the host runs here, too."""
    cases = [
        Case([70, 0, 33, 1], [3, 0, 33, 1], 5, 8, width=16, value_width=24),
        Case([200, 60], None, 5, 12, width=4, value_width=4, heads=1, in_order=True),
        Case([300, 140], [20, 0], 0, 40, window=100, width=4, value_width=4, heads=1),
        Case([260, 130], None, 70, 0, width=16, value_width=16, heads=1),
        # Times too far apart for 32 bits.
        Case([200, 70], None, 5, 45, width=4, value_width=4, heads=1),
    ]
    for case in cases:
        case = replace(case, dtype=torch.float16)
        twin = results(attention_by_kernels, case, torch.float16)
        with biases_on_emulated_gpu() as called:
            found = results(attention_by_kernels, case, torch.float16)
        assert called
        wanted = results(hstu_attention, case, torch.float64)
        for a, b, right in zip(found, twin, wanted, strict=True):
            largest = right.abs().max().clamp(min=1e-9)
            assert (a.double() - right).abs().max() <= 3e-3 * largest
            assert (a.double() - b.double()).abs().max() <= 2e-3 * largest
        assert all(torch.equal(a, b) for a, b in zip(found[:4], twin[:4], strict=True))


def compare_a_sample_alone_with_itself_in_a_batch() -> None:
    """Bit for bit, and on repeat."""
    case = Case([33, 70, 5], [1, 8, 0], 5, 8, width=16, value_width=16, dtype=torch.float32)
    leaves = case.leaves()
    arguments = case.arguments(leaves)
    rows = [x for x in leaves[:3] if x is not None]
    whole, again = (attention_by_kernels(*rows, **arguments) for _ in range(2))
    assert torch.equal(whole, again)
    own = slice(33, 103)
    parts = [x[own] for x in rows]
    times = arguments["bias"].times_T[own]
    alone = attention_by_kernels(
        *parts,
        **arguments
        | {"offsets_B": torch.tensor([0, 70]), "mask": Mask(torch.tensor([8]))}
        | {"bias": RelativeBias(leaves[3], leaves[4], times)},
    )
    assert torch.equal(alone, whole[own])


def compare_padded_widths() -> None:
    """Values wider than queries, and narrower ones, as the encoder may ask for them."""
    for widths in ((16, 40), (40, 16)):
        case = Case([20, 33], [2, 0], 5, 8, width=widths[0], value_width=widths[1])
        case = replace(case, dtype=torch.float32)
        found = results(kernels_everywhere(train_attention), case, torch.float32)
        wanted = results(hstu_attention, case, torch.float64)
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape
            assert (a.double() - b).abs().max() <= 2e-6 * b.abs().max()


def kernels_everywhere(function: Any) -> Any:
    """The function, where the host's rows may go to the kernels."""

    def run(*given: Any, **named: Any) -> Any:
        with mock.patch.object(fused, "_why_not_fused", return_value=None):
            return function(*given, **named)

    return run


def compare_models() -> None:
    """A retriever and a ranker of both kinds: loss and gradients by kernels and by plain torch."""
    for kind, shape in itertools.product(("hstu", "fuxi"), (HstuRetriever, HstuRanker)):
        config = HstuConfig(kind=kind, dim=16, time_buckets=6, shared_bias=True, max_attention=9)
        grads = {}
        for form in ("plain", "auto"):
            torch.manual_seed(0)
            own = replace(config, attention=form)
            softmax = SampledSoftmaxConfig(num_items=50, negatives=8)
            model = HstuRanker(own) if shape is HstuRanker else HstuRetriever(own, softmax)
            grads[form] = kernels_everywhere(gradients_of)(model)
        for one, two in zip(grads["plain"], grads["auto"], strict=True):
            assert (one - two).abs().max() <= 1e-4 * one.abs().max().clamp(min=1e-6)
        assert any(not torch.equal(a, b) for a, b in zip(*grads.values(), strict=True))


def gradients_of(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([18, 0, 33, 1])
    history = Jagged(torch.randint(1, 51, (52,), generator=generator), lengths)
    asked = Jagged.from_lists([[1, 2], [3], [4, 5, 6], []])
    sparse = {
        "history": history,
        "timestamps": Jagged(torch.arange(52) * 3, lengths),
        "candidates": asked,
        "labels": Jagged(asked.values % 2, asked.lengths),
    }
    dense = {"sample_id": torch.arange(4), "time": torch.full((4,), 200)}
    batch = Batch(4, dense, sparse)
    table = torch.randn(51, 16, generator=generator)
    keys = model.sparse_keys(batch)
    rows = {name: table[of.values].requires_grad_() for name, of in keys.items()}
    loss = model.dense(rows, batch).total
    return [loss.detach(), *torch.autograd.grad(loss, [*rows.values(), *model.parameters()])]


def test_auto_is_plain_on_the_host_and_fused_says_why_it_is_not():
    case = Case([9, 2], [1, 1], window=4, dtype=torch.float32)
    leaves = case.leaves()
    rows = [x for x in leaves[:3] if x is not None]
    with pytest.raises(ConfigError, match="'fused', but the rows are not on a GPU; use 'auto'"):
        train_attention(*rows, form="fused", **case.arguments(leaves))


def test_the_kernels_are_the_plain_form_where_triton_interprets_them():
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton's interpreter fails with numpy 2.4; install numpy<2.4 to run this")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    compare_the_kernels_on_the_host()
