"""A Kafka topic as a log, read from a cluster inside the client that speaks the real protocol."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from nestpipe.cli.app import app
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import DataConfig, StreamConfig, StreamingSource, open_source
from nestpipe.data.logs import KafkaTopic, from_environment
from nestpipe.errors import ConfigError, DataError
from nestpipe.train import JobConfig, train_job
from nestpipe.train.job import prepare
from support.thread_ranks import run_ranks

confluent_kafka = pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed; pip install 'nestpipe[kafka]'"
)
SCHEMA = pa.schema(
    [
        ("label", pa.float32()),
        ("user", pa.int64()),
        ("items", pa.list_(pa.string())),
        ("age", pa.float32()),
    ]
)


class Cluster:
    """One broker in this process, and a producer for its topics."""

    def __init__(self) -> None:
        self.producer = confluent_kafka.Producer(
            {"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0}
        )
        (broker,) = self.producer.list_topics(timeout=30).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def send(self, values, *, topic: str, partition: int = 0) -> None:
        for value in values:
            self.producer.produce(topic, value=value, partition=partition)
        assert self.producer.flush(30) == 0


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def topic(request) -> str:
    """A topic of the test's own."""
    return request.node.name.translate(str.maketrans("[]", "--"))


@pytest.fixture
def schema(tmp_path) -> Path:
    pq.write_table(SCHEMA.empty_table(), tmp_path / "schema.parquet")
    return tmp_path / "schema.parquet"


def row(n: int) -> dict:
    return {
        "label": float(n % 3 == 0),
        "user": n,
        "items": [f"item {n % 5}", f"item {n % 7}"],
        "age": n / 100,
    }


def as_json(numbers) -> list[bytes]:
    return [json.dumps(row(n)).encode() for n in numbers]


def as_arrow(numbers) -> bytes:
    table = pa.Table.from_pylist([row(n) for n in numbers], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def data(cluster: Cluster, topic: str, schema: Path | None, *, max_broken: int = 0, **stream):
    stream = {"schema": str(schema or ""), "idle_s": 0.0, "timeout_s": 20.0, **stream}
    path = f"kafka://{cluster.address}/{topic}"
    return DataConfig(
        kind="stream", path=path, stream=StreamConfig(**stream), max_broken=max_broken
    )


def opened(config: DataConfig) -> StreamingSource:
    source = open_source(config)
    assert isinstance(source, StreamingSource)
    return source


def users(config: DataConfig, batch: int, cursor=None, ranks: int = 1, most: int | None = None):
    """The users of each batch that is there, and the cursor after them."""

    def be(comm):
        source = opened(config)
        gather = comm.all_gather_values
        source.decide(cursor or {}, rank=comm.rank, global_batch=batch, gather=gather, most=most)
        dealt = source.batches(global_batch=batch, rank=comm.rank, ranks=ranks)
        seen = [part.sparse["user"].values.tolist() for part in dealt]
        return seen, source.cursor_after(len(seen))

    found = run_ranks(ranks, be) if ranks > 1 else [be(LocalCommunicator())]
    batches = zip(*(seen for seen, _ in found), strict=True)
    return [list(chain(*parts)) for parts in batches], found[0][1]


def test_partitions_are_read_together_and_on_from_the_cursor(cluster, topic, schema):
    for partition in range(2):
        numbers = range(100 * partition, 100 * partition + 20)
        cluster.send(as_json(numbers), partition=partition, topic=topic)
    config = data(cluster, topic, schema)
    first, cursor = users(config, 8, most=2)
    assert first[0] == [0, 1, 2, 3, 100, 101, 102, 103]
    assert {name: cursor[name] for name in sorted(cursor)} == {
        f"{topic}/{partition}": (8 if partition < 2 else 0) for partition in range(4)
    }
    whole, end = users(config, 8)
    for ranks in (1, 2, 4):
        rest, at = users(config, 8, cursor, ranks)
        assert (first + rest, at) == (whole, end)
    cluster.send(as_json(range(20, 40)), topic=topic)
    more, _ = users(config, 8, end)
    assert list(chain(*more)) == [*range(20, 36)]


def test_json_and_arrow_messages_give_the_batch_that_parquet_gives(
    cluster, topic, schema, tmp_path
):
    cluster.send(as_json(range(12)), topic=topic)
    cluster.send([as_arrow(range(n, n + 3)) for n in range(0, 12, 3)], topic=f"{topic}-arrow")
    table = pa.Table.from_pylist([row(n) for n in range(12)], schema=SCHEMA)
    pq.write_table(table, tmp_path / "all.parquet")
    plain = DataConfig(kind="parquet", path=str(tmp_path / "all.parquet"), shuffle=False)
    (wanted,) = open_source(plain).batches(global_batch=12, rank=0, ranks=1, seed=0)
    of_arrow = data(cluster, f"{topic}-arrow", schema, format="arrow", rows_per_message=3)
    for config in (data(cluster, topic, schema), of_arrow):
        source = opened(config)
        gather = LocalCommunicator().all_gather_values
        source.decide({}, rank=0, global_batch=12, gather=gather)
        (found,) = source.batches(global_batch=12, rank=0, ranks=1)
        for name, dense in wanted.dense.items():
            assert torch.equal(found.dense[name], dense)
        for name, keys in wanted.sparse.items():
            assert torch.equal(found.sparse[name].values, keys.values)
            assert torch.equal(found.sparse[name].lengths, keys.lengths)


def test_batches_may_end_inside_a_message(cluster, topic, schema):
    cluster.send([as_arrow(range(n, n + 5)) for n in range(0, 30, 5)], topic=topic)
    config = data(cluster, topic, schema, format="arrow", rows_per_message=5)
    first, cursor = users(config, 7, most=1, ranks=2)
    assert (first, cursor[f"{topic}/0"]) == ([[*range(7)]], 7)
    rest, _ = users(config, 7, cursor, ranks=4)
    assert list(chain(*first, *rest)) == [*range(28)]


def test_broken_messages_are_refused_or_skipped_by_name(cluster, topic, schema):
    values = as_json(range(8))
    values[2], values[5] = b'{"user": [}', json.dumps({**row(5), "user": "five"}).encode()
    cluster.send(values, topic=topic)
    with pytest.raises(DataError, match=f"message 2 of {topic}/0 is broken: it does not fit"):
        users(data(cluster, topic, schema), 8)
    found, cursor = users(data(cluster, topic, schema, max_broken=2), 8)
    assert (found, cursor[f"{topic}/0"]) == ([[0, 1, 3, 4, 6, 7]], 8)
    with pytest.raises(DataError, match=r"there are more broken rows than data.max_broken = 1"):
        users(data(cluster, topic, schema, max_broken=1), 8)


@pytest.mark.parametrize(
    ("first", "second", "broken"),
    [
        (b'{"user": 1}{"user": 2}', b"", 0),  # two objects in two messages
        (b'{"user": 1}{"user": 2', b"}", 0),
        (b'{"user": 1}', b'{"items": ["\xff"]}', 1),
        (b'{"user": 1}', b"[1]", 1),
    ],
    ids=["two-in-one", "cut-in-two", "no-text", "no-object"],
)
def test_messages_are_one_json_object_each(cluster, topic, schema, first, second, broken):
    cluster.send([first, second], topic=topic)
    with pytest.raises(DataError, match=f"message {broken} of {topic}/0 is broken: it "):
        users(data(cluster, topic, schema), 2)


def test_a_damaged_arrow_message_is_broken(cluster, topic, schema):
    """Offsets that lead out of the message; followed, they end the process."""
    whole, offsets = as_arrow(range(3)), np.array([0, 2, 4, 6], np.int32).tobytes()
    assert whole.count(offsets) == 1
    beyond = np.array([0, 2, 4, 1 << 30], np.int32).tobytes()
    cluster.send([whole.replace(offsets, beyond)], topic=topic)
    with pytest.raises(DataError, match=f"message 0 of {topic}/0 is broken: it does not fit"):
        users(data(cluster, topic, schema, format="arrow", rows_per_message=3), 3)


def test_a_sample_that_breaks_a_rule_is_named_by_its_offset(cluster, topic, schema):
    cluster.send([*as_json(range(3)), json.dumps({**row(3), "label": 7}).encode()], topic=topic)
    with pytest.raises(DataError, match=f"row 3 of {topic}/0 is broken: label is 7"):
        users(data(cluster, topic, schema), 4)


def test_a_message_of_other_size_is_broken(cluster, topic, schema):
    cluster.send([as_arrow(range(3)), as_arrow(range(4))], topic=topic)
    config = data(cluster, topic, schema, format="arrow", rows_per_message=3)
    with pytest.raises(DataError, match=r"message 1 of .* has 4 rows, and data.stream.rows_per"):
        users(config, 6)


def test_a_field_that_no_message_has_is_told(cluster, topic, schema, caplog):
    bare = [{name: value for name, value in row(n).items() if name != "items"} for n in range(4)]
    cluster.send([json.dumps(of).encode() for of in bare], topic=topic)
    users(data(cluster, topic, schema), 4)
    assert f"no message of {topic} so far has the field items" in caplog.text


def test_a_new_run_may_begin_with_what_comes_next(cluster, topic, schema):
    cluster.send(as_json(range(4)), topic=topic)
    source = opened(data(cluster, topic, schema, start="latest"))
    options = {"rank": 0, "global_batch": 2, "gather": LocalCommunicator().all_gather_values}
    assert source.decide({}, **options) == "idle"
    cluster.send(as_json(range(4, 8)), topic=topic)
    assert source.decide({}, **options) == "decided"
    cursor = source.cursor_after(1)
    assert cursor == {f"{topic}/0": 6, **{f"{topic}/{other}": 0 for other in (1, 2, 3)}}
    # After a restart the cursor alone counts, also for partitions without a trained sample.
    cluster.send(as_json([100, 101]), partition=1, topic=topic)
    rest, _ = users(data(cluster, topic, schema, start="latest"), 4, cursor)
    assert rest == [[6, 7, 100, 101]]


def test_a_new_run_may_begin_at_a_time(cluster, topic, schema, monkeypatch):
    cluster.send(as_json(range(10)), topic=topic)
    asked: list[int] = []

    def since(self, partition, milliseconds):
        asked.append(milliseconds)
        return {0: 6}.get(partition)

    monkeypatch.setattr(KafkaTopic, "since", since)
    found, _ = users(data(cluster, topic, schema, start="2026-11-18T06:00:00"), 4)
    assert found == [[6, 7, 8, 9]]
    assert set(asked) == {1794981600000}


def test_a_time_after_all_messages_is_the_end(cluster, topic):
    cluster.send(as_json(range(4)), topic=topic)
    assert (
        KafkaTopic(f"kafka://{cluster.address}/{topic}", StreamConfig()).since(0, 1 << 45) is None
    )


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ((9, 20), "begins at message 9 now, and the run stands at 4: Kafka has deleted"),
        ((0, 2), "ends at message 2, and the run stands at 4, so the topic is another one"),
    ],
)
def test_a_topic_that_lost_messages_is_refused(cluster, schema, monkeypatch, bounds, sentence):
    cluster.send(as_json(range(8)), topic="lost")
    config = data(cluster, "lost", schema)
    _, cursor = users(config, 4, most=1)
    monkeypatch.setattr(KafkaTopic, "bounds", lambda self: {0: bounds})
    with pytest.raises(DataError, match=sentence):
        users(config, 4, cursor)


def test_a_message_that_is_deleted_while_it_is_read_is_refused(cluster, topic, schema, monkeypatch):
    cluster.send(as_json(range(4)), topic=topic)
    monkeypatch.setattr(KafkaTopic, "bounds", lambda self: {0: (0, 60)})
    with pytest.raises(DataError, match=f"message 50 of {topic}/0 is no longer there"):
        users(data(cluster, topic, schema), 4, {f"{topic}/0": 50})


def test_mistakes_are_said_in_a_sentence(cluster, schema, monkeypatch):
    with pytest.raises(DataError, match=r"cannot read the topic 'nothing' of .*Unknown topic"):
        opened(data(cluster, "nothing", schema))
    cluster.send(as_json([0]), topic="some")
    with pytest.raises(DataError, match=r"there is no file .*; check data.stream.schema"):
        opened(data(cluster, "some", Path("nowhere.parquet")))
    with pytest.raises(ConfigError, match=r"data.stream.schema is missing; name a Parquet file"):
        opened(data(cluster, "some", None))
    with pytest.raises(ConfigError, match=r"data.stream.start is 'soon'; give earliest, latest"):
        opened(data(cluster, "some", schema, start="soon"))
    with pytest.raises(ConfigError, match=r"Kafka refuses data.stream.options \(No such config"):
        opened(data(cluster, "some", schema, options={"banana": "yes"}))
    with pytest.raises(ConfigError, match=r"path is 'kafka://host'; give kafka://host:9092/topic"):
        open_source(DataConfig(kind="stream", path="kafka://host"))
    with pytest.raises(ConfigError, match="there is no variable KAFKA_SECRET; set it"):
        from_environment({"sasl.password": "env:KAFKA_SECRET"})
    monkeypatch.setenv("KAFKA_SECRET", "quiet")
    assert from_environment({"sasl.password": "env:KAFKA_SECRET"}) == {"sasl.password": "quiet"}
    cluster.address, there = "127.0.0.1:1", cluster.address
    try:
        with pytest.raises(DataError, match=r"no answer from Kafka at 127.0.0.1:1 within 1 s"):
            opened(data(cluster, "some", schema, timeout_s=1.0))
    finally:
        cluster.address = there


def test_a_training_run_goes_on_from_its_checkpoint_bit_for_bit(cluster, topic, schema, tmp_path):
    for partition in range(3):
        numbers = range(40 * partition, 40 * partition + 40)
        cluster.send(as_json(numbers), partition=partition, topic=topic)

    def train(folder: str, resume: str | None = None, **run):
        stream = {"schema": str(schema), "idle_s": 0.0, "block": 2}
        sections = {
            "data": {
                "kind": "stream", "path": f"kafka://{cluster.address}/{topic}", "stream": stream
            },
            "run": {"batch": 16, "device": "cpu", "checkpoint": str(tmp_path / folder), **run},
            "model": {"dim": 4, "bottom": [4], "top": [4]},
        }  # fmt: skip
        job = prepare(build(JobConfig, sections), LocalCommunicator(), resume)
        losses: list[float] = []
        train_job(job, lambda report: losses.append(report.loss))
        return losses, [p.detach().clone() for p in job.trainer.model.parameters()]

    whole, weights = train("whole")
    assert len(whole) == 7
    first, _ = train("cut", steps=3)
    rest, again = train("cut", resume="auto")
    assert first + rest == whole
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))


def test_describe_says_what_a_topic_has(cluster, topic):
    cluster.send(as_json(range(5)), partition=2, topic=topic)
    path = f"kafka://{cluster.address}/{topic}"
    found = CliRunner().invoke(app, ["data", "describe", path, "--json", "-"])
    assert found.exit_code == 0, found.output
    parts = json.loads(found.output)["partitions"]
    assert np.array([[p["partition"], p["first"], p["end"]] for p in parts]).tolist() == [
        [0, 0, 0], [1, 0, 0], [2, 0, 5], [3, 0, 0]
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_shuffled_windows_of_a_topic_go_on_from_the_cursor(cluster, topic, schema, ranks):
    """What comes meanwhile changes nothing of a window that was begun."""
    for partition in range(3):
        numbers = range(100 * partition, 100 * partition + 20)
        cluster.send(as_json(numbers), partition=partition, topic=topic)
    config = replace(data(cluster, topic, schema, shuffle_window=32), shards=4)
    whole, _ = users(config, 8)
    assert sorted(chain(*whole)) != list(chain(*whole))
    assert [len(part) for part in whole] == [8] * 4
    first, cursor = users(config, 8, most=1)
    cluster.send(as_json(range(20, 40)), topic=topic)
    rest, _ = users(config, 8, cursor, ranks)
    assert first + rest[:3] == whole
    assert len(rest) == 3 + 4  # and a window of what was left and what came
    seen = list(chain(*first, *rest))
    assert len(set(seen)) == len(seen)


def test_sequences_come_from_a_topic(cluster, topic, tmp_path):
    columns = pa.schema([("history", pa.list_(pa.int64())), ("timestamps", pa.list_(pa.int64()))])
    pq.write_table(columns.empty_table(), tmp_path / "schema.parquet")
    rows = [{"history": [n, n + 1], "timestamps": [9, 8]} for n in range(12)]
    cluster.send([json.dumps(row).encode() for row in rows], topic=topic)
    config = data(cluster, topic, tmp_path / "schema.parquet")

    def read(batch: int):
        source = opened(config)
        gather = LocalCommunicator().all_gather_values
        source.decide({}, rank=0, global_batch=batch, gather=gather)
        return list(source.batches(global_batch=batch, rank=0, ranks=1))

    (whole,) = read(12)
    assert whole.sparse["history"].to_lists() == [[n + 1, n] for n in range(12)]
    ids = [name for batch in read(4) for name in batch.dense["sample_id"].tolist()]
    assert ids == whole.dense["sample_id"].tolist()
    assert len(set(ids)) == 12
