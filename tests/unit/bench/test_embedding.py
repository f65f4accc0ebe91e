"""Embedding work alone: the gradients that are given reach the rows, and nothing else does."""

import sys
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nestpipe.bench.dlrm import NESTPIPE
from nestpipe.bench.embedding import (
    FBGEMM,
    EmbeddingCase,
    compare_embedding,
    make_batches,
    make_trainer,
    power_law,
    store_rows,
    sweep_cases,
)
from nestpipe.bench.pipeline_rank import Repeated
from nestpipe.errors import ConfigError
from nestpipe.train.config import RowSettings

TINY = EmbeddingCase(
    device="cpu",
    where="host",
    tables=2,
    samples=16,
    rows=30,
    dim=4,
    distinct=3,
    warm=2,
    steps=2,
    rounds=2,
)


@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.parametrize("where", ["hbm", "cache", "host"])
def test_rows_move_by_the_given_gradients(plan, where):
    case = replace(TINY, plan=plan, where=where, share=0.9)
    batches = make_batches(case)
    with closing(make_trainer(case)) as trainer:
        store_rows(trainer, batches)
        trainer.fit(Repeated(batches, 5), steps=5)  # type: ignore[arg-type]
        rows = [trainer.rows_of(name, torch.arange(30)) for name in case.names]
    gradient_CBD = case.make_gradient().view(2, 16, 4)
    for table, name in enumerate(case.names):
        expected = torch.full((30, 4), 0.01)
        for step in range(5):
            keys_B = batches[step % 3].sparse[name].values
            expected.index_add_(0, keys_B, gradient_CBD[table], alpha=-RowSettings().lr)
        used = torch.cat([batch.sparse[name].values for batch in batches]).unique()
        torch.testing.assert_close(rows[table][used], expected[used])


def test_the_place_of_rows_decides_sizes():
    hbm, cache = EmbeddingCase(where="hbm"), EmbeddingCase(where="cache", optimizer="adam")
    assert hbm.tables * hbm.samples == 1_048_570
    assert (hbm.rows, hbm.distinct, hbm.retrieval) == (1_677_721, 6, "pooled")
    # In a cache every step brings keys that it may not hold.
    assert (cache.rows, cache.distinct, cache.retrieval) == (8_000_000, 0, "pooled")
    assert EmbeddingCase(where="host").retrieval == "new"
    assert cache.row_width == 3 * hbm.row_width == 384


def test_a_sweep_changes_one_size():
    swept = sweep_cases([TINY], "dim=8,16")
    assert [(case.dim, case.samples, case.work) for case in swept] == [
        (8, 16, "host, sgd, dim=8"),
        (16, 16, "host, sgd, dim=16"),
    ]


def test_more_tables_have_as_many_lookups_and_keys_together():
    (case,) = sweep_cases([EmbeddingCase()], "tables=1000")
    assert (case.tables, case.samples, case.rows) == (1000, 1048, 16_777)


@pytest.mark.parametrize("sweep", ["dim", "dim=", "plan=1", "dim=a", "dim=8,"])
def test_a_sweep_that_means_nothing_is_refused(sweep):
    with pytest.raises(ConfigError, match=f"sweep is '{sweep}'"):
        sweep_cases([TINY], sweep)


def test_keys_follow_the_power_law():
    """Half as many of key 2n as of key n, times 2 to the rest of the exponent."""
    keys = power_law(400_000, 1_000, 1.05, torch.Generator().manual_seed(0))
    counts = torch.bincount(keys, minlength=1_000).double()
    assert keys.min() == 0
    assert keys.max() < 1_000
    for number in (8, 32):
        of = (
            counts[number - 1 : 2 * number - 1].sum()
            / counts[2 * number - 1 : 4 * number - 1].sum()
        )
        assert of == pytest.approx(2**0.05, rel=0.05)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"where": "disk"}, "where is 'disk'; use hbm, cache, host"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb'"),
        ({"share": 1.5}, "share is 1.5"),
        ({"exponent": 0}, "exponent is 0"),
        ({"exponent": 1}, "exponent is 1"),
    ],
)
def test_what_cannot_be_drawn_or_kept_is_refused(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        EmbeddingCase(**given)


@pytest.mark.skipif(not find_spec("fbgemm_gpu"), reason="FBGEMM is not installed: make bench-deps")
def test_the_peer_does_the_same_lookups():
    found = compare_embedding([TINY], Path(sys.prefix), limit_s=120)
    assert [(seen.system, len(seen.rounds_ms)) for seen in found.readings] == [
        (FBGEMM, 2),
        (NESTPIPE, 2),
    ]
