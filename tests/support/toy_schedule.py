"""The interpreter: runs a schedule over the toy world in any order that its ties allow.

It knows ties and collectives, not lanes. What a rank starts on the network of the hosts, or on
those of the device, ends in the order in which it was started, and when every member has come to
it. Two ranks that start collectives in different orders wait for each other for ever, as devices do
that share a queue. An op that others run alongside has two parts; they may start after the
first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.schedule.effects import CARRIES
from nestpipe.schedule.schedule import DEVICE_NETWORKS, DRAINING, How, Kind, Op, Schedule
from support.toy_memory import (
    MicroKeys,
    Row,
    World,
    do_collective,
    do_local,
    end_local,
    members_of,
    new_world,
    reports_at_the_end,
    rows_at_the_end,
    start_local,
)

Table = tuple[tuple[int, int, tuple[tuple[int, Row], ...], tuple[tuple[int, int], ...]], ...]
"""Per rank: dense weights, number of updates, every stored row in the order of its key, and the
totals of every batch."""


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
        self,
        schedule: Schedule,
        carries: Mapping[Kind, frozenset[str]] = CARRIES,
        *,
        one_queue: bool = True,
    ) -> None:
        """`one_queue`: the device does all its collectives in the order of issue, which is when
        ranks can hang; else each network goes its own way, and only what ops wait for counts."""
        ties = [t for t in schedule.ties if one_queue or t.how is not How.BEHIND]
        networks = {schedule.shape.network(op.kind) for op in schedule.ops}
        self.apart = (
            Interpreter(schedule, carries, one_queue=False)
            if one_queue and len(networks & DEVICE_NETWORKS) > 1
            else self
        )
        self.schedule = schedule
        self.carries = carries
        self.ops = schedule.ops
        number = {op: i for i, op in enumerate(self.ops)}
        count = len(self.ops)
        self.befores: list[list[int]] = [[] for _ in self.ops]
        self.waits = [0] * count
        self.at_start: list[list[int]] = [[] for _ in self.ops]
        """What may start once an op has started ..."""
        self.at_end: list[list[int]] = [[] for _ in self.ops]
        """... and once it has ended."""
        self.in_parts = bytearray(count)
        """Ops that others run alongside."""
        self.drained = [-1] * count
        """The op whose end a collective needs, all of whose output it takes."""
        for tie in dict.fromkeys(ties):
            before, op = number[tie.before], number[tie.op]
            self.befores[op].append(before)
            self.waits[op] += 1
            (self.at_end if tie.how is How.AFTER else self.at_start)[before].append(op)
            if tie.how is How.ALONGSIDE:
                self.in_parts[before] = 1
                self.drained[op] = before if tie.op.kind in DRAINING else -1
        self.retirement = [self._must_retire_first(op, number) for op in self.ops]
        network_of = [schedule.shape.network(op.kind) for op in self.ops]
        self.queue_of = [_queue(n) for n in network_of] if one_queue else network_of

    def _must_retire_first(self, op: Op, number: dict[Op, int]) -> int | None:
        shape = self.schedule.shape
        if op.kind is not Kind.PREFETCH:
            return None
        return number.get(shape.retire(op.batch - shape.lookahead))

    def run(self, data: ToyData, choose: Choose) -> Outcome:
        """Run every op of every rank once, taking the next one as `choose` says.

        The second part of an op that others run alongside has the number of the op plus that of
        all ops.
        """
        return _Run(self, data).to_the_end(choose)

    def run_in_issue_order(self, data: ToyData) -> Outcome:
        """Run as the schedule lists its ops: the reference of a deterministic plan."""
        return self.run(data, lambda runnable: _argmin([i for _, i in runnable]))

    def run_at_random(self, data: ToyData, seed: int) -> Outcome:
        """Run in a random legal order.

        Even seeds pick evenly among what may run; odd seeds give every op a random urgency, so that
        single ops are held back or hurried for as long as the edges allow.
        """
        rng = random.Random(seed)
        if seed % 4 > 1 and self.apart is not self:
            return self.apart.run_at_random(data, seed)
        if seed % 2 == 0:
            return self.run(data, lambda runnable: rng.randrange(len(runnable)))
        urgency = [[rng.random() for _ in self.ops * 2] for _ in data.keys]
        return self.run(data, lambda runnable: _argmin([urgency[r][i] for r, i in runnable]))

    def run_against(self, data: ToyData, before: Op, after: Op, seed: int) -> Outcome:
        """Run in a random legal order in which rank 0 holds `before` back and hurries `after`.

        Every other rank does so too or not, by chance: some deadlocks need a ring of such ranks.
        """
        if seed % 2 and self.apart is not self:
            return self.apart.run_against(data, before, after, seed)
        rng = random.Random(seed)
        urgency = [[rng.random() for _ in self.ops * 2] for _ in data.keys]
        hold, hurry = self.ops.index(before), self.ops.index(after)
        needed = self._needed_by(hurry)
        for r in range(len(data.keys)):
            if r == 0 or rng.random() < 0.5:
                for i in needed:
                    urgency[r][i] -= 1.0
                    urgency[r][i + len(self.ops)] -= 1.0
                urgency[r][hold] = urgency[r][hold + len(self.ops)] = 2.0
        return self.run(data, lambda runnable: _argmin([urgency[r][i] for r, i in runnable]))

    def _needed_by(self, target: int) -> set[int]:
        needed, todo = {target}, [target]
        while todo:
            for before in self.befores[todo.pop()]:
                if before not in needed:
                    needed.add(before)
                    todo.append(before)
        return needed


def _queue(network: str | None) -> str | None:
    """Networks of the device share what their collectives wait in."""
    return "devices" if network in DEVICE_NETWORKS else network


class _Run:
    """One run of an interpreter's schedule."""

    def __init__(self, made: Interpreter, data: ToyData) -> None:
        self.made = made
        self.world = new_world(made.schedule.shape, data.keys, data.groups, made.carries)
        ranks = range(len(self.world.ranks))
        self.missing = [list(made.waits) for _ in ranks]
        self.done = [bytearray(len(made.ops)) for _ in ranks]
        free = [i for i, waits in enumerate(made.waits) if not waits]
        self.runnable = [(r, i) for r in ranks for i in free]
        self.started: dict[tuple[int, str], list[int]] = {}
        """The collectives that a rank has started and that have not ended, oldest first."""
        self.left = len(made.ops) * len(ranks)

    def to_the_end(self, choose: Choose) -> Outcome:
        made, count = self.made, len(self.made.ops)
        while self.left:
            if not self.runnable:
                heads = {(r, w): str(made.ops[i[0]]) for (r, w), i in self.started.items() if i}
                waiting = {r: op for (r, _), op in sorted(heads.items())}
                return Outcome(None, f"deadlock: ranks wait in {waiting}")
            r, i = self.runnable.pop(choose(self.runnable))
            if i >= count:
                self._end(r, i - count)
                continue
            retire = made.retirement[i]
            if retire is not None and not self.done[r][retire]:
                return Outcome(None, f"overrun: `{made.ops[i]}` starts beyond the look-ahead")
            self._start(r, i)
        return Outcome(table_of(self.world))

    def _start(self, r: int, i: int) -> None:
        made, rank, op = self.made, self.world.ranks[r], self.made.ops[i]
        queue = made.queue_of[i]
        if queue is not None:
            self.started.setdefault((r, queue), []).append(i)
            self._release(r, made.at_start[i])
            self._settle(r, i)
        elif made.in_parts[i]:
            start_local(self.world, rank, op)
            self._release(r, made.at_start[i])
            self.runnable.append((r, i + len(made.ops)))
        else:
            do_local(self.world, rank, op)
            self._finish(r, i)

    def _end(self, r: int, i: int) -> None:
        """The second part of an op; a collective may have waited for its output."""
        end_local(self.world, self.world.ranks[r], self.made.ops[i])
        self._finish(r, i)
        for follower in self.made.at_start[i]:
            self._settle(r, follower)

    def _finish(self, r: int, i: int) -> None:
        self.done[r][i] = 1
        self.left -= 1
        self._release(r, self.made.at_end[i])

    def _release(self, r: int, followers: list[int]) -> None:
        missing = self.missing[r]
        for follower in followers:
            missing[follower] -= 1
            if missing[follower] == 0:
                self.runnable.append((r, follower))

    def _settle(self, r: int, i: int) -> None:
        """End the collective if it is next on all its members, then those that it held up."""
        todo = [(r, i)]
        while todo:
            r, i = todo.pop()
            queue, drained = self.made.queue_of[i], self.made.drained[i]
            if queue is None:
                continue
            members = members_of(self.world, self.world.ranks[r], self.made.ops[i])
            if not self._all_here(members, queue, i, drained):
                continue
            do_collective(self.world, [self.world.ranks[m] for m in members], self.made.ops[i])
            for member in members:
                started = self.started[member, queue]
                started.pop(0)
                self._finish(member, i)
                todo += [(member, started[0])] if started else []

    def _all_here(self, members: Sequence[int], queue: str, i: int, drained: int) -> bool:
        """A loop that ends at the first member that is not here: most calls find one."""
        for member in members:
            started = self.started.get((member, queue))
            if not started or started[0] != i:
                return False
            if drained >= 0 and not self.done[member][drained]:
                return False
        return True


def _argmin(values: Sequence[float]) -> int:
    return values.index(min(values))


def table_of(world: World) -> Table:
    """Everything that training leaves behind."""
    return tuple(
        (
            rank.weights,
            rank.updates,
            tuple(sorted(rows_at_the_end(world, rank).items())),
            tuple(reports_at_the_end(world, rank)),
        )
        for rank in world.ranks
    )
