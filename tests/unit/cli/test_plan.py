"""`nestpipe plan` from the outside."""

import json
import os
import subprocess
import sys

import pytest

from nestpipe.cli.app import main
from nestpipe.config import load
from nestpipe.train.job import JobConfig
from support.job_world import world_profile

SMALL = (
    *("--set", "data.synthetic.samples=2000"),
    *("--set", "data.synthetic.num_tables=4"),
    *("--set", "data.synthetic.num_keys=500"),
    *("--set", "run.batch=128"),
    *("--set", "run.threads=1"),
    *("--set", "model.dim=8"),
)


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
    status, out, said = run("plan", *SMALL, "--profile", kept, "--json", "-")
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
        (("--hardware", "no.toml"), "no.toml"),
        (("--profile", "no.json"), "there is no file 'no.json'"),
        (("--steps", 2), "profile at least 6 steps"),
        (("--ranks", 0), "cannot start 0 ranks"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(run, arguments, sentence):
    status, _, said = run("plan", *SMALL, *arguments)
    assert status == 2
    assert sentence in said
    assert "Traceback" not in said


def test_a_file_that_is_no_profile_is_refused(run, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text("{")
    status, _, said = run("plan", "--profile", file)
    assert (status, "is not JSON" in said) == (2, True)
