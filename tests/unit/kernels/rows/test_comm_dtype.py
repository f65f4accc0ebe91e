"""Rows that travel as bfloat16: half the bytes, rounded the same whoever owns them."""

import pytest
import torch
from torch import Tensor

from nestpipe.config import Table
from nestpipe.embedding.routing.all_to_all import exchange
from nestpipe.embedding.routing.requests import make_request, make_window
from nestpipe.embedding.table_groups import group_tables
from nestpipe.jagged import Jagged
from nestpipe.kernels.rows.segments import COMM_DTYPES, from_wire, round_in_place, to_wire
from support.thread_ranks import run_ranks

BFLOAT16 = torch.bfloat16
ODD = torch.tensor([[1 / 3, -1e30, 1e-42], [float("inf"), 257.0, -0.0]])
"""Numbers that bfloat16 does not have, and some that it has."""


def bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)


def test_what_is_rounded_is_a_copy_unless_it_is_to_stay_in_place():
    rows = ODD.clone()
    there = from_wire(rows, BFLOAT16)
    assert there.dtype == torch.float32
    assert torch.equal(bits(there), bits(ODD.bfloat16().float()))
    assert torch.equal(bits(rows), bits(ODD))
    round_in_place(rows, BFLOAT16)
    assert torch.equal(bits(rows), bits(there))
    assert not torch.equal(rows, ODD)


def test_pieces_of_larger_tensors_may_be_raised():
    wide = torch.randn(7, 10, generator=torch.Generator().manual_seed(0))
    piece, before = wide[1:5, 2:6], wide.clone()
    assert torch.equal(from_wire(piece, BFLOAT16), piece.bfloat16().float())
    assert torch.equal(wide, before)
    round_in_place(piece, BFLOAT16)
    before[1:5, 2:6] = before[1:5, 2:6].bfloat16().float()
    assert torch.equal(wide, before)


def test_in_float32_nothing_is_copied():
    rows = ODD.clone()
    assert from_wire(rows, torch.float32) is rows
    assert to_wire(rows, torch.float32) is rows
    round_in_place(rows, torch.float32)
    assert torch.equal(bits(rows), bits(ODD))


@pytest.mark.parametrize("widths", [(5,), (5, 3)], ids=["one store", "two stores"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_arrive_rounded_in_half_the_bytes(ranks, widths):
    """Rank r sends q - r rows (modulo the ranks) and one more to rank q, nothing to itself."""

    def count(sender: int, receiver: int) -> int:
        return 0 if sender == receiver else (receiver - sender) % ranks + 1

    def rows_of(sender: int, receiver: int, width: int) -> Tensor:
        rng = torch.Generator().manual_seed(100 * sender + receiver)
        return torch.randn(count(sender, receiver), width, generator=rng)

    def one(comm, comm_dtype: str) -> tuple[list[Tensor], int]:
        me, everyone = comm.rank, range(ranks)
        sent = [torch.cat([rows_of(me, q, width) for q in everyone]) for width in widths]
        came = [torch.zeros(sum(count(q, me) for q in everyone), width) for width in widths]
        exchange(
            comm,
            sent,
            [[count(me, q) for q in everyone]] * len(widths),
            came,
            [[count(q, me) for q in everyone]] * len(widths),
            COMM_DTYPES[comm_dtype],
        )
        return came, comm.bytes_sent

    whole = run_ranks(ranks, lambda comm: one(comm, "float32"))
    half = run_ranks(ranks, lambda comm: one(comm, "bfloat16"))
    for me in range(ranks):
        wanted = [torch.cat([rows_of(q, me, width) for q in range(ranks)]) for width in widths]
        for rows, exact, low in zip(wanted, whole[me][0], half[me][0], strict=True):
            assert torch.equal(exact, rows)
            assert low.dtype == torch.float32
            assert torch.equal(low, rows.bfloat16().float())
            assert not torch.equal(low, rows)
        assert whole[me][1] == 2 * half[me][1] > 0


@pytest.mark.parametrize("native", ["1", "0"])
def test_owners_add_up_where_that_is_fewer_bytes_in_that_type(native, monkeypatch):
    """100 rows and their keys, there and back, or 50 sums and all 100 keys besides."""
    monkeypatch.setenv("NESTPIPE_NATIVE", native)
    (group,) = group_tables([Table(name="tags", dim=2, pooling="sum")])
    keys = {"tags": Jagged.from_lists([[2 * s, 2 * s + 1] for s in range(50)])}
    for comm_dtype, rows in (("float32", 50), ("bfloat16", 100)):
        request = make_request(keys, group, 0, 1, COMM_DTYPES[comm_dtype])
        (window,) = make_window([keys], group, 0, 1, COMM_DTYPES[comm_dtype])
        assert len(request.back) == sum(window.rows_per_owner) == rows
