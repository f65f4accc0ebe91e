"""Train a model of your own: an ordinary `nn.Module` with two methods.

    python examples/02_your_model.py

`sparse_keys` says which keys each feature looks up. `dense` gets their rows and returns the loss.
Nothing is traced or patched, so any PyTorch code works in either.
"""

import torch
from torch import nn
from torch.nn import functional

from nestpipe import (
    DataConfig,
    Loss,
    RowSettings,
    SyntheticConfig,
    Table,
    Trainer,
    TrainSettings,
    evaluate,
    open_source,
)

NUM_FEATURES = 6


class DeepAndCross(nn.Module):
    """One cross layer beside a small MLP, over all embeddings and numbers side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cross = nn.Linear(width, width)
        self.deep = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Linear(width + 16, 1)

    def sparse_keys(self, batch):
        # `item` and `similar` name one table below: features may share rows.
        keys = {"item": batch.sparse["c0"], "similar": batch.sparse["c1"]}
        return keys | {f"c{n}": batch.sparse[f"c{n}"] for n in range(2, NUM_FEATURES)}

    def dense(self, rows, batch):
        x = torch.cat([*rows.values(), batch.dense["features"]], 1)
        crossed = x * self.cross(x) + x
        logits = self.top(torch.cat([crossed, self.deep(x)], 1)).squeeze(1)
        label = batch.dense["label"]
        # The sum, not the mean: the trainer divides by the samples of the global batch, so that
        # micro-batches and ranks of different sizes add up.
        total = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits).detach(), label)


# `pooling="sum"`: `dense` gets one row per sample, the sum over its keys.
tables = [
    Table(name="items", dim=16, features=("item", "similar"), pooling="sum"),
    *(Table(name=f"c{n}", dim=16, pooling="sum") for n in range(2, NUM_FEATURES)),
]
data = DataConfig(
    synthetic=SyntheticConfig(
        samples=30_000,
        test_samples=5_000,
        num_tables=NUM_FEATURES,
        num_keys=10_000,
        keys_per_sample=(1, 3),
    )
)

torch.manual_seed(0)
settings = TrainSettings(device="cpu", rows=RowSettings(optimizer="adam", lr=0.002))
trainer = Trainer(DeepAndCross(16 * NUM_FEATURES + 13), tables, settings)
trainer.fit(open_source(data))
print(f"test AUC {evaluate(trainer, open_source(data, 'test'))['auc']:.3f}")

# Rows are there to be read: the same on every rank.
print("row of item 0:", trainer.rows_of("items", torch.tensor([0]))[0, :4].tolist())
trainer.close()
