"""Ranks that share what they compute with, and other plans predicted from `serial`."""

import random

import pytest

from nestpipe.errors import ParseError
from nestpipe.schedule import (
    PLANS,
    Kind,
    Lane,
    Op,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    with_early_rows,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.schedule.schedule import SPECULATIVE_KINDS
from nestpipe.sim import Scale, figures, replay
from nestpipe.sim.replay import Sharing, replay_shared
from nestpipe.sim.trace_costs import BUCKETS, SerialCosts, SerialRuns
from nestpipe.trace import Trace

OFF_NETWORK = frozenset(Lane) - {Lane.NET}
NOTHING = Sharing((0, 1, 2, 3), frozenset())
ALONE = Sharing((0, 1, 2, 3), OFF_NETWORK)
PAIRS = Sharing((0, 1, 0, 1), OFF_NETWORK)
USUAL = [kind for kind in Kind if kind not in {*SPECULATIVE_KINDS, Kind.NORM}]
MS = (3.0, 1, 2, 0.5, 1.5, 2, 1.2, 0.7, 6, 1, 0.1, 4, 9, 5, 0.3, 3, 0.4, 2, 1, 7)
COSTS = dict(zip(USUAL, MS, strict=True))


def as_planned(chosen: Plan) -> Plan:
    return chosen


def apart(chosen: Plan) -> Plan:
    """As on a GPU: keys and dense gradients in networks of their own."""
    return with_separate_dense_group(with_separate_key_group(chosen))


def constant(op: Op, rank: int) -> float:
    return COSTS[op.kind]


def uneven(op: Op, rank: int) -> float:
    """Different for every op and rank, the same for every batch and form."""
    luck = random.Random(f"{op.kind} {op.micro} {rank}").uniform(0.5, 1.5)
    return COSTS[op.kind] * (1.0 if op.collective else luck)


def step_ms(trace: Trace, rank: int = 0) -> float:
    return figures(trace, samples=1, rank=rank).step_ms


@pytest.mark.parametrize("name", [name for name in PLANS if name != "stale_prefetch"])
@pytest.mark.parametrize("retrieval", list(Retrieval))
@pytest.mark.parametrize("placed", [as_planned, apart])
def test_ranks_that_share_nothing_match_the_replay_of_many(name, retrieval, placed):
    chosen = placed(plan(name, PlanOptions(micro_batches=4, retrieval=retrieval)))
    shared = replay_shared(chosen, constant, NOTHING, batches=12)
    many = replay(chosen, COSTS, Scale(4), batches=12, record=range(4)).trace
    twins = {(span.name, span.rank): span for span in many.spans}
    assert len(shared.spans) == len(many.spans)
    for span in shared.spans:
        twin = twins[span.name, span.rank]
        assert span.end == pytest.approx(twin.end, abs=1e-3)
        assert span.lane == twin.lane == chosen.shape.lane(Kind(span.kind))


def test_two_ranks_on_one_core_compute_half_as_fast():
    only_dense = {Kind.DENSE: 10.0}
    serial = plan("serial", PlanOptions(micro_batches=2))
    alone, pairs = (
        replay_shared(serial, lambda op, rank: only_dense.get(op.kind, 0.0), sharing, batches=12)
        for sharing in (ALONE, PAIRS)
    )
    assert step_ms(alone) == pytest.approx(20.0, abs=1e-3)
    assert step_ms(pairs) == pytest.approx(40.0, abs=1e-3)


def test_a_core_that_nobody_else_uses_runs_at_full_speed():
    """Rank 0 computes ten times as much: its neighbour is done early and leaves it the core."""
    serial = plan("serial", PlanOptions())
    cost = {0: 100.0, 1: 1.0, 2: 10.0, 3: 1.0}
    trace = replay_shared(
        serial,
        lambda op, rank: cost[rank] if op.kind is Kind.DENSE else 0.0,
        PAIRS,
        batches=12,
    )
    assert step_ms(trace) == pytest.approx(110.0, abs=1e-3)


@pytest.mark.parametrize(
    "sharing",
    [
        ALONE,
        PAIRS,
        Sharing((0,) * 4, OFF_NETWORK, capacity=2),
        Sharing((0, 1, 0, 1), OFF_NETWORK, collective_draw=0.2),
    ],
)
@pytest.mark.parametrize("retrieval", list(Retrieval))
@pytest.mark.parametrize("placed", [as_planned, apart])
def test_serial_gives_back_the_costs_it_was_made_of(sharing, retrieval, placed):
    serial = placed(plan("serial", PlanOptions(micro_batches=3, retrieval=retrieval)))
    read = SerialCosts([replay_shared(serial, uneven, sharing, batches=10)], sharing)
    for step in serial.schedule(4).steps:
        for rank in range(4):
            assert read(step.op, rank) == pytest.approx(uneven(step.op, rank), abs=1e-3), step.op


@pytest.mark.parametrize("name", ["sparse_dist", "dual_buffer", "frozen_window", "nested"])
@pytest.mark.parametrize("retrieval", list(Retrieval))
def test_serial_alone_predicts_every_other_plan(name: str, retrieval: Retrieval):
    whole, new, pooled = (
        replay_shared(
            plan("serial", PlanOptions(micro_batches=4, retrieval=form)), uneven, PAIRS, batches=12
        )
        for form in Retrieval
    )
    other = plan(name, PlanOptions(micro_batches=4, retrieval=retrieval))
    predicted = SerialRuns([whole], [new], PAIRS, [pooled]).predict(other, batches=20)
    true = replay_shared(other, uneven, PAIRS, batches=20)
    for rank in range(4):
        assert step_ms(predicted, rank) == pytest.approx(step_ms(true, rank), rel=1e-3)


@pytest.mark.parametrize("name", ["dual_buffer", "nested"])
def test_serial_predicts_a_plan_whose_dense_sums_begin_early(name: str):
    def long_sums(op: Op, rank: int) -> float:
        return 30.0 if op.kind is Kind.REDUCE else uneven(op, rank)

    serial = (plan("serial", PlanOptions(micro_batches=4, retrieval=form)) for form in COPIED)
    whole, new = (replay_shared(apart(one), long_sums, NOTHING, batches=12) for one in serial)
    whole = Trace(whole.spans, {**whole.facts, BUCKETS: 2})
    other = apart(plan(name, PlanOptions(micro_batches=4)))
    predicted = SerialRuns([whole], [new], NOTHING).predict(other, batches=20)
    true = replay_shared(other, long_sums, NOTHING, batches=20, buckets=2)
    late = replay_shared(other, long_sums, NOTHING, batches=20, buckets=1)
    assert step_ms(predicted) == pytest.approx(step_ms(true), rel=1e-3)
    assert step_ms(predicted) < 0.99 * step_ms(late)


@pytest.mark.parametrize("name", ["dual_buffer", "nested"])
@pytest.mark.parametrize("placed", [as_planned, apart])
def test_early_rows_are_replayed_alike(name, placed):
    chosen = placed(with_early_rows(plan(name, PlanOptions(micro_batches=3))))
    costs = {**COSTS, Kind.STALE_MASK: 0.5, Kind.PATCH: 1.5}
    shared = replay_shared(chosen, lambda op, rank: costs[op.kind], NOTHING, batches=12)
    many = replay(chosen, costs, Scale(4), batches=12, record=range(4)).trace
    ends = {(span.name, span.rank): span.end for span in many.spans}
    assert {(s.name, s.rank): s.end for s in shared.spans} == pytest.approx(ends, abs=1e-3)


COPIED = [Retrieval.WHOLE, Retrieval.NEW]
"""Forms in which batches have copies of the rows that they share."""
NEW_SHARES = [(1.0, 0.0), (0.4, 0.6), (0.0, 1.0), (1.3, 0.0)]
"""What `new` reads of a batch, and so the part of its rows that must come again."""


def serial_runs(new_share: float, sharing: Sharing = NOTHING) -> SerialRuns:
    """Neighbouring batches share the rows that `new` does not read; the first micro-batch is
    short."""

    def cost(form: Retrieval):
        read = new_share if form is Retrieval.NEW else 1.0

        def of(op: Op, rank: int) -> float:
            if op.kind is Kind.RETRIEVE:
                return read * COSTS[Kind.RETRIEVE]
            return COSTS[op.kind] / (2 if op.micro == 0 else 1)

        return of

    traces = {
        form: replay_shared(
            plan("serial", PlanOptions(micro_batches=3, retrieval=form)),
            cost(form),
            sharing,
            batches=12,
        )
        for form in COPIED
    }
    return SerialRuns([traces[Retrieval.WHOLE]], [traces[Retrieval.NEW]], sharing)


@pytest.mark.parametrize(("new_share", "again"), NEW_SHARES)
@pytest.mark.parametrize("retrieval", COPIED)
def test_rows_that_come_again_cost_their_part_of_the_first_ones(new_share, again, retrieval):
    early = with_early_rows(plan("nested", PlanOptions(micro_batches=3, retrieval=retrieval)))
    spans = serial_runs(new_share).predict(early, batches=20).of_rank(0)
    took = {kind: {s.name: s.duration for s in spans if s.kind == kind} for kind in Kind}
    first_rows = COSTS[Kind.ROWS] / 2
    assert set(took[Kind.PATCH]) == {f"patch {t}" for t in range(20)}
    for t in range(1, 20):
        fresh = took[Kind.PATCH][f"patch {t}"]
        assert fresh == pytest.approx(again * first_rows, abs=1e-3)
        assert 0 <= fresh <= took[Kind.ROWS][f"rows {t}.0"] + 1e-9
        assert took[Kind.STALE_MASK][f"stale_mask {t}"] == pytest.approx(
            COSTS[Kind.COUNTS], abs=1e-3
        )


@pytest.mark.parametrize(("new_share", "again"), NEW_SHARES)
def test_early_rows_leave_only_those_that_come_again_between_two_windows(new_share, again):
    """Dense compute hides everything but the last gradients, the update and the first rows."""
    long = {Kind.DENSE: 100.0, Kind.ROWS: 8.0, Kind.GRADS: 5.0, Kind.RETRIEVE: 20.0}

    def runs(form: Retrieval) -> Trace:
        part = new_share if form is Retrieval.NEW else 1.0
        costs = {**long, Kind.RETRIEVE: part * long[Kind.RETRIEVE]}
        serial = apart(plan("serial", PlanOptions(micro_batches=3, retrieval=form)))
        return replay_shared(serial, lambda op, rank: costs.get(op.kind, 0.0), NOTHING, batches=12)

    serial = SerialRuns([runs(Retrieval.WHOLE)], [runs(Retrieval.NEW)], NOTHING)
    usual = plan("nested", PlanOptions(micro_batches=3))
    late, early = (
        step_ms(serial.predict(apart(made), batches=20)) for made in (usual, with_early_rows(usual))
    )
    assert late == pytest.approx(300 + 5 + 8, abs=1e-2)
    assert early == pytest.approx(300 + 5 + again * 8, abs=1e-2)


@pytest.mark.parametrize(
    ("reduce_ms", "dense_ms", "buckets", "left"),
    [
        (30.0, 18.0, 8, 18.0),  # the pass of 12 ms is too short for all of it
        (10.0, 18.0, 8, 1.25),  # all but the last bucket is hidden
        (10.0, 18.0, 1, 10.0),  # a single bucket has to wait for the end of the pass
    ],
)
def test_a_backward_pass_hides_all_buckets_but_the_last(reduce_ms, dense_ms, buckets, left):
    costs = {**dict.fromkeys(Kind, 0.0), Kind.REDUCE: reduce_ms, Kind.DENSE: dense_ms}
    chosen = apart(plan("nested", PlanOptions(micro_batches=4)))
    many = replay(chosen, costs, Scale(2), batches=6, buckets=buckets).trace
    few = replay_shared(
        chosen, lambda op, rank: costs[op.kind], NOTHING, batches=6, buckets=buckets
    )
    for trace in (many, few):
        spans = {span.name: span for span in trace.of_rank(0)}
        after = spans["reduce 5"].end - spans["dense 5.3"].end
        assert after == pytest.approx(left, abs=1e-3)
        assert spans["reduce 5"].start < spans["dense 5.3"].end


def test_a_collective_on_another_lane_asks_no_more_of_the_core():
    sharing = Sharing((0,), OFF_NETWORK, collective_draw=0.2)
    assert sharing.draw(Kind.KEYS, Lane.ROUTE) == sharing.draw(Kind.ROWS, Lane.NET) == 0.2
    assert sharing.draw(Kind.DEDUP, Lane.ROUTE) == 1.0


def test_rows_that_a_gpu_moves_take_a_part_of_it_from_dense_compute():
    """Two ranks on one GPU: dense alone takes 2 x 10 ms, beside rows of both ranks 2.4 x 10."""
    sharing = Sharing((0, 0), frozenset({Lane.COMPUTE}), move_draw=0.2)
    assert sharing.draw(Kind.RETRIEVE, Lane.HOST) == sharing.draw(Kind.WRITEBACK, Lane.WRITE) == 0.2
    assert sharing.draw(Kind.UNION, Lane.ROUTE) == 0.0
    assert 10 / sharing.speed(1.0, 2.0) == pytest.approx(20)
    assert 10 / sharing.speed(1.0, 2.0 + 2 * 0.2) == pytest.approx(24)


def test_rows_that_a_host_moves_take_all_of_its_core():
    sharing = Sharing((0,), OFF_NETWORK, move_draw=0.2)
    assert sharing.draw(Kind.RETRIEVE, Lane.HOST) == 1.0


def test_what_runs_under_dense_on_the_same_core_is_not_free():
    """Retrieval is hidden, but it takes the core away from dense: the simulator must see that."""
    nested = plan("nested", PlanOptions(micro_batches=4))
    dear = {Kind.DENSE: 10.0, Kind.RETRIEVE: 20.0}
    one_core = Sharing((0,), OFF_NETWORK)
    trace = replay_shared(nested, lambda op, rank: dear.get(op.kind, 0.0), one_core, batches=16)
    assert step_ms(trace) == pytest.approx(60.0, rel=1e-3)


def test_a_collective_takes_its_part_of_the_core():
    """Rows of the next micro-batch arrive under dense; both get less than they would alone."""
    window = plan("frozen_window", PlanOptions(micro_batches=2))
    dear = {Kind.DENSE: 10.0, Kind.ROWS: 9.0}
    sharing = Sharing((0,), OFF_NETWORK, collective_draw=0.2)
    trace = replay_shared(window, lambda op, rank: dear.get(op.kind, 0.0), sharing, batches=12)
    # Rows 0 alone take 9. Under dense 0, at 1 / 1.2, rows 1 take 9 * (0.8 + 0.2 * 1.2), so 9.36;
    # by then 7.8 of dense are done, the other 2.2 and dense 1 have the core for themselves.
    assert step_ms(trace) == pytest.approx(9 + 9.36 + 2.2 + 10, abs=1e-3)


def test_too_short_a_trace_is_refused():
    short = replay_shared(plan("serial", PlanOptions()), constant, ALONE, batches=3)
    with pytest.raises(ParseError, match="more than 3 batches"):
        SerialCosts([short], ALONE)
