"""Rows updated on a GPU in one pass have the bits of torch's operations, one after the other."""

import pytest
import torch

from nestpipe.embedding.optimizers import OPTIMIZERS, row_optimizer
from nestpipe.errors import ConfigError
from nestpipe.kernels.rows.cuda import aligned_rows, can_update, update_rows
from nestpipe.kernels.rows.native import KINDS, OptimizerStruct

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 3, 32, 33, 64, 100, 128, 1000])
def test_one_pass_and_many_operations_give_the_same_bits(name: str, dim: int):
    optimizer = row_optimizer(
        name, lr=0.07, eps=1e-6, scale=4.0, weight_decay=0.7, schedule=lambda step: 0.9**step
    )
    generator = torch.Generator(CUDA).manual_seed(dim)
    count = 3_001

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(count, width, device=CUDA, generator=generator)

    rows_KW = aligned_rows(count, dim + optimizer.state_dim(dim), CUDA)
    rows_KW.copy_(drawn(rows_KW.shape[1]))
    rows_KW[:, dim:].abs_()  # sums of squares, moments and counts
    twin_KW = rows_KW.clone()
    for step in range(1, 5):
        gradients_KD = drawn(dim) * 10.0 ** (step - 3)
        times = torch.full((), 0.3 / step, device=CUDA)
        if not can_update(rows_KW, gradients_KD, times):
            pytest.skip("no kernel: it needs compute capability 9.0 and nvcc")
        optimizer.update(twin_KW, gradients_KD * times, step)
        optimizer.update_times(rows_KW, gradients_KD, times, step)
        assert torch.equal(rows_KW, twin_KW), f"step {step}"


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 33, 64, 128])
def test_rows_of_a_pool_are_updated_by_slot(name: str, dim: int):
    optimizer = row_optimizer(
        name, lr=0.07, eps=1e-6, scale=4.0, weight_decay=0.7, schedule=lambda step: 0.9**step
    )
    generator = torch.Generator(CUDA).manual_seed(dim)
    pool_NW = aligned_rows(9_000, dim + optimizer.state_dim(dim), CUDA)
    pool_NW.copy_(torch.randn(pool_NW.shape, device=CUDA, generator=generator))
    pool_NW[:, dim:].abs_()
    twin_NW = pool_NW.clone()
    slots_K = torch.randperm(9_000, device=CUDA, generator=generator)[:3_001].int()
    times = torch.full((), 0.3, device=CUDA)
    for step in (1, 2):
        gradients_KD = torch.randn(3_001, dim, device=CUDA, generator=generator)
        if not can_update(pool_NW, gradients_KD, times, slots_K):
            pytest.skip("no kernel: it needs compute capability 9.0 and nvcc")
        rows_KW = twin_NW[slots_K.long()]
        optimizer.update(rows_KW, gradients_KD * times, step)
        twin_NW[slots_K.long()] = rows_KW
        optimizer.update_times(pool_NW, gradients_KD, times, step, slots_K)
        assert torch.equal(pool_NW, twin_NW), f"step {step}"


def test_no_rows_are_no_work():
    rows_KW, gradients_KD = torch.zeros(0, 8, device=CUDA), torch.zeros(0, 8, device=CUDA)
    times, no_slots = torch.ones((), device=CUDA), torch.zeros(0, dtype=torch.int32, device=CUDA)
    row_optimizer("sgd").update_times(rows_KW, gradients_KD, times, 1)
    row_optimizer("sgd").update_times(
        torch.zeros(3, 8, device=CUDA), gradients_KD, times, 1, no_slots
    )


def test_a_number_of_the_host_takes_the_other_way():
    rows_KW, gradients_KD = torch.ones(3, 2, device=CUDA), torch.ones(3, 2, device=CUDA)
    row_optimizer("sgd", lr=1.0).update_times(rows_KW, gradients_KD, 0.5, 1)
    assert torch.equal(rows_KW.cpu(), torch.full((3, 2), 0.5))


@pytest.mark.parametrize("kind", [-1, len(KINDS), 99])
def test_an_optimizer_that_the_kernel_does_not_have_changes_no_row(kind: int):
    rows_KW, gradients_KD = torch.ones(3, 3, device=CUDA), torch.ones(3, 2, device=CUDA)
    times = torch.ones((), device=CUDA)
    if not can_update(rows_KW, gradients_KD, times):
        pytest.skip("no kernel: it needs compute capability 9.0 and nvcc")
    with pytest.raises(ConfigError, match=f"no row optimizer of kind {kind}; use one of sgd, "):
        update_rows(OptimizerStruct(kind, 0.1), rows_KW, gradients_KD, times)
    assert torch.equal(rows_KW.cpu(), torch.ones(3, 3))
