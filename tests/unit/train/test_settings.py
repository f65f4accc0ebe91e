"""The settings of a run: which plan comes of them, and which cannot be."""

from typing import Any

import pytest

from nestpipe.config import Table, build
from nestpipe.errors import ConfigError, PlanError
from nestpipe.schedule import PLANS, Kind, Retrieval, check
from nestpipe.train.config import (
    DenseSettings,
    ParallelSettings,
    PipelineChoice,
    PipelineSettings,
    RowSettings,
    choose_pipeline,
)

IN_GROUPS = [
    {"groups": 2, "merge": "exact"},
    {"groups": 2, "merge": "averaged"},
    {"groups": 4, "merge": "averaged", "merge_every": 3},
]


@pytest.mark.parametrize("given", IN_GROUPS, ids=str)
def test_groups_refuse_rows_that_are_sent_early(given):
    early = PipelineSettings(plan="nested", micro_batches=3, speculative_rows=True)
    with pytest.raises(PlanError) as caught:
        early.make_plan(build(ParallelSettings, given))
    assert str(caught.value) == (
        "rows cannot be sent early where replicas are merged, which may change any row; "
        "use one group, or turn speculative_rows off"
    )
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("name", ["serial", "sparse_dist", "frozen_window"])
def test_a_third_buffer_is_of_no_use_where_nothing_is_looked_up_ahead(name):
    three, two = (PipelineSettings(plan=name, retrieval=Retrieval.NEW, buffers=n) for n in (3, 2))
    assert three.make_plan() == two.make_plan()


@pytest.mark.parametrize(
    ("buffers", "retrieval", "message"),
    [
        (4, "new", "buffers is 4; use 2 or 3"),
        (
            3,
            "whole",
            "buffers is 3 and retrieval 'whole'; a third buffer is for rows that are not read "
            "again, so set retrieval = 'new', or two buffers",
        ),
    ],
)
def test_buffers_that_cannot_be_are_refused(buffers, retrieval, message):
    with pytest.raises(ConfigError) as error:
        PipelineSettings(plan="nested", retrieval=retrieval, buffers=buffers)
    assert str(error.value) == message


def test_one_group_may_send_rows_early():
    early = PipelineSettings(plan="nested", speculative_rows=True).make_plan(
        ParallelSettings(groups=1)
    )
    assert early.shape.speculative_rows
    assert {Kind.STALE_MASK, Kind.PATCH} <= {slot.kind for slot in early.tick}


@pytest.mark.parametrize("name", [name for name in PLANS if name != "nested"])
def test_only_nested_sends_rows_early(name):
    early, usual = (
        PipelineSettings(plan=name, speculative_rows=choice) for choice in (True, False)
    )
    assert early.make_plan() == usual.make_plan()


# Optimizers that cannot be


@pytest.mark.parametrize("settings", [RowSettings, DenseSettings])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "adamw"}, "weight_decay is 0 and optimizer 'adamw'; give one such as 0.01"),
        ({"optimizer": "adamx"}, "optimizer is 'adamx'; did you mean 'adam"),
        ({"betas": (0.9,)}, "betas is [0.9]; give two numbers from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, "betas is [0.9, 1.0]; give two numbers from 0 to below 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; give 0 or a number above it"),
        ({"lr": 0.5, "weight_decay": 2.0}, "weight_decay is 2.0 and lr 0.5: a step would take all"),
        ({"lr": 0.0}, "lr is 0.0; give a number above 0"),
        ({"schedule": "step"}, "decay_steps is 0 and schedule 'step'; say in how many batches"),
    ],
)
def test_optimizers_that_cannot_be_are_refused(settings, given, message):
    with pytest.raises(ConfigError) as error:
        settings(**given)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": ("item=0.1",)}, "rows.rates has 'item', which fits no table; there are items"),
        ({"frozen": ("user",)}, "rows.frozen has 'user', which fits no table; there are items"),
    ],
)
def test_a_table_that_is_not_there_is_named(given, message):
    with pytest.raises(ConfigError) as error:
        RowSettings(**given).tuned([Table(name="items", dim=4), Table(name="users", dim=4)])
    assert str(error.value).startswith(message)


def test_tables_get_the_rate_of_the_first_pattern_and_keep_their_own():
    tables = [Table(name="items", dim=4, lr=0.3), Table(name="users", dim=4, trainable=False)]
    tuned = RowSettings(rates=("us*=0.2", "users=0.1")).tuned(tables)
    assert [(table.lr, table.trainable) for table in tuned] == [(0.3, True), (0.2, False)]
    assert RowSettings().tuned(tables) == tables


# What `auto` stands for


def chosen(device: str, ranks: int, **asked: Any) -> PipelineChoice:
    return choose_pipeline(build(PipelineSettings, asked), device, ranks)


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_that_share_their_cores_train_serially(ranks, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    choice = chosen("cpu", ranks)
    assert choice.pipeline == PipelineSettings(plan="serial")
    assert choice.reason.startswith("plan serial: ")


def test_compute_hides_the_network_between_hosts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert chosen("cpu", 2).pipeline.plan == "serial"
    apart = chosen("cpu", 4)
    assert apart.pipeline == PipelineSettings(plan="nested", micro_batches=4)
    assert apart.reason.startswith("plan nested, 4 micro-batches: ")
    assert chosen("cpu", 4, micro_batches=2).pipeline.micro_batches == 2


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 4)])
def test_on_gpus_rows_stay_in_a_pool(ranks, micro_batches):
    choice = chosen("cuda", ranks)
    assert choice.pipeline == PipelineSettings(
        plan="nested", retrieval=Retrieval.POOLED, micro_batches=micro_batches
    )
    assert "retrieval pooled" in choice.reason
    check(choice.pipeline.make_plan().schedule(9))


@pytest.mark.parametrize(
    "asked", [{"retrieval": "new"}, {"speculative_rows": True}, {"buffers": 3, "retrieval": "new"}]
)
def test_what_was_set_stays(asked):
    choice = chosen("cuda", 2, **asked)
    assert {name: getattr(choice.pipeline, name) for name in asked} == asked
    assert "device memory" not in choice.reason
    check(choice.pipeline.make_plan().schedule(9))


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_that_was_named_is_the_one(plan):
    asked = PipelineSettings(plan=plan)
    for device in ("cpu", "cuda"):
        assert choose_pipeline(asked, device, 4).pipeline is asked
