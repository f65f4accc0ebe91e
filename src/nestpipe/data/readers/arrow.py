"""Arrow columns as keys and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nestpipe.data.sampling.order import text_keys
from nestpipe.data.source import MISSING, tensor
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged

compute: Any = pc
"""Arrow makes its functions while it is imported, where a type checker cannot see them."""


def flat(column: Any) -> Any:
    """One array, where a table may have several, with dictionaries looked up."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
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
    return array.cast(pa.int64()).fill_null(MISSING).to_numpy(zero_copy_only=False)


def lists(column: Any) -> Jagged:
    """A list of keys per row; no list is an empty one."""
    array = flat(column)
    lengths = compute.list_value_length(array).fill_null(0).cast(pa.int64())
    if pa.types.is_fixed_size_list(array.type):
        array = array.filter(array.is_valid())
    return Jagged(tensor(keys(array.flatten())), tensor(lengths.to_numpy(zero_copy_only=False)))


def numbers(column: Any) -> NDArray[np.float32]:
    """A float per row; nan where there is none."""
    array = flat(column)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    found = array.to_numpy(zero_copy_only=False)
    return found.astype(np.float32)


def need(kind: pa.DataType, wanted: bool, name: str, use: str, where: object) -> None:
    """Refuse a column whose type does not fit its use."""
    if not wanted:
        raise DataError(f"column {name} of {where} is {kind}, which cannot be {use}; name another")


def _text_keys(array: Any) -> NDArray[np.int64]:
    coded = array.dictionary_encode()
    table = np.append(text_keys(coded.dictionary.to_pylist()), MISSING)
    codes = coded.indices.fill_null(len(table) - 1).to_numpy(zero_copy_only=False)
    return table[codes]
