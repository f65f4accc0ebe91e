"""The contract of every source: what a rank sees depends on data, seed and epoch, nothing else."""

import threading
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.batch import Batch
from nestpipe.data import Source, open_source
from nestpipe.data.order import Permutation, Share, mix
from nestpipe.data.source import Chunk, Stream, keys_column
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged


def read(source: Source, rank: int = 0, ranks: int = 1, **options) -> list[Batch]:
    options = {"global_batch": 7, "seed": 3, **options}
    return list(source.batches(rank=rank, ranks=ranks, **options))


def flat(parts) -> list:
    return list(chain.from_iterable(parts))


@pytest.mark.parametrize("global_batch", [1, 7, 16, 1000])
def test_any_number_of_ranks_sees_the_same_global_batches(config, lists, global_batch):
    source = open_source(config)
    whole = [lists(batch) for batch in read(source, global_batch=global_batch)]
    assert all(len(batch) == global_batch for batch in whole[:-1])
    for ranks in (2, 3, 4):
        parts = [read(source, rank, ranks, global_batch=global_batch) for rank in range(ranks)]
        assert {len(part) for part in parts} == {len(whole)}
        for batch, *shares in zip(whole, *parts, strict=True):
            assert flat(lists(share) for share in shares) == batch
            sizes = [share.size for share in shares]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1


def test_a_run_that_resumes_sees_what_it_would_have_seen(config, lists):
    whole = [lists(batch) for batch in read(open_source(config), rank=1, ranks=2)]
    for start in range(len(whole) + 2):
        again = read(open_source(config), rank=1, ranks=2, start=start)
        assert [lists(batch) for batch in again] == whole[start:]


def test_seed_and_epoch_decide_the_order_and_nothing_of_the_contents(config, lists):
    source = open_source(config)

    def samples(**options):
        return flat(lists(batch) for batch in read(source, **options))

    first = samples(epoch=0)
    assert samples(epoch=0) == first
    assert samples(epoch=1) != first
    assert samples(seed=4) != first
    assert sorted(map(str, samples(epoch=1))) == sorted(map(str, first))
    assert source.num_samples in (None, len(first))


def test_without_shuffling_every_epoch_is_in_the_order_of_the_files(config, lists):
    plain = open_source(replace(config, shuffle=False))
    first, second = ([lists(batch) for batch in read(plain, epoch=epoch)] for epoch in (0, 1))
    assert first == second
    shuffled = flat(lists(batch) for batch in read(open_source(config)))
    assert sorted(map(str, flat(first))) == sorted(map(str, shuffled))


def test_an_empty_batch_has_the_same_columns(config):
    source = open_source(config)
    batch, empty = read(source)[0], source.empty()
    assert empty.size == 0
    assert isinstance(source, Source)
    assert list(empty.dense) == [c.name for c in source.columns if not c.is_list]
    assert empty.dense.keys() == batch.dense.keys()
    assert empty.sparse.keys() == batch.sparse.keys()
    for name, values in empty.dense.items():
        assert values.dtype == batch.dense[name].dtype
        assert values.shape[1:] == batch.dense[name].shape[1:]
    for column in source.columns:
        if column.single:
            assert batch.sparse[column.name].lengths.tolist() == [1] * batch.size


def test_a_source_can_be_read_from_several_threads_at_once(config, lists):
    source = open_source(config)
    expected = [lists(batch) for batch in read(source)]
    found: list[list] = []

    def work():
        found.append([lists(batch) for batch in read(source)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


@given(size=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_a_permutation_has_every_number_once(size, key):
    found = Permutation(size, key)(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_a_permutation_leaves_no_pattern():
    """Neighbours end far apart, and each number goes anywhere over many keys."""
    found = Permutation(10_000, 5)(np.arange(10_000))
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.05
    assert np.abs(np.diff(found)).mean() == pytest.approx(10_000 / 3, rel=0.05)
    first = [int(Permutation(10, mix(key))(np.array([0]))[0]) for key in range(2000)]
    assert np.bincount(first, minlength=10).min() > 140


def test_orders_and_hashes_never_change():
    """Checkpoints name a position in this order: a change here breaks every resumed run."""
    assert Permutation(10, 1)(np.arange(10)).tolist() == GOLDEN_ORDER
    assert mix(1, 2, 3) == GOLDEN_MIX


GOLDEN_ORDER = [1, 5, 4, 7, 6, 2, 3, 8, 0, 9]
GOLDEN_MIX = 7702586659592502839


def in_memory(sizes: list[int], window: int, reads: list[int], known: bool = True) -> Stream:
    """A stream of the numbers 0, 1, 2, ... in chunks of these sizes, in pieces of three."""
    chunks, begin = [], 0
    for number, size in enumerate(sizes):

        def chunk(_, begin=begin, size=size, number=number):
            reads.append(number)
            for low in range(begin, begin + size, 3):
                values = torch.arange(low, min(low + 3, begin + size))
                yield Batch(len(values), {}, {"key": Jagged.one_each(values)})

        chunks.append(Chunk(chunk, lambda size=size: size if known else None))
        begin += size
    return Stream([keys_column("key")], chunks, window=window)


def slow_stream(sizes: list[int], window: int, key: int) -> list[int]:
    """The order of a stream, said plainly."""
    begins = np.cumsum([0, *sizes])
    numbers: list[int] = []
    for chunk in Permutation(len(sizes), key)(np.arange(len(sizes))).tolist():
        numbers += range(begins[chunk], begins[chunk + 1])
    order: list[int] = []
    for index, low in enumerate(range(0, len(numbers), window)):
        part = numbers[low : low + window]
        shuffle = Permutation(len(part), mix(key, index))(np.arange(len(part)))
        order += [part[i] for i in shuffle.tolist()]
    return order


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    window=st.integers(1, 30),
    global_batch=st.integers(1, 30),
    ranks=st.integers(1, 4),
    start=st.integers(0, 8),
    known=st.booleans(),
)
def test_a_stream_is_its_slow_twin(sizes, window, global_batch, ranks, start, known):
    order = slow_stream(sizes, window, mix(9, 2))
    options = {"global_batch": global_batch, "seed": 9, "epoch": 2, "start": start}
    for rank in range(ranks):
        share = Share(global_batch=global_batch, rank=rank, ranks=ranks)
        expected = []
        for low in range(start * global_batch, len(order), global_batch):
            batch = order[low : low + global_batch]
            expected.append(batch[slice(*share.part(len(batch)))])
        found = read(in_memory(sizes, window, [], known), rank, ranks, **options)
        assert [batch.sparse["key"].values.tolist() for batch in found] == expected


def test_resuming_does_not_read_what_is_known_to_be_over():
    reads: list[int] = []
    stream = in_memory([10] * 6, 10, reads)
    assert stream.num_samples == 60
    read(stream, global_batch=10, start=4)
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 2, "ranks": 2}, "rank 2 of 2 does not exist"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"start": -1}, "start is -1"),
    ],
)
def test_a_share_that_cannot_be_is_refused_before_anything_is_read(make, options, sentence):
    source = open_source(make("synthetic"))
    with pytest.raises(ConfigError, match=sentence):
        source.batches(**{"rank": 0, "ranks": 1, "seed": 0, "global_batch": 4, **options})


@pytest.mark.parametrize("kind", ["synthetic sequence", "movielens sequences"])
def test_a_sequence_has_a_name_that_no_order_changes(make, kind):
    """What a model draws for a sample follows from its name and the pass over the data."""

    def names(**options):
        batches = read(open_source(make(kind)), **options)
        return {
            number: (tuple(history), turn)
            for batch in batches
            for number, history, turn in zip(
                batch.dense["sample_id"].tolist(),
                batch.sparse["history"].to_lists(),
                batch.dense["step"].tolist(),
                strict=True,
            )
        }

    first, second = names(epoch=0), names(epoch=1)
    assert {n: h for n, (h, _) in first.items()} == {n: h for n, (h, _) in second.items()}
    assert {turn for _, turn in first.values()} == {0}
    assert {turn for _, turn in second.values()} == {1}
