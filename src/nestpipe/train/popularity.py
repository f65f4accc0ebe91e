"""The trivial baseline of retrieval and of ranking: what was chosen most often comes first."""

from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.data import HISTORY, TARGET, Ranking, Source
from nestpipe.models import Auc, TargetRank, ranks_of_targets

# Shapes: B samples, N items


def popularity(train: Source, held_out: Source, num_items: int, batch: int = 1024) -> TargetRank:
    """How well the held-out items rank by how often training has seen them.

    Read in one process; items that a user has seen are left out, as for a model.
    """
    counts_N = _counts(train, num_items, batch)
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


def popularity_auc(train: Ranking, held_out: Ranking, batch: int = 1024) -> float:
    """AUC of the held-out candidates by how often training has seen them, in one process."""
    counts_N = _counts(train.sequences, train.options.num_items, batch)
    share_N = counts_N / (counts_N.max() + 1)
    auc = Auc()
    for samples in held_out.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        candidates, labels = samples.sparse["candidates"], samples.sparse["labels"]
        auc = auc.add(share_N[candidates.values - 1], labels.values)
    return auc.value


def _counts(train: Source, num_items: int, batch: int) -> Tensor:
    """(N,) how often each item is in a training history."""
    counts_N = torch.zeros(num_items, dtype=torch.float64)
    for samples in train.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        counts_N += torch.bincount(samples.sparse[HISTORY].values - 1, minlength=num_items)
    return counts_N


def without_seen(scores_BN: Tensor, seen_T: Tensor, lengths_B: Tensor, targets_B: Tensor) -> Tensor:
    """Scores where items that a user has seen come last, unless they are the target itself."""
    sample_T = torch.repeat_interleave(lengths_B, output_size=len(seen_T))
    kept_B1 = scores_BN.gather(1, targets_B[:, None])
    scores_BN[sample_T, seen_T] = float("-inf")
    return scores_BN.scatter_(1, targets_B[:, None], kept_B1)
