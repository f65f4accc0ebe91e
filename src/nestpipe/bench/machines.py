"""Where the ranks of a benchmark run: as hosts with shaped links, or several on one GPU.

Every host has one link to a switch, shaped by `tc tbf` in both directions. The namespaces have no
names: each lives as long as a process that waits in it, and that process ends with ours, so the
kernel takes everything back however we end. Interfaces of the machine itself are never touched.

Ranks on one GPU each look like a host of their own to NCCL, and MPS lets them run together.

Where systems are compared, each does its jobs in processes of its own, one after the other.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nestpipe.comm import launch
from nestpipe.errors import ConfigError, NestpipeError, RunError

PROGRAMS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("unshare", "nsenter", "taskset"), "util-linux"),
}
"""External programs, and the distribution package of each."""
LINK = "eth0"
"""The name of a host's link, inside the host."""
MOST_HOSTS = 64
BURST_BYTES = 128 * 1024
"""What a link may send at once: two of the largest packets. With less it falls behind its rate
whenever the kernel wakes it late."""
QUEUE_MS = 400
"""How long a link's queue may get: senders that start together should not lose packets."""
START_S = 10.0
_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_SCALE = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True, slots=True)
class ShapedHost:
    """One namespace with its own network."""

    number: int
    address: str
    holder: int
    """The process that keeps the namespace."""
    switch: int
    """The process that keeps the namespace of the switch."""


def why_not() -> str | None:
    """What this machine lacks to have hosts, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = sorted({PROGRAMS[name] for name in missing})
        return f"{', '.join(missing)} not found; install {' and '.join(packages)}"
    if os.geteuid() != 0:
        return "making network namespaces needs root; run it as root"
    return None


def bits_per_s(rate: str) -> float:
    """The speed that a text like `200mbit` means."""
    match = _RATE.fullmatch(rate)
    speed = float(match[1]) * _SCALE[match[2]] if match else 0.0
    if not 1e5 <= speed <= 1e11:
        raise ConfigError(
            f"rate is {rate!r}; write a speed from 100kbit to 100gbit, like 200mbit or 1gbit"
        )
    return speed


@contextmanager
def shaped_hosts(count: int, rate: str) -> Iterator[list[ShapedHost]]:
    """Hosts on one switch, links shaped to `rate` both ways, removed on exit."""
    bits_per_s(rate)
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError(f"{count} hosts cannot be made; ask for 1 to {MOST_HOSTS}")
    if (reason := why_not()) is not None:
        raise ConfigError(f"shaped hosts cannot be made: {reason}")
    with ExitStack() as held:
        switch = held.enter_context(_namespace())
        _call(switch, "ip link add switch type bridge")
        _call(switch, "ip link set switch up")
        hosts: list[ShapedHost] = []
        for number in range(count):
            holder = held.enter_context(_namespace())
            host = ShapedHost(number, f"10.77.0.{number + 1}", holder, switch)
            _connect(host, rate)
            hosts.append(host)
        yield hosts


def _connect(host: ShapedHost, rate: str) -> None:
    """A cable from the host to the switch, slowed where each end sends."""
    port = f"port{host.number}"
    shape = f"root tbf rate {rate} burst {BURST_BYTES} latency {QUEUE_MS}ms"
    switch = host.switch
    _call(switch, f"ip link add {port} type veth peer name {LINK} netns {host.holder}")
    _call(switch, f"tc qdisc add dev {port} {shape}")
    _call(switch, f"ip link set {port} master switch up")
    _call(host.holder, f"tc qdisc add dev {LINK} {shape}")
    _call(host.holder, f"ip address add {host.address}/24 dev {LINK}")
    _call(host.holder, f"ip link set {LINK} up")
    _call(host.holder, "ip link set lo up")


@contextmanager
def _namespace() -> Iterator[int]:
    """A namespace of its own, by the id of the process that keeps it."""
    # `cat` waits for the end of a pipe that only we hold: it ends when we do, even when killed.
    # It says hello first, which it can only do once it is inside.
    keep = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(
        keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if not holder.stdout.readline():
                said = holder.stderr.read().decode().strip()
                raise ConfigError(
                    f"shaped hosts cannot be made: the kernel gives no network namespace ({said}); "
                    "run on a machine, or in a container, that may make them"
                )
            yield holder.pid
        finally:
            holder.kill()


def _call(holder: int, command: str) -> None:
    """Run a set-up command inside a namespace."""
    done = subprocess.run(
        inside(holder, command.split()),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    if done.returncode != 0:
        raise RunError(f"shaped hosts cannot be made: `{command}` said {done.stderr.strip()!r}")


def inside(holder: int, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a namespace."""
    return ["nsenter", f"--net=/proc/{holder}/ns/net", "--", *command]


# Start one rank on each host, as torchrun would on machines of their own.


PORT = 29400
"""Where ranks meet, on the first host: its network is empty, so any port is free."""
POLL_S = 0.05
STOP_S = 10.0
"""After a rank has failed, the others have so long to say where they were."""


KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Lets glibc keep freed memory: else every large tensor costs page faults, in threads most of
all."""


def launch_on_hosts(hosts: Sequence[ShapedHost], command: Sequence[str]) -> int:
    """Run the command once per host and return the exit status of the run.

    A host has one core of the machine, which it shares where hosts are more than cores: ranks that
    wander between cores would now and then wait for each other's luck, not for each other's work.
    Standard output is shown for rank 0, standard error for all. When a rank fails the others are
    told to stop, and the status is that of the first to fail.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with _sigterm_raises():
        try:
            for host in hosts:
                ranks.append(_start(host, len(hosts), hosts[0].address, command))
            return _wait(ranks)
        finally:
            _stop(ranks)


def _start(
    host: ShapedHost, size: int, master: str, command: Sequence[str]
) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(host.number),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": LINK,
        "OMP_NUM_THREADS": "1",
        # Names of hosts cannot be looked up here, and torch would say so each time.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **KEEP_MEMORY,
    }
    cores = sorted(os.sched_getaffinity(0))
    core = cores[host.number % len(cores)]
    return subprocess.Popen(
        inside(host.holder, ["taskset", "--cpu-list", str(core), *command]),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=None if host.number == 0 else subprocess.DEVNULL,
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The status of the first rank to fail, or 0 when all are done."""
    while True:
        ended = [rank.poll() for rank in ranks]
        failed = [status for status in ended if status]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in ended:
            return 0
        time.sleep(POLL_S)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: first with a word, then without."""
    for rank in ranks:
        rank.terminate()
    until = time.monotonic() + STOP_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds like an interrupt, so that ranks and hosts go before this process does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


CONTROL = "nvidia-cuda-mps-control"
QUEUES = "16"
"""Hardware queues: with fewer, short kernels wait behind long ones; with 32, four ranks run out of
what MPS has."""
CONTROL_S, QUIT_S = 30.0, 5.0
"""How long it may take to start, and to end."""


def look_like_a_host() -> None:
    """Call in a rank before NCCL starts: ranks on one GPU must seem to be on different hosts."""
    settings = {
        "NCCL_HOSTID": f"host{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def launch_on_one_gpu(command: Sequence[str], ranks: int) -> int:
    """Run the command once per rank, all on this machine's GPU; returns the exit status."""
    with _environment({"CUDA_DEVICE_MAX_CONNECTIONS": QUEUES}), mps_daemon():
        return launch(command, ranks)


@contextmanager
def mps_daemon() -> Iterator[None]:
    """NVIDIA's daemon that runs kernels of several processes side by side, for the time inside.

    It has folders of its own, so it never meets another daemon. Where the program is missing,
    ranks take turns on the GPU: slower, and said.
    """
    if shutil.which(CONTROL) is None:
        sys.stderr.write(f"{CONTROL} not found: ranks take turns on the GPU, which is slower\n")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="nestpipe-mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with _environment(places):
            subprocess.run([CONTROL, "-d"], check=True, timeout=CONTROL_S)
            try:
                yield
            finally:
                _stop_daemon(Path(folder))


def _stop_daemon(folder: Path) -> None:
    """Ask the daemon to quit; kill it where it still waits for ranks that were killed."""
    ask = [CONTROL]
    try:
        subprocess.run(ask, input=b"quit\n", stdout=subprocess.DEVNULL, check=False, timeout=QUIT_S)
    except subprocess.TimeoutExpired:
        for process in _daemon_and_servers(folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _daemon_and_servers(folder: Path) -> list[int]:
    """The daemon whose folder it is, and the servers that it started."""
    file = folder / f"{CONTROL}.pid"
    if not file.exists():
        return []
    daemon = int(file.read_text())
    servers = Path(f"/proc/{daemon}/task/{daemon}/children")
    return [daemon, *(int(child) for child in servers.read_text().split())]


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Settings that processes started inside inherit."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Two systems on the same work: each does its jobs in processes of its own, one after the other.


Job = Mapping[str, Any]
"""What to time, as plain values."""
TASK, RESULTS = "task.json", "results.jsonl"
STOP_S = 15.0
"""How long a process that takes too long has to end by itself."""


def run_jobs(
    module: str,
    jobs: Sequence[Job],
    *,
    ranks: int = 1,
    device: str = "cpu",
    packages: Path | None = None,
    limit_s: float = 240.0,
) -> list[dict[str, Any]]:
    """Run `python -m MODULE FOLDER` until every job has a result; `packages` joins its path.

    A job that ends the process gets a result that says so, and a new process goes on with the
    rest. The limit holds for one process.
    """
    done: list[dict[str, Any]] = []
    while len(done) < len(jobs):
        left = jobs[len(done) :]
        with tempfile.TemporaryDirectory(prefix="nestpipe-jobs-") as name:
            folder = Path(name)
            task = {"ranks": ranks, "device": device, "jobs": left}
            (folder / TASK).write_text(json.dumps(task))
            reason = _run_module(module, folder, packages, limit_s)
            found = _read_results(folder)
        done += found
        if len(found) < len(left):
            done.append({"readings": [], "failed": reason or "its process gave no figures"})
    return done


def _run_module(module: str, folder: Path, packages: Path | None, limit_s: float) -> str:
    """Why the process failed, or nothing."""
    paths = [os.environ.get("PYTHONPATH", ""), str(packages or "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", module, str(folder)]
    # Libraries talk on standard output, which may be ours for JSON.
    with subprocess.Popen(command, env=environment, stdout=sys.stderr) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end_or_kill(process)
            return f"its process took more than {limit_s:.0f} s"
    return f"its process ended with status {status}; see above" if status else ""


def _end_or_kill(process: subprocess.Popen[bytes]) -> None:
    """A launcher that is asked ends its ranks; one that does not answer, as with a GPU that hangs,
    is killed, and its ranks end without it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _read_results(folder: Path) -> list[dict[str, Any]]:
    file = folder / RESULTS
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def start_ranks(folder: Path, module: str) -> dict[str, Any]:
    """In a process of `run_jobs`: become the launcher of several ranks, or return the task."""
    task = json.loads((folder / TASK).read_text())
    if task["ranks"] > 1 and "RANK" not in os.environ:
        start = launch_on_one_gpu if task["device"] == "cuda" else launch
        sys.exit(start([sys.executable, "-m", module, str(folder)], task["ranks"]))
    return task


def do_jobs(folder: Path, do: Callable[[Job], list[dict[str, Any]]]) -> None:
    """Do the jobs of the folder; rank 0 notes the readings of each.

    Input that is refused is a result too: the next job may be a better one.
    """
    for job in json.loads((folder / TASK).read_text())["jobs"]:
        try:
            result = {"readings": do(job), "failed": ""}
        except NestpipeError as error:
            if error.exit_status != ConfigError.exit_status:
                raise
            result = {"readings": [], "failed": str(error)}
        if os.environ.get("RANK", "0") == "0":
            with (folder / RESULTS).open("a") as file:
                file.write(json.dumps(result) + "\n")
        _free_device()


def _free_device() -> None:
    """Give back what one job had on the device: the next may need it."""
    import torch  # late: those who only make hosts do without

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
