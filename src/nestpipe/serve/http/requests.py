"""From the bytes of a body to a valid signal or ranking, with histories from a file if need be."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from nestpipe.errors import DataError
from nestpipe.serve.http.bodies import (
    MEDIA_TYPE,
    BinaryError,
    HistoryBody,
    HistoryCounts,
    HttpError,
    PrefetchBody,
    PrefetchHeader,
    RankBody,
    RankColumns,
    RankHeader,
    cut,
    of_body,
    split,
)
from nestpipe.serve.types import (
    LEAST_DEADLINE_S,
    Context,
    History,
    HttpSettings,
    Ids,
    RankRequest,
    ServeSettings,
    Signal,
    Values,
)

JSON = "application/json"
USER_HEADER = "x-user"
WAITED_HEADER = "x-nestpipe-waited-ms"
"""How much of its deadline a request has spent with a router."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Decodes and checks requests by the limits of a service."""

    settings: ServeSettings
    http: HttpSettings
    histories: HistoryStore | None = None
    needs_history: bool = True
    """Off for models without a prefix, which may read other features alone."""

    def signal(self, body: bytearray, headers: Mapping[str, str]) -> Signal:
        """The signal of a body, or an `HttpError`."""
        if media_type(headers) == MEDIA_TYPE:
            text, data = _split(body)
            header = validated(PrefetchHeader, text)
            user, (history,) = header.user, self._arrays(data, [header.history])[0]
        else:
            parsed = validated(PrefetchBody, body)
            user, history = parsed.user, self._history("history", parsed.history)
        self._check_user(user, headers)
        return Signal(user, self._checked(self._known("history", user, history)))

    def ranking(self, body: bytearray, headers: Mapping[str, str]) -> RankRequest:
        """The ranking of a body, or an `HttpError`."""
        parsed: RankHeader | RankBody
        if media_type(headers) == MEDIA_TYPE:
            text, data = _split(body)
            parsed = validated(RankHeader, text)
            histories, candidates_C = self._arrays(
                data, [parsed.long, parsed.short], parsed.candidates
            )
            long, short = histories
        else:
            parsed = validated(RankBody, body)
            long = self._history("long", parsed.long)
            short = self._history("short", parsed.short)
            candidates_C = self._keys("candidates", parsed.candidates)
        self._check_user(parsed.user, headers)
        long = self._known("long", parsed.user, long)
        short = short or _none_after(long)
        self._check_candidates(candidates_C)
        self._checked(short)
        self._checked(long, beside=len(short))
        deadline_s = _deadline_s(parsed.deadline_ms, headers)
        context = self._context(parsed, len(candidates_C))
        return RankRequest(parsed.user, long, short, candidates_C, parsed.time, deadline_s, context)

    def _context(self, body: RankColumns, candidates: int) -> Context:
        """The columns that a model without a prefix reads."""
        if self.needs_history and body.any_columns:
            raise HttpError(
                422,
                f"{body.any_columns} is for models without a prefix, and this one reads histories; "
                "leave it out",
            )
        for name, lists in (body.candidate_features or {}).items():
            if sum(map(len, lists)) > self.settings.max_events:
                raise HttpError(413, f"candidate_features.{name} has too many keys; give fewer")
        keys = {
            name: self._keys(f"feature {name}", ids) for name, ids in (body.features or {}).items()
        }
        of_each = {
            name: [self._keys(f"feature {name}", ids) for ids in lists]
            for name, lists in (body.candidate_features or {}).items()
        }
        values = {name: np.array(given, np.float32) for name, given in (body.values or {}).items()}
        rows = {
            name: _rows(name, given, candidates)
            for name, given in (body.candidate_values or {}).items()
        }
        return Context(keys, values, of_each, rows)

    def _known(self, name: str, user: str, history: History | None) -> History:
        """The history that was given, or that of the file."""
        if history is not None:
            return history
        if self.histories is None:
            if not self.needs_history:
                return History(np.zeros(0, np.int64))
            raise HttpError(422, f"{name} is missing; give it, or serve with --histories")
        found = self.histories.of(user)
        if found is None and not self.needs_history:
            return History(np.zeros(0, np.int64))
        if found is None:
            raise HttpError(404, f"user {user!r} is unknown here; give {name} in the request")
        return found

    def _checked(self, history: History, beside: int = 0) -> History:
        most = self.settings.max_events
        if len(history) + beside > most:
            raise HttpError(
                413, f"{len(history) + beside} events are too many; give the newest {most}"
            )
        return history

    def _check_candidates(self, candidates_C: Ids) -> None:
        if len(candidates_C) == 0:
            raise HttpError(422, "candidates is empty; give at least one")
        most = self.settings.max_candidates
        if len(candidates_C) > most:
            raise HttpError(
                413, f"{len(candidates_C)} candidates are too many; give {most} at most"
            )

    def _arrays(
        self,
        data: memoryview,
        counts: list[HistoryCounts | None],
        candidates: int | None = None,
    ) -> tuple[list[History | None], Ids]:
        """Histories and candidates of a binary body."""
        histories, candidates_C = _cut_histories(data, counts, candidates)
        for history in histories:
            self._check_ids("items", history.items_N if history is not None else candidates_C[:0])
        self._check_ids("candidates", candidates_C)
        return histories, candidates_C

    def _keys(self, name: str, given: list[int] | list[str]) -> Ids:
        """Numbers as they are, if they may be negative; strings as training has made keys of."""
        if given and isinstance(given[0], str):
            from nestpipe.data.order import text_keys

            texts = cast("list[str]", given)
            for place, text in enumerate(texts):
                if text.removeprefix("-").isdecimal():  # a number in quotes, not a string of data
                    raise HttpError(
                        422, f'{name}[{place}] is "{text}"; it should be a whole number, unquoted'
                    )
            return text_keys(texts)
        ids_N = np.array(given, np.int64)
        self._check_ids(name, ids_N)
        return ids_N

    def _history(self, name: str, body: HistoryBody | None) -> History | None:
        if body is None:
            return None
        times_N = None if body.times is None else np.array(body.times, dtype=np.int64)
        return _paired(name, self._keys("items", body.items), times_N)

    def _check_ids(self, name: str, ids_N: Ids) -> None:
        if not self.http.negative_ids and len(ids_N) and ids_N.min() < 0:
            raise HttpError(422, f"{name} holds {ids_N.min()}; give ids of 0 or above")

    def _check_user(self, user: str, headers: Mapping[str, str]) -> None:
        given = headers.get(USER_HEADER)
        if given is not None and unquote(given) != user:
            raise HttpError(
                422, f"the header X-User is {given!r} and the body's user {user!r}; make them agree"
            )


def media_type(headers: Mapping[str, str]) -> str:
    """JSON or binary; nothing else is read."""
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found not in (JSON, MEDIA_TYPE):
        raise HttpError(415, f"a body of type {found!r} is not read; send {JSON} or {MEDIA_TYPE}")
    return found


def validated(model: type[Model], text: bytes | bytearray) -> Model:
    """The JSON text as `model`, or an `HttpError` that says what is wrong with it."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise of_body(error) from None


def _split(body: bytearray) -> tuple[bytes, memoryview]:
    try:
        return split(body)
    except BinaryError as error:
        raise HttpError(400, str(error)) from None


def _cut_histories(
    data: memoryview, histories: list[HistoryCounts | None], candidates: int | None = None
) -> tuple[list[History | None], Ids]:
    counts = [count for one in histories if one for count in (one.items, one.times or 0)]
    counts.append(candidates or 0)
    try:
        arrays = iter(cut(data, counts))
    except BinaryError as error:
        raise HttpError(400, str(error)) from None
    found: list[History | None] = []
    for name, one in zip(("long", "short"), histories, strict=False):
        if one is None:
            found.append(None)
            continue
        items_N, times_N = next(arrays), next(arrays)
        found.append(_paired(name, items_N, times_N if one.times is not None else None))
    return found, next(arrays)


def _paired(name: str, items_N: Ids, times_N: Ids | None) -> History:
    if times_N is not None and len(times_N) != len(items_N):
        raise HttpError(
            422, f"{name} has {len(items_N)} items and {len(times_N)} times; give one for each"
        )
    return History(items_N, times_N)


def _rows(name: str, given: list[float] | list[list[float]], candidates: int) -> Values:
    widths = {len(one) if isinstance(one, list) else -1 for one in given}
    if len(given) != candidates or len(widths) != 1:
        raise HttpError(
            422, f"candidate_values.{name} does not fit {candidates} candidates; give one for each"
        )
    return np.array(given, np.float32)


def _none_after(long: History) -> History:
    """No events, with times where the history before has them."""
    nothing = np.zeros(0, np.int64)
    return History(nothing, None if long.times_N is None else nothing)


def _deadline_s(deadline_ms: float | None, headers: Mapping[str, str]) -> float | None:
    if deadline_ms is None:
        return None
    try:
        waited_ms = float(headers.get(WAITED_HEADER, "0"))
    except ValueError:
        waited_ms = 0.0
    left_ms = min(deadline_ms - waited_ms, deadline_ms)
    return max(left_ms / 1000, LEAST_DEADLINE_S) if left_ms == left_ms else deadline_ms / 1000


# Shapes: U users, T events of all users together


class HistoryStore:
    """Histories that the service holds, so that requests may leave them out; oldest event first."""

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
                f"user {user!r} has {lengths_U.max()} events and max_events is {longest}; "
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


def read_histories(file: Path, longest: int) -> HistoryStore:
    """A Parquet file (columns user, items, times?) or an npz (users, lengths, items, times?)."""
    if not file.is_file():
        raise DataError(f"there is no file '{file}' of histories; check its name")
    try:
        if file.suffix == ".npz":
            return HistoryStore(*_read_npz(file), longest)
        return HistoryStore(*_read_parquet(file), longest)
    except DataError as error:
        raise DataError(f"'{file}': {error}") from None


_NOT_READ = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What numpy and zipfile raise for a file that is damaged, encrypted, or none of theirs."""


def _read_npz(file: Path) -> tuple[list[str], Ids, Ids, Ids | None]:
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = dict(found)
    except _NOT_READ as error:
        raise DataError(f"it cannot be read ({error}); write it with numpy.savez") from None
    for name in ("users", "lengths", "items"):
        if name not in arrays:
            raise DataError(f"it has no array {name!r}; write users, lengths, items, times")
    times_T = _ids(arrays["times"], "times") if "times" in arrays else None
    if arrays["users"].ndim != 1:
        raise DataError(f"users have {arrays['users'].ndim} dimensions; write a list of them")
    users = [str(user) for user in arrays["users"].tolist()]
    return users, _ids(arrays["lengths"], "lengths"), _ids(arrays["items"], "items"), times_T


def _read_parquet(file: Path) -> tuple[list[str], Ids, Ids, Ids | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table: Any = pq.read_table(file, page_checksum_verification=True)
        names = table.column_names
    except (OSError, pa.ArrowException, ValueError) as error:  # also names that are no text
        reason = str(error).splitlines()[0]
        raise DataError(f"it cannot be read ({reason}); write it as Parquet") from None
    for name in ("user", "items"):
        if name not in names:
            raise DataError(f"it has no column {name!r}; write user, items and times")
    for name in ("user", "items", "times"):
        if names.count(name) > 1:
            raise DataError(f"it has the column {name!r} twice; rename one of them")
    lengths_U, items_T = _lists(table["items"].combine_chunks(), "items")
    times_T = None
    if "times" in names:
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
    lengths = column.value_lengths().to_numpy().astype(np.int64)
    return lengths, _ids(values.to_numpy(zero_copy_only=False), name)


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
