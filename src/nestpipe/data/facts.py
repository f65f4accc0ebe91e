"""What can be said of a column after one pass over it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.data import arrow
from nestpipe.data.mixing import draw

_SECONDS = {"timestamp": 1.0, "time_ms": 1e-3}
"""Columns that hold a time, by name, and their unit."""


class Distinct:
    """How many different values there are: exact up to `KEPT`, after that within about 1 %.

    Values are hashed and only the smallest hashes kept; how close they lie tells how many there
    are in all.
    """

    KEPT = 16_384

    def __init__(self) -> None:
        self._smallest = np.empty(0, dtype=np.uint64)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        if len(self._smallest) >= self.KEPT:
            hashes = hashes[hashes < self._smallest[-1]]
        self._smallest = np.union1d(self._smallest, hashes)[: self.KEPT]

    @property
    def exact(self) -> bool:
        return len(self._smallest) < self.KEPT

    @property
    def count(self) -> int:
        if self.exact:
            return len(self._smallest)
        return round((self.KEPT - 1) / (float(self._smallest[-1]) / 2.0**64))


class Facts:
    """One column: its type, range, and how many values are missing or different."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.type = ""
        self.empty = 0
        self.least: Any = None
        self.most: Any = None
        self.distinct = Distinct()
        self.longest: int | None = None

    def add(self, column: Any) -> None:
        """Take one more piece of the column into account."""
        array = arrow.flat(column)
        self.type = _type_name(array.type)
        self.empty += array.null_count
        array = array.drop_null()
        if arrow.is_list(array.type):
            lengths = arrow.compute.max(arrow.compute.list_value_length(array)).as_py()
            self.longest = max(self.longest or 0, lengths or 0)
            array = arrow.flat(array.flatten()).drop_null()
        if pa.types.is_floating(array.type):
            array = array.filter(arrow.compute.is_finite(array))
        if not len(array):
            return
        if pa.types.is_nested(array.type) or pa.types.is_null(array.type):
            return
        self._stretch(array)
        self.distinct.add(_hashes(array))

    def _stretch(self, array: Any) -> None:
        ends = arrow.compute.min_max(array).as_py()
        least, most = ends["min"], ends["max"]
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)

    @property
    def times(self) -> tuple[str, str] | None:
        """First and last time, where the column is known to hold times."""
        if isinstance(self.least, datetime):
            return self.least.isoformat(), self.most.isoformat()
        if self.name not in _SECONDS or self.least is None or isinstance(self.least, str):
            return None
        first, last = (value * _SECONDS[self.name] for value in (self.least, self.most))
        try:
            return _instant(first), _instant(last)
        except (OverflowError, ValueError, OSError):
            return None  # the name promised more than the numbers hold

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "type": self.type,
            "empty": self.empty,
            "min": _plain(self.least),
            "max": _plain(self.most),
            "distinct": self.distinct.count,
            "distinct_exact": self.distinct.exact,
            "longest_list": self.longest,
        }


def _type_name(kind: pa.DataType) -> str:
    if arrow.is_list(kind):
        return f"lists of {_type_name(kind.value_type)}"
    return "string" if arrow.is_text(kind) else str(kind)


def _hashes(array: Any) -> NDArray[np.uint64]:
    if pa.types.is_floating(array.type):
        return draw(0, array.cast(pa.float64()).to_numpy(zero_copy_only=False).view(np.int64))
    if not arrow.is_key(array.type):
        array = array.cast(pa.string())
    return draw(0, arrow.keys(array))


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _plain(value: Any) -> object:
    return value if value is None or isinstance(value, int | float | str) else str(value)
