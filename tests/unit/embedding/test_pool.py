"""A pool of rows: whatever leaves and comes back, every batch finds the rows of a plain table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.embedding import slot_transfer
from nestpipe.embedding.pool import (
    PoolSnapshot,
    RowPool,
    SlotRows,
    pool_sizes,
    pools_on_one_device,
)
from nestpipe.embedding.slot_transfer import DirectTransfer, StagedTransfer
from nestpipe.embedding.store import StoreLayout, open_store
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.store.protocol import ReadOnlyRows, RowStore
from nestpipe.errors import ConfigError
from nestpipe.kernels.index.device_index import KeyCells
from nestpipe.train.background import TrackedStore
from support.emulated_kernels import pools_on_emulated_gpu

CPU = torch.device("cpu")
LAYOUT = StoreLayout(table_seeds=(5, 9), init_stds=(0.1, 0.2), dim=3, state_dim=2)
BATCH = st.lists(st.tuples(st.integers(0, 1), st.integers(-6, 6)), max_size=8, unique=True)


def pool_of(slots: int, store: RowStore | None = None) -> RowPool:
    return RowPool(store or open_store(LAYOUT, native=False), slots, CPU)


def reach_rows_by_address(pool: RowPool) -> None:
    """As with a pinned store on a GPU."""
    store = pool._store
    if isinstance(store, NativeStore):
        store.pin = lambda: True  # type: ignore[method-assign]
    by_store = StagedTransfer(store, pool.rows_SW, pool._stored_S, LAYOUT.num_tables)
    pool._transfer = DirectTransfer(
        store, pool.rows_SW, pool._stored_S, LAYOUT.num_tables, by_store
    )


def laid_out(batch: list[tuple[int, int]]) -> tuple[Tensor, KeyCells]:
    tables = [[key for table, key in batch if table == number] for number in range(2)]
    ends_C = torch.tensor([len(tables[0]), len(batch)])
    return torch.tensor([*tables[0], *tables[1]], dtype=torch.int64), KeyCells(ends_C)


def pairs(batch: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [pair for table in range(2) for pair in batch if pair[0] == table]


def train(
    pool: RowPool,
    batches: list[list[tuple[int, int]]],
    model: dict[tuple[int, int], float],
    holds: int = 2,
):
    """Rows are written as late as they may; each batch adds its number to every row it uses."""
    pool.begin_run(holds)
    for t, batch in enumerate(batches):
        slots = pool.admit(t, *laid_out(batch))
        if t >= holds:
            pool.writeback(t - holds)
        pool.retrieve(t)
        rows = SlotRows(pool.rows_SW, slots)
        rows_KW = rows.read()
        for row, pair in zip(rows_KW, pairs(batch), strict=True):
            assert row[-1].item() == model.get(pair, 0.0), f"batch {t} finds another row of {pair}"
            model[pair] = model.get(pair, 0.0) + t + 1
        rows_KW[:, -1] += t + 1
        rows.write(rows_KW)
        pool.forget(t - holds + 1)
    for t in range(max(0, len(batches) - holds), len(batches)):
        pool.writeback(t)


RUNS = st.lists(st.lists(BATCH, max_size=8), min_size=1, max_size=3)


@pytest.mark.parametrize("transfer", ["staged", "direct", "direct by table"])
@pytest.mark.parametrize("holds", [2, 3])
@given(runs=RUNS, more_slots=st.integers(0, 14))
def test_rows_that_leave_and_come_back_are_those_of_a_dictionary(holds, transfer, runs, more_slots):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_transfer, "EACH_WITH_ITS_TABLE", transfer == "direct")
        check_against_a_dictionary(holds, runs, more_slots, direct=transfer != "staged")


def check_against_a_dictionary(
    holds: int, runs: list[list[list[tuple[int, int]]]], more_slots: int, *, direct: bool
) -> None:
    pool, model = pool_of(8 * holds + more_slots, open_store(LAYOUT, native=direct)), {}
    if direct:
        reach_rows_by_address(pool)
    for batches in runs:
        train(pool, batches, model, holds)
        pool.poison = True
    pool.flush()
    store = pool._store
    assert sum(store.num_rows()) == len(model)
    for (table, key), value in model.items():
        rows_1W = torch.empty(1, LAYOUT.width)
        store.gather(torch.tensor([key]), [1 - table, table], rows_1W)
        assert rows_1W[0, -1].item() == value


CHECKPOINT, EVALUATION = "checkpoint", "evaluation"


@pytest.mark.parametrize("transfer", ["staged", "direct"])
@pytest.mark.parametrize("holds", [2, 3])
@given(
    runs=RUNS,
    acts=st.lists(st.sampled_from([CHECKPOINT, EVALUATION, ""]), min_size=3, max_size=3),
    more_slots=st.integers(0, 14),
)
def test_a_snapshot_is_what_a_flush_would_have_written(holds, transfer, runs, acts, more_slots):
    """Two pools live the same life; at checkpoints one is copied and the other one flushed."""
    copied, flushed = (
        tracked_pool(8 * holds + more_slots, direct=transfer == "direct") for _ in range(2)
    )
    models: list[dict[tuple[int, int], float]] = [{}, {}]
    for batches, act in zip(runs, acts, strict=False):
        for pool, model in zip((copied, flushed), models, strict=True):
            train(pool, batches, model, holds)
            if act == EVALUATION:
                pool.flush()
        if act == CHECKPOINT:
            snapshot = copied.snapshot()
            assert snapshot is not None
            flushed.flush()
            of_flush, of_copies = rows_touched(flushed), rows_touched(copied, snapshot)
            assert of_copies == of_flush
            counts = zip(copied._store.num_rows(), snapshot.not_stored, strict=True)
            assert [sum(of) for of in counts] == flushed._store.num_rows()
            for pool in (copied, flushed):
                pool._store.track()  # type: ignore[attr-defined]
    for pool in (copied, flushed):
        pool.flush()
    assert copied._store.num_rows() == flushed._store.num_rows()


def tracked_pool(slots: int, *, direct: bool) -> RowPool:
    store = open_store(LAYOUT, native=direct)
    if direct:
        store.pin = lambda: True  # type: ignore[method-assign]
    tracked = TrackedStore(store)
    tracked.track()
    pool = pool_of(slots, tracked)
    if direct:
        reach_rows_by_address(pool)
    return pool


def rows_touched(pool: RowPool, snapshot: PoolSnapshot | None = None) -> dict[object, list[float]]:
    """By table and key what the store notes as touched, then what the snapshot has."""
    store, found = pool._store, dict[object, list[float]]()
    assert isinstance(store, TrackedStore)
    for table, keys_K in enumerate(store.touched()):
        for keys, rows in store.rows_at(table, keys_K):
            found |= {
                (table, key): row for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
            }
    of_tables = [] if snapshot is None else snapshot.of_tables(lambda tensor: tensor, 3)
    for table, (keys_K, blocks) in enumerate(of_tables):
        assert keys_K.tolist() == sorted(set(keys_K.tolist()))
        rows = [row for block in blocks for row in block.tolist()]
        found |= {(table, key): row for key, row in zip(keys_K.tolist(), rows, strict=True)}
    return found


def test_copies_of_a_snapshot_stay_while_rows_are_trained_and_leave():
    pool, model = tracked_pool(16, direct=False), dict[tuple[int, int], float]()
    train(pool, [[(0, key)] for key in range(8)], model)
    snapshot = pool.snapshot()
    assert snapshot is not None
    before = rows_touched(pool, snapshot)
    train(pool, [[(0, key), (1, key + 100)] for key in range(40)], model)
    pool._store.track()  # type: ignore[attr-defined]
    assert rows_touched(pool, snapshot) == before
    assert [value[-1] for value in before.values()] == [float(t + 1) for t in range(8)]


@pytest.mark.parametrize("transfer", ["staged", "direct"])
def test_rows_that_came_back_are_counted_once(transfer):
    """All that batch 6 asks for is in the store, some of batch 8, nothing of the others."""
    pool, model = tracked_pool(4, direct=transfer == "direct"), dict[tuple[int, int], float]()
    batches = [[(0, 2 * t), (0, 2 * t + 1)] for t in range(6)]
    for last in ([(0, 0), (0, 1)], [(0, 10), (0, 11)], [(0, 2), (0, 99)]):
        batches.append(last)
        train(pool, batches, model)
        snapshot = pool.snapshot()
        assert snapshot is not None
        assert pool._store.num_rows()[0] + snapshot.not_stored[0] == len(model)
        batches = [[(0, 4), (0, 5)], [(0, 6), (0, 7)]]


def test_a_row_made_in_the_slot_of_an_erased_one_is_not_stored():
    """Each time two rows are here that the store has not; then one leaves it, and its slot."""
    with pools_on_emulated_gpu():
        store = TrackedStore(open_store(LAYOUT, native=True))
        store.track()
        pool = pool_of(4, store)
        for keys, not_stored in (([1, 2], 2), ([7, 2], 1), ([8, 9], 2)):
            pool.begin_run()
            pool.admit(0, *laid_out([(0, key) for key in keys]))
            pool.retrieve(0)
            snapshot = pool.snapshot()
            assert snapshot is not None
            assert snapshot.not_stored == [not_stored, 0]
            pool.flush()
            erased = torch.tensor(keys[:1])
            store.erase(erased, [1, 0])
            pool.forget_rows(0, erased)


def test_a_store_that_keeps_some_rows_only_must_see_them_all():
    pool = pool_of(8, ReadOnlyRows(open_store(LAYOUT, native=False)))
    train(pool, [[(0, 1)]], {})
    assert pool.snapshot() is None


@pytest.mark.parametrize("transfer", ["staged", "direct"])
def test_rows_whose_slots_are_needed_at_once_are_saved_before(transfer):
    """Three batches fill the pool, so the fourth one takes slots that nobody has emptied."""
    direct = transfer == "direct"
    pool, model = pool_of(6, open_store(LAYOUT, native=direct)), {}
    if direct:
        reach_rows_by_address(pool)
    twos = [[(0, key), (1, key)] for key in (1, 2, 3, 4, 1, 2, 3, 4, 1)]
    train(pool, twos, model, holds=3)
    assert model[0, 1] == 1 + 5 + 9


def test_a_pool_too_small_for_three_batches_says_so_and_names_two():
    pool = pool_of(5)
    pool.begin_run(3)
    for t in range(2):
        pool.admit(t, *laid_out([(0, 2 * t), (0, 2 * t + 1)]))
        pool.retrieve(t)
    pool.admit(2, *laid_out([(0, 4), (0, 5)]))
    with pytest.raises(
        ConfigError, match=r"batches 0 to 2 .* 1 more; .* pipeline.buffers = 2 to hold"
    ):
        pool.retrieve(2)


def test_first_values_are_those_of_the_store():
    pool, store = pool_of(8), open_store(LAYOUT, native=False)
    batch = [(0, 7), (1, 7), (1, -1)]
    slots = pool.admit(0, *laid_out(batch))
    pool.retrieve(0)
    wanted_KW = torch.empty(3, LAYOUT.width)
    store.gather(torch.tensor([7, 7, -1]), [1, 2], wanted_KW)
    assert torch.equal(SlotRows(pool.rows_SW, slots).read(), wanted_KW)


def test_a_row_is_written_only_when_its_slot_is_needed():
    pool = pool_of(4)
    pool.begin_run()
    for t, batch in enumerate([[(0, 1), (0, 2)], [(0, 2)], [(0, 2)]]):
        pool.admit(t, *laid_out(batch))
        pool.retrieve(t)
        assert pool.writeback(t - 2) == 0, "there is room for all"
    assert not any(pool._store.num_rows())


def test_victims_are_rows_that_neither_this_batch_nor_the_one_before_uses():
    pool = pool_of(4)
    pool.begin_run()
    for t, batch in enumerate([[(0, 1), (0, 2)], [(0, 2), (0, 3)], [(0, 4), (0, 5)]]):
        pool.admit(t, *laid_out(batch))
        pool.writeback(t - 2)
        pool.retrieve(t)
    assert pool._store.num_rows() == [1, 0], "only key 1 may leave"


def test_a_pool_too_small_for_two_batches_says_so_with_its_numbers():
    pool = pool_of(3)
    pool.begin_run()
    pool.admit(0, *laid_out([(0, 1), (0, 2)]))
    pool.admit(1, *laid_out([(0, 3), (0, 4)]))
    with pytest.raises(ConfigError, match=r"3 rows .* batches 0 and 1 .* 1 more; raise dev"):
        pool.retrieve(1)


def test_a_pool_too_small_for_the_first_batch_says_so_too():
    pool = pool_of(1)
    pool.begin_run()
    pool.admit(0, *laid_out([(0, 1), (0, 2)]))
    with pytest.raises(ConfigError, match=r"1 rows \(0.091 KB\) .* batch 0 needs up to 1 more"):
        pool.retrieve(0)


def test_rows_that_were_loaded_beside_the_pool_are_found():
    pool, model = pool_of(16), {}
    train(pool, [[(0, 1)]], model)
    pool.clear()
    pool._store.scatter(torch.tensor([1]), [1, 0], torch.full((1, LAYOUT.width), 7.0))
    train(pool, [[(0, 1)]], {(0, 1): 7.0})


def test_rows_are_looked_for_only_where_batches_came_since_the_last_flush(monkeypatch):
    """Who reads a thousand tables one by one would look through the whole pool for each."""
    pool, model = pool_of(16), dict[tuple[int, int], float]()
    train(pool, [[(0, 1), (1, 2)]], model)
    pool.flush()
    looked: list[int] = []
    monkeypatch.setattr(pool, "_write", looked.append)
    monkeypatch.setattr(pool.index, "stamps_S", None)
    pool.flush()
    assert not looked


@pytest.mark.parametrize("words", ["", "GB", "-1GB", "0", "1.5", "lots", "40 XB"])
def test_a_size_that_is_none_is_refused(words):
    with pytest.raises(ConfigError, match=r"device_memory is .* use 'auto', a size"):
        pool_sizes(words, [LAYOUT], CPU)


def test_sizes_share_memory_so_that_every_table_gets_as_many_rows():
    wide = StoreLayout(table_seeds=(1,), init_stds=(0.1,), dim=64, state_dim=64)
    narrow, single = pool_sizes("1MB", [LAYOUT, wide], CPU)
    assert narrow == 2 * single
    assert 900_000 < narrow * (32 + 59) + single * (512 + 59) <= 1_000_000
    assert pool_sizes("0.1", [LAYOUT], CPU)[0] > 1000


def test_more_memory_than_is_free_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"'900TB', and .* of host memory are free"):
        pool_sizes("900TB", [replace(LAYOUT, dim=10_000_000)], CPU)


def test_a_pool_is_not_larger_than_its_tables_can_be():
    limited = StoreLayout(
        table_seeds=(1, 2), init_stds=(0.1, 0.1), dim=4, state_dim=0, max_rows=(30, 12)
    )
    assert pool_sizes("auto", [limited], CPU) == [42]


def test_ranks_of_one_machine_share_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert pools_on_one_device(torch.device("cuda"), 12) == 2


def test_rows_that_were_erased_from_the_store_are_forgotten_and_others_stay():
    store = open_store(LAYOUT, native=False)
    pool, model = pool_of(16, store), dict[tuple[int, int], float]()
    first = [(0, 1), (0, 2), (1, 1), (1, 2)]
    train(pool, [first], model)
    pool.flush()
    store.erase(torch.tensor([1]), [0, 1])
    pool.forget_rows(1, torch.tensor([1]))
    new = torch.empty(1, LAYOUT.width)
    store.gather(torch.tensor([1]), [0, 1], new)
    pool.begin_run()
    slots = pool.admit(0, *laid_out(first))
    pool.retrieve(0)
    found = SlotRows(pool.rows_SW, slots).read()
    assert torch.equal(found[2], new[0])  # begins again
    stored = torch.empty(3, LAYOUT.width)
    store.gather(torch.tensor([1, 2, 2]), [2, 1], stored)
    assert torch.equal(found[[0, 1, 3]], stored)
