"""Drawing items: the published generator, the right range, the stated chances."""

from __future__ import annotations

import math

import pytest
import torch

from nestpipe.models.draws import ItemSampler, _mix

WORD = (1 << 64) - 1


def mix_in_python(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@pytest.mark.parametrize("x", [0, 1, 12345, -1, -(1 << 63), (1 << 63) - 1])
def test_int64_wraps_as_splitmix_wants(x: int):
    assert int(_mix(torch.tensor([x]))) & WORD == mix_in_python(x & WORD)


@pytest.mark.parametrize("sampling", ["uniform", "log_uniform"])
@pytest.mark.parametrize("num_items", [1, 2, 7, 8, 100])
def test_items_come_up_as_often_as_stated(sampling, num_items: int):
    sampler = ItemSampler(num_items, sampling)
    drawn = sampler.draw([torch.arange(400)], 100).flatten()
    counts = torch.bincount(drawn, minlength=num_items + 1)
    assert counts[0] == 0
    assert len(counts) == num_items + 1
    items = torch.arange(1, num_items + 1)
    chances = sampler.log_chance(items).exp()
    assert math.isclose(float(chances.sum()), 1, rel_tol=1e-9)
    spread = (40_000 * chances * (1 - chances)).sqrt()
    assert ((counts[1:] - 40_000 * chances).abs() <= 5 * spread + 1e-6).all()


def test_log_uniform_favours_small_keys_about_as_one_over_key():
    chances = ItemSampler(1000, "log_uniform").log_chance(torch.arange(1, 1001)).exp()
    ratio = chances * torch.arange(1, 1001)
    assert ratio.max() / ratio.min() < 4


def test_every_id_and_the_seed_matter():
    ids = torch.arange(3)
    draws = [
        ItemSampler(10**12, seed=0).draw([ids], 4),
        ItemSampler(10**12, seed=1).draw([ids], 4),
        ItemSampler(10**12, seed=0).draw([ids, torch.zeros(3, dtype=torch.int64)], 4),
        ItemSampler(10**12, seed=0).draw([ids, torch.ones(3, dtype=torch.int64)], 4),
    ]
    assert len(torch.cat(draws).unique()) == 48
    assert torch.equal(ItemSampler(10**12).draw([ids.flip(0)], 4), draws[0].flip(0))
    assert torch.equal(
        ItemSampler(10**12).draw([ids], 2)[:, 0], ItemSampler(10**12).draw([ids], 2)[:, 0]
    )
