"""The global norm of gradients: exact, so that no order of rows or ranks changes a bit."""

import math
from fractions import Fraction
from functools import reduce

import pytest
import torch

from nestpipe.config import build
from nestpipe.errors import ConfigError
from nestpipe.train.config import TrainSettings
from nestpipe.train.gradients import BINS, clip_factor, count_exactly, exact_total, global_norm
from support.thread_ranks import run_ranks

CPU = torch.device("cpu")


def drawn(count: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, none negative; some are subnormal, some 0, one the largest of all."""
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 0x7F7FFFFF, (count,), generator=rng).int().view(torch.float32)
    numbers[:4] = torch.tensor([0.0, 1e-45, 1e-40, torch.finfo(torch.float32).max])
    return numbers


def total_of(numbers: torch.Tensor) -> float:
    counts = torch.zeros(BINS, dtype=torch.int64)
    count_exactly(counts, numbers)
    return float(exact_total(counts))


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_that_of_whole_numbers(seed):
    numbers = drawn(500, seed)
    if seed % 2:
        numbers = numbers[numbers < 1.0]
    exact = sum(Fraction(number) for number in numbers.tolist())
    assert total_of(numbers) == pytest.approx(float(exact), rel=1e-15)


def test_no_order_changes_a_bit_where_a_plain_sum_would():
    rng = torch.Generator().manual_seed(1)
    numbers = torch.rand(1000, generator=rng)
    orders = [numbers[torch.randperm(len(numbers), generator=rng)] for _ in range(10)]
    assert len({total_of(order) for order in orders}) == 1
    assert len({float(reduce(torch.add, order)) for order in orders}) > 1, "or nothing is shown"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_may_be_anywhere_and_dense_weights_count_once(ranks):
    rng = torch.Generator().manual_seed(2)
    rows, dense = torch.randn(30, 5, generator=rng), [torch.randn(7, 3, generator=rng)]

    def one(comm):
        return float(global_norm(dense, [rows[comm.rank :: comm.size]], comm, CPU))

    expected = math.sqrt(float(rows.double().pow(2).sum() + dense[0].double().pow(2).sum()))
    norms = run_ranks(ranks, one)
    assert set(norms) == {float(global_norm(dense, [rows], None, CPU))}
    assert norms[0] == pytest.approx(expected, rel=1e-6)


def test_there_may_be_no_gradients_at_all():
    assert float(global_norm([], [torch.zeros(0, 4)], None, CPU)) == 0.0
    assert float(clip_factor(torch.zeros(1), 1.0)) == 1.0


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (1.0, 1.0), (4.0, 0.25)])
def test_gradients_are_scaled_as_torch_does(norm, factor):
    assert float(clip_factor(torch.tensor(norm), 1.0)) == pytest.approx(factor, rel=2e-6)


def test_averaged_groups_have_no_common_norm():
    given = {"clip_norm": 1.0, "parallel": {"groups": 2, "merge": "averaged"}}
    with pytest.raises(ConfigError, match=r"clip_norm is 1.0 and parallel.merge 'averaged'"):
        build(TrainSettings, given)
    build(TrainSettings, {**given, "clip_rows": False})
    with pytest.raises(ConfigError, match=r"clip_norm is -1.0; give 0 or"):
        build(TrainSettings, {"clip_norm": -1})
