"""Routing: every key finds its owner, every row its requester, every gradient its row.

Native code and its plain twin are both held against a reference in plain lists.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nestpipe.config import Table
from nestpipe.embedding.routing import native as native_routing
from nestpipe.embedding.routing import reference as plain_routing
from nestpipe.embedding.routing.all_to_all import (
    in_rank_order,
    message_sizes,
    pack_requests,
    unpack_requests,
)
from nestpipe.embedding.routing.lists import (
    KnownKeys,
    OwnerRequests,
    RoutedKeys,
    WantedKeys,
    owner_of,
    peers_then_self,
)
from nestpipe.embedding.routing.owners import make_working_set
from nestpipe.embedding.routing.requests import Request, lookup_rows, make_request
from nestpipe.embedding.table_groups import TableGroup, group_tables
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.kernels.rows.segments import Segments
from support.examples import examples

TWINS = pytest.mark.parametrize("routing", [native_routing, plain_routing], ids=["native", "plain"])
FEW, ANY = st.integers(-3, 6), st.integers(-(2**63), 2**63 - 1)
CPU = torch.device("cpu")


def different_keys(samples: int, length: int, seed: int) -> list[list[int]]:
    """Samples whose keys never repeat: owners will add them up."""
    return [[(seed + s * length + k) * 7919 for k in range(length)] for s in range(samples)]


DIFFERENT = st.builds(different_keys, st.integers(1, 5), st.integers(3, 9), st.integers(0, 999))
SAMPLES = st.one_of(
    st.lists(st.lists(FEW, max_size=6), max_size=5),
    st.lists(st.lists(ANY, max_size=6), max_size=5),
    st.lists(st.lists(st.one_of(FEW, ANY), min_size=1, max_size=1), max_size=5),
    DIFFERENT,
    DIFFERENT.map(lambda lists: [[], *lists, lists[0][:2]]),
)


def int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


@contextmanager
def native(wanted: bool) -> Iterator[None]:
    with patch.dict(os.environ, NESTPIPE_NATIVE=str(int(wanted))):
        yield


def lists_of(segments: Segments) -> list[list[int]]:
    """The terms of each sum."""
    terms = segments.rows_T.tolist()
    if segments.ends_S1 is None:
        return [[term] for term in terms]
    ends = segments.ends_S1.tolist()
    assert len(segments) == len(ends) - 1
    return [terms[a:b] for a, b in pairwise(ends)]


# The requester's side


@dataclass(frozen=True)
class Ask:
    """What a micro-batch wants of each table: the keys of each output."""

    outputs: list[list[list[int]]]
    pooled: list[bool]
    table_owners: list[int]
    dim: int
    rank: int
    ranks: int

    @property
    def tables(self) -> range:
        return range(len(self.outputs))

    def wanted(self) -> WantedKeys:
        flat = [[key for output in of for key in output] for of in self.outputs]
        return WantedKeys(
            keys=[int64(keys) for keys in flat],
            lengths=[int64([len(output) for output in of]) for of in self.outputs],
            pooled=self.pooled,
            table_owners=tuple(self.table_owners),
            row_bytes=4 * self.dim,
            rank=self.rank,
            ranks=self.ranks,
        )

    def owner(self, key: int, table: int) -> int:
        return int(owner_of(int64([key]), table, self.ranks, self.table_owners[table]))


@st.composite
def asks(draw) -> Ask:
    tables = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 5))
    pooled = draw(st.lists(st.booleans(), min_size=tables, max_size=tables))
    outputs = [draw(SAMPLES) for _ in range(tables)]
    return Ask(
        outputs=[
            of if sums else [[key] for output in of for key in output]
            for of, sums in zip(outputs, pooled, strict=True)
        ],
        pooled=pooled,
        table_owners=[draw(st.sampled_from([-1, -1, 0, 1, 7])) for _ in range(tables)],
        dim=draw(st.sampled_from([1, 4, 64])),
        rank=draw(st.integers(0, ranks - 1)),
        ranks=ranks,
    )


def any_ask(test):
    """Drawn at random; always there are sums of several owners, and whole tables of one."""
    outputs = [different_keys(6, 9, 1), [[1], [2], [1]], [[], *different_keys(3, 7, 5)]]
    spread = Ask(outputs, [True, False, True], [-1, -1, -1], dim=16, rank=1, ranks=3)
    whole = replace(spread, table_owners=[2, 0, 4])
    return given(asks())(example(spread)(example(whole)(test)))


@dataclass(frozen=True)
class Row:
    """A row that comes back: the keys whose sum it is."""

    owner: int
    table: int
    keys: list[int]


def rows_that_come(routed: RoutedKeys | Request, rank: int) -> list[Row]:
    """Read what is sent as its owner would."""
    ranks, tables = routed.key_counts_RC.shape
    keys, lengths = iter(routed.keys_A.tolist()), iter(routed.lengths_L.tolist())
    rows: list[Row] = []
    for owner in peers_then_self(rank, ranks):
        for table in range(tables):
            count = int(routed.key_counts_RC[owner, table])
            sums = int(routed.row_counts_RC[owner, table])
            assert sums <= count
            sizes = [next(lengths) for _ in range(sums)] if sums < count else [1] * sums
            assert sum(sizes) == count
            rows += [Row(owner, table, [next(keys) for _ in range(size)]) for size in sizes]
    assert next(keys, None) is next(lengths, None) is None, "more is sent than was counted"
    return rows


def summed_tables(routed: RoutedKeys) -> list[bool]:
    return (routed.row_counts_RC < routed.key_counts_RC).any(0).tolist()


@TWINS
@any_ask
def test_every_output_is_made_of_its_own_keys_in_a_fixed_order(routing, ask):
    routed = routing.request(ask.wanted())
    rows = rows_that_come(routed, ask.rank)
    outputs = [(table, keys) for table in ask.tables for keys in ask.outputs[table]]
    seen = lists_of(routed.seen)
    summed = summed_tables(routed)
    assert len(seen) == len(outputs)
    for (table, keys), terms in zip(outputs, seen, strict=True):
        assert {rows[term].table for term in terms} <= {table}
        owners = [rows[term].owner for term in terms]
        if summed[table]:
            assert owners == sorted(set(owners)), "one sum of each owner, in rank order"
            keys = sorted(keys, key=lambda key: ask.owner(key, table))
        assert [key for term in terms for key in rows[term].keys] == keys


@TWINS
@any_ask
def test_every_key_is_sent_to_its_owner_and_no_more_often_than_needed(routing, ask):
    routed = routing.request(ask.wanted())
    rows = rows_that_come(routed, ask.rank)
    for table in ask.tables:
        every = [key for output in ask.outputs[table] for key in output]
        sent = [key for row in rows if row.table == table for key in row.keys]
        assert sorted(sent) == sorted(every if summed_tables(routed)[table] else set(every))
    for row in rows:
        assert {ask.owner(key, row.table) for key in row.keys} == {row.owner}


@TWINS
@any_ask
def test_gradients_go_back_to_the_rows_that_were_seen(routing, ask):
    routed = routing.request(ask.wanted())
    back: list[list[int]] = [[] for _ in range(int(routed.row_counts_RC.sum()))]
    for output, terms in enumerate(lists_of(routed.seen)):
        for term in terms:
            back[term].append(output)
    assert lists_of(routed.back) == back


@any_ask
def test_native_and_plain_requests_send_the_same(ask):
    fast, plain = (twin.request(ask.wanted()) for twin in (native_routing, plain_routing))
    assert torch.equal(fast.key_counts_RC, plain.key_counts_RC)
    assert torch.equal(fast.row_counts_RC, plain.row_counts_RC)
    assert torch.equal(fast.lengths_L, plain.lengths_L)
    of_fast, of_plain = rows_that_come(fast, ask.rank), rows_that_come(plain, ask.rank)
    in_order = [
        sorted(rows, key=lambda r: (r.owner, r.table, r.keys)) for rows in (of_fast, of_plain)
    ]
    assert in_order[0] == in_order[1]


@any_ask
def test_rows_are_straight_exactly_where_they_come_as_they_are_seen(ask):
    routed = native_routing.request(ask.wanted())
    seen = iter(lists_of(routed.seen))
    for table, start in enumerate(routed.straight):
        terms = [next(seen) for _ in ask.outputs[table]]
        whole = ask.table_owners[table] >= 0 and summed_tables(routed)[table]
        assert (start >= 0) == (whole and all(ask.outputs[table]))
        if start >= 0:
            assert terms == [[start + i] for i in range(len(terms))]


@TWINS
@pytest.mark.parametrize(
    ("outputs", "summed"),
    [
        ([[10 * s + k for k in range(10)] for s in range(20)], True),
        ([list(range(10)) for _ in range(20)], False),
        ([[s] for s in range(20)], False),
        ([[], []], False),
        ([], False),
    ],
    ids=["all different", "all the same", "one each", "none", "no samples"],
)
def test_owners_add_up_where_that_is_less_to_send(routing, outputs, summed):
    for table_owner, ranks in [(-1, 1), (-1, 3), (1, 3)]:
        for pooled in (True, False):
            of = outputs if pooled else [[key] for output in outputs for key in output]
            ask = Ask([of], [pooled], [table_owner], dim=16, rank=0, ranks=ranks)
            assert summed_tables(routing.request(ask.wanted())) == [summed and pooled]


def test_more_keys_than_positions_can_number_are_refused():
    many = int64([1]).expand(2**31)
    wanted = WantedKeys([many], [many], [False], (-1,), row_bytes=16, rank=0, ranks=1)
    with pytest.raises(ConfigError, match=r"2,147,483,648 keys .* more micro-batches"):
        native_routing.request(wanted)
    counts = int64([2**31]).view(1, 1, 1)
    with pytest.raises(ConfigError, match=r"2,147,483,648 keys .* smaller batch"):
        native_routing.union_of(OwnerRequests(many, many[:0], counts, counts, 0))


# Features of tables


FEATURES = ("history", "candidates", "tags", "words", "clicks")


def group_of(pooled: tuple[str, ...], placement: str) -> TableGroup:
    """Tables with two features, two and one, of which some pool."""
    features = {"items": ("history", "candidates"), "tags": ("tags", "words"), "clicks": ()}
    (group,) = group_tables(
        [
            Table(
                name=name,
                dim=4,
                features=of,
                pooling="sum" if name in pooled else "none",
                placement=placement,  # type: ignore[arg-type]
            )
            for name, of in features.items()
        ]
    )
    return group


GROUPS = st.builds(
    group_of,
    st.sampled_from([("items", "tags", "clicks"), ("tags", "clicks"), ("clicks",)]),
    st.sampled_from(["rows", "table"]),
)


@st.composite
def batches(draw) -> dict[str, list[list[int]]]:
    """Lists of keys of every feature: short or long, with repeats or without."""
    size = draw(st.integers(0, 5))
    mixed = draw(st.booleans())

    def lists() -> list[list[int]]:
        if not mixed or draw(st.booleans()):
            return different_keys(size, draw(st.integers(3, 9)), draw(st.integers(0, 999)))
        of_sample = st.lists(draw(st.sampled_from([FEW, ANY])), max_size=5)
        return draw(st.lists(of_sample, min_size=size, max_size=size))

    return {name: lists() for name in FEATURES}


BATCHES = batches()


def value_of(key: int, table: int) -> float:
    """A row's number: small and whole, so that sums are exact in any order."""
    return float((key * 31 + table * 17) % 1001)


@examples("more")
@given(GROUPS, BATCHES, st.integers(1, 4), st.data())
def test_a_model_sees_the_rows_of_its_features_and_hands_back_their_gradients(
    group, batch, ranks, data
):
    rank = data.draw(st.integers(0, ranks - 1))
    keys = {name: Jagged.from_lists(lists) for name, lists in batch.items()}
    for wanted in (True, False):
        with native(wanted):
            request = make_request(keys, group, rank, ranks)
            check_features(request, group, batch, rank)


def check_features(request: Request, group: TableGroup, batch, rank: int) -> None:
    rows = rows_that_come(request, rank)
    came = torch.tensor([sum(value_of(k, r.table) for k in r.keys) for r in rows])
    own = sum(row.owner == rank for row in rows)
    delivered: list[torch.Tensor] = []
    seen = lookup_rows(
        came.view(-1, 1).repeat(1, group.dim),
        request,
        lambda sent, mine: delivered.extend([sent, *mine]),
        own,
    )
    gradient_of_row = [0.0] * len(rows)
    terms, number = iter(lists_of(request.seen)), 0
    for feature in group.features:
        lists = batch[feature.name]
        outputs = lists if feature.pooled else [[key] for keys in lists for key in keys]
        expected = [sum(value_of(key, feature.table) for key in keys) for keys in outputs]
        assert seen[feature.name][:, 0].tolist() == expected
        for _ in outputs:
            number += 1
            for term in next(terms):
                gradient_of_row[term] += number
    first, loss = 0, torch.zeros(())
    for rows_OD in seen.values():
        weights = torch.arange(first + 1.0, first + 1 + len(rows_OD))
        loss = loss + (rows_OD * weights[:, None]).sum()
        first += len(rows_OD)
    loss.backward()
    assert len(delivered[0]) == len(rows) - own
    assert torch.cat(delivered)[:, -1].tolist() == gradient_of_row


def test_gradients_of_any_layout_are_taken():
    """Torch gives what is equal everywhere, or empty, or a column, strides of its own."""
    (group,) = group_tables([Table(name="a", dim=1), Table(name="b", dim=1)])
    for lists in ([[1], [2]], [[1]], []):
        keys = {name: Jagged.from_lists(lists) for name in ("a", "b")}
        request = make_request(keys, group, 0, 1)
        delivered: list[torch.Tensor] = []
        seen = lookup_rows(
            torch.zeros(len(request.back), 1),
            request,
            lambda sent, mine, into=delivered: into.extend([sent, *mine]),
            len(request.back),
        )
        (seen["a"].sum() + (torch.ones(1, len(lists)) @ seen["b"]).sum()).backward()
        assert torch.cat(delivered).tolist() == [[1.0]] * len(request.back)


# The owner's side


@dataclass(frozen=True)
class World:
    """Requests of every rank and micro-batch."""

    requests: list[list[Request]]
    """[rank][micro]"""

    @property
    def ranks(self) -> int:
        return len(self.requests)

    @property
    def micros(self) -> int:
        return len(self.requests[0])

    def asked(self, owner: int) -> OwnerRequests:
        """What an owner finds in its messages."""
        messages = [pack_requests(of, rank) for rank, of in enumerate(self.requests)]
        to_owner = [
            messages[r][peers_then_self(r, self.ranks).index(owner)] for r in range(self.ranks)
        ]
        key_counts = torch.stack(
            [torch.stack([r.key_counts_RC[owner] for r in of]) for of in self.requests]
        )
        row_counts = torch.stack(
            [torch.stack([r.row_counts_RC[owner] for r in of]) for of in self.requests]
        )
        assert message_sizes(key_counts, row_counts) == [len(message) for message in to_owner]
        came = torch.cat([to_owner[r] for r in peers_then_self(owner, self.ranks)])
        return unpack_requests(came, key_counts, row_counts, owner)

    def rows(self, requester: int, micro: int, owner: int) -> list[Row]:
        """What the requester wants of the owner, in the order in which it counts on it."""
        every = rows_that_come(self.requests[requester][micro], requester)
        return [row for row in every if row.owner == owner]


@st.composite
def worlds(draw) -> World:
    ranks, micros = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    group = draw(GROUPS)

    def one(rank: int) -> Request:
        keys = {name: Jagged.from_lists(lists) for name, lists in draw(BATCHES).items()}
        with native(draw(st.booleans())):
            return make_request(keys, group, rank, ranks)

    return World([[one(rank) for _ in range(micros)] for rank in range(ranks)])


@examples("some")
@given(worlds())
def test_letters_tell_an_owner_what_was_asked(world):
    for owner in range(world.ranks):
        asked = world.asked(owner)
        keys, lengths = iter(asked.keys_A.tolist()), iter(asked.lengths_L.tolist())
        for requester in peers_then_self(owner, world.ranks):
            for micro in range(world.micros):
                for row in world.rows(requester, micro, owner):
                    assert [next(keys) for _ in row.keys] == row.keys
                sums = asked.row_counts_RMC[requester, micro]
                for table, summed in enumerate(sums < asked.key_counts_RMC[requester, micro]):
                    rows = world.rows(requester, micro, owner)
                    sizes = [len(row.keys) for row in rows if row.table == table]
                    assert not summed or [next(lengths) for _ in sizes] == sizes
        assert next(keys, None) is next(lengths, None) is None


@TWINS
@examples("some")
@given(worlds())
def test_an_owner_serves_what_was_asked_and_gathers_what_comes_back(routing, world):
    for owner in range(world.ranks):
        union = routing.union_of(world.asked(owner))
        keys = [
            (table, key)
            for table, part in enumerate(torch.split(union.keys_K, union.table_counts))
            for key in part.tolist()
        ]
        everything = [
            (row.table, key)
            for requester in range(world.ranks)
            for micro in range(world.micros)
            for row in world.rows(requester, micro, owner)
            for key in row.keys
        ]
        assert len(keys) == len(set(keys))
        assert set(keys) == set(everything)
        for micro in range(world.micros):
            back: list[list[int]] = [[] for _ in keys]
            wanted: list[list[tuple[int, int]]] = []
            start_of: dict[int, int] = {}
            for requester in peers_then_self(owner, world.ranks):
                start_of[requester] = len(wanted)
                for row in world.rows(requester, micro, owner):
                    wanted.append([(row.table, key) for key in row.keys])
            for requester in range(world.ranks):
                for number, row in enumerate(world.rows(requester, micro, owner)):
                    for key in row.keys:
                        back[keys.index((row.table, key))].append(start_of[requester] + number)
            served = lists_of(union.serve[micro])
            assert [[keys[term] for term in terms] for terms in served] == wanted
            assert lists_of(union.gather_back[micro]) == back


@examples("some")
@given(worlds())
def test_native_and_plain_owners_differ_only_in_the_order_of_their_keys(world):
    for owner in range(world.ranks):
        asked = world.asked(owner)
        fast, plain = native_routing.union_of(asked), plain_routing.union_of(asked)
        assert fast.table_counts == plain.table_counts
        for one, other in zip(
            torch.split(fast.keys_K, fast.table_counts),
            torch.split(plain.keys_K, plain.table_counts),
            strict=True,
        ):
            assert one.sort().values.tolist() == other.tolist()
        for one, other in zip(fast.serve, plain.serve, strict=True):
            assert (one.ends_S1 is None) == (other.ends_S1 is None)
            assert list(map(len, lists_of(one))) == list(map(len, lists_of(other)))


@pytest.mark.parametrize("different", [(1, 1, 5000, 1), (5000, 1, 5000), (0, 4999, 3)])
def test_more_different_keys_than_the_last_table_had_are_numbered(different):
    """Native code makes room for as large a part of a table's keys as was different before."""
    keys = [torch.arange(5000) % max(count, 1) * 7919 for count in different]
    keys = [of if count else of[:0] for of, count in zip(keys, different, strict=True)]
    counts = torch.tensor([len(of) for of in keys]).view(1, 1, -1)
    asked = OwnerRequests(torch.cat(keys), torch.zeros(0).long(), counts, counts, 0)
    for _ in range(2):
        union = native_routing.union_of(asked)
        assert union.table_counts == list(different)
        parts = torch.split(union.keys_K, union.table_counts)
        for part, of, count in zip(parts, keys, different, strict=True):
            assert part.tolist() == of[:count].tolist()
        (serve,) = union.serve
        assert union.keys_K[serve.rows_T.long()].tolist() == asked.keys_A.tolist()


SETS = st.tuples(st.sets(FEW), st.sets(FEW), st.sets(FEW))


@given(st.lists(SETS, min_size=1, max_size=3), st.booleans(), st.randoms())
def test_rows_that_earlier_batches_have_are_found_in_both(tables, looks_further, random):
    def shuffled(keys):
        return random.sample(sorted(keys), len(keys))

    def known(routing, sets, order):
        keys_K = int64([key for keys in sets for key in order(keys)])
        counts = [len(keys) for keys in sets]
        return KnownKeys(keys_K, counts, routing.index_of(keys_K, counts))

    def named(known, positions):
        ends = int64(known.table_counts).cumsum(0).tolist()
        tables = [sum(position >= end for end in ends) for position in positions.tolist()]
        return list(zip(tables, known.keys_K[positions].tolist(), strict=True))

    shared = {(table, key) for table, (now, before, _) in enumerate(tables) for key in now & before}
    taken = {
        (table, key)
        for table, (now, before, older) in enumerate(tables)
        for key in now & older - before
        if looks_further
    }
    for routing, order in [
        (plain_routing, sorted),
        (native_routing, sorted),
        (native_routing, shuffled),
    ]:
        now, before, older = (known(routing, sets, order) for sets in zip(*tables, strict=True))
        found = routing.neighbours(
            now.keys_K, now.table_counts, before, older if looks_further else None
        )
        assert set(named(now, found.shared_K)) == shared
        assert named(now, found.shared_K) == named(before, found.shared_before)
        assert set(named(now, found.carried_K)) == taken
        assert named(now, found.carried_K) == named(older, found.carried_older)
        assert len(found.shared_K) == len(shared)
        assert len(found.carried_K) == len(taken)


@given(BATCHES, BATCHES)
def test_a_working_set_knows_what_is_new_to_it(old, new):
    def working(batch, before):
        keys = {name: Jagged.from_lists(lists) for name, lists in batch.items()}
        request = make_request(keys, group, 0, 1)
        return make_working_set(World([[request]]).asked(0), before, CPU, compared=True)

    group = group_of(("tags", "clicks"), "rows")
    for wanted in (True, False):
        with native(wanted):
            before = working(old, None)
            now = working(new, before)
        assert torch.equal(now.keys_K[now.shared_K], before.keys_K[now.shared_before])
        rest = now.without(now.shared_K)
        assert rest.positions_n is not None
        assert sorted([*rest.positions_n.tolist(), *now.shared_K.tolist()]) == list(range(now.size))
        fresh = [
            len(set(here.tolist()) - set(there.tolist()))
            for here, there in zip(
                torch.split(now.keys_K, now.table_counts),
                torch.split(before.keys_K, before.table_counts),
                strict=True,
            )
        ]
        assert rest.table_counts == fresh


def test_a_rank_sits_last_at_its_own_table():
    assert peers_then_self(0, 1) == [0]
    assert peers_then_self(1, 4) == [0, 2, 3, 1]
    assert in_rank_order([10, 12, 13, 11], 1) == [10, 11, 12, 13]


def test_owners_share_the_keys_evenly():
    keys = torch.arange(100_000) * 8
    for ranks in (2, 3, 8):
        share = torch.bincount(owner_of(keys, 0, ranks), minlength=ranks) / len(keys)
        assert (share - 1 / ranks).abs().max() < 0.01
    assert not torch.equal(owner_of(keys, 0, 8), owner_of(keys, 1, 8))


def test_whole_tables_take_turns_over_the_ranks():
    tables = [
        Table(name="a", dim=4, placement="table"),
        Table(name="b", dim=8, placement="table"),
        Table(name="c", dim=4),
        Table(name="d", dim=4, placement="table"),
    ]
    assert [group.table_owners for group in group_tables(tables)] == [(0, -1, 2), (1,)]
    assert owner_of(torch.arange(5), 0, 2, table_owner=2).tolist() == [0] * 5


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
            Table(name="e", dim=4, dtype="float16"),
        ]
    )
    assert [[t.name for t in g.tables] for g in groups] == [["a", "c"], ["b"], ["d"], ["e"]]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_all_other_positions_are_found_by_both_forms(counts, data):
    total = sum(counts)
    given_positions = data.draw(st.sets(st.integers(0, max(total - 1, 0)), max_size=total))
    positions = torch.tensor(sorted(p for p in given_positions if p < total), dtype=torch.int64)
    left, left_counts = native_routing.others(positions, counts)
    plain, plain_counts = plain_routing.others(positions, counts)
    assert left.tolist() == plain.tolist() == sorted(set(range(total)) - set(positions.tolist()))
    assert left_counts == plain_counts
    assert sum(left_counts) == len(left)
