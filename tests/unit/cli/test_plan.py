"""`nestpipe plan` from the outside."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.cli.app import main
from nestpipe.config import load
from nestpipe.planner import Candidate
from nestpipe.sim.job_costs import ProfiledRun
from nestpipe.train.job import JobConfig
from support.job_world import true_trace, world_profile

SMALL = (
    *("--set", "data.synthetic.samples=2000"),
    *("--set", "data.synthetic.test_samples=200"),
    *("--set", "data.synthetic.num_tables=4"),
    *("--set", "data.synthetic.num_keys=500"),
    *("--set", "run.batch=128"),
    *("--set", "run.threads=1"),
    *("--set", "model.dim=8"),
)

BATCH = ("--set", "run.batch=512")
"""That of `world_profile`."""
OFFER = Path(__file__).resolve().parents[3] / "configs/offer.toml"


@pytest.fixture
def run(capsys):
    def go(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return go


def test_two_ranks_are_profiled_planned_checked_and_trained(tmp_path):
    planned, kept = tmp_path / "planned.toml", tmp_path / "profile.json"
    command = [sys.executable, "-m", "nestpipe", "plan", *SMALL, "--ranks", "2", "--steps", "6"]
    command += ["--check", "4", "--out", str(planned), "--save-profile", str(kept)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "x over the fastest serial" in done.stdout
    told = json.loads((tmp_path / "plan.json").read_text())
    steps = [row["measured_ms"] for row in (told["chosen"], *told["others"])]
    ran = [ms for ms in steps if ms is not None]
    assert ran == sorted(ran)
    assert len(ran) >= 3
    config = load(JobConfig, planned)
    assert config.pipeline.plan == told["chosen"]["settings"]["pipeline"]["plan"]
    assert config.pipeline.comm_dtype == "float32"
    profile = json.loads(kept.read_text())
    assert len(profile["pools"]) == 2


def test_a_saved_profile_is_planned_again_without_a_run(run, tmp_path):
    kept = tmp_path / "profile.json"
    kept.write_text(json.dumps(world_profile(net=20, dense=40).as_json()))
    status, out, said = run("plan", *BATCH, "--profile", kept, "--json", "-")
    assert status == 0, said
    told = json.loads(out)
    assert told["chosen"]["settings"]["pipeline"]["plan"] == "nested"
    assert told["chosen"]["gain"] > 1.4


def test_a_hardware_file_is_planned_for(run, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[network]\ngb_per_s = 5.0\n")
    status, out, said = run("plan", "--hardware", file, "--ranks", 8, "--json", "-")
    assert status == 0, said
    assert json.loads(out)["looked_at"] > 20


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--check", 5, "--hardware", "x.toml"), "nothing runs with --hardware or --profile"),
        (("--profile", "p.json", "--ranks", 4), "--ranks is 4, but nothing runs"),
        (("--profile", "p.json", "--steps", 9), "--steps is 9, but nothing runs"),
        (("--hardware", OFFER, "--ranks", 2), "is an offer for simulate --job"),
        (("--hardware", "no.toml"), "no.toml"),
        (("--profile", "no.json"), "there is no file 'no.json'"),
        (("--steps", 2), "profile at least 6 steps"),
        (("--out", "/proc/planned.toml"), "cannot write '/proc/planned.toml'"),
        (("--save-profile", "/proc/no/profile.json"), "cannot write '/proc/no/profile.json'"),
        (("--ranks", 0), "cannot start 0 ranks"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(run, arguments, sentence):
    status, _, said = run("plan", *SMALL, *arguments)
    assert status == 2
    assert sentence in said
    assert "Traceback" not in said


def test_a_profile_of_other_batches_is_refused(run, tmp_path):
    kept = tmp_path / "profile.json"
    kept.write_text(json.dumps(world_profile().as_json()))
    status, _, said = run("plan", "--profile", kept, "--set", "run.batch=4096")
    assert (status, "256 samples for each of 2 ranks, and run.batch is 4096" in said) == (2, True)


def test_no_workers_at_all_are_refused(run, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[network]\ngb_per_s = 5.0\n")
    status, _, said = run("plan", *SMALL, "--hardware", file, "--ranks", 0)
    assert (status, "cannot start 0 ranks" in said) == (2, True)


def profile_with_bfloat16(tmp_path):
    """One in which messages of half the bytes take a quarter of the time."""
    known = world_profile(net=40)
    split = Candidate(retrieval="new", micro_batches=8)
    trace = true_trace(split, 2, net=10, dense=20, batches=9)
    form = replace(split, comm_dtype="bfloat16").form
    half = ProfiledRun(form, (trace,), known.runs[1].sent, 0.0)
    kept = tmp_path / "profile.json"
    kept.write_text(json.dumps(replace(known, runs=(*known.runs, half)).as_json()))
    return kept


def test_a_profile_with_bfloat16_loses_no_bits_unless_that_is_allowed(run, tmp_path):
    kept = profile_with_bfloat16(tmp_path)
    found = {}
    for allowed in ((), ("--allow-rounding",)):
        status, out, said = run("plan", *BATCH, "--profile", kept, "--json", "-", *allowed)
        assert status == 0, said
        found[allowed] = json.loads(out)["chosen"]["settings"]["pipeline"]["comm_dtype"]
    assert found == {(): "float32", ("--allow-rounding",): "bfloat16"}


def test_rounding_that_a_profile_knows_nothing_of_is_refused(run, tmp_path):
    kept = tmp_path / "profile.json"
    kept.write_text(json.dumps(world_profile().as_json()))
    status, _, said = run("plan", *BATCH, "--profile", kept, "--allow-rounding")
    assert (status, "has no run with bfloat16" in said) == (2, True)


def test_a_file_that_is_no_profile_is_refused(run, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text("{")
    status, _, said = run("plan", "--profile", file)
    assert (status, "is not JSON" in said) == (2, True)
