"""What training needs besides an optimizer, against plain loops with torch's own parts.

Schedules of `torch.optim.lr_scheduler`, groups of parameters, weight decay, frozen tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe.config import build
from nestpipe.train.config import TrainSettings
from nestpipe.train.trainer import Trainer
from reference.plain import LazyAdamW, PlainDlrm, PlainLoop, RowwiseAdagrad, embedding
from reference.test_training import (
    BATCH,
    CLICK_KEYS,
    FEATURES,
    PIPELINES,
    STEPS,
    Batches,
    Trained,
    as_batch,
    clicks,
    dlrm,
    first_rows,
    tables_of,
    train,
)

WARM, FALL = 4, STEPS
ROWS = {
    "optimizer": "adamw",
    "lr": 0.05,
    "eps": 1e-6,
    "betas": [0.8, 0.99],
    "weight_decay": 0.3,
    "schedule": "cosine",
    "warmup_steps": WARM,
    "decay_steps": FALL,
    "rates": ["it*=0.02"],
    "frozen": ["tags"],
}
DENSE = {
    "optimizer": "adamw",
    "lr": 0.01,
    "eps": 1e-6,
    "betas": [0.7, 0.98],
    "weight_decay": 0.4,
    "schedule": "step",
    "warmup_steps": WARM,
    "decay_steps": 9,
    "decay": 0.4,
    "rates": ["top.*=0.004"],
    "no_decay": ["*.bias"],
}


def settings(pipeline: Mapping[str, object], **sections: object) -> TrainSettings:
    given = {"batch": BATCH, "device": "cpu", "store_threads": 1, "pipeline": pipeline, **sections}
    return build(TrainSettings, given)


def scheduled(optimizer: torch.optim.Optimizer, after: Any) -> Any:
    """A warm-up that ends at the whole rate, then another scheduler."""
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM, total_iters=WARM - 1)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, after], milestones=[WARM])


def plain_model(optimizer: str) -> tuple[nn.Module, PlainDlrm, dict[str, nn.Embedding]]:
    """Our model for its dense half, and the plain one around the same modules."""
    ours = deepcopy(dlrm())
    rows = first_rows(ours, CLICK_KEYS)
    tables = {name: embedding(rows[name], optimizer) for name in FEATURES}
    assert ours.bottom is not None
    return ours, PlainDlrm(tables, ours.bottom, ours.top), tables


def trained(loop: PlainLoop, ours: nn.Module, tables: Mapping[str, nn.Embedding]) -> Trained:
    losses = [loop.step(batch) for batch in clicks()]
    rows = {name: table.weight.detach().clone() for name, table in tables.items()}
    return Trained(losses, rows, dict(ours.named_parameters()))


def plain_run() -> Trained:
    """The whole recipe with torch's optimizers, schedulers and groups."""
    ours, model, tables = plain_model("adamw")
    tables["tags"].weight.requires_grad = False
    kept = {"betas": (0.8, 0.99), "lr": 0.05, "eps": 1e-6, "weight_decay": 0.3}
    by_rate: Any = [
        {"params": [tables["user"].weight]},
        {"params": [tables["item"].weight], "lr": 0.02},
    ]
    rows = LazyAdamW(by_rate, **kept)
    named = [(name, p) for name, p in ours.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p],
            "lr": 0.004 if name.startswith("top.") else 0.01,
            "weight_decay": 0.0 if name.endswith(".bias") else 0.4,
        }
        for name, p in named
    ]
    dense = torch.optim.AdamW(groups, betas=(0.7, 0.98), eps=1e-6)
    of_torch = torch.optim.lr_scheduler
    schedulers = [
        scheduled(rows, of_torch.CosineAnnealingLR(rows, FALL)),
        scheduled(dense, of_torch.StepLR(dense, 9, 0.4)),
    ]
    return trained(PlainLoop(model, rows, dense, schedulers), ours, tables)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("ranks", [1, 2])
def test_schedules_groups_decay_and_frozen_tables_are_those_of_torch(pipeline, ranks):
    batches = [as_batch(batch) for batch in clicks()]
    how = settings(pipeline, rows=ROWS, dense=DENSE)
    ours = train(dlrm(), batches, how, CLICK_KEYS, ranks=ranks)
    ours.assert_near(plain_run())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pipeline", [*PIPELINES, {"plan": "nested", "retrieval": "pooled"}])
def test_a_model_whose_tables_are_all_frozen_trains_its_dense_half(pipeline, ranks):
    batches = [as_batch(batch) for batch in clicks()]
    how = settings(pipeline, rows={"frozen": ["*"]})
    ours = train(dlrm(), batches, how, CLICK_KEYS, ranks=ranks)
    first = first_rows(dlrm(), CLICK_KEYS)
    assert all(torch.equal(ours.rows[name], rows) for name, rows in first.items())
    before = dict(dlrm().named_parameters())["top.0.weight"]
    assert not torch.equal(ours.dense["top.0.weight"], before)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_weight_decay_of_dense_weights_is_that_of_torch(optimizer):
    ours, model, tables = plain_model("rowwise_adagrad")
    rows = RowwiseAdagrad([table.weight for table in tables.values()], 0.05, 1e-6, 1.0)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    others = [p for p in ours.parameters() if p.requires_grad]
    dense = kinds[optimizer](others, lr=0.01, weight_decay=0.2)
    expected = trained(PlainLoop(model, rows, dense), ours, tables)
    how = settings(
        PIPELINES[1],
        rows={"lr": 0.05, "eps": 1e-6},
        dense={"optimizer": optimizer, "lr": 0.01, "weight_decay": 0.2},
    )
    train(dlrm(), [as_batch(one) for one in clicks()], how, CLICK_KEYS).assert_near(expected)


@pytest.mark.parametrize("rows_too", [True, False])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("ranks", [1, 2])
def test_clipping_is_that_of_torch(pipeline, ranks, rows_too):
    most = 0.35
    ours, model, tables = plain_model("rowwise_adagrad")
    weights = [table.weight for table in tables.values()]
    others = [p for p in ours.parameters() if p.requires_grad]
    norms: list[float] = []

    def clip() -> None:
        every = [*others, *weights] if rows_too else others
        norms.append(float(torch.nn.utils.clip_grad_norm_(every, most)))

    rows, dense = RowwiseAdagrad(weights, 0.05, 1e-6, 1.0), torch.optim.Adam(others, lr=0.01)
    expected = trained(PlainLoop(model, rows, dense, clip=clip), ours, tables)
    assert 5 < sum(norm > most for norm in norms) < STEPS - 5, norms
    how = settings(
        pipeline,
        rows={"lr": 0.05, "eps": 1e-6},
        dense={"lr": 0.01},
        clip_norm=most,
        clip_rows=rows_too,
    )
    found: list[float] = []
    ours = train(dlrm(), [as_batch(one) for one in clicks()], how, CLICK_KEYS, ranks, found)
    ours.assert_near(expected)
    assert found == pytest.approx(norms, rel=1e-4, abs=1e-7)


def bits(trainer: Trainer) -> dict[str, Tensor]:
    """Rows with their state, dense weights and the state of their optimizer."""
    found = {f"dense.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    for owner, parameter in trainer.model.named_parameters():
        for name, value in trainer.dense_optimizer.state.get(parameter, {}).items():
            found[f"{owner}.{name}"] = torch.as_tensor(value).clone()
    for store in trainer.stores:
        for table, keys, rows in store.export():
            found[f"rows.{store.layout.table_seeds[table]}"] = torch.cat([keys[:, None], rows], 1)
    return found


@pytest.mark.parametrize("pipeline", PIPELINES[1:], ids=lambda one: one["plan"])
@pytest.mark.parametrize("stop_at", [2, 13])
def test_a_run_that_goes_on_in_the_middle_has_the_bits_of_one_that_never_stopped(
    pipeline, stop_at, tmp_path
):
    batches: Any = Batches([as_batch(batch) for batch in clicks()])
    how = settings(pipeline, rows=ROWS, dense=DENSE)
    whole, first, second = (Trainer(deepcopy(dlrm()), tables_of(dlrm()), how) for _ in range(3))
    whole.fit(batches)
    first.fit(batches, steps=stop_at)
    second.load(first.save(tmp_path))
    second.fit(batches)
    expected, found = bits(whole), bits(second)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_another_grouping_by_rate_reads_the_same_checkpoint(tmp_path):
    """Parameters and tables have their own names in a checkpoint, whatever they share a rate with.

    So a table that was trained can be frozen later.
    """
    batches: Any = Batches([as_batch(batch) for batch in clicks()])
    plain = settings(PIPELINES[0], rows={"optimizer": "adam"}, dense={"lr": 0.01})
    tuned = replace(
        plain,
        rows=build(
            type(plain.rows), {"optimizer": "adam", "rates": ["tags=0.1"], "frozen": ["user"]}
        ),
        dense=build(type(plain.dense), {"lr": 0.01, "rates": ["top.0.*=0.5", "*.bias=0.2"]}),
    )
    first, second = (Trainer(deepcopy(dlrm()), tables_of(dlrm()), how) for how in (plain, tuned))
    first.fit(batches, steps=7)
    second.load(first.save(tmp_path))
    for name in FEATURES:
        assert torch.equal(second.rows_of(name, CLICK_KEYS), first.rows_of(name, CLICK_KEYS))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        mine, theirs = (
            t.dense_optimizer.state.get(p, {}) for t, p in ((first, one), (second, other))
        )
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    before = second.rows_of("user", CLICK_KEYS)
    rows_before = second.stores[second_group(second, "user")].num_rows()
    second.fit(batches)
    assert torch.equal(second.rows_of("user", CLICK_KEYS), before)
    assert second.stores[second_group(second, "user")].num_rows() == rows_before
    assert not torch.equal(second.rows_of("tags", CLICK_KEYS), first.rows_of("tags", CLICK_KEYS)), (
        "the others go on"
    )


def second_group(trainer: Trainer, table: str) -> int:
    return next(g for g, group in enumerate(trainer.groups) if group.tables[0].name == table)
