"""Happens-before, from the edges alone: who is certain to have finished before whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.schedule.op import Op
from nestpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class HappensBefore:
    """The transitive closure of a schedule's edges; the order of lanes plays no part."""

    index: Mapping[Op, int]
    earlier: tuple[int, ...]
    """For each op, the set of ops certain to end before it starts, as a bit mask."""

    def __call__(self, before: Op, after: Op) -> bool:
        """Whether `before` has certainly ended when `after` starts."""
        return bool(self.earlier[self.index[after]] >> self.index[before] & 1)

    def __contains__(self, op: Op) -> bool:
        return op in self.index


def happens_before(schedule: Schedule) -> HappensBefore:
    """The closure of a schedule whose issue order already respects its edges."""
    index = {op: i for i, op in enumerate(schedule.ops)}
    earlier: list[int] = []
    for step in schedule:
        mask = 0
        for before in step.after:
            i = index[before]
            mask |= earlier[i] | 1 << i
        earlier.append(mask)
    return HappensBefore(index, tuple(earlier))


def redundant_edges(schedule: Schedule) -> frozenset[tuple[Op, Op]]:
    """Edges that other edges imply: without one of them the same orders stay legal."""
    order = happens_before(schedule)
    return frozenset(
        (before, step.op)
        for step in schedule
        for before in step.after
        if any(other != before and order(before, other) for other in step.after)
    )
