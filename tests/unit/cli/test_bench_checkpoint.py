"""`nestpipe bench checkpoint` takes turns and compares; the figures themselves are a machine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestpipe.bench.checkpoint import CheckpointReading
from nestpipe.cli.app import main
from nestpipe.train.background import StoodStill

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
    turns = [found[name] for name in ("without", "cut", "with_them")]
    assert all(len(of) == 2 and min(of) > 0 for of in turns)
    headers = 2 * 200  # a file for each table
    assert found["bytes_touched"] <= found["bytes_of_rows"] <= found["bytes_touched"] + headers
    still = found["stood_still"]
    assert still["for_copies"] > 0
    assert found["waited_s"] == pytest.approx(sum(still.values()))
    told = capsys.readouterr().out
    assert "training stood still for" in told
    assert "slower beside the thread that writes" in told
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing is left"


def test_full_checkpoints_have_more_than_was_touched(tmp_path: Path):
    found = measured(tmp_path, "--full", "--set", "data.synthetic.num_keys=100000")
    assert found["bytes_of_rows"] > found["bytes_touched"]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_pool_is_copied_or_flushed(tmp_path: Path, on_device: bool):
    pooled = ("--set", "pipeline.retrieval=pooled", "--set", "pipeline.owner_sums=off")
    switch = ("--set", f"run.snapshot_on_device={str(on_device).lower()}")
    found = measured(tmp_path, *pooled, *switch)
    assert (found["stood_still"]["for_flush"] == 0) == on_device
    headers = 2 * 200
    assert found["bytes_touched"] <= found["bytes_of_rows"] <= found["bytes_touched"] + headers


def test_what_is_lost_is_told_apart():
    """Intervals of 100 samples take 1, 1.25 and 2 s in the median, and training waits for 0.25."""
    reading = CheckpointReading(
        without=(100.0, 50.0, 100.0),
        cut=(80.0, 50.0, 80.0),
        with_them=(50.0, 50.0, 50.0),
        interval_samples=100,
        stood_still=StoodStill(for_copies=0.1, for_flush=0.05, for_writes=0.1),
        bytes_written=120,
        bytes_of_rows=100,
        bytes_touched=100,
    )
    assert reading.cost == pytest.approx(0.5)
    assert reading.bytes_ratio == pytest.approx(1.2)
    assert reading.drained_s == pytest.approx(0.25)
    assert reading.beside_s == pytest.approx(0.5)
