"""Logs without an end: a folder to which Parquet files are added, and a Kafka topic.

In a folder the partitions are the files, by name. A file is renamed into the folder when it is
whole, and never changed. Files that were read may be deleted. A partition's name says which file it
is, how many rows it has and a hash of its end, so that a cursor notices another file of the same
name.

A topic holds JSON objects, or Arrow record batches of a fixed number of rows. Offsets are counted
in samples: message m of a partition holds samples m N to (m + 1) N - 1, where N is
`data.stream.rows_per_message`. They are kept in checkpoints and never committed to a group.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from nestpipe.batch import Batch
from nestpipe.data import inputs
from nestpipe.data.config import DataConfig, StreamConfig
from nestpipe.data.inputs import digest_of
from nestpipe.data.order import text_key
from nestpipe.data.parquet import (
    FILE_BITS,
    PATTERNS,
    ColumnLayout,
    check,
    choose,
    open_file,
    row_group,
    to_batch,
    to_sequences,
    with_rows,
)
from nestpipe.data.sequences import SequenceLayout, find_layout
from nestpipe.data.shards import concat
from nestpipe.data.source import empty_batch
from nestpipe.data.streaming import LogRange, Offsets, Polled
from nestpipe.data.text import Broken, RowError
from nestpipe.errors import ConfigError, DataError

LATE_S = 15.0
"""How long a rank waits for a file that another one has seen."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of the folder."""

    name: str
    """Its path within the folder."""
    rows: int
    digest: str

    @property
    def partition(self) -> str:
        return f"{self.name}@{self.rows}-{self.digest}"

    @classmethod
    def of(cls, partition: str) -> Segment:
        """The file that a partition is named after."""
        name, _, rest = partition.rpartition("@")
        rows, _, digest = rest.partition("-")
        if not name or not rows.isdecimal():
            raise DataError(
                f"the run stands in {partition!r}, which is no file of a folder; set data.path to "
                "what it was, or begin a new run"
            )
        return cls(name, int(rows), digest)


class FolderLog:
    """The Parquet files of a folder, in the order of their names, also those yet to come."""

    in_turn = True

    def __init__(self, config: DataConfig) -> None:
        self._folder = Path(config.path)
        if not self._folder.is_dir():
            raise DataError(f"there is no folder {config.path!r} to follow; check data.path")
        self._seen: dict[str, tuple[tuple[int, int, int], Segment]] = {}
        self._held: tuple[str, int, list[Any]] | None = None
        """The row group that was read last: its partition, number and pieces."""
        self._sizes: tuple[str, list[int]] = ("", [])
        self._layout = layout_of(config, find_example(config))

    @property
    def layout(self) -> ColumnLayout | SequenceLayout:
        return self._layout

    def poll(self, offsets: Offsets) -> Polled:
        """The rows of each file that follow its offset, in the order of names."""
        names = _names(self._folder)
        there = {found.name: found for found in map(self._segment, names) if found}
        known = {Segment.of(partition).name: partition for partition in offsets}
        latest = max(known, default="")
        for found in there.values():
            self._refuse_misfit(found, known.get(found.name), latest)
        ready = [
            LogRange(found.partition, offsets.get(found.partition, 0), found.rows)
            for found in there.values()
            if offsets.get(found.partition, 0) < found.rows
        ]
        gone = [known[name] for name in known if name not in there]
        for partition in gone:
            self._refuse_unread(Segment.of(partition), offsets[partition])
        # The latest stays, deleted or not: files that come must follow it.
        kept = tuple(partition for partition in gone if Segment.of(partition).name != latest)
        return Polled(tuple(ready), kept)

    def _segment(self, name: str) -> Segment | None:
        """A file as it is now; None where it was deleted meanwhile."""
        path = self._folder / name
        try:
            stat = path.stat()
            print_ = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            before = self._seen.get(name)
            if before is not None and before[0] == print_:
                return before[1]
            digest = digest_of(path).hex()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; check the file") from None
        opened = open_file(path)
        if opened.metadata.num_rows:
            check(opened.schema_arrow, self._layout, path)
        found = Segment(name, opened.metadata.num_rows, digest)
        self._seen[name] = (print_, found)
        return found

    def _refuse_misfit(self, found: Segment, known: str | None, latest: str) -> None:
        path = self._folder / found.name
        if known is not None and known != found.partition:
            raise DataError(
                f"{path} is not the file that was read before; put it back, and add new rows as "
                "new files"
            )
        if known is None and found.name < latest and found.rows:
            raise DataError(
                f"{path} came after {latest} was read, which its name is before; name files in the "
                "order in which they come"
            )

    def _refuse_unread(self, segment: Segment, offset: int) -> None:
        if offset < segment.rows:
            raise DataError(
                f"{self._folder / segment.name} is gone, and {segment.rows - offset} of its "
                f"{segment.rows} rows were not trained; put it back"
            )

    def read(self, part: LogRange, broken: Broken) -> Batch:
        """Rows of one file, group by group."""
        segment = Segment.of(part.partition)
        found, path = self._wait_for(segment.name), self._folder / segment.name
        if found is None:
            self._refuse_unread(segment, part.begin)
        if found != segment:
            raise DataError(f"{path} was changed while it was read; put it back")
        sizes = self._group_sizes(part.partition, path)
        ends = list(accumulate(sizes))
        batches: list[Batch] = []
        begin = part.begin
        while begin < part.end:
            group = bisect_right(ends, begin)
            first, end = ends[group] - sizes[group], min(ends[group], part.end)
            table = self._group(part.partition, path, group)
            piece = table.slice(begin - first, end - begin)
            rows = np.arange(begin, end)
            place = (part.partition, rows)
            batches.append(samples_of(piece, self._layout, rows, place, broken, path))
            begin = end
        return concat(batches)

    def _wait_for(self, name: str) -> Segment | None:
        """A file that rank 0 has seen: on a network file system others see it later."""
        patience = time.monotonic() + LATE_S
        while (found := self._segment(name)) is None and time.monotonic() < patience:
            time.sleep(0.1)
        return found

    def _group_sizes(self, partition: str, path: Path) -> list[int]:
        """Rows of each group; the footer of the file that is read is not read again."""
        if self._sizes[0] != partition:
            footer = open_file(path).metadata
            groups = range(footer.num_row_groups)
            self._sizes = (partition, [footer.row_group(group).num_rows for group in groups])
        return self._sizes[1]

    def _group(self, partition: str, path: Path, group: int) -> Any:
        if self._held is None or self._held[:2] != (partition, group):
            pieces = list(row_group(path, group, self._layout.names))
            self._held = (partition, group, pieces)
        return pa.Table.from_batches(self._held[2])


def _names(folder: Path) -> list[str]:
    """Files below the folder; those of other programs begin with `.` or `_`."""
    found = [path for pattern in PATTERNS for path in folder.rglob(pattern) if path.is_file()]
    names = [path.relative_to(folder) for path in found]
    data = [name for name in names if not any(part.startswith((".", "_")) for part in name.parts)]
    return sorted(name.as_posix() for name in data)


def find_example(config: DataConfig) -> Path:
    """A Parquet file with the columns of the log."""
    if config.stream.schema:
        return Path(config.stream.schema)
    if config.path.startswith("kafka://"):
        raise ConfigError(
            "data.stream.schema is missing; name a Parquet file with the columns that the "
            f"messages of {split_uri(config.path)[1]} have"
        )
    folder = Path(config.path)
    files = [folder / name for name in _names(folder)]
    if not files:
        raise DataError(
            f"there are no Parquet files in {config.path!r} yet; add one, or name a file with "
            "the same columns in data.stream.schema"
        )
    return with_rows(files)


def layout_of(config: DataConfig, example: Path) -> ColumnLayout | SequenceLayout:
    """What the columns of a log are, by a Parquet file that has the same."""
    if not example.exists():
        raise DataError(f"there is no file {str(example)!r}; check data.stream.schema")
    schema = open_file(example).schema_arrow
    layout = find_layout(schema, config, "train", None) or choose(schema, config.parquet, example)
    check(schema, layout, example)
    return layout


def samples_of(
    table: pa.Table,
    layout: ColumnLayout | SequenceLayout,
    rows: np.ndarray,
    place: tuple[str, np.ndarray],
    broken: Broken,
    path: Path,
) -> Batch:
    """Rows of a log; `place` is their partition and offsets, which name sequences."""
    if not isinstance(layout, SequenceLayout):
        return to_batch(table, layout, rows, path, broken)
    partition, offsets = place
    # A sequence has the same id on every rank: its random draws follow from the id.
    number = text_key(partition) & (1 << (63 - FILE_BITS)) - 1
    return to_sequences(table, layout, rows, (number << FILE_BITS) + offsets, path, broken)


log = logging.getLogger("nestpipe.data")

MOST_AT_ONCE = 10_000
"""Messages that are asked of the client at a time."""
_SPACE = b" \t\r\n"
"""What JSON may have around an object."""
FROM_ENVIRONMENT = "env:"
"""An option that begins so is the name of a variable, such as a password."""


class KafkaTopic:
    """A topic of a cluster: which partitions it has, and what is in them."""

    def __init__(self, path: str, stream: StreamConfig) -> None:
        """The path is kafka://host:9092,host:9092/topic."""
        self.client = _client()
        self.brokers, self.name = split_uri(path)
        self._stream = stream
        self._asking = self.consumer()
        self.partitions()

    def consumer(self) -> Any:
        """A consumer without a group's offsets, which reads at the positions that it is given."""
        options = {
            "bootstrap.servers": self.brokers,
            "group.id": "nestpipe",
            "log_level": 0,
            **from_environment(self._stream.options),
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
        try:
            return self.client.Consumer(options)
        except self.client.KafkaException as error:
            raise ConfigError(
                f"Kafka refuses data.stream.options ({_reason(error)}); correct them"
            ) from None

    def at(self, partition: int, offset: int = 0) -> Any:
        """A place in the topic, as the client says it."""
        return self.client.TopicPartition(self.name, partition, offset)

    def partitions(self) -> list[int]:
        """Their numbers; refuses a topic that is not there."""
        try:
            found = self._asking.list_topics(self.name, timeout=self._stream.timeout_s)
        except self.client.KafkaException as error:
            raise self.unreachable(_reason(error)) from None
        topic = found.topics[self.name]
        if topic.error is not None or not topic.partitions:
            reason = topic.error.str() if topic.error is not None else "it has no partitions"
            raise DataError(
                f"cannot read the topic {self.name!r} of {self.brokers} ({reason}); check the name "
                "in data.path"
            )
        return sorted(topic.partitions)

    def unreachable(self, reason: str) -> DataError:
        """The sentence for brokers that do not answer."""
        return DataError(
            f"no answer from Kafka at {self.brokers} within {self._stream.timeout_s:g} s "
            f"({reason}); check the brokers in data.path"
        )

    def bounds(self) -> dict[int, tuple[int, int]]:
        """For each partition its first message, and the one that comes next."""
        found: dict[int, tuple[int, int]] = {}
        timeout = self._stream.timeout_s
        for partition in self.partitions():
            try:
                ends = self._asking.get_watermark_offsets(self.at(partition), timeout=timeout)
            except self.client.KafkaException as error:
                raise self.unreachable(_reason(error)) from None
            found[partition] = (max(0, ends[0]), max(0, ends[1]))
        return found

    def since(self, partition: int, milliseconds: int) -> int | None:
        """The first message that is not older; None: all are."""
        place, timeout = self.at(partition, milliseconds), self._stream.timeout_s
        try:
            (found,) = self._asking.offsets_for_times([place], timeout=timeout)
        except self.client.KafkaException as error:
            raise self.unreachable(_reason(error)) from None
        return found.offset if found.offset >= 0 else None


class KafkaLog:
    """The samples in the messages of a topic."""

    in_turn = False

    def __init__(self, config: DataConfig) -> None:
        self._stream = config.stream
        self._topic = KafkaTopic(config.path, config.stream)
        example = find_example(config)
        self._layout = layout_of(config, example)
        schema = open_file(example).schema_arrow
        self._schema = pa.schema(
            [pa.field(name, _plain(schema.field(name).type)) for name in self._layout.names]
        )
        self._start = _start(config.stream.start)
        self._first: dict[int, int] = {}
        """Where partitions begin that no cursor knows."""
        self._readers: dict[int, tuple[Any, int]] = {}
        """For each partition its consumer, and the message that it gives next."""
        self._warned: set[str] = set()

    @property
    def layout(self) -> ColumnLayout | SequenceLayout:
        return self._layout

    def poll(self, offsets: Offsets) -> Polled:
        """The messages of each partition after its offset; refuses if some of them were deleted."""
        rows, ready = self._stream.rows_per_message, list[LogRange]()
        for partition, (low, high) in self._topic.bounds().items():
            name = self._name(partition)
            begin = offsets.get(name)
            if begin is None:
                # A partition that was added later is read from its beginning.
                begin = rows * (low if offsets else self._beginning(partition, low, high))
            self._refuse_lost(name, begin // rows, low, high)
            ready.append(LogRange(name, begin, rows * high))
        return Polled(tuple(ready), begins={part.partition: part.begin for part in ready})

    def _name(self, partition: int) -> str:
        return f"{self._topic.name}/{partition}"

    def _refuse_lost(self, name: str, begin: int, low: int, high: int) -> None:
        if begin < low:
            raise DataError(
                f"{name} begins at message {low} now, and the run stands at {begin}: Kafka has "
                "deleted what lies between; keep messages longer, or begin a new run"
            )
        if begin > high:
            raise DataError(
                f"{name} ends at message {high}, and the run stands at {begin}, so the topic is "
                "another one now; check data.path, or begin a new run"
            )

    def _beginning(self, partition: int, low: int, high: int) -> int:
        """The message with which a new run begins, the same however often it is asked."""
        if partition not in self._first:
            if isinstance(self._start, int):
                found = self._topic.since(partition, self._start)
                self._first[partition] = high if found is None else found
            else:
                self._first[partition] = low if self._start == "earliest" else high
        return self._first[partition]

    def read(self, part: LogRange, broken: Broken) -> Batch:
        """The samples of a range, from the messages that hold them."""
        rows = self._stream.rows_per_message
        partition = int(part.partition.rpartition("/")[2])
        first, end = part.begin // rows, -(-part.end // rows)
        messages = self._messages(partition, first, end)
        parse = self._json if self._stream.format == "json" else self._arrow
        tables: list[pa.Table] = []
        numbers: list[np.ndarray] = []
        for offsets, table in self._salvage(messages, parse, part.partition, broken):
            # Of the first and the last message other ranks may have a part.
            samples = (np.asarray(offsets)[:, None] * rows + np.arange(rows)).ravel()
            kept = (samples >= part.begin) & (samples < part.end)
            tables.append(table if kept.all() else table.filter(pa.array(kept)))
            numbers.append(samples[kept])
        if not tables:
            return empty_batch(self._layout.columns)
        whole, at = pa.concat_tables(tables), np.concatenate(numbers)
        self._warn_of_empty(whole)
        # Readers count rows from 1 where they name one: here they name the message's offset.
        rows_N, place = at // rows - 1, (part.partition, at)
        return samples_of(whole, self._layout, rows_N, place, broken, Path(part.partition))

    def _messages(self, partition: int, first: int, end: int) -> list[tuple[int, bytes]]:
        """The messages [first, end); of a compacted topic some are missing."""
        consumer, at = self._readers.get(partition) or (self._topic.consumer(), -1)
        if at != first:
            consumer.assign([self._topic.at(partition, first)])
        found: list[tuple[int, bytes]] = []
        at, patience = first, time.monotonic() + self._stream.timeout_s
        while at < end:
            for message in consumer.consume(min(end - at, MOST_AT_ONCE), timeout=1.0):
                patience = time.monotonic() + self._stream.timeout_s
                if message.error() is None:
                    at = message.offset() + 1
                    if at <= end:
                        found.append((message.offset(), message.value() or b""))
                else:
                    at = self._offset_after(message, partition, at)
            if time.monotonic() > patience:
                raise self._topic.unreachable(
                    f"message {at} of {self._name(partition)} does not come"
                )
        self._readers[partition] = (consumer, at)
        return found

    def _offset_after(self, message: Any, partition: int, at: int) -> int:
        """The offset after an event that is not a message."""
        error, kinds = message.error(), self._topic.client.KafkaError
        if error.code() == kinds._PARTITION_EOF:
            return max(at, message.offset())
        if error.code() in (kinds.OFFSET_OUT_OF_RANGE, kinds._AUTO_OFFSET_RESET):
            raise DataError(
                f"message {at} of {self._name(partition)} is no longer there; keep messages "
                "longer, or begin a new run"
            )
        mends_itself = error.retriable() or error.code() in _passing(kinds)
        if error.fatal() or not mends_itself:
            raise DataError(f"cannot read {self._name(partition)}: {error.str()}; check the topic")
        return at

    def _salvage(
        self, messages: Sequence[tuple[int, bytes]], parse: Any, name: str, broken: Broken
    ) -> list[tuple[list[int], pa.Table]]:
        """All messages parsed at once, or one by one where some of them are broken."""
        if not messages:
            return []
        try:
            return [([offset for offset, _ in messages], parse([value for _, value in messages]))]
        except RowError:
            pass
        good: list[tuple[list[int], pa.Table]] = []
        for offset, value in messages:
            try:
                good.append(([offset], parse([value])))
            except RowError as error:
                for _ in range(self._stream.rows_per_message):
                    broken.add(f"message {offset} of {name}", str(error))
        return good

    def _json(self, values: Sequence[bytes]) -> pa.Table:
        for value in values:
            # With both ends of each there, no object of one message can end in another.
            if not (value.lstrip(_SPACE).startswith(b"{") and value.rstrip(_SPACE).endswith(b"}")):
                raise RowError("it is no JSON object")
        text = b"\n".join(values)
        try:
            found = pa_json.read_json(
                pa.BufferReader(text),
                pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
                pa_json.ParseOptions(
                    explicit_schema=self._schema,
                    newlines_in_values=True,
                    unexpected_field_behavior="ignore",
                ),
            )
            found.validate(full=True)  # strings may be of any bytes
        except (pa.ArrowException, ValueError) as error:
            raise RowError(f"it does not fit data.stream.schema ({_short(error)})") from None
        if found.num_rows != len(values):
            raise RowError(f"it has {found.num_rows} JSON objects, not one")
        return found.select(self._schema.names).cast(self._schema)

    def _arrow(self, values: Sequence[bytes]) -> pa.Table:
        tables: list[pa.Table] = []
        for value in values:
            try:
                table = pa.ipc.open_stream(value).read_all()
                table.validate(full=True)  # or damaged offsets would lead anywhere
                tables.append(table.select(self._schema.names).cast(self._schema))
            except (pa.ArrowException, KeyError, ValueError, OSError) as error:
                raise RowError(f"it does not fit data.stream.schema ({_short(error)})") from None
            if (rows := table.num_rows) != (wanted := self._stream.rows_per_message):
                raise RowError(f"it has {rows} rows, and data.stream.rows_per_message is {wanted}")
        return pa.concat_tables(tables)

    def _warn_of_empty(self, table: pa.Table) -> None:
        """A field that no message has is likely a misspelt one."""
        for name in table.schema.names:
            if name not in self._warned and table.num_rows > 1:
                if table[name].null_count == table.num_rows:
                    log.warning("no message of %s so far has the field %s", self._topic.name, name)
                self._warned.add(name)


def _client() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise ConfigError(
            "reading from Kafka needs confluent-kafka; run pip install 'nestpipe[kafka]'"
        ) from None
    return confluent_kafka


def _passing(kinds: Any) -> tuple[int, ...]:
    """Network faults that the client recovers from by itself."""
    return (kinds._TRANSPORT, kinds._ALL_BROKERS_DOWN, kinds._RESOLVE, kinds._TIMED_OUT)


def _reason(error: Exception) -> str:
    fault: Any = error.args[0] if error.args else error
    return str(fault.str() if hasattr(fault, "str") else fault)


def _short(error: Exception) -> str:
    return str(error).strip("'\"").splitlines()[0].removesuffix(".")


def split_uri(path: str) -> tuple[str, str]:
    """Brokers and topic of kafka://host:9092,host:9092/topic."""
    brokers, _, topic = path.removeprefix("kafka://").partition("/")
    if not brokers or not topic or "/" in topic:
        raise ConfigError(f"path is {path!r}; give kafka://host:9092/topic")
    return brokers, topic


def from_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the client, with those that are names of variables looked up."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, str) and value.startswith(FROM_ENVIRONMENT):
            variable = value.removeprefix(FROM_ENVIRONMENT)
            if variable not in os.environ:
                raise ConfigError(
                    f"data.stream.options has {name} = {value!r}, and there is no variable "
                    f"{variable}; set it"
                )
            value = os.environ[variable]
        found[name] = value
    return found


def _start(text: str) -> str | int:
    """Where a new run begins: `earliest`, `latest`, or milliseconds since 1970."""
    if text in ("earliest", "latest"):
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"data.stream.start is {text!r}; give earliest, latest, or a time such as "
            "2026-11-18T06:00:00+00:00"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type as messages have it: no dictionaries, and no long lists or strings."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if inputs.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return pa.string() if inputs.is_text(kind) else kind
