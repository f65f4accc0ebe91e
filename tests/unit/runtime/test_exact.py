"""Whatever the timing, a plan on threads leaves what `serial` leaves: a toy world, really run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nestpipe.comm import Communicator
from nestpipe.runtime import (
    Act,
    InlineLanes,
    Lanes,
    StopSignal,
    ThreadLanes,
    Work,
    inject_delays,
    run,
)
from nestpipe.schedule import (
    COLLECTIVES,
    PLANS,
    Kind,
    Op,
    Plan,
    PlanOptions,
    Retrieval,
    Shape,
    plan,
)
from nestpipe.schedule.effects import CARRIES
from support.thread_ranks import run_ranks, some_threads
from support.toy_memory import MicroKeys, World, do_collective, do_local, new_world
from support.toy_schedule import Interpreter, Table, ToyData, table_of

ENDLESS = 1_000_000
Data = tuple[tuple[MicroKeys, ...], ...]
"""Keys: `data[rank][batch][micro]`; ranks may have different numbers of batches."""


@dataclass
class Toy:
    """A world that several ranks work on, and the end of the data as each rank knows it."""

    world: World
    data: Data
    ends: list[StopSignal]

    @classmethod
    def new(cls, shape: Shape, data: Data) -> Toy:
        world = new_world(shape, data, 1, CARRIES)
        world.batches = ENDLESS
        return cls(world, data, [StopSignal() for _ in data])

    def work(self, comm: Communicator) -> Work:
        """What each op does on one rank."""
        rank = self.world.ranks[comm.rank]

        def local(op: Op) -> None:
            do_local(self.world, rank, op)

        def prefetch(op: Op) -> None:
            mine = self.data[rank.number]
            batch = mine[op.batch] if op.batch < len(mine) else ()
            rank.queue[op.batch % self.world.shape.lookahead] = batch

        def collective(op: Op) -> None:
            # All have come before rank 0 does it for everyone; all see it before they go on.
            with comm.op_label(str(op)):
                comm.barrier()
                if comm.rank == 0:
                    do_collective(self.world, self.world.ranks, op)
                comm.barrier()

        def counts(op: Op) -> None:
            collective(op)
            slot = op.batch % self.world.shape.slots
            if not any(comm.all_gather_values(sum(rank.sizes[slot].values()))):
                self.world.batches = op.batch
                self.ends[comm.rank].found_at(op.batch)

        acts: dict[Kind, Act] = {
            kind: collective if kind in COLLECTIVES else local for kind in Kind
        }
        return {**acts, Kind.PREFETCH: prefetch, Kind.COUNTS: counts}

    def table(self) -> Table:
        """Everything that training leaves behind."""
        return table_of(self.world)


EXACT = [name for name in PLANS if name != "stale_prefetch"]


def train(
    chosen: Plan, data: Data, lanes: Callable[[], Lanes], *, seed: int = 0, max_ms: float = 0
) -> tuple[Table, list[set[str]]]:
    """Run all ranks to the end of the data; the table, and the names of the ops that each ran."""
    toy = Toy.new(chosen.shape, data)

    def be(comm: Communicator) -> set[str]:
        work = inject_delays(toy.work(comm), seed=seed * 100 + comm.rank, max_ms=max_ms)
        trace = run(chosen, work, lanes(), batches=toy.ends[comm.rank])
        return {span.name for span in trace.spans}

    ran = run_ranks(len(data), be)
    return toy.table(), ran


def uneven(seed: int, *, lengths: tuple[int, ...], micro_batches: int) -> Data:
    """Ranks whose data end after different numbers of batches."""
    longest = max(lengths, default=0)
    full = ToyData.random(
        seed, ranks=len(lengths), batches=longest, micro_batches=micro_batches
    ).keys
    return tuple(mine[:length] for mine, length in zip(full, lengths, strict=True))


def padded(data: Data) -> ToyData:
    """The same data with batches without samples where a rank has none."""
    longest = max(map(len, data))
    return ToyData(tuple(mine + ((),) * (longest - len(mine)) for mine in data))


@pytest.mark.parametrize("retrieval", Retrieval)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("name", EXACT)
def test_threads_end_where_serial_ends(name: str, micro_batches: int, retrieval: Retrieval):
    options = PlanOptions(micro_batches=micro_batches, retrieval=retrieval)
    for seed in range(3):
        ranks = 2 + seed % 2
        data = uneven(seed, lengths=(6,) * ranks, micro_batches=micro_batches)
        reference, _ = train(
            plan("serial", PlanOptions(micro_batches=micro_batches)), data, InlineLanes
        )
        lanes = ThreadLanes if seed % 2 else some_threads
        on_threads, _ = train(plan(name, options), data, lanes, seed=seed, max_ms=1.5)
        assert on_threads == reference, f"seed {seed}"


@pytest.mark.parametrize("retrieval", Retrieval)
@pytest.mark.parametrize("name", EXACT)
def test_ranks_that_run_out_of_data_at_different_times_agree_on_the_end(
    name: str, retrieval: Retrieval
):
    options = PlanOptions(micro_batches=2, retrieval=retrieval)
    for seed, lengths in enumerate([(5, 2), (0, 3), (1, 7, 4), (1, 1)]):
        data = uneven(seed, lengths=lengths, micro_batches=2)
        serial = plan("serial", PlanOptions(micro_batches=2)).schedule(max(lengths))
        reference = Interpreter(serial).run_in_issue_order(padded(data)).table
        assert reference is not None
        table, ran = train(plan(name, options), data, ThreadLanes, seed=seed, max_ms=1.5)
        assert table == reference, lengths
        assert_ran_to_the_end(ran, max(lengths), plan(name, options))


def assert_ran_to_the_end(ran: list[set[str]], batches: int, chosen: Plan) -> None:
    """Every op before the end, and after it nothing but the search for it."""
    wanted = {str(op) for op in chosen.schedule(batches).ops}
    for names in ran:
        assert wanted <= names
        beyond = {Op.parse(name) for name in names - wanted}
        assert {op.kind for op in beyond} <= {Kind.PREFETCH, Kind.COPY, Kind.DEDUP, Kind.COUNTS}
        assert [op for op in beyond if op.kind is Kind.COUNTS] == [Op(Kind.COUNTS, batches)]


@pytest.mark.parametrize("lanes", [InlineLanes, ThreadLanes, some_threads])
def test_no_data_at_all_is_an_end_too(lanes: Callable[[], Lanes]):
    table, ran = train(plan("nested"), ((), ()), lanes)
    assert [updates for _, updates, *_ in table] == [0, 0]
    assert all("counts 0" in names and "keys 0" not in names for names in ran)


def test_a_limit_on_the_batches_ends_a_run_before_its_data():
    data = uneven(1, lengths=(6, 6), micro_batches=2)
    short = tuple(mine[:3] for mine in data)
    for name in EXACT:
        chosen = plan(name, PlanOptions(micro_batches=2))
        toy = Toy.new(chosen.shape, data)
        toy.world.batches, toy.ends = 3, [StopSignal(3), StopSignal(3)]

        def be(comm: Communicator, toy: Toy = toy, chosen: Plan = chosen) -> None:
            run(chosen, toy.work(comm), ThreadLanes(), batches=toy.ends[comm.rank])

        run_ranks(2, be)
        reference, _ = train(plan("serial", PlanOptions(micro_batches=2)), short, InlineLanes)
        assert toy.table() == reference
