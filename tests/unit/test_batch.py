"""Columns in one piece of memory: views on demand, and neighbours found again in a copy."""

import pickle

import pytest
import torch

from nestpipe.batch import Batch, EqualLengths, PackedColumns
from nestpipe.jagged import Jagged, longest_of


def make_batch() -> Batch:
    dense = {"x": torch.rand(3, 2), "label": torch.tensor([1.0, 0.0, 1.0])}
    sparse = {
        "a": Jagged(torch.tensor([5, 6, 7]), torch.tensor([1, 0, 2])),
        "empty": Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
        "b": Jagged(torch.tensor([8, 9]), torch.tensor([0, 2, 0])),
    }
    return Batch(3, dense, sparse)


def columns_of(batch: Batch) -> PackedColumns:
    assert batch.packed is not None
    return batch.packed


def check_same(one: Batch, other: Batch) -> None:
    assert one.size == other.size
    assert list(one.dense) == list(other.dense)
    assert list(one.sparse) == list(other.sparse)
    for name, column in one.dense.items():
        assert torch.equal(column, other.dense[name])
    for name, keys in one.sparse.items():
        assert torch.equal(keys.values, other.sparse[name].values)
        assert torch.equal(keys.lengths, other.sparse[name].lengths)


def test_a_packed_batch_has_the_columns_of_the_batch():
    batch = make_batch()
    packed = batch.pack()
    check_same(packed, batch)
    check_same(packed.to("cpu"), batch)
    check_same(pickle.loads(pickle.dumps(packed)), batch)
    check_same(packed.slice(1, 3), batch.slice(1, 3))


def test_keys_of_all_features_are_neighbours_and_so_are_their_lengths():
    packed = make_batch().pack()
    there = make_batch().pack()
    for parts, wanted in (
        ([packed.sparse[name].values for name in packed.sparse], [5, 6, 7, 8, 9]),
        ([packed.sparse[name].lengths for name in packed.sparse], [1, 0, 2, 0, 0, 0, 0, 2, 0]),
        ([packed.sparse["b"].values], [8, 9]),
    ):
        found = columns_of(there).same_place(columns_of(packed), parts)
        assert found is not None
        assert found.tolist() == wanted
        assert found.untyped_storage().data_ptr() == there.sparse["a"].values.data_ptr()


def test_what_does_not_lie_in_a_row_is_not_found():
    packed, there = make_batch().pack(), make_batch().pack()
    a, b = packed.sparse["a"].values, packed.sparse["b"].values
    for parts in ([b, a], [a, b.clone()], [a.clone()], [a[::2]], [packed.sparse["empty"].values]):
        assert columns_of(there).same_place(columns_of(packed), parts) is None


def test_batches_of_equal_sizes_share_their_layout():
    one, other = make_batch().pack(), make_batch().pack()
    assert columns_of(one).layout is columns_of(other).layout
    assert columns_of(one.slice(0, 2).pack()).layout is not columns_of(one).layout


def test_lists_whose_lengths_do_not_add_up_are_known():
    batch = make_batch()
    sparse = {**batch.sparse, "short": Jagged(torch.tensor([1, 2]), torch.tensor([1, 0, 0]))}
    packed = columns_of(Batch(3, batch.dense, sparse).pack())
    assert packed.agreeing == packed.to("cpu", non_blocking=False).agreeing == set(batch.sparse)
    assert columns_of(batch.empty().pack()).agreeing == set(batch.sparse)
    assert columns_of(Batch(2, {"x": torch.rand(2)}, {}).pack()).agreeing == set()


@pytest.mark.parametrize("length", [1, 3])
def test_equal_lengths_need_not_travel(length: int, monkeypatch: pytest.MonkeyPatch):
    """A device that writes them itself has the same bits as one that got them."""
    monkeypatch.setattr("nestpipe.batch.WORTH_LEAVING_OUT", 8)
    lists = {
        name: Jagged(torch.randint(-9, 9, (4 * length,)), torch.full((4,), length))
        for name in ("a", "b")
    }
    packed = columns_of(Batch(4, {"x": torch.arange(4)}, lists).pack())
    equal = packed.equal_lengths
    assert equal is not None
    assert equal == EqualLengths(8, length)
    part = packed.parts[torch.int64]
    sent = equal.send_all_else(part, torch.device("cpu"), non_blocking=False)
    assert torch.equal(sent, part)
    assert sent.data_ptr() != part.data_ptr()


def test_lengths_that_differ_travel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nestpipe.batch.WORTH_LEAVING_OUT", 4)

    def of(*lengths: list[int], dtype: torch.dtype = torch.int64) -> EqualLengths | None:
        lists = {
            str(n): Jagged(torch.arange(sum(some)), torch.tensor(some, dtype=dtype))
            for n, some in enumerate(lengths)
        }
        return columns_of(Batch(len(lengths[0]), {}, lists).pack()).equal_lengths

    assert of([2, 2], [2, 2]) == EqualLengths(4, 2)
    assert of([2, 2], [1, 1]) is None
    assert of([2, 2], [1, 3]) is None
    assert of([2, 2], [2, 2], dtype=torch.int32) is None
    assert of([2], [2]) is None  # too few
    assert of([0, 0], [0, 0]) == EqualLengths(4, 0)


def test_the_host_knows_lengths_of_lists_that_it_has_sent_away():
    batch = make_batch()
    for there in (batch.to("meta"), batch.pack().to("meta"), batch.pack().to("meta").to("meta")):
        a, b = there.sparse["a"], there.sparse["b"]
        assert a.lengths.device.type == "meta"  # which cannot be read at all
        assert (longest_of(a), longest_of(a, b)) == (2, 2)
        assert longest_of(there.sparse["empty"]) == 0
    assert longest_of(batch.empty().sparse["a"]) == 0
