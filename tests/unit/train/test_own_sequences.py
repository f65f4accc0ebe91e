"""Sequences of a user's own: any ids, from Parquet to a model that is evaluated and ranked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import Catalogue, DataConfig, SyntheticConfig, open_source
from nestpipe.data.synthetic import write
from nestpipe.errors import DataError
from nestpipe.models import HstuConfig, HstuRetriever, SampledSoftmaxConfig, ranks_of_targets
from nestpipe.train.evaluate import (
    _Asked,
    _counts,
    _popularity_ranks,
    evaluate,
    ranks_at_once,
    ranks_in_parts,
)
from nestpipe.train.job import JobConfig, make_job, prepare
from nestpipe.train.loop import train_job

ITEMS = 40
WORLD = SyntheticConfig(
    flavour="sequence", samples=120, num_items=ITEMS, num_communities=4, min_len=2, max_len=9
)


def key_of(items: np.ndarray) -> np.ndarray:
    """Ids as other programs give them: far apart, beyond 32 bits, some negative."""
    return items.astype(np.int64) * 77_777_777_777 - 10**12


def write_users(folder: Path, far: bool) -> str:
    write(folder, WORLD, files=1, force=False)
    if far:
        (file,) = folder.glob("*.parquet")
        table = pq.read_table(file)
        history = table["history"].combine_chunks()
        values = pa.array(key_of(history.values.to_numpy()))
        lists = pa.LargeListArray.from_arrays(history.offsets, values)
        pq.write_table(table.set_column(0, "history", lists), file)
    return str(folder)


def job_of(path: str, kind: str, **model) -> JobConfig:
    sections = {
        "data": {"kind": "parquet", "path": path},
        "model": {"kind": kind, "dim": 8, "attention_dim": 4, "negatives": 8, **model},
        "run": {"batch": 16, "device": "cpu"},
    }
    return build(JobConfig, sections)


@pytest.mark.parametrize("kind", ["hstu", "ranker"])
def test_the_names_of_items_change_no_metric_that_is_counted(tmp_path, kind):
    """Rows begin by their keys, so weights differ; what is drawn and asked for is the same."""
    found = []
    for far in (False, True):
        config = job_of(write_users(tmp_path / str(far), far), kind)
        run = replace(config.run, checkpoint=str(tmp_path / f"run-{far}"))
        config = replace(config, run=run)
        outcome = train_job(make_job(config, LocalCommunicator()), lambda report: None)
        found.append(outcome.metrics)
        assert outcome.steps == 8
    counted = {name: value for name, value in found[0].items() if name.startswith(("base", "pop"))}
    assert {name: found[1][name] for name in counted} == counted
    assert found[0]["samples"] == found[1]["samples"] > 0
    assert all(np.isfinite(value) for value in found[1].values())


def test_the_map_of_items_is_in_the_checkpoint(tmp_path):
    config = job_of(write_users(tmp_path / "users", far=True), "hstu")
    job = make_job(config, LocalCommunicator())
    job.trainer.fit(job.train, steps=2)
    job.trainer.save(tmp_path / "run")
    (dense,) = (tmp_path / "run").glob("step-*/dense.safetensors")
    items = load_file(dense)["model.catalogue"]
    assert items.tolist() == np.unique(key_of(np.arange(1, ITEMS + 1))).tolist()
    again = prepare(config, LocalCommunicator(), str(tmp_path / "run"), exact=False)
    assert evaluate(again.trainer, again.held_out()) == evaluate(job.trainer, job.held_out())


def test_few_gaps_keep_the_ids_and_many_number_them_anew():
    assert Catalogue.of(np.array([1, 2, 4])) == Catalogue(4)
    assert Catalogue.of(np.array([1, 2, 4])).ids is None
    sparse = Catalogue.of(np.array([-5, 3, 3_100_000]))
    assert sparse.num_items == 3
    assert sparse.numbers(np.array([3, 4, -5, 9_999_999])).tolist() == [2, 0, 1, 0]
    assert sparse.keys(np.array([3, 1])).tolist() == [3_100_000, -5]


@pytest.mark.parametrize("kind", ["hstu", "ranker"])
def test_an_item_beyond_num_items_is_refused(tmp_path, kind):
    config = job_of(write_users(tmp_path, far=False), kind, num_items=20)
    job = make_job(config, LocalCommunicator())
    with pytest.raises(DataError, match=r"a history has item \d+.* model.num_items"):
        job.trainer.fit(job.train, steps=8)


class Exact(HstuRetriever):
    """Scores that are whole numbers, so that no order of sums changes them."""

    def score(self, vectors_BD, items_ND):
        return vectors_BD @ items_ND.T


def exact_model(ids=None) -> Exact:
    encoder = HstuConfig(blocks=1, heads=1, dim=4, attention_dim=4, value_dim=4, max_len=9)
    return Exact(encoder, SampledSoftmaxConfig(num_items=ITEMS), ids)


@pytest.mark.parametrize("most", [1, 24, 100, 10_000])
def test_a_part_of_the_catalogue_at_a_time_ranks_alike(most):
    model, random = exact_model(), torch.Generator().manual_seed(1)
    source = open_source(DataConfig(synthetic=WORLD), "test")
    (batch,) = source.batches(global_batch=10**5, rank=0, ranks=1, seed=0)
    batch = batch.slice(0, 24)
    vectors_BD = torch.randint(-2, 3, (24, 4), generator=random).float()
    catalogue_ND = torch.randint(-2, 3, (ITEMS, 4), generator=random).float()
    asked = _Asked.of(batch, model)
    whole = ranks_at_once(model, vectors_BD, catalogue_ND, asked)
    assert len(set(whole.tolist())) > 5
    assert ranks_in_parts(model, vectors_BD, catalogue_ND, asked, most).tolist() == whole.tolist()


def test_popularity_counts_what_comparing_all_items_would():
    model = exact_model()
    train, test = (open_source(DataConfig(synthetic=WORLD), split) for split in ("train", "test"))
    counts_N = _counts(train, ITEMS, model.numbers, 64)
    (batch,) = test.batches(global_batch=10**5, rank=0, ranks=1, seed=0)
    asked = _Asked.of(batch.slice(0, 200), model)
    scores_BN = counts_N.expand(200, ITEMS).clone()
    scores_BN[asked.sample_T, asked.seen_T] = float("-inf")
    expected = ranks_of_targets(scores_BN, asked.targets_B)
    assert _popularity_ranks(counts_N, counts_N.sort().values, asked).tolist() == expected.tolist()


def test_a_target_that_the_model_does_not_know_is_refused():
    model = exact_model()
    source = open_source(DataConfig(synthetic=WORLD), "test")
    (batch,) = source.batches(global_batch=10**5, rank=0, ranks=1, seed=0)
    batch.dense["target"][3] = 41
    with pytest.raises(DataError, match="item 41 is to be predicted, and is none of the 40"):
        _Asked.of(batch, model)


@pytest.mark.parametrize("kind", ["hstu", "ranker"])
def test_histories_longer_than_the_model_is_made_for_are_told_once(tmp_path, caplog, kind):
    path = write_users(tmp_path, far=False)
    for max_len in (9, 4):
        train_job(make_job(job_of(path, kind, max_len=max_len), LocalCommunicator()), print)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("a history has ")
    assert "items and model.max_len is 4, so later positions look alike; set a larger" in told
