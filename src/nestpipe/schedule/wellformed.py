"""Is it a schedule at all: every op there once, no op waiting for itself or for a later one."""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import lru_cache

from nestpipe.schedule.op import EARLY_KINDS, MICRO_KINDS, Kind, Op
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
    wanted = _all_ops(schedule.shape, schedule.batches)
    if seen == wanted:
        yield from _deadlocks(schedule)
        return
    for op in sorted(wanted - seen, key=str):
        yield f"`{op}` is missing from a schedule of {schedule.batches} batches; add it", ()
    for op in sorted(seen - wanted, key=str):
        yield f"`{op}` has no place in this schedule (see its facts); remove it", (op,)


@lru_cache(maxsize=8)
def _all_ops(shape: Shape, batches: int) -> Set[Op]:
    return frozenset(op for batch in range(batches) for op in ops_of_batch(batch, shape))


def ops_of_batch(batch: int, shape: Shape) -> Iterator[Op]:
    """Every op that one batch consists of."""
    for kind in Kind:
        if kind in (K.SYNC, K.SWAP) and kind is not shape.handover:
            continue
        if kind is K.MIRROR and not shape.has_mirror(batch):
            continue
        if kind in EARLY_KINDS and not shape.early:
            continue
        if kind in MICRO_KINDS:
            yield from (Op(kind, batch, micro) for micro in range(shape.micros))
        else:
            yield Op(kind, batch)


def _deadlocks(schedule: Schedule) -> Iterator[Malformation]:
    position = {op: i for i, op in enumerate(schedule.ops)}
    backwards: list[tuple[Op, Op]] = []
    for i, step in enumerate(schedule):
        for before in step.after:
            if (place := position.get(before)) is None:
                yield (
                    f"`{step.op}` waits for `{before}`, which never runs; remove the edge",
                    (step.op,),
                )
                return
            if place >= i:
                backwards.append((step.op, before))
    if not backwards:  # then there is no ring either
        return
    cycle = _find_cycle(schedule)
    if cycle:
        around = " waits for ".join(f"`{op}`" for op in (*cycle, cycle[0]))
        yield f"deadlock: {around}; remove one of these edges", tuple(cycle)
        return
    for op, before in backwards:
        yield (
            f"`{op}` waits for `{before}`, which is issued after it, so a lane can "
            f"block itself; issue `{before}` first",
            (op, before),
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
