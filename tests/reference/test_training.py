"""`Trainer` against a plain PyTorch loop that shares no code with it, over whole runs.

Both compute in float32 and add in another order, so numbers agree within bounds: losses within
`LOSS_BOUND` of their size, rows and dense weights within `WEIGHT_BOUND`, after `STEPS` batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.config import Table, build
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.jagged import Jagged
from nestpipe.models import Dlrm, DlrmConfig, HstuConfig, HstuRetriever, Loss
from nestpipe.models.hstu_models import SampledSoftmaxConfig
from nestpipe.train.config import TrainSettings
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer
from reference.plain import DECAY, PlainClicks, PlainDlrm, PlainLoop, embedding, row_optimizer
from reference.plain_hstu import (
    PlainHistories,
    PlainRetriever,
    PlainShape,
    log_chance_halving,
)
from support.thread_ranks import run_ranks

STEPS, BATCH, VOCABULARY = 30, 12, 40
LR, EPS, SCALE, DENSE_LR = 0.05, 1e-6, 2.0, 0.01
LOSS_BOUND, WEIGHT_BOUND = 1e-6, 4e-6
FEATURES = ("user", "item", "tags")
PIPELINES = [
    {"plan": "serial"},
    {"plan": "serial", "micro_batches": 4},
    {"plan": "nested", "micro_batches": 5, "retrieval": "new"},
]


@dataclass
class Batches:
    """Global batches as they are; a rank takes every so many samples of some of them."""

    every: list[Batch]

    def empty(self) -> Batch:
        return self.every[0].empty()

    def batches(self, *, rank: int, ranks: int, start: int, **_: int) -> Iterator[Batch]:
        for number, batch in enumerate(self.every[start:], start):
            # One rank after the other has all samples of a batch, and the others none.
            alone = number % 3 == 2
            if alone:
                yield batch if number % ranks == rank else batch.empty()
            else:
                yield batch.select(torch.arange(rank, batch.size, ranks))


def settings(optimizer: str, dense: str, pipeline: Mapping[str, object]) -> TrainSettings:
    rows = {"optimizer": optimizer, "lr": LR, "eps": EPS}
    if "scaled" in optimizer:
        rows["scale"] = SCALE
    if optimizer == "adamw":
        rows["weight_decay"] = DECAY
    given = {
        "batch": BATCH,
        "device": "cpu",
        "store_threads": 1,
        "rows": rows,
        "dense": {"optimizer": dense, "lr": DENSE_LR},
        "pipeline": pipeline,
    }
    return build(TrainSettings, given)


def plain_loop(model: nn.Module, optimizer: str, dense: str) -> PlainLoop:
    """A loop over a plain model with the same two optimizers."""
    assert isinstance(model.tables, nn.ModuleDict)
    weights = list(model.tables.parameters())
    own = {id(weight) for weight in weights}
    others = [p for p in model.parameters() if id(p) not in own and p.requires_grad]
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    rows = row_optimizer(optimizer, weights, LR, EPS, SCALE)
    return PlainLoop(model, rows, kinds[dense](others, lr=DENSE_LR))


def tables_of(model: Any) -> list[Table]:
    """The model's tables, with first rows of about the size of trained ones.

    Directions of tiny rows turn with every rounding, and the two runs drift apart. With rows of
    0.01 and row-wise AdaGrad, the plain loop in float32 ends 1.7e-3 from the same loop in float64,
    and `Trainer` 4.7e-4; with rows of 0.5 it is 1.6e-7 and 2.8e-7.
    """
    return [replace(table, init_std=0.5) for table in model.tables()]


@dataclass(frozen=True)
class Trained:
    """What a run leaves: losses, rows by table, dense weights by name."""

    losses: list[float]
    rows: dict[str, Tensor]
    dense: dict[str, Tensor]

    def assert_near(self, other: Trained) -> None:
        assert self.losses == pytest.approx(other.losses, rel=LOSS_BOUND, abs=LOSS_BOUND)
        for mine, theirs in ((self.rows, other.rows), (self.dense, other.dense)):
            assert mine.keys() == theirs.keys()
            for name, tensor in mine.items():
                off = float((tensor - theirs[name]).detach().abs().max())
                assert off <= WEIGHT_BOUND, f"{name} is off by {off}"


def train(
    model: nn.Module,
    batches: list[Batch],
    how: TrainSettings,
    keys: Tensor,
    ranks: int = 1,
    norms: list[float] | None = None,
) -> Trained:
    """Our run: the losses of every step, and the rows of all keys afterwards.

    Into `norms` go those of the gradients, where they are clipped.
    """

    def one_rank(comm) -> Trained:
        own = deepcopy(model)
        trainer = Trainer(own, tables_of(own), how, comm)
        losses: list[float] = []
        source: Any = Batches(batches)
        reports: list[StepReport] = []
        trainer.fit(source, on_step=reports.append)
        losses += [report.loss for report in reports]
        if norms is not None and comm.rank == 0:
            norms.extend(report.grad_norm for report in reports)
        rows = {name: trainer.rows_of(name, keys) for name in trainer.table_names}
        dense = {name: p.detach().clone() for name, p in own.named_parameters()}
        trainer.close()
        return Trained(losses, rows, dense)

    return run_ranks(ranks, one_rank)[0]


def first_rows(model: nn.Module, keys: Tensor) -> dict[str, Tensor]:
    """The rows that a trainer starts with."""
    trainer = Trainer(deepcopy(model), tables_of(model), TrainSettings(device="cpu"))
    rows = {name: trainer.rows_of(name, keys) for name in trainer.table_names}
    trainer.close()
    return rows


# DLRM: sample weights, batches of weight zero, parameters without gradient


CLICK_KEYS = torch.arange(VOCABULARY) * 7919 - 50


class WeightedDlrm(Dlrm):
    """Samples have weights; one parameter is used by nobody, one is frozen."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__(config)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_B, weight_B = self.logits(rows, batch), batch.dense["weight"]
        losses_B = functional.binary_cross_entropy_with_logits(
            logits_B, batch.dense["label"], reduction="none"
        )
        return Loss((losses_B * weight_B).sum(), float(weight_B.sum()))


@cache
def dlrm() -> WeightedDlrm:
    torch.manual_seed(7)
    shape = {"features": FEATURES, "dense_features": 4, "dim": 6, "bottom": (5,), "top": (8,)}
    return WeightedDlrm(build(DlrmConfig, shape))


@cache
def clicks() -> list[PlainClicks]:
    """Batches of changing size; every seventh weighs nothing, and so do some samples of all."""
    rng = torch.Generator().manual_seed(11)
    made: list[PlainClicks] = []
    for number in range(STEPS):
        size = BATCH if number % 5 else 3  # fewer samples than micro-batches
        lengths = {"user": 1, "item": 2, "tags": 4}
        rows = {
            name: [
                torch.randint(
                    VOCABULARY,
                    (int(torch.randint(most + 1, (), generator=rng)) if most > 1 else 1,),
                    generator=rng,
                ).tolist()
                for _ in range(size)
            ]
            for name, most in lengths.items()
        }
        weight_B = torch.rand(size, generator=rng) * torch.randint(2, (size,), generator=rng) * 3
        made.append(
            PlainClicks(
                torch.randn(size, 4, generator=rng),
                torch.rand(size, generator=rng).round(),
                weight_B * (number % 7 != 6),
                rows,
            )
        )
    return made


def as_batch(batch: PlainClicks) -> Batch:
    sparse = {
        name: Jagged(
            CLICK_KEYS[torch.tensor([row for one in lists for row in one]).long()],
            torch.tensor([len(one) for one in lists]),
        )
        for name, lists in batch.rows.items()
    }
    dense = {"features": batch.features_BF, "label": batch.label_B, "weight": batch.weight_B}
    return Batch(len(batch.label_B), dense, sparse)


@cache
def plain_dlrm(optimizer: str, dense: str) -> Trained:
    ours = deepcopy(dlrm())
    tables = {
        name: embedding(rows, optimizer) for name, rows in first_rows(ours, CLICK_KEYS).items()
    }
    assert ours.bottom is not None
    model = PlainDlrm({name: tables[name] for name in FEATURES}, ours.bottom, ours.top)
    loop = plain_loop(model, optimizer, dense)
    losses = [loop.step(batch) for batch in clicks()]
    rows = {name: table.weight.detach().clone() for name, table in tables.items()}
    return Trained(losses, rows, dict(ours.named_parameters()))


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dlrm_trains_as_a_plain_loop_does(optimizer: str, pipeline: Mapping[str, object]):
    batches = [as_batch(batch) for batch in clicks()]
    ours = train(dlrm(), batches, settings(optimizer, "adam", pipeline), CLICK_KEYS)
    ours.assert_near(plain_dlrm(optimizer, "adam"))


@pytest.mark.parametrize("dense", ["sgd", "adagrad"])
def test_every_dense_optimizer_is_that_of_torch(dense: str):
    batches = [as_batch(batch) for batch in clicks()]
    ours = train(dlrm(), batches, settings("sgd", dense, PIPELINES[1]), CLICK_KEYS)
    ours.assert_near(plain_dlrm("sgd", dense))


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_ranks_without_samples_change_nothing(optimizer: str):
    batches = [as_batch(batch) for batch in clicks()]
    ours = train(dlrm(), batches, settings(optimizer, "adam", PIPELINES[2]), CLICK_KEYS, ranks=2)
    ours.assert_near(plain_dlrm(optimizer, "adam"))


def test_a_run_that_starts_in_the_middle_corrects_the_bias_of_its_own_step(tmp_path):
    """A checkpoint goes on with the step count, which Adam's bias correction needs."""
    batches: Any = Batches([as_batch(batch) for batch in clicks()])
    how = settings("adam", "adam", PIPELINES[0])
    first, second = (Trainer(deepcopy(dlrm()), tables_of(dlrm()), how) for _ in range(2))
    losses: list[float] = []
    first.fit(batches, steps=10, on_step=lambda report: losses.append(report.loss))
    second.load(first.save(tmp_path))
    second.fit(batches, on_step=lambda report: losses.append(report.loss))
    rows = {name: second.rows_of(name, CLICK_KEYS) for name in second.table_names}
    dense = {name: p.detach() for name, p in second.model.named_parameters()}
    Trained(losses, rows, dense).assert_near(plain_dlrm("adam", "adam"))


# A sequence model: rows of histories, of predicted items and of negatives are those of one table


ITEM_KEYS = torch.arange(1, VOCABULARY + 1)
SHAPE: dict[str, Any] = {
    "blocks": 2, "heads": 2, "dim": 6, "attention_dim": 4, "value_dim": 3, "max_len": 8,
}  # fmt: skip
NEGATIVES, TEMPERATURE = 5, 0.2
SEQUENCE_STEPS = 12


@cache
def retriever(sampling: str) -> HstuRetriever:
    torch.manual_seed(3)
    softmax = {
        "num_items": VOCABULARY,
        "negatives": NEGATIVES,
        "temperature": TEMPERATURE,
        "sampling": sampling,
    }
    config = build(HstuConfig, {**SHAPE, "position_buckets": 4})
    return HstuRetriever(config, build(SampledSoftmaxConfig, softmax))


@cache
def histories() -> list[Batch]:
    """Some are empty, some have one item, some are longer than `max_len`."""
    rng = torch.Generator().manual_seed(2)
    made: list[Batch] = []
    for number in range(SEQUENCE_STEPS):
        lengths_B = torch.randint(0, 12, (BATCH if number % 5 else 2,), generator=rng)
        if number == 4:
            lengths_B = lengths_B.clamp(max=1)  # nothing to predict: the batch weighs nothing
        values = torch.randint(1, VOCABULARY + 1, (int(lengths_B.sum()),), generator=rng)
        ids_B = torch.randint(2**40, lengths_B.shape, generator=rng)
        made.append(
            Batch(len(lengths_B), {"sample_id": ids_B}, {"history": Jagged(values, lengths_B)})
        )
    return made


def as_histories(batch: Batch, model: HstuRetriever) -> PlainHistories:
    """Negatives are data here: how they are drawn is tested elsewhere."""
    keys = batch.sparse["history"]
    rows = [part.tolist() for part in (keys.values - 1).split(keys.lengths.tolist())]
    return PlainHistories(rows, (model.negatives(batch) - 1).tolist())


@cache
def plain_retriever(optimizer: str, sampling: str) -> Trained:
    ours = deepcopy(retriever(sampling))
    items = embedding(first_rows(ours, ITEM_KEYS)["items"], optimizer)
    weights = {name: p.detach() for name, p in ours.encoder.named_parameters()}
    shape = PlainShape(**{name: size for name, size in SHAPE.items() if name != "dim"})
    chance_V = torch.zeros(VOCABULARY)
    if sampling == "log_uniform":
        chance_V = log_chance_halving(VOCABULARY)[1:]
    model = PlainRetriever(items, weights, shape, TEMPERATURE, chance_V)
    loop = plain_loop(model, optimizer, "adam")
    losses = [loop.step(as_histories(batch, ours)) for batch in histories()]
    dense = {
        f"encoder.{name}": p.detach() for name, p in zip(model.names, model.weights, strict=True)
    }
    return Trained(losses, {"items": items.weight.detach().clone()}, dense)


SEQUENCE_RUNS = [
    *((optimizer, "uniform", PIPELINES[1]) for optimizer in OPTIMIZERS),
    ("rowwise_adagrad", "uniform", PIPELINES[0]),
    ("rowwise_adagrad", "uniform", PIPELINES[2]),
    ("adam", "uniform", PIPELINES[2]),
    ("adam", "log_uniform", PIPELINES[0]),
]


@pytest.mark.parametrize(("optimizer", "sampling", "pipeline"), SEQUENCE_RUNS)
def test_a_sequence_model_trains_as_a_plain_loop_does(
    optimizer: str, sampling: str, pipeline: Mapping[str, object]
):
    how = settings(optimizer, "adam", pipeline)
    ours = train(retriever(sampling), histories(), how, ITEM_KEYS)
    ours.assert_near(plain_retriever(optimizer, sampling))
