"""The settings of a run: which plan comes of them, and which cannot be."""

from typing import Any

import pytest

from nestpipe.config import build
from nestpipe.errors import ConfigError, PlanError
from nestpipe.schedule import PLANS, Kind, Retrieval, check
from nestpipe.train.config import (
    ParallelSettings,
    PipelineChoice,
    PipelineSettings,
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
