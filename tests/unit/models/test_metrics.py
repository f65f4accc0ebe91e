"""Metrics against references of a few lines; merging is the same as never having split."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.models import Auc, LogLoss, TargetRank, ranks_of_targets


def make_predictions(num: int = 500, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num, generator=generator) < 0.3).float()
    noise = torch.randn(num, generator=generator)
    return torch.sigmoid(labels * 1.5 - 2 + noise), labels


def pairwise_auc(predictions: Tensor, labels: Tensor) -> float:
    positives, negatives = predictions[labels == 1], predictions[labels == 0]
    difference = positives[:, None] - negatives[None]
    won = (difference > 0).sum() + 0.5 * (difference == 0).sum()
    return float(won) / difference.numel()


@pytest.mark.parametrize("shift", [-12.0, 0.0, 9.0])
def test_auc_is_within_its_own_error(shift: float):
    predictions, labels = make_predictions()
    predictions = torch.sigmoid(torch.logit(predictions.double()) + shift)
    auc = Auc().add(predictions, labels)
    assert abs(auc.value - pairwise_auc(predictions, labels)) <= auc.error + 1e-12
    assert auc.error < 1e-4


def test_auc_of_ties_and_of_certainty():
    assert Auc().add(torch.tensor([0.4, 0.4]), torch.tensor([0, 1])).value == 0.5
    assert Auc().add(torch.tensor([0.0, 1.0]), torch.tensor([0, 1])).value == 1.0
    assert Auc().add(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).value == 0.0


def test_log_loss_and_normalised_entropy():
    predictions, labels = make_predictions()
    loss = LogLoss().add(predictions, labels)
    expected = torch.nn.functional.binary_cross_entropy(predictions.double(), labels.double())
    assert math.isclose(loss.value, float(expected), rel_tol=1e-9)
    rate = float(labels.mean())
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert math.isclose(loss.normalised_entropy, loss.value / entropy, rel_tol=1e-6)
    base = LogLoss().add(torch.full_like(labels, rate), labels)
    assert math.isclose(base.normalised_entropy, 1, rel_tol=1e-6)


def test_a_certain_mistake_costs_much_but_not_everything():
    assert 16 < LogLoss().add(torch.tensor([1.0]), torch.tensor([0.0])).value < 17


def test_hit_rate_gain_and_reciprocal_rank():
    values = TargetRank(cuts=(1, 3)).add(torch.tensor([1, 3, 4, 100])).values
    expected = {
        "hr@1": 1 / 4,
        "hr@3": 2 / 4,
        "ndcg@1": 1 / 4,
        "ndcg@3": (1 + 1 / math.log2(4)) / 4,
        "mrr": (1 + 1 / 3 + 1 / 4 + 1 / 100) / 4,
    }
    assert values == pytest.approx(expected)


def test_the_rank_of_a_target_counts_ties_against_it():
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.2, 0.2, 0.2], [3.0, 2.0, 1.0]])
    assert ranks_of_targets(scores, torch.tensor([2, 0, 0])).tolist() == [2, 3, 1]


def test_parts_merge_to_the_whole_through_plain_numbers():
    predictions, labels = make_predictions()
    ranks = torch.arange(1, 501)
    for empty, columns in (
        (Auc(), (predictions, labels)),
        (LogLoss(), (predictions, labels)),
        (TargetRank(), (ranks,)),
    ):
        parts = [
            empty.add(*(column[start : start + 125] for column in columns))
            for start in range(0, 500, 125)
        ]
        merged: Any = empty
        for part in parts:
            merged = merged.merge(type(empty).of_numbers(json.loads(json.dumps(part.numbers))))
        assert merged.numbers == pytest.approx(empty.add(*columns).numbers)


def test_without_samples_there_is_no_value():
    nothing = torch.zeros(0)
    assert math.isnan(Auc().add(nothing, nothing).value)
    assert math.isnan(Auc().error)
    assert math.isnan(LogLoss().add(nothing, nothing).value)
    assert math.isnan(LogLoss().normalised_entropy)
    assert math.isnan(TargetRank().add(nothing).values["hr@10"])
    assert math.isnan(TargetRank().values["mrr"])
