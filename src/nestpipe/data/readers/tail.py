"""A folder to which Parquet files are added: a log whose partitions are the files, by name.

A file is renamed into the folder when it is whole, and never changed. Files that were read may be
deleted. A partition's name says which file it is, how many rows it has and a hash of its end, so
that a cursor notices another file of the same name.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig
from nestpipe.data.readers.columns import ColumnLayout, choose, to_batch
from nestpipe.data.readers.parquet import PATTERNS, check, open_file, row_group
from nestpipe.data.readers.sequences import find_layout
from nestpipe.data.readers.text import Broken
from nestpipe.data.streaming import LogRange, Offsets, Polled
from nestpipe.data.windows import concat
from nestpipe.errors import DataError

TAIL = 1 << 16
"""Bytes at the end of a file that are hashed: a Parquet file says there what it holds."""

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
        self._layout = layout_of(config, self._example(config))

    @property
    def layout(self) -> ColumnLayout:
        return self._layout

    def _example(self, config: DataConfig) -> Path:
        if config.stream.schema:
            return Path(config.stream.schema)
        names = sorted(self._names())
        if not names:
            raise DataError(
                f"there are no Parquet files in {config.path!r} yet; add one, or name a file with "
                "the same columns in data.stream.schema"
            )
        return self._folder / names[0]

    def _names(self) -> Iterator[str]:
        """Files below the folder; those of other programs begin with `.` or `_`."""
        for pattern in PATTERNS:
            for path in self._folder.rglob(pattern):
                name = path.relative_to(self._folder)
                if not any(part.startswith((".", "_")) for part in name.parts):
                    yield name.as_posix()

    def poll(self, offsets: Offsets) -> Polled:
        """The rows of each file that follow its offset, in the order of names."""
        there = {found.name: found for found in map(self._segment, sorted(self._names())) if found}
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
            with path.open("rb") as file:
                file.seek(max(0, stat.st_size - TAIL))
                end = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; check the file") from None
        opened = open_file(path)
        check(opened.schema_arrow, self._layout, path)
        digest = blake2b(end + str(stat.st_size).encode(), digest_size=8).hexdigest()
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
        if known is None and found.name < latest:
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
            batches.append(to_batch(piece, self._layout, np.arange(begin, end), path, broken))
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


def layout_of(config: DataConfig, example: Path) -> ColumnLayout:
    """What the columns of a log are, by a Parquet file that has the same."""
    if not example.exists():
        raise DataError(f"there is no file {str(example)!r}; check data.stream.schema")
    schema = open_file(example).schema_arrow
    if find_layout(schema, config, "train", lambda names: np.empty(0, dtype=np.int64)) is not None:
        raise DataError(
            f"{example} has users' sequences, which are not read from a stream; use columns of "
            "keys with a label, or data.kind = 'parquet'"
        )
    layout = choose(schema, config.parquet, example)
    check(schema, layout, example)
    return layout
