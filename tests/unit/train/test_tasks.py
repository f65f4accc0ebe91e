"""Several tasks with a metric each, and the metrics of training itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.config import Table
from nestpipe.jagged import Jagged
from nestpipe.models import Auc, LogLoss, Loss, TaskLoss
from nestpipe.models.metrics import click_sums, read_click_sums
from nestpipe.train.config import PipelineSettings, TrainSettings
from nestpipe.train.evaluate import evaluate
from nestpipe.train.trainer import Trainer
from support.thread_ranks import run_ranks

BATCHES, SIZE = 6, 24


class TwoTasks(nn.Module):
    """A click, and a purchase that counts double; each has an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(4, 2)

    def sparse_keys(self, batch: Batch) -> dict[str, Jagged]:
        return {"user": batch.sparse["user"]}

    def dense(self, rows: Any, batch: Batch) -> Loss:
        logits = self.top(rows["user"])
        tasks = {
            name: self._task(logits[:, n], batch.dense[name])
            for n, name in enumerate(("click", "buy"))
        }
        return Loss.of_tasks(tasks, batch.size, {"buy": 2.0})

    def _task(self, logits_B: Tensor, labels_B: Tensor) -> TaskLoss:
        losses = nn.functional.binary_cross_entropy_with_logits
        total = losses(logits_B, labels_B, reduction="sum")
        return TaskLoss(total, len(labels_B), torch.sigmoid(logits_B).detach(), labels_B)


class Samples:
    """The same batches for any number of ranks; the last is for rank 0 alone."""

    num_samples = BATCHES * SIZE

    def _batch(self, number: int) -> Batch:
        rng = torch.Generator().manual_seed(number)
        user = torch.randint(0, 30, (SIZE,), generator=rng)
        labels = {
            name: (torch.rand(SIZE, generator=rng) < (0.2 + 0.02 * user)).float()
            for name in ("click", "buy")
        }
        return Batch(SIZE, labels, {"user": Jagged.one_each(user)})

    def batches(self, *, rank: int, ranks: int, start: int = 0, **_: object) -> Iterator[Batch]:
        share = SIZE // ranks
        for number in range(start, BATCHES):
            yield self._batch(number).slice(rank * share, (rank + 1) * share)

    def empty(self) -> Batch:
        return self._batch(0).empty()


def trainer_of(comm: Any = None, **pipeline: Any) -> Trainer:
    settings = TrainSettings(
        batch=SIZE, device="cpu", pipeline=PipelineSettings(plan="nested", **pipeline)
    )
    return Trainer(
        TwoTasks(), [Table(name="user", dim=4, pooling="sum", init_std=1.0)], settings, comm
    )


def test_the_total_is_the_sum_of_tasks_by_their_shares():
    batch = Samples()._batch(0)
    loss = TwoTasks().dense({"user": torch.zeros(SIZE, 4)}, batch)
    click, buy = (float(loss.tasks[name].total.detach()) for name in ("click", "buy"))
    assert float(loss.total.detach()) == pytest.approx(click + 2 * buy)
    assert sorted(loss.measured()) == ["buy", "click"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_task_is_evaluated(ranks):
    source: Any = Samples()

    def one(comm):
        trainer = trainer_of(comm)
        return evaluate(trainer, source)

    found, *others = run_ranks(ranks, one)
    assert all(other == found for other in others)
    assert found["loss"] == pytest.approx(found["click/loss"] + 2 * found["buy/loss"], rel=1e-6)
    for task in ("click", "buy"):
        assert found[f"{task}/loss"] == pytest.approx(found[f"{task}/log_loss"], rel=1e-5)
        assert 0 < found[f"{task}/auc"] < 1
        assert found[f"{task}/samples"] == BATCHES * SIZE


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_train_metrics_are_those_of_the_predictions_of_each_step(ranks, micro_batches):
    source: Any = Samples()

    def one(comm):
        trainer = trainer_of(comm, micro_batches=micro_batches)
        seen: list[tuple[Tensor, Tensor]] = []
        model: Any = trainer.model
        dense = model.dense

        def noted(rows, batch):
            loss = dense(rows, batch)
            if model.training:  # else it is asked whether its loss is a sum
                seen.append((loss.tasks["click"].predictions, loss.tasks["click"].labels))
            return loss

        model.dense = noted
        trainer.fit(source)
        running, taken = trainer.running_metrics(), trainer.take_train_metrics()
        assert trainer.running_metrics() == {}
        return seen, running, taken

    every = run_ranks(ranks, one)
    pairs = [pair for seen, _, _ in every for pair in seen]
    predictions, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    auc, log_loss = Auc().add(predictions, labels), LogLoss().add(predictions, labels)
    for _, running, taken in every:
        assert taken["click/train_auc"] == pytest.approx(auc.value, abs=2e-3)
        entropy = log_loss.normalised_entropy
        assert taken["click/train_normalised_entropy"] == pytest.approx(entropy, rel=1e-9)
        assert taken.keys() == running.keys()
        assert (running == taken) == (ranks == 1)


def test_counts_add_up_and_odd_predictions_do_no_harm():
    rng = torch.Generator().manual_seed(3)
    predictions, labels = torch.rand(500, generator=rng), torch.rand(500, generator=rng).round()
    predictions[:3] = torch.tensor([0.0, 1.0, float("nan")])
    whole = click_sums(predictions, labels)
    parts = click_sums(predictions[:100], labels[:100]) + click_sums(
        predictions[100:], labels[100:]
    )
    assert torch.equal(whole[:-3], parts[:-3])
    assert float(whole[:-3].sum()) == float(whole[-1]) == 500
    assert click_sums(predictions[:0], labels[:0]).sum() == 0
    alike = read_click_sums(click_sums(predictions[3:9], torch.ones(6)))
    assert all(value != value for value in alike.values())
