"""Groups of ranks: which of them count as touching a row, and which of them writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.checkpoint import disk, merging
from nestpipe.config import Table, build
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.train.config import TrainSettings
from nestpipe.train.trainer import Trainer
from support.thread_ranks import run_ranks

KEYS: list[list[list[int]]] = [
    [[1, 2], [1, 3]],
    [[1], [1, 4]],
    [[5], [5, 2]],
    [[2, 6], [1, 7]],
    [[6], [6]],
]
"""Of each batch, the keys that each of two groups touches."""


class Touches:
    """One sample for each key, and the keys of a rank are its own."""

    def empty(self) -> Batch:
        return self._batch([])

    def batches(self, *, rank: int, start: int, **_: int) -> Iterator[Batch]:
        return (self._batch(of_ranks[rank]) for of_ranks in KEYS[start:])

    def _batch(self, keys: list[int]) -> Batch:
        return Batch(len(keys), {}, {"item": Jagged.one_each(torch.tensor(keys).long())})


class SumOfRows(nn.Module):
    """The smallest model with a row of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        return Loss((rows["item"].sum(1) + self.bias).sum(), float(batch.size))


def trainer_of(comm: Any, optimizer: str, parallel: Mapping[str, object]) -> Trainer:
    given = {
        "batch": 4,
        "device": "cpu",
        "store_threads": 1,
        "rows": {"optimizer": optimizer},
        "parallel": {"groups": 2, **parallel},
    }
    tables = [Table(name="item", dim=3)]
    return Trainer(SumOfRows(), tables, build(TrainSettings, given), comm)


def beyond_one(merge_every: int) -> dict[int, float]:
    """By hand: at a merge, a touched row moves a quarter of the way to its groups less one."""
    average: dict[int, float] = {}
    for first in range(0, len(KEYS), merge_every):
        merged = KEYS[first : first + merge_every]
        touched = [{key for batch in merged for key in batch[group]} for group in range(2)]
        for key in touched[0] | touched[1]:
            groups = sum(key in one for one in touched)
            average[key] = 0.75 * average.get(key, 0.0) + 0.25 * (groups - 1)
    return average


@pytest.mark.parametrize("merge_every", [1, 2, 3, 100])
def test_averaged_rows_count_the_groups_that_touch_them(merge_every: int):
    """The last merge of a run is one in host memory, unless a batch has just done it."""

    def one(comm: Any) -> dict[int, float]:
        averaged = {"merge": "averaged", "merge_every": merge_every}
        trainer = trainer_of(comm, "touch_scaled_rowwise_adagrad", averaged)
        source: Any = Touches()
        trainer.fit(source)
        found = {}
        for _, keys, rows in trainer.stores[0].export():
            found |= dict(zip(keys.tolist(), rows[:, 4].tolist(), strict=True))
        trainer.close()
        return found

    assert run_ranks(2, one) == [pytest.approx(beyond_one(merge_every))] * 2


def test_one_group_writes_the_rows_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two writers of one file could leave a torn one; replicas have the same rows anyway."""
    written: Counter[str] = Counter()
    write_tensors = disk.write_tensors

    def noted(file: Path, tensors: Mapping[str, Tensor]) -> disk.WrittenFile:
        written[file.name] += 1
        return write_tensors(file, tensors)

    monkeypatch.setattr(disk, "write_tensors", noted)
    monkeypatch.setattr(merging, "write_tensors", noted)

    def one(comm: Any) -> None:
        trainer = trainer_of(comm, "sgd", {})
        source: Any = Touches()
        trainer.fit(source)
        trainer.save(tmp_path)
        trainer.close()

    run_ranks(2, one)
    assert written == {"dense.safetensors": 1, "rows-item-00000-00000.safetensors": 1}
