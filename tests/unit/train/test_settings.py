"""The settings of a run: which plan comes of them, and which cannot be."""

import pytest

from nestpipe.config import build
from nestpipe.errors import PlanError
from nestpipe.schedule import PLANS, Kind
from nestpipe.train.settings import ParallelSettings, PipelineSettings

IN_GROUPS = [
    {"groups": 2, "merge": "exact"},
    {"groups": 2, "merge": "averaged"},
    {"groups": 4, "merge": "averaged", "merge_every": 3},
]


@pytest.mark.parametrize("given", IN_GROUPS, ids=str)
def test_groups_refuse_rows_that_are_sent_early(given):
    early = PipelineSettings(plan="nested", micro_batches=3, early=True)
    with pytest.raises(PlanError) as caught:
        early.make_plan(build(ParallelSettings, given))
    assert str(caught.value) == (
        "rows cannot be sent early where replicas are merged, which may change any row; "
        "use one group, or turn early off"
    )
    assert caught.value.exit_status == 2


def test_one_group_may_send_rows_early():
    early = PipelineSettings(plan="nested", early=True).make_plan(ParallelSettings(groups=1))
    assert early.shape.early
    assert {Kind.MARKS, Kind.FRESH} <= {slot.kind for slot in early.tick}


@pytest.mark.parametrize("name", [name for name in PLANS if name != "nested"])
def test_only_nested_sends_rows_early(name):
    early, usual = (PipelineSettings(plan=name, early=choice) for choice in (True, False))
    assert early.make_plan() == usual.make_plan()
