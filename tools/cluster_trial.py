"""Runs the lines of docs/cluster.md on two hosts, kills one of them, and compares the end.

python tools/cluster_trial.py [--keep]

The hosts are network namespaces with a link each, so this needs root and iproute2. The folder of
checkpoints is one that both see. The second host is killed, torchrun and ranks, once the run has
written its second checkpoint, and started again by the same line. Exits with 1 where the run does
not go on, or ends with other bits than one that was never interrupted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trial

from nestpipe.bench.machines import LINK, ShapedHost, inside, shaped_hosts
from nestpipe.checkpoint.folder import newest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/cluster.md"
LIMIT_S = 900.0
"""For each stage, on a machine that is busy with others."""


def lines(page: str) -> list[str]:
    """The commands that the page gives to a node, in order."""
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = [re.findall(r"^node\$ (.*(?:\n    .*)*)", block, re.MULTILINE) for block in blocks]
    return [line for found in shown for line in found]


def main(folder: Path) -> int:
    """Train twice, once without and once with a loss; 0 where both end alike."""
    # Its commands, torchrun among them, are those of this environment.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    page = PAGE.read_text()
    train, compare = lines(page)
    for name, text in trial.files(page).items():
        (folder / name).write_text(text)
    straight = "nestpipe train cluster.toml --ranks 2 --set run.checkpoint=runs/straight"
    _shell(straight, folder, os.environ)
    with shaped_hosts(2, "1gbit") as hosts:
        status = _interrupted(hosts, train, folder)
    if status:
        return _failed(f"the run ended with status {status}")
    return _shell(compare, folder, os.environ)


def _interrupted(hosts: list[ShapedHost], train: str, folder: Path) -> int:
    """The run on both hosts, the second of which is killed and comes back."""
    nodes = [_start(host, hosts[0], train, folder) for host in hosts]
    try:
        _wait_for(lambda: _step(folder) >= 40, "a second checkpoint", nodes)
        print(f"killing node 1 after step {_step(folder)}", flush=True)
        killed = _kill_all(hosts[1])
        nodes[1].wait()
        print(f"{killed} processes of node 1 are gone; it comes back", flush=True)
        nodes[1] = _start(hosts[1], hosts[0], train, folder)
        _wait_for(lambda: all(node.poll() is not None for node in nodes), "the end", [])
        return max(abs(node.returncode) for node in nodes)
    finally:
        for host in hosts:
            _kill_all(host)


def _start(host: ShapedHost, head: ShapedHost, line: str, folder: Path) -> subprocess.Popen[bytes]:
    own = {"HEAD": head.address, "ADDR": host.address, "GLOO_SOCKET_IFNAME": LINK}
    # Names of hosts cannot be looked up here, and torch would say so each time.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    shown = line.replace("\\\n", "").split()
    print(f"node {host.number}$ {' '.join(shown)}", flush=True)
    return subprocess.Popen(
        inside(host.holder, ["sh", "-c", line]),
        cwd=folder,
        env={**os.environ, **own, **quiet},
        stdin=subprocess.DEVNULL,
    )


def _kill_all(host: ShapedHost) -> int:
    """Kill all processes of a host but the one that keeps it, as when its plug is pulled."""
    network = Path(f"/proc/{host.holder}/ns/net").readlink()
    killed = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = (process / "ns/net").readlink() == network
        except OSError:  # it has ended
            continue
        if mine and int(process.name) != host.holder:
            os.kill(int(process.name), signal.SIGKILL)
            killed += 1
    return killed


def _step(folder: Path) -> int:
    found = newest(folder / "runs/cluster")
    return 0 if found is None else found.manifest.step


def _wait_for(done: Callable[[], bool], what: str, running: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > end or any(node.poll() is not None for node in running):
            sys.exit(_failed(f"there was no {what}"))
        time.sleep(0.2)


def _shell(line: str, folder: Path, environment: os._Environ[str]) -> int:
    print(f"$ {line}", flush=True)
    return subprocess.run(line, shell=True, cwd=folder, env=environment, check=False).returncode


def _failed(why: str) -> int:
    print(f"failed: {why}", flush=True)
    return 1


if __name__ == "__main__":
    if "--keep" in sys.argv:
        sys.exit(main(Path(tempfile.mkdtemp(prefix="nestpipe-cluster-"))))
    with tempfile.TemporaryDirectory(prefix="nestpipe-cluster-") as here:
        sys.exit(main(Path(here)))
