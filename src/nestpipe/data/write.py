"""The made-up world as Parquet files, for programs that want files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.batch import Batch
from nestpipe.data.config import SyntheticConfig
from nestpipe.data.source import DENSE, LABEL, Column
from nestpipe.data.synthetic import columns, make
from nestpipe.errors import DataError

PIECE = 65_536
"""Samples made, and written as one row group, at a time."""


def num_pieces(samples: int, files: int) -> int:
    """How often `write` reports progress."""
    return sum(-(-(end - begin) // PIECE) for begin, end in _ranges(samples, files))


def write(
    folder: Path,
    world: SyntheticConfig,
    *,
    files: int,
    force: bool,
    progress: Callable[[], object] = lambda: None,
) -> list[Path]:
    """Write the train split; files get their names only when all of them are complete."""
    targets = [folder / f"part-{i:05d}.parquet" for i in range(files)]
    old = _old_files(folder, force)
    drafts = [target.with_name(f".{target.name}.tmp") for target in targets]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for draft, (begin, end) in zip(drafts, _ranges(world.samples, files), strict=True):
            _write_file(draft, world, begin, end, progress)
        for file in old:
            file.unlink()
        for draft, target in zip(drafts, targets, strict=True):
            draft.rename(target)
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise DataError(f"cannot write {folder}: {reason}; choose another folder") from None
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return targets


def _old_files(folder: Path, force: bool) -> list[Path]:
    """Files of an earlier run, which may be replaced; nobody else's are."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder")
    old = sorted(folder.glob("part-*.parquet"))
    others = sorted(set(folder.rglob("*.parquet")) - set(old))
    if others:
        raise DataError(f"{folder} already holds {others[0].name}; name another folder")
    if old and not force:
        raise DataError(
            f"{folder} already holds {old[0].name}; name another folder, or use --force"
        )
    return old


def _ranges(samples: int, files: int) -> list[tuple[int, int]]:
    cuts = [samples * i // files for i in range(files + 1)]
    return list(pairwise(cuts))


def _write_file(
    path: Path, world: SyntheticConfig, begin: int, end: int, progress: Callable[[], object]
) -> None:
    take, described = make(world), columns(world)
    schema = to_arrow(take(np.arange(0, dtype=np.int64)), described).schema
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(begin, end, PIECE):
            numbers = np.arange(first, min(first + PIECE, end), dtype=np.int64)
            writer.write_table(to_arrow(take(numbers), described))
            progress()


def to_arrow(batch: Batch, described: tuple[Column, ...]) -> pa.Table:
    """A batch as columns of a table: dense features by their fields, keys as numbers or lists."""
    arrays: dict[str, pa.Array] = {}
    for column in described:
        if column.kind == "features":
            for i, name in enumerate(column.fields):
                arrays[name] = pa.array(batch.dense[DENSE][:, i].numpy())
        elif column.kind == "keys":
            keys = batch.sparse[column.name]
            values = pa.array(keys.values.numpy())
            offsets = pa.array(keys.offsets.numpy())
            arrays[column.name] = (
                values if column.single else pa.LargeListArray.from_arrays(offsets, values)
            )
        else:
            arrays[column.name] = pa.array(batch.dense[column.name].numpy())
    assert LABEL not in arrays or arrays[LABEL].type == pa.float32(), "labels are float32"
    return pa.table(arrays)
