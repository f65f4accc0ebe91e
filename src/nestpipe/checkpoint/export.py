"""Weights for other programs, and from them: keys with rows of each table, and dense weights.

An export is a folder: `export.json`, `dense.safetensors`, and for each table, here `items`:

- `safetensors`: `items.safetensors` with `keys` (K,), `weights` (K, D) and, if asked, `state`;
- `npy`: `items.keys.npy`, `items.weights.npy` and, if asked, `items.state.npy`;
- `parquet`: `items.parquet` with the columns `key`, `weights` and, if asked, `state`.

Keys ascend, and each comes once. Rows are moved part by part: of a table only its keys are held in
memory, whatever its size.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nestpipe.checkpoint.disk import (
    explained,
    make_folder,
    read_tensors,
    refuse_non_finite,
    sync_folder,
    write_tensors,
)
from nestpipe.checkpoint.folder import DENSE, Checkpoint
from nestpipe.checkpoint.merging import rows_in_part
from nestpipe.errors import CheckpointError, ConfigError, DataError

# Shapes: K keys of a table, N of one part, D weights of a row, S its state, W both

Format = Literal["safetensors", "npy", "parquet"]
ABOUT = "export.json"
Keys = NDArray[np.int64]
Rows = NDArray[np.float32]


def export(
    checkpoint: Checkpoint,
    folder: Path,
    form: Format = "safetensors",
    *,
    tables: Sequence[str] = (),
    state: bool = False,
    dense: bool = True,
) -> list[Path]:
    """Write weights of all tables, or of some; optimizer state only where it is asked for.

    The folder must not exist. Returns the files.
    """
    chosen = _chosen(checkpoint, tables)
    if folder.exists():
        raise CheckpointError(f"{str(folder)!r} exists already; name a new folder")
    with explained(f"to {str(folder)!r}"), _removed_on_failure(folder):
        make_folder(folder)
        written: list[Path] = []
        if dense:
            weights = {k: v for k, v in checkpoint.dense().items() if k.startswith("model.")}
            written.append(folder / DENSE)
            write_tensors(written[0], {k.removeprefix("model."): v for k, v in weights.items()})
        about: list[dict[str, Any]] = []
        for table in chosen:
            name, dim = str(table["name"]), int(table["dim"])
            with _sorted_rows(checkpoint, name, dim, folder, state=state) as (keys_K, columns):
                files, facts = _write_table(folder, table, keys_K, columns, form)
            written += files
            about.append(facts)
        written.append(_write_about(folder, checkpoint, form, about))
        sync_folder(folder)
    return written


@contextmanager
def _removed_on_failure(folder: Path) -> Generator[None]:
    """Half an export would be in the way of the next."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _chosen(checkpoint: Checkpoint, names: Sequence[str]) -> list[dict[str, Any]]:
    tables = {str(table["name"]): table for table in checkpoint.manifest.tables}
    for name in names:
        if name not in tables:
            raise ConfigError(f"there is no table {name!r}; the tables are {', '.join(tables)}")
    return [tables[name] for name in names or tables]


def _write_about(
    folder: Path, checkpoint: Checkpoint, form: Format, tables: list[dict[str, Any]]
) -> Path:
    manifest = checkpoint.manifest
    about = {
        "format": form,
        "step": manifest.step,
        "optimizer": manifest.optimizer,
        "tables": tables,
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return folder / ABOUT


# Out: all rows of a table in the order of their keys, in a file that is mapped into memory.


@contextmanager
def _sorted_rows(
    checkpoint: Checkpoint, table: str, dim: int, folder: Path, *, state: bool
) -> Generator[tuple[Keys, dict[str, Rows]]]:
    """Keys in ascending order, and the newest weights (and state) of each."""
    keys_K = _present_keys(checkpoint, table)
    with TemporaryFile(dir=folder) as weights_file, TemporaryFile(dir=folder) as state_file:
        columns = {"weights": _mapped(weights_file, len(keys_K), dim)}
        for keys, rows in checkpoint.rows(table):
            refuse_non_finite(rows, f"a row of {table}")
            if state and "state" not in columns and rows.shape[1] > dim:
                columns["state"] = _mapped(state_file, len(keys_K), rows.shape[1] - dim)
            present_N = torch.from_numpy(np.isin(keys.numpy(), keys_K))
            keys, rows = keys[present_N], rows[present_N]
            places_N = np.searchsorted(keys_K, keys.numpy())
            columns["weights"][places_N] = rows[:, :dim].numpy()
            if "state" in columns:
                columns["state"][places_N] = rows[:, dim:].numpy()
        yield keys_K, columns


def _present_keys(checkpoint: Checkpoint, table: str) -> Keys:
    """Keys that have a row, ascending: they were stored, and not erased since."""
    parts = [np.zeros(0, np.int64)]
    for change in checkpoint.changes(table):
        if change.rows is None:
            parts = [np.setdiff1d(np.concatenate(parts), change.keys.numpy())]
        else:
            parts.append(change.keys.numpy())
    return np.unique(np.concatenate(parts))


def _mapped(file: IO[bytes], count: int, width: int) -> Rows:
    if not count:
        return np.zeros((0, width), np.float32)
    # Reserved: to write into a hole of a full disk by memory would end the process.
    os.posix_fallocate(file.fileno(), 0, 4 * count * width)
    return np.memmap(cast("Any", file), np.float32, "r+", shape=(count, width))


def _write_table(
    folder: Path, table: dict[str, Any], keys_K: Keys, columns: dict[str, Rows], form: Format
) -> tuple[list[Path], dict[str, Any]]:
    """The files of a table, and what `export.json` says of it."""
    name = str(table["name"])
    if form == "parquet":
        files = [_write_parquet(folder / f"{name}.parquet", keys_K, columns)]
    elif form == "npy":
        files = _write_npy(folder, name, keys_K, columns)
    else:
        files = [folder / f"{name}.safetensors"]
        tensors = {"keys": torch.from_numpy(keys_K)}
        tensors |= {column: torch.from_numpy(values) for column, values in columns.items()}
        write_tensors(files[0], tensors, finite=False)
    kept = {key: table[key] for key in ("dtype", "features", "pooling") if key in table}
    facts = {"name": name, "dim": int(table["dim"]), "rows": len(keys_K), **kept}
    return files, {**facts, "files": [file.name for file in files]}


def _write_npy(folder: Path, name: str, keys_K: Keys, columns: dict[str, Rows]) -> list[Path]:
    files = [folder / f"{name}.keys.npy"]
    np.save(files[0], keys_K)
    for column, values in columns.items():
        files.append(folder / f"{name}.{column}.npy")
        form = np.lib.format
        about = {"descr": form.dtype_to_descr(values.dtype), "fortran_order": False}
        with files[-1].open("xb") as out:
            form.write_array_header_1_0(out, {**about, "shape": values.shape})
            for part in part_slices(len(keys_K), values.shape[1]):
                out.write(np.ascontiguousarray(values[part]).data)
    return files


def _write_parquet(file: Path, keys_K: Keys, columns: dict[str, Rows]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = [pa.field("key", pa.int64())]
    fields += [pa.field(n, pa.list_(pa.float32(), v.shape[1])) for n, v in columns.items()]
    schema = pa.schema(fields)
    width = sum(values.shape[1] for values in columns.values())
    with pq.ParquetWriter(file, schema) as writer:
        for part in part_slices(len(keys_K), width):
            arrays = [pa.array(keys_K[part])]
            for values in columns.values():
                flat = pa.array(np.ascontiguousarray(values[part]).reshape(-1))
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return file


def part_slices(count: int, width: int) -> Iterator[slice]:
    """Parts of so many rows of that width, each small beside memory."""
    most = rows_in_part(width)
    for begin in range(0, count, most):
        yield slice(begin, min(begin + most, count))


# In: what an export holds, or what another program wrote in one of these forms.


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a table."""

    keys_N: Tensor
    weights_ND: Tensor
    state_NS: Tensor | None = None


def exported_tables(folder: Path) -> dict[str, Format]:
    """Tables whose rows are in a folder, by name."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {str(folder)!r}; name one of exported weights")
    found: dict[str, Format] = {}
    for file in sorted(folder.iterdir()):
        if file.name.endswith(".keys.npy"):
            found[file.name.removesuffix(".keys.npy")] = "npy"
        elif file.suffix in (".safetensors", ".parquet") and file.name != DENSE:
            found[file.stem] = cast("Format", file.suffix[1:])
    if not found:
        raise DataError(
            f"{str(folder)!r} has no rows; it needs TABLE.parquet, TABLE.safetensors, or "
            "TABLE.keys.npy and TABLE.weights.npy"
        )
    return found


def exported_dense(folder: Path) -> dict[str, Tensor] | None:
    """The dense weights of a folder; None where it has none."""
    file = folder / DENSE
    return read_tensors(file, None) if file.exists() else None


def exported_rows(folder: Path, table: str, form: Format) -> Iterator[RowPart]:
    """The rows of a table part by part, as they are in its files; refuses what is no row."""
    read = {"npy": _read_npy, "parquet": _read_parquet, "safetensors": _read_safetensors}[form]
    for keys, weights, state in read(folder, table):
        yield RowPart(
            _keys(table, keys),
            _numbers(table, "weights", weights, len(keys)),
            None if state is None else _numbers(table, "state", state, len(keys)),
        )


Part = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]


def _read_npy(folder: Path, table: str) -> Iterator[Part]:
    arrays: dict[str, NDArray[Any]] = {}
    for column in ("keys", "weights", "state"):
        file = folder / f"{table}.{column}.npy"
        if file.exists() or column != "state":
            try:
                arrays[column] = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise DataError(f"{str(file)!r} cannot be read ({error}); export again") from None
    yield from _cut(table, arrays)


def _read_safetensors(folder: Path, table: str) -> Iterator[Part]:
    file = folder / f"{table}.safetensors"
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            _need(file, slices, "keys", "weights")
            shapes = {name: one.get_shape() for name, one in slices.items()}
            for part in part_slices(int(shapes["keys"][0]), int(shapes["weights"][-1])):
                state = slices["state"][part] if "state" in slices else None
                yield slices["keys"][part], slices["weights"][part], state
    except (SafetensorError, OSError) as error:
        raise DataError(f"{str(file)!r} cannot be read ({error}); export it again") from None


def _read_parquet(folder: Path, table: str) -> Iterator[Part]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = folder / f"{table}.parquet"
    try:
        opened = pq.ParquetFile(file)
        names = opened.schema_arrow.names
        _need(file, names, "key", "weights")
        chosen = ["key", "weights", *(["state"] if "state" in names else [])]
        for batch in opened.iter_batches(1 << 16, columns=chosen):
            keys = batch.column("key")
            if keys.null_count:
                raise DataError(f"{str(file)!r} has a null key; leave such rows out")
            state = _list_column(file, batch.column("state")) if "state" in names else None
            yield keys.to_numpy(), _list_column(file, batch.column("weights")), state
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{str(file)!r} cannot be read ({reason}); write it again") from None


def _list_column(file: Path, column: Any) -> NDArray[Any]:
    """Lists of one length as rows."""
    import pyarrow as pa

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(column.type) for is_kind in kinds):
        raise DataError(f"{str(file)!r} holds {column.type}; write weights as lists of floats")
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if column.null_count or not len(column) or len(flat) % len(column):
        raise DataError(f"{str(file)!r} has lists of different lengths; write a row of one width")
    return flat.reshape(len(column), -1)


def _need(file: Path, names: Any, *needed: str) -> None:
    for name in needed:
        if name not in names:
            raise DataError(f"{str(file)!r} has no {name!r}; it needs {' and '.join(needed)}")


def _cut(table: str, arrays: dict[str, NDArray[Any]]) -> Iterator[Part]:
    keys, weights, state = arrays["keys"], arrays["weights"], arrays.get("state")
    if len(keys) != len(weights) or (state is not None and len(state) != len(keys)):
        raise DataError(
            f"table {table!r} has {len(keys)} keys and {len(weights)} rows; give a row for each key"
        )
    for part in part_slices(len(keys), weights.shape[-1]):
        yield keys[part], weights[part], None if state is None else state[part]


def _keys(table: str, keys: NDArray[Any]) -> Tensor:
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise DataError(
            f"the keys of {table!r} are {keys.dtype} in {keys.ndim} dimensions; give int64 in 1"
        )
    if keys.dtype == np.uint64 and len(keys) and keys.max() > np.iinfo(np.int64).max:
        raise DataError(f"a key of {table!r} is {keys.max()}; keys are int64")
    found = np.ascontiguousarray(keys, np.int64).copy()
    unique, counts = np.unique(found, return_counts=True)
    if len(unique) != len(found):
        raise DataError(f"key {unique[counts.argmax()]} of {table!r} comes twice; give it once")
    return torch.from_numpy(found)


def _numbers(table: str, column: str, values: NDArray[Any], count: int) -> Tensor:
    if values.ndim != 2 or len(values) != count or values.dtype.kind != "f":
        raise DataError(
            f"the {column} of {table!r} are {values.dtype} of shape {values.shape}; give floats, a "
            "row for each key"
        )
    found = torch.from_numpy(np.ascontiguousarray(values, np.float32).copy())
    if not bool(torch.isfinite(found).all()):
        raise DataError(f"the {column} of {table!r} hold NaN or inf; leave such rows out")
    return found
