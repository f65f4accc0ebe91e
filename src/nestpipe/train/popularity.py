"""The trivial baseline of retrieval: recommend what was chosen most often."""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.data import HISTORY, TARGET, Source
from nestpipe.models import TargetRank, ranks_of_targets

# Shapes: B samples, N items


def popularity(train: Source, held_out: Source, num_items: int, batch: int = 1024) -> TargetRank:
    """How well the held-out items rank by how often training has seen them.

    Read in one process; items that a user has seen are left out, as for a model.
    """
    counts_N = torch.zeros(num_items, dtype=torch.float64)
    for samples in train.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        counts_N += torch.bincount(samples.sparse[HISTORY].values - 1, minlength=num_items)
    ranks = TargetRank()
    for samples in held_out.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        scores_BN = counts_N.expand(samples.size, num_items).clone()
        history, targets_B = samples.sparse[HISTORY], samples.dense[TARGET] - 1
        ranks = ranks.add(
            ranks_of_targets(
                without_seen(scores_BN, history.values - 1, history.lengths, targets_B), targets_B
            )
        )
    return ranks


def without_seen(scores_BN: Tensor, seen_T: Tensor, lengths_B: Tensor, targets_B: Tensor) -> Tensor:
    """Scores where items that a user has seen come last, unless they are the target itself."""
    sample_T = torch.repeat_interleave(lengths_B, output_size=len(seen_T))
    kept_B1 = scores_BN.gather(1, targets_B[:, None])
    scores_BN[sample_T, seen_T] = float("-inf")
    return scores_BN.scatter_(1, targets_B[:, None], kept_B1)
