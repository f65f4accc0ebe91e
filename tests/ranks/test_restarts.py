"""torchrun starts killed ranks again, and the run ends bit for bit where it would have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.checkpoint.folder import Checkpoint, newest
from nestpipe.checkpoint.merging import difference
from ranks.restart_program import STEPS
from support.examples import num_examples

PROGRAM = Path(__file__).parent / "restart_program.py"
RANKS, KILLS_EACH = 2, 2


def launched(folder: Path, seed: int, kills: int) -> Checkpoint:
    """The last checkpoint of a run whose ranks are killed so many times."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    torchrun += ["--max-restarts", str(kills), str(PROGRAM), str(folder), str(seed), str(kills)]
    done = subprocess.run(
        torchrun,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert kills == done.stderr.count("exitcode: -9"), done.stderr
    found = newest(folder)
    assert found is not None
    assert found.manifest.step == STEPS
    return found


@pytest.mark.parametrize("seed", range(-(-num_examples("restarts") // KILLS_EACH)))
def test_killed_ranks_come_back_by_themselves_bit_for_bit(tmp_path: Path, seed: int):
    straight = launched(tmp_path / "straight", seed, 0)
    killed = launched(tmp_path / "killed", seed, KILLS_EACH)
    assert difference(straight, killed).same_state
