"""Rows that come twice: marks, and where they belong, against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.routing.lists import seats
from nestpipe.embedding.stale_mask import make_again, marked, marks_of, packed, packed_sizes
from nestpipe.kernels.rows.segments import Bags

CPU = torch.device("cpu")
ROWS = 9
BAGS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=3), max_size=12)
SHARED = st.sets(st.integers(0, ROWS - 1))


def bags_of(sums: list[list[int]]) -> Bags:
    ends = torch.tensor([0, *(len(rows) for rows in sums)]).cumsum(0)
    return Bags(torch.tensor([row for rows in sums for row in rows], dtype=torch.int64), ends)


def sums_of(bags: Bags) -> list[list[int]]:
    return [part.tolist() for part in torch.split(bags.rows_T, bags.lengths().tolist())]


@given(BAGS, SHARED)
def test_a_sum_is_marked_where_any_of_its_rows_is_shared(sums: list[list[int]], shared: set[int]):
    bags = bags_of(sums)
    marks = marks_of(bags, torch.tensor(sorted(shared), dtype=torch.int64), ROWS)
    assert marks.tolist() == [bool(shared & set(rows)) for rows in sums]
    assert sums_of(marked(bags, marks)) == [rows for rows in sums if shared & set(rows)]


@given(st.lists(st.integers(0, ROWS - 1), max_size=12), SHARED)
def test_single_rows_are_marked_the_same_way(rows: list[int], shared: set[int]):
    bags = Bags(torch.tensor(rows, dtype=torch.int64))
    marks = marks_of(bags, torch.tensor(sorted(shared), dtype=torch.int64), ROWS)
    assert marks.tolist() == [row in shared for row in rows]
    assert marked(bags, marks).rows_T.tolist() == [row for row in rows if row in shared]


@given(st.data())
def test_what_is_marked_comes_again_and_goes_where_it_belongs(data: st.DataObject):
    ranks = data.draw(st.integers(1, 4))
    size = st.integers(0, 20)
    # counts[owner][requester] rows, and which of them are marked
    counts = [[data.draw(size) for _ in range(ranks)] for _ in range(ranks)]
    marks = [
        [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in of] for of in counts
    ]

    def of_owner(owner: int) -> torch.Tensor:
        parts = [mark for seat in seats(owner, ranks) for mark in marks[owner][seat]]
        return torch.tensor(parts, dtype=torch.bool)

    def letter(owner: int, requester: int) -> torch.Tensor:
        sizes = packed_sizes(counts[owner])
        order = seats(owner, ranks)[:-1]
        parts = torch.split(
            packed(of_owner(owner), counts[owner], owner), [sizes[seat] for seat in order]
        )
        return dict(zip(order, parts, strict=True))[requester]

    for rank in range(ranks):
        others = seats(rank, ranks)[:-1]
        told = torch.cat([torch.zeros(0, dtype=torch.int64), *(letter(o, rank) for o in others)])
        served = Bags(torch.arange(int(of_owner(rank).sum())))
        come = [counts[owner][rank] for owner in range(ranks)]
        again = make_again(served, of_owner(rank), counts[rank], told, come, rank, CPU)
        assert again.served_counts == [sum(of) for of in marks[rank]]
        assert again.counts == [sum(marks[owner][rank]) for owner in range(ranks)]
        came = [mark for owner in seats(rank, ranks) for mark in marks[owner][rank]]
        assert again.places_n.tolist() == [place for place, mark in enumerate(came) if mark]
