"""The settings of a run: which plan comes of them, and which cannot be."""

import pytest

from nestpipe.config import build
from nestpipe.errors import ConfigError, PlanError
from nestpipe.schedule import PLANS, Kind, Retrieval
from nestpipe.train.config import ParallelSettings, PipelineSettings

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
