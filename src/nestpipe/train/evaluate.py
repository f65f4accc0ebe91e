"""How good a model is: forward passes over data it has not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.comm import Communicator
from nestpipe.comm.peer_failure import STOP
from nestpipe.data import HISTORY, TARGET, Ranking, Source
from nestpipe.embedding.routing.requests import averaged
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.embedding.table_groups import mean_features
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged
from nestpipe.models import Auc, HstuRetriever, LogLoss, TargetRank, ranks_of_targets
from nestpipe.models.protocol import RecModel, check_measured, in_precision, loss_of
from nestpipe.schedule import PlanOptions, plan
from nestpipe.train.trainer import Trainer

# Shapes: B samples, N items of the catalogue, D width


_M = TypeVar("_M", Auc, LogLoss, TargetRank)


def evaluate(
    trainer: Trainer, source: Source, *, on_batch: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The metrics that fit the model, over all ranks; every rank gets the same figures.

    None at all where a rank wants to stop meanwhile.
    """
    trainer.model.eval()
    shards = trainer.shards.resharded() if trainer.shards is not None else nullcontext()
    with torch.no_grad(), in_precision(trainer.device, trainer.settings.precision), shards:
        if isinstance(trainer.model, HstuRetriever):
            metrics = _evaluate_retrieval(trainer, trainer.model, source, on_batch)
        else:
            metrics = _evaluate_clicks(trainer, source, on_batch)
    return {} if trainer.stopped else metrics


def _evaluate_clicks(
    trainer: Trainer, source: Source, on_batch: Callable[[], None]
) -> dict[str, float]:
    """The mean loss, and what `_measure` tells, of the whole and of each task of the model."""
    sums: dict[str, list[float]] = {"": [0.0, 0.0]}
    metrics: dict[str, tuple[Auc, LogLoss]] = {"": (Auc(), LogLoss())}
    model = trainer.model
    assert isinstance(model, RecModel)
    for batch, rows in forward(trainer, source, model.sparse_keys):
        loss = loss_of(model, rows, batch, trainer.dense_half)
        for name, part in {"": loss, **loss.tasks}.items():
            total, weight = sums.get(name, [0.0, 0.0])
            sums[name] = [total + float(part.total), weight + part.weight]
        for name, measured in loss.measured().items():
            check_measured(type(model).__name__, name, *measured)
            auc, log_loss = metrics.get(name, (Auc(), LogLoss()))
            metrics[name] = auc.add(*measured), log_loss.add(*measured)
        on_batch()
    # A rank without samples knows of no task; all of them must ask the same.
    known = trainer.comm.all_gather_values(sorted({*sums, *metrics}))
    names = sorted({name for of_rank in cast("list[list[str]]", known) for name in of_rank})
    result: dict[str, float] = {}
    for name in names:
        of_task = metrics.get(name, (Auc(), LogLoss()))
        found = _measure(trainer, sums.get(name, [0.0, 0.0]), *of_task)
        result |= {f"{name}/{metric}" if name else metric: v for metric, v in found.items()}
    return result


def _measure(
    trainer: Trainer, sums: Sequence[float], auc: Auc, log_loss: LogLoss
) -> dict[str, float]:
    """Loss, AUC, log loss and normalised entropy over all ranks.

    The baseline is what always predicting the mean label would give.
    """
    auc, log_loss = _merged(auc, trainer.comm), _merged(log_loss, trainer.comm)
    totals = torch.tensor(sums, dtype=torch.float64, device=trainer.device)
    trainer.comm.all_reduce(totals)
    result = {"loss": float(totals[0] / totals[1]) if float(totals[1]) else float("nan")}
    if log_loss.count:
        result |= {
            "auc": auc.value,
            "log_loss": log_loss.value,
            "normalised_entropy": log_loss.normalised_entropy,
            "baseline_auc": 0.5,
            "baseline_log_loss": log_loss.value / log_loss.normalised_entropy,
            "samples": float(log_loss.count),
        }
    return result


def _evaluate_retrieval(
    trainer: Trainer, model: HstuRetriever, source: Source, on_batch: Callable[[], None]
) -> dict[str, float]:
    """HR@K and NDCG@K of the held-out item among the whole catalogue."""
    catalogue_ND = trainer.rows_of("items", model.items()).to(trainer.device)
    ranks = TargetRank()
    shards = trainer.shards
    for batch, rows in forward(trainer, source, _with_no_negatives(model)):
        if shards is not None:  # all ranks call it, those without samples too
            vectors_BD = shards.call("encode", rows, batch)
        else:
            vectors_BD = model.encode(rows, batch) if batch.size else None
        if vectors_BD is not None and batch.size:
            asked = _Asked.of(batch, model)
            # Those whose scores fit at once have them in one product, as always.
            whole = batch.size * len(catalogue_ND) <= MOST_SCORES
            find = ranks_at_once if whole else ranks_in_parts
            ranks = ranks.add(find(model, vectors_BD, catalogue_ND, asked))
        on_batch()
    ranks = _merged(ranks, trainer.comm)
    return {**ranks.values, "samples": float(ranks.count)}


MOST_SCORES = 1 << 25
"""Scores that are held at a time: 128 MiB."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of a batch, by places in the catalogue, from 0."""

    targets_B: Tensor
    seen_T: Tensor
    """Items that users have seen, the target left out ..."""
    sample_T: Tensor
    """... and whose they are."""

    @classmethod
    def of(cls, batch: Batch, model: HstuRetriever) -> _Asked:
        """Refuses a target that is not in the catalogue."""
        history, targets_B = batch.sparse[HISTORY], model.numbers(batch.dense[TARGET]) - 1
        if int(targets_B.min()) < 0:
            item = int(batch.dense[TARGET][targets_B.argmin()])
            raise DataError(
                f"item {item} is to be predicted, and is none of the {model.softmax.num_items:,} "
                "that the model knows; correct model.num_items, or train with data that has it"
            )
        seen_T = model.numbers(history.values) - 1
        sample_T = torch.repeat_interleave(history.lengths, output_size=len(seen_T))
        kept_T = (seen_T >= 0) & (seen_T != targets_B[sample_T])
        return cls(targets_B, seen_T[kept_T], sample_T[kept_T])


def ranks_at_once(
    model: HstuRetriever, vectors_BD: Tensor, catalogue_ND: Tensor, asked: _Asked
) -> Tensor:
    """(B,) where each target came, among the items that its user has not seen yet."""
    scores_BN = model.score(vectors_BD, catalogue_ND)
    scores_BN[asked.sample_T, asked.seen_T] = float("-inf")
    return ranks_of_targets(scores_BN, asked.targets_B)


def ranks_in_parts(
    model: HstuRetriever,
    vectors_BD: Tensor,
    catalogue_ND: Tensor,
    asked: _Asked,
    most: int = MOST_SCORES,
) -> Tensor:
    """The same with a part of the catalogue at a time; at most so many scores are held."""
    rows_B = torch.arange(len(vectors_BD), device=vectors_BD.device)
    own_B = model.score(vectors_BD, catalogue_ND[asked.targets_B]).diagonal()
    ranks_B = torch.ones_like(asked.targets_B)
    step = max(1, most // len(vectors_BD))
    for begin in range(0, len(catalogue_ND), step):
        scores_BN = model.score(vectors_BD, catalogue_ND[begin : begin + step])
        size = scores_BN.shape[1]
        for sample, place in ((asked.sample_T, asked.seen_T), (rows_B, asked.targets_B)):
            here = (place >= begin) & (place < begin + size)
            scores_BN[sample[here], place[here] - begin] = float("-inf")
        ranks_B += (scores_BN >= own_B[:, None]).sum(1)
    return ranks_B


def _with_no_negatives(model: HstuRetriever) -> Callable[[Batch], Mapping[str, Jagged]]:
    def keys(batch: Batch) -> Mapping[str, Jagged]:
        none = batch.sparse["history"].values.new_zeros(0)
        nothing = Jagged(none, torch.zeros_like(batch.sparse["history"].lengths))
        return {**model.query_keys(batch), "negatives": nothing}

    return keys


def forward(
    trainer: Trainer, source: Source, keys_of: Callable[[Batch], Mapping[str, Jagged]]
) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
    """Each of this rank's batches with its rows; all ranks go on until none has samples."""
    tables = trainer.make_tables(plan("serial", PlanOptions()))
    batches = source.batches(
        global_batch=trainer.settings.batch,
        rank=trainer.comm.rank,
        ranks=trainer.comm.size,
        seed=0,
    )
    empty = source.empty()
    number = 0
    while True:
        batch = next(batches, empty)
        rows = _look_up(trainer, tables, number, batch, keys_of(batch))
        if rows is None:
            return
        yield batch.to(trainer.device), rows
        number += 1


def _look_up(
    trainer: Trainer,
    tables: ShardedTables,
    number: int,
    batch: Batch,
    keys: Mapping[str, Jagged],
) -> dict[str, Tensor] | None:
    """The rows of one batch, by the ops of a schedule; None where no rank has samples.

    Nor where one wants to stop: all of them learn it here.
    """
    tables.dedup(number, [keys])
    samples = tables.counts(number, batch.size + STOP * trainer.stop_wanted())
    trainer.stopped = trainer.stopped or samples >= STOP
    if samples == 0 or samples >= STOP:
        return None
    tables.keys(number)
    tables.union(number)
    tables.retrieve(number)
    tables.rows(number, 0)
    rows = {name: tensor.detach() for name, tensor in tables.lookup(number, 0).items()}
    means = mean_features(tables.groups)
    rows = averaged(rows, {name: keys[name].lengths.to(trainer.device) for name in means})
    tables.forget(number)
    return rows


def _merged(metric: _M, comm: Communicator) -> _M:
    """The metric over the samples of all ranks."""
    every = comm.all_gather_values(metric.numbers)
    merged = type(metric).of_numbers(every[0])  # type: ignore[arg-type]
    for numbers in every[1:]:
        merged = merged.merge(type(metric).of_numbers(numbers))  # type: ignore[arg-type]
    return merged


# The trivial baseline of retrieval and of ranking: what was chosen most often comes first.


# Shapes: B samples, N items


def popularity(
    train: Source, held_out: Source, model: HstuRetriever, batch: int = 1024
) -> TargetRank:
    """How well the held-out items rank by how often training has seen them.

    Read in one process; items that a user has seen are left out, as for a model.
    """
    counts_N = _counts(train, model.softmax.num_items, model.numbers, batch)
    sorted_N = counts_N.sort().values
    ranks = TargetRank()
    for samples in held_out.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        ranks = ranks.add(_popularity_ranks(counts_N, sorted_N, _Asked.of(samples, model)))
    return ranks


def _popularity_ranks(counts_N: Tensor, sorted_N: Tensor, asked: _Asked) -> Tensor:
    """(B,) items chosen as often as the target or more, less those that the user has seen."""
    own_B = counts_N[asked.targets_B]
    ranks_B = len(sorted_N) - torch.searchsorted(sorted_N, own_B)
    seen_T2 = torch.stack([asked.sample_T, asked.seen_T], 1).unique(dim=0)
    before_T = counts_N[seen_T2[:, 1]] >= own_B[seen_T2[:, 0]]
    return ranks_B.index_add(0, seen_T2[before_T, 0], -torch.ones_like(seen_T2[before_T, 0]))


def popularity_auc(train: Ranking, held_out: Ranking, batch: int = 1024) -> float:
    """AUC of the held-out candidates by how often training has seen them, in one process."""
    catalogue = train.options.catalogue

    def numbers(items: Tensor) -> Tensor:
        return torch.from_numpy(catalogue.numbers(items.numpy()))

    counts_N = _counts(train.sequences, catalogue.num_items, numbers, batch)
    share_N = counts_N / (counts_N.max() + 1)
    auc = Auc()
    for samples in held_out.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        candidates, labels = samples.sparse["candidates"], samples.sparse["labels"]
        auc = auc.add(share_N[numbers(candidates.values) - 1], labels.values)
    return auc.value


def _counts(
    train: Source, num_items: int, numbers: Callable[[Tensor], Tensor], batch: int
) -> Tensor:
    """(N,) how often each item is in a training history."""
    counts_N = torch.zeros(num_items, dtype=torch.float64)
    for samples in train.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        found = torch.bincount(numbers(samples.sparse[HISTORY].values), minlength=num_items + 1)
        counts_N += found[1:]
    return counts_N
