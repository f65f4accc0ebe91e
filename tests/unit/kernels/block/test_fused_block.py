"""A block's steps by kernels, where Triton interprets them on the host, and the choice of form."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.errors import ConfigError
from nestpipe.kernels.attention import fused as attention
from nestpipe.kernels.attention.reference import pick_columns
from nestpipe.kernels.block import fused
from nestpipe.kernels.block.fused import Dropout, Norm, chosen_kernels
from nestpipe.models import Hstu, HstuConfig, Tokens
from nestpipe.models.draws import dropout, kernel_dropout

BOUND = {torch.float32: 2e-6, torch.float16: 2e-3}
"""Of the largest value of each result, against the plain form in float64."""
LAYER, RMS = Norm(1e-5), Norm(1e-6, centred=False)
SHARE, SITE = 0.3, 5


def leaf(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def results(form: Callable[..., Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    """All outputs, and the gradient of every leaf."""
    made = form(*leaves)
    outs = [made] if isinstance(made, Tensor) else list(made)
    grads = [leaf(90 + n, *out.shape).to(out.dtype).detach() for n, out in enumerate(outs)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]


def compare(
    kernels: Callable[..., Any],
    plain: Callable[..., Any],
    leaves: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
) -> None:
    wide = [x.detach().double().requires_grad_() for x in leaves]
    for number, (a, b) in enumerate(
        zip(results(kernels, leaves), results(plain, wide), strict=True)
    ):
        assert a.shape == b.shape
        error = (a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9)
        print(number, tuple(a.shape), float(error))
        assert error <= BOUND[dtype], (number, float(error))


def drawn(total: int) -> tuple[Tensor, Dropout]:
    generator = torch.Generator().manual_seed(total)
    state_T = torch.randint(-(2**63), 2**63 - 1, (total,), generator=generator)
    return state_T, kernel_dropout(state_T, SHARE, site=SITE)


def plain_norm(x: Tensor, norm: Norm, weight: Tensor | None = None, bias: Tensor | None = None):
    if norm.centred:
        return functional.layer_norm(x, x.shape[1:], weight, bias, norm.eps)
    return functional.rms_norm(x, x.shape[1:], eps=norm.eps)


def compare_add_norm(total: int, width: int) -> None:
    state_T, rule = drawn(total)
    x, added = leaf(1, total, width), leaf(2, total, width)
    weight, bias = leaf(3, width), leaf(4, width)
    compare(
        lambda x, y, w, b: fused.add_norm(x, y, w, b, LAYER),
        lambda x, y, w, b: (x + y, plain_norm(x + y, LAYER, w, b)),
        [x, added, weight, bias],
    )
    compare(
        lambda x: fused.add_norm(x, None, None, None, RMS, rule),
        lambda x: (x * 1, dropout(plain_norm(x, RMS), state_T, SHARE, site=SITE)),
        [x],
    )


def compare_norm_gate(total: int, width: int) -> None:
    state_T, rule = drawn(total)
    bias = leaf(7, width).detach()
    for norm, given, drop in ((LAYER, bias, rule), (RMS, None, None)):

        def plain(x: Tensor, gate: Tensor, norm=norm, given=given, drop=drop) -> Tensor:
            gate = gate if given is None else gate + given.double()
            made = plain_norm(x, norm) * functional.silu(gate)
            return made if drop is None else dropout(made, state_T, SHARE, site=SITE)

        compare(
            lambda x, gate, norm=norm, given=given, drop=drop: fused.norm_gate(
                x, gate, given, norm, drop
            ),
            plain,
            [leaf(5, total, width), leaf(6, total, 3 * width)[:, width : 2 * width]],
        )


def compare_silu_parts(total: int, gate: int, value: int, query: int) -> None:
    """The gate is left alone, but its part of the bias has a gradient."""
    width = gate + value + 2 * query
    split = [gate, value, query, query]

    def plain(mixed: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        mixed = mixed if bias is None else mixed + bias
        u, *parts = mixed.split(split, dim=1)
        return [u, *(functional.silu(part) for part in parts)]

    def kernels(mixed: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        u, *parts = fused.silu_parts(mixed, bias, gate, value)
        return [u if bias is None else u + bias.detach()[:gate], *parts]

    mixed = leaf(8, total, width)
    compare(kernels, plain, [mixed, leaf(9, width)])
    compare(kernels, plain, [mixed])


def compare_positions(total: int, width: int, positions: int) -> None:
    generator = torch.Generator().manual_seed(total)
    index_T = torch.randint(0, positions, (total,), generator=generator)
    index_T[total // 3 :] = 0  # a long run of one position
    compare(
        lambda rows, table: fused.add_positions(rows, table, index_T, 3.0),
        lambda rows, table: rows * 3.0 + pick_columns(table, index_T).T,
        [leaf(10, total, width), leaf(11, width, positions)],
    )


def compare_rows_alone_with_themselves_in_a_batch() -> None:
    """Bit for bit, gradients of rows included, and all of it on repeat."""
    state_T, rule = drawn(40)
    x, added = leaf(1, 40, 48), leaf(2, 40, 48)
    weight, bias = leaf(3, 48), leaf(4, 48)

    def run(rows: slice) -> list[Tensor]:
        own = replace(rule, draws_T=state_T[rows])
        leaves = [x[rows].detach().requires_grad_(), added[rows].detach().requires_grad_()]
        summed, normed = fused.add_norm(leaves[0], leaves[1], weight, bias, LAYER, own)
        gated = fused.norm_gate(normed, leaves[1], None, LAYER, own)
        u, *parts = fused.silu_parts(gated, bias, 12, 12)
        made = fused.gated_silu(torch.cat([u, *parts], dim=1))
        grads = torch.autograd.grad([made, summed], [*leaves, weight, bias], [made, summed])
        return [made.detach(), *grads]

    whole, again, alone = run(slice(0, 40)), run(slice(0, 40)), run(slice(7, 20))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    for a, b in zip(whole[:3], alone[:3], strict=True):
        assert torch.equal(a[7:20], b)


def compare_half_precision() -> None:
    """The norm's output in the products' type, and gradients in the types of their inputs."""
    x, added = leaf(1, 20, 40), leaf(2, 20, 40, dtype=torch.float16)
    with mock.patch.object(fused, "product_dtype", return_value=torch.float16):
        summed, normed = fused.add_norm(x, added, None, None, LAYER)
    assert (summed.dtype, normed.dtype) == (torch.float32, torch.float16)
    grads = torch.autograd.grad([summed, normed], [x, added], [summed, normed])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float16]
    assert torch.equal(grads[0].half(), grads[1])
    wide = normed.detach().requires_grad_(), leaf(3, 20, 40, dtype=torch.float16)
    compare(
        lambda a, b: fused.norm_gate(a, b, None, LAYER),
        lambda a, b: plain_norm(a, LAYER) * functional.silu(b),
        wide,
        torch.float16,
    )


def compare_encoders() -> None:
    """Blocks of both kinds: output and gradients by kernels and by plain torch."""
    lengths_B = torch.tensor([9, 0, 17, 1])
    draws_B = torch.tensor([3, 5, 2**40, -7])
    sizes: dict[str, Any] = {"dim": 24, "heads": 2, "attention_dim": 8, "value_dim": 12}
    sizes |= {"max_len": 16, "time_buckets": 4}
    for kind, drop, again in (("hstu", 0.2, False), ("hstu", 0.0, True), ("fuxi", 0.2, False)):
        sizes |= {"kind": kind, "dropout": drop, "checkpoint_activations": again}
        config = HstuConfig(**sizes)
        tokens = Tokens(lengths_B, torch.tensor([2, 0, 3, 1]), torch.arange(27) ** 2)
        tokens = replace(tokens, draws_B=draws_B if drop else None)
        found: list[list[Tensor]] = []
        for by_kernels in (False, True):
            torch.manual_seed(0)
            encoder = Hstu(config)
            names = [name for name, _ in encoder.named_parameters()]
            chosen = "nestpipe.models.sequence.chosen_kernels"
            with mock.patch(chosen, return_value=by_kernels):
                rows_TD = leaf(1, 27, 24)
                inputs = [rows_TD, *encoder.parameters()]
                out_TD = encoder(rows_TD, tokens)
                grads = torch.autograd.grad(out_TD, inputs, leaf(2, 27, 24).detach())
            found.append([out_TD.detach(), *grads])
        for name, a, b in zip(["out", "rows", *names], *found, strict=True):
            error = (a - b).abs().max() / a.abs().max().clamp(min=1e-6)
            print(kind, name, float(error))
            assert error <= 1e-5, (kind, name, float(error))
        assert any(not torch.equal(a, b) for a, b in zip(*found, strict=True))


BLOCKS: list[dict[str, Any]] = [
    {},
    {"dropout": 0.2, "time_buckets": 4, "shared_bias": True},
    {"affine_norm": False, "position_buckets": 0, "max_attention": 5},
    {"checkpoint_activations": True, "time_buckets": 4, "heads": 1, "attention_dim": 20},
]
"""Of encoders, besides their sizes."""


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """The host's rows may go to the kernels."""
    with (
        mock.patch("nestpipe.models.sequence.chosen_kernels", return_value=True),
        mock.patch.object(attention, "_why_not_fused", return_value=None),
    ):
        yield


def encoded(config: HstuConfig, lengths: Sequence[int], *, half: bool) -> list[Tensor]:
    """Rows out of an encoder, and the gradients of all that it has."""
    total = sum(lengths)
    targets = torch.tensor([min(2, length) for length in lengths])
    draws_B = torch.arange(len(lengths)) * 77 - 5 if config.dropout else None
    tokens = Tokens(torch.tensor(lengths), targets, torch.arange(total) ** 2, draws_B=draws_B)
    torch.manual_seed(0)
    encoder, rows_TD = Hstu(config), leaf(1, total, config.dim)
    with kernels_everywhere(), torch.autocast("cpu", torch.float16, enabled=half):
        out_TD = encoder(rows_TD, tokens)
        assert_nodes(out_TD, one=config.pointwise == "auto")
    grad_TD = leaf(2, total, config.dim).detach()
    with kernels_everywhere():  # what is computed again asks again
        grads = torch.autograd.grad(out_TD, [rows_TD, *encoder.parameters()], grad_TD)
    return [out_TD.detach(), *grads]


def assert_nodes(out_TD: Tensor, *, one: bool) -> None:
    """The result comes out of one node for a block, or of several."""
    assert out_TD.grad_fn is not None
    inputs = [node for node, _ in out_TD.grad_fn.next_functions if node is not None]
    names = {type(node).__name__ for node in inputs}
    assert ("_HstuBlockBackward" in names) == one, names


def compare_a_block_as_one_node_with_its_steps() -> None:
    """Bit for bit: output and every gradient, without and with products in half precision."""
    for given, half in itertools.product(BLOCKS, (False, True)):
        sizes: dict[str, Any] = {"dim": 24, "heads": 2, "attention_dim": 8, "max_len": 16, **given}
        config = HstuConfig(**sizes, value_dim=sizes["attention_dim"])
        steps = replace(config, pointwise="steps")
        for lengths in ([9, 0, 17, 1], [0, 0]):
            found = [encoded(of, lengths, half=half) for of in (config, steps)]
            for number, (a, b) in enumerate(zip(*found, strict=True)):
                assert a.dtype == b.dtype
                assert torch.equal(a, b), (given, half, lengths, number)


def compare_the_kernels_on_the_host() -> None:
    """For a process of its own, with TRITON_INTERPRET=1."""
    for total, width in ((1, 16), (37, 24), (70, 48), (5, 1000)):
        compare_add_norm(total, width)
        compare_norm_gate(total, width)
    for total, gate, value, query in ((70, 24, 24, 24), (130, 60, 20, 8), (1, 16, 16, 16)):
        compare_silu_parts(total, gate, value, query)
        compare(
            fused.gated_silu,
            lambda x: functional.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1],
            [leaf(12, total, 2 * gate)],
        )
    compare_positions(90, 24, 30)
    compare_positions(3, 130, 4)
    compare_rows_alone_with_themselves_in_a_batch()
    compare_half_precision()
    compare_encoders()
    compare_a_block_as_one_node_with_its_steps()


def test_the_kernels_are_the_plain_form_where_triton_interprets_them():
    pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton's interpreter fails with numpy 2.4; install numpy<2.4 to run this")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_auto_is_plain_on_the_host_and_fused_says_why_it_is_not():
    x_TD = torch.zeros(2, 3)
    assert not chosen_kernels(x_TD, "auto", 3)
    assert not chosen_kernels(x_TD, "plain", 3)
    with pytest.raises(ConfigError, match="'fused', but the rows are not on a GPU; use 'auto'"):
        chosen_kernels(x_TD, "fused", 3)


def test_an_encoder_asks_for_the_form_of_its_config():
    config = HstuConfig(blocks=1, dim=8, attention_dim=4, value_dim=4, pointwise="fused")
    with pytest.raises(ConfigError, match="pointwise is 'fused'"):
        Hstu(config)(torch.zeros(2, 8), Tokens(torch.tensor([2])))


def test_without_gradients_every_form_is_plain():
    """So `fused` is no reason to refuse an evaluation on the host."""
    found: list[Tensor] = []
    for form in ("fused", "plain"):
        torch.manual_seed(0)
        encoder = Hstu(HstuConfig(dim=8, attention_dim=4, value_dim=4, pointwise=form))
        with torch.no_grad():
            found.append(encoder(torch.ones(3, 8), Tokens(torch.tensor([2, 1]))))
    assert torch.equal(*found)


if __name__ == "__main__":
    compare_the_kernels_on_the_host()
