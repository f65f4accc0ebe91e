"""The recorder counts every step, looks at some, and never ends a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nestpipe.dashboard.record import FAILED, FINISHED, RunRecorder, file_of, read_record
from nestpipe.trace import Span


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
    seen: list[int] = field(default_factory=list[int])

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
