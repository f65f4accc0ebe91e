"""Keys and rows in device memory: the kernels, compiled for the host, and their plain twins agree.

`tests/support/cuda_on_cpu` runs the threads of a block as fibers that overtake each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.embedding.optimizers import OPTIMIZERS, RowOptimizer, row_optimizer
from nestpipe.embedding.routing.lists import WantedKeys
from nestpipe.embedding.routing.native import request as native_request
from nestpipe.embedding.store.protocol import first_weights
from nestpipe.errors import ConfigError
from nestpipe.kernels.index import library
from nestpipe.kernels.index.dedup import DedupedKeys, Owners, dedup, plain_dedup
from nestpipe.kernels.index.device_index import (
    COUNTERS,
    FREE_STAMP,
    DeviceIndex,
    FirstValues,
    KeyCells,
    PlainIndex,
)
from nestpipe.kernels.index.segments import (
    PIECE,
    Pooling,
    TermGradients,
    look_up,
    plain_drop_faults,
    plain_look_up,
    plain_segment_sums,
    sort_segments,
    update_segments,
)
from nestpipe.kernels.index.steady import (
    StepNews,
    TermBuffers,
    plain_pool_outputs,
    pool_outputs,
)
from support.emulated_kernels import emulated_kernels

CPU = torch.device("cpu")
ODD_KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
KEYS = st.one_of(st.sampled_from(ODD_KEYS), st.integers(-20, 20), st.integers(-(2**63), 2**63 - 1))
TABLES_OF_KEYS = st.lists(st.lists(KEYS, max_size=60), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    made = library.typed(emulated_kernels())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "loaded", lambda device: made)
        yield


def cells_of(tables: list[list[int]]) -> tuple[Tensor, KeyCells]:
    keys = torch.tensor([key for table in tables for key in table], dtype=torch.int64)
    return keys, KeyCells(torch.tensor([len(table) for table in tables]).cumsum(0))


def counters(index: DeviceIndex) -> dict[str, int]:
    return dict(zip(COUNTERS, index.counters.tolist(), strict=False))


def check_found(index: DeviceIndex, twin: PlainIndex, tables: list[list[int]], batch: int) -> None:
    """The same keys have slots, and no two of them the same one."""
    keys_N, cells = cells_of(tables)
    before = counters(index)["free"]
    found, plain = (i.find_or_insert(keys_N, cells, batch) for i in (index, twin))
    pairs = list(zip(found.slots_N.tolist(), plain.slots_N.tolist(), strict=True))
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(set(pairs))
    assert all((a < 0) == (b < 0) for a, b in pairs)
    now = counters(index)
    new = sorted(found.new_slots_N[: now["num_new"]].tolist())
    assert len(set(new)) == now["num_new"] == len(plain.new_slots_N)
    assert now["free"] == before - now["num_new"] == twin.num_free
    assert now["num_missing"] == twin.num_missing
    names = list(zip(cells.tables_of_keys(len(keys_N)), keys_N.tolist(), strict=True))
    for (slot, _), (table, key) in zip(pairs, names, strict=True):
        if slot >= 0:
            assert (index.slot_tables_S[slot], index.slot_keys_S[slot]) == (table, key)
            assert index.stamps_S[slot] == batch
    assert torch.equal(index.find(keys_N, cells), found.slots_N)


@given(st.lists(TABLES_OF_KEYS, min_size=1, max_size=3))
@hypothesis_settings(max_examples=25)
def test_keys_of_any_value_meet_in_one_slot(batches: list[list[list[int]]]):
    index, twin = DeviceIndex(1000, CPU), PlainIndex(1000)
    for batch, tables in enumerate(batches):
        check_found(index, twin, tables, batch)


def test_the_same_key_of_two_tables_is_two_keys():
    index = DeviceIndex(10, CPU)
    keys_N = torch.tensor([5, 5, 5])
    cells = KeyCells(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1], dtype=torch.int32))
    slots = index.find_or_insert(keys_N, cells, 0).slots_N.tolist()
    assert slots[0] == slots[2] != slots[1]


def test_no_keys_are_no_work():
    index = DeviceIndex(10, CPU)
    index.find_or_insert(torch.arange(3), KeyCells(torch.tensor([3])), 0)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert len(index.find_or_insert(nothing, KeyCells(torch.tensor([0])), 1).slots_N) == 0
    assert counters(index)["num_new"] == 0
    assert counters(index)["free"] == 7


@pytest.mark.parametrize("keys", [100, 3000])
def test_a_full_index_answers_with_what_is_missing(keys: int):
    index = DeviceIndex(64, CPU)
    keys_N, cells = cells_of([[*range(keys)] * 2])
    slots_N = index.find_or_insert(keys_N, cells, 0).slots_N
    assert counters(index) | {"used": 0} == {
        **dict.fromkeys(COUNTERS, 0),
        "num_new": 64,
        "num_missing": int((slots_N < 0).sum()),
    }
    assert len(set(slots_N.tolist()) - {-1}) == 64
    # A key may have a slot at its second appearance and none at its first, never two.
    first, second = slots_N.view(2, -1).tolist()
    assert all(a == b or a < 0 or b < 0 for a, b in zip(first, second, strict=True))
    assert counters(index)["used"] <= index.num_places


def test_keys_that_found_no_slot_get_one_once_there_is_room():
    index = DeviceIndex(8, CPU)
    keys_N, cells = cells_of([[*range(12)]])
    slots_N = index.find_or_insert(keys_N, cells, 0).slots_N
    index.erase(slots_N[slots_N >= 0][:4].contiguous())
    again = index.find_or_insert(keys_N[slots_N < 0].contiguous(), KeyCells(torch.tensor([4])), 1)
    assert sorted(again.slots_N.tolist()) == sorted(slots_N[slots_N >= 0][:4].tolist())


@pytest.mark.parametrize("in_use_from", [1, 2])
def test_keys_without_a_slot_get_those_of_rows_that_the_device_lets_go(in_use_from: int):
    """The host asks for no count: kernels read how many keys are without a slot."""
    index, twin = DeviceIndex(12, CPU), PlainIndex(12)
    for batch, keys in enumerate(([0, 1, 2, 3], [*range(4, 12)], [7, 20, 21, 22, 20, 21, 1])):
        keys_N, cells = cells_of([keys])
        founds = []
        for of in (index, twin):
            found = of.find_or_insert(keys_N, cells, batch)
            victims_V = of.choose_for_missing(in_use_from, len(keys_N))
            gone, _ = of.keys_of(victims_V, of.num_urgent)
            assert set(gone[: int(of.num_urgent)].tolist()) <= {0, 1, 2, 3, *range(4, 12)} - {1, 7}
            of.erase(victims_V, of.num_urgent)
            found = of.insert_missing(found, keys_N, cells, batch)
            founds.append([slot >= 0 for slot in found.slots_N.tolist()])
            new = found.new_slots_N[: int(of.num_new)]
            assert set(of.slot_keys_S[new.long()].tolist()) <= set(keys)
            assert len(set(new.tolist())) == len(new)
        assert founds[0] == founds[1] == [True] * len(keys)
        names = ("free", "num_new", "num_missing", "num_urgent")
        assert [counters(index)[n] for n in names] == [counters(twin)[n] for n in names]  # type: ignore[arg-type]


def test_victims_are_the_oldest_and_never_in_flight():
    index = DeviceIndex(40, CPU)
    for batch in range(4):
        keys_N, cells = cells_of([[*range(10 * batch, 10 * batch + 10)]])
        index.find_or_insert(keys_N, cells, batch)
    index.find_or_insert(torch.arange(5), KeyCells(torch.tensor([5])), 3)  # used again
    for wanted, stamps in ((3, {0: 3}), (9, {0: 5, 1: 4}), (99, {0: 5, 1: 10})):
        victims_V = index.choose_victims(2, wanted)[: int(index.num_victims)]
        found = index.stamps_S[victims_V].tolist()
        assert {stamp: found.count(stamp) for stamp in found} == stamps
        assert len(set(victims_V.tolist())) == len(victims_V)


@pytest.mark.parametrize("kind", [DeviceIndex, PlainIndex])
def test_rows_that_many_batches_use_outlive_those_of_a_later_one(kind: Any):
    """Until they have not been used for long."""
    of = KeyCells(torch.tensor([1]))
    for unused_for, leaves in ((10, 2), (400, 1)):
        index = kind(8, *([CPU] if kind is DeviceIndex else []))
        for batch in range(10):
            index.find_or_insert(torch.tensor([1]), of, batch)
        index.find_or_insert(torch.tensor([2]), of, 9 + unused_for)
        victims_V = index.choose_victims(20 + unused_for, 7)[: int(index.num_victims)]
        assert index.slot_keys_S[victims_V.long()].tolist() == [leaves]


def test_the_heat_of_a_slot_is_that_of_the_plain_index():
    """Rounding aside; many threads use a slot in the same batch, and it counts once."""
    random = np.random.default_rng(3)
    index, twin = DeviceIndex(400, CPU), PlainIndex(400)
    for batch in range(40):
        keys_N, cells = cells_of([(random.zipf(1.3, 200) % 400).tolist()])
        for of in (index, twin):
            of.find_or_insert(keys_N, cells, batch)
    every_N, cells = cells_of([list(range(400))])
    slots = [of.find(every_N, cells).long() for of in (index, twin)]
    assert torch.equal(slots[0] < 0, slots[1] < 0)
    heats = [of.heats_S[at[at >= 0]] for of, at in zip((index, twin), slots, strict=True)]
    assert (heats[0] - heats[1]).abs().max() <= 1
    assert heats[0].max() > 40 + 100, "a key of every batch"


def test_fewer_skewed_keys_miss_than_with_the_least_recently_used_rows_first():
    random = np.random.default_rng(5)
    batches = [np.unique(random.zipf(1.2, 300) % 20_000) for _ in range(120)]
    index, misses = DeviceIndex(1500, CPU), 0
    last, recent = dict[int, int](), 0
    for batch, keys in enumerate(batches):
        keys_N, cells = cells_of([keys.tolist()])
        victims_V = index.choose_victims(batch - 1, 300)
        index.erase(victims_V, index.num_victims)
        index.find_or_insert(keys_N, cells, batch)
        missing = [key for key in keys.tolist() if key not in last]
        if batch >= 60:
            misses += int(index.num_new)
            recent += len(missing)
        for key in sorted(last, key=last.__getitem__)[: max(0, len(last) - 1200)]:
            del last[key]
        last |= dict.fromkeys(keys.tolist(), batch)
    assert misses < 0.95 * recent, f"{misses} misses beside {recent}"


def test_a_window_moves_on_over_the_slots():
    index = DeviceIndex(30, CPU)
    index.find_or_insert(torch.arange(30), KeyCells(torch.tensor([30])), 0)
    seen = [set(index.choose_victims(1, 10, window=10)[:10].tolist()) for _ in range(4)]
    assert seen[0] | seen[1] | seen[2] == set(range(30))
    assert seen[3] == seen[0]


@pytest.mark.parametrize("most_used", [0.0, 0.9, 1.0])
def test_random_work_with_evictions_matches_the_dictionary(most_used: float):
    random = np.random.default_rng(7)
    index, twin = DeviceIndex(300, CPU), PlainIndex(300)
    for batch in range(30):
        tables = [(random.zipf(1.3, 60) % 400).tolist() for _ in range(3)]
        victims_V = index.choose_victims(batch - 1, 180)
        gone = victims_V[: int(index.num_victims)]
        names = [(int(index.slot_tables_S[s]), int(index.slot_keys_S[s])) for s in gone]
        assert (index.stamps_S[gone] < batch - 1).all()
        assert len(gone) == len(twin.choose_victims(batch - 1, 180))
        index.erase(victims_V, index.num_victims)
        twin.erase(
            torch.tensor(
                [
                    int(twin.find(torch.tensor([key]), KeyCells(torch.tensor([1]), table)))
                    for t, key in names
                    for table in [torch.tensor([t], dtype=torch.int32)]
                ]
            )
        )
        index.rebuild(most_used)
        check_found(index, twin, tables, batch)


def test_a_rebuild_forgets_erased_places_only():
    index = DeviceIndex(100, CPU)
    keys_N, cells = torch.arange(100), KeyCells(torch.tensor([100]))
    slots_N = index.find_or_insert(keys_N, cells, 0).slots_N
    index.erase(slots_N[:60].contiguous())
    index.erase(slots_N[:60].contiguous())  # free slots stay free
    assert counters(index)["used"] == 100
    assert counters(index)["free"] == 60
    index.rebuild(1.0)
    assert counters(index)["used"] == 100
    index.rebuild(0.5)
    assert counters(index)["used"] == 40
    assert index.find(keys_N, cells).tolist() == [-1] * 60 + slots_N[60:].tolist()


def test_the_index_has_at_most_1_6_places_a_row():
    index = DeviceIndex(100_000, CPU)
    assert index.num_places <= 1.6 * 100_000 + 4
    assert index.num_bytes() <= 50 * 100_000
    assert (index.stamps_S == FREE_STAMP).all()


def test_a_pool_without_slots_is_refused():
    with pytest.raises(ConfigError, match="a pool has 0 slots"):
        DeviceIndex(0, CPU)


def test_first_values_have_the_bits_of_the_host():
    index, dim, state = DeviceIndex(50, CPU), 37, 3
    keys_N, cells = cells_of([[*ODD_KEYS, 12345], [7, -7]])
    found = index.find_or_insert(keys_N, cells, 0)
    seeds, stds = [3, 2**64 - 5], [0.01, 1.5]
    first = FirstValues(
        torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)),
        torch.tensor(stds, dtype=torch.float64),
        dim,
        state,
        state_init=0.25,
    )
    rows_SW = torch.full((50, dim + state + 2), 9.0)
    index.write_first_rows(first, rows_SW, found.new_slots_N, index.num_new)
    for slot, key, table in zip(
        found.slots_N.tolist(), keys_N.tolist(), cells.tables_of_keys(len(keys_N)), strict=True
    ):
        wanted = first_weights(seeds[table], np.array([key]), dim, stds[table])[0]
        assert rows_SW[slot, :dim].tolist() == wanted.tolist()
        assert rows_SW[slot, dim:].tolist() == [0.25] * state + [9.0] * 2
    assert (rows_SW[10:] == 9.0).all()


def check_deduped(found: DedupedKeys, wanted: DedupedKeys) -> None:
    assert torch.equal(found.counts, wanted.counts)
    unique = int(wanted.num_unique)
    assert torch.equal(found.keys_T[:unique], wanted.keys_T[:unique])
    assert torch.equal(found.inverse_T, wanted.inverse_T)


@given(TABLES_OF_KEYS, st.integers(1, 5), st.data())
@hypothesis_settings(max_examples=25)
def test_dedup_gives_the_lists_of_its_twin(
    tables: list[list[int]], ranks: int, data: st.DataObject
):
    keys_T, cells = cells_of(tables)
    rank = data.draw(st.integers(0, ranks - 1))
    drawn = data.draw(st.lists(st.integers(-1, ranks - 1), min_size=4, max_size=4))
    table_owners = torch.tensor(drawn[: len(tables)], dtype=torch.int32)
    owners = Owners(ranks, rank, data.draw(st.sampled_from([None, table_owners])))
    check_deduped(dedup(keys_T, cells.ends_G, owners), plain_dedup(keys_T, cells.ends_G, owners))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_dedup_gives_the_lists_of_native_routing(ranks: int):
    random = np.random.default_rng(ranks)
    tables = [random.zipf(1.2, size).astype(np.int64) % 997 for size in (2500, 0, 700, 1, 3000)]
    keys = [torch.from_numpy(table) for table in tables]
    table_owners = (-1, -1, ranks - 1, -1, -1)
    ends_C = torch.tensor([len(table) for table in keys]).cumsum(0)
    for rank in range(ranks):
        wanted = WantedKeys(
            keys=keys,
            lengths=[torch.ones_like(table) for table in keys],
            pooled=[False] * len(keys),
            table_owners=table_owners,
            row_bytes=512,
            rank=rank,
            ranks=ranks,
        )
        routed = native_request(wanted)
        owners = Owners(ranks, rank, torch.tensor(table_owners, dtype=torch.int32))
        found = dedup(torch.cat(keys), ends_C, owners)
        assert torch.equal(found.key_counts.long(), routed.key_counts_RC)
        assert torch.equal(found.keys_T[: int(found.num_unique)], routed.keys_A)
        assert torch.equal(found.inverse_T, routed.seen.rows_T)


def test_too_many_ranks_are_refused():
    with pytest.raises(ConfigError, match="at most 512 ranks"):
        dedup(torch.arange(3), torch.tensor([3]), Owners(513, 0))


def drawn_rows(count: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def struct_of(optimizer: RowOptimizer, step: int):
    return optimizer.struct(step)


IDS = st.one_of(
    st.lists(st.integers(-1, 9), max_size=200),
    st.lists(st.sampled_from([3, 3, 3, 3, 4]), min_size=60, max_size=150),
    st.integers(1, 2200).map(lambda n: [5] * n + [-1, 6]),
)
"""Few ids, long segments, and segments of more than 32 pieces."""


@given(IDS, st.sampled_from([1, 4, 6, 12]))
@hypothesis_settings(max_examples=25)
def test_segment_sums_have_the_bits_of_the_twin(ids: list[int], dim: int):
    ids_T = torch.tensor(ids, dtype=torch.int32)
    gradients = TermGradients(drawn_rows(len(ids), dim))
    rows_ND = torch.full((10, dim), 7.0)
    wanted_ND = rows_ND.clone()
    ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
    wanted_ND[ids_S] = sums_SD
    update_segments(sort_segments(ids_T, 10), gradients, rows_ND, None)
    assert torch.equal(rows_ND, wanted_ND)


@given(st.lists(IDS, min_size=2, max_size=3), st.sampled_from([1, 4, 6, 12]))
@hypothesis_settings(max_examples=15)
def test_sums_of_micro_batches_are_added_to_those_before(micros: list[list[int]], dim: int):
    rows_ND = drawn_rows(10, dim, seed=9)
    wanted_ND, times = rows_ND.clone(), torch.tensor([0.3])
    for seed, ids in enumerate(micros):
        ids_T = torch.tensor(ids, dtype=torch.int32)
        gradients = TermGradients(drawn_rows(len(ids), dim, seed))
        ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
        wanted_ND[ids_S] += sums_SD * times
        update_segments(sort_segments(ids_T, 10), gradients, rows_ND, None, times, add=True)
    assert torch.equal(rows_ND, wanted_ND)


@pytest.mark.parametrize("dim", [3, 16, 64, 128, 200, 512])
def test_added_sums_leave_the_state_of_rows_alone(dim: int):
    rows_NW = drawn_rows(4, 2 * dim, seed=1)
    wanted_NW = rows_NW.clone()
    ids_T = torch.tensor([0, *[2] * 1100, 0, 3], dtype=torch.int32)
    gradients = TermGradients(drawn_rows(len(ids_T), dim))
    ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
    wanted_NW[ids_S, :dim] += sums_SD
    update_segments(sort_segments(ids_T, 4), gradients, rows_NW, None, add=True)
    assert torch.equal(rows_NW, wanted_NW)


def test_segments_are_cut_from_their_first_term_on():
    ids_T = torch.tensor([2] * 3 + [0] * (PIECE * 2 + 1) + [2] * 2 + [1] * PIECE, dtype=torch.int32)
    segments = sort_segments(ids_T, 3)
    pieces, longs = segments.counts.tolist()
    begin, count, row, partial = segments.pieces_T4[:pieces].T.tolist()
    found = sorted(zip(row, begin, count, (p >= 0 for p in partial), strict=True))
    assert found == [
        *((0, 0, PIECE, True), (0, PIECE, PIECE, True), (0, 2 * PIECE, 1, True)),
        *((1, 2 * PIECE + 1, PIECE, False), (2, 3 * PIECE + 1, 5, False)),
    ]
    assert segments.longs_L4[:longs, :3].tolist() == [[0, 3, 0]]


@pytest.mark.parametrize("dim", [3, 4, 16, 20, 64, 100, 128, 132, 256, 300, 512])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_update_has_the_bits_of_sums_and_a_plain_update(name: str, dim: int):
    optimizer = row_optimizer(
        name, lr=0.07, eps=1e-6, scale=4.0, weight_decay=0.7, schedule=lambda step: 0.9**step
    )
    width = dim + optimizer.state_dim(dim)
    rows_NW = drawn_rows(6, -(-width // 4) * 4, seed=dim)[:, :width]
    rows_NW[:, dim:].abs_()
    twin_NW = rows_NW.clone()
    ids_T = torch.tensor([0, 1, 1, 5, *[2] * 70, 1, -1], dtype=torch.int32)
    times = torch.tensor([0.3])
    for step in (1, 2):
        gradients = TermGradients(drawn_rows(len(ids_T), dim, seed=step))
        ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
        updated_SW = twin_NW[ids_S]
        optimizer.update(updated_SW, sums_SD * times, step)
        twin_NW[ids_S] = updated_SW
        given = struct_of(optimizer, step)
        update_segments(sort_segments(ids_T, 6), gradients, rows_NW, given, times)
        assert torch.equal(rows_NW, twin_NW), f"step {step}"


def test_gradients_of_pooled_outputs_are_divided_and_weighted():
    lengths_O = torch.tensor([0, 1, 3, 40, 2])
    outputs_T = torch.repeat_interleave(lengths_O).int()
    ids_T = torch.randint(0, 5, (46,), dtype=torch.int32)
    rows_ND = torch.zeros(5, 8)
    gradients = TermGradients(
        drawn_rows(5, 8), outputs_T, lengths_O.clamp(min=1).float(), drawn_rows(46, 1).squeeze(1)
    )
    update_segments(sort_segments(ids_T, 5), gradients, rows_ND, None)
    ids_S, sums_SD = plain_segment_sums(ids_T, gradients)
    assert torch.equal(rows_ND[ids_S], sums_SD)


def test_an_unknown_optimizer_is_refused():
    struct = struct_of(row_optimizer("sgd"), 1)
    struct.kind = 77
    ids_T = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ConfigError, match="do not know this row optimizer"):
        update_segments(
            sort_segments(ids_T, 1), TermGradients(torch.ones(1, 4)), torch.ones(1, 4), struct
        )


def test_rows_that_are_too_wide_are_refused():
    with pytest.raises(ConfigError, match="1 to 512 weights"):
        look_up(torch.ones(1, 513), torch.zeros(1, dtype=torch.int32), torch.ones(1, 513))


@pytest.mark.parametrize("dim", [1, 4, 7, 64, 128, 200, 256, 512])
@pytest.mark.parametrize("form", ["rows", "sums", "means", "weighted"])
def test_lookups_have_the_bits_of_the_twin(form: str, dim: int):
    rows_NW = drawn_rows(50, -(-dim // 4) * 4 + 4)
    rows_NW[7] = -0.0
    lengths_O = torch.tensor([0, 1, 2, 1100, 0, 33])
    terms = 9 if form == "rows" else int(lengths_O.sum())
    slots_T = torch.randint(0, 50, (terms,), dtype=torch.int32)
    slots_T[:3] = torch.tensor([7, -1, 7])
    slots_T[40:70:3] = -1
    pooling = None
    if form != "rows":
        ends_O1 = torch.cat([torch.zeros(1), lengths_O.cumsum(0)]).int()
        divisors_O = lengths_O.clamp(min=1).float() if form == "means" else None
        weights_T = drawn_rows(terms, 1).squeeze(1) if form == "weighted" else None
        pooling = Pooling(ends_O1, divisors_O, weights_T)
    out_OD = torch.full((terms if pooling is None else 6, dim), 9.0)
    look_up(rows_NW, slots_T, out_OD, pooling)
    wanted_OD = plain_look_up(rows_NW, slots_T, dim, pooling)
    assert torch.equal(out_OD.view(torch.int32), wanted_OD.contiguous().view(torch.int32))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dim", [3, 16, 96])
def test_sums_that_are_not_finite_are_dropped_and_counted(dim, clip):
    """One row with inf in one of few terms, one with NaN among many, one with a huge sum."""
    ids_T = torch.tensor([4] * 3 + [1] * 70 + [2] * 5 + [0] * 2, dtype=torch.int32)
    gradients_TD = torch.rand(len(ids_T), dim)
    gradients_TD[1, 0], gradients_TD[40, dim - 1], gradients_TD[74, 1] = torch.inf, torch.nan, 3e18
    optimizer = row_optimizer("adam", lr=0.1)
    rows_NW = torch.rand(6, dim + optimizer.state_dim(dim))
    twin_NW = rows_NW.clone()
    ids_S, sums_SD = plain_segment_sums(ids_T, TermGradients(gradients_TD))
    wanted = plain_drop_faults(sums_SD, clip=clip)
    optimizer.update_times(twin_NW, sums_SD, 1.0, 1, slots_K=ids_S)
    faults = torch.zeros(1, dtype=torch.int32)
    segments = sort_segments(ids_T, 6)
    update_segments(
        *(segments, TermGradients(gradients_TD), rows_NW, optimizer.struct(1)),
        faults=faults,
        clip=clip,
    )
    assert int(faults) == int(wanted) == 3
    assert torch.isfinite(rows_NW).all()
    assert torch.equal(rows_NW, twin_NW)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 3))
@hypothesis_settings(max_examples=25, deadline=None)
def test_outputs_of_terms_are_those_of_the_twin(lengths: list[int], times: int):
    """Several thousand outputs are more than one block has."""
    lengths_O = torch.tensor(lengths * (1 + 100 * times), dtype=torch.int64)
    terms = int(lengths_O.sum())
    pooling, outputs_T = pool_outputs(lengths_O, terms)
    wanted, wanted_T = plain_pool_outputs(lengths_O, terms)
    assert torch.equal(pooling.ends_O1, wanted.ends_O1)
    assert torch.equal(outputs_T, wanted_T)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_call_for_all_terms_has_the_bits_of_many(name: str, pooled: bool):
    """The same buffers again and again: for fewer terms, for as many, for none."""
    dim, optimizer = 20, row_optimizer(name, lr=0.07, eps=1e-6, scale=4.0)
    width = dim + optimizer.state_dim(dim)
    first = FirstValues(
        torch.tensor([3, -4]), torch.tensor([0.1, 0.2], dtype=torch.float64), dim, width - dim, 0.5
    )
    draw = torch.Generator().manual_seed(5)
    index, twin = DeviceIndex(400, CPU), DeviceIndex(400, CPU)
    rows_SW, twin_SW = torch.zeros(400, width), torch.zeros(400, width)
    buffers = TermBuffers(300, index, rows_SW, first)
    for stamp, terms in enumerate((300, 120, 0, 300, 7)):
        keys_T = torch.randint(0, 30, (terms,), generator=draw)
        cells = KeyCells(torch.tensor([terms // 3, terms]))
        lengths_O = torch.full((-(-terms // 4),), 4).clamp_(max=max(terms, 1))
        lengths_O[-1:] -= int(lengths_O.sum()) - terms
        pooling, outputs_T = pool_outputs(lengths_O, terms) if pooled else (None, None)
        gradients_OD = drawn_rows(len(lengths_O) if pooled else terms, dim, seed=stamp)
        buffers.admit(keys_T, cells, stamp, outputs_T)
        found = twin.find_or_insert(keys_T, cells, stamp)
        twin.write_first_rows(first, twin_SW, found.new_slots_N, twin.num_new)
        out_OD, wanted_OD = torch.empty(2, *gradients_OD.shape)
        buffers.look_up(out_OD, pooling)
        look_up(twin_SW, found.slots_N, wanted_OD, pooling)
        assert torch.equal(out_OD, wanted_OD), f"batch {stamp}"
        struct, faults = optimizer.struct(stamp + 1), torch.full((1,), 9, dtype=torch.int32)
        buffers.update(struct, gradients_OD, 0.25, faults.data_ptr(), clip=False)
        segments = sort_segments(found.slots_N, twin.num_slots, outputs_T)
        update_segments(
            *(segments, TermGradients(gradients_OD), twin_SW, struct, torch.tensor([0.25]))
        )
        assert int(faults) == 0
    keys_N = torch.arange(30).repeat(2)
    cells = KeyCells(torch.tensor([30, 60]))
    mine, other = index.find(keys_N, cells).long(), twin.find(keys_N, cells).long()
    assert torch.equal(mine >= 0, other >= 0)
    assert int((mine >= 0).sum()) > 50
    assert torch.equal(rows_SW[mine[mine >= 0]], twin_SW[other[other >= 0]])


@pytest.mark.parametrize("by_kernels", [False, True])
def test_the_host_learns_the_loss_and_the_faults_of_a_step(monkeypatch, by_kernels: bool):
    monkeypatch.setattr(library, "has_kernels", lambda device: by_kernels)
    news = StepNews(3, CPU)
    news.faults_G[:] = torch.tensor([2, 0, 5])
    news.beyond_G[:] = torch.tensor([0, 3, 1])
    news.tell(torch.tensor(0.625), torch.tensor(True))
    assert news.read() == (0.625, 8, 4)
    news.faults_G.zero_()
    news.beyond_G.zero_()
    news.tell(torch.tensor([1.5]).squeeze(), None)
    assert news.read() == (1.5, 0, 0)
