"""What a rank does in the tests of `test_gloo`: `python rank_program.py SCENARIO`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import torch

from nestpipe.comm import DistributedCommunicator, connect
from nestpipe.comm.process_group import GLOO_THREAD
from nestpipe.errors import NestpipeError

TIMEOUT_S = 4.0


def rows_come_home(comm: DistributedCommunicator) -> None:
    """Uneven pieces, some of them empty, of every dtype that rows, keys and marks have."""
    rank, size = comm.rank, comm.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool):
        sent_splits = [(rank + q) % size for q in range(size)]
        received_splits = [(q + rank) % size for q in range(size)]
        sent = torch.full((sum(sent_splits), 3), rank + 1).to(dtype)
        received = torch.zeros(sum(received_splits), 3).to(dtype)
        comm.all_to_all(received, sent, received_splits, sent_splits)
        wanted = torch.arange(1, size + 1).repeat_interleave(torch.tensor(received_splits))
        assert torch.equal(received, wanted[:, None].expand(-1, 3).to(dtype)), received
    nothing = torch.empty(0, 3)
    comm.all_to_all(nothing, nothing, [0] * size, [0] * size)


def sums_agree(comm: DistributedCommunicator) -> None:
    """Sums have the same bits on every rank, for sizes that no ring divides evenly."""
    for size in (1, 2, 3, 7, 1001, 65537):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            generator = torch.Generator().manual_seed(comm.rank * 10 + size)
            scale = 10.0 ** (comm.rank * 3)
            tensor = (torch.randn(size, generator=generator) * scale).to(dtype)
            twin = tensor.clone()
            comm.all_reduce(tensor)
            comm.all_reduce(twin)
            assert torch.equal(tensor, twin)
            bits = tensor.view(torch.uint8).tolist()[:4096]
            assert all(peer == bits for peer in comm.all_gather_values(bits)), size


def values_arrive(comm: DistributedCommunicator) -> None:
    value = {"rank": comm.rank, "text": "é" * comm.rank, "more": [None, 1.5] * comm.rank}
    values = comm.all_gather_values(value)
    assert values[comm.rank] == value
    assert [v["rank"] for v in values] == list(range(comm.size))  # pyright: ignore
    comm.barrier()
    print(f"rank {comm.rank} has seen all")


def collectives(comm: DistributedCommunicator) -> None:
    rows_come_home(comm)
    sums_agree(comm)
    values_arrive(comm)


def one_is_killed(comm: DistributedCommunicator) -> None:
    """The last rank dies before the second exchange."""
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    _exchange(comm)


def one_stays_away(comm: DistributedCommunicator) -> None:
    """The last rank lives and never comes."""
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(60)
    _exchange(comm)


def one_raises(comm: DistributedCommunicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("a rank's own mistake")
    _exchange(comm)


def one_is_killed_beside_threads(comm: DistributedCommunicator) -> None:
    """As in a run: the collective is on another thread, the first only waits for it."""
    failures: list[BaseException] = []

    def net() -> None:
        try:
            one_is_killed(comm)
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    thread = threading.Thread(target=net)
    thread.start()
    thread.join()
    raise failures[0]


def one_waits_for_a_survivor(comm: DistributedCommunicator) -> None:
    """Rank 0 waits for the one that is killed; rank 1, a collective later, for rank 0 alone."""
    comm.barrier()
    if comm.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    awaited = [0, 0, 1] if comm.rank == 0 else [1, 0, 0]
    with comm.op_label("rows 3.1" if comm.rank == 0 else "grads 3.0"):
        comm.all_to_all(torch.empty(1), torch.empty(0), awaited, [0, 0, 0])


def threads_of_gloo(comm: DistributedCommunicator) -> None:
    """Policies of the threads of two groups, which have met their peers already."""
    comm.dense_mesh()
    tasks = list(Path("/proc/self/task").iterdir())
    of_gloo = [task for task in tasks if (task / "comm").read_text().strip() == GLOO_THREAD]
    assert len(of_gloo) == 2, [(task / "comm").read_text() for task in tasks]
    policies = {os.sched_getscheduler(int(task.name)) for task in of_gloo}
    assert policies == {os.SCHED_BATCH}, policies
    print(f"rank {comm.rank} has seen its threads")


def launcher_is_killed(comm: DistributedCommunicator) -> None:
    """Rank 0 kills the launcher; nobody else would end them so soon."""
    comm.barrier()
    if comm.rank == 0:
        os.kill(int(os.environ["NESTPIPE_LAUNCHER"]), signal.SIGKILL)
    time.sleep(30)


def _exchange(comm: DistributedCommunicator) -> None:
    with comm.op_label("rows 3.1"):
        rows = torch.ones(comm.size, 2)
        comm.all_to_all(torch.empty_like(rows), rows, [1] * comm.size, [1] * comm.size)


def main(scenario: str) -> None:
    try:
        with closing(connect("gloo", timeout_s=TIMEOUT_S)) as comm:
            globals()[scenario](comm)
    except NestpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main(sys.argv[1])
