"""Is it a schedule at all: every op there once, no op waiting for itself or for a later one."""

from __future__ import annotations

from collections.abc import Iterator

from nestpipe.schedule.op import MICRO_KINDS, Kind, Op
from nestpipe.schedule.schedule import Schedule, Shape

K = Kind
Malformation = tuple[str, tuple[Op, ...]]


def malformations(schedule: Schedule) -> Iterator[Malformation]:
    """A sentence and the ops concerned, for everything that makes further proofs meaningless."""
    ops = schedule.ops
    seen: set[Op] = set()
    for op in ops:
        if op in seen:
            yield f"`{op}` is there twice; remove one of them", (op,)
        seen.add(op)
    wanted = {op for batch in range(schedule.batches) for op in ops_of_batch(batch, schedule.shape)}
    for op in sorted(wanted - seen, key=str):
        yield f"`{op}` is missing from a schedule of {schedule.batches} batches; add it", ()
    for op in sorted(seen - wanted, key=str):
        yield f"`{op}` has no place in this schedule (see its facts); remove it", (op,)
    if seen == wanted:
        yield from _deadlocks(schedule)


def ops_of_batch(batch: int, shape: Shape) -> Iterator[Op]:
    """Every op that one batch consists of."""
    for kind in Kind:
        if kind in (K.SYNC, K.SWAP) and kind is not shape.handover:
            continue
        if kind is K.MIRROR and not shape.has_mirror(batch):
            continue
        if kind in MICRO_KINDS:
            yield from (Op(kind, batch, micro) for micro in range(shape.micros))
        else:
            yield Op(kind, batch)


def _deadlocks(schedule: Schedule) -> Iterator[Malformation]:
    position = {op: i for i, op in enumerate(schedule.ops)}
    for step in schedule:
        for before in step.after:
            if before not in position:
                yield (
                    f"`{step.op}` waits for `{before}`, which never runs; remove the edge",
                    (step.op,),
                )
                return
    cycle = _find_cycle(schedule)
    if cycle:
        around = " waits for ".join(f"`{op}`" for op in (*cycle, cycle[0]))
        yield f"deadlock: {around}; remove one of these edges", tuple(cycle)
        return
    for step in schedule:
        for before in step.after:
            if position[before] > position[step.op]:
                yield (
                    f"`{step.op}` waits for `{before}`, which is issued after it, so a lane can "
                    f"block itself; issue `{before}` first",
                    (step.op, before),
                )


def _find_cycle(schedule: Schedule) -> list[Op]:
    """Ops that wait for each other in a ring, each for the next; empty when there is none."""
    after = {step.op: step.after for step in schedule}
    waiting = {op: len(set(befores)) for op, befores in after.items()}
    followers: dict[Op, list[Op]] = {}
    for op, befores in after.items():
        for before in set(befores):
            followers.setdefault(before, []).append(op)
    free = [op for op, count in waiting.items() if count == 0]
    while free:
        done = free.pop()
        del waiting[done]
        for op in followers.get(done, ()):
            waiting[op] -= 1
            if waiting[op] == 0:
                free.append(op)
    if not waiting:
        return []
    path = [next(iter(waiting))]
    while True:
        following = next(before for before in after[path[-1]] if before in waiting)
        if following in path:
            return path[path.index(following) :]
        path.append(following)
