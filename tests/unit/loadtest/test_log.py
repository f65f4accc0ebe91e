"""Request logs: every form reads back, and what is wrong with one is a sentence."""

import pytest

from nestpipe.errors import NestpipeError
from nestpipe.loadtest.advise import Logged, log_of, read_log, write_log
from nestpipe.loadtest.settings import WorkloadSettings
from nestpipe.loadtest.workload import visits


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_log_of_a_workload_reads_back(tmp_path, kind):
    log = log_of(visits(WorkloadSettings(rate=20, seconds=2, length_spread=0.5)))
    write_log(tmp_path / f"log.{kind}", log)
    assert read_log(tmp_path / f"log.{kind}") == log


def test_times_may_be_dates_and_come_in_any_order(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        "time,user,history_length,candidates,other\n"
        "2026-01-05T10:00:05,b,20,3,x\n"
        "2026-01-05T10:00:00,a,10,3,y\n"
    )
    first, second = read_log(path)
    assert (first.user, first.history_length) == ("a", 10)
    assert second.time - first.time == 5


def test_users_may_be_numbers(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"time": 1, "user": 7, "history_length": 9, "candidates": 3}\n\n')
    assert read_log(path) == [Logged(1.0, "7", 9, 3)]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.csv", "time,user,history_length\n1,a,5\n", "request 1 of .* has no candidates"),
        ("a.csv", "time,user,history_length,candidates\n", "holds no requests"),
        ("a.csv", "time,user,history_length,candidates\nx,a,5,3\n", "time of request 1 .* is 'x'"),
        ("a.csv", "time,user,history_length,candidates\nnan,a,5,3\n", "time of request 1"),
        ("a.csv", "time,user,history_length,candidates\n1,a,-5,3\n", "history_length of request 1"),
        ("a.csv", "time,user,history_length,candidates\n1,a,5,2.5\n", "candidates of request 1"),
        ("a.jsonl", "{oops\n", "cannot read"),
        ("a.jsonl", "[1]\n", "a line is not a JSON object"),
        ("a.parquet", "oops", "cannot read"),
        ("a.txt", "oops", "no log that can be read; use .csv, .jsonl"),
    ],
)
def test_a_wrong_log_is_one_sentence(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(NestpipeError, match=sentence):
        read_log(tmp_path / name)


def test_a_missing_log_and_a_kind_that_cannot_be_written(tmp_path):
    with pytest.raises(NestpipeError, match="there is no file"):
        read_log(tmp_path / "none.csv")
    with pytest.raises(NestpipeError, match="names no kind of log"):
        write_log(tmp_path / "log.txt", [])
