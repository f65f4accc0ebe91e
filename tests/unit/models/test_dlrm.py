"""DLRM against its definition, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from nestpipe.batch import Batch
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.models import Dlrm, DlrmConfig, LogisticRegression


def test_the_top_sees_the_dense_vector_and_each_dot_product_once():
    config = DlrmConfig(features=("a", "b"), dense_features=2, dim=3, bottom=(), top=())
    model = Dlrm(config)
    a, b, features = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 2)
    batch = Batch(4, {"features": features, "label": torch.zeros(4)})
    logits = model.logits({"a": a, "b": b}, batch)
    assert model.bottom is not None
    z = model.bottom(features)
    dots = torch.stack([(a * z).sum(1), (b * z).sum(1), (a * b).sum(1)], dim=1)
    torch.testing.assert_close(logits, model.top(torch.cat([z, dots], 1)).squeeze(1))


def test_it_works_without_dense_features():
    model = Dlrm(DlrmConfig(features=("a", "b"), dense_features=0, pooling="none"))
    keys = Jagged.one_each(torch.arange(5))
    batch = Batch(5, {"label": torch.ones(5)}, {"a": keys, "b": keys})
    rows = {name: torch.randn(5, 16) for name in ("a", "b")}
    loss = model.dense(rows, batch)
    assert loss.weight == 5
    assert loss.predictions is not None
    assert not loss.predictions.requires_grad
    assert [table.pooling for table in model.tables()] == ["none", "none"]


def test_two_keys_for_one_sample_need_pooling():
    model = Dlrm(DlrmConfig(features=("a", "b"), dense_features=0, pooling="none"))
    batch = Batch(1, {"label": torch.ones(1)})
    with pytest.raises(DataError, match=r'feature b has 2 rows for 1 samples; set pooling = "sum"'):
        model.dense({"a": torch.randn(1, 16), "b": torch.randn(2, 16)}, batch)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"features": ("a", "a")}, "name each one once"),
        ({"features": ("a",), "dense_features": 0}, "name another one"),
        ({"dim": 0}, "dim is 0"),
        ({"top": (8, 0)}, "top is 0"),
    ],
)
def test_impossible_shapes_are_refused(settings, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        DlrmConfig(**settings)


# Weights of keys and of samples.


def weighted_batch(weights: list[float], **dense) -> Batch:
    keys = Jagged.from_lists([[1, 2], [], [3]])
    sparse = {"a": keys, "b": keys, "tf": Jagged(torch.tensor(weights), keys.lengths)}
    return Batch(3, {"label": torch.tensor([1.0, 0.0, 1.0]), **dense}, sparse)


def model_of(kind: str, weights: dict[str, str]):
    torch.manual_seed(3)
    if kind == "logistic":
        return LogisticRegression(("a", "b"), 0, weights), 1
    return Dlrm(DlrmConfig(features=("a", "b"), dense_features=0, weights=weights)), 16


@pytest.mark.parametrize("kind", ["dlrm", "logistic"])
def test_rows_are_summed_times_the_weights_of_their_keys(kind):
    model, dim = model_of(kind, {"a": "tf"})
    assert [table.pooling for table in model.tables()] == ["none", "sum"]
    plain, _ = model_of(kind, {})
    rows_TD, sums_BD = torch.randn(3, dim), torch.randn(3, dim)
    weights = [0.5, -2.0, 3.0]
    pooled_BD = torch.stack([0.5 * rows_TD[0] - 2 * rows_TD[1], 0 * rows_TD[0], 3 * rows_TD[2]])
    batch = weighted_batch(weights)
    found = model.score({"a": rows_TD, "b": sums_BD}, batch)
    torch.testing.assert_close(found, plain.score({"a": pooled_BD, "b": sums_BD}, batch))
    assert not model.capturable
    assert plain.capturable


@pytest.mark.parametrize("kind", ["dlrm", "logistic"])
def test_a_sample_counts_as_often_as_its_weight_says(kind):
    model, dim = model_of(kind, {})
    rows = {name: torch.randn(3, dim, requires_grad=True) for name in ("a", "b")}

    def gradient(**dense):
        loss = model.dense(rows, weighted_batch([1.0] * 3, **dense))
        assert loss.weight == 3  # the trainer divides by samples
        return torch.autograd.grad(loss.total, rows["a"])[0]

    plain = gradient()
    weighted = gradient(weight=torch.tensor([2.0, 0.0, 1.0]))
    torch.testing.assert_close(weighted, plain * torch.tensor([[2.0], [0.0], [1.0]]))
