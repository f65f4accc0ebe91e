"""A log without an end as a source: partitions with offsets, read on from where training stands.

Rank 0 polls the log and decides which ranges of which partitions form the next global batches. It
sends the decision to all ranks, and each reads its contiguous part of them. The ranges that were
trained are the run's cursor: the offset of every partition after the last trained sample. A
checkpoint keeps it, so a restart goes on there, with any number of ranks: nothing is lost, nothing
comes twice. Batches are a function of the ranges alone, so every plan has the same.

A stream may be shuffled in windows. A window is a fixed number of consecutive samples of the log.
It is cut into shards, neighbours each, which are permuted as their place in the log and the seed
say, and take turns as in `data/shards.py`: so a batch is spread over the window, and a rank reads
few shards. In the midst of a window the cursor keeps where it began and ends, and how much of it
was trained.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, Split, StreamConfig
from nestpipe.data.inputs import is_uri
from nestpipe.data.order import (
    MOST_SHARDS,
    Permutation,
    Share,
    Turns,
    choose_shards,
    mix,
    text_key,
)
from nestpipe.data.shards import concat
from nestpipe.data.source import (
    SAMPLE_ID,
    Column,
    Source,
    empty_batch,
    pass_column,
    tensor,
    with_pass,
    with_weights,
)
from nestpipe.data.text import Broken
from nestpipe.errors import ConfigError, DataError, MissingSplitError, NestpipeError
from nestpipe.kernels.library import native_wanted

if TYPE_CHECKING:
    from nestpipe.data.parquet import ColumnLayout
    from nestpipe.data.sequences import Ranking, SequenceLayout

log = logging.getLogger("nestpipe.data")

Offsets = Mapping[str, int]
"""For each partition that was read from, the offset of the next sample."""
Gather = Callable[[object], list[object]]
"""Plain values of every rank, in rank order: `Communicator.all_gather_values`."""
Outcome = Literal["decided", "idle", "stopped"]


@dataclass(frozen=True, slots=True)
class LogRange:
    """Samples [begin, end) of one partition; there may be fewer of them than offsets."""

    partition: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Polled:
    """What a log has at one moment."""

    ready: tuple[LogRange, ...]
    """For each partition what follows the given offset, in the order of partitions."""
    gone: tuple[str, ...] = ()
    """Partitions that were read to their end and no longer exist: their offsets may be dropped."""
    begins: Offsets = field(default_factory=dict[str, int])
    """Offsets that the cursor keeps from now on, also where nothing is read yet."""


class PartitionedLog(Protocol):
    """Partitions that grow at their end; a sample keeps its partition and its offset.

    No partition's name begins with a slash.
    """

    @property
    def layout(self) -> ColumnLayout | SequenceLayout:
        """What its samples are."""
        ...

    @property
    def in_turn(self) -> bool:
        """Whether a partition is read to its end before the next begins; else all go together."""
        ...

    def poll(self, offsets: Offsets) -> Polled:
        """What there is to read now; refuses a log that has lost or changed what was to come."""
        ...

    def read(self, part: LogRange, broken: Broken) -> Batch:
        """The samples of a range that was there, without those that are broken."""
        ...


# Which ranges the next batches are.


def share_out(sizes: Sequence[int], wanted: int) -> list[int]:
    """As evenly as the sizes allow: what each gives so that together they give `wanted`."""
    shares = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda place: (sizes[place], place))
    for done, place in enumerate(order):
        shares[place] = min(sizes[place], wanted // (len(sizes) - done))
        wanted -= shares[place]
    assert wanted == 0, f"{list(sizes)} have {wanted} too few"
    return shares


def share_in_turn(sizes: Sequence[int], wanted: int) -> list[int]:
    """From the first on: what each gives so that together they give `wanted`."""
    shares: list[int] = []
    for size in sizes:
        shares.append(min(size, wanted))
        wanted -= shares[-1]
    return shares


def choose_ranges(
    ready: Sequence[LogRange], global_batch: int, most: int, *, in_turn: bool
) -> list[list[LogRange]]:
    """The ranges of each of the next global batches: up to a limit, and only whole batches."""
    left = list(ready)
    chosen: list[list[LogRange]] = []
    share = share_in_turn if in_turn else share_out
    while len(chosen) < most and sum(part.size for part in left) >= global_batch:
        taken = share([part.size for part in left], global_batch)
        chosen.append(
            [
                LogRange(part.partition, part.begin, part.begin + count)
                for part, count in zip(left, taken, strict=True)
                if count
            ]
        )
        left = [replace(p, begin=p.begin + count) for p, count in zip(left, taken, strict=True)]
    return chosen


def cut(ranges: Sequence[LogRange], low: int, high: int) -> Iterator[LogRange]:
    """Samples [low, high) of some ranges behind each other."""
    at = 0
    for part in ranges:
        begin, end = max(low - at, 0), min(high - at, part.size)
        if begin < end:
            yield LogRange(part.partition, part.begin + begin, part.begin + end)
        at += part.size


# Windows: neighbours that are shuffled together, or one batch as the log has it.


_USED, _SHARDS, _SEED = "/shuffled/used", "/shuffled/shards", "/shuffled/seed"
_END = "/shuffled/end/"
"""What a cursor says of a window that is trained in part; the end of each partition in it."""


@dataclass(frozen=True, slots=True)
class LogWindow:
    """Samples of a log that follow each other."""

    ranges: tuple[LogRange, ...]
    shards: int
    """Parts that are permuted and take turns; 0: the samples keep their order."""
    seed: int
    """Of the run that began it."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.ranges)

    @property
    def ends(self) -> dict[str, int]:
        return {part.partition: part.end for part in self.ranges}

    @property
    def turns(self) -> Turns:
        return Turns(self.shards, self.size)

    def of_shard(self, shard: int) -> list[LogRange]:
        """Where the samples of a shard are."""
        size_V = self.turns.counts(self.size)
        begin = int(size_V[:shard].sum())
        return list(cut(self.ranges, begin, begin + int(size_V[shard])))

    def order(self, shard: int, size: int) -> Permutation:
        """The permutation of a shard's samples, seeded by the window's place in the log."""
        place = [number for of in self.ranges for number in (text_key(of.partition), of.begin)]
        return Permutation(size, mix(self.seed, 1 + shard, *place))

    def cursor(self, used: int) -> dict[str, int]:
        """The cursor after a number of samples, over all ranks."""
        if used >= self.size:
            return self.ends
        if not self.shards:
            return {part.partition: part.end for part in cut(self.ranges, 0, used)}
        begins = {part.partition: part.begin for part in self.ranges}
        ends = {f"{_END}{partition}": end for partition, end in self.ends.items()}
        return {**begins, **ends, _USED: used, _SHARDS: self.shards, _SEED: self.seed}


def split_cursor(cursor: Offsets) -> tuple[dict[str, int], LogWindow | None, int]:
    """The offsets of a cursor, the window that was trained in part, and how much of it."""
    offsets = {name: offset for name, offset in cursor.items() if not name.startswith("/")}
    if _USED not in cursor:
        return offsets, None, 0
    ends = {n.removeprefix(_END): end for n, end in cursor.items() if n.startswith(_END)}
    ranges = [LogRange(partition, offsets[partition], end) for partition, end in ends.items()]
    return offsets, LogWindow(tuple(ranges), cursor[_SHARDS], cursor[_SEED]), cursor[_USED]


def after(ready: Sequence[LogRange], window: LogWindow | None) -> list[LogRange]:
    """What remains once a window is read."""
    ends = window.ends if window else {}
    left = [replace(part, begin=max(part.begin, ends.get(part.partition, 0))) for part in ready]
    return [part for part in left if part.begin < part.end]


class StreamingSource:
    """The samples of a log, in batches that `decide` has chosen; all ranks call it together."""

    def __init__(
        self,
        log: PartitionedLog,
        stream: StreamConfig,
        *,
        broken: Broken | None = None,
        shards: int = 0,
    ) -> None:
        """`shards` 0 chooses how many parts of a window take turns."""
        self.log = log
        self._stream = stream
        self._broken = broken or Broken()
        self._shards = choose_shards(shards, stream.shuffle_window, 2 * MOST_SHARDS)
        columns = log.layout.columns
        self._named = any(column.name == SAMPLE_ID for column in columns)
        self._columns = (*columns, *([pass_column()] if self._named else []))
        self._ranking: Ranking | None = None
        self._cursor: dict[str, int] = {}
        """The offsets with which the first window begins."""
        self._windows: list[LogWindow] = []
        self._used = 0
        """Samples of the first window that were trained before."""
        self._batch = 0
        self._num_decided = 0
        self._warned_waiting = 0
        """Samples that the last warning named as waiting."""
        self._num_begun = 0
        """Windows that an earlier run, or block, has begun: one or none."""
        self._permuted: dict[tuple[LogWindow, int], Batch] = {}
        """By window and shard: those of the windows that the latest batch was from."""
        self._ends: Offsets | None = None

    def ranked(self, ranking: Ranking) -> StreamingSource:
        """The same log of sequences, each as a ranking."""
        self._ranking = ranking
        return self

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns if self._ranking is None else self._ranking.columns

    @property
    def num_samples(self) -> None:
        """Unknown: the log may still grow."""

    @property
    def broken(self) -> Broken:
        return self._broken

    def empty(self) -> Batch:
        return empty_batch(self.columns)

    def batches(
        self,
        *,
        global_batch: int,
        rank: int,
        ranks: int,
        seed: int = 0,
        epoch: int = 0,
        start: int = 0,
        offset: int = 0,
    ) -> Iterator[Batch]:
        """This rank's part of each batch that was decided.

        The seed says how windows are permuted; no epoch changes it, and what was decided begins
        where training stands.
        """
        share = Share(global_batch=self._batch or global_batch, rank=rank, ranks=ranks)
        self._windows[self._num_begun :] = [
            replace(window, seed=seed) for window in self._windows[self._num_begun :]
        ]
        found = (self._part(number, share) for number in range(self._num_decided))
        found = with_weights(found, self._columns)
        named = (with_pass(batch, epoch) for batch in found) if self._named else found
        return named if self._ranking is None else map(self._ranking.ranked, named)

    def _part(self, number: int, share: Share) -> Batch:
        """This rank's part of a batch, which may be of several windows."""
        low, high = share.part(share.global_batch)
        begin = self._used + number * share.global_batch
        spans = list(self._spans(begin, begin + share.global_batch))
        windows = [window for window, _, _ in spans]
        self._permuted = {of: kept for of, kept in self._permuted.items() if of[0] in windows}
        read: list[Batch] = []
        for window, first, end in spans:
            size = end - first
            part = (min(max(low, 0), size), min(max(high, 0), size))
            read += self._read(window, first, end, *part)
            low, high = low - size, high - size
        empty = empty_batch(self.log.layout.columns)
        return concat(read) if read else empty

    def _spans(self, begin: int, end: int) -> Iterator[tuple[LogWindow, int, int]]:
        """Positions [begin, end), counted from the first window's beginning, window by window."""
        for window in self._windows:
            first, stop = max(begin, 0), min(end, window.size)
            if first < stop:
                yield window, first, stop
            begin, end = begin - window.size, end - window.size

    def _read(
        self, window: LogWindow, begin: int, end: int, low: int, high: int
    ) -> Iterator[Batch]:
        """Numbers [low, high) of the positions from `begin` to `end` of a window."""
        if not window.shards:
            for part in cut(window.ranges, begin + low, begin + high):
                yield self.log.read(part, self._broken)
            return
        for shard, first, stop in window.turns.between(begin, end, low, high):
            samples = self._shard(window, shard)
            # Where rows are broken there are fewer samples: the last ones of a window are missing.
            yield samples.slice(min(first, samples.size), min(stop, samples.size))

    def _shard(self, window: LogWindow, shard: int) -> Batch:
        """The samples of a shard, permuted."""
        if (window, shard) not in self._permuted:
            parts = window.of_shard(shard)
            whole = concat([self.log.read(part, self._broken) for part in parts])
            order = window.order(shard, whole.size).whole(native=native_wanted())
            self._permuted[window, shard] = whole.select(tensor(order))
        return self._permuted[window, shard]

    def decide(
        self,
        cursor: Offsets,
        *,
        rank: int,
        global_batch: int,
        gather: Gather,
        most: int | None = None,
        stop_wanted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Choose the next batches after the cursor, and wait for the log to have one.

        Ends without any where there is none for `idle_s`, or where some rank wants to stop.
        """
        most = min(most or self._stream.block, self._stream.block)
        began = time.monotonic()
        self._cursor, window, self._used = split_cursor(cursor)
        self._windows = [window] if window else []
        self._num_begun = len(self._windows)
        self._batch, self._num_decided = global_batch, 0
        while True:
            offer = self._offer(most, began) if rank == 0 else None
            decision = cast("list[list[Any]]", gather([stop_wanted(), offer]))
            first: dict[str, Any] = decision[0][1]
            if any(wanted for wanted, _ in decision):
                return "stopped"
            if first["refused"]:
                raise DataError(first["refused"])
            if first["batches"]:
                self._accept(first)
                return "decided"
            if first["idle"]:
                if rank == 0:
                    self._warn_of_waiting(first["waiting"])
                return "idle"

    def _warn_of_waiting(self, samples: int) -> None:
        """Warn of samples that wait only to be shuffled with later ones."""
        if self._warned_waiting != samples >= self._batch:
            log.warning(
                "%s samples of the stream wait until there are %s, as data.stream.shuffle_window "
                "says; they are not trained yet",
                f"{samples:,}",
                f"{self._stream.shuffle_window:,}",
            )
        self._warned_waiting = samples

    def _accept(self, decision: dict[str, Any]) -> None:
        """Take over the decision of rank 0."""
        for partition in decision["gone"]:
            self._cursor.pop(partition, None)
        self._cursor |= decision["begins"]
        shards = self._shards if self._stream.shuffle_window else 0
        for ranges in decision["windows"]:
            self._windows.append(LogWindow(tuple(LogRange(*part) for part in ranges), shards, 0))
        self._num_decided = decision["batches"]

    def _offer(self, most: int, began: float) -> dict[str, Any]:
        """The decision that rank 0 sends to the others; it waits one interval where there is
        nothing yet."""
        try:
            polled = self._poll()
        except NestpipeError as error:
            return {"refused": str(error)}
        window = self._windows[0] if self._windows else None
        left, size = window.size - self._used if window else 0, self._window_size
        missing = max(0, -(-(most * self._batch - left) // size))
        ready = after(polled.ready, window)
        chosen = choose_ranges(ready, size, missing, in_turn=self.log.in_turn)
        batches = min(most, (left + len(chosen) * size) // self._batch)
        waiting = sum(part.size for part in ready) - len(chosen) * size
        idle = self._ends is not None or time.monotonic() - began >= self._stream.idle_s
        if not batches and not idle:
            time.sleep(self._stream.poll_s)
        windows = [[[p.partition, p.begin, p.end] for p in ranges] for ranges in chosen]
        decision = {"gone": list(polled.gone), "begins": dict(polled.begins), "idle": idle}
        return {
            "refused": "",
            "windows": windows,
            "batches": batches,
            "waiting": waiting,
            **decision,
        }

    @property
    def _window_size(self) -> int:
        """Samples of a window; without shuffling a batch."""
        return self._stream.shuffle_window or self._batch

    def _poll(self) -> Polled:
        polled = self.log.poll(self._cursor)
        if self._ends is None:
            return polled
        known = [
            replace(part, end=min(part.end, self._ends[part.partition]))
            for part in polled.ready
            if part.begin < self._ends.get(part.partition, 0)
        ]
        return replace(polled, ready=tuple(known))

    @property
    def num_decided(self) -> int:
        """Batches that `batches` will give."""
        return self._num_decided

    def cursor_after(self, batches: int) -> dict[str, int]:
        """The cursor once a number of the decided batches has been trained."""
        cursor = dict(self._cursor)
        used = self._used + min(batches, self._num_decided) * self._batch
        for window in self._windows:
            if used <= 0:
                break
            cursor |= window.cursor(used)
            used -= window.size
        return cursor

    def freeze(self, gather: Gather, ends: Offsets | None = None) -> Offsets:
        """Let the log end where it ends now, or at these offsets, for runs to be compared."""
        if ends is None:
            polled = self.log.poll({})
            mine = {part.partition: part.end for part in polled.ready}
            ends = cast("list[dict[str, int]]", gather(mine))[0]
        self._ends = ends
        return ends


def open_stream(config: DataConfig, split: Split) -> Source:
    """The log of a config; its held-out splits are Parquet files."""
    if split != "train":
        path = config.validation_path if split == "validation" else config.test_path
        if not path:
            raise MissingSplitError(
                f"a stream has no {split} split; set data.{split}_path to Parquet files"
            )
        from nestpipe.data.logs import find_example
        from nestpipe.data.parquet import open_parquet

        return open_parquet(replace(config, kind="parquet", path=path), split, find_example(config))
    broken = Broken(config.max_broken)
    return StreamingSource(open_log(config), config.stream, broken=broken, shards=config.shards)


def open_log(config: DataConfig) -> PartitionedLog:
    """The topic that the path names, or the folder."""
    if config.path.startswith("kafka://"):
        from nestpipe.data.logs import KafkaLog

        return KafkaLog(config)
    if is_uri(config.path):
        raise ConfigError(
            f"path is {config.path!r}, which cannot be followed; give a folder, or "
            "kafka://host:9092/topic"
        )
    from nestpipe.data.logs import FolderLog

    return FolderLog(config)
