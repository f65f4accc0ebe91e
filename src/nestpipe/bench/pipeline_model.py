"""The data and the models of `nestpipe bench pipeline`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestpipe.batch import Batch
from nestpipe.bench.pipeline_cases import PipelineCase
from nestpipe.config import Table
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.jagged import Jagged
from nestpipe.models import HstuConfig
from nestpipe.models.hstu_models import HstuRanker
from nestpipe.models.protocol import Loss
from nestpipe.train.trainer import Trainer

# Shapes: B samples, L keys of a sample, T all keys of a batch, D width of a row, W dense width,
# K keys, S width of a stored row

CHUNK = 1 << 18
"""Rows stored at a time."""


class Blocks(nn.Module):
    """Residual layers at every key, then the mean over a sample's keys, then a click."""

    def __init__(self, case: PipelineCase) -> None:
        super().__init__()
        self.keys = case.keys
        self.passes = case.passes
        self.through = again if case.recompute else at_once
        width = case.width
        self.first = nn.Linear(case.dim, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(case.blocks)
        )
        self.last = nn.Linear(width, 1)

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {"history": batch.sparse["history"]}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        with torch.autocast("cuda", torch.bfloat16, enabled=rows["history"].is_cuda):
            logits_B = self.logits(rows["history"], batch.size)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits_B.float(), batch.dense["label"], reduction="sum"
        )
        return Loss(total, batch.size)

    def logits(self, rows_TD: Tensor, samples: int) -> Tensor:
        """A click from the rows of all keys, sample by sample."""
        x_BLW = self.first(rows_TD.view(samples, self.keys, -1))
        for _ in range(self.passes):
            for block in self.blocks:
                x_BLW = x_BLW + self.through(block, x_BLW)
        return self.last(x_BLW.mean(1)).squeeze(1)


def at_once(block: nn.Module, x: Tensor) -> Tensor:
    """What a block makes of its input; all of it is kept for the way back."""
    return block(x)


def again(block: nn.Module, x: Tensor) -> Tensor:
    """The same; it is computed once more on the way back."""
    made = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(made, Tensor)
    return made


class Ranker(HstuRanker):
    """HSTU over a history of all keys of a sample, and one candidate."""

    def __init__(self, case: PipelineCase) -> None:
        head = case.dim // case.heads
        super().__init__(
            HstuConfig(
                blocks=case.blocks,
                heads=case.heads,
                dim=case.dim,
                attention_dim=head,
                value_dim=head,
                max_len=case.keys + 1,
            )
        )


def make_model(case: PipelineCase) -> nn.Module:
    """The dense half; the same weights on every rank."""
    torch.manual_seed(0)
    return Ranker(case) if case.model == "hstu" else Blocks(case)


def make_tables(case: PipelineCase) -> list[Table]:
    """One table of items, for the history and, with HSTU, the candidate."""
    features = ("history", "candidates") if case.model == "hstu" else ("history",)
    return [Table(name="items", dim=case.dim, features=features)]


def make_batches(case: PipelineCase, rank: int) -> list[Batch]:
    """Every rank has batches of its own."""
    generator = torch.Generator().manual_seed(rank)
    return [_make_batch(case, generator) for _ in range(case.distinct)]


def _make_batch(case: PipelineCase, generator: torch.Generator) -> Batch:
    keys_T = draw_keys(case, case.batch * case.keys, generator)
    label_B = torch.randint(0, 2, (case.batch,), generator=generator)
    history = Jagged(keys_T, torch.full((case.batch,), case.keys))
    if case.model == "blocks":
        return Batch(case.batch, {"label": label_B.float()}, {"history": history})
    candidates = Jagged.one_each(draw_keys(case, case.batch, generator))
    labels = Jagged.one_each(label_B)
    sparse = {"history": history, "candidates": candidates, "labels": labels}
    return Batch(case.batch, {}, sparse)


def draw_keys(case: PipelineCase, count: int, generator: torch.Generator) -> Tensor:
    """A few hot keys and a long tail, mixed as the case says.

    Half and half it draws, number by number, what TorchRec's lab script draws for its batches.
    """
    return mixed_keys(count, case.rows, case.hot, generator)


def mixed_keys(count: int, rows: int, hot: float, generator: torch.Generator) -> Tensor:
    """Keys of which a share is log-uniform, the others uniform over all rows."""
    uniform = torch.rand(count, generator=generator)
    hot_T = torch.exp(uniform * torch.log(torch.tensor(float(rows)))).long().sub_(1)
    is_any = torch.rand(count, generator=generator) < 1 - hot
    any_T = torch.randint(0, rows, (count,), generator=generator)
    return torch.where(is_any, any_T, hot_T).clamp_(0, rows - 1)


def fill_store(trainer: Trainer, case: PipelineCase) -> int:
    """Store every row that this rank owns; returns how many bytes the store then has."""
    (store,), (home,) = trainer.stores, trainer.groups[0].table_owners
    rank, ranks = trainer.comm.rank, trainer.comm.size
    rows_KS = torch.full((CHUNK, store.layout.width), 0.01)
    for begin in range(0, case.rows, CHUNK):
        keys_K = torch.arange(begin, min(begin + CHUNK, case.rows))
        keys_K = keys_K[owner_of(keys_K, 0, ranks, home) == rank]
        store.scatter(keys_K, [len(keys_K)], rows_KS[: len(keys_K)])
    return store.num_bytes()


class Repeated:
    """A source that cycles through given batches, `count` in all."""

    def __init__(self, batches: Sequence[Batch], count: int) -> None:
        self._batches = batches
        self._count = count

    def batches(self, **_: int) -> Iterator[Batch]:
        return (self._batches[i % len(self._batches)] for i in range(self._count))

    def empty(self) -> Batch:
        return self._batches[0].empty()
