"""Dense gradients leave bucket by bucket: the same bits, and nobody waits for a failed pass."""

import threading

import pytest
import torch
from torch import Tensor, nn

from nestpipe.errors import RunError
from nestpipe.train import gradients
from nestpipe.train.gradients import GradBuckets, buckets_of


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
