"""Row optimizers against their dense twins in torch.optim, on the rows touched."""

import numpy as np
import pytest
import torch

from nestpipe.embedding.optimizers import OPTIMIZERS, root, row_optimizer
from nestpipe.errors import ConfigError

ROWS, DIM, STEPS = 12, 5, 6


def rowwise_adagrad(weight, gradients, lr, eps):
    """The ten-line reference: one accumulator per row, the mean of the squared gradient."""
    sums = torch.zeros(ROWS)
    for touched, gradient in gradients:
        for row, g in zip(touched.tolist(), gradient, strict=True):
            sums[row] += (g * g).mean()
            weight[row] -= lr * g / (sums[row].sqrt() + eps)
    return weight


def torch_twin(name, weight, gradients, lr, eps):
    parameter = torch.nn.Parameter(weight)
    optimizer = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=lr),
        "adagrad": lambda: torch.optim.Adagrad([parameter], lr=lr, eps=eps),
        "adam": lambda: torch.optim.SparseAdam([parameter], lr=lr, eps=eps),
    }[name]()
    for touched, gradient in gradients:
        indices = touched[None]
        parameter.grad = torch.sparse_coo_tensor(
            indices, gradient, weight.shape, check_invariants=True
        )
        parameter.grad = parameter.grad if name == "adam" else parameter.grad.to_dense()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_row_optimizer_equals_its_dense_twin(name):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(ROWS, DIM, generator=generator)
    gradients = [
        (torch.randperm(ROWS, generator=generator)[:7], torch.randn(7, DIM, generator=generator))
        for _ in range(STEPS)
    ]
    optimizer = row_optimizer(name, lr=0.1, eps=1e-6)
    rows = torch.cat([weight, torch.zeros(ROWS, optimizer.state_dim(DIM))], 1)
    for step, (touched, gradient) in enumerate(gradients, start=1):
        buffer = rows[touched]
        optimizer.update(buffer, gradient, step)
        rows[touched] = buffer
    if name == "rowwise_adagrad":
        expected = rowwise_adagrad(weight.clone(), gradients, 0.1, 1e-6)
    else:
        expected = torch_twin(name, weight.clone(), gradients, 0.1, 1e-6)
    torch.testing.assert_close(rows[:, :DIM], expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("name", "state"), [("sgd", 0), ("adagrad", 8), ("rowwise_adagrad", 1), ("adam", 16)]
)
def test_state_is_part_of_the_row(name, state):
    assert row_optimizer(name).state_dim(8) == state


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ConfigError, match="unknown row optimizer 'lion'"):
        row_optimizer("lion")


def test_roots_are_rounded_as_ieee_says():
    bits = torch.randint(0, 0x7F800000, (1 << 20,), generator=torch.Generator().manual_seed(0))
    numbers = bits.to(torch.int32).view(torch.float32)
    assert torch.equal(root(numbers), torch.from_numpy(np.sqrt(numbers.numpy())))
