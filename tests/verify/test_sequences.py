"""Sequence models with dropout, draws and other blocks: plans change no bit, splits only sums."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.config import build
from nestpipe.data import Source
from nestpipe.errors import ConfigError
from nestpipe.train.config import PipelineSettings
from nestpipe.train.job import JobConfig, make_job, make_model, open_split
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import Verdict, verify
from support.examples import every, is_long
from support.thread_ranks import run_ranks

WORLD = {
    "flavour": "sequence", "samples": 96, "num_items": 200, "num_communities": 10, "min_len": 2,
    "max_len": 14,
}  # fmt: skip
ENCODER = {"dropout": 0.3, "time_buckets": 12}
Options = dict[str, Any]


def job_of(kind: str, encoder: Options, *, pool: int = 0, **sections: Options) -> JobConfig:
    model = {"kind": kind, "dim": 8, "attention_dim": 4, "max_len": 14, "negatives": 8}
    return build(
        JobConfig,
        {
            "data": {"synthetic": WORLD},
            "model": {**model, "negative_pool": pool, "encoder": {**ENCODER, **encoder}},
            "run": {"batch": 32, "epochs": 2, "device": "cpu", **sections.get("run", {})},
            "rows": {"optimizer": "adam", "lr": 0.01},
            "pipeline": sections.get("pipeline", {"plan": "nested"}),
        },
    )


def verdict_of(config: JobConfig, ranks: int) -> Verdict:
    """Ranks are threads, which share torch's generator: weights are drawn before they start."""
    torch.manual_seed(0)
    model, tables = make_model(config, open_split(config, "train"))

    def prove(comm: Communicator) -> Verdict:
        def start(pipeline: PipelineSettings) -> tuple[Trainer, Source]:
            settings = replace(config, pipeline=pipeline).settings()
            return Trainer(deepcopy(model), tables, settings, comm), open_split(config, "train")

        return verify(start, config.pipeline, epochs=config.run.epochs)

    return run_ranks(ranks, prove)[0]


@pytest.mark.parametrize(
    ("retrieval", "ranks"),
    [("new", 1), ("pooled", 2)] + [("new", 2), ("pooled", 1)] * is_long(),
)
@pytest.mark.parametrize(
    ("kind", "encoder", "pool"),
    [
        ("hstu", {}, 24),
        ("hstu", {"kind": "fuxi", "checkpoint_activations": True}, 0),
        ("ranker", {"checkpoint_activations": True}, 0),
        ("ranker", {"kind": "fuxi"}, 0),
    ],
)
def test_a_plan_changes_no_bit_of_a_sequence_model(kind, encoder, pool, retrieval, ranks):
    pipeline = {"plan": "nested", "micro_batches": 3, "retrieval": retrieval}
    verdict = verdict_of(job_of(kind, encoder, pool=pool, pipeline=pipeline), ranks)
    assert verdict.first_difference is None
    assert verdict.identical
    assert verdict.steps == 6


@pytest.mark.parametrize(
    ("retrieval", "micro_batching", "ranks"),
    every(2, [*product(["new", "pooled"], ["contiguous", "clustered"], [1, 2, 4])]),
)
def test_a_plan_changes_no_bit_with_bfloat16_and_even_work(retrieval, micro_batching, ranks):
    pipeline = {"plan": "nested", "micro_batches": 3, "retrieval": retrieval, "balance": "work"}
    pipeline["micro_batching"] = micro_batching
    encoder = {"checkpoint_activations": True}
    run = {"precision": "bf16", "epochs": 1}
    config = job_of("hstu", encoder, pool=24, pipeline=pipeline, run=run)
    verdict = verdict_of(config, ranks)
    assert verdict.first_difference is None
    assert verdict.identical
    assert verdict.steps == 3


def losses_on(ranks: int, **pipeline: Any) -> list[float]:
    config = job_of("hstu", {}, pool=24, pipeline={"plan": "serial", **pipeline})
    torch.manual_seed(0)
    model, tables = make_model(config, open_split(config, "train"))

    def train(comm: Communicator) -> list[float]:
        trainer = Trainer(deepcopy(model), tables, config.settings(), comm)
        losses: list[float] = []
        source = open_split(config, "train")
        trainer.fit(source, epochs=2, on_step=lambda report: losses.append(report.loss))
        trainer.close()
        return losses

    return run_ranks(ranks, train)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_even_work_changes_the_order_of_sums_alone(ranks):
    by_samples = losses_on(1)
    by_work = losses_on(ranks, balance="work", micro_batches=2)
    assert by_work == pytest.approx(by_samples, rel=1e-4)


def test_even_work_is_refused_for_models_that_do_not_know_theirs():
    config = build(JobConfig, {"pipeline": {"balance": "work"}, "run": {"device": "cpu"}})
    with pytest.raises(ConfigError, match="balance is 'work' but Dlrm does not say how much work"):
        make_job(config, LocalCommunicator())


def rows_after(config: JobConfig) -> torch.Tensor:
    job = make_job(config, LocalCommunicator())
    job.trainer.fit(job.train, epochs=config.run.epochs)
    rows = job.trainer.rows_of("items", torch.arange(1, WORLD["num_items"] + 1))
    job.trainer.close()
    return rows


@pytest.mark.parametrize("kind", ["hstu", "ranker"])
def test_what_is_dropped_does_not_depend_on_the_split(kind):
    """Adam moves by the sign of small sums, so rows agree to a part of what they have moved."""
    one, three, none = (
        rows_after(job_of(kind, encoder, pool=24, pipeline=pipeline))
        for encoder, pipeline in (
            ({}, {"plan": "serial"}),
            ({}, {"plan": "serial", "micro_batches": 3, "micro_batching": "random"}),
            ({"dropout": 0.0}, {"plan": "serial"}),
        )
    )
    moved = float((one - none).abs().max())
    assert moved > 1e-3
    torch.testing.assert_close(one, three, rtol=1e-4, atol=0.02 * moved)


def test_activations_computed_again_change_no_bit_of_a_run():
    again = job_of("hstu", {"checkpoint_activations": True})
    assert torch.equal(rows_after(job_of("hstu", {})), rows_after(again))
