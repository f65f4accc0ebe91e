"""Dense gradients leave bucket by bucket: the same bits, and nobody waits for a failed pass."""

import math
import threading
from fractions import Fraction
from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from nestpipe.config import build
from nestpipe.errors import ConfigError, RunError
from nestpipe.train import gradients
from nestpipe.train.config import TrainSettings
from nestpipe.train.gradients import (
    BINS,
    GradBuckets,
    buckets_of,
    clip_factor,
    count_exactly,
    exact_total,
    global_norm,
)
from nestpipe.train.ops import backward
from support.thread_ranks import run_ranks


def layers(count: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(count)))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each layer."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 36)


def taken(buckets: GradBuckets) -> tuple[Tensor | None, list[Tensor]]:
    return buckets.take_totals(), list(buckets.take_buckets())


@pytest.mark.parametrize("as_they_come", [True, False])
def test_buckets_leave_in_one_order_with_the_gradients_of_the_pass(as_they_come: bool):
    model, plain = layers(), layers()
    x = torch.arange(6.0).view(2, 3)
    plain(x).sum().backward()
    buckets = GradBuckets(list(model.parameters()))
    with buckets.filling():
        loss = model(x).sum()
        buckets.hand_over_totals(loss.detach()[None])
        with buckets.during_backward(as_they_come=as_they_come):
            loss.backward()
    totals, flats = taken(buckets)
    assert totals is not None
    assert len(flats) == len(buckets_of(list(model.parameters()))) == 4
    for flat in flats:
        flat.mul_(2)  # as two ranks with the same samples would sum them
    buckets.set_gradients()
    for summed, own in zip(model.parameters(), plain.parameters(), strict=True):
        assert summed.grad is not None
        assert own.grad is not None
        assert torch.equal(summed.grad, 2 * own.grad)


def test_parameters_that_the_pass_does_not_reach_have_a_gradient_of_zero():
    model = layers()
    buckets = GradBuckets(list(model.parameters()))
    with buckets.filling():
        buckets.hand_over_totals(torch.zeros(2))
        with buckets.during_backward(as_they_come=True):
            model[:2](torch.ones(1, 3)).sum().backward()
    _, flats = taken(buckets)
    assert [bool(flat.any()) for flat in flats] == [False, False, True, True]


def test_a_second_gradient_in_one_pass_is_refused_where_its_sum_may_have_left():
    model = layers()
    buckets = GradBuckets(list(model.parameters()))
    x = torch.ones(1, 3)

    def pass_twice(*, as_they_come: bool) -> None:
        with buckets.filling(), buckets.during_backward(as_they_come=as_they_come):
            for _ in range(2):
                model(x).sum().backward()

    pass_twice(as_they_come=False)
    with pytest.raises(RunError, match="got a second gradient"):
        pass_twice(as_they_come=True)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_failing_pass_leaves_nobody_waiting(fails_in: str):
    buckets = GradBuckets(list(layers().parameters()))
    got: list[tuple[Tensor | None, list[Tensor]]] = []
    waiting = threading.Thread(target=lambda: got.append(taken(buckets)), daemon=True)
    waiting.start()

    def fail() -> None:
        with buckets.filling():
            if fails_in == "backward":
                buckets.hand_over_totals(torch.ones(2))
            with buckets.during_backward(as_they_come=True):
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    waiting.join(10)
    assert not waiting.is_alive()
    ((totals, flats),) = got
    assert (totals is None) == (fails_in == "forward")
    assert flats == []


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


@pytest.mark.parametrize("here", [True, False])
def test_a_backward_pass_has_threads_of_autograd_unless_told(here: bool):
    allowed: list[bool] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            allowed.append(torch.autograd.is_multithreading_enabled())
            return gradients[0]

    leaf = torch.ones(2, requires_grad=True)
    backward(Watched.apply(leaf).sum(), here=here)  # type: ignore[union-attr]
    assert allowed == [not here]
    assert torch.autograd.is_multithreading_enabled(), "as before"


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
