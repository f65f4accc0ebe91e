"""`model.kind = "ranker"`: it learns, and its checkpoint says what it is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import (
    Catalogue,
    DataConfig,
    Ranking,
    RankingOptions,
    SyntheticConfig,
    open_source,
)
from nestpipe.errors import ConfigError
from nestpipe.models import HstuConfig, HstuRanker
from nestpipe.train.evaluate import evaluate, popularity_auc
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.loop import train_job

SMALL = {
    "data": {
        "synthetic": {
            "flavour": "sequence", "samples": 400, "test_samples": 200, "num_items": 200,
            "num_communities": 10, "exponent": 0.5,
        }
    },
    "model": {"kind": "ranker", "dim": 16, "attention_dim": 8, "max_len": 50, "negatives": 16},
    "run": {"batch": 32, "epochs": 8, "device": "cpu"},
    "rows": {"optimizer": "adam", "lr": 0.02},
    "dense": {"optimizer": "adam", "lr": 0.01},
}  # fmt: skip


def job_of(**sections) -> JobConfig:
    merged = {name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in SMALL}
    return build(JobConfig, merged)


def test_a_ranker_beats_popularity(tmp_path: Path):
    config = job_of(run={"checkpoint": str(tmp_path)})
    outcome = train_job(make_job(config, LocalCommunicator()), lambda report: None)
    assert outcome.metrics["auc"] > 0.7
    assert outcome.metrics["auc"] > outcome.metrics["popularity_auc"] + 0.05
    about = json.loads((tmp_path / "step-00000104" / "manifest.json").read_text())
    model = make_job(config, LocalCommunicator()).trainer.model
    assert isinstance(model, HstuRanker)
    made = {name: about["model"][name] for name in ("kind", "config")}
    assert made == {"kind": "ranker", "config": asdict(model.config)}
    assert build(HstuConfig, about["model"]["config"]) == model.config
    assert about["first_rows"]["items"]["std"] == config.model.init_std


def test_without_training_a_ranker_knows_nothing():
    job = make_job(job_of(), LocalCommunicator())
    assert 0.4 < evaluate(job.trainer, job.held_out())["auc"] < 0.6
    job.trainer.close()


def test_popularity_ranks_by_how_often_an_item_was_chosen():
    """With one community and a steep law, frequent items are the likely ones."""
    world = SyntheticConfig(
        flavour="sequence", samples=200, test_samples=100, num_items=50, num_communities=1,
        exponent=1.5,
    )  # fmt: skip
    assert _popularity_of(world) > _popularity_of(replace(world, exponent=0.0)) + 0.1


def _popularity_of(world: SyntheticConfig) -> float:
    train, test = (
        Ranking(
            open_source(DataConfig(synthetic=world), split), RankingOptions(catalogue=Catalogue(50))
        )
        for split in ("train", "test")
    )
    return popularity_auc(train, test)


def test_data_without_sequences_is_refused():
    with pytest.raises(ConfigError, match="'ranker' but the data has no sequences"):
        make_job(job_of(data={"synthetic": {}}), LocalCommunicator())
