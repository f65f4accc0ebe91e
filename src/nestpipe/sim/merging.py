"""How much replicas have to merge in 2D parallelism: rows, and the bytes of a message.

Every group of workers has a copy of the tables. A merge brings together what any of them touched
since the one before: rows with their state (`averaged`), or the gradients of one batch (`exact`).
"""

from __future__ import annotations

from math import log2

from nestpipe.schedule.schedule import Merge, Shape
from nestpipe.sim.cluster import Workload


def distinct_growth(work: Workload, batches: float) -> float:
    """Distinct rows of so many batches over those of one.

    Two neighbours have 2 - `shared_share` times the rows of one; that every doubling grows by that
    factor is what a few hot keys and a long tail give. Batches of other groups count alike: they
    are as far from each other as batches of different times.
    """
    return batches ** log2(2 - work.shared_share)


def merges(shape: Shape, groups: int) -> bool:
    """Whether there are replicas, and the plan merges them."""
    return groups > 1 and shape.mirror_every > 0


def merged_rows(work: Workload, shape: Shape, groups: int) -> float:
    """Rows of one shard that one merge brings together."""
    if not merges(shape, groups):
        return 0.0
    return work.owned_rows * distinct_growth(work, groups * shape.mirror_every)


def merged_bytes(work: Workload, shape: Shape, groups: int) -> float:
    """What one worker puts into one merge."""
    exact = shape.merge is Merge.EXACT
    row_bytes = work.row_bytes if exact else work.stored_row_bytes
    return merged_rows(work, shape, groups) * row_bytes


def foreign_rows(work: Workload, shape: Shape, groups: int) -> float:
    """Rows of a shard that a batch fetches and writes only because they are merged; a mean."""
    if not merges(shape, groups):
        return 0.0
    return (merged_rows(work, shape, groups) - work.owned_rows) / shape.mirror_every


def updated_rows(work: Workload, shape: Shape, groups: int) -> float:
    """Rows of a shard that `update` changes: where replicas are exact, those of every group."""
    if merges(shape, groups) and shape.merge is Merge.EXACT:
        return merged_rows(work, shape, groups)
    return work.owned_rows
