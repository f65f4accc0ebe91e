"""SIGKILL at any op and any file-system call: the run goes on and ends where it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.examples import num_examples

PROGRAM = Path(__file__).with_name("crash_program.py")


def outcomes(what: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """What the program says; all of it must be good."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, str(folder), "0", str(count)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == count
    bad = [one for one in found if not one["good"]]
    assert not bad, f"{bad}\n{done.stderr}"
    return found


def test_a_killed_run_ends_bit_for_bit_and_no_good_checkpoint_is_wrong(tmp_path: Path):
    count = num_examples("crashes")
    found = outcomes("crashes", tmp_path, count)
    assert sum(len(one["killed"]) for one in found) >= count // 2


def test_of_two_trainers_in_one_folder_one_is_refused_and_nothing_is_mixed(tmp_path: Path):
    outcomes("two", tmp_path, num_examples("two trainers"))
