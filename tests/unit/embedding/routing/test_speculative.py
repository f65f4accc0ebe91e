"""Rows that come twice: marks, and where they belong, against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.routing.all_to_all import (
    make_patch,
    mask_sizes,
    pack_mask,
    stale_only,
    stale_rows,
)
from nestpipe.embedding.routing.lists import peers_then_self
from nestpipe.kernels.rows.segments import Segments

CPU = torch.device("cpu")
ROWS = 9
SEGMENTS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=3), max_size=12)
SHARED = st.sets(st.integers(0, ROWS - 1))


def segments_of(sums: list[list[int]]) -> Segments:
    ends = torch.tensor([0, *(len(rows) for rows in sums)]).cumsum(0)
    return Segments(torch.tensor([row for rows in sums for row in rows], dtype=torch.int64), ends)


def sums_of(segments: Segments) -> list[list[int]]:
    return [part.tolist() for part in torch.split(segments.rows_T, segments.lengths().tolist())]


@given(SEGMENTS, SHARED)
def test_a_sum_is_marked_where_any_of_its_rows_is_shared(sums: list[list[int]], shared: set[int]):
    segments = segments_of(sums)
    marks = stale_rows(segments, torch.tensor(sorted(shared), dtype=torch.int64), ROWS)
    assert marks.tolist() == [bool(shared & set(rows)) for rows in sums]
    assert sums_of(stale_only(segments, marks)) == [rows for rows in sums if shared & set(rows)]


@given(st.lists(st.integers(0, ROWS - 1), max_size=12), SHARED)
def test_single_rows_are_marked_the_same_way(rows: list[int], shared: set[int]):
    segments = Segments(torch.tensor(rows, dtype=torch.int64))
    marks = stale_rows(segments, torch.tensor(sorted(shared), dtype=torch.int64), ROWS)
    assert marks.tolist() == [row in shared for row in rows]
    assert stale_only(segments, marks).rows_T.tolist() == [row for row in rows if row in shared]


@given(st.data())
def test_what_is_marked_comes_again_and_goes_where_it_belongs(data: st.DataObject):
    ranks = data.draw(st.integers(1, 4))
    size = st.integers(0, 20)
    # counts[owner][requester] rows, and which of them are stale_only
    counts = [[data.draw(size) for _ in range(ranks)] for _ in range(ranks)]
    marks = [
        [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in of] for of in counts
    ]

    def of_owner(owner: int) -> torch.Tensor:
        parts = [mark for peer in peers_then_self(owner, ranks) for mark in marks[owner][peer]]
        return torch.tensor(parts, dtype=torch.bool)

    def message(owner: int, requester: int) -> torch.Tensor:
        sizes = mask_sizes(counts[owner])
        order = peers_then_self(owner, ranks)[:-1]
        parts = torch.split(
            pack_mask(of_owner(owner), counts[owner], owner), [sizes[peer] for peer in order]
        )
        return dict(zip(order, parts, strict=True))[requester]

    for rank in range(ranks):
        others = peers_then_self(rank, ranks)[:-1]
        told = torch.cat([torch.zeros(0, dtype=torch.int64), *(message(o, rank) for o in others)])
        served = Segments(torch.arange(int(of_owner(rank).sum())))
        come = [counts[owner][rank] for owner in range(ranks)]
        patch = make_patch(served, of_owner(rank), counts[rank], told, come, rank, CPU)
        assert patch.served_counts == [sum(of) for of in marks[rank]]
        assert patch.counts == [sum(marks[owner][rank]) for owner in range(ranks)]
        came = [mark for owner in peers_then_self(rank, ranks) for mark in marks[owner][rank]]
        assert patch.positions_n.tolist() == [place for place, mark in enumerate(came) if mark]
