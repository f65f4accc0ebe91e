"""TorchRec's tables in and out again, at full size: predictions before, after, and after training.

python tools/torchrec_roundtrip.py --rows 1000000 --tables 4 --dim 32

Makes a TorchRec model on the CPU with random weights, imports its tables, compares predictions,
trains a few steps here, exports, and lets TorchRec load what comes out. Needs `make bench-deps`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import Batch, Jagged, Loss, RowSettings, Trainer, TrainSettings
from nestpipe.train.evaluate import forward
from nestpipe.train.torchrec import (
    export_torchrec,
    import_torchrec,
    kjt_from_jagged,
    tables_from_torchrec,
)

BATCH, STEPS = 512, 5


class Head(nn.Module):
    """What both have in common: a linear layer over all features side by side."""

    def __init__(self, features: list[str], dim: int) -> None:
        super().__init__()
        self.features = features
        self.top = nn.Linear(dim * len(features), 1)

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in self.features}

    def logits(self, rows: Mapping[str, Tensor]) -> Tensor:
        return self.top(torch.cat([rows[name] for name in self.features], 1)).squeeze(1)

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits, label = self.logits(rows), batch.dense["label"]
        total = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits.detach()), label)


class Samples:
    """Random keys of every table, up to four a sample."""

    columns = ()

    def __init__(self, features: list[str], rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.every: list[Batch] = []
        for _ in range(STEPS):
            sparse: dict[str, Jagged] = {}
            for name in features:
                lengths = torch.randint(0, 5, (BATCH,), generator=generator)
                count = int(lengths.sum())
                sparse[name] = Jagged(
                    torch.randint(0, rows, (count,), generator=generator), lengths
                )
            label = torch.randint(0, 2, (BATCH,), generator=generator).float()
            self.every.append(Batch(BATCH, {"label": label}, sparse))

    def batches(self, **_: object) -> Iterator[Batch]:
        return iter(self.every)

    def empty(self) -> Batch:
        return self.every[0].empty()


def main(rows: int, tables: int, dim: int) -> int:
    """Print the largest differences; 1 where one is beyond rounding."""
    from torchrec import (  # pyright: ignore[reportMissingImports]
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        PoolingType,
    )

    torch.manual_seed(0)
    names = [f"t{number}" for number in range(tables)]
    poolings = [PoolingType.MEAN if number % 2 else PoolingType.SUM for number in range(tables)]
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name], pooling=pooling
        )
        for name, pooling in zip(names, poolings, strict=True)
    ]
    theirs = EmbeddingBagCollection(tables=configs)
    head, source = Head(names, dim), Samples(names, rows)
    settings = TrainSettings(batch=BATCH, device="cpu", rows=RowSettings(lr=0.05))
    trainer = Trainer(head, tables_from_torchrec(theirs), settings)
    counts = import_torchrec(trainer, theirs.state_dict())
    print(f"imported {sum(counts.values()):,} rows of {len(counts)} tables")
    worst = [_compare("after the import", trainer, theirs, source)]
    trainer.fit(source)  # type: ignore[arg-type]
    moved = _largest_difference(trainer, theirs, source)
    print(f"after {STEPS} steps here, against weights before them: {moved:.3g}")
    theirs.load_state_dict(export_torchrec(trainer, dict.fromkeys(names, rows)))
    worst.append(_compare("after the export", trainer, theirs, source))
    return 0 if max(worst) < 1e-5 < moved else 1


def _compare(when: str, trainer: Trainer, theirs: nn.Module, source: Samples) -> float:
    worst = _largest_difference(trainer, theirs, source)
    print(f"{when}: predictions differ by at most {worst:.3g}")
    return worst


@torch.no_grad()
def _largest_difference(trainer: Trainer, theirs: nn.Module, source: Samples) -> float:
    head = trainer.model
    assert isinstance(head, Head)
    worst = 0.0
    for batch, rows in forward(trainer, source, head.sparse_keys):  # type: ignore[arg-type]
        pooled = theirs(kjt_from_jagged(batch.sparse, head.features)).to_dict()
        worst = max(worst, float((head.logits(rows) - head.logits(pooled)).abs().max()))
    return worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="TorchRec tables in and out again.")
    for flag, default in (("rows", 1_000_000), ("tables", 4), ("dim", 32)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    given = parser.parse_args()
    sys.exit(main(given.rows, given.tables, given.dim))
