"""What the page is given: exact means, few points, and how the run stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nestpipe.dashboard.record import RecordWriter, file_of, read_record
from nestpipe.dashboard.view import LOST_S, MOST_SHOWN, RESOURCES, RunFolder, page_data
from nestpipe.errors import ConfigError, ParseError
from nestpipe.schedule import Kind, Lane, PlanOptions
from nestpipe.schedule.plans import nested
from support.recorded_runs import COMPUTE_MS, IDLE_MS, KINDS, STEP_MS, about, written_run


def data_of(folder: Path, **given: Any) -> dict[str, Any]:
    found = page_data(RunFolder(folder).read(), **given)
    json.dumps(found, allow_nan=False)  # it is plain, and has no number that is none
    return found


def test_ten_thousand_steps_are_few_points_with_the_means_of_all(tmp_path: Path):
    data = data_of(written_run(tmp_path, 10_000))
    series = data["series"]
    assert 100 < len(series["step"]) <= MOST_SHOWN
    assert series["step"][-1] == 10_000
    assert series["samples_per_s"] == pytest.approx([50_000] * len(series["step"]))
    assert series["step_ms"] == pytest.approx([STEP_MS] * len(series["step"]))
    exposed = sum(of for _, of in KINDS.values())
    assert series["exposed_ms"] == pytest.approx([exposed] * len(series["step"]))
    assert series["idle_ms"][-1] == pytest.approx(IDLE_MS)
    assert series["compute_ms"][-1] == pytest.approx(COMPUTE_MS)
    assert series["keys_shared"][-1] == 0.25
    assert series["without_read"][-1] == 0.25
    assert all(low < loss < high for low, loss, high in zip(
        series["loss_low"], series["loss"], series["loss_high"], strict=True
    ))  # fmt: skip
    assert len(json.dumps(data)) < 200_000


def test_ranks_are_added_up_and_compared(tmp_path: Path):
    data = data_of(written_run(tmp_path, 100, ranks=3))
    assert data["series"]["bytes_per_step"][-1] == pytest.approx(15_000)
    assert data["series"]["rows_read"][-1] == pytest.approx(1800)
    assert {table["name"]: table["rows"][-1] for table in data["tables"]} == {
        "items": 3000,
        "users": 1200,
    }
    assert [row["waited_ms"] for row in data["ranks"]] == pytest.approx([0, 2, 4])
    assert data["series"]["waited_ms"][-1] == pytest.approx(4)
    assert data["series"]["waited_mean_ms"][-1] == pytest.approx(2)
    assert data["now"]["waited_ms"] == pytest.approx(4)
    assert {window["rank"] for window in data["lanes"]} == {0, 1, 2}


def test_a_rank_that_looked_at_slower_batches_did_not_wait_longer(tmp_path: Path):
    """Ranks look at batches of their own; that a batch was slow says nothing of who was late."""
    written_run(tmp_path, 100, ranks=2)
    file = file_of(tmp_path / "record", 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "point" and line["step"] > 50:
            line["step_ms"] += 30 * (line["step"] - 50)
            line["lane_ms"]["net"] += 30 * (line["step"] - 50)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = data_of(tmp_path)
    assert data["series"]["waited_ms"] == pytest.approx([2] * 100)
    assert [row["waited_ms"] for row in data["ranks"]] == pytest.approx([0, 2])


def test_an_adaptive_run_tells_its_newest_micro_batches(tmp_path: Path):
    written_run(tmp_path, 10)
    about = data_of(tmp_path)["run"]
    assert (about["micro_batches"], about["adaptive"]) == (2, False)
    file = file_of(tmp_path / "record", 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "point":
            line["micro_batches"] = 16 if line["step"] < 6 else 4
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = data_of(tmp_path)["run"]
    assert (about["micro_batches"], about["adaptive"]) == (4, True)


def test_a_rank_that_writes_later_is_read_between_its_own_points(tmp_path: Path):
    written_run(tmp_path, 100, ranks=2)
    file = file_of(tmp_path / "record", 1)
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for n, line in enumerate(lines) if n % 3 == 0 and n < 80]
    file.write_text("".join(kept))
    data = data_of(tmp_path)
    assert data["series"]["bytes_per_step"] == pytest.approx([10_000] * 100)


def test_kinds_are_sorted_by_what_they_take_and_idle_comes_last(tmp_path: Path):
    kinds = data_of(written_run(tmp_path, 50))["kinds"]
    assert [kind["kind"] for kind in kinds] == ["retrieve", "prefetch", "rows", "grads", "idle"]
    assert kinds[0]["hidden_ms"] == pytest.approx(6.0)
    assert kinds[0]["exposed_ms"] == pytest.approx(1.0)


def test_a_run_without_steps_is_an_empty_page(tmp_path: Path):
    data = data_of(written_run(tmp_path, 0, end=None))
    assert (data["run"]["status"], data["run"]["step"], data["series"]) == ("running", 0, {})


def test_a_run_that_goes_on_knows_what_is_left(tmp_path: Path):
    written_run(tmp_path, 100, end=None)
    about = data_of(tmp_path)["run"]
    assert (about["status"], about["left_s"]) == ("running", None)
    record = tmp_path / "record"
    text = file_of(record, 0).read_text().replace('"steps":100', '"steps":300', 1)
    file_of(record, 0).write_text(text)
    assert data_of(tmp_path)["run"]["left_s"] == pytest.approx(4.0)


def test_a_failure_is_that_of_the_first_rank_that_told_one(tmp_path: Path):
    written_run(tmp_path, 10, ranks=2, end="failed")
    about = data_of(tmp_path)["run"]
    assert about["status"] == "failed"
    assert about["sentence"].startswith("rank 0: the loss of step 7 is nan")


def test_a_process_that_is_no_more_has_lost_its_run(tmp_path: Path):
    written_run(tmp_path, 10, end=None)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    file = file_of(tmp_path / "record", 0)
    file.write_text(file.read_text().replace(f'"pid":{os.getpid()}', f'"pid":{gone.pid}'))
    about = data_of(tmp_path)["run"]
    assert about["status"] == "lost"
    assert "ended without a word" in about["sentence"]


def test_a_run_of_another_machine_is_lost_when_it_is_silent(tmp_path: Path):
    written_run(tmp_path, 10, end=None)
    file = file_of(tmp_path / "record", 0)
    file.write_text(file.read_text().replace('"host":"', '"host":"not-'))
    assert data_of(tmp_path)["run"]["status"] == "running"
    about = data_of(tmp_path, now=time.time() + LOST_S + 5)["run"]
    assert (about["status"], about["sentence"]) == ("lost", "no sign of the run for 20 s")


def test_ranks_of_an_earlier_start_are_left_out(tmp_path: Path):
    written_run(tmp_path, 10, ranks=3)
    file = file_of(tmp_path / "record", 0)
    file.write_text(file.read_text().replace('"ranks":3', '"ranks":2'))
    assert [row["rank"] for row in data_of(tmp_path)["ranks"]] == [0, 1]


@pytest.mark.parametrize("below", [".", "record", "step-00000010"])
def test_a_run_is_found_by_its_folder_its_record_or_a_checkpoint(tmp_path: Path, below: str):
    written_run(tmp_path, 10)
    (tmp_path / "step-00000010").mkdir()
    assert data_of(tmp_path / below)["run"]["step"] == 10


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no folder"):
        RunFolder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no record of a run"):
        RunFolder(tmp_path)
    (tmp_path / "rank-00000.jsonl").write_text("{}\n")
    with pytest.raises(ParseError, match="is not the record of a run"):
        RunFolder(tmp_path).read()


def test_a_point_that_lacks_figures_does_not_end_the_page(tmp_path: Path):
    written_run(tmp_path, 3)
    file = file_of(tmp_path / "record", 0)
    with file.open("a") as more:
        more.write('{"kind":"point","step":4,"time":1}\n{"kind":"lanes","step":4,"time":1}\n')
    assert len(read_record(file).points) == 4
    assert data_of(tmp_path)["run"]["step"] == 4


def changed(folder: Path, rank: int, **of_a_step: float) -> Path:
    """The run with other totals on one rank: `lane_ms__net=9` is so much in each step."""
    file = file_of(folder / "record", rank)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in (line for line in lines if line["kind"] == "point"):
        for name, value in of_a_step.items():
            group, _, kind = name.partition("__")
            of = line[group] if kind else line
            of[kind or group] = value * line["steps"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_a_step_is_spent_on_adds_up_and_the_largest_part_is_named(tmp_path: Path):
    limit = data_of(written_run(tmp_path, 100))["limit"]
    parts = {part["resource"]: part["ms"] for part in limit["parts"]}
    assert parts == pytest.approx({"compute": COMPUTE_MS, "net": 2.0, "host": 1.0, "idle": IDLE_MS})
    assert sum(part["share"] for part in limit["parts"]) == pytest.approx(1)
    assert [part["resource"] for part in limit["parts"]] == ["compute", "net", "host", "idle"]
    assert (limit["resource"], limit["op"], limit["rank"]) == ("compute", None, None)


def test_the_op_that_the_longest_exposed_part_waits_for_is_named(tmp_path: Path):
    more = {"exposed_ms__retrieve": 20.0, "exposed_ms__writeback": 4.0, "step_ms": STEP_MS + 23}
    limit = data_of(changed(written_run(tmp_path, 100), 0, **more))["limit"]
    assert (limit["resource"], limit["op"]) == ("host", "retrieve")
    assert limit["parts"][0]["ms"] == pytest.approx(24)


def test_a_slow_rank_is_named_and_not_blamed_on_the_network(tmp_path: Path):
    folder = written_run(tmp_path, 100, ranks=3)
    for rank, network in enumerate((60.0, 61.0, 5.0)):
        waits = {"lane_ms__net": network, "exposed_ms__rows": network, "step_ms": STEP_MS + network}
        changed(folder, rank, **waits)
    changed(folder, 2, step_ms=STEP_MS + 61, compute_ms=COMPUTE_MS + 56)
    limit = data_of(folder)["limit"]
    assert (limit["resource"], limit["rank"]) == ("wait", 2)
    assert sum(part["share"] for part in limit["parts"]) == pytest.approx(1)


def test_time_between_steps_is_said_where_there_is_much_of_it(tmp_path: Path):
    spent = {"seconds": STEP_MS / 1e3 / 0.9}
    assert data_of(changed(written_run(tmp_path, 100), 0, **spent))["limit"]["between_steps"] == 0
    spent = {"seconds": STEP_MS / 1e3 / 0.6}
    limit = data_of(changed(tmp_path, 0, **spent))["limit"]
    assert limit["between_steps"] == pytest.approx(0.4)


def test_nothing_limits_a_run_that_was_not_timed(tmp_path: Path):
    assert data_of(written_run(tmp_path / "empty", 0, end=None))["limit"] is None
    run = written_run(tmp_path / "run", 1)
    changed(run, 0, batches=0, step_ms=0, compute_ms=0)
    assert data_of(run)["limit"] is None


def test_steps_without_a_loss_are_counted_and_the_newest_is_not_a_number(tmp_path: Path):
    good = data_of(written_run(tmp_path / "good", 100))
    assert (good["now"]["losses_not_finite"], good["now"]["loss_is_finite"]) == (0, True)
    assert not any(good["series"]["loss_not_finite"])
    file = file_of(written_run(tmp_path / "bad", 100) / "record", 0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "point" and line["step"] > 90:
            line["finite"] = 90
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bad = data_of(tmp_path / "bad")
    assert (bad["now"]["losses_not_finite"], bad["now"]["loss_is_finite"]) == (10, False)
    assert bad["series"]["loss_not_finite"][-10:] == [1] * 10
    assert bad["series"]["loss_not_finite"][-11] == 0


def test_kinds_of_ops_have_the_resource_of_their_lane():
    """A new kind of op must not be taken for the network without anybody having thought of it."""
    shape = nested(PlanOptions()).shape
    lanes = {Lane.NET: "net", Lane.KEYS: "net", Lane.DENSE_NET: "net", Lane.ROUTE: "route"}
    lanes |= {Lane.HOST: "host", Lane.WRITE: "host", Lane.LOADER: "load", Lane.COPY: "load"}
    for kind in Kind:
        expected = lanes.get(shape.lane(kind), "compute")
        if kind in (Kind.SYNC, Kind.SWAP):
            expected = "host"  # part of how rows come to the device
        assert RESOURCES.get(kind.value, "net") == expected, kind


def test_choices_of_an_adaptive_run_are_shown_with_their_reasons(tmp_path: Path):
    folder = written_run(tmp_path, 20, end=None)
    writer = RecordWriter(file_of(folder / "record", 0), about(0, 1, 40), first_step=20)
    settings = {"first": 1.0, "last": 0.5, "device_memory": "auto", "reason": "the fastest"}
    writer.add("choice", 8, {"micro_batches": 2, **settings})
    data = data_of(folder)
    assert data["choices"] == [{"step": 8, "micro_batches": 2, **settings}]
    assert data["run"]["resumed"] == [20]


def test_groups_that_read_more_rows_than_they_asked_for_show_no_negative_part(tmp_path: Path):
    data = data_of(changed(written_run(tmp_path, 10), 0, rows_read=1200))  # 800 were asked for
    assert data["series"]["without_read"] == [0] * 10
    assert data["now"]["without_read"] == 0
