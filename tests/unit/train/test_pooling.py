"""Means of rows, and weights per key: against torch's own, trained, evaluated, under every plan."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import Batch, Jagged, Loss, Table, Trainer, evaluate, pool_rows
from nestpipe.config import build
from nestpipe.train.config import TrainSettings

ITEMS = [[1, 2, 3], [], [4], [2, 2], [5, 1], [3, 3, 4, 1]]
WEIGHTS = [[0.5, 1.0, -2.0], [], [3.0], [1.0, 0.25], [0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]
LABELS = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])


class Lists:
    """A source of one batch, four times."""

    columns = ()

    def __init__(self) -> None:
        flat = torch.tensor([weight for of in WEIGHTS for weight in of])
        keys = Jagged.from_lists(ITEMS)
        sparse = {"item": keys, "weight": Jagged(flat, keys.lengths)}
        self.batch = Batch(6, {"label": LABELS}, sparse)

    def batches(self, **_: object) -> Iterator[Batch]:
        return iter([self.batch] * 4)

    def empty(self) -> Batch:
        return self.batch.empty()


class Pooled(nn.Module):
    """A linear layer on what is pooled, by the table or by the model."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.top = nn.Linear(4, 1)
        self.seen: list[Tensor] = []

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {"item": batch.sparse["item"]}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        x = rows["item"]
        if self.how == "weighted":
            x = pool_rows(x, batch.sparse["item"].lengths, batch.sparse["weight"].values)
        elif self.how == "own mean":
            x = pool_rows(x, batch.sparse["item"].lengths, mean=True)
        self.seen.append(x.detach())
        logits, label = self.top(x).squeeze(1), batch.dense["label"]
        total = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits.detach()), label)


def trained(how: str, plan: str = "serial", micro_batches: int = 1) -> Trainer:
    torch.manual_seed(0)
    pooling = "mean" if how == "mean" else "none"
    tables = [Table(name="item", dim=4, pooling=pooling, init_std=0.5)]
    settings: dict[str, Any] = {
        "batch": 6,
        "device": "cpu",
        "pipeline": {"plan": plan, "micro_batches": micro_batches},
    }
    trainer = Trainer(Pooled(how), tables, build(TrainSettings, settings))
    trainer.fit(Lists())  # type: ignore[arg-type]
    return trainer


KEYS = torch.tensor([1, 2, 3, 4, 5])


def plain(how: str) -> tuple[Tensor, Tensor]:
    """The same four steps with `nn.functional.embedding_bag`, row-wise AdaGrad and Adam."""
    start = trained_not(how)
    rows = nn.Parameter(start.rows_of("item", KEYS))
    top = start.model.top
    assert isinstance(top, nn.Linear)
    dense, moments = torch.optim.Adam(top.parameters(), lr=1e-3), torch.zeros(5)
    flat = torch.tensor([item - 1 for of in ITEMS for item in of])
    offsets = torch.tensor([0, *torch.tensor([len(of) for of in ITEMS]).cumsum(0)[:-1].tolist()])
    weights = torch.tensor([w for of in WEIGHTS for w in of]) if how == "weighted" else None
    mode = "sum" if how == "weighted" else "mean"
    for _ in range(4):
        x = functional.embedding_bag(flat, rows, offsets, mode=mode, per_sample_weights=weights)
        logits = top(x).squeeze(1)
        functional.binary_cross_entropy_with_logits(logits, LABELS).backward()
        assert rows.grad is not None
        with torch.no_grad():
            moments += rows.grad.square().mean(1)
            rows -= 0.05 * rows.grad / (moments.sqrt() + 1e-8)[:, None]
        dense.step()
        dense.zero_grad()
        rows.grad = None
    return rows.detach(), top.weight.detach()


def trained_not(how: str) -> Trainer:
    torch.manual_seed(0)
    tables = [Table(name="item", dim=4, pooling="none", init_std=0.5)]
    return Trainer(Pooled(how), tables, build(TrainSettings, {"batch": 6, "device": "cpu"}))


@pytest.mark.parametrize("how", ["mean", "own mean", "weighted"])
def test_training_is_that_of_embedding_bag(how: str):
    trainer = trained(how)
    rows, weight = plain(how)
    torch.testing.assert_close(trainer.rows_of("item", KEYS), rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trainer.model.top.weight.detach(), weight, rtol=1e-5, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["mean", "weighted"])
def test_plans_change_no_bit(how: str):
    one, other = trained(how, micro_batches=2), trained(how, "nested", 2)
    assert torch.equal(one.rows_of("item", KEYS), other.rows_of("item", KEYS))


def test_evaluation_sees_the_same_means():
    trainer = trained("mean")
    evaluate(trainer, Lists())  # type: ignore[arg-type]
    model = trainer.model
    assert isinstance(model, Pooled)
    rows = {int(key): row for key, row in zip(KEYS, trainer.rows_of("item", KEYS), strict=True)}
    wanted = [
        torch.stack([rows[item] for item in of]).mean(0) if of else torch.zeros(4) for of in ITEMS
    ]
    torch.testing.assert_close(model.seen[-1], torch.stack(wanted), rtol=1e-6, atol=1e-7)


def test_weights_that_are_all_zero_give_zeros():
    rows, lengths = torch.ones(3, 2), torch.tensor([2, 0, 1])
    weights = torch.tensor([0.0, 0.0, 2.0])
    assert pool_rows(rows, lengths, weights, mean=True).tolist() == [[0, 0], [0, 0], [1, 1]]
