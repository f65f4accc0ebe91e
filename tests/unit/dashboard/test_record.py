"""The record of a run: bounded, exact in its means, and readable while it is written."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nestpipe.dashboard.record import (
    FAILED,
    FINISHED,
    KEPT,
    MOST_CHOICES,
    MOST_EVALUATIONS,
    MOST_LANES,
    MOST_POINTS,
    RecordReader,
    RecordWriter,
    RunRecorder,
    file_of,
    read_record,
    thinned,
)
from nestpipe.errors import ParseError
from nestpipe.trace import Span


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
    ("kind", "most"),
    [("lanes", MOST_LANES), ("evaluation", MOST_EVALUATIONS), ("choice", MOST_CHOICES)],
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


@dataclass(frozen=True)
class Step:
    step: int
    loss: float = 0.5
    samples: int = 8
    rows_read: int = 3
    rows_refreshed: int = 1
    rows_written: int = 3
    keys_asked: int = 4
    faults: int = 0


@dataclass
class KnownProbe:
    """A rank whose batches take 10 ms: 6 of compute, 8 of `retrieve` of which 4 are exposed."""

    batches: int = 0
    sent: int = 0
    chosen: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def spans(self, batches: int) -> Sequence[Span]:
        first = max(0, self.batches - batches)
        return [span for b in range(first, self.batches) for span in self._of_batch(b)]

    def _of_batch(self, b: int) -> list[Span]:
        start = 10.0 * b
        return [
            Span("retrieve", "host", b, None, 0, start, start + 8),
            Span("dense", "compute", b, 0, 0, start + 4, start + 9),
            Span("update", "compute", b, None, 0, start + 9, start + 10),
        ]

    def counters(self) -> Mapping[str, float]:
        return {"bytes_sent": self.sent}

    def gauges(self) -> Mapping[str, Any]:
        return {"tables": {"items": 2 * self.batches}}

    def choices(self) -> Sequence[Mapping[str, Any]]:
        return self.chosen


def recorder(folder: Path, probe: KnownProbe, clock: list[float], **given: Any) -> RunRecorder:
    return RunRecorder(folder, 0, probe, {"ranks": 1}, clock=lambda: clock[0], **given)


def test_totals_are_of_all_steps_and_times_of_those_that_were_looked_at(tmp_path: Path):
    probe, clock = KnownProbe(), [0.0]
    record = recorder(tmp_path, probe, clock)
    for step, loss in enumerate((0.5, math.nan, 1.5, 0.25), 1):
        record.on_step(Step(step, loss))
    probe.batches, probe.sent, clock[0] = 6, 100, 2.0
    record.tick()
    (point,) = read_record(file_of(tmp_path, 0)).points
    assert (point["steps"], point["samples"], point["seconds"]) == (4, 32, 2.0)
    assert (point["loss"], point["finite"]) == (2.25, 3)
    assert (point["low"], point["high"]) == (0.25, 1.5)
    assert (point["counters"], point["tables"]) == ({"bytes_sent": 100}, {"items": 12})
    # Of six batches the first may lack ops, and a mean is between the ends of two updates.
    assert (point["batches"], point["step_ms"], point["compute_ms"]) == (4, 40.0, 24.0)
    assert point["exposed_ms"] == {"retrieve": 16.0}
    assert point["hidden_ms"] == {"retrieve": 16.0}
    assert point["lane_ms"] == {"compute": 24.0, "host": 32.0}


def test_lanes_are_drawn_now_and_then_from_the_start_of_the_drawing(tmp_path: Path):
    probe, clock = KnownProbe(batches=6), [0.0]
    record = recorder(tmp_path, probe, clock)
    for step, now in ((1, 1.0), (2, 2.0), (3, 6.0)):
        probe.batches += 1
        clock[0] = now
        record.on_step(Step(step))
        record.tick()
    drawn = read_record(file_of(tmp_path, 0)).lanes
    assert [line["step"] for line in drawn] == [1, 3]
    assert drawn[0]["ms"] == 30.0
    assert drawn[0]["spans"][0] == ["retrieve", "host", 4, None, 0.0, 8.0]
    assert drawn[0]["spans"][-1] == ["update", "compute", 6, None, 29.0, 30.0]


def test_the_same_batches_are_not_counted_twice_and_no_steps_make_no_point(tmp_path: Path):
    probe = KnownProbe(batches=6)
    record = recorder(tmp_path, probe, [0.0])
    record.on_step(Step(1))
    record.tick()
    record.tick()
    record.on_step(Step(2))
    record.tick()
    points = read_record(file_of(tmp_path, 0)).points
    assert [(point["step"], point["batches"]) for point in points] == [(1, 4), (2, 4)]


def test_a_run_that_goes_on_adds_to_its_totals(tmp_path: Path):
    probe, clock = KnownProbe(batches=6, sent=70), [0.0]
    first = recorder(tmp_path, probe, clock)
    first.on_step(Step(1))
    clock[0] = 3.0
    first.tick()
    first.on_step(Step(2))  # not in the checkpoint
    first.close(FAILED, "a peer was lost")
    again = recorder(tmp_path, KnownProbe(sent=5), clock, first_step=1)
    again.on_step(Step(2))
    clock[0] = 4.0
    again.close(FINISHED)
    record = read_record(file_of(tmp_path, 0))
    assert [point["step"] for point in record.points] == [1, 2]
    last = record.points[-1]
    assert (last["steps"], last["seconds"], last["counters"]) == (2, 4.0, {"bytes_sent": 75})
    assert (last["batches"], last["exposed_ms"]) == (4, {"retrieve": 16.0})
    assert record.end is not None
    assert record.end["status"] == "finished"


def test_choices_are_written_once_each_also_where_a_run_goes_on(tmp_path: Path):
    def chosen(*steps: int) -> list[dict[str, Any]]:
        return [{"step": step, "micro_batches": 2, "reason": "faster"} for step in steps]

    probe = KnownProbe(chosen=chosen(0))
    first = recorder(tmp_path, probe, [0.0])
    for step in (1, 2, 3):
        first.on_step(Step(step))
        probe.chosen += chosen(step) if step == 2 else []
        first.tick()
    probe.chosen += chosen(9)  # after the checkpoint that the run goes on from
    first.on_step(Step(10))
    first.close(FAILED, "a peer was lost")
    # Its checkpoint knows neither that one nor the one that was made right after it.
    again = recorder(tmp_path, KnownProbe(chosen=chosen(0)), [0.0], first_step=2)
    again.on_step(Step(4))
    again.close(FINISHED)
    record = read_record(file_of(tmp_path, 0))
    assert [(line["step"], line["reason"]) for line in record.choices] == [(0, "faster")]


def test_a_record_knows_where_its_run_went_on(tmp_path: Path):
    file = file_of(tmp_path, 0)
    filled(file, 10)
    assert read_record(file).about["resumed"] == []
    for first_step in (4, 8, 6):  # the last from an older checkpoint than the one before
        RecordWriter(file, {"ranks": 1}, first_step=first_step).add("point", first_step + 3, {})
    assert read_record(file).about["resumed"] == [4, 6]


def test_the_thread_writes_by_itself_and_stops(tmp_path: Path):
    record = recorder(tmp_path, KnownProbe(batches=6), [0.0])
    record.start()
    record.on_step(Step(1))
    record.on_evaluation(1, "validation", {"auc": 0.75})
    record.close(FINISHED)
    found = read_record(file_of(tmp_path, 0))
    assert [point["step"] for point in found.points] == [1]
    assert found.evaluations[0]["metrics"] == {"auc": 0.75}


def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    record = recorder(tmp_path, KnownProbe(), [0.0])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record._writer, "add", full)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            record.on_step(Step(step))
            record.tick()
        record.close(FINISHED)
    assert [r.message for r in caplog.records] == [
        "the record of the run ends here: [Errno 28] No space left on device; training goes on"
    ]
