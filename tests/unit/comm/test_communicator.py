"""Groups of shards and sets of replicas, on ranks that are threads."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from nestpipe.comm import Communicator, LocalCommunicator, Mesh, make_mesh, members
from nestpipe.errors import ConfigError, RunError
from support.thread_ranks import run_ranks

SHAPES = [(2, 4), (2, 8), (4, 8)]
LAYOUTS = ["replicas", "shards"]


def exchange(comm: Communicator, world_rank: int) -> list[int]:
    """Every rank of `comm` sends one row, its number in the world, to every other."""
    received = torch.empty(comm.size, 1, dtype=torch.int64)
    ones = [1] * comm.size
    comm.all_to_all(received, torch.full((comm.size, 1), world_rank), ones, ones)
    return received.flatten().tolist()


def total(comm: Communicator, number: float) -> float:
    tensor = torch.tensor([number])
    comm.all_reduce(tensor)
    return tensor.item()


def beside(function: Callable[[], object]) -> threading.Thread:
    """A thread that keeps its failure to itself: the test sees what comes of it."""

    def quietly() -> None:
        with suppress(RunError):
            function()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


def test_who_is_next_to_whom():
    groups, replicas = members(2, 8, "replicas")
    assert groups == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert replicas == [[0, 1], [2, 3], [4, 5], [6, 7]]
    groups, replicas = members(2, 8, "shards")
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert replicas == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
def test_shard_s_of_group_g_is_replica_g_of_shard_s(groups: int, layout: str):
    group_sets, replica_sets = members(groups, 12, layout)
    assert (len(group_sets), len(replica_sets)) == (groups, 12 // groups)
    assert sorted(rank for group in group_sets for rank in group) == list(range(12))
    for g, group in enumerate(group_sets):
        assert group == [replicas[g] for replicas in replica_sets]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("groups", "ranks"), SHAPES)
def test_each_exchange_and_sum_stays_among_its_own(groups: int, ranks: int, layout: str):
    group_sets, replica_sets = members(groups, ranks, layout)

    def talk(world: Communicator) -> None:
        mesh = make_mesh(world, groups, layout)
        group, shard = mesh.group, mesh.shards.rank
        assert group_sets[group][shard] == replica_sets[shard][group] == world.rank
        assert (mesh.replicas.rank, mesh.replica_keys.rank) == (group, group)
        assert (mesh.groups, mesh.layout, mesh.world) == (groups, layout, world)
        sets = [
            (mesh.shards, group_sets[group], f"group {group}"),
            (mesh.replicas, replica_sets[shard], f"shard {shard}"),
            (mesh.replica_keys, replica_sets[shard], f"keys of shard {shard}"),
        ]
        for _ in range(10):
            for comm, ranks_of, name in sets:
                with world.op_label(name):  # meeting a rank of another set would be an error
                    assert comm.size == len(ranks_of)
                    assert exchange(comm, world.rank) == ranks_of
                    assert total(comm, 2.0**world.rank) == sum(2.0**rank for rank in ranks_of)
                    assert comm.all_gather_values(world.rank) == ranks_of
                    comm.all_reduce_dense(torch.zeros(1))
                    comm.barrier()
        assert total(world, 1.0) == ranks

    run_ranks(ranks, talk)


def test_one_group_is_the_world_and_nothing_is_replicated():
    def look(world: Communicator) -> None:
        mesh = make_mesh(world)
        assert mesh.shards is world
        assert (mesh.group, mesh.replicas.size, mesh.replica_keys.size) == (0, 1, 1)
        assert total(mesh.replicas, 3.0) == 3.0
        assert mesh.reason.startswith("one group: ")

    run_ranks(4, look)
    look(LocalCommunicator())


def test_as_many_groups_as_ranks_leave_nobody_to_exchange_rows_with():
    def look(world: Communicator) -> None:
        mesh = make_mesh(world, 4)
        assert (mesh.shards.size, mesh.replicas.size, mesh.group) == (1, 4, world.rank)
        assert exchange(mesh.shards, world.rank) == [world.rank]
        assert total(mesh.replicas, 1.0) == 4.0
        assert mesh.shards.bytes_sent == 0

    run_ranks(4, look)


def test_two_networks_of_the_same_ranks_need_no_order_between_them():
    def cross(world: Communicator) -> None:
        mesh = make_mesh(world, 2)
        if world.rank == 0:
            assert total(mesh.replica_keys, 1.0) == 3.0
            assert total(mesh.replicas, 10.0) == 30.0
            return
        keys: list[float] = []
        thread = beside(lambda: keys.append(total(mesh.replica_keys, 2.0)))
        assert total(mesh.replicas, 20.0) == 30.0  # begins while rank 0 is not there yet
        thread.join()
        assert keys == [3.0]

    run_ranks(2, cross)


def test_what_subgroups_send_counts_for_the_world_too():
    def send(world: Communicator) -> list[int]:
        mesh = make_mesh(world, 2, "shards")
        exchange(mesh.shards, world.rank)  # 3 others get a row of 8 bytes
        total(mesh.replicas, 1.0)  # a ring of 2 sends 4 bytes once
        barrier_free = [mesh.shards.bytes_sent, mesh.replicas.bytes_sent, world.bytes_sent]
        exchange(world, world.rank)
        return [*barrier_free, mesh.replica_keys.bytes_sent, world.bytes_sent]

    assert run_ranks(8, send) == [[24, 4, 28, 0, 28 + 56]] * 8


def test_a_name_given_to_the_world_names_what_subgroups_do():
    def part(world: Communicator) -> None:
        mesh = make_mesh(world, 2, "replicas")
        with world.op_label(f"rows 3.{world.rank}"):
            mesh.shards.barrier()

    # Ranks are named as in the world: these two are 0 and 1 of their group.
    names = r"rank 0 is in `rows 3\.0` \(barrier\), rank 2 is in `rows 3\.2` "
    others = r"rank 1 is in `rows 3\.1` \(barrier\), rank 3 is in `rows 3\.3` "
    with pytest.raises(RunError, match=f"{names}|{others}"):
        run_ranks(4, part)


def failures(function: Callable[[Mesh], object]) -> dict[int, str]:
    """What the others say when rank 3 of a mesh of 2 x 2 fails."""
    said: dict[int, str] = {}

    def be(world: Communicator) -> None:
        mesh = make_mesh(world, 2, "replicas")
        if world.rank == 3:
            raise ValueError("rank's own mistake")
        try:
            function(mesh)
        except RunError as error:
            said[world.rank] = str(error)
            raise

    with pytest.raises(ValueError, match="own mistake"):
        run_ranks(4, be)
    return said


def test_a_failing_rank_ends_those_that_wait_for_it_and_those_that_wait_for_them():
    def wait(mesh: Mesh) -> None:
        # Rank 1 waits for rank 3, rank 2 too, and rank 0 for rank 2.
        (mesh.replicas if mesh.world.rank == 2 else mesh.shards).barrier()

    said = failures(wait)
    assert said[1] == "rank 1 cannot finish `barrier`: rank 3 failed with ValueError"
    assert said[2] == "rank 2 cannot finish `barrier`: rank 3 failed with ValueError"
    assert said[0] == "rank 0 cannot finish `barrier`: rank 2 failed in `barrier`"


def test_a_rank_that_failed_in_one_thread_is_waited_for_in_none():
    def wait(mesh: Mesh) -> None:
        if mesh.world.rank == 1:
            # It cannot end before this thread does, which waits for rank 0.
            keys = beside(mesh.replica_keys.barrier)
            try:
                with mesh.world.op_label("rows 3.1"):
                    mesh.shards.barrier()
            finally:
                keys.join()
        mesh.replicas.barrier()
        mesh.replica_keys.barrier()

    said = failures(wait)
    assert said[0] == "rank 0 cannot finish `barrier`: rank 1 failed in `rows 3.1` (barrier)"


def test_after_a_failure_no_network_of_the_rank_is_used():
    def go_on(mesh: Mesh) -> None:
        with pytest.raises(RunError, match="cannot finish"):
            mesh.world.barrier()
        mesh.shards.barrier()

    assert failures(go_on)[0] == "rank 0 cannot start `barrier`: it failed in `barrier`"


def test_leaving_a_subgroup_is_not_leaving_the_world():
    def leave(world: Communicator) -> str:
        mesh = make_mesh(world, 2)
        if world.rank == 0:
            mesh.replicas.close()
        else:
            with pytest.raises(RunError, match="rank 0 has closed its communicator"):
                mesh.replicas.barrier()
            return "refused"
        world.barrier()
        return "met"

    def close_in_turn(world: Communicator) -> None:
        mesh = make_mesh(world, 2)
        mesh.replicas.barrier()
        mesh.replicas.close()
        mesh.replica_keys.barrier()
        world.barrier()

    run_ranks(2, close_in_turn)
    with pytest.raises(RunError, match="rank 0 cannot finish `barrier`: rank 1"):
        run_ranks(2, leave)


def test_parts_may_differ_in_size_and_give_their_own_order():
    def talk(world: Communicator) -> object:
        part = world.subgroup([[2, 0, 3], [1]])
        return part.rank, part.all_gather_values(world.rank)

    of_three = [2, 0, 3]
    assert run_ranks(4, talk) == [(1, of_three), (0, [1]), (0, of_three), (2, of_three)]


@pytest.mark.parametrize("parts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]]])
def test_every_rank_is_in_one_part(parts: list[list[int]]):
    with pytest.raises(AssertionError, match="must hold each of 3 ranks once"):
        run_ranks(3, lambda world: world.subgroup(parts))


def test_ranks_that_ask_for_different_parts_are_told():
    def ask(world: Communicator) -> None:
        world.subgroup([[0, 1], [2]] if world.rank < 2 else [[0], [1, 2]])

    with pytest.raises(AssertionError, match=r"rank 0 asked for .* rank 2 for \[\[0\], \[1, 2\]\]"):
        run_ranks(3, ask)


def test_a_subgroup_has_no_subgroups():
    with pytest.raises(AssertionError, match="only the communicator of all ranks"):
        run_ranks(4, lambda world: make_mesh(world, 2).shards.subgroup([[0], [1]]))


@pytest.mark.parametrize(
    ("groups", "ranks", "node", "layout", "why"),
    [
        (2, 4, 4, "replicas", "merging 2 of them stays inside a node of 4"),
        (2, 4, 2, "replicas", "merging 2 of them stays inside a node of 2"),
        (2, 4, 1, "shards", "runs of 2 replicas do not fit in nodes of 1"),
        (4, 8, 2, "shards", "runs of 4 replicas do not fit in nodes of 2"),
        (2, 6, 3, "shards", "runs of 2 replicas do not fit in nodes of 3"),
    ],
)
def test_replicas_that_share_a_node_are_next_to_each_other(
    groups: int, ranks: int, node: int, layout: str, why: str
):
    mesh = run_ranks(ranks, lambda world: make_mesh(world, groups, ranks_per_node=node))[0]
    assert mesh.layout == layout
    shape = f"{groups} groups of {ranks // groups}, {layout} next to each other"
    assert mesh.reason == f"{shape}: {why}"


def test_nodes_are_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch):
    def layout(world: Communicator) -> str:
        return make_mesh(world, 2).layout

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert run_ranks(4, layout) == ["replicas"] * 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert run_ranks(4, layout) == ["shards"] * 4


def test_a_layout_that_is_asked_for_is_taken():
    mesh = run_ranks(4, lambda world: make_mesh(world, 2, "shards"))[0]
    assert mesh.reason == "2 groups of 2, shards next to each other: as asked for"


@pytest.mark.parametrize(
    ("groups", "layout", "sentence"),
    [
        (0, "auto", "groups is 0; use 1 or more"),
        (
            3,
            "auto",
            "groups is 3 and there are 8 ranks; use a number that divides them: 1, 2, 4 or 8",
        ),
        (
            16,
            "auto",
            "groups is 16 and there are 8 ranks; use a number that divides them: 1, 2, 4 or 8",
        ),
        (2, "rows", "unknown layout 'rows'; use auto, replicas or shards"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(groups: int, layout: str, sentence: str):
    with pytest.raises(ConfigError) as failure:
        run_ranks(8, lambda world: make_mesh(world, groups, layout))
    assert str(failure.value) == sentence


def test_one_rank_has_one_group():
    with pytest.raises(ConfigError, match=r"^groups is 2 and there is 1 rank; use 1$"):
        make_mesh(LocalCommunicator(), 2)


class UnequalNodes:
    """A world whose nodes have different numbers of ranks: each rank tells that of its own."""

    def __init__(self, world: Communicator, sizes: list[int]) -> None:
        self._world, self._sizes = world, sizes

    def all_gather_values(self, _: object) -> list[int]:
        return [size for size in self._sizes for _ in range(size)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


@pytest.mark.parametrize(
    ("sizes", "layout"), [([4, 4], "replicas"), ([2, 2, 4], "shards"), ([4, 2, 2], "shards")]
)
def test_the_smallest_node_decides_whether_replicas_fit(sizes: list[int], layout: str):
    """Four replicas in a row cross the border of a node of two, though others have four."""

    def one(world: Communicator) -> str:
        unequal: Any = UnequalNodes(world, sizes)
        return make_mesh(unequal, groups=4).layout

    assert run_ranks(8, one) == [layout] * 8
