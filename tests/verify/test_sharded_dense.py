"""A sharded dense half under every plan: the bits of `serial` on real process groups."""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from nestpipe.comm.process_group import DistributedCommunicator
from nestpipe.config import build
from nestpipe.errors import ConfigError
from nestpipe.models.sequence import Pending
from nestpipe.schedule import plan
from nestpipe.train.config import PipelineSettings, TrainSettings, choose_pipeline
from nestpipe.train.dense import ShardedDense, _use_all
from nestpipe.train.trainer import refuse_overlap
from support.thread_ranks import run_ranks
from support.verify_world import Case, Model, make_trainer, verdicts_of

USUAL: Case = {
    "micro_batches": 2,
    "retrieval": "new",
    "exchange": "micro",
    "comm_dtype": "float32",
    "keys": "empty on some ranks",
    "optimizer": "adam",
    "dense": "adam",
    "pin_rows": False,
    "parallel": {"dense": "sharded"},
}
CASES: list[Case] = [
    {**USUAL, "plan": "serial", "retrieval": "whole"},
    {**USUAL, "plan": "sparse_dist", "delays": 1, "dense": "sgd"},
    {**USUAL, "plan": "dual_buffer", "delays": 2, "micro_batches": 1},
    {**USUAL, "plan": "frozen_window", "delays": 3, "exchange": "window", "micro_batches": 3},
    {**USUAL, "plan": "nested", "delays": 4, "micro_batches": 3},
    {**USUAL, "plan": "nested", "delays": 5, "retrieval": "pooled", "dense": "adagrad"},
    {**USUAL, "plan": "nested", "delays": 6, "parallel": {"dense": "sharded", "groups": 2}},
]


def test_every_plan_comes_to_the_bits_of_serial(tmp_path: Path):
    verdicts = verdicts_of(CASES, 2, tmp_path, "cpu")
    for case, verdict in zip(CASES, verdicts, strict=True):
        assert verdict["identical"], (case["plan"], verdict["first_difference"])
        assert verdict["rows_compared"] > 100
        assert verdict["steps"] == 6


def test_one_rank_has_nothing_to_shard():
    serial = PipelineSettings(plan="serial")
    (alone,) = run_ranks(1, lambda comm: make_trainer(USUAL, serial, comm, "cpu"))
    assert alone.shards is None


def test_ranks_must_be_processes():
    with pytest.raises(ConfigError, match="needs ranks that are processes; start them with --ran"):
        run_ranks(2, lambda comm: make_trainer(USUAL, PipelineSettings(plan="serial"), comm, "cpu"))


def test_what_it_cannot_be_combined_with_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"compile is true and parallel.dense 'sharded'"):
        build(TrainSettings, {"compile": True, "parallel": {"dense": "sharded"}})
    with pytest.raises(ConfigError, match=r"parallel.dense is 'halved'; did you mean 'sharded'"):
        build(TrainSettings, {"parallel": {"dense": "halved"}})


def test_parameters_that_cannot_be_cut_are_named():
    nobody = cast("DistributedCommunicator", None)
    model = Model()
    model.double()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="parameters of float32 and float64; make them one type"):
        ShardedDense(model, nobody)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"parameter 'scale' is a single number.*shape \(1,\)"):
        ShardedDense(model, nobody)


def test_on_gpus_another_plan_is_refused():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"'sharded' and pipeline.plan 'nested'.*plan 'serial"):
        refuse_overlap(plan("nested"), gpu)
    refuse_overlap(plan("serial"), gpu)
    refuse_overlap(plan("nested"), cpu)


def test_on_gpus_auto_lets_its_collectives_take_turns():
    assert choose_pipeline(PipelineSettings(), "cuda", 2, sharded=True).pipeline.plan == "serial"
    assert choose_pipeline(PipelineSettings(), "cuda", 2).pipeline.plan == "nested"
    assert choose_pipeline(PipelineSettings(), "cuda", 1, sharded=True).pipeline.plan == "nested"


def test_a_unit_may_leave_a_sum_to_the_next_one():
    """As blocks of HSTU do by kernels: rows, and what is yet to be added to them."""
    unit = nn.Linear(3, 3)
    rows_TD = torch.ones(2, 3, requires_grad=True)
    output = (Pending(rows_TD * 2, rows_TD * 3), None, None)
    pending, *others = _use_all(["weight", "bias"])(unit, (), output)
    assert others == [None, None]
    pending.total().sum().backward()
    assert rows_TD.grad is not None
    assert rows_TD.grad.tolist() == [[5.0] * 3] * 2
    assert all(p.grad is not None and not p.grad.any() for p in unit.parameters())
