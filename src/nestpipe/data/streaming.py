"""A log without an end as a source: partitions with offsets, read on from where training stands.

Rank 0 looks what is there and decides which ranges of which partitions the next global batches
are. It tells all ranks, and each reads its contiguous part of them. The ranges that were trained
are the run's cursor: the offset of every partition after the last trained sample. A checkpoint
keeps it, so a restart goes on there, with any number of ranks: nothing is lost, nothing comes
twice. Batches are a function of the ranges alone, so every plan has the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, Split, StreamConfig
from nestpipe.data.inputs import is_uri
from nestpipe.data.order import Share
from nestpipe.data.shards import concat
from nestpipe.data.source import Column, Source, empty_batch
from nestpipe.data.text import Broken
from nestpipe.errors import ConfigError, DataError, MissingSplitError, NestpipeError

if TYPE_CHECKING:
    from nestpipe.data.parquet import ColumnLayout

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
    """Partitions that were read to their end and are no more: their offsets may be forgotten."""
    begins: Offsets = field(default_factory=dict[str, int])
    """Offsets that the cursor keeps from now on, also where nothing is read yet."""


class PartitionedLog(Protocol):
    """Partitions that grow at their end; a sample keeps its partition and its offset."""

    @property
    def layout(self) -> ColumnLayout:
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
    """The ranges of each of the next global batches: at most so many, and only whole ones."""
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


class StreamingSource:
    """The samples of a log, in batches that `decide` has chosen; all ranks call it together."""

    def __init__(
        self, log: PartitionedLog, stream: StreamConfig, *, broken: Broken | None = None
    ) -> None:
        self.log = log
        self._stream = stream
        self._broken = broken or Broken()
        self._cursor: dict[str, int] = {}
        self._decided: list[list[LogRange]] = []
        self._ends: Offsets | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.log.layout.columns

    @property
    def num_samples(self) -> None:
        """Nobody knows what is still to come."""

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
        """This rank's part of each batch that was decided, in the order of the log.

        Neither seed nor epoch change it, and what was decided begins where training stands.
        """
        share = Share(global_batch=global_batch, rank=rank, ranks=ranks)
        return (self._part(ranges, share) for ranges in self._decided)

    def _part(self, ranges: Sequence[LogRange], share: Share) -> Batch:
        low, high = share.part(sum(part.size for part in ranges))
        read = [self.log.read(part, self._broken) for part in cut(ranges, low, high)]
        return concat(read) if read else self.empty()

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
        self._decided, self._cursor = [], dict(cursor)
        while True:
            offer = self._offer(global_batch, most, began) if rank == 0 else None
            told = cast("list[list[Any]]", gather([stop_wanted(), offer]))
            first: dict[str, Any] = told[0][1]
            if any(wanted for wanted, _ in told):
                return "stopped"
            if first["refused"]:
                raise DataError(first["refused"])
            if first["batches"]:
                for partition in first["gone"]:
                    self._cursor.pop(partition, None)
                self._cursor |= first["begins"]
                self._decided = [[LogRange(*part) for part in of] for of in first["batches"]]
                return "decided"
            if first["idle"]:
                return "idle"

    def _offer(self, global_batch: int, most: int, began: float) -> dict[str, Any]:
        """What rank 0 tells the others; it waits a little where there is nothing yet."""
        try:
            polled = self._poll()
        except NestpipeError as error:
            return {"refused": str(error)}
        chosen = choose_ranges(polled.ready, global_batch, most, in_turn=self.log.in_turn)
        idle = self._ends is not None or time.monotonic() - began >= self._stream.idle_s
        if not chosen and not idle:
            time.sleep(self._stream.poll_s)
        batches = [[[p.partition, p.begin, p.end] for p in ranges] for ranges in chosen]
        told = {"gone": list(polled.gone), "begins": dict(polled.begins), "idle": idle}
        return {"refused": "", "batches": batches, **told}

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
        return len(self._decided)

    def cursor_after(self, batches: int) -> dict[str, int]:
        """Where the log goes on once so many of the decided batches were trained."""
        cursor = dict(self._cursor)
        for ranges in self._decided[:batches]:
            cursor |= {part.partition: part.end for part in ranges}
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
        from nestpipe.data.parquet import open_parquet

        return open_parquet(replace(config, kind="parquet", path=path), split)
    return StreamingSource(open_log(config), config.stream, broken=Broken(config.max_broken))


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
