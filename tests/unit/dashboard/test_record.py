"""The record of a run: bounded, exact in its means, and readable while it is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nestpipe.dashboard.record import (
    KEPT,
    MOST_EVALUATIONS,
    MOST_LANES,
    MOST_POINTS,
    RecordReader,
    RecordWriter,
    file_of,
    read_record,
    thinned,
)
from nestpipe.errors import ParseError


def filled(file: Path, steps: int) -> RecordWriter:
    """A record with a point for each step, whose loss is the step's number."""
    writer = RecordWriter(file, {"ranks": 1, "rank": 0})
    loss = 0
    for step in range(1, steps + 1):
        loss += step
        writer.add("point", step, {"steps": step, "loss": loss, "low": step, "high": step})
    return writer


def test_a_record_stays_bounded_and_keeps_totals_and_extremes(tmp_path: Path):
    steps = 10_000
    filled(file_of(tmp_path, 0), steps)
    record = read_record(file_of(tmp_path, 0))
    assert KEPT["point"] <= len(record.points) <= MOST_POINTS
    last = record.points[-1]
    assert (last["steps"], last["loss"]) == (steps, steps * (steps + 1) // 2)
    covered = 0
    for point in record.points:
        assert (point["low"], point["high"]) == (covered + 1, point["step"])
        covered = point["step"]
    gaps = [b["step"] - a["step"] for a, b in zip(record.points, record.points[1:], strict=False)]
    assert max(gaps) <= 3 * steps / KEPT["point"], "old and new parts are alike in detail"


@pytest.mark.parametrize(
    ("kind", "most"), [("lanes", MOST_LANES), ("evaluation", MOST_EVALUATIONS)]
)
def test_other_lines_are_bounded_too_and_the_newest_stays(tmp_path: Path, kind: str, most: int):
    writer = RecordWriter(file_of(tmp_path, 0), {})
    for step in range(1, 5 * most):
        writer.add(kind, step, {"spans": [], "metrics": {}})
        found = read_record(file_of(tmp_path, 0)).of(kind) if step % 97 == 0 else []
        assert len(found) <= most
    assert read_record(file_of(tmp_path, 0)).of(kind)[-1]["step"] == 5 * most - 1


def test_groups_are_of_equal_steps_whatever_lies_between():
    steps = [*range(100), *range(100, 1000, 100)]
    groups = thinned(steps, 10, float)
    assert [group[-1] for group in groups] == [89, 100, 200, 300, 400, 500, 600, 700, 800, 900]
    assert [step for group in groups for step in group] == steps


def test_a_reader_follows_a_file_that_grows_and_is_written_anew(tmp_path: Path):
    writer = filled(file_of(tmp_path, 0), 5)
    reader = RecordReader(file_of(tmp_path, 0))
    assert [point["step"] for point in reader.read().points] == [1, 2, 3, 4, 5]
    for step in range(6, MOST_POINTS + 10):
        writer.add("point", step, {"low": 0, "high": 0})
        if step in (6, MOST_POINTS + 2):
            assert reader.read().points[-1]["step"] == step
    found = reader.read()
    assert found.points == read_record(file_of(tmp_path, 0)).points
    assert found.damaged == 0


def test_a_line_that_is_being_written_is_left_for_the_next_time(tmp_path: Path):
    file = file_of(tmp_path, 0)
    filled(file, 2)
    reader = RecordReader(file)
    with file.open("ab") as more:
        more.write(b'{"kind":"point","st')
        more.flush()
        assert len(reader.read().points) == 2
        more.write(b'ep":3}\n')
    assert [point["step"] for point in reader.read().points] == [1, 2, 3]


def test_damaged_lines_are_counted_and_unknown_kinds_left_out(tmp_path: Path):
    file = file_of(tmp_path, 0)
    filled(file, 2)
    with file.open("a") as more:
        more.write('garbage\n[1]\n{"kind":"point"}\n{"kind":"new in a later version"}\n')
        more.write('{"kind":"point","step":3}\n')
    record = read_record(file)
    assert (len(record.points), record.damaged) == (3, 3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hello\n", "is not the record of a run"),
        ('{"kind":"point","step":1}\n', "is not the record of a run"),
        ('{"kind":"run","version":99}\n', "version 99, and this program reads 1"),
    ],
)
def test_what_is_no_record_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str):
    file_of(tmp_path, 0).write_text(text)
    with pytest.raises(ParseError, match=sentence):
        read_record(file_of(tmp_path, 0))


def test_a_run_that_goes_on_keeps_what_it_had_by_its_step(tmp_path: Path):
    file = file_of(tmp_path, 0)
    before = filled(file, 10)
    before.add("end", 10, {"status": "failed", "sentence": "lost"})
    RecordWriter(file, {"ranks": 1}, first_step=7)
    record = read_record(file)
    assert [point["step"] for point in record.points] == list(range(1, 8))
    assert record.end is None
    assert not file.with_name(f"{file.name}.old").exists()


def test_the_record_of_another_run_is_put_aside_and_not_lost(tmp_path: Path):
    file = file_of(tmp_path, 0)
    filled(file, 3)
    RecordWriter(file, {"ranks": 1})
    assert read_record(file).points == []
    assert len(read_record(file.with_name(f"{file.name}.old")).points) == 3


def test_numbers_that_are_none_are_null(tmp_path: Path):
    writer = RecordWriter(file_of(tmp_path, 0), {})
    writer.add("point", 1, {"low": math.inf, "nested": {"x": [math.nan, 0.1]}})
    line = json.loads(file_of(tmp_path, 0).read_text().splitlines()[-1])
    assert (line["low"], line["nested"]) == (None, {"x": [None, 0.1]})
