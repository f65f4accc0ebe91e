"""The window exchange: no key is asked for twice in a batch, no gradient is sent twice.

Native code and its plain twin are both held against a reference in plain lists.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.config import Table
from nestpipe.embedding.routing.all_to_all import message_sizes, pack_requests, unpack_requests
from nestpipe.embedding.routing.lists import owner_of, peers_then_self
from nestpipe.embedding.routing.owners import WorkingSet, make_working_set
from nestpipe.embedding.routing.requests import (
    InWindow,
    Request,
    lookup_window,
    make_request,
    make_window,
)
from nestpipe.embedding.table_groups import TableGroup, group_tables
from nestpipe.jagged import Jagged
from nestpipe.kernels.rows.segments import Segments
from support.examples import examples

CPU = torch.device("cpu")
TWINS = pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
FEATURES = ("history", "candidates", "tags", "clicks")
MicroBatch = Mapping[str, list[list[int]]]
"""Lists of keys of every feature."""


@contextmanager
def twin(native: bool) -> Iterator[None]:
    with patch.dict(os.environ, NESTPIPE_NATIVE=str(int(native))):
        yield


def group_of(placement: str, pooled: bool) -> TableGroup:
    (group,) = group_tables(
        [
            Table(name="items", dim=4, features=("history", "candidates")),
            Table(name="tags", dim=4, pooling="sum", placement=placement),  # type: ignore[arg-type]
            Table(name="clicks", dim=4, pooling="sum" if pooled else "none"),
        ]
    )
    return group


@st.composite
def micro_batches(draw) -> MicroBatch:
    """Some features have few keys, some so many that owners will add them up."""
    size = draw(st.integers(0, 4))
    few = st.lists(st.lists(st.integers(-3, 5), max_size=5), min_size=size, max_size=size)

    def lists() -> list[list[int]]:
        if draw(st.booleans()):
            return draw(few)
        length, seed = draw(st.integers(1, 7)), draw(st.integers(0, 9))
        return [[(seed + s * length + k) * 7919 for k in range(length)] for s in range(size)]

    return {name: lists() for name in FEATURES}


@dataclass(frozen=True)
class World:
    """What every rank wants in each micro-batch of one window."""

    group: TableGroup
    wanted: list[list[MicroBatch]]
    """[rank][micro]"""

    @property
    def ranks(self) -> int:
        return len(self.wanted)

    @property
    def micros(self) -> int:
        return len(self.wanted[0])

    def keys(self, rank: int) -> list[dict[str, Jagged]]:
        return [
            {name: Jagged.from_lists(lists) for name, lists in of.items()}
            for of in self.wanted[rank]
        ]

    def windows(self) -> list[list[Request]]:
        """[rank][micro]"""
        return [make_window(self.keys(r), self.group, r, self.ranks) for r in range(self.ranks)]

    def whole(self, rank: int) -> Request:
        """The same rank's batch without micro-batches."""
        lists = {name: [k for of in self.wanted[rank] for k in of[name]] for name in FEATURES}
        keys = {name: Jagged.from_lists(of) for name, of in lists.items()}
        return make_request(keys, self.group, rank, self.ranks)


WORLDS = st.integers(1, 3).flatmap(
    lambda ranks: st.integers(2, 4).flatmap(
        lambda micros: st.builds(
            World,
            st.builds(group_of, st.sampled_from(["rows", "table"]), st.booleans()),
            st.lists(
                st.lists(micro_batches(), min_size=micros, max_size=micros),
                min_size=ranks,
                max_size=ranks,
            ),
        )
    )
)


def in_window(request: Request) -> InWindow:
    assert request.window is not None
    return request.window


def lists_of(segments: Segments) -> list[list[int]]:
    """The terms of each sum."""
    terms = segments.rows_T.tolist()
    if segments.ends_S1 is None:
        return [[term] for term in terms]
    return [terms[a:b] for a, b in pairwise(segments.ends_S1.tolist())]


def uses_of(request: Request) -> set[int]:
    return {term for terms in lists_of(request.seen) for term in terms}


@TWINS
@examples("more")
@given(WORLDS)
def test_a_window_sends_what_the_whole_batch_would(native, world):
    with twin(native):
        for rank, of in enumerate(world.windows()):
            whole = world.whole(rank)
            sent = torch.cat([r.keys_A for r in of])
            assert sorted(sent.tolist()) == sorted(whole.keys_A.tolist())
            keys, rows = (
                torch.stack([getattr(r, name) for r in of]).sum(0)
                for name in ("key_counts_RC", "row_counts_RC")
            )
            assert torch.equal(keys, whole.key_counts_RC)
            assert torch.equal(rows, whole.row_counts_RC)
            gradients = torch.tensor([r.gradients_per_owner for r in of]).sum(0)
            assert gradients.tolist() == whole.rows_per_owner


@TWINS
@examples("more")
@given(WORLDS)
def test_no_row_is_asked_for_twice_and_each_leaves_after_its_last_use(native, world):
    with twin(native):
        for rank, of in enumerate(world.windows()):
            uses = [uses_of(request) for request in of]
            first_row = 0
            for micro, request in enumerate(of):
                window = in_window(request)
                new = int(request.row_counts_RC.sum())
                assert window.first_row == first_row
                before, after = set().union(*uses[:micro]), set().union(*uses[micro + 1 :])
                assert uses[micro] - before == set(range(first_row, first_row + new))
                assert sorted(window.reused_n.tolist()) == sorted(uses[micro] & before)
                assert sorted(window.leaving.rows_T.tolist()) == sorted(uses[micro] - after)
                assert len(window.leaving) == sum(window.leaving_counts)
                first_row += new
                back: dict[int, list[int]] = defaultdict(list)
                for output, terms in enumerate(lists_of(request.seen)):
                    for term in terms:
                        back[term].append(output)
                made = [*range(window.first_row, first_row), *window.reused_n.tolist()]
                found = [*lists_of(request.back), *lists_of(window.reused)]
                assert dict(zip(made, found, strict=True)) == back
            assert all(in_window(request).window_rows == first_row for request in of)
            order = peers_then_self(rank, world.ranks)
            peer_of_row = [
                peer
                for request in of
                for peer, r in enumerate(order)
                for _ in range(request.rows_per_owner[r])
            ]
            for request in of:
                leaving = in_window(request).leaving.rows_T.tolist()
                assert leaving == sorted(leaving, key=lambda row: (peer_of_row[row], row))


def value_of(table: int, key: int) -> float:
    """A row's number: small and whole, so that sums are exact in any order."""
    return float((key * 31 + table * 17) % 1001)


def weight_of(rank: int, micro: int, output: int) -> float:
    """The gradient of what a model sees."""
    return float(100 * rank + 10 * micro + output % 7 + 1)


@TWINS
@examples("more")
@given(WORLDS)
def test_rows_reach_the_model_and_gradients_their_owner(native, world):
    """The whole way of a window, with numbers instead of a network."""
    with twin(native):
        windows = world.windows()
        owners = [owner_side(windows, owner) for owner in range(world.ranks)]
        table_of = [
            [
                (table, key)
                for table, part in enumerate(torch.split(o.keys_K, o.table_counts))
                for key in part.tolist()
            ]
            for o in owners
        ]
        sums: list[dict[tuple[int, int], float]] = [defaultdict(float) for _ in owners]
        rows = [torch.empty(in_window(of[0]).window_rows, 4) for of in windows]
        gradients = [torch.zeros_like(of) for of in rows]
        for micro in range(world.micros):
            sent = [
                [
                    sum(value_of(*table_of[o][t]) for t in terms)
                    for terms in lists_of(w.serve[micro])
                ]
                for o, w in enumerate(owners)
            ]
            for rank, of in enumerate(windows):
                came = [
                    x
                    for o in peers_then_self(rank, world.ranks)
                    for x in part(sent, owners, micro, o, rank)
                ]
                first = in_window(of[micro]).first_row
                rows[rank][first : first + len(came)] = torch.tensor(came)[:, None]
                seen = lookup_window(rows[rank], of[micro], gradients[rank])
                check_seen(seen, world, rank, micro)
            leave(world, windows, owners, table_of, gradients, micro, sums)
    assert [dict(of) for of in sums] == [expected_sums(world, o) for o in range(world.ranks)]


def owner_side(windows: list[list[Request]], owner: int) -> WorkingSet:
    ranks = len(windows)
    messages = [pack_requests(of, rank) for rank, of in enumerate(windows)]
    to_owner = [messages[r][peers_then_self(r, ranks).index(owner)] for r in range(ranks)]
    key_counts, row_counts = (
        torch.stack([torch.stack([getattr(r, name)[owner] for r in of]) for of in windows])
        for name in ("key_counts_RC", "row_counts_RC")
    )
    lengths = message_sizes(key_counts, row_counts, window=True)
    assert lengths == [len(message) for message in to_owner]
    came = torch.cat([to_owner[r] for r in peers_then_self(owner, ranks)])
    asked = unpack_requests(came, key_counts, row_counts, owner, window=True)
    return make_working_set(asked, None, CPU)


def part(
    sent: list[list[float]], owners: list[WorkingSet], micro: int, owner: int, rank: int
) -> list[float]:
    """What an owner sends to one rank."""
    counts = owners[owner].serve_counts[micro]
    order = peers_then_self(owner, len(owners))
    start = sum(counts[r] for r in order[: order.index(rank)])
    return sent[owner][start : start + counts[rank]]


def check_seen(seen: dict[str, torch.Tensor], world: World, rank: int, micro: int) -> None:
    """Every feature has its rows; then go backwards with known gradients."""
    output, loss = 0, torch.zeros(())
    for feature in world.group.features:
        lists = world.wanted[rank][micro][feature.name]
        outputs = lists if feature.pooled else [[key] for keys in lists for key in keys]
        expected = [sum(value_of(feature.table, key) for key in keys) for keys in outputs]
        assert seen[feature.name][:, 0].tolist() == expected
        weights = [weight_of(rank, micro, output + i) for i in range(len(outputs))]
        output += len(outputs)
        loss = loss + (seen[feature.name] * torch.tensor(weights)[:, None]).sum()
    loss.backward()


def leave(world, windows, owners, table_of, gradients, micro, sums) -> None:
    """Gradients that leave after a micro-batch, summed by their owners."""
    for owner, working in enumerate(owners):
        message: list[float] = []
        for rank in peers_then_self(owner, world.ranks):
            window = in_window(windows[rank][micro])
            order = peers_then_self(rank, world.ranks)
            start = sum(window.leaving_counts[r] for r in order[: order.index(owner)])
            count = window.leaving_counts[owner]
            assert count == working.back_counts[micro][rank]
            numbers = window.leaving.rows_T.tolist()[start : start + count]
            message += gradients[rank][numbers, -1].tolist()
        back = lists_of(working.gather_back[micro])
        for key, terms in zip(table_of[owner], back, strict=True):
            sums[owner][key] += sum(message[term] for term in terms)


def expected_sums(world: World, owner: int) -> dict[tuple[int, int], float]:
    """The gradient of every key of an owner, the plain way."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for rank, of in enumerate(world.wanted):
        for micro, batch in enumerate(of):
            output = 0
            for feature in world.group.features:
                lists = batch[feature.name]
                outputs = lists if feature.pooled else [[key] for keys in lists for key in keys]
                for keys in outputs:
                    for key in keys:
                        table_owner = world.group.table_owners[feature.table]
                        key_U = torch.tensor([key])
                        if int(owner_of(key_U, feature.table, world.ranks, table_owner)) == owner:
                            sums[feature.table, key] += weight_of(rank, micro, output)
                    output += 1
    return dict(sums)


@TWINS
@pytest.mark.parametrize("micros", [2, 4, 8])
def test_splitting_a_batch_multiplies_the_keys_of_micro_but_not_of_window(native, micros):
    (group,) = group_tables([Table(name="items", dim=8)])
    samples = [[(s * 17 + k * k) % 300 for k in range(20)] for s in range(160)]
    size = len(samples) // micros
    parts = [samples[m * size : (m + 1) * size] for m in range(micros)]
    keys = [{"items": Jagged.from_lists(part)} for part in parts]
    unique = len({key for sample in samples for key in sample})
    with twin(native):
        window = make_window(keys, group, 0, 2)
        alone = [make_request(of, group, 0, 2) for of in keys]
    assert sum(len(r.keys_A) for r in window) == unique
    assert sum(len(r.keys_A) for r in alone) > 1.5 * unique
    assert sum(len(in_window(r).leaving) for r in window) == unique
