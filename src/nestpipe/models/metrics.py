"""Metrics as sums: `add` samples to one, `merge` those of several ranks, read the value at the end.

Each is a frozen value; `add` and `merge` return a new one. `numbers` is its whole state as plain
numbers and `of_numbers` reads it back, so that ranks can exchange it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.errors import RunError

# Shapes: P predictions, B samples, N items, K bins

BINS = 1 << 16
_LARGEST_LOGIT = 16.0
_SMALLEST_CHANCE = 1e-7


def _no_counts() -> Tensor:
    return torch.zeros(2, BINS, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Auc:
    """How often a positive is scored above a negative, ties counting half.

    Scores are counted in 65,536 bins, even in log-odds from -16 to 16 (0.0005 apart), and scores
    in one bin count as ties: the exact value is within `error` of `value`.
    """

    counts_2K: Tensor = field(default_factory=_no_counts)
    """Negatives and positives in each bin, int64, on the CPU."""

    def add(self, predictions_P: Tensor, labels_P: Tensor) -> Auc:
        """With probabilities and labels (above 0.5 is a positive)."""
        if bool(predictions_P.isnan().any()):
            raise RunError(
                "a prediction is NaN, so weights or rows hold NaN or inf; go on from the "
                "checkpoint before with lower learning rates"
            )
        logits_P = torch.logit(predictions_P.double())  # 0 and 1 become infinities, which clamp
        bins_P = (logits_P / _LARGEST_LOGIT + 1) * (BINS / 2)
        bins_P = bins_P.clamp(0, BINS - 1).long()
        bins_P = bins_P + BINS * (labels_P > 0.5)
        counts = torch.bincount(bins_P, minlength=2 * BINS).view(2, BINS)
        return Auc(self.counts_2K + counts.cpu())

    def merge(self, other: Auc) -> Auc:
        return Auc(self.counts_2K + other.counts_2K)

    @property
    def value(self) -> float:
        """nan without a positive and a negative."""
        negatives_K, positives_K = self.counts_2K.double()
        below_K = torch.cumsum(negatives_K, 0) - negatives_K
        won = (positives_K * (below_K + negatives_K / 2)).sum()
        return _ratio(float(won), self._pairs)

    @property
    def error(self) -> float:
        """By how much `value` can be off: half the share of pairs that fell into one bin."""
        negatives_K, positives_K = self.counts_2K.double()
        return _ratio(float((negatives_K * positives_K).sum()) / 2, self._pairs)

    @property
    def numbers(self) -> list[int]:
        return self.counts_2K.flatten().tolist()

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Auc:
        return cls(torch.tensor(numbers, dtype=torch.int64).view(2, BINS))

    @property
    def _pairs(self) -> float:
        negatives, positives = self.counts_2K.sum(1).tolist()
        return float(negatives) * float(positives)


@dataclass(frozen=True, slots=True)
class LogLoss:
    """Mean binary cross-entropy, and how it compares with always predicting the mean label."""

    total: float = 0.0
    positives: float = 0.0
    count: int = 0

    def add(self, predictions_P: Tensor, labels_P: Tensor) -> LogLoss:
        """With probabilities (kept 1e-7 away from 0 and 1) and labels."""
        chances_P = predictions_P.double().clamp(_SMALLEST_CHANCE, 1 - _SMALLEST_CHANCE)
        labels_P = labels_P.double()
        losses_P = -labels_P * torch.log(chances_P) - (1 - labels_P) * torch.log1p(-chances_P)
        added = LogLoss(float(losses_P.sum()), float(labels_P.sum()), len(labels_P))
        return self.merge(added)

    def merge(self, other: LogLoss) -> LogLoss:
        return LogLoss(
            self.total + other.total, self.positives + other.positives, self.count + other.count
        )

    @property
    def value(self) -> float:
        """nan without samples."""
        return _ratio(self.total, self.count)

    @property
    def normalised_entropy(self) -> float:
        """Log loss over the entropy of the mean label; below 1 is better than knowing only that.

        nan where all labels are the same.
        """
        rate = _ratio(self.positives, self.count)
        if not 0 < rate < 1:
            return math.nan
        return self.value / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))

    @property
    def numbers(self) -> list[float]:
        return [self.total, self.positives, self.count]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> LogLoss:
        total, positives, count = numbers
        return cls(total, positives, int(count))


# AUC and entropy of training itself: sums in one tensor, added up where the predictions are.


CLICK_BINS = 1 << 14
"""Bins of scores, even in log-odds: 0.002 apart."""


def click_sums(predictions_P: Tensor, labels_P: Tensor) -> Tensor:
    """(2 K + 3,) float64: negatives and positives by bin; log loss, positives, samples.

    Sums of several batches and ranks are those of all their samples. Waits for no device.
    """
    chances_P, labels_P = predictions_P.detach().double().view(-1), labels_P.double().view(-1)
    bins_P = (torch.logit(chances_P) / _LARGEST_LOGIT + 1) * (CLICK_BINS / 2)
    bins_P = torch.nan_to_num(bins_P).clamp(0, CLICK_BINS - 1).long()
    bins_P = bins_P + CLICK_BINS * (labels_P > 0.5)
    counts_2K = chances_P.new_zeros(2 * CLICK_BINS).index_add_(
        0, bins_P, torch.ones_like(chances_P)
    )
    chances_P = chances_P.clamp(_SMALLEST_CHANCE, 1 - _SMALLEST_CHANCE)
    losses_P = -labels_P * torch.log(chances_P) - (1 - labels_P) * torch.log1p(-chances_P)
    sums = torch.stack([losses_P.sum(), labels_P.sum(), torch.ones_like(labels_P).sum()])
    return torch.cat([counts_2K, sums])


def read_click_sums(sums: Tensor) -> dict[str, float]:
    """AUC and normalised entropy of what was summed; nan where all labels are alike."""
    on_host = sums.cpu()
    auc = Auc(on_host[: 2 * CLICK_BINS].view(2, CLICK_BINS).long())
    total, positives, count = on_host[-3:].tolist()
    entropy = LogLoss(total, positives, int(count)).normalised_entropy
    return {"auc": auc.value, "normalised_entropy": entropy}


@dataclass(frozen=True, slots=True)
class TargetRank:
    """Where the one right item of each sample came: HR@K, NDCG@K and MRR."""

    cuts: tuple[int, ...] = (1, 10, 50)
    """The values of K."""
    hits: tuple[int, ...] = ()
    """Per cut: samples whose item came among the first K."""
    gains: tuple[float, ...] = ()
    """Per cut: sum of 1 / log2(rank + 1) over those."""
    reciprocal: float = 0.0
    """Sum of 1 / rank."""
    count: int = 0

    def add(self, ranks_B: Tensor) -> TargetRank:
        """With ranks from 1, the best."""
        ranks_B = ranks_B.double()
        gains_B = 1 / torch.log2(ranks_B + 1)
        among = [ranks_B <= cut for cut in self.cuts]
        added = TargetRank(
            self.cuts,
            tuple(int(inside.sum()) for inside in among),
            tuple(float(gains_B[inside].sum()) for inside in among),
            float((1 / ranks_B).sum()),
            len(ranks_B),
        )
        return self.merge(added)

    def merge(self, other: TargetRank) -> TargetRank:
        assert self.cuts == other.cuts, f"cuts {self.cuts} and {other.cuts} do not merge"
        nothing = (0,) * len(self.cuts)
        hits = zip(self.hits or nothing, other.hits or nothing, strict=True)
        gains = zip(self.gains or nothing, other.gains or nothing, strict=True)
        return TargetRank(
            self.cuts,
            tuple(a + b for a, b in hits),
            tuple(a + b for a, b in gains),
            self.reciprocal + other.reciprocal,
            self.count + other.count,
        )

    @property
    def values(self) -> dict[str, float]:
        """By name, such as `hr@10`; nan without samples."""
        named: dict[str, float] = {}
        for cut, hits, gains in zip(self.cuts, self.hits, self.gains, strict=False):
            named[f"hr@{cut}"] = _ratio(hits, self.count)
            named[f"ndcg@{cut}"] = _ratio(gains, self.count)
        named["mrr"] = _ratio(self.reciprocal, self.count)
        return named

    @property
    def numbers(self) -> list[float]:
        nothing = (0,) * len(self.cuts)
        hits, gains = self.hits or nothing, self.gains or nothing
        return [*self.cuts, *hits, *gains, self.reciprocal, self.count]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> TargetRank:
        num = (len(numbers) - 2) // 3
        cuts, hits = (tuple(int(x) for x in numbers[i * num : (i + 1) * num]) for i in (0, 1))
        return cls(
            cuts, hits, tuple(numbers[2 * num : 3 * num]), float(numbers[-2]), int(numbers[-1])
        )


def ranks_of_targets(scores_BN: Tensor, targets_B: Tensor) -> Tensor:
    """(B,) the rank from 1 of each sample's target, a column of the scores.

    An equal score ranks before the target: a model that scores all alike must not look perfect.
    """
    own_B1 = scores_BN.gather(1, targets_B[:, None])
    return (scores_BN >= own_B1).sum(1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
