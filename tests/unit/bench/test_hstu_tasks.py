"""The published setting of several tasks at toy sizes: its data, its work, and every plan."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from nestpipe.bench.hstu.tasks import (
    GlobalBatches,
    TasksCase,
    TasksRanker,
    make_batches,
    make_trainer,
    store_rows,
    time_tasks,
)
from nestpipe.comm import LocalCommunicator
from nestpipe.errors import ConfigError

TOY: dict[str, Any] = {
    "batch": 4, "length": 24, "items": 300, "users": 40, "table_dim": 8, "head": 8, "tasks": 3,
    "blocks": 1, "dim": 16, "heads": 2, "head_dim": 8, "precision": "fp32", "device": "cpu",
    "warm": 3, "steps": 2, "rounds": 2, "peak_tflops": 0.5,
}  # fmt: skip


def toy(**sizes: Any) -> TasksCase:
    return TasksCase(**{**TOY, **sizes})


def test_samples_follow_from_their_number_and_lengths_from_the_exponent():
    one, two = make_batches(toy(batch=8)), make_batches(toy(ranks=2))
    assert one[3].sparse["history"].to_lists() == two[3].sparse["history"].to_lists()
    lengths = torch.cat([b.sparse["history"].lengths for b in make_batches(toy(batch=4000))])
    assert (int(lengths.min()), int(lengths.max())) == (1, 24)
    # Zipf with exponent 1.2 over 24 lengths: the integrals of x ** -1.2 up to 2, and up to 25.
    share = (1 - 2**-0.2) / (1 - 25**-0.2)
    assert float((lengths == 1).double().mean()) == pytest.approx(share, rel=0.05)


def test_ranks_have_parts_of_the_same_batches():
    source = GlobalBatches(make_batches(toy(ranks=2)))
    whole = next(source.batches(rank=0, ranks=1)).sparse["user"].values
    parts = [next(source.batches(rank=r, ranks=2)).sparse["user"].values for r in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_loss_is_that_of_all_items_and_tasks():
    case = toy()
    model, batch = TasksRanker(case), make_batches(case)[0]
    items = len(batch.sparse["history"].values)
    rows = {"history": torch.randn(items, 8), "user": torch.randn(4, 8)}
    for parameter in model.head[2].parameters():
        torch.nn.init.zeros_(parameter)
    loss = model.dense(rows, batch)
    assert loss.weight == items
    assert float(loss.total.detach()) == pytest.approx(items * 3 * math.log(2), rel=1e-5)


def test_labels_of_an_item_are_bits_of_one_number():
    labels = make_batches(toy(batch=400))[0].sparse["labels"].values
    for task in range(3):
        assert 0.45 < float(((labels >> task) & 1).double().mean()) < 0.55


def test_work_counts_projection_encoder_and_head():
    case = toy()
    model, batch = TasksRanker(case), make_batches(case)[0]
    items = batch.sparse["history"].lengths.double()
    rows, pairs = items + 1, (items + 1) * (items + 2) / 2
    weights = model.encoder.blocks[0].uvqk.weight.numel() + 16 * 16  # type: ignore[union-attr]
    forward = weights * rows + 2 * 16 * pairs / 1 + 8 * 16 * rows + (16 * 8 + 8 * 3) * items
    torch.testing.assert_close(model.step_flops(batch), 6 * forward)


@pytest.mark.parametrize("plan", ["nested", "serial", "sparse_dist"])
def test_every_plan_tells_its_share_of_a_peak(plan: str):
    reading = time_tasks(LocalCommunicator(), toy(plan=plan, retrieval="new"))
    assert len(reading.rounds_ms) == 2
    assert reading.mfu == pytest.approx(reading.tflops / 0.5)
    assert min(*reading.rounds_tflops) <= reading.tflops <= max(*reading.rounds_tflops)
    assert reading.tokens >= 8


def test_a_pool_may_be_smaller_than_what_host_memory_holds():
    case = toy(stored=250, device_memory="40KB")
    trainer = make_trainer(case, LocalCommunicator())
    try:
        store_rows(trainer, 250)
        assert trainer.row_counts() == {"items": 250, "users": 250}
    finally:
        trainer.close()
    reading = time_tasks(LocalCommunicator(), case)
    assert 0 < reading.pool_rows < 500 <= reading.stored_rows


def test_the_command_runs_plans_on_several_ranks():
    sizes = (
        "--length 24 --items 300 --users 40 --head-dim 8 --batch 4 --heads 2 --blocks 1 --dim 16"
    )
    command = f"bench hstu --parts step --tasks 3 --table-dim 8 {sizes} --precision fp32 --ranks 2"
    command += " --plans nested,serial --balance samples,work --retrieval new --device cpu"
    command += " --warm 2 --steps 2 --rounds 1 --peak 0.5 --json -"
    ran = subprocess.run(
        [sys.executable, "-m", "nestpipe", *command.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["step"]
    assert [(row["plan"], row["balance"]) for row in found] == [
        ("nested", "samples"),
        ("nested", "work"),
        ("serial", "samples"),
        ("serial", "work"),
    ]
    assert all(row["mfu"] > 0 and not row["failed"] for row in found)


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ConfigError, match="tasks is 63"):
        toy(tasks=63)
    with pytest.raises(ConfigError, match="nothing to balance"):
        toy(balance="work")
    with pytest.raises(ConfigError, match="plan is 'fastest'"):
        toy(plan="fastest")
