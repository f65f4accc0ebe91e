"""What checkpoints hold, put together from their files: to compare, to export, to compact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.checkpoint.disk import (
    explained,
    locked,
    make_folder,
    publish,
    remove_leftovers,
    sync_folder,
    write_tensors,
)
from nestpipe.checkpoint.folder import Checkpoint, open_checkpoint, rows_file
from nestpipe.checkpoint.manifest import DENSE, FileEntry, Json, Manifest, write_manifest
from nestpipe.errors import CheckpointError

# Shapes: K keys of a table, W weights and state of a row

PART_BYTES = 1 << 26
"""Rows of one file at most, so that loading needs little memory."""


def merged_rows(
    checkpoint: Checkpoint, table: str, shard: int | None = None
) -> tuple[Tensor, Tensor]:
    """The newest row of each key of a table, keys ascending; of one shard or of all."""
    parts = list(checkpoint.rows(table, shard))
    if not parts:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
    keys = np.concatenate([keys.numpy() for keys, _ in parts])
    order = np.argsort(keys, kind="stable")
    last = np.append(keys[order][1:] != keys[order][:-1], True)
    chosen = torch.from_numpy(order[last])
    return torch.from_numpy(keys)[chosen], torch.cat([rows for _, rows in parts])[chosen]


def row_parts(keys_K: Tensor, rows_KW: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and rows of one table, cut into parts that fit a file."""
    most = max(1, PART_BYTES // (8 + 4 * max(1, rows_KW.shape[1])))
    for begin in range(0, len(keys_K), most):
        yield keys_K[begin : begin + most], rows_KW[begin : begin + most]


def compact(path: Path) -> Path:
    """Write an increment anew as a full checkpoint, in its place; a full one is left alone.

    The rows are those of the chain, shard by shard, and the manifest says what it said.
    """
    checkpoint = open_checkpoint(path)
    if not checkpoint.parents:
        return path
    partial = path.with_name(f".partial-{path.name}")
    with locked(path.parent), explained(f"the checkpoint {str(path)!r}"):
        remove_leftovers(path.parent)
        make_folder(partial)
        files = {DENSE: FileEntry.of(write_tensors(partial / DENSE, checkpoint.dense()))}
        for table in checkpoint.manifest.tables:
            files |= _compact_table(partial, checkpoint, str(table["name"]))
        write_manifest(partial, replace(checkpoint.manifest, files=files, parent=None))
        publish(partial, path)
    return path


def _compact_table(partial: Path, checkpoint: Checkpoint, table: str) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    of_table = [e for one in checkpoint.chain for e in one.manifest.files.values()]
    for shard in sorted({entry.shard for entry in of_table if entry.table == table}):
        merged = merged_rows(checkpoint, table, shard)
        for part, (keys, rows) in enumerate(row_parts(*merged)):
            name = rows_file(table, shard, part)
            written = write_tensors(partial / name, {"keys": keys, "rows": rows})
            files[name] = FileEntry.of(written, table=table, shard=shard, rows=len(keys))
    return files


def export(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """Weights for other programs: `dense.safetensors`, and a file of keys and weights per table.

    Optimizer state stays behind. The folder must not exist.
    """
    if folder.exists():
        raise CheckpointError(f"{str(folder)!r} exists already; name a new folder")
    with explained(f"to {str(folder)!r}"):
        make_folder(folder)
        weights = {k: v for k, v in checkpoint.dense().items() if k.startswith("model.")}
        written = [folder / DENSE]
        write_tensors(written[0], {k.removeprefix("model."): v for k, v in weights.items()})
        for table in checkpoint.manifest.tables:
            keys_K, rows_KW = merged_rows(checkpoint, table["name"])
            written.append(folder / f"{table['name']}.safetensors")
            weights_KD = rows_KW[:, : int(table["dim"])].contiguous()
            write_tensors(written[-1], {"keys": keys_K, "weights": weights_KD})
        sync_folder(folder)
    return written


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


def flat(values: Mapping[str, Any], where: str = "") -> Json:
    """A config as one level of `section.key`."""
    found: Json = {}
    for key, value in values.items():
        name = f"{where}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found
