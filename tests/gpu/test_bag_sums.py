"""Sums of rows by one kernel have the bits of torch's operations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.rows import segments as summing
from nestpipe.kernels.rows.cuda import can_sum
from nestpipe.kernels.rows.segments import Bags, add_bags, add_bags_at, ends_of, sum_bags

CUDA = torch.device("cuda")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
LENGTHS = torch.tensor([0, 1, 1, 1, 2, 3, 9, 0, 700, 1, 17] * 300)
"""Of bags; a hot key has a long one."""


@contextmanager
def torch_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing, "can_sum", lambda *_: False)
        yield


def drawn(count: int, dim: int, dtype: torch.dtype, pad: int = 0) -> Tensor:
    return torch.randn(count, dim + pad, device=CUDA).to(dtype)[:, :dim]


def make_bags(rows: Sequence[Tensor], *, single: bool) -> Bags:
    total = len(LENGTHS) if single else int(LENGTHS.sum())
    terms_T = torch.randint(0, sum(map(len, rows)), (total,), dtype=torch.int32, device=CUDA)
    return Bags(terms_T, None if single else ends_of(LENGTHS).int().to(CUDA))


def check_kernel(bags: Bags, parts: Sequence[Tensor]) -> None:
    if not can_sum(bags.rows_T, bags.ends_S1, parts, parts):
        pytest.skip("no kernel: it needs compute capability 9.0 and nvcc")


@pytest.mark.parametrize("wire", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dim", [1, 3, 64, 66, 128, 129, 256])
@pytest.mark.parametrize("single", [False, True])
def test_sums_are_written_as_they_leave(dim: int, wire: torch.dtype, single: bool):
    torch.manual_seed(dim)
    rows = [drawn(5_000, dim, FLOAT32, pad=2 * dim)]
    bags = make_bags(rows, single=single)
    check_kernel(bags, rows)
    others = len(bags) // 3

    def summed() -> list[Tensor]:
        out = [
            torch.full((others, dim), 9.0, dtype=wire, device=CUDA),
            torch.full((len(bags) - others, dim), 9.0, device=CUDA),
        ]
        sum_bags(bags, rows, out, leaving=wire)
        return out

    found = summed()
    with torch_alone():
        assert all(map(torch.equal, found, summed()))


@pytest.mark.parametrize("wire", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dim", [1, 64, 128, 130])
def test_what_came_is_added_to_what_is_there(dim: int, wire: torch.dtype):
    torch.manual_seed(dim)
    rows = [drawn(3_000, dim, wire), drawn(0, dim, FLOAT32), drawn(1_000, dim, FLOAT32)]
    bags = make_bags(rows, single=False)
    check_kernel(bags, rows)
    before = drawn(len(bags), dim, FLOAT32)

    def added() -> Tensor:
        out = before.clone()
        add_bags(bags, rows, out, came=wire)
        return out

    found = added()
    with torch_alone():
        assert torch.equal(found, added())


def test_sums_find_their_places():
    rows = [drawn(1_000, 64, FLOAT32)]
    bags = make_bags(rows, single=False)
    check_kernel(bags, rows)
    before = drawn(2 * len(bags), 64, FLOAT32)
    places_S = torch.randperm(len(before), device=CUDA)[: len(bags)].int()

    def added() -> Tensor:
        out = before.clone()
        add_bags_at(bags, rows, out, places_S)
        return out

    found = added()
    with torch_alone():
        assert torch.equal(found, added())


def test_no_bags_are_no_work():
    nothing = torch.zeros(0, dtype=torch.int32, device=CUDA)
    out = torch.zeros(0, 8, device=CUDA)
    sum_bags(Bags(nothing), [drawn(3, 8, FLOAT32)], [out])
    sum_bags(Bags(nothing, torch.zeros(1, dtype=torch.int32, device=CUDA)), [out], [out])
