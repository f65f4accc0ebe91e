"""DLRM against its definition, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from nestpipe.batch import Batch
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.models import Dlrm, DlrmConfig


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
