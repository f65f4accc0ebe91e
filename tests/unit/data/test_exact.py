"""The contract of every source: what a rank sees depends on data, seed and epoch, nothing else."""

import io
import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.batch import Batch
from nestpipe.data import (
    DataConfig,
    ParquetConfig,
    PinsBatches,
    Source,
    open_source,
    parquet,
    sequences,
)
from nestpipe.data.inputs import PageReader
from nestpipe.data.order import Permutation, Share, choose_shards, mix
from nestpipe.data.shards import DecodedPiece, Piece, pick, pick_plainly
from nestpipe.data.source import Chunk, Stream, keys_column
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.kernels import host_memory, take
from nestpipe.kernels.take import Filling, RowSpan, Target


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


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_native_code_has_the_same_permutation(size, key):
    shuffle = Permutation(size, key)
    assert shuffle.whole(native=True).tolist() == shuffle.whole(native=False).tolist()


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


def in_memory(
    sizes: list[int], window: int, reads: list[int], known: bool = True, **options
) -> Stream:
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
    return Stream([keys_column("key")], chunks, window=window, **options)


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


def slow_shards(
    sizes: list[int], window: int, shards: int, key: int
) -> tuple[list[int], list[int]]:
    """The order of a stream in shards, said plainly: the samples, and the shard of each."""
    begins = np.cumsum([0, *sizes])
    numbers: list[int] = []
    for chunk in Permutation(len(sizes), key)(np.arange(len(sizes))).tolist():
        numbers += range(begins[chunk], begins[chunk + 1])
    bits = max(1, (shards - 1).bit_length())
    turns = sorted(range(shards), key=lambda shard: f"{shard:0{bits}b}"[::-1])
    rounds = [turns[position % shards] for position in range(len(numbers))]
    queues: list[list[int]] = []
    for shard in range(shards):
        size = rounds.count(shard)
        mine, numbers = numbers[:size], numbers[size:]
        each = max(1, window // shards)
        order: list[int] = []
        for index, low in enumerate(range(0, size, each)):
            part = mine[low : low + each]
            window_key = mix(key, index) if shards == 1 else mix(key, 1 + shard, index)
            order += [part[i] for i in Permutation(len(part), window_key)(np.arange(len(part)))]
        queues.append(order)
    return [queues[shard].pop(0) for shard in rounds], rounds


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    window=st.integers(1, 30),
    shards=st.integers(1, 9),
    global_batch=st.integers(1, 30),
    ranks=st.integers(1, 5),
    start=st.integers(0, 8),
    threads=st.integers(1, 3),
)
def test_a_stream_in_shards_is_its_slow_twin(
    sizes, window, shards, global_batch, ranks, start, threads
):
    order, shard_of = slow_shards(sizes, window, shards, mix(9, 2))
    options = {"global_batch": global_batch, "seed": 9, "epoch": 2, "start": start}
    stream = in_memory(sizes, window, [], shards=shards, threads=threads)
    for rank in range(ranks):
        share = Share(global_batch=global_batch, rank=rank, ranks=ranks)
        expected = []
        for low in range(start * global_batch, len(order), global_batch):
            places = range(low, min(low + global_batch, len(order)))
            batch = [order[place] for place in sorted(places, key=lambda place: shard_of[place])]
            expected.append(batch[slice(*share.part(len(batch)))])
        found = read(stream, rank, ranks, **options)
        assert [batch.sparse["key"].values.tolist() for batch in found] == expected


def lists_of(sizes: list[int], single: bool) -> list[Batch]:
    """Pieces with columns of every shape, some lists longer than the native code's short ones."""
    random = np.random.default_rng(len(sizes))
    pieces = []
    for size in sizes:
        lengths = random.integers(0, 12, size)
        keys = random.integers(-(2**62), 2**62, (size,))
        values = random.integers(-(2**62), 2**62, int(lengths.sum()))
        dense = {"x": torch.rand(size, 3), "y": torch.rand(size), "id": torch.from_numpy(keys)}
        sparse = {"list": Jagged(torch.from_numpy(values), torch.from_numpy(lengths))}
        if single:
            sparse["one"] = Jagged.one_each(torch.from_numpy(keys))
        pieces.append(Batch(size, dense, sparse))
    return pieces


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("sizes", [[1], [40], [7, 1, 30], [5, 0, 5]])
def test_native_picking_is_the_plain_one(sizes, single, lists):
    pieces = lists_of(sizes, single)
    spans = [RowSpan(n, size // 3, size) for n, size in enumerate(sizes)]
    total = sum(span.end - span.first for span in spans)
    one_each = frozenset({"one"})
    native = [Piece.of(piece, one_each, native=True) for piece in pieces]
    picked = pick(native, spans)
    assert lists(picked) == lists(pick_plainly(pieces, spans))
    again = picked.pack()
    assert again.packed is not None
    assert picked.packed is not None
    for dtype, part in again.packed.parts.items():
        assert torch.equal(part, picked.packed.parts[dtype])
    assert again.packed.layout is picked.packed.layout
    assert again.packed.agreeing == picked.packed.agreeing
    order = np.random.default_rng(0).permutation(total)
    window = filled(pieces, spans, one_each, order)
    plain = pick_plainly(pieces, spans, order)
    for first, end in ((0, total), (total // 3, total // 2)):
        found = pick([window], [RowSpan(0, first, end)])
        assert lists(found) == lists(plain.slice(first, end))


def filled(pieces: list[Batch], spans: list[RowSpan], single: frozenset[str], order) -> Piece:
    """One window of these spans: all but the last are kept, and come from memory the second time.

    Beside it a window in the middle of the last span is filled, which must not matter.
    """
    kept = []
    for piece, span in zip(pieces[:-1], spans, strict=False):
        decoded = DecodedPiece(piece, single)
        first = fill(decoded, [Target(span.first, span.end)])[0]
        again = Filling([Target(0, first.size)], len(decoded.form.sparse), decoded.form.rows)
        again.add_piece(first)
        kept += again.pieces()
    decoded, span = DecodedPiece(pieces[-1], single), spans[-1]
    middle = Target((span.first + span.end) // 2, span.end)
    window = fill(decoded, [middle, Target(span.first, span.end, tuple(kept), order)])[1]
    return Piece(window.size, tuple(pieces[0].dense), tuple(pieces[0].sparse), window)


def fill(piece: DecodedPiece, targets: list[Target]):
    filling = Filling(targets, len(piece.form.sparse), piece.form.rows)
    for column in piece.columns():
        column(filling)
    return filling.pieces()


def test_without_native_code_the_batches_are_the_same(make, lists, monkeypatch):
    source = open_source(make("parquet", shards=3))
    native = [lists(batch) for batch in read(source)]
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert [lists(batch) for batch in read(source)] == native


def columns_of_all_kinds(rows: int) -> pa.Table:
    """Types and gaps that are read, in a table of so many rows."""
    random = np.random.default_rng(3)
    lists = [random.integers(-9, 9, random.integers(0, 6)).tolist() for _ in range(rows)]
    gaps = [None if row % 7 == 2 else value for row, value in enumerate(lists)]
    numbers = [None if row % 5 == 1 else row / 8 for row in range(rows)]
    return pa.table(
        {
            "label": pa.array([row % 3 == 0 for row in range(rows)]),
            "short": pa.array(lists, pa.list_(pa.int32())),
            "long": pa.array(gaps, pa.large_list(pa.int64())),
            "fixed": pa.array([[row, -row] for row in range(rows)], pa.list_(pa.int64(), 2)),
            "texts": pa.array([[f"t{row % 4}"] * (row % 3) for row in range(rows)]),
            "one": pa.array([None if row % 6 == 3 else row for row in range(rows)], pa.uint64()),
            "word": pa.array([f"w{row % 5}" for row in range(rows)]).dictionary_encode(),
            "double": pa.array(numbers, pa.float64()),
            "float": pa.array(numbers, pa.float32()),
        }
    )


@pytest.mark.parametrize("every", [0, 5])
@pytest.mark.parametrize("shards", [1, 3])
def test_columns_that_are_decoded_in_turn_are_those_of_whole_rows(
    tmp_path, monkeypatch, lists, shards, every
):
    """Windows that end inside of row groups and go on in the next, edges of shards among them."""
    pq.write_table(columns_of_all_kinds(100), tmp_path / "a.parquet", row_group_size=30)
    config = DataConfig(
        kind="parquet", path=str(tmp_path), shards=shards, shuffle_window=40, test_every=every
    )
    in_turn = [lists(batch) for batch in read(open_source(config), global_batch=7)]
    monkeypatch.setattr(parquet, "MOST_IN_TURN", 0)
    whole = open_source(config)
    assert [lists(batch) for batch in read(whole, global_batch=7)] == in_turn
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert [lists(batch) for batch in read(whole, global_batch=7)] == in_turn


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("x", [0.5, float("nan"), 1.0, 2.0]),
        ("x", [0.5, None, float("inf"), 2.0]),
        ("label", [0.0, 1.0, None, 1.0]),
        ("keys", [[1], [2, None], None, [3]]),
    ],
)
def test_a_broken_row_is_the_same_sentence_when_columns_are_decoded_in_turn(
    tmp_path, monkeypatch, column, values
):
    columns = {"x": [1.0] * 4, "label": [0.0, 1.0] * 2, "keys": [[1]] * 4} | {column: values}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    source = open_source(DataConfig(kind="parquet", path=str(tmp_path), shards=2))
    with pytest.raises(DataError) as in_turn:
        read(source)
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    with pytest.raises(DataError) as plain:
        read(source)
    assert str(in_turn.value) == str(plain.value)
    assert "is broken" in str(plain.value)


def test_batches_for_a_gpu_are_picked_into_pinned_memory(tmp_path, lists, monkeypatch):
    pq.write_table(columns_of_all_kinds(200), tmp_path / "part.parquet", row_group_size=64)
    source = open_source(DataConfig(kind="parquet", path=str(tmp_path), shuffle_window=32))
    assert isinstance(source, PinsBatches)
    pageable = [lists(batch) for batch in read(source)]
    asked: list[bool] = []

    def empty(shape, dtype, device, *, pinned=False):
        asked.append(pinned)
        return host_memory.empty(shape, dtype, device)  # a machine without a GPU pins nothing

    monkeypatch.setattr(take, "empty", empty)
    source.pinned = True
    assert [lists(batch) for batch in read(source)] == pageable
    assert any(asked), "only windows are in other memory"
    assert sum(asked) >= len(pageable)


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_sequences_that_stay_whole_are_what_cutting_them_would_give(tmp_path, monkeypatch, kind):
    """Rows without items, and out of the order of their times, among them."""
    items = [[5, 6, 7], [], [9, 8], [3], [], [1, 2, 4]]
    times = [[3, 1, 2], [], [1, 1], [9], [], [4, 5, 6]]
    columns = {"history": items, "timestamps": times}
    arrays = {name: pa.array(rows, kind(pa.int64())) for name, rows in columns.items()}
    pq.write_table(pa.table(arrays), tmp_path / "users.parquet")
    path = str(tmp_path)
    source = open_source(DataConfig(kind="parquet", path=path, test_path=path, shuffle=False))
    (whole,) = read(source)
    monkeypatch.setattr(sequences, "_is_whole", lambda *_: False)
    (cut,) = read(source)
    assert whole.sparse["history"].to_lists() == [[6, 7, 5], [], [9, 8], [3], [], [1, 2, 4]]
    for name in columns:
        assert whole.sparse[name].to_lists() == cut.sparse[name].to_lists()
    assert torch.equal(whole.dense["sample_id"], cut.dense["sample_id"])


@pytest.mark.parametrize("start", [0, 16])
def test_bytes_read_per_rank_fall_as_one_over_ranks(tmp_path, monkeypatch, start):
    """Counted where a file is read, by Arrow or by us; 64 row groups of 32 samples."""
    words = [[row % 7] * (row % 4) for row in range(2048)]
    numbers = {"item": np.arange(2048), "label": np.arange(2048) % 2}
    rows = pa.table({**numbers, "words": pa.array(words, pa.list_(pa.int64()))})
    pq.write_table(rows, tmp_path / "clicks.parquet", row_group_size=32)
    opened: list[int] = []

    class Counted(io.BytesIO):
        def read(self, size=-1):
            found = super().read(size)
            opened.append(len(found))
            return found

    def open_counted(path, footer=None):
        return pq.ParquetFile(
            pa.PythonFile(Counted(Path(path).read_bytes()), mode="r"), metadata=footer
        )

    def read_counted(reader, chunk):
        found = read_pages(reader, chunk)
        assert found is not None, "these pages are usual ones"
        opened.append(len(found))
        return found

    read_pages = PageReader._read
    monkeypatch.setattr(PageReader, "_read", read_counted)
    monkeypatch.setattr(parquet, "open_file", open_counted)
    config = DataConfig(kind="parquet", path=str(tmp_path), shards=8, shuffle_window=256)

    def num_bytes(rank, ranks):
        source = open_source(config)
        opened.clear()
        read(source, rank, ranks, global_batch=64, start=start)
        return sum(opened)

    alone = num_bytes(0, 1)
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            assert num_bytes(rank, ranks) == pytest.approx(alone / ranks, rel=0.03)
    assert num_bytes(0, 1) == pytest.approx(sum_of_all(tmp_path) * (1 - start / 32), rel=0.05)


def sum_of_all(folder) -> int:
    about = pq.ParquetFile(folder / "clicks.parquet").metadata
    groups = (about.row_group(group) for group in range(about.num_row_groups))
    return sum(group.column(i).total_compressed_size for group in groups for i in range(3))


def test_a_rank_opens_no_chunk_of_shards_that_are_not_its_own():
    reads: list[int] = []
    stream = in_memory([4] * 16, 16, reads, shards=4)
    seen = []
    for rank in range(4):
        reads.clear()
        read(stream, rank, 4, global_batch=8)
        seen.append(sorted(reads))
    assert sorted(flat(seen)) == list(range(16))
    assert [len(of_rank) for of_rank in seen] == [4] * 4


def test_neighbouring_shards_of_a_rank_read_the_chunk_at_their_edge_once():
    """Six chunks of ten samples in four shards: three edges are inside of chunks."""
    reads: list[int] = []
    stream = in_memory([10] * 6, 16, reads, shards=4)
    read(stream, global_batch=8)
    assert sorted(reads) == list(range(6))
    reads.clear()
    read(stream, rank=1, ranks=4, global_batch=8)
    assert len(reads) == len(set(reads)) == 2


def test_the_number_of_shards_follows_from_window_and_row_groups():
    assert choose_shards(0, 65_536, 100) == 8
    assert choose_shards(0, 65_536, 11) == 4
    assert choose_shards(0, 1_000, 100) == 1
    assert choose_shards(0, 10**9, 10**6) == 64
    assert choose_shards(1_536, 1_000, 1) == 1_536


def test_a_reader_that_fails_fails_the_pass(make):
    """Also where it reads ahead in a thread."""
    config = make("parquet", shards=2)
    source = open_source(config)
    for file in Path(config.path).glob("*.parquet"):
        file.unlink()
    with pytest.raises(DataError, match="cannot read"):
        read(source)


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


# Pages of Parquet that are decoded here, against Arrow.


LISTS = st.lists(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=9),
    min_size=1,
    max_size=60,
)
USUAL = {"use_dictionary": True, "compression": "zstd"}
WRITTEN = [
    USUAL,
    {"use_dictionary": True, "compression": "snappy", "data_page_size": 64},
    {"use_dictionary": True, "compression": "gzip", "dictionary_pagesize_limit": 64},
    {"use_dictionary": False, "compression": "none", "data_page_size": 100},
]
"""The last but one begins with entries of a dictionary, and goes on without."""


def list_type(outer: bool, inner: bool, large: bool) -> pa.Field:
    values = pa.field("element", pa.int64(), nullable=inner)
    return pa.field("keys", (pa.large_list if large else pa.list_)(values), nullable=outer)


def write_lists(path: Path, rows: list, column: pa.Field, **options) -> pq.ParquetFile:
    table = pa.table(
        [pa.array([1] * len(rows)), pa.array(rows, column.type)],
        pa.schema([pa.field("other", pa.int64()), column]),
    )
    pq.write_table(table, path, **{"row_group_size": 40, **options})
    return pq.ParquetFile(path)


def decoded(path: Path, file: pq.ParquetFile) -> list:
    reader = PageReader(path, file.metadata, file.schema_arrow)
    return [reader.lists(group, "keys") for group in range(file.num_row_groups)]


@given(LISTS, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(WRITTEN))
def test_lists_that_are_decoded_here_are_those_of_arrow(
    tmp_path_factory, rows, outer, inner, large, written
):
    path = tmp_path_factory.getbasetemp() / "lists.parquet"
    file = write_lists(path, rows * 3, list_type(outer, inner, large), **written)
    for group, found in enumerate(decoded(path, file)):
        assert found is not None, "nothing is unusual in this file"
        found.validate(full=True)
        assert found.to_pylist() == file.read_row_group(group)["keys"].to_pylist()


def test_long_runs_of_lists_are_those_of_arrow(tmp_path):
    """Levels and entries of every width, over many pages."""
    random = np.random.default_rng(0)
    for bits in (0, 1, 2, 7, 12, 17):
        lengths = random.integers(0 if bits % 2 else 1, 4, 30_000)
        keys = random.integers(0, 1 << bits, lengths.sum())
        rows = [part.tolist() for part in np.split(keys, np.cumsum(lengths)[:-1])]
        path = tmp_path / f"{bits}.parquet"
        column = list_type(True, True, True)
        file = write_lists(path, rows, column, row_group_size=30_000, data_page_size=9_000)
        (found,) = decoded(path, file)
        assert found.equals(file.read()["keys"].combine_chunks().cast(found.type))


@pytest.mark.parametrize(
    ("rows", "column", "options"),
    [
        ([[1], None], list_type(True, True, False), {}),
        ([[1], [None]], list_type(True, True, False), {}),
        ([[1], [2]], pa.field("keys", pa.list_(pa.int32())), {}),
        ([[1], [2]], pa.field("keys", pa.list_(pa.uint64())), {}),
        ([1, 2], pa.field("keys", pa.int64()), {}),
        ([[1], [2]], list_type(True, True, False), {"data_page_version": "2.0"}),
        ([[1], [2]], list_type(True, True, False), {"write_page_checksum": True}),
        ([[1], [2]], list_type(True, True, False), {"compression": "lz4"}),
    ],
)
def test_what_is_unusual_in_a_column_is_left_to_arrow(tmp_path, rows, column, options):
    path = tmp_path / "lists.parquet"
    assert decoded(path, write_lists(path, rows, column, **options)) == [None]


def read_by_arrow(path: Path) -> list | None:
    """The lists of a file, where Arrow does not refuse it."""
    try:
        return pq.read_table(path)["keys"].to_pylist()
    except (pa.ArrowException, OSError):
        return None


def test_no_damage_of_a_page_ends_the_process(tmp_path):
    """Bytes that are changed or missing: what Arrow reads, or its turn to say what it is."""
    random = np.random.default_rng(1)
    path = tmp_path / "lists.parquet"
    rows = [[row % 5] * (row % 4) for row in range(300)]
    for options in WRITTEN:
        file = write_lists(path, rows, list_type(True, True, True), row_group_size=300, **options)
        whole = path.read_bytes()
        chunk = file.metadata.row_group(0).column(1)
        begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
        for _ in range(300):
            damaged = bytearray(whole)
            for place in random.integers(begin, begin + chunk.total_compressed_size, 2):
                damaged[place] = random.integers(256)
            path.write_bytes(damaged if random.integers(8) else damaged[: place + 1])
            (found,) = decoded(path, file)
            if found is not None:
                found.validate(full=True)
                assert len(found) == 300
                read = read_by_arrow(path)
                assert read is None or found.to_pylist() == read


# Weights of keys and of samples.


def weighted_table(rows: int) -> pa.Table:
    """Weights that say which key, and which sample, they are of."""
    random = np.random.default_rng(5)
    words = [random.integers(1, 40, random.integers(0, 4)).tolist() for _ in range(rows)]
    return pa.table(
        {
            "label": [row % 2 for row in range(rows)],
            "row": list(range(rows)),
            "words": pa.array(words, pa.list_(pa.int64())),
            "tf": pa.array([[key / 8 for key in of] for of in words], pa.list_(pa.float32())),
            "importance": [row / 4 for row in range(rows)],
        }
    )


WEIGHTS = ParquetConfig(weights={"words": "tf"}, sample_weight="importance")


@pytest.mark.parametrize("most_in_turn", [131_072, 0])
@pytest.mark.parametrize("options", [{"shards": 3}, {"shuffle": False}, {"max_broken": 3}])
def test_weights_stay_with_their_keys_and_samples(tmp_path, monkeypatch, options, most_in_turn):
    monkeypatch.setattr(parquet, "MOST_IN_TURN", most_in_turn)
    pq.write_table(weighted_table(70), tmp_path / "a.parquet", row_group_size=20)
    config = DataConfig(
        kind="parquet", path=str(tmp_path), shuffle_window=24, parquet=WEIGHTS, **options
    )
    source = open_source(config)
    by_ranks = [read(source, rank=rank, ranks=3) for rank in range(3)]
    for batch in flat(by_ranks):
        assert set(batch.sparse) == {"row", "words", "tf"}
        assert batch.sparse["tf"].values.dtype == torch.float32
        keys = batch.sparse["words"].to_lists()
        assert batch.sparse["tf"].to_lists() == [[key / 8 for key in of] for of in keys]
        assert torch.equal(batch.dense["weight"] * 4, batch.sparse["row"].values.float())
        assert "features" not in batch.dense
    native = [as_rows(batch) for batch in read(source)]
    assert sorted(row for of in native for row, *_ in of) == [[row] for row in range(70)]
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert [as_rows(batch) for batch in read(source)] == native


def as_rows(batch: Batch) -> list:
    lists = [batch.sparse[name].to_lists() for name in ("row", "words", "tf")]
    return list(zip(*lists, batch.dense["weight"].tolist(), strict=True))


def test_samples_weights_do_without_weights_of_keys(tmp_path):
    """Columns that are decoded one by one; weights of sequences are refused."""
    pq.write_table(weighted_table(30).drop(["tf"]), tmp_path / "a.parquet", row_group_size=20)
    config = DataConfig(
        kind="parquet", path=str(tmp_path), parquet=ParquetConfig(sample_weight="importance")
    )
    for batch in read(open_source(config)):
        assert torch.equal(batch.dense["weight"] * 4, batch.sparse["row"].values.float())
    named = replace(config, parquet=replace(config.parquet, history="words"))
    with pytest.raises(ConfigError, match="so rows are sequences; leave out sparse, dense, labels"):
        open_source(named)
