"""A link that is cut in the middle of training: every rank says where it stood, and all go on."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from nestpipe.bench.machines import LINK, PORT, ShapedHost, inside, shaped_hosts
from nestpipe.checkpoint.folder import newest, paths_in, verified
from nestpipe.checkpoint.merging import difference

STEPS = 120
SETTINGS = (
    *("run.batch=8", "run.device=cpu", "run.checkpoint_every=10", "run.incremental=true"),
    *(f"data.synthetic.samples={8 * STEPS}", "data.synthetic.test_samples=16"),
    *("data.synthetic.num_tables=2", "model.dim=4", "pipeline.plan=nested", "run.timeout_s=6"),
)
LOST_PEER = 3
"""Exit status of a rank that lost its peers."""


def started(hosts: list[ShapedHost], folder: Path) -> list[subprocess.Popen[str]]:
    """The one launch line, on every host."""
    settings = [w for s in (*SETTINGS, f"run.checkpoint={folder}") for w in ("--set", s)]
    line = [sys.executable, "-m", "nestpipe", "train", "--resume", "auto", *settings]
    common = {"WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    common |= {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return [
        subprocess.Popen(
            inside(host.holder, line),
            env={**os.environ, **common, "RANK": str(host.number)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]


def ended(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Status and last words of every rank; one that hangs is a failure."""
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def set_link(host: ShapedHost, state: str) -> None:
    subprocess.run(inside(host.holder, ["ip", "link", "set", LINK, state]), check=True)


def test_ranks_name_the_op_of_a_cut_link_and_go_on_bit_for_bit(tmp_path: Path):
    with shaped_hosts(2, "200mbit") as hosts:
        assert [status for status, _ in ended(started(hosts, tmp_path / "straight"))] == [0, 0]
        ranks = started(hosts, tmp_path / "cut")
        while len(paths_in(tmp_path / "cut")) < 3 and all(r.poll() is None for r in ranks):
            time.sleep(0.02)
        set_link(hosts[1], "down")
        for number, (status, said) in enumerate(ended(ranks)):
            assert status == LOST_PEER, said
            assert re.search(rf"rank {number} .*`\w+ \d+(\.\d+)?`", said), said
            assert "Traceback" not in said
        last = newest(tmp_path / "cut")
        assert last is not None
        assert last.manifest.step < STEPS, "the link was cut too late"
        set_link(hosts[1], "up")
        assert [status for status, _ in ended(started(hosts, tmp_path / "cut"))] == [0, 0]
    for path in paths_in(tmp_path / "cut"):
        straight = verified(tmp_path / "straight" / path.name)
        assert difference(straight, verified(path)).same_state
    last = newest(tmp_path / "cut")
    assert last is not None
    assert last.manifest.step == STEPS
