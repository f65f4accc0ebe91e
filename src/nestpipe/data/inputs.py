"""What readers share: the files of a path, the rows of a split, Arrow columns as arrays.

Files may lie in object stores and other file systems, by URI: Arrow's own, or any that fsspec
knows. Lists of 64-bit numbers in Parquet files are decoded by native code, where they are stored in
the usual way: Arrow, its plain twin, spends most of its time on them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pyarrow import fs as arrow_fs
from torch import Tensor

from nestpipe.data.config import DataConfig, Split
from nestpipe.data.order import text_keys
from nestpipe.data.source import MISSING, tensor
from nestpipe.errors import ConfigError, DataError, MissingSplitError
from nestpipe.jagged import Jagged
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.library import library, native_wanted
from nestpipe.kernels.take import WORD


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a file system that is not this machine's own."""

    uri: str
    path: str
    """Within its file system."""
    modified_ns: int
    num_bytes: int
    filesystem: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.uri

    @property
    def parent(self) -> str:
        return self.uri.rpartition("/")[0]


DataFile = Path | RemoteFile


def is_uri(path: str | Path) -> bool:
    """Whether a path names its file system, as `s3://bucket/clicks`."""
    return "://" in str(path)


def modified_ns(file: DataFile) -> int:
    """When a file was last written."""
    return file.modified_ns if isinstance(file, RemoteFile) else file.stat().st_mtime_ns


END_BYTES = 1 << 16
"""Of a file that are hashed: a Parquet file says at its end what it holds."""


def digest_of(file: DataFile) -> bytes:
    """Tells files of other sizes or ends apart, far ones by size alone; names do not count."""
    if isinstance(file, RemoteFile):
        return blake2b(str(file.num_bytes).encode(), digest_size=8).digest()
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        opened.seek(max(0, size - END_BYTES))
        return blake2b(opened.read() + str(size).encode(), digest_size=8).digest()


def find_remote_files(
    uri: str, patterns: Sequence[str], what: str, key: str = "data.path"
) -> list[RemoteFile]:
    """The file itself, or those below the folder that fit a pattern, sorted by name.

    As on disk, names that begin with `.` or `_` are no data.
    """
    filesystem, top = open_filesystem(uri, key)
    try:
        (about,) = filesystem.get_file_info([top])
        if about.type == arrow_fs.FileType.File:
            return [_remote(uri, about, filesystem)]
        if about.type == arrow_fs.FileType.NotFound:
            raise DataError(f"there is no file or folder {uri!r}; check {key}")
        found = filesystem.get_file_info(arrow_fs.FileSelector(top, recursive=True))
    except DataError:
        raise
    except Exception as error:  # stores have exceptions of their own
        raise _unreachable(uri, error, key) from error
    files = [
        _remote(f"{uri.rstrip('/')}/{below}", info, filesystem)
        for info in found
        for below in [info.path[len(top) :].strip("/")]
        if info.type == arrow_fs.FileType.File
        and any(fnmatch(info.base_name, pattern) for pattern in patterns)
        and not any(part.startswith((".", "_")) for part in below.split("/"))
    ]
    if not files:
        raise DataError(f"there are no {what} in {uri!r}; check {key} and data.kind")
    return sorted(files, key=lambda file: file.path)


def open_filesystem(uri: str, key: str = "data.path") -> tuple[Any, str]:
    """The file system of a URI, and the path within it."""
    try:
        return arrow_fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass  # none of Arrow's own
    except OSError as error:  # S3 is asked for the region of a bucket
        raise _unreachable(uri, error, key) from None
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"reading {uri!r} needs fsspec; run pip install 'nestpipe[remote]'"
        ) from None
    try:
        found, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"cannot open {uri!r}: {error}; check {key}") from None
    except Exception as error:  # what a store says of credentials that it lacks, for example
        raise _unreachable(uri, error, key) from error
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(found)), path


def _unreachable(uri: str, error: Exception, key: str) -> DataError:
    return DataError(
        f"cannot read {uri!r} ({reason_of(error)}); check {key}, the connection and credentials"
    )


def reason_of(error: Exception) -> str:
    """What a file system says, on one line."""
    said = error.strerror if isinstance(error, OSError) else None
    lines = (said or str(error)).splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def failures(file: DataFile) -> tuple[type[Exception], ...]:
    """What reading may raise: stores on the network have exceptions of their own."""
    if isinstance(file, RemoteFile):
        return (Exception,)
    return pa.ArrowException, OSError, ValueError  # the last for names that are no text


def _remote(uri: str, info: Any, filesystem: Any) -> RemoteFile:
    return RemoteFile(uri, info.path, info.mtime_ns or 0, info.size or 0, filesystem)


def find_files(
    path: str | Path, patterns: Sequence[str], what: str, key: str = "data.path"
) -> list[Path]:
    """The file itself, or those below the folder that fit a pattern, sorted by name.

    Names and folders that begin with `.` or `_` are not data: other programs keep markers and
    half-written files there.
    """
    if is_uri(path):
        raise DataError(f"{str(path)!r} is a URI, which only Parquet is read from; copy the {what}")
    top = Path(path)
    if top.is_file():
        return [top]
    if not top.exists():
        raise DataError(f"there is no file or folder {str(path)!r}; check {key}")
    found = {
        file
        for pattern in patterns
        for file in top.rglob(pattern)
        if file.is_file()
        and not any(part.startswith((".", "_")) for part in file.relative_to(top).parts)
    }
    if not found:
        raise DataError(f"there are no {what} in {str(path)!r}; check {key} and data.kind")
    return sorted(found)


# Splits of data sets that come without one: other paths, or every N-th row.


_PLACE: dict[Split, int] = {"test": 1, "validation": 2}
"""Of every `test_every` rows of a file the last is for test, the one before for validation."""


def split_path(config: DataConfig, split: Split) -> tuple[str, int]:
    """The path of a split, and `test_every` where rows are to be picked from it (0: all)."""
    paths: dict[Split, str] = {"test": config.test_path, "validation": config.validation_path}
    if config.test_every:
        return config.path, config.test_every
    if split == "train":
        return config.path, 0
    if not paths[split]:
        raise MissingSplitError(
            f"there is no {split} split; set data.{split}_path or data.test_every"
        )
    return paths[split], 0


def keeps(rows: NDArray[np.int64], split: Split, every: int) -> NDArray[np.bool_]:
    """Which rows of a file, numbered from 0, belong to a split."""
    if not every:
        return np.ones(len(rows), dtype=bool)
    place = every - rows % every
    return place > 2 if split == "train" else place == _PLACE[split]


def num_kept(begin: int, end: int, split: Split, every: int) -> int:
    """How many of the rows [begin, end) `keeps` keeps."""
    if not every:
        return end - begin

    def below(row: int) -> int:
        whole, rest = divmod(row, every)
        if split == "train":
            return whole * (every - 2) + min(rest, every - 2)
        return whole + (rest > every - _PLACE[split])

    return below(end) - below(begin)


# Arrow columns as keys and numbers.


compute: Any = pc
"""Arrow makes its functions while it is imported, where a type checker cannot see them."""


def flat(column: Any) -> Any:
    """One array, where a table may have several, with dictionaries looked up."""
    array = column
    if isinstance(column, pa.ChunkedArray):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # nothing in it, or more than 2 GB
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def is_keys(kind: pa.DataType) -> bool:
    """Whether a column can hold keys: whole numbers, strings, or lists of either."""
    if is_list(kind):
        return is_key(kind.value_type)
    return is_key(kind)


def is_key(kind: pa.DataType) -> bool:
    """Whether a column can hold one key per row."""
    if pa.types.is_dictionary(kind):
        return is_key(kind.value_type)
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind)


def is_number(kind: pa.DataType) -> bool:
    """Whether a column can hold dense features or labels."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_text_key(kind: pa.DataType) -> bool:
    """Whether keys of this type are hashes of strings."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return is_text_key(kind.value_type)
    return is_text(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds a list per row."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def keys(column: Any) -> NDArray[np.int64]:
    """A key per row: whole numbers as they are, strings hashed; `MISSING` where there is none.

    Floats are taken too, where a reader knows that they are categories with gaps.
    """
    array = flat(column)
    if is_text(array.type):
        return _text_keys(array)
    if pa.types.is_floating(array.type):
        numbers = array.to_numpy(zero_copy_only=False)
        known = np.isfinite(numbers)
        return np.where(known, np.where(known, numbers, 0).astype(np.int64), MISSING)
    if pa.types.is_uint64(array.type):  # the upper half of its range becomes negative
        return array.fill_null(MISSING & (1 << 64) - 1).to_numpy().view(np.int64)
    whole = array if array.type == pa.int64() else array.cast(pa.int64())
    known = whole.fill_null(MISSING) if whole.null_count else whole
    return known.to_numpy(zero_copy_only=False)


def lists(column: Any) -> Jagged:
    """A list of keys per row; no list is an empty one."""
    values, offsets = list_arrays(flat(column))
    return Jagged(tensor(values), tensor(np.diff(offsets)), tensor(offsets))


def list_arrays(array: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys of all lists, and where each list begins and the last one ends."""
    if not array.null_count and not pa.types.is_fixed_size_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
        known = offsets if offsets[0] == 0 else offsets - offsets[0]
        return keys(values_of(array)), known
    lengths = list_lengths(array)
    if pa.types.is_fixed_size_list(array.type):
        array = array.filter(array.is_valid())
    return keys(array.flatten()), np.append(0, np.cumsum(lengths))


def list_numbers(column: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The numbers of all lists, joined, nan where there is none; and how many each list has."""
    array = flat(column)
    lengths = list_lengths(array)
    if pa.types.is_fixed_size_list(array.type) and array.null_count:
        array = array.filter(array.is_valid())
    values = values_of(array)
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return values.to_numpy(zero_copy_only=False).astype(np.float64), lengths


def numbers(column: Any) -> NDArray[np.float32]:
    """A float per row; nan where there is none."""
    array = flat(column)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    found = array.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # values that are too large become inf, and are reported
        return found.astype(np.float32, copy=False)


def is_null(column: Any) -> NDArray[np.bool_]:
    """Which rows are empty."""
    array = flat(column)
    if not array.null_count:
        return np.zeros(len(array), dtype=bool)
    return array.is_null().to_numpy(zero_copy_only=False)


def holes(array: Any) -> NDArray[np.bool_]:
    """Which lists have a null inside."""
    return lists_with(list_lengths(array), is_null(values_of(array)))


def lists_with(lengths: NDArray[np.int64], bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which lists have one of these entries, given for all of them joined."""
    found = np.zeros(len(lengths), dtype=bool)
    if bad.any():
        found[np.repeat(np.arange(len(lengths)), lengths)[bad]] = True
    return found


def values_of(array: Any) -> Any:
    """The entries of all lists, joined."""
    if array.null_count or pa.types.is_fixed_size_list(array.type):
        return array.flatten()
    # The same, without Arrow's machinery for functions.
    begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    whole = array.values
    return whole if end - begin == len(whole) else whole.slice(begin, end - begin)


def list_lengths(array: Any) -> NDArray[np.int64]:
    """How many entries each list has; no list is an empty one."""
    if not array.null_count and not pa.types.is_fixed_size_list(array.type):
        return np.diff(array.offsets.to_numpy()).astype(np.int64, copy=False)
    lengths = compute.list_value_length(array).fill_null(0).cast(pa.int64())
    return lengths.to_numpy(zero_copy_only=False)


def need(kind: pa.DataType, wanted: bool, name: str, use: str, where: object) -> None:
    """Refuse a column whose type does not fit its use."""
    if wanted:
        return
    value = kind.value_type if is_list(kind) else kind
    todo = "name another"
    if use == "keys" and pa.types.is_floating(value):
        todo = "write whole numbers or strings, or name another"
    raise DataError(f"column {name} of {where} is {kind}, which cannot be {use}; {todo}")


def need_alike(kind: pa.DataType, text: bool, name: str, where: object) -> None:
    """Refuse keys that are text in one place and numbers in another: an id would have two keys."""
    if is_text_key(kind) != text:
        raise DataError(
            f"column {name} of {where} is {kind}, and elsewhere its keys are "
            f"{'text' if text else 'whole numbers'}, so an id would have two keys; write them alike"
        )


def _text_keys(array: Any) -> NDArray[np.int64]:
    # As bytes: files and messages may hold strings that are not UTF-8.
    coded = array.cast(pa.large_binary()).dictionary_encode()
    table = np.append(text_keys(coded.dictionary.to_pylist()), MISSING)
    codes = coded.indices.fill_null(len(table) - 1).to_numpy(zero_copy_only=False)
    return table[codes]


# Lists of a Parquet column, decoded page by page.


class _PageHeader(ctypes.Structure):
    """`PageHeader` of `native/data/pages.h`."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("type", "uncompressed_bytes", "compressed_bytes", "has_checksum", "num_values"),
            *("encoding", "definition_encoding", "repetition_encoding", "header_bytes"),
        )
    )
    type: int
    uncompressed_bytes: int
    compressed_bytes: int
    has_checksum: int
    num_values: int
    encoding: int
    definition_encoding: int
    repetition_encoding: int
    header_bytes: int

    @property
    def is_usual(self) -> bool:
        """A page of a known kind, without a checksum (Arrow compares it), with levels as runs."""
        levels = (self.definition_encoding, self.repetition_encoding)
        known = self.type in (_DATA_PAGE, _DICTIONARY_PAGE)
        return known and not self.has_checksum and levels == (_RUNS, _RUNS)


class _ListColumn(ctypes.Structure):
    """`ListColumn` of `native/data/pages.h`."""

    _fields_ = tuple(
        (name, c_void_p if name in ("dictionary", "offsets", "values") else c_int64)
        for name in (
            *("max_definition", "empty_definition", "dictionary", "num_entries", "offsets"),
            *("room_rows", "values", "room_values", "num_rows", "num_values"),
        )
    )
    dictionary: int
    num_entries: int
    num_rows: int
    num_values: int


Pages = list[tuple[_PageHeader, NDArray[np.uint8]]]
_DATA_PAGE, _DICTIONARY_PAGE, _RUNS = 0, 2, 3
_PLAIN = (0, 2)
"""What writers call the encoding of a dictionary's entries, which is always the same."""
_CODECS = ("SNAPPY", "GZIP", "BROTLI", "ZSTD")
"""Of which Parquet and Arrow mean the same form."""
_MOST_VALUES = 1 << 26
"""Of a column chunk that is decoded here: what a damaged footer says must not fill the memory."""
_CPU = torch.device("cpu")


class PageReader:
    """Decodes lists of 64-bit numbers from the row groups of one local file."""

    def __init__(self, path: Path, footer: pq.FileMetaData, schema: pa.Schema) -> None:
        self._path, self._footer, self._schema = path, footer, schema
        self._flat = footer.num_columns == len(schema.names)
        """Whether no column is stored as several, so that both have the same numbers."""

    def knows(self, name: str) -> bool:
        """Whether a column may be decoded here, by its type."""
        return self._flat and native_wanted() and _levels(self._schema.field(name)) is not None

    def lists(self, group: int, name: str) -> Any | None:
        """What Arrow reads as this column, with offsets of 64 bits; None: Arrow must read it.

        Arrow ends the process when it is asked about a column chunk whose description is damaged:
        `ColumnDecoder` of `data/parquet.py` finds that before.
        """
        level = _levels(self._schema.field(name))
        if level is None or not self.knows(name):
            return None
        number, in_group = self._schema.get_field_index(name), self._footer.row_group(group)
        chunk, about = in_group.column(number), self._footer.schema.column(number)
        shape = (about.physical_type, about.max_definition_level, about.max_repetition_level)
        sizes = (in_group.num_rows, chunk.num_values)
        if shape != ("INT64", level[0], 1) or chunk.file_path:
            return None
        if not all(0 <= size <= _MOST_VALUES for size in sizes):
            return None
        read = self._read(chunk)
        pages = None if read is None else _pages(read, chunk)
        return None if pages is None else _decode(pages, chunk, in_group.num_rows, level)

    def _read(self, chunk: Any) -> bytes | None:
        begin, size = chunk.data_page_offset, chunk.total_compressed_size
        if chunk.dictionary_page_offset is not None:
            begin = min(begin, chunk.dictionary_page_offset)
        try:
            with self._path.open("rb", buffering=0) as file:
                if begin < 4 or not 0 < size <= os.fstat(file.fileno()).st_size:
                    return None
                found = os.pread(file.fileno(), size, begin)
        except OSError:
            return None
        return found if len(found) == size else None


def _levels(column: pa.Field) -> tuple[int, int] | None:
    """The definition levels of a value and of an empty list; None for other columns."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if kind.value_type != pa.int64():
        return None
    return int(column.nullable) + 1 + int(kind.value_field.nullable), int(column.nullable)


def _decode(pages: Pages, chunk: Any, rows: int, level: tuple[int, int]) -> Any | None:
    ends = empty((rows + 1,), torch.int64, _CPU)
    values = empty((max(1, chunk.num_values),), torch.int64, _CPU)
    places = (ends.data_ptr(), rows, values.data_ptr(), chunk.num_values)
    column, entries = _ListColumn(*level, None, 0, *places, 0, 0), 0
    for header, page in pages:
        if header.type == _DICTIONARY_PAGE:
            plain = header.encoding in _PLAIN and len(page) == WORD * header.num_values
            if column.dictionary or not plain:
                return None
            column.dictionary, column.num_entries = page.ctypes.data, header.num_values
            continue
        given = (ctypes.addressof(column), page.ctypes.data, len(page))
        numbers = (header.num_values, header.encoding)
        entries += header.num_values
        if entries > chunk.num_values or not library().nestpipe_decode_lists(*given, *numbers):
            return None
    if entries != chunk.num_values or column.num_rows != rows:
        return None
    ends[rows] = column.num_values
    return _large_list(ends, values[: column.num_values])


def _pages(read: bytes, chunk: Any) -> Pages | None:
    """The pages of a column chunk, decompressed; None where that cannot be done here."""
    memory, at = np.frombuffer(read, np.uint8), 0
    found: Pages = []
    while at < len(memory):
        header = _PageHeader()
        left = (memory.ctypes.data + at, len(memory) - at)
        known = library().nestpipe_page_header(*left, ctypes.addressof(header))
        at += header.header_bytes
        end = at + header.compressed_bytes
        if not known or not header.is_usual or end > len(memory):
            return None
        page = _decompress(memory[at:end], header.uncompressed_bytes, chunk)
        if page is None or len(page) != header.uncompressed_bytes:
            return None
        found.append((header, page))
        at = end
    return found


def _decompress(page: NDArray[np.uint8], size: int, chunk: Any) -> NDArray[np.uint8] | None:
    if chunk.compression == "UNCOMPRESSED":
        return page.copy()  # where numbers of 64 bits may lie
    if chunk.compression not in _CODECS or size > chunk.total_uncompressed_size:
        return None
    try:
        found = pa.Codec(chunk.compression.lower()).decompress(page, decompressed_size=size)
    except (pa.ArrowException, ValueError, OSError):
        return None
    return np.frombuffer(found, np.uint8)


def _large_list(ends: Tensor, values: Tensor) -> Any:
    """Lists as Arrow has them, in this memory."""
    flat_values = pa.Array.from_buffers(
        pa.int64(), len(values), [None, pa.py_buffer(values.numpy())]
    )
    buffers = [None, pa.py_buffer(ends.numpy())]
    return pa.Array.from_buffers(
        pa.large_list(pa.int64()), len(ends) - 1, buffers, children=[flat_values]
    )
