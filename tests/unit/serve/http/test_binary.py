import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.serve.http.bodies import MEDIA_TYPE, BinaryError, HttpError, cut, pack, split
from nestpipe.serve.http.client import ranking_body, signal_body
from nestpipe.serve.http.requests import RequestReader
from nestpipe.serve.types import History, HttpSettings, RankRequest, ServeSettings, Signal

HEADERS = {"content-type": MEDIA_TYPE}
READER = RequestReader(ServeSettings(max_events=1000, max_candidates=100), HttpSettings())


def history(count: int, times: bool = False, start: int = 0) -> History:
    events_N = np.arange(start, start + count, dtype=np.int64)
    return History(events_N, events_N * 10 if times else None)


def same(one: History, other: History) -> bool:
    times = (one.times_N is None) == (other.times_N is None)
    if times and one.times_N is not None and other.times_N is not None:
        times = np.array_equal(one.times_N, other.times_N)
    return times and np.array_equal(one.items_N, other.items_N)


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize(("long", "short"), [(0, 0), (7, 0), (0, 3), (500, 20)])
def test_a_ranking_arrives_as_it_was_sent(long: int, short: int, times: bool):
    sent = RankRequest(
        "użytkownik 1",
        history(long, times),
        history(short, times, start=long),
        np.array([5, 2**63 - 1], dtype=np.int64),
        time=77 if times else None,
        deadline_s=0.05,
    )
    found = READER.ranking(bytearray(ranking_body(sent)), HEADERS)
    assert (found.user, found.time, found.deadline_s) == (sent.user, sent.time, sent.deadline_s)
    assert np.array_equal(found.candidates_C, sent.candidates_C)
    assert same(found.long, sent.long)
    assert same(found.short, sent.short)


@pytest.mark.parametrize("times", [False, True])
def test_a_signal_arrives_as_it_was_sent(times: bool):
    sent = Signal("u", history(9, times))
    found = READER.signal(bytearray(signal_body(sent)), HEADERS)
    assert found.user == "u"
    assert same(found.long, sent.long)


def test_arrays_can_be_used_without_a_copy_and_written_to():
    text, data = split(bytearray(pack({"a": 3}, [np.array([1, 2, 3], np.int64)])))
    (array,) = cut(data, [3])
    assert json.loads(text) == {"a": 3}
    assert array.flags.aligned
    assert array.flags.writeable


def test_arrays_that_begin_anywhere_are_read_too():
    text = b'{"user":"u","candidates":2,"long":{"items":1}}'
    assert (4 + len(text)) % 8
    values = np.array([1, 8, 9], "<i8").tobytes()
    body = len(text).to_bytes(4, "little") + text + values
    found = READER.ranking(bytearray(body), HEADERS)
    assert found.candidates_C.tolist() == [8, 9]
    assert found.candidates_C.flags.aligned


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01\x00",
        b"\xff\xff\xff\xff{}",
        (70000).to_bytes(4, "little") + b" " * 70000,
        pack({"user": "u", "candidates": 2}, [np.zeros(1, np.int64)]),
        pack({"user": "u", "candidates": 1}, [np.zeros(2, np.int64)]),
        pack({"user": "u", "candidates": 1}, [np.zeros(1, np.int64)]) + b"x",
        pack({"user": "u", "candidates": -1}, []),
        pack({"user": "u", "candidates": 1e3}, []),
        pack({"user": "u", "candidates": 2**40}, []),
        pack({"user": "u", "candidates": 1, "long": {"items": True}}, []),
        pack({"user": "u", "candidates": 1, "scores": 1}, [np.zeros(1, np.int64)]),
        b"\x02\x00\x00\x00\xff\xfe",
    ],
)
def test_a_body_that_lies_is_refused_with_a_sentence(body: bytes):
    with pytest.raises(HttpError) as refused:
        READER.ranking(bytearray(body), HEADERS)
    assert refused.value.status in (400, 422)
    assert len(refused.value.sentence) > 20


@given(st.binary(max_size=200))
def test_no_bytes_can_break_the_reader(body: bytes):
    for read in (READER.ranking, READER.signal):
        with pytest.raises(HttpError):
            read(bytearray(body), HEADERS)


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 30))
def test_arrays_are_cut_only_if_all_of_the_data_is_announced(counts: list[int], length: int):
    data = memoryview(bytearray(8 * length))
    if sum(counts) == length:
        assert [len(array) for array in cut(data, counts)] == counts
    else:
        with pytest.raises(BinaryError):
            cut(data, counts)
