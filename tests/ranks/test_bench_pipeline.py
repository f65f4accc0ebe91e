"""`nestpipe bench pipeline`: a run so small that only the shape of the answer counts."""

import json

import pytest

from nestpipe.cli.app import main

TINY = (
    "batch=4",
    "keys=3",
    "rows=100",
    "dim=4",
    "width=4",
    "micro_batches=2",
    "rounds=1",
    "steps=8",
)
SMALL = ["bench", "pipeline", "--ranks", "1", *(part for size in TINY for part in ("--set", size))]


def run(capfd, *arguments: str):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code, capfd.readouterr()


def test_every_plan_is_measured_and_predicted(capfd, tmp_path):
    kept = tmp_path / "traces"
    status, said = run(capfd, *SMALL, "--json", "-", "--traces", str(kept))
    assert status == 0, said.err
    found = json.loads(said.out)
    assert found["case"]["name"] == "network"
    seen = {(p["plan"], p["retrieval"], p["micro_batches"]): p for p in found["plans"]}
    assert len(seen) == 12
    for figures in seen.values():
        assert figures["step_ms"] > 0
        assert 0 < figures["pipeline_efficiency"] <= 1.001
    nested = seen["nested", "new", 2]
    assert nested["ratio"] == pytest.approx(seen["serial", "new", 2]["step_ms"] / nested["step_ms"])
    assert nested["error"] == pytest.approx(nested["predicted_ms"] / nested["step_ms"] - 1)
    assert seen["serial", "whole", 1]["predicted_ms"] is None
    assert (kept / "0-nested-new-2-round1-rank0.json").exists()


def test_a_table_is_printed_for_people(capfd):
    early = ("--set", "speculative_rows=true", "--set", "comm_dtype=bfloat16")
    status, said = run(capfd, *SMALL, "--plans", "nested", "--retrieval", "whole", *early)
    assert status == 0, said.err
    assert "network: 1 ranks of 4 samples (cpu)" in said.out
    assert "which are the same loop on a CPU" in " ".join(said.out.split())
    assert "nested whole 2 early" in said.out
