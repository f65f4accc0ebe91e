"""Micro-batches: their sizes, and which samples meet in them."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.batch import Batch
from nestpipe.data.clustering import MicroBatchSplitter, micro_sizes
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.train.config import PipelineSettings
from nestpipe.train.ops import query_keys


@given(st.integers(0, 400), st.integers(2, 40), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_sizes_add_up_and_are_near_what_is_due(total, count, first, last):
    sizes = micro_sizes(total, count, first, last)
    assert sum(sizes) == total
    assert len(sizes) == count
    weights = [first, *[1.0] * (count - 2), last]
    assert all(
        abs(size - total * weight / sum(weights)) < 1
        for size, weight in zip(sizes, weights, strict=True)
    )


def test_even_sizes_differ_by_one_at_most():
    assert micro_sizes(10, 4) == [3, 3, 2, 2]
    assert micro_sizes(16, 4, 0.5, 0.5) == [3, 5, 5, 3]
    assert micro_sizes(32, 4, 0.25, 0.75) == [3, 11, 10, 8]


class Model:
    """Its keys are those of one feature; it also draws some at random, which do not count."""

    def sparse_keys(self, batch: Batch):
        return {**self.query_keys(batch), "negatives": batch.sparse["other"]}

    def query_keys(self, batch: Batch):
        return {"items": batch.sparse["items"]}


def communities() -> Batch:
    """Samples of two kinds in turn; each kind has its own keys."""
    rng = random.Random(0)
    keys = [[1000 * (i % 2) + rng.randrange(50) for _ in range(10)] for i in range(64)]
    items = Jagged.from_lists(keys)
    return Batch(64, {"id": torch.arange(64)}, {"items": items, "other": items})


def test_samples_that_share_keys_meet():
    cut = MicroBatchSplitter(2, "clustered")
    micro_batches = cut.split(communities(), query_keys(Model()), {"items": "items"})  # type: ignore[arg-type]
    assert [micro.size for micro in micro_batches] == [32, 32]
    for micro in micro_batches:
        assert len(set(micro.sparse["items"].values.tolist())) == 50
        assert micro.dense["id"].tolist() == sorted(micro.dense["id"].tolist())


def test_one_micro_batch_is_the_batch_itself():
    batch = communities()
    (micro,) = MicroBatchSplitter(1, "clustered").split(batch, query_keys(Model()), {})  # type: ignore[arg-type]
    assert micro is batch


def test_ends_of_no_size_are_refused():
    with pytest.raises(ConfigError, match="first is 0"):
        PipelineSettings(first=0)
    with pytest.raises(ConfigError, match="last is 0"):
        PipelineSettings(last=0)
