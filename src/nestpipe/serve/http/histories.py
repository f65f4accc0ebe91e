"""Histories that the service has itself, so that requests may leave them out."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.errors import DataError
from nestpipe.serve.types import History, Ids

# Shapes: U users, T events of all users together


class Histories:
    """Every user's events, oldest first, one user after the other."""

    def __init__(
        self, users: list[str], lengths_U: Ids, items_T: Ids, times_T: Ids | None, longest: int
    ) -> None:
        self._row = {user: row for row, user in enumerate(users)}
        if len(self._row) != len(users):
            raise DataError("a user is there twice; give every user one row")
        if len(lengths_U) != len(users) or (lengths_U < 0).any():
            raise DataError("there is not one length for every user; give one")
        if int(lengths_U.sum()) != len(items_T):
            raise DataError("the lengths do not add up to the number of items; correct them")
        if times_T is not None and len(times_T) != len(items_T):
            raise DataError("there is not one time for every item; give one or no times")
        if len(items_T) and int(lengths_U.max()) > longest:
            user = users[int(lengths_U.argmax())]
            raise DataError(
                f"user {user!r} has {lengths_U.max()} events and most_events is {longest}; "
                "keep the newest ones or raise it"
            )
        self._ends_U = np.cumsum(lengths_U)
        self._starts_U = self._ends_U - lengths_U
        self._items_T, self._times_T = items_T, times_T

    def __len__(self) -> int:
        return len(self._row)

    def of(self, user: str) -> History | None:
        """None: an unknown user."""
        row = self._row.get(user)
        if row is None:
            return None
        part = slice(int(self._starts_U[row]), int(self._ends_U[row]))
        times_T = self._times_T
        return History(self._items_T[part], None if times_T is None else times_T[part])


def read_histories(file: Path, longest: int) -> Histories:
    """A Parquet file (columns user, items, times?) or an npz (users, lengths, items, times?)."""
    if not file.is_file():
        raise DataError(f"there is no file '{file}' of histories; check its name")
    try:
        if file.suffix == ".npz":
            return Histories(*_read_npz(file), longest)
        return Histories(*_read_parquet(file), longest)
    except DataError as error:
        raise DataError(f"'{file}': {error}") from None


def _read_npz(file: Path) -> tuple[list[str], Ids, Ids, Ids | None]:
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = dict(found)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"it cannot be read ({error}); write it with numpy.savez") from None
    for name in ("users", "lengths", "items"):
        if name not in arrays:
            raise DataError(f"it has no array {name!r}; write users, lengths, items, times")
    times_T = _ids(arrays["times"], "times") if "times" in arrays else None
    users = [str(user) for user in arrays["users"].tolist()]
    return users, _ids(arrays["lengths"], "lengths"), _ids(arrays["items"], "items"), times_T


def _read_parquet(file: Path) -> tuple[list[str], Ids, Ids, Ids | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table: Any = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"it cannot be read ({reason}); write it as Parquet") from None
    for name in ("user", "items"):
        if name not in table.column_names:
            raise DataError(f"it has no column {name!r}; write user, items and times")
    lengths_U, items_T = _lists(table["items"].combine_chunks(), "items")
    times_T = None
    if "times" in table.column_names:
        times_U, times_T = _lists(table["times"].combine_chunks(), "times")
        if not np.array_equal(times_U, lengths_U):
            raise DataError("there is not one time for every item; give one or no times")
    return _users(table["user"]), lengths_U, items_T, times_T


def _lists(column: Any, name: str) -> tuple[Ids, Ids]:
    """How long each list of a column is, and their values one after the other."""
    import pyarrow as pa

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise DataError(f"column {name!r} holds {column.type}; write lists of int64")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise DataError(f"a value of column {name!r} is null; leave it out")
    return column.value_lengths().to_numpy().astype(np.int64), _ids(values.to_numpy(), name)


def _users(column: Any) -> list[str]:
    if column.null_count:
        raise DataError("a value of column 'user' is null; leave such rows out")
    return [str(user) for user in column.to_pylist()]


def _ids(values: NDArray[Any], name: str) -> Ids:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{name} holds {values.dtype} in {values.ndim} dimensions; use int64 in 1")
    if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{name} holds a number above {np.iinfo(np.int64).max}; use int64")
    return values.astype(np.int64)
