"""Pointwise attention: against loops, against gradcheck, and for what it must not see."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.kernels.attention.reference import (
    Mask,
    Padding,
    RelativeBias,
    hstu_attention,
    norm_gate,
)

HEADS, WIDTH, VALUE_WIDTH, NORM = 2, 3, 4, 16.0


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def make_rows(total: int, dtype=torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = [WIDTH, WIDTH, VALUE_WIDTH]
    return [torch.randn(total, HEADS, w, generator=generator, dtype=dtype) for w in widths]


def make_bias(times: list[int] | None = None, dtype=torch.float64) -> RelativeBias:
    generator = torch.Generator().manual_seed(9)
    position = torch.randn(HEADS, 3, generator=generator, dtype=dtype)
    if times is None:
        return RelativeBias(position)
    time = torch.randn(HEADS, 4, generator=generator, dtype=dtype)
    return RelativeBias(position, time, torch.tensor(times))


def tables(bias: RelativeBias) -> list[Tensor]:
    return [table for table in (bias.position_HP, bias.time_HQ) if table is not None]


def by_loops(q, k, v, lengths, targets, bias: RelativeBias) -> Tensor:
    """One pair at a time, from the definition."""
    position_HP, time_HQ = tables(bias)
    times = [] if bias.times_T is None else bias.times_T.tolist()
    out, start = torch.zeros_like(v), 0
    for length, num_targets in zip(lengths, targets, strict=True):
        history = length - num_targets
        for i, j, h in itertools.product(range(length), range(length), range(HEADS)):
            if not (j == i or (j < i and j < history)):
                continue
            score = (q[start + i, h] * k[start + j, h]).sum() * 0.5
            distance = min(i, history) - min(j, history)
            score = score + position_HP[h, min(distance, 2)]
            passed = max(times[start + i] - times[start + j], 0)
            score = score + time_HQ[h, min(passed.bit_length(), 3)]
            out[start + i, h] += functional.silu(score) / NORM * v[start + j, h]
        start += length
    return out


@pytest.mark.parametrize("targets", [[0, 0, 0, 0], [2, 0, 3, 1]])
def test_it_is_the_definition(targets: list[int]):
    lengths = [5, 0, 3, 4]
    q, k, v = make_rows(12)
    bias = make_bias(times=[0, 1, 1, 5, 9, 3, 3, 3, 0, 2, 4, 90])
    mask = Mask(torch.tensor(targets) if any(targets) else None)
    out = hstu_attention(q, k, v, offsets(lengths), norm=NORM, scale=0.5, mask=mask, bias=bias)
    torch.testing.assert_close(out, by_loops(q, k, v, lengths, targets, bias))


@pytest.mark.parametrize("targets", [None, [1, 0, 2]])
def test_gradients_are_right(targets: list[int] | None):
    mask = Mask(None if targets is None else torch.tensor(targets))
    bias = make_bias(times=[0, 1, 5, 2, 0, 9])

    def attend(q, k, v, position, time):
        with_bias = RelativeBias(position, time, bias.times_T)
        where = offsets([3, 0, 3])
        return hstu_attention(q, k, v, where, norm=NORM, scale=0.5, mask=mask, bias=with_bias)

    inputs = [x.requires_grad_() for x in (*make_rows(6), *tables(bias))]
    assert torch.autograd.gradcheck(attend, inputs)


def test_the_gate_has_the_right_gradients():
    attended, u = make_rows(3)[2].requires_grad_(), make_rows(3, seed=1)[2].requires_grad_()
    assert torch.autograd.gradcheck(norm_gate, (attended, u))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_a_sample_is_the_same_alone_and_in_any_batch(dtype, bound):
    lengths, targets = [7, 150, 1, 60], [2, 10, 0, 0]
    q, k, v = make_rows(sum(lengths), dtype)
    bias, ends = make_bias(dtype=dtype), offsets(lengths)

    def attend(q, k, v, where, num_targets):
        mask = Mask(torch.tensor(num_targets))
        return hstu_attention(q, k, v, where, norm=NORM, scale=0.5, mask=mask, bias=bias)

    together = attend(q, k, v, ends, targets)
    for n, (length, num_targets) in enumerate(zip(lengths, targets, strict=True)):
        part = slice(int(ends[n]), int(ends[n + 1]))
        alone = attend(q[part], k[part], v[part], offsets([length]), [num_targets])
        assert (alone - together[part]).abs().max() <= bound * together.abs().max()


def test_other_samples_may_hold_anything():
    q, k, v = make_rows(6)
    clean = hstu_attention(q, k, v, offsets([2, 4]), norm=NORM)
    for x in (q, k, v):
        x[2:] = float("nan")
    torch.testing.assert_close(hstu_attention(q, k, v, offsets([2, 4]), norm=NORM)[:2], clean[:2])


def test_queries_after_cached_keys_get_what_they_got_in_one_piece():
    lengths, cached = [6, 4, 3], [4, 0, 1]
    targets, times = Mask(torch.tensor([1, 2, 0])), [0, 1, 4, 6, 7, 7, 3, 5, 5, 5, 8, 8, 9]
    q, k, v = make_rows(13)
    arguments = {"norm": NORM, "mask": targets, "bias": make_bias(times=times)}
    whole = hstu_attention(q, k, v, offsets(lengths), **arguments)
    new = torch.tensor([4, 5, 6, 7, 8, 9, 11, 12])
    new_offsets = offsets([n - c for n, c in zip(lengths, cached, strict=True)])
    rest = hstu_attention(q[new], k, v, offsets(lengths), query_offsets_B=new_offsets, **arguments)
    torch.testing.assert_close(rest, whole[new])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_in_nothing_out(lengths: list[int]):
    q, k, v = (x.requires_grad_() for x in make_rows(0))
    bias = make_bias(times=[])
    for table in tables(bias):
        table.requires_grad_()
    mask = Mask(torch.zeros(len(lengths), dtype=torch.int64))
    out = hstu_attention(q, k, v, offsets(lengths), norm=NORM, mask=mask, bias=bias)
    assert out.shape == (0, HEADS, VALUE_WIDTH)
    out.sum().backward()
    assert [table.grad is not None and not table.grad.any() for table in tables(bias)] == [True] * 2


def test_the_same_input_gives_the_same_bits():
    lengths = [100] * 16
    bias = make_bias(times=list(range(1600)), dtype=torch.float32)
    results = []
    for _ in range(3):
        inputs = make_rows(1600, torch.float32)
        leaves = [x.clone().requires_grad_() for x in (*inputs, *tables(bias))]
        q, k, v, position, time = leaves
        with_bias = RelativeBias(position, time, bias.times_T)
        out = hstu_attention(q, k, v, offsets(lengths), norm=NORM, bias=with_bias)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_padding_and_back():
    padding = Padding.of(offsets([2, 0, 1]), 3)
    padded = padding.pad(torch.tensor([1, 2, 3]))
    assert padded.tolist() == [[1, 2], [0, 0], [3, 0]]
    assert padding.unpad(padded).tolist() == [1, 2, 3]
