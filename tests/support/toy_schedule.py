"""The interpreter: runs a schedule over the toy world in any order that its edges allow.

It knows edges and collectives, not lanes. A rank that has started a collective starts no other
before that one ends, and it ends when every member has arrived: two ranks that start collectives
in different orders wait for each other for ever, as they would in a real process group.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.schedule.effects import CARRIES
from nestpipe.schedule.op import Kind, Op
from nestpipe.schedule.schedule import Schedule
from support.toy_memory import (
    MicroKeys,
    Row,
    World,
    do_collective,
    do_local,
    members_of,
    new_world,
)

Table = tuple[tuple[int, int, tuple[tuple[int, Row], ...]], ...]
"""Per rank: dense weights, number of updates, and every stored row in the order of its key."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: with a table, or not at all."""

    table: Table | None
    trouble: str = ""
    """Empty, or why there is no table: a deadlock or an overrun of the look-ahead."""


Choose = Callable[[list[tuple[int, int]]], int]
"""Picks one of the (rank, op number) pairs that may run next, by its position in the list."""


@dataclass(frozen=True, slots=True)
class ToyData:
    """Keys of every micro-batch: `keys[rank][batch][micro]`."""

    keys: tuple[tuple[MicroKeys, ...], ...]
    groups: int = 1

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        ranks: int,
        batches: int,
        micro_batches: int,
        groups: int = 1,
        vocabulary: int = 8,
    ) -> ToyData:
        """Few keys, so that neighbouring batches share some and later ones meet them again."""
        rng = random.Random(seed)

        def micro() -> tuple[int, ...]:
            return tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(1, 4)))

        def batch() -> MicroKeys:
            return tuple(micro() for _ in range(micro_batches))

        keys = tuple(tuple(batch() for _ in range(batches)) for _ in range(ranks))
        return cls(keys, groups)


class Interpreter:
    """A schedule made ready to be run many times."""

    def __init__(
        self, schedule: Schedule, carries: Mapping[Kind, frozenset[str]] = CARRIES
    ) -> None:
        self.schedule = schedule
        self.carries = carries
        self.ops = schedule.ops
        number = {op: i for i, op in enumerate(self.ops)}
        self.befores = [sorted({number[b] for b in step.after}) for step in schedule]
        self.followers: list[list[int]] = [[] for _ in self.ops]
        for i, befores in enumerate(self.befores):
            for before in befores:
                self.followers[before].append(i)
        self.retirement = [self._must_retire_first(op, number) for op in self.ops]
        self.networks = [schedule.shape.network(op.kind) for op in self.ops]

    def _must_retire_first(self, op: Op, number: dict[Op, int]) -> int | None:
        shape = self.schedule.shape
        if op.kind is not Kind.PREFETCH:
            return None
        return number.get(shape.retire(op.batch - shape.lookahead))

    def run(self, data: ToyData, choose: Choose) -> Outcome:
        """Run every op of every rank once, taking the next one as `choose` says."""
        world = new_world(self.schedule.shape, data.keys, data.groups, self.carries)
        missing = [[len(befores) for befores in self.befores] for _ in world.ranks]
        done = [bytearray(len(self.ops)) for _ in world.ranks]
        runnable = [(r, i) for r in range(len(world.ranks)) for i in self._free_at_start()]
        inside: dict[tuple[int, str | None], int] = {}
        """Which collective each rank is waiting in, by network."""
        held: list[tuple[int, int]] = []
        """Ready, but for a network in which their rank is waiting."""
        network = self.networks

        def finish(r: int, i: int) -> None:
            done[r][i] = 1
            counts = missing[r]
            for follower in self.followers[i]:
                counts[follower] -= 1
                if counts[follower] == 0:
                    waits = (r, network[follower]) in inside
                    (held if waits else runnable).append((r, follower))

        left = len(self.ops) * len(world.ranks)
        while left:
            if not runnable:
                waiting = {r: str(self.ops[i]) for (r, _), i in sorted(inside.items())}
                return Outcome(None, f"deadlock: ranks wait in {waiting}")
            r, i = runnable.pop(choose(runnable))
            op, retire = self.ops[i], self.retirement[i]
            if retire is not None and not done[r][retire]:
                return Outcome(None, f"overrun: `{op}` starts beyond the look-ahead")
            if (of_op := network[i]) is None:
                do_local(world, world.ranks[r], op)
                finish(r, i)
                left -= 1
                continue
            inside[r, of_op] = i
            members = members_of(world, world.ranks[r], op)
            if all(inside.get((member, of_op)) == i for member in members):
                do_collective(world, [world.ranks[member] for member in members], op)
                for member in members:
                    del inside[member, of_op]
                    finish(member, i)
                left -= len(members)
            ready, runnable, held = runnable + held, [], []
            for r, i in ready:
                (held if (r, network[i]) in inside else runnable).append((r, i))
        return Outcome(_table(world))

    def _free_at_start(self) -> list[int]:
        return [i for i, befores in enumerate(self.befores) if not befores]

    def run_in_issue_order(self, data: ToyData) -> Outcome:
        """Run as the schedule lists its ops: the reference of a deterministic plan."""
        return self.run(data, lambda runnable: _argmin([i for _, i in runnable]))

    def run_at_random(self, data: ToyData, seed: int) -> Outcome:
        """Run in a random legal order.

        Even seeds pick evenly among what may run; odd seeds give every op a random urgency, so that
        single ops are held back or hurried for as long as the edges allow.
        """
        rng = random.Random(seed)
        if seed % 2 == 0:
            return self.run(data, lambda runnable: rng.randrange(len(runnable)))
        urgency = [[rng.random() for _ in self.ops] for _ in data.keys]
        return self.run(data, lambda runnable: _argmin([urgency[r][i] for r, i in runnable]))

    def run_against(self, data: ToyData, before: Op, after: Op, seed: int) -> Outcome:
        """Run in a random legal order in which rank 0 holds `before` back and hurries `after`.

        Every other rank does so too or not, by chance: some deadlocks need a ring of such ranks.
        """
        rng = random.Random(seed)
        urgency = [[rng.random() for _ in self.ops] for _ in data.keys]
        hold, hurry = self.ops.index(before), self.ops.index(after)
        needed = self._needed_by(hurry)
        for r in range(len(data.keys)):
            if r == 0 or rng.random() < 0.5:
                for i in needed:
                    urgency[r][i] -= 1.0
                urgency[r][hold] = 2.0
        return self.run(data, lambda runnable: _argmin([urgency[r][i] for r, i in runnable]))

    def _needed_by(self, target: int) -> set[int]:
        needed, todo = {target}, [target]
        while todo:
            for before in self.befores[todo.pop()]:
                if before not in needed:
                    needed.add(before)
                    todo.append(before)
        return needed


def _argmin(values: Sequence[float]) -> int:
    return values.index(min(values))


def _table(world: World) -> Table:
    return tuple(
        (rank.weights, rank.updates, tuple(sorted(rank.stored.items()))) for rank in world.ranks
    )
