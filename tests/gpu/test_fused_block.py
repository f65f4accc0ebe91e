"""A block's steps by kernels on a GPU, and whole encoders, against the plain form in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.kernels.attention.reference import pick_columns
from nestpipe.kernels.block import fused
from nestpipe.kernels.block.fused import Norm, chosen_kernels
from nestpipe.models import Hstu, HstuConfig, Tokens
from nestpipe.models.draws import dropout, kernel_dropout
from nestpipe.models.protocol import in_precision

pytest.importorskip("triton", reason="triton comes with torch's builds for GPUs alone")

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the largest value of each result."""
LAYER, RMS = Norm(1e-5), Norm(1e-6, centred=False)
SIZES = [(1, 16), (37, 24), (300, 1024), (65, 3072), (9, 5000)]
DTYPES = [torch.float32, torch.bfloat16]


def leaf(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def results(form: Callable[..., Any], leaves: Sequence[Tensor]) -> list[Tensor]:
    """All outputs, and the gradient of every leaf."""
    made = form(*leaves)
    outs = [made] if isinstance(made, Tensor) else list(made)
    # Gradients that bfloat16 holds, so that both forms start from the same ones.
    grads = [leaf(90 + n, *out.shape).bfloat16().to(out.dtype) for n, out in enumerate(outs)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads)]


def compare(
    kernels: Callable[..., Any],
    plain: Callable[..., Any],
    leaves: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Near the plain form in float64, and the same bits on repeat."""
    found, again = results(kernels, leaves), results(kernels, leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    wide = [x.detach().double().requires_grad_() for x in leaves]
    for number, (a, b) in enumerate(zip(found, results(plain, wide), strict=True)):
        error = (a.double() - b).abs().max()
        assert error <= BOUND[dtype] * b.abs().max(), f"result {number}: {error / b.abs().max()}"


def plain_norm(x: Tensor, norm: Norm, weight: Tensor | None = None, bias: Tensor | None = None):
    if norm.centred:
        return functional.layer_norm(x, x.shape[1:], weight, bias, norm.eps)
    return functional.rms_norm(x, x.shape[1:], eps=norm.eps)


def draws(total: int) -> Tensor:
    generator = torch.Generator().manual_seed(total)
    return torch.randint(-(2**63), 2**63 - 1, (total,), generator=generator).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("total", "width"), SIZES)
def test_residual_and_norm(total: int, width: int, dtype: torch.dtype):
    def kernels(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return fused.add_norm(x, y, w, b, LAYER)

    leaves = [leaf(1, total, width), leaf(2, total, width, dtype=dtype)]
    compare(
        kernels,
        lambda x, y, w, b: (x + y, plain_norm(x + y, LAYER, w, b)),
        [*leaves, leaf(3, width), leaf(4, width)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("total", "width"), SIZES)
@pytest.mark.parametrize("norm", [LAYER, RMS])
def test_norm_and_gate_with_the_dropout_of_the_model(
    norm: Norm, total: int, width: int, dtype: torch.dtype
):
    state_T = draws(total)
    rule, bias = kernel_dropout(state_T, 0.3, site=5), leaf(7, width).detach()

    def plain(x: Tensor, gate: Tensor) -> Tensor:
        made = plain_norm(x, norm) * functional.silu(gate + bias.double())
        return dropout(made, state_T, 0.3, site=5)

    leaves = [leaf(n, total, width, dtype=dtype) for n in (5, 6)]
    compare(lambda x, gate: fused.norm_gate(x, gate, bias, norm, rule), plain, leaves, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(1024, 1024, 1024), (60, 20, 8), (3072, 1024, 512)])
def test_activations_of_packed_projections(widths: tuple[int, int, int], dtype: torch.dtype):
    gate, value, query = widths

    def plain(mixed: Tensor, bias: Tensor) -> list[Tensor]:
        u, *parts = (mixed + bias).split([gate, value, query, query], dim=1)
        return [u, *(functional.silu(part) for part in parts)]

    def kernels(mixed: Tensor, bias: Tensor) -> list[Tensor]:
        u, *parts = fused.silu_parts(mixed, bias, gate, value)
        return [u + bias.detach()[:gate], *parts]

    compare(
        kernels,
        plain,
        [leaf(8, 300, sum(widths) + query, dtype=dtype), leaf(9, sum(widths) + query)],
        dtype,
    )
    compare(
        fused.gated_silu,
        lambda x: functional.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1],
        [leaf(12, 300, 2 * gate, dtype=dtype)],
        dtype,
    )


def test_positions_sum_their_rows():
    index_T = torch.arange(5000, device="cuda") % 701
    index_T[3000:] = 700
    compare(
        lambda rows, table: fused.add_positions(rows, table, index_T, 32.0),
        lambda rows, table: rows * 32.0 + pick_columns(table, index_T).T,
        [leaf(10, 5000, 1024), leaf(11, 1024, 702)],
        torch.float32,
    )


def encoded(config: HstuConfig, lengths: list[int], precision: str, *, wide: bool = False):
    """Output and all gradients of an encoder, and their names."""
    torch.manual_seed(0)
    encoder = Hstu(config).cuda()
    encoder = encoder.double() if wide else encoder
    total = sum(lengths)
    tokens = Tokens(torch.tensor(lengths, device="cuda"))
    if config.dropout:
        tokens = replace(tokens, draws_B=draws(len(lengths)))
    rows_TD = leaf(1, total, config.dim).double() if wide else leaf(1, total, config.dim)
    rows_TD = rows_TD.detach().requires_grad_()
    inputs = [rows_TD, *encoder.parameters()]
    with in_precision(rows_TD.device, precision):
        out_TD = encoder(rows_TD, tokens)
    grad_TD = leaf(2, total, config.dim).detach().to(out_TD.dtype)
    names = ["output", "rows", *(name for name, _ in encoder.named_parameters())]
    return names, [out_TD.detach(), *torch.autograd.grad(out_TD, inputs, grad_TD)]


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-5), ("bf16", 5e-2)])
def test_an_encoder_is_as_near_to_float64_as_the_plain_one(kind, precision: str, bound: float):
    config = HstuConfig(kind=kind, dim=256, heads=4, attention_dim=64, value_dim=64, dropout=0.2)
    lengths = [200, 0, 33, 1]
    names, exact = encoded(replace(config, attention="plain"), lengths, "fp32", wide=True)
    _, found = encoded(replace(config, pointwise="fused"), lengths, precision)
    _, again = encoded(replace(config, pointwise="fused"), lengths, precision)
    for name, a, b, c in zip(names, found, again, exact, strict=True):
        assert torch.equal(a, b), name
        assert (a.double() - c).abs().max() <= bound * c.abs().max(), name


def test_a_row_has_the_same_bits_in_any_batch():
    """Of the steps by kernels; products are the library's, which may choose by size."""
    x, gate = leaf(1, 400, 1024, dtype=torch.bfloat16), leaf(2, 400, 1024, dtype=torch.bfloat16)
    whole, part = (
        results(lambda a, b: fused.norm_gate(a, b, None, LAYER), [x[rows], gate[rows]])
        for rows in (slice(0, 400), slice(0, 77))
    )
    assert torch.equal(whole[0][:77], part[0])


def test_auto_takes_the_kernels_on_hopper():
    wanted = torch.cuda.get_device_capability()[0] >= 9
    assert chosen_kernels(torch.zeros(2, 8, device="cuda"), "auto", 8) == wanted


def test_activations_computed_again_give_the_same_bits():
    config = HstuConfig(dim=256, heads=4, attention_dim=64, value_dim=64, dropout=0.2)
    _, kept = encoded(config, [200, 0, 33], "bf16")
    _, again = encoded(replace(config, checkpoint_activations=True), [200, 0, 33], "bf16")
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("given", [{"dropout": 0.2}, {"time_buckets": 9}, {"position_buckets": 0}])
def test_a_block_as_one_node_has_the_bits_of_its_steps_and_of_tritons_own_starts(
    given: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
):
    from nestpipe.kernels.triton_launch import Starter

    sizes: dict[str, Any] = {"dim": 256, "heads": 2, "attention_dim": 64, "value_dim": 64}
    config = HstuConfig(**sizes | given, max_len=300)
    lengths_B = torch.tensor([300, 0, 1, 129], device="cuda")
    draws_B = torch.arange(4, device="cuda") if config.dropout else None
    tokens = Tokens(lengths_B, None, torch.arange(430, device="cuda") * 60, draws_B=draws_B)

    def run(config: HstuConfig) -> list[Tensor]:
        torch.manual_seed(0)
        encoder, rows_TD = Hstu(config).cuda(), leaf(1, 430, 256)
        with in_precision(rows_TD.device, precision):
            out_TD = encoder(rows_TD, tokens)
        leaves = [rows_TD, *encoder.parameters()]
        return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, leaf(2, 430, 256).detach())]

    run(config)  # Triton chooses the code in the first pass
    found = [run(config), run(replace(config, pointwise="steps"))]

    def ordinary(self: Starter, *arguments: Any) -> None:
        self.start_ordinarily(*arguments)

    monkeypatch.setattr(Starter, "__call__", ordinary)
    found.append(run(config))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
