"""Requests and working sets: every key finds its owner, every row its requester."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.config import Table
from nestpipe.embedding.groups import group_tables
from nestpipe.embedding.requests import make_request, owner_of
from nestpipe.embedding.working_set import make_working_set
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged

KEY = st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1))
LISTS = st.lists(st.lists(KEY, max_size=4), min_size=3, max_size=3)
(GROUP,) = group_tables(
    [
        Table(name="items", dim=4, features=("history", "candidates")),
        Table(name="users", dim=4),
    ]
)


def asked(request, number, table):
    """The keys of one table that a request sends to one owner."""
    per_owner = torch.split(request.keys_U, request.per_owner)[number]
    return torch.split(per_owner, request.counts_RC[number].tolist())[table]


@given(LISTS, LISTS, LISTS, st.integers(1, 5))
def test_a_request_holds_every_key_once_with_its_owner(history, candidates, users, ranks):
    keys = {
        "history": Jagged.from_lists(history),
        "candidates": Jagged.from_lists(candidates),
        "users": Jagged.from_lists(users),
    }
    request = make_request(keys, GROUP, ranks)
    wanted = {
        0: {k for row in [*history, *candidates] for k in row},
        1: {k for row in users for k in row},
    }
    for table in (0, 1):
        found = [key for rank in range(ranks) for key in asked(request, rank, table).tolist()]
        assert sorted(found) == sorted(wanted[table])
        for rank in range(ranks):
            mine = asked(request, rank, table)
            assert (owner_of(mine, table, ranks) == rank).all()
            assert torch.equal(mine, mine.sort().values)
    every = torch.cat([keys[f.name].values for f in GROUP.features])
    assert torch.equal(request.keys_U[request.picked_T], every)


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_working_set_serves_what_was_asked(ranks, micros, data):
    lists = [
        [
            [sorted(set(data.draw(st.lists(KEY, max_size=5)))) for _ in range(2)]
            for _ in range(micros)
        ]
        for _ in range(ranks)
    ]
    flat = [key for of_rank in lists for of_micro in of_rank for ks in of_micro for key in ks]
    counts = torch.tensor([[[len(ks) for ks in m] for m in r] for r in lists])
    working = make_working_set(torch.tensor(flat, dtype=torch.int64), counts, None)
    for micro in range(micros):
        sent = working.keys_K[working.serve[micro]].tolist()
        assert sent == [key for of_rank in lists for ks in of_rank[micro] for key in ks]
        assert working.serve_counts[micro] == [sum(map(len, r[micro])) for r in lists]
    tables = torch.split(working.keys_K, working.table_counts)
    for table in (0, 1):
        union = {key for r in lists for m in r for key in m[table]}
        assert tables[table].tolist() == sorted(union)


@given(st.sets(KEY), st.sets(KEY), st.sets(KEY), st.sets(KEY))
def test_shared_rows_are_found_in_both_batches(old_items, old_users, new_items, new_users):
    def working(items, users, before):
        keys = torch.tensor([*sorted(items), *sorted(users)], dtype=torch.int64)
        return make_working_set(keys, torch.tensor([[[len(items), len(users)]]]), before)

    before = working(old_items, old_users, None)
    now = working(new_items, new_users, before)
    here, there = now.keys_K[now.shared_K], before.keys_K[now.shared_before]
    assert torch.equal(here, there)
    assert len(here) == len(old_items & new_items) + len(old_users & new_users)
    mask = now.new_mask()
    assert int(mask.sum()) == len(new_items - old_items) + len(new_users - old_users)
    assert now.counts_where(mask) == [len(new_items - old_items), len(new_users - old_users)]


def test_owners_share_the_keys_evenly():
    keys = torch.arange(100_000) * 8
    for ranks in (2, 3, 8):
        share = torch.bincount(owner_of(keys, 0, ranks), minlength=ranks) / len(keys)
        assert (share - 1 / ranks).abs().max() < 0.01
    assert not torch.equal(owner_of(keys, 0, 8), owner_of(keys, 1, 8))


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ([], "there is no table"),
        ([Table(name="a", dim=4), Table(name="a", dim=8)], "two tables are called 'a'"),
        (
            [Table(name="a", dim=4, features=("f",)), Table(name="b", dim=4, features=("f",))],
            "feature 'f' belongs to table 'a' and to 'b'",
        ),
    ],
)
def test_tables_that_contradict_each_other_are_refused(tables, sentence):
    with pytest.raises(ConfigError, match=sentence):
        group_tables(tables)


def test_tables_of_one_width_and_type_share_a_store():
    groups = group_tables(
        [
            Table(name="a", dim=4),
            Table(name="b", dim=8),
            Table(name="c", dim=4),
            Table(name="d", dim=4, dtype="bfloat16"),
        ]
    )
    assert [[t.name for t in g.tables] for g in groups] == [["a", "c"], ["b"], ["d"]]
