"""A log that grows: every sample is trained once, in order, wherever a run is cut."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.batch import Batch
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import (
    DataConfig,
    LogRange,
    Polled,
    StreamConfig,
    StreamingSource,
    logs,
    open_source,
)
from nestpipe.data.parquet import ColumnLayout
from nestpipe.data.streaming import choose_ranges, cut, share_in_turn, share_out
from nestpipe.data.text import Broken
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.serve.engine.score_model import open_model
from nestpipe.train import JobConfig, job, loop, make_job, train_job
from nestpipe.train.job import prepare
from nestpipe.train.verify import verify_job
from support.thread_ranks import run_ranks

AT_ONCE = StreamConfig(idle_s=0.0, block=3)


class MemoryLog:
    """Partitions in memory; each look at them finds so many samples more."""

    layout = ColumnLayout(("item",), frozenset({"item"}), (), ())

    def __init__(self, sizes: list[int], *, in_turn: bool, grows: int = 0) -> None:
        self.sizes, self.in_turn, self.grows = sizes, in_turn, grows
        self.ends = [0] * len(sizes) if grows else sizes
        self.num_read = 0

    def poll(self, offsets):
        more = zip(self.ends, self.sizes, strict=True)
        self.ends = [min(end + self.grows, size) for end, size in more]
        ready = [
            LogRange(str(p), offsets.get(str(p), 0), end)
            for p, end in enumerate(self.ends)
            if end > offsets.get(str(p), 0)
        ]
        return Polled(tuple(ready))

    def read(self, part: LogRange, broken: Broken) -> Batch:
        self.num_read += part.size
        first = int(part.partition) * 1000
        keys = torch.arange(first + part.begin, first + part.end)
        return Batch(part.size, {}, {"item": Jagged.one_each(keys)})


def pieces(source: StreamingSource, cursor, batch: int, ranks: int, make=None) -> list[list[int]]:
    """Decide on so many thread ranks; each batch as its samples, in the order of ranks."""
    make = make or (lambda: StreamingSource(source.log, AT_ONCE))

    def be(comm):
        mine = source if comm.rank == 0 else make()
        mine.decide(cursor, rank=comm.rank, global_batch=batch, gather=comm.all_gather_values)
        dealt = mine.batches(global_batch=batch, rank=comm.rank, ranks=ranks, seed=3)
        return [b.sparse["item"].values.tolist() for b in dealt], mine.cursor_after(99)

    of_ranks = run_ranks(ranks, be) if ranks > 1 else [be(LocalCommunicator())]
    assert all(cursor == of_ranks[0][1] for _, cursor in of_ranks)
    return [list(chain(*parts)) for parts in zip(*(of for of, _ in of_ranks), strict=True)]


def follow(
    log: MemoryLog,
    batch: int,
    cuts: list[int],
    ranks: list[int],
    stream: StreamConfig = AT_ONCE,
    shards: int = 0,
) -> list[list[int]]:
    """Train with restarts: after so many batches of a block, on another number of ranks."""
    seen: list[list[int]] = []
    cursor: dict[str, int] = {}
    for turn in range(1000):
        source = StreamingSource(log, stream, shards=shards)
        decided = pieces(
            source,
            cursor,
            batch,
            ranks[turn % len(ranks)],
            lambda: StreamingSource(log, stream, shards=shards),
        )
        if not decided and log.ends == log.sizes:
            return seen
        trained = min(cuts[turn % len(cuts)], len(decided))
        seen += decided[:trained]
        cursor = json.loads(json.dumps(source.cursor_after(trained)))
    raise AssertionError("it does not end")


LOGS = st.lists(st.integers(0, 30), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(LOGS, st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_a_log_that_is_there_gives_the_same_batches_wherever_it_is_cut(sizes, batch, cuts, in_turn):
    whole = follow(MemoryLog(sizes, in_turn=in_turn), batch, [3], [1])
    assert len(whole) == sum(sizes) // batch
    for ranks in ([1], [2], [4, 1, 2]):
        assert follow(MemoryLog(sizes, in_turn=in_turn), batch, cuts, ranks) == whole


@settings(deadline=None, max_examples=40)
@given(
    LOGS, st.integers(1, 9), st.integers(1, 5), st.lists(st.integers(0, 3), min_size=2, max_size=4)
)
def test_a_log_that_grows_loses_nothing_and_gives_nothing_twice(sizes, batch, grows, cuts):
    cuts = [*cuts, 1]  # else nothing would ever be trained
    seen = follow(MemoryLog(sizes, in_turn=False, grows=grows), batch, cuts, [1, 2, 4])
    assert all(len(of_batch) == batch for of_batch in seen)
    for partition in range(len(sizes)):
        mine = [item for item in chain(*seen) if item // 1000 == partition]
        assert mine == list(range(partition * 1000, partition * 1000 + len(mine)))
    assert sum(sizes) - sum(map(len, seen)) < batch  # what is left waits for more


# Windows of a log that are shuffled.


def windows_of(window: int) -> StreamConfig:
    return replace(AT_ONCE, shuffle_window=window)


def whole_log(sizes: list[int]) -> list[int]:
    return [1000 * p + n for p, size in enumerate(sizes) for n in range(size)]


@settings(deadline=None, max_examples=60)
@given(
    LOGS,
    st.integers(1, 9),
    st.integers(1, 25),
    st.integers(1, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.booleans(),
)
def test_shuffled_windows_are_the_same_wherever_a_run_is_cut(
    sizes, batch, window, shards, cuts, in_turn
):
    def run(cuts, ranks):
        log = MemoryLog(sizes, in_turn=in_turn)
        return follow(log, batch, cuts, ranks, windows_of(window), shards)

    whole = run([3], [1])
    ready = sum(sizes) // window * window
    assert len(whole) == ready // batch  # only whole windows, and of those whole batches
    for ranks in ([1], [2], [4, 1, 2]):
        assert run(cuts, ranks) == whole
    seen = list(chain(*whole))
    if in_turn:  # each window has the log's next samples
        for begin in range(0, len(seen) - window + 1, window):
            wanted = whole_log(sizes)[begin : begin + window]
            assert sorted(seen[begin : begin + window]) == wanted
    assert len(set(seen)) == len(seen)


@settings(deadline=None, max_examples=30)
@given(LOGS, st.integers(1, 9), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_a_shuffled_log_that_grows_loses_nothing_and_gives_nothing_twice(
    sizes, batch, window, grows, in_turn
):
    log = MemoryLog(sizes, in_turn=in_turn, grows=grows)
    seen = list(chain(*follow(log, batch, [0, 2, 1], [1, 2, 4], windows_of(window), 2)))
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(whole_log(sizes))
    assert sum(sizes) - len(seen) < window + batch


def test_a_window_is_in_another_order_for_each_seed_and_place():
    def order(seed: int, sizes: list[int]) -> list[int]:
        source = StreamingSource(MemoryLog(sizes, in_turn=True), windows_of(50), shards=1)
        gather = LocalCommunicator().all_gather_values
        source.decide({}, rank=0, global_batch=50, gather=gather)
        dealt = source.batches(global_batch=50, rank=0, ranks=1, seed=seed)
        return [item % 50 for batch in dealt for item in batch.sparse["item"].values.tolist()]

    first, second = np.array(order(0, [100])).reshape(2, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, np.arange(50))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, order(1, [50]))
    assert np.array_equal(first, order(0, [50]))


def test_a_window_that_was_begun_keeps_its_order_under_other_settings():
    """Another seed, window and number of shards count from the next window on."""
    log = MemoryLog([40], in_turn=True)
    whole = follow(log, 5, [9], [1], windows_of(20), 4)
    options = {"rank": 0, "gather": LocalCommunicator().all_gather_values}
    source = StreamingSource(log, windows_of(20), shards=4)
    source.decide({}, global_batch=5, **options)
    list(source.batches(global_batch=5, rank=0, ranks=1, seed=3))
    cursor = source.cursor_after(1)
    other = StreamingSource(log, windows_of(10), shards=1)
    other.decide(cursor, global_batch=5, **options)
    seen = [
        b.sparse["item"].values.tolist()
        for b in other.batches(global_batch=5, rank=0, ranks=1, seed=77)
    ]
    assert seen == whole[1:4]
    assert other.cursor_after(3) == {"0": 20}
    plain = StreamingSource(log, AT_ONCE)  # and a batch of both where nothing is shuffled any more
    plain.decide(cursor, global_batch=9, **options)
    dealt = plain.batches(global_batch=9, rank=0, ranks=1)
    seen = [item for b in dealt for item in b.sparse["item"].values.tolist()]
    assert sorted(seen[:15]) == sorted(chain(*whole[1:4]))
    assert seen[15:] == list(range(20, 32))
    assert plain.cursor_after(3) == {"0": 32}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_only_its_shards_of_a_window(ranks):
    log = MemoryLog([160], in_turn=True)
    source = StreamingSource(log, windows_of(80), shards=4)
    gather = LocalCommunicator().all_gather_values
    while (
        source.decide(source.cursor_after(99), rank=0, global_batch=8, gather=gather) == "decided"
    ):  # blocks of three batches: a shard is not read again in the next
        list(source.batches(global_batch=8, rank=ranks - 1, ranks=ranks))
    assert log.num_read == 160 // ranks


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_partitions_share_as_evenly_as_they_can(sizes, wanted):
    wanted = min(wanted, sum(sizes))
    shares = share_out(sizes, wanted)
    assert sum(shares) == wanted == sum(share_in_turn(sizes, wanted))
    for share, size in zip(shares, sizes, strict=True):
        assert share <= size
        assert share == size or share >= max(shares) - 1


def test_ranges_are_cut_where_ranks_meet():
    ranges = [LogRange("a", 5, 8), LogRange("b", 0, 4)]
    assert list(cut(ranges, 2, 5)) == [LogRange("a", 7, 8), LogRange("b", 0, 2)]
    assert list(cut(ranges, 7, 7)) == []
    assert choose_ranges(ranges, 8, 9, in_turn=True) == []


def test_whoever_wants_to_stop_ends_the_waiting_of_all():
    def be(comm):
        source = StreamingSource(MemoryLog([3], in_turn=True), StreamConfig(poll_s=0.001))
        return source.decide(
            {},
            rank=comm.rank,
            global_batch=4,
            gather=comm.all_gather_values,
            stop_wanted=lambda: comm.rank == 1,
        )

    assert run_ranks(2, be) == ["stopped", "stopped"]


def test_what_rank_0_is_refused_all_ranks_say():
    class LostLog(MemoryLog):
        def poll(self, offsets):
            raise DataError("the log is lost; find it")

    def be(comm):
        source = StreamingSource(LostLog([3], in_turn=True), AT_ONCE)
        with pytest.raises(DataError, match="the log is lost; find it"):
            source.decide({}, rank=comm.rank, global_batch=4, gather=comm.all_gather_values)
        return True

    assert run_ranks(2, be) == [True, True]


# A folder of files.


def add_file(folder: Path, name: str, first: int, rows: int = 40, group: int = 16) -> Path:
    """A file appears as a whole, under its name."""
    folder.mkdir(exist_ok=True)
    numbers = np.arange(first, first + rows)
    columns = {
        "label": (numbers % 3 == 0).astype(np.float32),
        "user": numbers % 7,
        "items": [[int(n) % 5, int(n) % 11] for n in numbers],
        "age": (numbers / 100).astype(np.float32),
    }
    hidden = folder / f".{name}"
    pq.write_table(pa.table(columns), hidden, row_group_size=group)
    return hidden.rename(folder / name)


def job_config(folder: Path, **sections) -> JobConfig:
    stream = {"idle_s": 0.0, "poll_s": 0.001, "block": 2, **sections.pop("stream", {})}
    run = {"batch": 12, "device": "cpu", "threads": 1, **sections.pop("run", {})}
    data = {"kind": "stream", "path": str(folder), "stream": stream, **sections.pop("data", {})}
    return build(
        JobConfig,
        {"data": data, "run": run, "model": {"dim": 4, "bottom": [4], "top": [4]}, **sections},
    )


def trained(config: JobConfig, *, ranks: int = 1, resume: str | None = None, on_step=None):
    """Losses of each step, and the job's dense weights and progress at the end."""

    def be(comm):
        job = prepare(config, comm, resume)
        seen: list[float] = []

        def tell(report):
            seen.append(report.loss)
            if on_step is not None:
                on_step(report)

        train_job(job, tell)
        weights = [p.detach().clone() for p in job.trainer.model.parameters()]
        return seen, weights, job.trainer.progress

    return run_ranks(ranks, be)[0] if ranks > 1 else be(LocalCommunicator())


def same(one, two) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.fixture
def first_weights(monkeypatch):
    """The same weights in every run: ranks that are threads draw from one generator in turns."""
    make = job.make_model

    def made(config, source):
        model, tables = make(config, source)
        rng = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) / 10)
        return model, tables

    monkeypatch.setattr(job, "make_model", made)


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cut_at", [1, 4, 7])
def test_a_run_goes_on_after_its_last_sample_bit_for_bit(tmp_path, ranks, cut_at):
    for n in range(3):
        add_file(tmp_path / "in", f"{n}.parquet", 40 * n)
    whole, weights, progress = trained(job_config(tmp_path / "in"), ranks=ranks)
    assert (progress.step, progress.epoch) == (10, 0)
    assert sum(progress.cursor.values()) == 120
    folder = str(tmp_path / "run")
    first, *_ = trained(
        job_config(tmp_path / "in", run={"checkpoint": folder, "steps": cut_at}), ranks=ranks
    )
    config = job_config(tmp_path / "in", run={"checkpoint": folder, "checkpoint_every": 2})
    rest, again, end = trained(config, ranks=ranks, resume="auto")
    assert first + rest == whole
    assert same(weights, again)
    assert end.cursor == progress.cursor


def test_other_ranks_go_on_from_the_same_sample(tmp_path):
    for n in range(3):
        add_file(tmp_path / "in", f"{n}.parquet", 40 * n)
    folder = str(tmp_path / "run")
    trained(job_config(tmp_path / "in", run={"checkpoint": folder, "steps": 3}), ranks=2)
    config = job_config(tmp_path / "in", run={"checkpoint": folder})
    _, _, progress = trained(config, ranks=4, resume="auto")
    assert progress.step == 10
    assert list(progress.cursor.values()) == [40, 40, 40]


def test_files_that_come_while_it_runs_are_trained_as_if_they_had_been_there(tmp_path):
    for n in range(3):
        add_file(tmp_path / "all", f"{n}.parquet", 40 * n)
    whole, weights, _ = trained(job_config(tmp_path / "all"))
    add_file(tmp_path / "in", "0.parquet", 0)

    def come(report):
        if report.step in (2, 5):
            n = report.step // 2
            add_file(tmp_path / "in", f"{n}.parquet", 40 * n)

    seen, again, _ = trained(job_config(tmp_path / "in"), on_step=come)
    assert seen == whole
    assert same(weights, again)


def test_files_that_were_read_may_be_deleted(tmp_path):
    for n in range(3):
        add_file(tmp_path / "in", f"{n}.parquet", 40 * n)
    folder = str(tmp_path / "run")
    trained(job_config(tmp_path / "in", run={"checkpoint": folder}))
    for n in range(3):
        (tmp_path / "in" / f"{n}.parquet").unlink()
    add_file(tmp_path / "in", "3.parquet", 120)
    config = job_config(tmp_path / "in", run={"checkpoint": folder})
    seen, _, progress = trained(config, resume="auto")
    assert len(seen) == 3
    assert [name.split("@")[0] for name in progress.cursor] == ["3.parquet"]
    # The latest one stays, gone or not, so that a late file is noticed.
    (tmp_path / "in" / "3.parquet").unlink()
    add_file(tmp_path / "in", "25.parquet", 0)
    refused(config, r"25.parquet came after 3.parquet was read")


def refused(config: JobConfig, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        trained(config, resume="auto")


def test_a_log_that_has_changed_is_refused_in_a_sentence(tmp_path):
    folder = tmp_path / "in"
    for n in (1, 2):
        add_file(folder, f"{n}.parquet", 40 * n)
    run = str(tmp_path / "run")
    trained(job_config(folder, run={"checkpoint": run, "steps": 5}))
    config = job_config(folder, run={"checkpoint": run})
    add_file(folder, "2.parquet", 500)
    refused(config, r"2.parquet is not the file that was read before; put it back")
    (folder / "2.parquet").unlink()
    refused(config, r"2.parquet is gone, and 20 of its 40 rows were not trained; put it back")
    add_file(folder, "2.parquet", 80)
    late = add_file(folder, "15.parquet", 0)
    refused(config, r"15.parquet came after 2.parquet was read, which its name is before")
    late.unlink()
    assert len(trained(config, resume="auto")[0]) == 1


def test_files_without_rows_and_folders_named_like_files_are_passed_over(tmp_path):
    """A file without rows is in no cursor, and has not come late for that."""
    folder = tmp_path / "in"
    (folder / "0.parquet").mkdir(parents=True)
    pq.write_table(pa.table({"user": pa.nulls(0)}), folder / "1.parquet")
    add_file(folder, "2.parquet", 0)
    run = {"checkpoint": str(tmp_path / "run")}
    assert len(trained(job_config(folder, run=run))[0]) == 3
    add_file(folder, "3.parquet", 40)
    assert len(trained(job_config(folder, run=run), resume="auto")[0]) == 3


def test_a_run_that_met_a_broken_row_goes_on_with_more_allowed(tmp_path):
    """The sentence about the row says to set it, so going on must not refuse it."""
    folder, run = tmp_path / "in", {"checkpoint": str(tmp_path / "run")}
    add_file(folder, "0.parquet", 0)
    assert len(trained(job_config(folder, run=run))[0]) == 3
    table = pq.read_table(add_file(tmp_path / "other", "1.parquet", 40))
    labels = [None, *table["label"].to_pylist()[1:]]
    broken = table.set_column(table.column_names.index("label"), "label", pa.array(labels))
    pq.write_table(broken, folder / "1.parquet")
    with pytest.raises(DataError, match=r"is broken: label .* with data.max_broken"):
        trained(job_config(folder, run=run), resume="auto")
    more = job_config(folder, run=run, data={"max_broken": 5})
    assert len(trained(more, resume="auto")[0]) == 3


def test_held_out_files_have_the_columns_of_the_log_in_its_order(tmp_path):
    folder, held = tmp_path / "in", tmp_path / "held.parquet"
    add_file(folder, "0.parquet", 0)
    table = pq.read_table(add_file(tmp_path / "other", "0.parquet", 40))
    pq.write_table(table.select(table.column_names[::-1]), held)
    config = job_config(folder, data={"test_path": str(held)}).data
    assert open_source(config, "test").columns == open_source(config).columns


def test_a_cursor_of_another_log_is_refused(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0)
    source = open_source(DataConfig(kind="stream", path=str(tmp_path / "in"), stream=AT_ONCE))
    assert isinstance(source, StreamingSource)
    gather = LocalCommunicator().all_gather_values
    with pytest.raises(DataError, match=r"stands in 'clicks/0', which is no file of a folder"):
        source.decide({"clicks/0": 40}, rank=0, global_batch=12, gather=gather)


def test_mistakes_of_a_folder_are_said_before_training(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match=r"there is no folder .* to follow"):
        make_job(job_config(tmp_path / "nothing"), LocalCommunicator())
    with pytest.raises(DataError, match=r"there are no Parquet files in .* yet; add one, or name"):
        make_job(job_config(tmp_path / "in"), LocalCommunicator())
    pq.write_table(pa.table({"history": [[1, 2]]}), tmp_path / "in/0.parquet")
    with pytest.raises(
        ConfigError, match="num_items is 0; say how many items there are, keys from"
    ):
        make_job(job_config(tmp_path / "in"), LocalCommunicator())
    with pytest.raises(ConfigError, match="cannot be followed; give a folder, or kafka://"):
        make_job(job_config(tmp_path / "in", data={"path": "s3://a/b"}), LocalCommunicator())
    with pytest.raises(ConfigError, match="test_every is not for a stream"):
        job_config(tmp_path / "in", data={"test_every": 5})
    with pytest.raises(ConfigError, match=r"shuffle is false and stream.shuffle_window 40; leave"):
        job_config(tmp_path / "in", data={"shuffle": False}, stream={"shuffle_window": 40})
    with pytest.raises(ConfigError, match=r"stream.shuffle_window is -1; give 0 or a number above"):
        job_config(tmp_path / "in", stream={"shuffle_window": -1})
    with pytest.raises(ConfigError, match=r"options has sasl.password itself"):
        StreamConfig(options={"sasl.password": "secret"})
    with pytest.raises(ConfigError, match="rows_per_message is 4 and format 'json'"):
        StreamConfig(rows_per_message=4)


def test_a_file_that_a_rank_sees_late_is_waited_for(tmp_path, monkeypatch):
    file = add_file(tmp_path / "in", "0.parquet", 0)
    config = DataConfig(kind="stream", path=str(tmp_path / "in"), stream=AT_ONCE)
    source = open_source(config)
    assert isinstance(source, StreamingSource)
    gather = LocalCommunicator().all_gather_values
    source.decide({}, rank=0, global_batch=40, gather=gather)
    hidden = file.rename(tmp_path / "in/.0.parquet")
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: hidden.rename(file))
    (batch,) = source.batches(global_batch=40, rank=0, ranks=1)
    assert batch.size == 40
    file.unlink()
    monkeypatch.setattr(logs, "LATE_S", 0.0)
    with pytest.raises(DataError, match=r"0.parquet is gone, and 40 of its 40 rows were not"):
        list(source.batches(global_batch=40, rank=0, ranks=1))


def test_another_schema_that_comes_later_is_refused(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0)
    pq.write_table(pa.table({"label": [1.0]}), tmp_path / "in/1.parquet")
    with pytest.raises(DataError, match=r"1.parquet has no column user, it has label"):
        trained(job_config(tmp_path / "in"))


def test_a_batch_of_broken_rows_alone_is_passed_over(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0, rows=12)
    bad = pq.read_table(add_file(tmp_path / "bad", "1.parquet", 12, rows=12))
    labels = pa.array([float("nan")] * 12, pa.float32())
    pq.write_table(bad.set_column(0, "label", labels), tmp_path / "in/1.parquet")
    add_file(tmp_path / "in", "2.parquet", 24, rows=12)
    seen, _, progress = trained(job_config(tmp_path / "in", data={"max_broken": 12}))
    assert len(seen) == 2
    assert list(progress.cursor.values()) == [12, 12, 12]
    with pytest.raises(DataError, match=r"row 1 of .*1.parquet is broken: label is no number"):
        trained(job_config(tmp_path / "in"))


def test_it_saves_and_waits_on_where_that_is_wanted(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0)
    run = tmp_path / "run"
    config = job_config(tmp_path / "in", run={"checkpoint": str(run)}, stream={"on_idle": "save"})
    job = make_job(config, LocalCommunicator())
    asked = 0

    def stop_wanted() -> bool:
        nonlocal asked
        asked += 1
        saved = sorted(path.name for path in run.glob("step-*"))
        if saved == ["step-00000003"] and not (tmp_path / "in/1.parquet").exists():
            add_file(tmp_path / "in", "1.parquet", 40)
        return saved == ["step-00000003", "step-00000006"]

    job.trainer.stop_wanted = stop_wanted
    found = loop.train_steps(job, lambda report: None)
    assert (found.steps, found.stopped) == (6, True)


def test_held_out_files_are_evaluated_when_the_stream_has_no_more(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0)
    held = add_file(tmp_path / "held", "0.parquet", 100)
    job = make_job(job_config(tmp_path / "in", data={"test_path": str(held)}), LocalCommunicator())
    found = train_job(job, lambda report: None)
    assert found.split == "test"
    assert found.metrics["samples"] == 40


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plan", ["nested", "dual_buffer"])
def test_every_plan_has_the_same_bits_on_what_the_log_has_now(tmp_path, plan, ranks):
    for n in range(2):
        add_file(tmp_path / "in", f"{n}.parquet", 40 * n)
    config = job_config(tmp_path / "in", pipeline={"plan": plan, "micro_batches": 2})

    def be(comm):
        return verify_job(config, comm)

    (verdict, *_) = run_ranks(ranks, be)
    assert verdict.identical
    assert verdict.steps == 6


def test_verify_does_not_call_a_run_without_steps_identical(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0)
    config = job_config(tmp_path / "in", run={"batch": 1000}, pipeline={"plan": "nested"})
    with pytest.raises(DataError, match=r"compared nothing.*smaller run\.batch"):
        verify_job(config, LocalCommunicator())


def test_verify_stops_where_the_log_ended_when_it_began(tmp_path):
    add_file(tmp_path / "in", "0.parquet", 0)
    config = DataConfig(kind="stream", path=str(tmp_path / "in"), stream=AT_ONCE)
    gather = LocalCommunicator().all_gather_values
    source = open_source(config)
    assert isinstance(source, StreamingSource)
    source.freeze(gather)
    add_file(tmp_path / "in", "1.parquet", 40)
    options = {"rank": 0, "global_batch": 40, "gather": gather}
    assert source.decide({}, **options) == "decided"
    assert source.num_decided == 1
    assert source.decide(source.cursor_after(1), **options) == "idle"
    free = open_source(replace(config))
    assert isinstance(free, StreamingSource)
    free.decide({}, **options)
    assert free.num_decided == 2


SHUFFLED = {"shuffle_window": 40, "block": 3}
"""Windows that no number of batches of 12 fills: some batches are of two windows."""


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cut_at", [1, 4, 8])
def test_a_shuffled_run_goes_on_in_the_midst_of_a_window_bit_for_bit(tmp_path, ranks, cut_at):
    for n in range(3):
        add_file(tmp_path / "in", f"{n}.parquet", 43 * n, rows=43)

    def config(**run):
        return job_config(tmp_path / "in", stream=SHUFFLED, data={"shards": 4}, run=run)

    whole, weights, progress = trained(config(), ranks=ranks)
    assert progress.step == 10  # of 129 samples three windows, and of those ten batches
    assert whole != trained(job_config(tmp_path / "in"), ranks=ranks)[0][:10]
    folder = str(tmp_path / "run")
    first, *_ = trained(config(checkpoint=folder, steps=cut_at), ranks=ranks)
    rest, again, end = trained(
        config(checkpoint=folder, checkpoint_every=2), ranks=ranks, resume="auto"
    )
    assert first + rest == whole
    assert same(weights, again)
    assert end.cursor == progress.cursor


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("plan", ["nested", "dual_buffer"])
def test_every_plan_has_the_same_bits_on_a_shuffled_log(tmp_path, plan):
    for n in range(2):
        add_file(tmp_path / "in", f"{n}.parquet", 40 * n)
    pipeline = {"plan": plan, "micro_batches": 2}
    config = job_config(tmp_path / "in", stream=SHUFFLED, pipeline=pipeline)
    (verdict, *_) = run_ranks(2, lambda comm: verify_job(config, comm))
    assert verdict.identical
    assert verdict.steps == 6


def folder_users(folder: Path, batch: int, cursor=None, ranks: int = 1, **settings):
    """The users of each batch, the cursor after one and after all, and what was broken."""
    stream = StreamConfig(idle_s=0.0, shuffle_window=40)
    config = DataConfig(kind="stream", path=str(folder), stream=stream, **{"shards": 4, **settings})

    def be(comm):
        source = open_source(config)
        assert isinstance(source, StreamingSource)
        options = {"rank": comm.rank, "global_batch": batch, "gather": comm.all_gather_values}
        source.decide(cursor or {}, **options)
        dealt = source.batches(global_batch=batch, rank=comm.rank, ranks=ranks)
        ages = [(of.dense["features"][:, 0] * 100).round().int().tolist() for of in dealt]
        return ages, source.cursor_after(1), source.cursor_after(99), source.broken.count

    found = run_ranks(ranks, be) if ranks > 1 else [be(LocalCommunicator())]
    dealt = zip(*(seen for seen, *_ in found), strict=True)
    return [list(chain(*parts)) for parts in dealt], *found[0][1:]


def test_files_of_a_window_that_is_trained_in_part_must_stay(tmp_path):
    for n in range(3):
        add_file(tmp_path, f"{n}.parquet", 20 * n, rows=20)
    whole, cursor, *_ = folder_users(tmp_path, 20)
    assert sorted(chain(*whole)) == list(range(40))
    assert folder_users(tmp_path, 20, cursor, ranks=2)[0] == whole[1:]
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(DataError, match=r"0.parquet is gone, and 20 of its 20 rows were not"):
        folder_users(tmp_path, 20, cursor)


@pytest.mark.parametrize("ranks", [2, 4])
def test_broken_rows_leave_the_end_of_their_shard_short(tmp_path, ranks):
    add_file(tmp_path, "0.parquet", 0)
    bad = pq.read_table(tmp_path / "0.parquet")
    labels = bad["label"].to_pylist()
    labels[3] = labels[17] = float("nan")
    pq.write_table(bad.set_column(0, "label", pa.array(labels)), tmp_path / "0.parquet")
    whole, _, end, broken = folder_users(tmp_path, 10, max_broken=2)
    assert sorted(chain(*whole)) == [n for n in range(40) if n not in (3, 17)]
    assert broken == 2
    assert folder_users(tmp_path, 10, ranks=ranks, max_broken=2)[0] == whole
    (offset,) = end.values()
    assert offset == 40


def test_samples_that_wait_for_a_window_are_told(tmp_path, caplog):
    add_file(tmp_path, "0.parquet", 0)
    config = job_config(tmp_path, stream={"shuffle_window": 50})
    assert trained(config)[0] == []
    (told,) = caplog.messages
    assert told.startswith("40 samples of the stream wait until there are 50, as data.stream.")
    caplog.clear()
    trained(job_config(tmp_path, stream={"shuffle_window": 35}))
    trained(job_config(tmp_path, run={"batch": 50}))
    assert not caplog.messages  # of fewer than a batch nobody needs to hear


# Sequences of users.


def add_users(folder: Path, name: str, first: int, rows: int = 24) -> Path:
    """Each row is what a user chose so far, with times that need sorting."""
    folder.mkdir(exist_ok=True)
    lengths = [2 + n % 5 for n in range(first, first + rows)]
    items = [[(7 * n + i) % 50 + 1 for i in range(size)] for n, size in enumerate(lengths, first)]
    times = [[1000 - i for i in range(size)] for size in lengths]
    hidden = folder / f".{name}"
    pq.write_table(pa.table({"history": items, "timestamps": times}), hidden, row_group_size=9)
    return hidden.rename(folder / name)


def sequence_config(folder: Path, kind: str, **sections) -> JobConfig:
    model = {"kind": kind, "num_items": 50, "dim": 8, "attention_dim": 4, "blocks": 1}
    return job_config(folder, model=model | {"negatives": 4}, **sections)


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("kind", ["hstu", "ranker"])
@pytest.mark.parametrize("window", [0, 36])
def test_sequences_of_a_stream_train_and_go_on_bit_for_bit(tmp_path, kind, window):
    """Also what is drawn for a sequence is the same: names follow from partition and offset."""
    for n in range(3):
        add_users(tmp_path / "in", f"{n}.parquet", 24 * n)

    def config(**run):
        stream = {"shuffle_window": window}
        return sequence_config(tmp_path / "in", kind, stream=stream, run=run)

    whole, weights, progress = trained(config())
    assert progress.step == 6
    folder = str(tmp_path / "run")
    first, *_ = trained(config(checkpoint=folder, steps=2))
    rest, again, _ = trained(config(checkpoint=folder), resume="auto")
    assert first + rest == whole
    assert same(weights, again)
    halves, *_ = trained(config(), ranks=2)
    assert halves == pytest.approx(whole, rel=1e-5)


def test_a_sequence_of_a_stream_is_whole_in_order_and_named(tmp_path):
    add_users(tmp_path, "0.parquet", 0, rows=12)
    add_users(tmp_path, "1.parquet", 12, rows=12)
    source = open_source(DataConfig(kind="stream", path=str(tmp_path), stream=AT_ONCE))
    assert isinstance(source, StreamingSource)
    gather = LocalCommunicator().all_gather_values
    source.decide({}, rank=0, global_batch=24, gather=gather)
    (batch,) = source.batches(global_batch=24, rank=0, ranks=1)
    assert batch.sparse["history"].to_lists()[3] == [26, 25, 24, 23, 22]
    assert batch.sparse["timestamps"].to_lists()[0] == [999, 1000]
    assert len(set(batch.dense["sample_id"].tolist())) == 24
    assert set(source.empty().dense) == set(batch.dense)


def test_held_out_sequences_are_evaluated_when_the_stream_has_no_more(tmp_path):
    add_users(tmp_path / "in", "0.parquet", 0)
    held = add_users(tmp_path / "held", "0.parquet", 100)
    config = sequence_config(tmp_path / "in", "hstu", data={"test_path": str(held)})
    found = train_job(make_job(config, LocalCommunicator()), lambda report: None)
    assert found.split == "test"
    assert found.metrics["samples"] == 24
    assert not any(name.startswith("baseline") for name in found.metrics)


# Weights of keys and of samples.


def weighted_config(folder: Path, **sections) -> JobConfig:
    columns = {
        "sparse": ["user", "items"],
        "weights": {"items": "tf"},
        "sample_weight": "age",
        "labels": ["label"],
    }
    data = {"parquet": columns, **sections.pop("data", {})}
    model = {"dim": 4, "bottom": [4], "top": [4]}
    return job_config(folder, data=data, model=model, **sections)


def add_weighted(folder: Path, name: str, first: int) -> None:
    table = pq.read_table(add_file(folder.parent / "plain", name, first))
    tf = [[key / 4 for key in keys] for keys in table["items"].to_pylist()]
    folder.mkdir(exist_ok=True)
    pq.write_table(table.append_column("tf", pa.array(tf)), folder / name, row_group_size=16)


@pytest.mark.usefixtures("first_weights")
@pytest.mark.parametrize("window", [0, 40])
def test_weights_of_a_stream_train_under_every_plan_and_go_on_bit_for_bit(tmp_path, window):
    for n in range(2):
        add_weighted(tmp_path / "in", f"{n}.parquet", 40 * n)

    def config(**run):
        return weighted_config(tmp_path / "in", stream={"shuffle_window": window}, run=run)

    source = make_job(config(), LocalCommunicator()).train
    assert isinstance(source, StreamingSource)
    source.decide({}, rank=0, global_batch=12, gather=LocalCommunicator().all_gather_values)
    for batch in source.batches(global_batch=12, rank=0, ranks=1):
        keys = batch.sparse["items"].to_lists()
        assert batch.sparse["tf"].to_lists() == [[key / 4 for key in of] for of in keys]
    whole, weights, _ = trained(config())
    folder = str(tmp_path / "run")
    first, *_ = trained(config(checkpoint=folder, steps=3), ranks=2)
    rest, again, _ = trained(config(checkpoint=folder), resume="auto", ranks=2)
    assert first + rest == pytest.approx(whole, rel=1e-5)
    for one, other in zip(weights, again, strict=True):
        torch.testing.assert_close(one, other)
    pipelined = replace(config(), pipeline=replace(config().pipeline, plan="nested"))
    (verdict, *_) = run_ranks(2, lambda comm: verify_job(pipelined, comm))
    assert verdict.identical
    assert verdict.steps == 6
    with pytest.raises(ConfigError, match="model whose keys have weights, which requests cannot"):
        open_model(Path(folder), "cpu")
