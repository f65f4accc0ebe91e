"""SIGKILL, a full disk or an I/O error at any op and any call: the run ends where it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.examples import is_long, num_examples

PROGRAM = Path(__file__).with_name("crash_program.py")
PARTS = 2
LEAST_POINTS = 300


def outcomes(what: str, folder: Path, count: int, part: int = 0, parts: int = 1) -> list[Any]:
    """What the program says; all of it must be good."""
    words = [what, str(folder), "0", *map(str, (count, part, parts))]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    bad = [one for one in found if not one["good"]]
    assert not bad, f"{bad}\n{done.stderr}"
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_each_way_of_saving_survives_each_kind_of_op_and_call(tmp_path: Path, part: int):
    """Every call that opens, writes, syncs, renames or removes, and every kind of op.

    They are killed, or refused by the file system, in turn: 300 of them, chosen once for all; in
    the long profile all in all ways.
    """
    found = outcomes("matrix", tmp_path, -1 if is_long() else 0, part, PARTS)
    assert len(found) >= LEAST_POINTS // PARTS
    ended = [one for one in found if one["status"]]
    assert len(ended) >= 0.9 * len(found), "a point that nothing reaches tests nothing"


def test_a_run_that_is_killed_again_and_again_ends_bit_for_bit(tmp_path: Path):
    count = num_examples("crashes")
    found = outcomes("crashes", tmp_path, count)
    assert sum(len(one["killed"]) for one in found) >= count // 2


def test_of_two_trainers_in_one_folder_one_is_refused_and_nothing_is_mixed(tmp_path: Path):
    found = outcomes("two", tmp_path, num_examples("two trainers"))
    assert len(found) == num_examples("two trainers")
