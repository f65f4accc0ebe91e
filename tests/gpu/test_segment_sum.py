"""Sums of rows by one kernel have the bits of torch's operations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nestpipe.kernels.rows import segments as summing
from nestpipe.kernels.rows.cuda import can_sum
from nestpipe.kernels.rows.segments import (
    Segments,
    add_segments,
    add_segments_at,
    ends_of,
    sum_segments,
)

CUDA = torch.device("cuda")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
LENGTHS = torch.tensor([0, 1, 1, 1, 2, 3, 9, 0, 33, 1, 17] * 300 + [700, 1025, 33_000])
"""Of segments; hot keys have long ones."""


@contextmanager
def torch_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing, "can_sum", lambda *_: False)
        yield


def drawn(count: int, dim: int, dtype: torch.dtype, pad: int = 0) -> Tensor:
    return torch.randn(count, dim + pad, device=CUDA).to(dtype)[:, :dim]


def make_segments(rows: Sequence[Tensor], *, single: bool) -> Segments:
    total = len(LENGTHS) if single else int(LENGTHS.sum())
    terms_T = torch.randint(0, sum(map(len, rows)), (total,), dtype=torch.int32, device=CUDA)
    return Segments(terms_T, None if single else ends_of(LENGTHS).int().to(CUDA))


def check_kernel(segments: Segments, parts: Sequence[Tensor]) -> None:
    if not can_sum(segments.rows_T, segments.ends_S1, parts, parts):
        pytest.skip("no kernel: it needs compute capability 9.0 and nvcc")


@pytest.mark.parametrize("comm_dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dim", [1, 3, 64, 66, 128, 129, 256])
@pytest.mark.parametrize("single", [False, True])
def test_sums_are_written_as_they_leave(dim: int, comm_dtype: torch.dtype, single: bool):
    torch.manual_seed(dim)
    rows = [drawn(5_000, dim, FLOAT32, pad=2 * dim)]
    segments = make_segments(rows, single=single)
    check_kernel(segments, rows)
    others = len(segments) // 3

    def summed() -> list[Tensor]:
        out = [
            torch.full((others, dim), 9.0, dtype=comm_dtype, device=CUDA),
            torch.full((len(segments) - others, dim), 9.0, device=CUDA),
        ]
        sum_segments(segments, rows, out, leaving=comm_dtype)
        return out

    found = summed()
    with torch_alone():
        assert all(map(torch.equal, found, summed()))


@pytest.mark.parametrize("comm_dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("dim", [1, 64, 128, 130])
def test_what_came_is_added_to_what_is_there(dim: int, comm_dtype: torch.dtype):
    torch.manual_seed(dim)
    rows = [drawn(3_000, dim, comm_dtype), drawn(0, dim, FLOAT32), drawn(1_000, dim, FLOAT32)]
    segments = make_segments(rows, single=False)
    check_kernel(segments, rows)
    before = drawn(len(segments), dim, FLOAT32)

    def added() -> Tensor:
        out = before.clone()
        add_segments(segments, rows, out, came=comm_dtype)
        return out

    found = added()
    with torch_alone():
        assert torch.equal(found, added())


def test_sums_find_their_places():
    rows = [drawn(1_000, 64, FLOAT32)]
    segments = make_segments(rows, single=False)
    check_kernel(segments, rows)
    before = drawn(2 * len(segments), 64, FLOAT32)
    positions_S = torch.randperm(len(before), device=CUDA)[: len(segments)].int()

    def added() -> Tensor:
        out = before.clone()
        add_segments_at(segments, rows, out, positions_S)
        return out

    found = added()
    with torch_alone():
        assert torch.equal(found, added())


def test_no_bags_are_no_work():
    nothing = torch.zeros(0, dtype=torch.int32, device=CUDA)
    out = torch.zeros(0, 8, device=CUDA)
    sum_segments(Segments(nothing), [drawn(3, 8, FLOAT32)], [out])
    sum_segments(Segments(nothing, torch.zeros(1, dtype=torch.int32, device=CUDA)), [out], [out])
