"""A whole run from Python: your model on two ranks, every setting, a checkpoint, rows to search.

    python examples/09_your_own_run.py

`launch` starts the ranks as torchrun would; each of them runs `train`. The trainer takes a model,
its tables, the settings and the communicator. It saves and goes on from checkpoints, and hands rows
out, here for a search of nearest neighbours.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from nestpipe import (
    DataConfig,
    DenseSettings,
    Loss,
    PipelineSettings,
    RowSettings,
    SyntheticConfig,
    Table,
    Trainer,
    TrainSettings,
    connect,
    evaluate,
    launch,
    open_source,
)

ITEMS = 2_000
FEATURES = ("c0", "c1", "c2")
DATA = DataConfig(
    synthetic=SyntheticConfig(
        samples=20_000, test_samples=4_000, num_tables=len(FEATURES), num_keys=ITEMS
    )
)
SETTINGS = TrainSettings(
    batch=512,  # samples of a global batch, over all ranks
    seed=1,  # same seed, same data, same ranks, same micro-batches: the same bits
    device="cpu",
    pipeline=PipelineSettings(plan="nested", micro_batches=2),
    rows=RowSettings(optimizer="adam", lr=0.005),
    dense=DenseSettings(optimizer="adam", lr=0.002),
)


class Towers(nn.Module):
    """Sums of rows side by side, and an MLP on top."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.top = nn.Sequential(
            nn.Linear(dim * len(FEATURES) + 13, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def sparse_keys(self, batch):
        return {name: batch.sparse[name] for name in FEATURES}

    def dense(self, rows, batch):
        x = torch.cat([*(rows[name] for name in FEATURES), batch.dense["features"]], 1)
        logits, label = self.top(x).squeeze(1), batch.dense["label"]
        total = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits.detach()), label)


def make_trainer(comm) -> Trainer:
    """The same on every rank, and after a restart."""
    tables = [Table(name=name, dim=16, pooling="sum") for name in FEATURES]
    torch.manual_seed(0)
    return Trainer(Towers(16), tables, SETTINGS, comm)


def train() -> None:
    """What every rank does."""
    comm = connect("gloo")
    folder = Path(sys.argv[1])
    trainer = make_trainer(comm)
    source = open_source(DATA)

    def tell(report) -> None:
        if comm.rank == 0 and report.step % 20 == 0:
            print(f"step {report.step}: loss {report.loss:.3f}")

    trainer.fit(source, steps=20, on_step=tell)
    saved = trainer.save(folder)
    trainer.close()

    trainer = make_trainer(comm)  # as after a restart, with any number of ranks
    trainer.load(saved)
    trainer.fit(source, epochs=2, on_step=tell)
    metrics = evaluate(trainer, open_source(DATA, "test"))
    vectors = functional.normalize(trainer.rows_of("c0", torch.arange(ITEMS)), dim=1)
    if comm.rank == 0:
        nearest = (vectors @ vectors[7]).topk(4).indices[1:].tolist()
        print(f"{comm.size} ranks, {trainer.progress.step} steps, test AUC {metrics['auc']:.3f}")
        print(f"nearest to item 7: {nearest}")
    trainer.close()
    comm.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        sys.argv[1:] = [here]
        sys.exit(launch(train, ranks=2))
