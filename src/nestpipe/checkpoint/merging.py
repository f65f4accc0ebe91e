"""Rows of several checkpoints put together: to write them anew, and to compare them.

Files hold ascending keys, in parts. So chains of any length are merged part by part, in memory that
does not grow with the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.checkpoint.disk import (
    explained,
    locked,
    make_folder,
    publish,
    remove_leftovers,
    write_tensors,
)
from nestpipe.checkpoint.folder import (
    DENSE,
    Checkpoint,
    FileEntry,
    Manifest,
    RowChange,
    counted,
    flat,
    open_checkpoint,
    readable,
    rows_file,
    write_manifest,
)
from nestpipe.errors import CheckpointError

# Shapes: K keys of a table, W weights and state of a row

PART_BYTES = 1 << 26
"""Rows of one file at most, so that loading needs little memory."""


def rows_in_part(width: int) -> int:
    """Rows of so many numbers that fit a file, their uses too."""
    return max(1, PART_BYTES // (16 + 4 * max(1, width)))


def merged_rows(
    checkpoint: Checkpoint, table: str, shard: int | None = None
) -> tuple[Tensor, Tensor]:
    """The newest row of each key of a table, keys ascending; of one shard or of all."""
    merged = _merged(checkpoint, table, shard)
    return merged.keys, rows_of(merged)


def _merged(checkpoint: Checkpoint, table: str, shard: int | None = None) -> RowChange:
    noted = has_uses(checkpoint.manifest, table)
    changes = checkpoint.changes(table, shard)
    return _newest([_with_uses(change, noted=noted) for change in changes])


def rows_of(change: RowChange) -> Tensor:
    """Rows of a change that stores some."""
    assert change.rows is not None, "these rows were erased"
    return change.rows


def has_uses(manifest: Manifest, table: str) -> bool:
    """Whether a table has a row policy, so that uses of its keys are kept."""
    return table in manifest.lifecycle.get("peaks", {})


def _with_uses(change: RowChange, *, noted: bool) -> RowChange:
    """With uses or without, as the others; those written without any were used then, once."""
    if change.rows is None or noted == (change.uses is not None):
        return change
    return replace(change, uses=uses_of(change) if noted else None)


def uses_of(change: RowChange) -> Tensor:
    """(K, 2) uses of stored rows; where none were written, each was used at that step, once."""
    if change.uses is not None:
        return change.uses
    return torch.tensor([[change.step, 1]], dtype=torch.int32).repeat(len(change.keys), 1)


def _newest(parts: Sequence[RowChange]) -> RowChange:
    """Every key once, ascending, with its row of the last part that has it; erased ones leave."""
    stored = [part for part in parts if part.rows is not None]
    if len(parts) == len(stored) == 1 and _ascends(parts[0].keys):
        return parts[0]
    if not stored:
        return RowChange(torch.empty(0, dtype=torch.int64), torch.empty(0, 0), None, 0)
    chosen = torch.from_numpy(newest_places(parts))
    uses = [part.uses for part in stored if part.uses is not None]
    return RowChange(
        torch.cat([part.keys for part in stored])[chosen],
        torch.cat([rows_of(part) for part in stored])[chosen],
        torch.cat(uses)[chosen] if uses else None,
        stored[-1].step,
    )


def newest_places(parts: Sequence[RowChange]) -> NDArray[np.int64]:
    """Of all rows that these changes store, one behind the other: where each key's newest is.

    In ascending order of the key; keys that were erased since have none.
    """
    keys = np.concatenate([part.keys.numpy() for part in parts])
    stored = np.concatenate([np.full(len(part.keys), part.rows is not None) for part in parts])
    places = np.cumsum(stored) - 1
    order = np.argsort(keys, kind="stable")
    last = np.append(keys[order][1:] != keys[order][:-1], True)[: len(keys)]
    newest = order[last]
    return places[newest[stored[newest]]]


def _ascends(keys_K: Tensor) -> bool:
    return bool((keys_K[1:] > keys_K[:-1]).all())


def row_streams(
    checkpoint: Checkpoint, table: str, shard: int | None = None, *, noted: bool | None = None
) -> list[Iterator[RowChange]]:
    """Streams of changes for each shard of each checkpoint of a chain, the newest last.

    `noted`: with uses or without; as the checkpoint has them, unless told.
    """
    found: list[Iterator[RowChange]] = []
    noted = has_uses(checkpoint.manifest, table) if noted is None else noted
    for one in checkpoint.chain:
        alone = replace(one, parents=())
        shards = {e.shard for e in one.manifest.files.values() if e.table == table}
        for kind in ("gone", "rows"):
            for of in (s for s in sorted(shards) if shard in (None, s)):
                stream = alone.changes(table, of, kind)
                found.append(_with_uses(change, noted=bool(noted)) for change in stream)
    return found


class _Head:
    """What is left of the block of a stream that was read last."""

    def __init__(self, stream: Iterator[RowChange]) -> None:
        self._stream = stream
        self._left: RowChange | None = None
        self._before: int | None = None

    def fill(self) -> bool:
        """Read on where nothing is left; False at the end."""
        while self._left is None or not len(self._left.keys):
            self._left = next(self._stream, None)
            if self._left is None:
                return False
            if len(self._left.keys):
                self._check(self._left.keys)
        return True

    def _check(self, keys_K: Tensor) -> None:
        first, before = int(keys_K[0]), self._before
        if not _ascends(keys_K) or (before is not None and first <= before):
            raise CheckpointError("keys of a file of rows are not in order; use another checkpoint")
        self._before = self.last

    @property
    def last(self) -> int:
        assert self._left is not None
        return int(self._left.keys[-1])

    def take(self, bound: int) -> RowChange:
        """Rows of keys up to `bound`."""
        assert self._left is not None
        count = int(torch.searchsorted(self._left.keys, bound, right=True))
        taken = cut(self._left, slice(None, count))
        self._left = cut(self._left, slice(count, None))
        return taken


def cut(change: RowChange, chosen: slice | Tensor) -> RowChange:
    """Some rows of a change."""
    rows, uses = change.rows, change.uses
    return replace(
        change,
        keys=change.keys[chosen],
        rows=None if rows is None else rows[chosen],
        uses=None if uses is None else uses[chosen],
    )


def merged_blocks(streams: Sequence[Iterator[RowChange]]) -> Iterator[RowChange]:
    """The same as `merged_rows`, block by block, of streams that ascend; the newest come last.

    Holds one block of each stream at a time.
    """
    heads = [_Head(stream) for stream in streams]
    while heads := [head for head in heads if head.fill()]:
        bound = min(head.last for head in heads)
        taken = [head.take(bound) for head in heads]
        merged = _newest([part for part in taken if len(part.keys)])
        if len(merged.keys):
            yield merged


def in_parts(blocks: Iterator[RowChange]) -> Iterator[RowChange]:
    """The same rows, in blocks that fill a file each."""
    held: list[RowChange] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(block.keys)
        most = rows_in_part(rows_of(block).shape[1])
        while count >= most:
            whole = _joined(held)
            yield cut(whole, slice(None, most))
            held, count = [cut(whole, slice(most, None))], count - most
    if count:
        yield _joined(held)


def _joined(blocks: Sequence[RowChange]) -> RowChange:
    if len(blocks) == 1:
        return blocks[0]
    uses = [block.uses for block in blocks if block.uses is not None]
    return replace(
        blocks[0],
        keys=torch.cat([block.keys for block in blocks]),
        rows=torch.cat([rows_of(block) for block in blocks]),
        uses=torch.cat(uses) if uses else None,
    )


def write_rows(
    folder: Path, table: str, shard: int, blocks: Iterator[RowChange]
) -> dict[str, FileEntry]:
    """Files of a table's rows; keys ascend."""
    files: dict[str, FileEntry] = {}
    for part, block in enumerate(in_parts(blocks)):
        name = rows_file(table, shard, part)
        tensors = {"keys": block.keys, "rows": rows_of(block)}
        tensors |= {} if block.uses is None else {"uses": block.uses}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        written = write_tensors(folder / name, tensors)
        files[name] = FileEntry.of(written, table=table, shard=shard, rows=len(block.keys))
    return files


def write_keys(
    folder: Path, table: str, shard: int, kind: str, tensors: Mapping[str, Tensor]
) -> dict[str, FileEntry]:
    """Files of keys without rows: those that are `gone`, or `waiting` with their uses."""
    files: dict[str, FileEntry] = {}
    most = PART_BYTES // 16
    for part, begin in enumerate(range(0, len(tensors["keys"]), most)):
        some = {name: of[begin : begin + most].contiguous() for name, of in tensors.items()}
        name = rows_file(table, shard, part, kind)
        written = write_tensors(folder / name, some)
        files[name] = FileEntry.of(written, table=table, shard=shard, rows=len(some["keys"]))
    return files


def merged_waiting(
    checkpoint: Checkpoint, table: str, shard: int | None = None
) -> dict[str, Tensor]:
    """`keys` that wait for a row, ascending, and their `uses`."""
    nothing = (torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32))
    parts = [nothing, *checkpoint.waiting(table, shard)]
    keys, order = torch.sort(torch.cat([keys for keys, _ in parts]))
    return {"keys": keys, "uses": torch.cat([uses for _, uses in parts])[order]}


def compact(path: Path) -> Path:
    """Write an increment anew as a full checkpoint, in its place; a full one is left alone.

    The rows are those of the chain, shard by shard, and the manifest says what it said. Where
    other shards wrote the parents, all rows go into one. Another manifest has another hash, so a
    checkpoint that others go on from is refused.
    """
    if not open_checkpoint(path).parents:
        return path
    with locked(path.parent), explained(f"the checkpoint {str(path)!r}"):
        checkpoint = open_checkpoint(path)
        _refuse_parent(checkpoint)
        partial = path.with_name(f".partial-{path.name}")
        alike = len({_spread(one.manifest) for one in checkpoint.chain}) == 1
        manifest = checkpoint.manifest if alike else replace(checkpoint.manifest, shards=1)
        remove_leftovers(path.parent)
        make_folder(partial)
        files = {DENSE: FileEntry.of(write_tensors(partial / DENSE, checkpoint.dense()))}
        for table in manifest.tables:
            name = str(table["name"])
            for shard in range(manifest.shards):
                of = shard if alike else None
                streams = row_streams(checkpoint, name, of)
                files |= write_rows(partial, name, shard, merged_blocks(streams))
                waiting = merged_waiting(checkpoint, name, of)
                files |= write_keys(partial, name, shard, "waiting", waiting)
        _refuse_lost_rows(checkpoint, counted(manifest.tables, files))
        write_manifest(partial, replace(manifest, files=files, parent=None))
        publish(partial, path)
    return path


def _refuse_parent(checkpoint: Checkpoint) -> None:
    for one in reversed(readable(checkpoint.path.parent)):
        if checkpoint.name in [parent.name for parent in one.parents]:
            raise CheckpointError(
                f"{str(checkpoint.path)!r} cannot be made full, as {one.name} goes on from it; "
                f"compact {one.name} instead"
            )


def _refuse_lost_rows(checkpoint: Checkpoint, tables: Sequence[Mapping[str, object]]) -> None:
    """What is merged must have the rows that the increment says there are."""
    for said, found in zip(checkpoint.manifest.tables, tables, strict=True):
        if "rows" in said and said["rows"] != found["rows"]:
            raise CheckpointError(
                f"{str(checkpoint.path)!r} says that {said['name']} has {said['rows']} rows, but "
                f"its files add up to {found['rows']}; use another checkpoint"
            )


def _spread(manifest: Manifest) -> tuple[object, ...]:
    """Which shard has which keys follows from this."""
    return manifest.shards, *(
        (table["name"], table.get("owner"), table.get("number")) for table in manifest.tables
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """How two checkpoints differ."""

    settings: dict[str, tuple[object, object]]
    """By name; one that only one of them has is None in the other."""
    tensors: dict[str, float | str]
    """Dense tensors that differ, with the largest difference, or why there is none."""
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
    other_uses: int = 0
    """Keys whose last use or count differs, and those that wait for a row in one of them only."""

    @property
    def differs(self) -> bool:
        return bool(self.changed or self.only_first or self.only_second or self.other_uses)


def difference(one: Checkpoint, other: Checkpoint) -> Difference:
    """Compare two checkpoints, also of different ranks."""
    ours, theirs = one.dense(), other.dense()
    tensors = {
        name: _largest(ours.get(name), theirs.get(name))
        for name in sorted({*ours, *theirs})
        if not _equal(ours.get(name), theirs.get(name))
    }
    names = sorted({str(t["name"]) for c in (one, other) for t in c.manifest.tables})
    rows = {name: _compare_table(one, other, name) for name in names}
    return Difference(_settings(one.manifest, other.manifest), tensors, rows)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _largest(one: Tensor | None, other: Tensor | None) -> float | str:
    if one is None or other is None:
        return "only in the second" if one is None else "only in the first"
    if one.shape != other.shape:
        return f"of shape {tuple(one.shape)} and {tuple(other.shape)}"
    return float((one.double() - other.double()).abs().max())


def _compare_table(one: Checkpoint, other: Checkpoint, name: str) -> TableDifference:
    ours, theirs = _merged(one, name), _merged(other, name)
    found = _compare_rows((ours.keys, rows_of(ours)), (theirs.keys, rows_of(theirs)))
    waits = [merged_waiting(checkpoint, name) for checkpoint in (one, other)]
    other_uses = _other_uses((ours.keys, ours.uses), (theirs.keys, theirs.uses))
    alone, waiting = [(of["keys"], of["uses"]) for of in waits]
    common = len(np.intersect1d(alone[0].numpy(), waiting[0].numpy(), assume_unique=True))
    other_uses += _other_uses(alone, waiting) + len(alone[0]) + len(waiting[0]) - 2 * common
    return replace(found, other_uses=other_uses)


def _other_uses(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> int:
    """Keys of both that have other uses; where only one of them keeps uses, all keys of both."""
    (ours, our_uses), (theirs, their_uses) = one, other
    common, at_one, at_other = np.intersect1d(
        ours.numpy(), theirs.numpy(), assume_unique=True, return_indices=True
    )
    if our_uses is None or their_uses is None:
        return 0 if our_uses is their_uses else len(common)
    return int((our_uses.numpy()[at_one] != their_uses.numpy()[at_other]).any(axis=1).sum())


def _compare_rows(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> TableDifference:
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
