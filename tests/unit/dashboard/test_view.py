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

from nestpipe.dashboard.record import file_of, read_record
from nestpipe.dashboard.view import LOST_S, MOST_SHOWN, RunFolder, page_data
from nestpipe.errors import ConfigError, ParseError
from support.recorded_runs import COMPUTE_MS, IDLE_MS, KINDS, STEP_MS, written_run


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
