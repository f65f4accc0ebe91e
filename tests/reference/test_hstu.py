"""HSTU and FuXi against matrices over one history at a time, in float64, gradients too.

Both differ only in the order of float64 sums: `BOUND` is some hundred roundings.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.models import Hstu, HstuConfig, Tokens
from reference.plain_hstu import PlainShape, encode

BOUND = 1e-12
LENGTHS = [0, 1, 3, 5, 9, 14]
"""Around the half and the whole of `max_len`, and beyond it."""
CANDIDATES = [0, 0, 1, 0, 2, 3]


def encoder(*, heads: int, attention_dim: int, time_buckets: int, **options: Any) -> Hstu:
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
        **options,
    )
    made = Hstu(config).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def one_by_one(
    hstu: Hstu,
    rows_TD: Tensor,
    times_T: Tensor | None,
    candidates: list[int],
    asked_T: Tensor | None = None,
) -> Tensor:
    sizes = asdict(hstu.config)
    shape = PlainShape(**{known.name: sizes[known.name] for known in fields(PlainShape)})
    weights = dict(hstu.named_parameters())
    none = [None] * len(LENGTHS)
    times = none if times_T is None else times_T.split(LENGTHS)
    asked = none if asked_T is None else asked_T.split(LENGTHS)
    parts = zip(rows_TD.split(LENGTHS), times, candidates, asked, strict=True)
    return torch.cat(
        [encode(rows, weights, shape, at, count, ask) for rows, at, count, ask in parts]
    )


@pytest.mark.parametrize("candidates", [[0] * len(LENGTHS), CANDIDATES], ids=["history", "both"])
@pytest.mark.parametrize("time_buckets", [0, 5])
@pytest.mark.parametrize(("heads", "attention_dim"), [(1, 9), (2, 4)])
def test_hstu_is_the_formula(
    heads: int, attention_dim: int, time_buckets: int, candidates: list[int]
):
    hstu = encoder(heads=heads, attention_dim=attention_dim, time_buckets=time_buckets)
    assert_is_the_formula(hstu, candidates)


@pytest.mark.parametrize("candidates", [[0] * len(LENGTHS), CANDIDATES], ids=["history", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"time_buckets": 5},
        {"time_buckets": 0},
        {"time_buckets": 5, "feed_forward": 0, "scaled": False},
        {"time_buckets": 5, "feed_forward": 3, "max_attention": 2},
    ],
    ids=str,
)
def test_fuxi_is_the_formula(options: dict[str, Any], candidates: list[int]):
    fuxi = encoder(kind="fuxi", heads=2, attention_dim=4, **options)
    assert_is_the_formula(fuxi, candidates)


@pytest.mark.parametrize("candidates", [[0] * len(LENGTHS), CANDIDATES], ids=["history", "both"])
def test_hstu_with_the_published_options_is_the_formula(candidates: list[int]):
    options = {"shared_bias": True, "scaled": False, "affine_norm": False, "max_attention": 3}
    hstu = encoder(heads=2, attention_dim=4, time_buckets=5, **options)
    assert_is_the_formula(hstu, candidates)


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_the_bias_counts_from_the_next_items_time(kind: str):
    made = encoder(kind=kind, heads=2, attention_dim=4, time_buckets=5, time="next")
    assert_is_the_formula(made, [0] * len(LENGTHS), ahead=True)


def assert_is_the_formula(hstu: Hstu, candidates: list[int], *, ahead: bool = False) -> None:
    """The output, all gradients, and the output without gradients, which takes another path."""
    rows_TD = torch.randn(sum(LENGTHS), 5, dtype=torch.float64, requires_grad=True)
    times_T = asked_T = None
    if hstu.config.time_buckets:
        times_T = torch.cat([torch.randint(0, 60, (n,)).sort().values for n in LENGTHS])
        asked_T = times_T + torch.randint(0, 9, times_T.shape) if ahead else None
    given = torch.tensor(candidates) if any(candidates) else None
    tokens = Tokens(torch.tensor(LENGTHS), given, times_T, asked_T)
    ours_TD = hstu(rows_TD, tokens)
    plain_TD = one_by_one(hstu, rows_TD, times_T, candidates, asked_T)
    torch.testing.assert_close(ours_TD, plain_TD, rtol=BOUND, atol=BOUND)
    inputs = [rows_TD, *hstu.parameters()]
    weights_TD = torch.randn_like(plain_TD)
    ours, plain = (
        torch.autograd.grad((x_TD * weights_TD).sum(), inputs) for x_TD in (ours_TD, plain_TD)
    )
    for one, two in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=BOUND, atol=BOUND * float(two.abs().max()))
    with torch.no_grad():
        torch.testing.assert_close(hstu(rows_TD, tokens), plain_TD, rtol=BOUND, atol=BOUND)
