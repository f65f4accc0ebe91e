from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.errors import DataError
from nestpipe.serve.http.requests import HistoryStore, read_histories

COLUMNS: dict[str, Any] = {
    "user": ["a", "b", "c"],
    "items": [[1, 2, 3], [], [9]],
    "times": [[10, 20, 30], [], [90]],
}


def parquet(folder: Path, **changed: Any) -> Path:
    columns = {**COLUMNS, **changed}
    table = pa.table({name: value for name, value in columns.items() if value is not None})
    pq.write_table(table, folder / "histories.parquet", row_group_size=2)
    return folder / "histories.parquet"


def npz(folder: Path, **changed: Any) -> Path:
    arrays = {"users": ["a", "b", "c"], "lengths": [3, 0, 1], "items": [1, 2, 3, 9]}
    arrays["times"] = [10, 20, 30, 90]
    arrays |= changed
    written: dict[str, Any] = {name: np.array(v) for name, v in arrays.items() if v is not None}
    np.savez(folder / "h.npz", **written)
    return folder / "h.npz"


def check(found: HistoryStore, times: bool = True) -> None:
    history = found.of("a")
    assert history is not None
    assert history.items_N.tolist() == [1, 2, 3]
    assert history.items_N.dtype == np.int64
    assert (history.times_N is not None) is times
    if history.times_N is not None:
        assert history.times_N.tolist() == [10, 20, 30]
    empty = found.of("b")
    assert empty is not None
    assert len(empty) == 0
    assert found.of("d") is None
    assert len(found) == 3


@pytest.mark.parametrize("write", [parquet, npz])
@pytest.mark.parametrize("times", [True, False])
def test_every_user_has_their_own_events(tmp_path: Path, write: Any, times: bool):
    check(read_histories(write(tmp_path, **({} if times else {"times": None})), 100), times)


def test_users_may_be_numbers(tmp_path: Path):
    found = read_histories(parquet(tmp_path, user=[1, 2, 30]), 100)
    assert found.of("30") is not None


@pytest.mark.parametrize(
    ("write", "changed"),
    [
        (parquet, {"user": None}),
        (parquet, {"items": None}),
        (parquet, {"user": ["a", "a", "c"]}),
        (parquet, {"user": ["a", None, "c"]}),
        (parquet, {"items": [[1], None, [9]]}),
        (parquet, {"items": [[1, 2, None], [], [9]]}),
        (parquet, {"items": [[1.5, 2.0, 3.0], [], [9.0]]}),
        (parquet, {"items": [1, 2, 3]}),
        (parquet, {"times": [[10, 20], [30], [90]]}),
        (parquet, {"items": [list(range(101)), [], []], "times": None}),
        (npz, {"users": ["a", "b"]}),
        (npz, {"lengths": [3, 1, 1]}),
        (npz, {"lengths": [5, -2, 1]}),
        (npz, {"lengths": None}),
        (npz, {"items": [[1, 2], [3, 9]]}),
        (npz, {"items": [1, 2, 3, 2**63]}),
        (npz, {"times": [1]}),
        (npz, {"times": [0.5] * 4}),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_by_name(
    tmp_path: Path, write: Any, changed: dict[str, Any]
):
    file = write(tmp_path, **changed)
    with pytest.raises(DataError, match=file.name):
        read_histories(file, 100)


@pytest.mark.parametrize("name", ["h.npz", "h.parquet"])
def test_a_file_that_is_something_else(tmp_path: Path, name: str):
    with pytest.raises(DataError, match="check its name"):
        read_histories(tmp_path / name, 100)
    (tmp_path / name).write_text("hello")
    with pytest.raises(DataError, match="cannot be read"):
        read_histories(tmp_path / name, 100)


def test_a_bit_that_says_encrypted_is_a_sentence(tmp_path: Path):
    file = npz(tmp_path)
    data = bytearray(file.read_bytes())
    entry = data.index(b"PK\x01\x02")  # of the zip's directory; its flags are at 8
    data[entry + 8] |= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"cannot be read .*encrypted"):
        read_histories(file, 100)
