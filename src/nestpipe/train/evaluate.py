"""How good a model is: forward passes over data it has not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.comm import Communicator
from nestpipe.comm.peer_failure import STOP
from nestpipe.data import HISTORY, TARGET, Ranking, Source
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.jagged import Jagged
from nestpipe.models import Auc, HstuRetriever, LogLoss, TargetRank, ranks_of_targets
from nestpipe.models.protocol import RecModel, loss_of
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
    with torch.no_grad():
        if isinstance(trainer.model, HstuRetriever):
            metrics = _evaluate_retrieval(trainer, trainer.model, source, on_batch)
        else:
            metrics = _evaluate_clicks(trainer, source, on_batch)
    return {} if trainer.stopped else metrics


def _evaluate_clicks(
    trainer: Trainer, source: Source, on_batch: Callable[[], None]
) -> dict[str, float]:
    """AUC, log loss and normalised entropy of a model that predicts probabilities.

    The baseline is what always predicting the mean label would give.
    """
    auc, log_loss = Auc(), LogLoss()
    total = weight = 0.0
    model = trainer.model
    assert isinstance(model, RecModel)
    for batch, rows in forward(trainer, source, model.sparse_keys):
        loss = loss_of(model, rows, batch)
        total, weight = total + float(loss.total), weight + loss.weight
        if loss.predictions is not None and loss.labels is not None:
            auc = auc.add(loss.predictions, loss.labels)
            log_loss = log_loss.add(loss.predictions, loss.labels)
        on_batch()
    auc, log_loss = _merged(auc, trainer.comm), _merged(log_loss, trainer.comm)
    sums = torch.tensor([total, weight], dtype=torch.float64, device=trainer.device)
    trainer.comm.all_reduce(sums)
    result = {"loss": float(sums[0] / sums[1]) if float(sums[1]) else float("nan")}
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
    items_N = torch.arange(1, model.softmax.num_items + 1)
    catalogue_ND = trainer.rows_of("items", items_N).to(trainer.device)
    ranks = TargetRank()
    for batch, rows in forward(trainer, source, _with_no_negatives(model)):
        if batch.size:
            scores_BN = model.score(model.encode(rows, batch), catalogue_ND)
            ranks = ranks.add(_ranks(scores_BN, batch))
        on_batch()
    ranks = _merged(ranks, trainer.comm)
    return {**ranks.values, "samples": float(ranks.count)}


def _ranks(scores_BN: Tensor, batch: Batch) -> Tensor:
    """Where each target came, among the items that its user has not seen yet."""
    history, targets_B = batch.sparse["history"], batch.dense["target"] - 1
    scores_BN = without_seen(scores_BN, history.values - 1, history.lengths, targets_B)
    return ranks_of_targets(scores_BN, targets_B)


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


def popularity(train: Source, held_out: Source, num_items: int, batch: int = 1024) -> TargetRank:
    """How well the held-out items rank by how often training has seen them.

    Read in one process; items that a user has seen are left out, as for a model.
    """
    counts_N = _counts(train, num_items, batch)
    ranks = TargetRank()
    for samples in held_out.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        scores_BN = counts_N.expand(samples.size, num_items).clone()
        history, targets_B = samples.sparse[HISTORY], samples.dense[TARGET] - 1
        ranks = ranks.add(
            ranks_of_targets(
                without_seen(scores_BN, history.values - 1, history.lengths, targets_B), targets_B
            )
        )
    return ranks


def popularity_auc(train: Ranking, held_out: Ranking, batch: int = 1024) -> float:
    """AUC of the held-out candidates by how often training has seen them, in one process."""
    counts_N = _counts(train.sequences, train.options.num_items, batch)
    share_N = counts_N / (counts_N.max() + 1)
    auc = Auc()
    for samples in held_out.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        candidates, labels = samples.sparse["candidates"], samples.sparse["labels"]
        auc = auc.add(share_N[candidates.values - 1], labels.values)
    return auc.value


def _counts(train: Source, num_items: int, batch: int) -> Tensor:
    """(N,) how often each item is in a training history."""
    counts_N = torch.zeros(num_items, dtype=torch.float64)
    for samples in train.batches(global_batch=batch, rank=0, ranks=1, seed=0):
        counts_N += torch.bincount(samples.sparse[HISTORY].values - 1, minlength=num_items)
    return counts_N


def without_seen(scores_BN: Tensor, seen_T: Tensor, lengths_B: Tensor, targets_B: Tensor) -> Tensor:
    """Scores where items that a user has seen come last, unless they are the target itself."""
    sample_T = torch.repeat_interleave(lengths_B, output_size=len(seen_T))
    kept_B1 = scores_BN.gather(1, targets_B[:, None])
    scores_BN[sample_T, seen_T] = float("-inf")
    return scores_BN.scatter_(1, targets_B[:, None], kept_B1)
