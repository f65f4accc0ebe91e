"""A model as a user would write it, by itself in a folder: two towers over all keys of the data."""

from pathlib import Path

MODULE = """\
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from nestpipe import Loss, Table


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    dim: int = 8


class Towers(nn.Module):
    def __init__(self, config: TowerConfig, columns):
        super().__init__()
        self.names = [column.name for column in columns if column.kind == "keys"]
        self.dim = config.dim
        self.top = nn.Linear(config.dim * len(self.names), 1)

    def tables(self):
        return [Table(name=name, dim=self.dim, pooling="sum") for name in self.names]

    def sparse_keys(self, batch):
        return {name: batch.sparse[name] for name in self.names}

    def score(self, rows, batch):
        return self.top(torch.cat([rows[name] for name in self.names], 1)).squeeze(1)

    def dense(self, rows, batch):
        logits = self.score(rows, batch)
        label = batch.dense["label"]
        total = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return Loss(total, batch.size, torch.sigmoid(logits.detach()), label)
"""


def write_own_model(folder: Path, name: str) -> str:
    """Write the module, and return its kind."""
    (folder / f"{name}.py").write_text(MODULE)
    return f"{name}:Towers"
