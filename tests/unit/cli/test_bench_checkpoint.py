"""`nestpipe bench checkpoint` takes turns and compares; the figures themselves are a machine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestpipe.bench.checkpoint import CheckpointReading
from nestpipe.cli.app import main

SETTINGS = (
    *("data.synthetic.samples=64", "data.synthetic.test_samples=8", "data.synthetic.num_tables=2"),
    *("model.dim=4", "model.bottom=[4]", "model.top=[4]", "run.batch=16", "run.device=cpu"),
)


def measured(tmp_path: Path, *options: str) -> dict[str, Any]:
    settings = [word for one in SETTINGS for word in ("--set", one)]
    sizes = ["--every", "3", "--intervals", "2", "--rounds", "2", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(["bench", "checkpoint", *sizes, *settings, *options, "--json", str(tmp_path / "out")])
    assert end.value.code == 0
    return json.loads((tmp_path / "out").read_text())


def test_bytes_of_increments_are_those_of_touched_rows(tmp_path: Path, capsys: Any):
    found = measured(tmp_path)
    assert len(found["without"]) == len(found["with_them"]) == 2
    assert all(speed > 0 for speed in (*found["without"], *found["with_them"]))
    headers = 2 * 200  # a file for each table
    assert found["bytes_touched"] <= found["bytes_of_rows"] <= found["bytes_touched"] + headers
    assert "training stood still for" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left"


def test_full_checkpoints_have_more_than_was_touched(tmp_path: Path):
    found = measured(tmp_path, "--full", "--set", "data.synthetic.num_keys=100000")
    assert found["bytes_of_rows"] > found["bytes_touched"]


def test_the_cost_is_the_median_over_neighbouring_turns():
    reading = CheckpointReading((100.0, 50.0, 10.0), (97.0, 50.0, 5.0), 0.1, 120, 100, 100)
    assert reading.cost == pytest.approx(0.03)
    assert reading.bytes_ratio == pytest.approx(1.2)
