"""Rows of several checkpoints put together: to write them anew, and to compare them.

Files hold ascending keys, in parts. So chains of any length are merged part by part, in memory that
does not grow with the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.checkpoint.disk import (
    explained,
    locked,
    make_folder,
    publish,
    remove_leftovers,
    write_tensors,
)
from nestpipe.checkpoint.folder import Checkpoint, flat, open_checkpoint, rows_file
from nestpipe.checkpoint.manifest import DENSE, FileEntry, Manifest, write_manifest
from nestpipe.errors import CheckpointError

# Shapes: K keys of a table, W weights and state of a row

PART_BYTES = 1 << 26
"""Rows of one file at most, so that loading needs little memory."""
RowBlock = tuple[Tensor, Tensor]
"""Keys, and a row for each."""


def rows_in_part(width: int) -> int:
    """Rows of so many numbers that fit a file."""
    return max(1, PART_BYTES // (8 + 4 * max(1, width)))


def merged_rows(checkpoint: Checkpoint, table: str, shard: int | None = None) -> RowBlock:
    """The newest row of each key of a table, keys ascending; of one shard or of all."""
    return _newest(list(checkpoint.rows(table, shard)))


def _newest(parts: Sequence[RowBlock]) -> RowBlock:
    """Every key once, ascending, with its row of the last part that has it."""
    if not parts:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
    if len(parts) == 1 and _ascends(parts[0][0]):
        return parts[0]
    keys = np.concatenate([keys.numpy() for keys, _ in parts])
    order = np.argsort(keys, kind="stable")
    last = np.append(keys[order][1:] != keys[order][:-1], True)[: len(keys)]
    chosen = torch.from_numpy(order[last])
    return torch.from_numpy(keys)[chosen], torch.cat([rows for _, rows in parts])[chosen]


def _ascends(keys_K: Tensor) -> bool:
    return bool((keys_K[1:] > keys_K[:-1]).all())


def row_streams(
    checkpoint: Checkpoint, table: str, shard: int | None = None
) -> list[Iterator[RowBlock]]:
    """A stream of rows for each shard of each checkpoint of a chain, the newest last."""
    found: list[Iterator[RowBlock]] = []
    for one in checkpoint.chain:
        alone = replace(one, parents=())
        shards = {e.shard for e in one.manifest.files.values() if e.table == table}
        found += [alone.rows(table, s) for s in sorted(shards) if shard in (None, s)]
    return found


class _Head:
    """What is left of the block of a stream that was read last."""

    def __init__(self, stream: Iterator[RowBlock]) -> None:
        self._stream = stream
        self._keys, self._rows = torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
        self._before: int | None = None

    def fill(self) -> bool:
        """Read on where nothing is left; False at the end."""
        while not len(self._keys):
            block = next(self._stream, None)
            if block is None:
                return False
            self._keys, self._rows = block
            if len(self._keys):
                self._check()
        return True

    def _check(self) -> None:
        first, before = int(self._keys[0]), self._before
        if not _ascends(self._keys) or (before is not None and first <= before):
            raise CheckpointError("keys of a file of rows are not in order; use another checkpoint")
        self._before = self.last

    @property
    def last(self) -> int:
        return int(self._keys[-1])

    def take(self, bound: int) -> RowBlock:
        """Rows of keys up to `bound`."""
        count = int(torch.searchsorted(self._keys, bound, right=True))
        taken = self._keys[:count], self._rows[:count]
        self._keys, self._rows = self._keys[count:], self._rows[count:]
        return taken


def merged_blocks(streams: Sequence[Iterator[RowBlock]]) -> Iterator[RowBlock]:
    """The same as `merged_rows`, block by block, of streams that ascend; the newest come last.

    Holds one block of each stream at a time.
    """
    heads = [_Head(stream) for stream in streams]
    while heads := [head for head in heads if head.fill()]:
        bound = min(head.last for head in heads)
        taken = [head.take(bound) for head in heads]
        yield _newest([part for part in taken if len(part[0])])


def in_parts(blocks: Iterator[RowBlock]) -> Iterator[RowBlock]:
    """The same rows, in blocks that fill a file each."""
    held: list[RowBlock] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(block[0])
        most = rows_in_part(block[1].shape[1])
        while count >= most:
            keys_K, rows_KW = torch.cat([k for k, _ in held]), torch.cat([r for _, r in held])
            yield keys_K[:most], rows_KW[:most]
            held, count = [(keys_K[most:], rows_KW[most:])], count - most
    if count:
        yield torch.cat([k for k, _ in held]), torch.cat([r for _, r in held])


def write_rows(
    folder: Path, table: str, shard: int, blocks: Iterator[RowBlock]
) -> dict[str, FileEntry]:
    """Files of a table's rows; keys ascend."""
    files: dict[str, FileEntry] = {}
    for part, (keys, rows) in enumerate(in_parts(blocks)):
        name = rows_file(table, shard, part)
        written = write_tensors(folder / name, {"keys": keys, "rows": rows})
        files[name] = FileEntry.of(written, table=table, shard=shard, rows=len(keys))
    return files


def compact(path: Path) -> Path:
    """Write an increment anew as a full checkpoint, in its place; a full one is left alone.

    The rows are those of the chain, shard by shard, and the manifest says what it said. Where
    other shards wrote the parents, all rows go into one.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.parents:
        return path
    partial = path.with_name(f".partial-{path.name}")
    alike = len({_spread(one.manifest) for one in checkpoint.chain}) == 1
    manifest = checkpoint.manifest if alike else replace(checkpoint.manifest, shards=1)
    with locked(path.parent), explained(f"the checkpoint {str(path)!r}"):
        remove_leftovers(path.parent)
        make_folder(partial)
        files = {DENSE: FileEntry.of(write_tensors(partial / DENSE, checkpoint.dense()))}
        for table in manifest.tables:
            name = str(table["name"])
            for shard in range(manifest.shards):
                streams = row_streams(checkpoint, name, shard if alike else None)
                files |= write_rows(partial, name, shard, merged_blocks(streams))
        write_manifest(partial, replace(manifest, files=files, parent=None))
        publish(partial, path)
    return path


def _spread(manifest: Manifest) -> tuple[object, ...]:
    """Which shard has which keys follows from this."""
    return manifest.shards, *(table.get("owner") for table in manifest.tables)


@dataclass(frozen=True, slots=True)
class Difference:
    """How two checkpoints differ."""

    settings: dict[str, tuple[object, object]]
    """By name; one that only one of them has is None in the other."""
    tensors: dict[str, float]
    """Dense tensors that differ, with the largest difference; nan where shapes differ."""
    rows: dict[str, TableDifference]

    @property
    def same_state(self) -> bool:
        """Whether all numbers are the same, bit for bit."""
        return not self.tensors and not any(table.differs for table in self.rows.values())


@dataclass(frozen=True, slots=True)
class TableDifference:
    """How a table differs between two checkpoints."""

    common: int
    """Keys that both have ..."""
    changed: int
    """... and of these the ones with another row."""
    only_first: int
    only_second: int

    @property
    def differs(self) -> bool:
        return bool(self.changed or self.only_first or self.only_second)


def difference(one: Checkpoint, other: Checkpoint) -> Difference:
    """Compare two checkpoints, also of different ranks."""
    ours, theirs = one.dense(), other.dense()
    tensors = {
        name: _largest(ours.get(name), theirs.get(name))
        for name in sorted({*ours, *theirs})
        if not _equal(ours.get(name), theirs.get(name))
    }
    names = sorted({str(t["name"]) for c in (one, other) for t in c.manifest.tables})
    rows = {
        name: _compare_tables(merged_rows(one, name), merged_rows(other, name)) for name in names
    }
    return Difference(_settings(one.manifest, other.manifest), tensors, rows)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _largest(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return float("nan")
    return float((one.double() - other.double()).abs().max())


def _compare_tables(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> TableDifference:
    (ours, our_rows), (theirs, their_rows) = one, other
    common, at_one, at_other = np.intersect1d(
        ours.numpy(), theirs.numpy(), assume_unique=True, return_indices=True
    )
    changed = len(common)
    if len(common) and our_rows.shape[1] == their_rows.shape[1]:
        unequal = our_rows.numpy()[at_one] != their_rows.numpy()[at_other]
        changed = int(unequal.any(axis=1).sum())
    return TableDifference(len(common), changed, len(ours) - len(common), len(theirs) - len(common))


def _settings(one: Manifest, other: Manifest) -> dict[str, tuple[object, object]]:
    ours, theirs = flat(one.config), flat(other.config)
    return {
        name: (ours.get(name), theirs.get(name))
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    }
