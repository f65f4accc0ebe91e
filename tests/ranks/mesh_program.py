"""What a rank does in the tests of `test_mesh_gloo`: `python mesh_program.py SCENARIO`.

There are four, as two groups of two: 0 2 and 1 3 where replicas are next to each other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from nestpipe.comm import Communicator, DistributedCommunicator, connect, make_mesh, members
from nestpipe.errors import NestpipeError, RunError

TIMEOUT_S = 4.0
ROUNDS = 20


def total(comm: Communicator, number: float) -> float:
    tensor = torch.tensor([number])
    comm.all_reduce(tensor)
    return tensor.item()


def talk(comm: Communicator, world_rank: int, ranks: list[int]) -> None:
    """Sums, exchanges of uneven pieces and values, all among `ranks`."""
    assert comm.size == len(ranks)
    assert ranks[comm.rank] == world_rank
    assert total(comm, 2.0**world_rank) == sum(2.0**rank for rank in ranks)
    sent_splits = [comm.rank + q for q in range(comm.size)]  # rank 0 keeps nothing
    sent = torch.full((sum(sent_splits), 3), float(world_rank))
    received = torch.empty_like(sent)
    before = comm.bytes_sent
    comm.all_to_all(received, sent, sent_splits, sent_splits)
    wanted = torch.tensor(ranks).repeat_interleave(torch.tensor(sent_splits))
    assert received[:, 0].tolist() == wanted.tolist(), received
    assert comm.bytes_sent - before == 12 * (sum(sent_splits) - sent_splits[comm.rank])
    assert comm.all_gather_values({"rank": world_rank}) == [{"rank": rank} for rank in ranks]
    comm.barrier()


def both_ways(world: DistributedCommunicator) -> None:
    """Each layout: shards and replicas in turn, beside them the replicas' keys in a thread."""
    for layout in ("replicas", "shards"):
        mesh = make_mesh(world, 2, layout)
        group_sets, replica_sets = members(2, world.size, layout)
        group, replicas = group_sets[mesh.group], replica_sets[mesh.shards.rank]
        failures: list[BaseException] = []

        def keys(mesh=mesh, replicas=replicas, failures=failures) -> None:
            try:
                for _ in range(ROUNDS):
                    talk(mesh.replica_keys, world.rank, replicas)
            except BaseException as failure:  # noqa: BLE001
                failures.append(failure)

        thread = threading.Thread(target=keys)
        thread.start()
        for _ in range(ROUNDS):
            talk(mesh.shards, world.rank, group)
            talk(mesh.replicas, world.rank, replicas)
        thread.join()
        if failures:
            raise failures[0]
        talk(world, world.rank, list(range(world.size)))
        parts = (mesh.shards, mesh.replicas, mesh.replica_keys)
        assert all(part.bytes_sent > 0 for part in parts)
        for part in parts:
            part.close()
            part.close()
    part = world.subgroup([[2, 0, 3], [1]])
    talk(part, world.rank, [1] if world.rank == 1 else [2, 0, 3])
    before, own_before = world.bytes_sent, part.bytes_sent
    total(part, 1.0)
    assert world.bytes_sent - before == part.bytes_sent - own_before
    if world.rank == 0:
        print("rank 0 has seen all")


def one_is_killed(world: DistributedCommunicator) -> None:
    _lose_rank_3(world, lambda: os.kill(os.getpid(), signal.SIGKILL))


def one_stays_away(world: DistributedCommunicator) -> None:
    _lose_rank_3(world, lambda: time.sleep(60))


def _lose_rank_3(world: DistributedCommunicator, lose: Callable[[], None]) -> None:
    """Rank 1 waits for it in its group, rank 2 among replicas, and rank 0 for rank 1."""
    mesh = make_mesh(world, 2, "replicas")
    world.barrier()
    if world.rank == 3:
        time.sleep(0.3)
        lose()
    comm, what = (mesh.shards, "rows 3.1") if world.rank == 1 else (mesh.replicas, "mirror 3")
    try:
        with world.op_label(what):
            total(comm, 1.0)
    except RunError:
        _none_may_follow([world, mesh.shards, mesh.replicas, mesh.replica_keys])
        raise


def _none_may_follow(comms: list[Communicator]) -> None:
    for comm in comms:
        with pytest.raises(RunError, match="cannot start `barrier` after it failed"):
            comm.barrier()


def main(scenario: str) -> None:
    try:
        with closing(connect("gloo", timeout_s=TIMEOUT_S)) as world:
            globals()[scenario](world)
    except NestpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main(sys.argv[1])
