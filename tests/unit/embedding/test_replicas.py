"""Working sets widened by what replicas touched, against a plain picture of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.embedding.replicas import (
    MergedKeys,
    Replicas,
    everyones_keys,
    extend_union,
    sum_of_touched,
    touched_are_fewer,
)
from nestpipe.embedding.routing.lists import KeyUnion
from nestpipe.kernels.rows.segments import Segments
from nestpipe.schedule import Merge, PlanOptions, Retrieval, plan
from support.thread_ranks import run_ranks

KEYS = st.lists(st.sets(st.integers(-20, 20)), min_size=1, max_size=3)


def union(tables: list[list[int]], terms: list[int], lengths: list[int]) -> KeyUnion:
    keys = [key for table in tables for key in table]
    ends = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    serve = Segments(torch.tensor(terms, dtype=torch.int32))
    back = Segments(torch.arange(sum(lengths), dtype=torch.int32), ends.to(torch.int32))
    keys_K = torch.tensor(keys, dtype=torch.int64)
    return KeyUnion(keys_K, [len(table) for table in tables], [serve], [back])


@settings(deadline=None)
@given(own=KEYS, others=KEYS, seed=st.integers(0, 100), exact=st.booleans())
def test_own_keys_come_first_and_everything_still_points_to_its_row(own, others, seed, exact):
    generator = torch.Generator().manual_seed(seed)
    others = (others * 3)[: len(own)]
    tables = [
        [sorted(keys)[i] for i in torch.randperm(len(keys), generator=generator)] for keys in own
    ]
    every = [sorted(mine | theirs) for mine, theirs in zip(own, others, strict=False)]
    every += [sorted(mine) for mine in own[len(every) :]]
    flat = [(t, key) for t, keys in enumerate(tables) for key in keys]
    count = len(flat)
    terms = torch.randint(0, max(count, 1), (7 if count else 0,), generator=generator).tolist()
    lengths = torch.randint(0, 4, (count,), generator=generator).tolist()
    before = union(tables, terms, lengths)
    merged = MergedKeys(
        torch.tensor([key for keys in every for key in keys], dtype=torch.int64),
        [len(keys) for keys in every],
        torch.ones(sum(map(len, every)), dtype=torch.int64),
        [],
    )
    wide = extend_union(before, merged, exact=exact)

    tables_of = torch.repeat_interleave(torch.tensor(wide.union.table_counts)).tolist()
    row_at = list(zip(tables_of, wide.union.keys_K.tolist(), strict=True))
    assert sorted(row_at) == [(t, key) for t, keys in enumerate(every) for key in keys]
    assert [row_at[i] for i in wide.own_K.tolist()] == flat
    assert [row_at[i] for i in wide.merged_U.tolist()] == [
        (t, key) for t, keys in enumerate(every) for key in keys
    ]
    assert [row_at[i] for i in wide.union.serve[0].rows_T.tolist()] == [flat[i] for i in terms]
    back = wide.union.gather_back[0]
    if not exact:
        assert back is before.gather_back[0]
        return
    assert len(back) == len(row_at)
    of_row = dict(zip(row_at, back.lengths().tolist(), strict=True))
    assert of_row == {**dict.fromkeys(row_at, 0), **dict(zip(flat, lengths, strict=True))}
    assert torch.equal(back.rows_T, before.gather_back[0].rows_T)
    # Rows keep their order inside a table, so the terms of each sum are still its own.
    starts = dict(zip(row_at, back.ends_S1.tolist(), strict=False))  # type: ignore[union-attr]
    first = dict(zip(flat, before.gather_back[0].ends_S1.tolist(), strict=False))  # type: ignore[union-attr]
    assert all(starts[row] == first[row] for row in flat if of_row[row])


def test_everyone_gets_the_keys_of_all():
    def one(comm):
        mine = [torch.arange(comm.rank * 2), torch.tensor([100 + comm.rank])]
        return [[keys.tolist() for keys in table] for table in everyones_keys(comm, mine)]

    expected = [[[], [0, 1], [0, 1, 2, 3]], [[100], [101], [102]]]
    assert run_ranks(3, one) == [expected] * 3


@pytest.mark.parametrize("merge", list(Merge))
def test_touched_keys_are_counted_by_groups_and_forgotten_once_merged(merge):
    every = 1 if merge is Merge.EXACT else 2
    shape = plan(
        "serial", PlanOptions(merge_every=every, merge=merge, retrieval=Retrieval.WHOLE)
    ).shape

    def one(comm):
        replicas = Replicas(comm, [1], shape)
        seen = []
        for batch, keys in enumerate([[1, 2 + comm.rank], [9], [1], [5 + comm.rank]]):
            own = [union([keys], [], [0] * len(keys))]
            replicas.note(batch, own)
            assert replicas.pending
            if shape.merges_replicas(batch):
                wide = replicas.extend(own, replicas.exchange(batch))
                at = wide[0].merged_U
                touched = wide[0].union.keys_K[at].tolist()
                seen.append(dict(zip(touched, wide[0].groups_U.tolist(), strict=True)))
                assert not replicas.pending
        return seen

    expected = (
        [{1: 2, 2: 1, 3: 1}, {9: 2}, {1: 2}, {5: 1, 6: 1}]
        if merge is Merge.EXACT
        else [{1: 2, 2: 1, 3: 1, 9: 2}, {1: 2, 5: 1, 6: 1}]
    )
    assert run_ranks(2, one) == [expected] * 2


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_sending_touched_rows_alone_is_the_sum_of_all(groups):
    """Two stores of different width; some rows touched by one group, some by all."""
    generator = torch.Generator().manual_seed(groups)
    sizes = [(30, 3), (11, 5)]
    touched = [
        [torch.rand(count, generator=generator) < 0.4 for _ in range(groups)] for count, _ in sizes
    ]
    values = [
        [torch.randn(count, width, generator=generator) for _ in range(groups)]
        for count, width in sizes
    ]
    of_groups = [[mask.nonzero()[:, 0] for mask in masks] for masks in touched]
    expected = [
        sum((v * m[:, None] for v, m in zip(of, masks, strict=True)), torch.zeros_like(of[0]))
        for of, masks in zip(values, touched, strict=True)
    ]

    def one(comm):
        mine = [
            of[comm.rank] * masks[comm.rank][:, None]
            for of, masks in zip(values, touched, strict=True)
        ]
        return sum_of_touched(comm, mine, of_groups), comm.bytes_sent

    for sums, sent in run_ranks(groups, one):
        for total, wanted in zip(sums, expected, strict=True):
            assert torch.equal(total, wanted)
        assert sent > 0


def test_few_touches_travel_by_themselves_and_many_in_a_ring():
    part = torch.zeros(10, 4)
    alone = [[torch.arange(5), torch.arange(5, 10)]]
    shared = [[torch.arange(10), torch.arange(10)]]
    assert touched_are_fewer([part], alone)
    assert not touched_are_fewer([part], shared)
