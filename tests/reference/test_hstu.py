"""The HSTU encoder against matrices over one history at a time, in float64, gradients too.

Both differ only in the order of float64 sums: `BOUND` is some hundred roundings.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from nestpipe.models.hstu import Hstu, HstuConfig, Tokens
from reference.plain_hstu import PlainShape, encode

BOUND = 1e-12
LENGTHS = [0, 1, 3, 5, 9, 14]
"""Around the half and the whole of `max_len`, and beyond it."""
CANDIDATES = [0, 0, 1, 0, 2, 3]


def encoder(*, heads: int, attention_dim: int, time_buckets: int) -> Hstu:
    """Weights of size 1, so that no term is too small to be missed."""
    torch.manual_seed(0)
    config = HstuConfig(
        blocks=2,
        heads=heads,
        dim=5,
        attention_dim=attention_dim,
        value_dim=3,
        max_len=8,
        position_buckets=4,
        time_buckets=time_buckets,
    )
    made = Hstu(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def one_by_one(
    hstu: Hstu, rows_TD: Tensor, times_T: Tensor | None, candidates: list[int]
) -> Tensor:
    sizes = asdict(hstu.config)
    names = ("blocks", "heads", "attention_dim", "value_dim", "max_len")
    shape = PlainShape(**{name: sizes[name] for name in names})
    weights = dict(hstu.named_parameters())
    times = [None] * len(LENGTHS) if times_T is None else times_T.split(LENGTHS)
    parts = zip(rows_TD.split(LENGTHS), times, candidates, strict=True)
    return torch.cat([encode(rows, weights, shape, at, count) for rows, at, count in parts])


@pytest.mark.parametrize("candidates", [[0] * len(LENGTHS), CANDIDATES], ids=["history", "both"])
@pytest.mark.parametrize("time_buckets", [0, 5])
@pytest.mark.parametrize(("heads", "attention_dim"), [(1, 9), (2, 4)])
def test_hstu_is_the_formula(
    heads: int, attention_dim: int, time_buckets: int, candidates: list[int]
):
    hstu = encoder(heads=heads, attention_dim=attention_dim, time_buckets=time_buckets)
    rows_TD = torch.randn(sum(LENGTHS), 5, dtype=torch.float64, requires_grad=True)
    times_T = None
    if time_buckets:
        times_T = torch.cat([torch.randint(0, 60, (n,)).sort().values for n in LENGTHS])
    given = torch.tensor(candidates) if any(candidates) else None
    tokens = Tokens(torch.tensor(LENGTHS), given, times_T)
    ours_TD, plain_TD = hstu(rows_TD, tokens), one_by_one(hstu, rows_TD, times_T, candidates)
    torch.testing.assert_close(ours_TD, plain_TD, rtol=BOUND, atol=BOUND)
    inputs = [rows_TD, *hstu.parameters()]
    weights_TD = torch.randn_like(plain_TD)
    ours, plain = (
        torch.autograd.grad((x_TD * weights_TD).sum(), inputs) for x_TD in (ours_TD, plain_TD)
    )
    for one, two in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=BOUND, atol=BOUND * float(two.abs().max()))
    with torch.no_grad():  # inference takes another path
        torch.testing.assert_close(hstu(rows_TD, tokens), plain_TD, rtol=BOUND, atol=BOUND)
