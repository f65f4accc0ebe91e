from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import PlanError
from nestpipe.schedule import (
    PLANS,
    Exchange,
    Kind,
    Lane,
    Op,
    Plan,
    PlanOptions,
    Retrieval,
    Schedule,
    Step,
    nominal_trace,
    plan,
    to_text,
    violations,
    with_early_rows,
    with_gradient_norm,
    with_separate_dense_group,
    with_separate_key_group,
    with_third_buffer,
)

EVERY = [
    pytest.param(name, retrieval, id=f"{name}-{retrieval}")
    for name in PLANS
    for retrieval in Retrieval
    if name != "stale_prefetch" or retrieval is Retrieval.WHOLE
]
every_plan = pytest.mark.parametrize(("name", "retrieval"), EVERY)
REFRESHED = (Retrieval.WHOLE, Retrieval.NEW)
"""Forms in which rows are copied, so that they can be sent before they are current."""
REFRESHING = ("dual_buffer", "nested")
"""Plans that look up a batch ahead and refresh it: they may send rows early."""
Golden = Callable[[str, str], None]


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    name, retrieval = draw(st.sampled_from([case.values for case in EVERY]))
    assert isinstance(name, str)
    assert isinstance(retrieval, Retrieval)
    options = PlanOptions(
        micro_batches=draw(st.integers(1, 4)),
        retrieval=retrieval,
        stages=draw(st.integers(1, 4)),
        exchange=draw(st.sampled_from(Exchange)),
        merge_every=draw(st.integers(0, 3)),
    )
    made = plan(name, options)
    if name in REFRESHING and retrieval is Retrieval.NEW and draw(st.booleans()):
        made = with_third_buffer(made)
    can_be_early = made.shape.refreshes_ahead and options.merge_every == 0
    return with_early_rows(made) if can_be_early and draw(st.booleans()) else made


@every_plan
def test_a_plan_equals_its_golden_schedule(name: str, retrieval: Retrieval, golden: Golden) -> None:
    schedule = plan(name, PlanOptions(micro_batches=2, retrieval=retrieval)).schedule(3)
    golden(f"{name}_{retrieval}.txt", to_text(schedule))


def test_nested_with_a_mirror_equals_its_golden_schedule(golden: Golden) -> None:
    schedule = plan("nested", PlanOptions(micro_batches=2, merge_every=2)).schedule(3)
    golden("nested_whole_replica_sync.txt", to_text(schedule))


def test_nested_with_a_shared_window_equals_its_golden_schedule(golden: Golden) -> None:
    schedule = plan("nested", PlanOptions(micro_batches=3, exchange=Exchange.WINDOW)).schedule(3)
    golden("nested_whole_window.txt", to_text(schedule))


def test_early_rows_match_the_golden_file(golden) -> None:
    schedule = plan("nested", PlanOptions(micro_batches=2, speculative_rows=True)).schedule(3)
    golden("nested_whole_early.txt", to_text(schedule))


def test_a_third_buffer_matches_the_golden_file(golden) -> None:
    options = PlanOptions(micro_batches=2, retrieval=Retrieval.NEW, buffers=3)
    golden("nested_new_three_buffers.txt", to_text(plan("nested", options).schedule(4)))


def test_a_clipped_plan_matches_the_golden_file(golden) -> None:
    options = PlanOptions(micro_batches=2, retrieval=Retrieval.NEW)
    clipped = with_gradient_norm(plan("nested", options))
    golden("nested_new_clipped.txt", to_text(clipped.schedule(3)))


def test_with_a_third_buffer_rows_are_written_on_a_lane_of_their_own() -> None:
    two, three = (
        plan("nested", PlanOptions(retrieval=Retrieval.NEW, buffers=buffers)).shape
        for buffers in (2, 3)
    )
    assert two.lane(Kind.WRITEBACK) is two.lane(Kind.RETRIEVE) is Lane.HOST
    assert three.lane(Kind.WRITEBACK) is Lane.WRITE
    assert three.lane(Kind.RETRIEVE) is Lane.HOST


def test_a_third_buffer_does_not_depend_on_when_other_things_are_chosen() -> None:
    usual = plan("nested", PlanOptions(micro_batches=2, retrieval=Retrieval.NEW))
    third_last = with_third_buffer(with_early_rows(on_a_gpu(usual)))
    assert third_last == on_a_gpu(with_early_rows(with_third_buffer(usual)))


@pytest.mark.parametrize("name", [name for name in PLANS if name not in REFRESHING])
def test_a_plan_that_refreshes_no_batch_ahead_has_no_use_for_a_third_buffer(name: str) -> None:
    with pytest.raises(PlanError) as error:
        with_third_buffer(plan(name, PlanOptions(micro_batches=2)))
    assert str(error.value) == (
        f"plan {name} has no use for a third buffer, because it looks up no batch ahead and "
        "refreshes it; use nested or dual_buffer"
    )


@pytest.mark.parametrize("name", REFRESHING)
def test_a_third_buffer_is_not_for_whole_working_sets(name: str) -> None:
    with pytest.raises(PlanError, match="use retrieval new, or two buffers"):
        with_third_buffer(plan(name, PlanOptions(micro_batches=2)))


def test_there_are_two_buffers_or_three() -> None:
    with pytest.raises(PlanError, match="buffers is 4; use 2 or 3"):
        PlanOptions(buffers=4)


def test_one_micro_batch_shares_its_rows_with_none() -> None:
    shared, usual = (plan("nested", PlanOptions(exchange=exchange)) for exchange in Exchange)
    assert shared == usual


EARLY = [
    pytest.param(name, retrieval, micro_batches, id=f"{name}-{retrieval}-{micro_batches}")
    for name in REFRESHING
    for retrieval in REFRESHED
    for micro_batches in (1, 2, 3, 5)
]
every_early_plan = pytest.mark.parametrize(("name", "retrieval", "micro_batches"), EARLY)


def on_a_gpu(plan: Plan) -> Plan:
    return with_separate_dense_group(with_separate_key_group(plan))


@every_early_plan
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_early_rows_are_issued_under_the_batch_before_and_fresh_ones_after_its_update(
    name: str, retrieval: Retrieval, micro_batches: int, stages: int, apart: bool
) -> None:
    options = PlanOptions(micro_batches=micro_batches, retrieval=retrieval, stages=stages)
    made = with_early_rows(plan(name, options))
    place = {op: n for n, op in enumerate((on_a_gpu(made) if apart else made).schedule(6).ops)}
    for t in range(1, 6):
        order = [
            Op(Kind.STALE_MASK, t),
            Op(Kind.DENSE, t - 1, micro_batches - 1),
            Op(Kind.ROWS, t, 0),
            Op(Kind.GRADS, t - 1, micro_batches - 1),
            Op(Kind.UPDATE, t - 1),
            Op(Kind.SYNC, t),
            Op(Kind.PATCH, t),
            Op(Kind.DENSE, t, 0),
        ]
        assert sorted(order, key=lambda op: place[op]) == order


@pytest.mark.parametrize(
    ("name", "retrieval"),
    [
        case
        for case in EVERY
        if case.values[0] not in REFRESHING and case.values[1] is not Retrieval.POOLED
    ],
)
def test_a_plan_that_refreshes_no_batch_ahead_cannot_send_rows_early(
    name: str, retrieval: Retrieval
) -> None:
    with pytest.raises(PlanError) as caught:
        with_early_rows(plan(name, PlanOptions(micro_batches=2, retrieval=retrieval)))
    assert str(caught.value) == (
        f"plan {name} cannot send rows early, because it looks up no batch ahead and refreshes it; "
        "use nested or dual_buffer"
    )


@every_early_plan
def test_without_its_new_ops_an_early_plan_issues_what_it_did(
    name: str, retrieval: Retrieval, micro_batches: int
) -> None:
    usual = plan(name, PlanOptions(micro_batches=micro_batches, retrieval=retrieval))
    early = with_early_rows(usual)
    moved = (Kind.STALE_MASK, Kind.PATCH)

    def others(made: Plan) -> list[Op]:
        first_rows = (Kind.ROWS, 0)
        ops = made.schedule(5).ops
        return [o for o in ops if o.kind not in moved and (o.kind, o.micro) != first_rows]

    assert others(early) == others(usual)
    assert {op.kind for op in early.schedule(5).ops} - {
        op.kind for op in usual.schedule(5).ops
    } == {*moved}


@every_early_plan
def test_early_rows_do_not_depend_on_when_networks_are_set_apart(
    name: str, retrieval: Retrieval, micro_batches: int
) -> None:
    usual = plan(name, PlanOptions(micro_batches=micro_batches, retrieval=retrieval))
    assert with_early_rows(on_a_gpu(usual)) == on_a_gpu(with_early_rows(usual))


@every_plan
def test_no_op_is_issued_before_one_it_waits_for(name: str, retrieval: Retrieval) -> None:
    options = PlanOptions(micro_batches=3, retrieval=retrieval, merge_every=2)
    issued: set[Op] = set()
    for step in plan(name, options).schedule(7):
        assert issued.issuperset(step.after)
        assert len(set(step.after)) == len(step.after)
        assert step.op not in issued
        issued.add(step.op)


@given(any_plan())
def test_each_kind_is_issued_in_the_order_of_batches_and_micro_batches(plan: Plan) -> None:
    schedule = plan.schedule(6)
    for kind in Kind:
        turns = [(op.batch, op.micro or 0) for op in schedule.ops if op.kind is kind]
        assert turns == sorted(turns)


@given(any_plan())
def test_every_collective_waits_for_the_collective_before_it(plan: Plan) -> None:
    collectives = [step for step in plan.schedule(6) if step.op.collective]
    for before, step in pairwise(collectives):
        assert before.op in step.after


@pytest.mark.parametrize("merge_every", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("retrieval", Retrieval)
def test_serial_overlaps_nothing(
    retrieval: Retrieval, micro_batches: int, merge_every: int
) -> None:
    options = PlanOptions(micro_batches=micro_batches, retrieval=retrieval, merge_every=merge_every)
    trace = nominal_trace(plan("serial", options).schedule(5))
    in_time = sorted(trace.spans, key=lambda span: (span.start, span.end))
    together = [(a.name, b.name) for a, b in pairwise(in_time) if b.start < a.end]
    assert together == []


@pytest.mark.parametrize("name", [name for name in PLANS if name != "serial"])
def test_every_other_plan_overlaps_something(name: str) -> None:
    trace = nominal_trace(plan(name, PlanOptions(micro_batches=2)).schedule(5))
    in_time = sorted(trace.spans, key=lambda span: (span.start, span.end))
    assert any(b.start < a.end for a, b in pairwise(in_time))


@given(any_plan(), st.integers(1, 9), st.integers(1, 9))
def test_a_longer_schedule_lists_the_ops_of_a_shorter_one_in_the_same_order(
    plan: Plan, batches: int, more: int
) -> None:
    longer = plan.schedule(batches + more).ops
    assert tuple(op for op in longer if op.batch < batches) == plan.schedule(batches).ops


def stream_to(plan: Plan, end: int, told_after: Op, delay: int = 0) -> list[Step]:
    """The stream whose end is told so many steps after `told_after` was issued."""
    steps: list[Step] = []
    countdown: int | None = None

    def batches() -> int | None:
        return end if countdown == 0 else None

    for step in plan.stream(batches):
        steps.append(step)
        if countdown is None and step.op == told_after:
            countdown = delay
        elif countdown:
            countdown -= 1
    return steps


def without_extras(plan: Plan, end: int, steps: list[Step]) -> Schedule:
    """The steps of batches before `end`; who waited for a dropped op waits for what it awaited."""
    awaited: dict[Op, tuple[Op, ...]] = {}
    kept: list[Step] = []
    for step in steps:
        seen_through = (b if b.batch < end else awaited[b] for b in step.after)
        after = [op for ops in seen_through for op in (ops if isinstance(ops, tuple) else (ops,))]
        step = Step(step.op, tuple(dict.fromkeys(after)))
        if step.op.batch < end:
            kept.append(step)
        else:
            awaited[step.op] = step.after
    return Schedule(plan.shape, end, tuple(kept))


ISSUED_EARLY = {Kind.PREFETCH, Kind.COPY, Kind.DEDUP, Kind.COUNTS}


@given(any_plan(), st.integers(1, 7))
def test_an_end_learnt_from_the_counts_costs_only_early_ops(plan: Plan, end: int) -> None:
    steps = stream_to(plan, end, Op(Kind.COUNTS, end))
    assert [s.op for s in steps if s.op.batch < end] == list(plan.schedule(end).ops)
    assert {s.op.kind for s in steps if s.op.batch >= end} <= ISSUED_EARLY


@given(any_plan(), st.integers(1, 7), st.integers(0, 30))
def test_an_end_learnt_late_leaves_an_exact_schedule(plan: Plan, end: int, delay: int) -> None:
    steps = stream_to(plan, end, Op(Kind.COUNTS, end), delay)
    kept = without_extras(plan, end, steps)
    assert kept.ops == plan.schedule(end).ops
    assert [v.sentence for v in violations(kept, stale="stale_prefetch")] == []


@given(any_plan(), st.integers(1, 7), st.integers(0, 30))
def test_an_end_learnt_late_leaves_one_network_order(plan: Plan, end: int, delay: int) -> None:
    steps = stream_to(plan, end, Op(Kind.COUNTS, end), delay)
    collectives = [step for step in steps if step.op.collective]
    assert [str(b) for a, b in pairwise(collectives) if a.op not in b.after] == []


@given(any_plan(), st.integers(1, 7), st.integers(0, 30))
def test_an_end_learnt_late_leaves_no_edge_to_an_op_that_never_ran(
    plan: Plan, end: int, delay: int
) -> None:
    issued: set[Op] = set()
    for step in stream_to(plan, end, Op(Kind.COUNTS, end), delay):
        assert issued.issuperset(step.after)
        issued.add(step.op)


def test_a_stream_whose_end_is_never_told_has_no_end() -> None:
    assert len(list(islice(plan("nested").stream(), 10_000))) == 10_000


def first_batches(plan: Plan, batches: int) -> Iterator[Step]:
    for step in plan.stream():
        if step.op == Op(Kind.UPDATE, batches):
            return
        yield step


@every_plan
@pytest.mark.parametrize("stages", [1, 4])
def test_no_edge_of_a_long_stream_reaches_far_back(
    name: str, retrieval: Retrieval, stages: int
) -> None:
    options = PlanOptions(micro_batches=2, retrieval=retrieval, stages=stages, merge_every=3)
    endless = plan(name, options)
    steps = list(first_batches(endless, 200))
    reach = max(step.op.batch - b.batch for step in steps for b in step.after)
    assert reach <= endless.shape.lookahead + 1


@every_plan
@pytest.mark.parametrize("stages", [1, 4])
def test_a_reader_of_a_long_stream_remembers_only_recent_ops(
    name: str, retrieval: Retrieval, stages: int
) -> None:
    options = PlanOptions(micro_batches=2, retrieval=retrieval, stages=stages, merge_every=3)
    endless = plan(name, options)
    ticks = endless.shape.lookahead + 2
    recent: deque[Op] = deque(maxlen=ticks * len(endless.tick))
    for step in first_batches(endless, 200):
        assert set(recent).issuperset(step.after)
        recent.append(step.op)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: PlanOptions(micro_batches=0), "micro_batches is 0; use 1 to 1024"),
        (lambda: PlanOptions(micro_batches=1025), "micro_batches is 1025; use 1 to 1024"),
        (lambda: PlanOptions(stages=0), "stages is 0; use 1 to 4"),
        (lambda: PlanOptions(stages=5), "stages is 5; use 1 to 4"),
        (lambda: PlanOptions(merge_every=-1), "merge_every is -1; use 0 or more"),
        (lambda: plan("nested").schedule(0), "cannot plan 0 batches; ask for at least 1"),
        (
            lambda: plan("nestled"),
            "unknown plan 'nestled'; the plans are serial, sparse_dist, stale_prefetch, "
            "dual_buffer, frozen_window, nested",
        ),
        (
            lambda: plan("stale_prefetch", PlanOptions(retrieval=Retrieval.NEW)),
            "stale_prefetch cannot retrieve only new rows, because it never refreshes the others; "
            "use --retrieval whole",
        ),
        (
            lambda: plan("stale_prefetch", PlanOptions(retrieval=Retrieval.POOLED)),
            "stale_prefetch cannot use a pool, because batches share the rows in it and none is "
            "stale; use --retrieval whole",
        ),
        (
            lambda: plan("nested", PlanOptions(retrieval=Retrieval.POOLED, speculative_rows=True)),
            "rows cannot be sent early from a pool, where the batch before changes them in place; "
            "use retrieval new, or turn speculative_rows off",
        ),
        (
            lambda: with_early_rows(plan("nested", PlanOptions(merge_every=2))),
            "rows cannot be sent early where replicas are merged, which may change any row; "
            "use one group, or turn speculative_rows off",
        ),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_what_no_plan_can_do_is_refused_with_a_remedy(
    ask: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(PlanError) as caught:
        ask()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", PLANS)
def test_a_shape_knows_whether_rows_of_later_batches_are_read(name):
    made = plan(name)
    ahead = any(slot.kind is Kind.RETRIEVE and slot.ahead > 0 for slot in made.tick)
    assert made.shape.retrieves_ahead == ahead
