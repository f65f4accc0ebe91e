"""Even work instead of even counts: histories differ in length, and the slowest part decides.

The work of a sample is what its model says, from its own lengths alone. Samples go by falling work,
each to the part that has the least so far (LPT). The parts are a function of the work alone, so
every rank finds the same ones without a word.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.data.source import Source

# Shapes: B samples, P parts

WorkOf = Callable[[Batch], Tensor]
"""(B,) how much work each sample is, in any unit."""


def even_parts(work_B: Tensor, shares: Sequence[float]) -> list[Tensor]:
    """The samples of each part, ascending; part p has about `shares[p]` of all work.

    Equal work goes by the sample's place, equal parts by theirs: nothing is left to chance.
    """
    work = [float(of_sample) for of_sample in work_B.tolist()]
    members: list[list[int]] = [[] for _ in shares]
    parts = [(0.0, part) for part in range(len(shares))]
    for sample in sorted(range(len(work)), key=lambda sample: -work[sample]):
        load, part = heapq.heappop(parts)
        members[part].append(sample)
        heapq.heappush(parts, (load + work[sample] / shares[part], part))
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in members]


def deal_evenly(
    source: Source,
    work_of: WorkOf,
    *,
    global_batch: int,
    rank: int,
    ranks: int,
    seed: int,
    epoch: int = 0,
    start: int = 0,
    offset: int = 0,
) -> Iterator[Batch]:
    """`source.batches`, where ranks have even work of the same global batches.

    Each rank reads all of a batch and keeps its part: lengths are known only then.
    """
    whole = source.batches(
        global_batch=global_batch,
        rank=0,
        ranks=1,
        seed=seed,
        epoch=epoch,
        start=start,
        **({"offset": offset} if offset else {}),
    )
    for batch in whole:
        yield batch.select(even_parts(work_of(batch), [1.0] * ranks)[rank])
