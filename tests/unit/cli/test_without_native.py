"""`NESTPIPE_NATIVE=0` alone is enough to train, evaluate and verify without a compiler."""

import os
import subprocess
import sys
from pathlib import Path


def nestpipe(*arguments: str) -> str:
    """One command in a process that finds no compiler."""
    environment = {**os.environ, "NESTPIPE_NATIVE": "0", "PATH": "/nowhere", "COLUMNS": "200"}
    environment |= {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    command = [sys.executable, "-m", "nestpipe", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_without_native_code_trains_evaluates_and_verifies(tmp_path: Path):
    small = ["data.synthetic.samples=320", "data.synthetic.test_samples=64"]
    small += ["data.synthetic.num_tables=2", "run.batch=64", "run.device=cpu"]
    settings = [part for one in small for part in ("--set", one)]
    told = nestpipe("train", *settings, "--set", f"run.checkpoint={tmp_path}")
    assert "evaluation on the validation split" in told
    assert "auc" in nestpipe("eval", str(tmp_path))
    proven = nestpipe("verify", *settings, "--plan", "nested")
    assert proven.startswith("identical")
