"""torchrun starts killed ranks again, and the run ends bit for bit where it would have ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nestpipe.checkpoint.folder import Checkpoint, newest
from nestpipe.checkpoint.merging import difference
from ranks.restart_program import STEPS
from support.examples import is_long, num_examples

PROGRAM = Path(__file__).parent / "restart_program.py"
RANKS = 2
KILLS_EACH = 5 if is_long() else 2


def launched(
    folder: Path, seed: int, kills: int, *, ranks: int = RANKS, restarts: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A run whose ranks are killed so many times, and as often started again."""
    restarts = kills if restarts is None else restarts
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torchrun += ["--max-restarts", str(restarts), str(PROGRAM), str(folder), str(seed), str(kills)]
    return subprocess.run(
        torchrun,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def last_of(folder: Path, done: subprocess.CompletedProcess[str], kills: int) -> Checkpoint:
    """The last checkpoint of a run that ended by itself after so many kills."""
    assert done.returncode == 0, done.stderr
    noted = Path(f"{folder}.kills")
    assert kills == (len(noted.read_text().splitlines()) if noted.exists() else 0), done.stderr
    found = newest(folder)
    assert found is not None
    assert found.manifest.step == STEPS
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("straight")
    return last_of(folder, launched(folder, 0, 0), 0)


@pytest.mark.parametrize("seed", range(-(-num_examples("restarts") // KILLS_EACH)))
def test_killed_ranks_come_back_by_themselves_bit_for_bit(
    tmp_path: Path, seed: int, straight: Checkpoint
):
    done = launched(tmp_path / "run", seed, KILLS_EACH)
    assert difference(straight, last_of(tmp_path / "run", done, KILLS_EACH)).same_state


@pytest.mark.skipif(not is_long(), reason="starts a dozen processes; set NESTPIPE_EXAMPLES=long")
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_and_comes_back_too(tmp_path: Path, ranks: int):
    """The launch line of a smaller or larger machine, which is killed as well."""
    done = launched(tmp_path / "run", 7, 1, restarts=0)
    assert done.returncode != 0
    Path(tmp_path / "run.kills").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    of_run = launched(tmp_path / "run", 8, 2, ranks=ranks)
    of_straight = launched(tmp_path / "straight", 8, 0, ranks=ranks)
    found = last_of(tmp_path / "run", of_run, 2)
    assert difference(last_of(tmp_path / "straight", of_straight, 0), found).same_state


MEET = """
from nestpipe import connect

comm = connect("gloo", meet_s=60)
print(comm.rank, "met", comm.size)
comm.close()
"""


def test_a_node_that_came_back_meets_others_that_count_more_restarts(unused_port: int):
    """Each node counts its own restarts; rank 0 makes the store, so that counts do not matter."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    common |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **common,
                "RANK": str(rank),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            },
        )
        for rank, restarts in enumerate((3, 0))
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["0 met 2\n", "1 met 2\n"]


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
