"""The loop itself: order, bounds, failures and times, with work that does nothing."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.runtime import (
    Act,
    Event,
    HostSpans,
    InlineLanes,
    Lanes,
    StopSignal,
    ThreadLanes,
    Work,
    inject_delays,
    name_collectives,
    run,
)
from nestpipe.runtime.cuda import at_rate
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
    with_third_buffer,
)
from nestpipe.schedule.check import ops_of_batch
from nestpipe.trace import Span
from support.thread_ranks import some_threads

NESTED = plan("nested", PlanOptions(micro_batches=2))
EVERY = [
    plan(name, PlanOptions(micro_batches=2, retrieval=retrieval))
    for name in PLANS
    for retrieval in Retrieval
    if name != "stale_prefetch" or retrieval is Retrieval.WHOLE
]
every_plan = pytest.mark.parametrize(
    "chosen", EVERY, ids=lambda p: f"{p.name}-{p.shape.retrieval.value}"
)

both_lanes = pytest.mark.parametrize("lanes", [InlineLanes, ThreadLanes, some_threads])


def idle(**acts: Act) -> Work:
    """Work that does nothing, but for the kinds that are named."""
    return {kind: acts.get(kind.value, lambda op: None) for kind in Kind}


@dataclass
class Watch:
    """Notes when each op starts and ends, on top of other work."""

    events: list[tuple[str, Op]] = field(default_factory=list)

    def over(self, work: Work) -> Work:
        def watched(act: Act) -> Act:
            def call(op: Op) -> None:
                self.events.append(("start", op))
                act(op)
                self.events.append(("end", op))

            return call

        return {kind: watched(act) for kind, act in work.items()}


def test_where_nothing_overlaps_ops_of_the_host_wait_for_the_device():
    """A device that does what it was given only when somebody waits for it."""
    given: list[Op] = []
    done: list[Op] = []

    def finish() -> None:
        done.extend(given)
        given.clear()

    def act(op: Op) -> None:
        if chosen.shape.lane(op.kind) in on_host:
            assert not given, f"{op} began before the device had done {given}"
            done.append(op)
        else:
            given.append(op)

    chosen = plan("serial", PlanOptions(micro_batches=2, retrieval=Retrieval.NEW))
    on_host = frozenset({Lane.LOADER, Lane.HOST, Lane.ROUTE})
    run(chosen, dict.fromkeys(Kind, act), InlineLanes(finish, on_host), batches=StopSignal(3))
    finish()
    assert done == list(chosen.schedule(3).ops)


@every_plan
@both_lanes
def test_every_op_runs_once_after_what_it_waits_for(chosen: Plan, lanes: Callable[[], Lanes]):
    schedule = chosen.schedule(7)
    work = inject_delays(idle(), seed=1, max_ms=0.5)
    trace = run(chosen, work, lanes(), batches=StopSignal(7), spans=HostSpans(rank=3))
    spans = {span.name: span for span in trace.spans}
    assert len(trace.spans) == len(schedule)
    assert {str(op) for op in schedule.ops} == set(spans)
    for before, after in schedule.edges:
        assert spans[str(before)].end <= spans[str(after)].start, f"{before} -> {after}"
    for lane in Lane:
        order = [str(op) for op in schedule.ops if chosen.shape.lane(op.kind) is lane]
        assert [span.name for span in trace.spans if span.lane == lane] == order
    assert {span.rank for span in trace.spans} == {3}
    assert trace.facts["plan"] == chosen.name
    assert trace.facts["retrieval"] == chosen.shape.retrieval.value


@dataclass
class Noted:
    """Lanes that run ops at once and note what each was submitted with; an event is its op."""

    chosen: Plan
    submitted: list[tuple[Any, ...]] = field(default_factory=list)
    waited: list[Op] = field(default_factory=list)
    unmarked: set[Op] = field(default_factory=set)

    def __enter__(self):
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def __getitem__(self, lane: Lane):
        self.lane = lane
        return NotedLane(self, lane)


@dataclass
class NotedLane:
    lanes: Noted
    lane: Lane

    def submit(self, act: Act, op: Op, after: list[Any], **ties: Any) -> Any:
        of = self.lanes.chosen.shape.lane
        others = [before.op for before in after if of(before.op.kind) is not self.lane]
        assert not self.lanes.unmarked.intersection(others), f"`{op}` waits for what has no mark"
        if not ties.get("marked", True):
            self.lanes.unmarked.add(op)
        alongside, behind = ties.get("alongside"), ties.get("behind", ())
        with_it = alongside and alongside.op
        before = {end.op for end in after}
        self.lanes.submitted.append((self.lane, op, before, with_it, {end.op for end in behind}))
        act(op)
        return NotedEnd(self.lanes, op)


@dataclass
class NotedEnd:
    lanes: Noted
    op: Op

    def wait(self) -> None:
        assert self.op not in self.lanes.unmarked
        self.lanes.waited.append(self.op)


ALL_SHAPES = [
    *EVERY,
    *(plan(p.name, PlanOptions(retrieval=p.shape.retrieval)) for p in EVERY),
    *(with_separate_key_group(chosen) for chosen in EVERY),
    *(with_separate_dense_group(with_separate_key_group(chosen)) for chosen in EVERY),
    with_early_rows(plan("nested", PlanOptions(micro_batches=3, retrieval=Retrieval.NEW))),
    with_third_buffer(plan("nested", PlanOptions(micro_batches=3, retrieval=Retrieval.NEW))),
    plan("nested", PlanOptions(micro_batches=7, stages=2)),
    plan("nested", PlanOptions(micro_batches=2, merge_every=3)),
]


@dataclass
class Issue:
    """What one way of issuing did."""

    submitted: list[tuple[Any, ...]]
    ran: list[Op]
    spans: list[str]
    waited: list[Op]


def issued(chosen: Plan, end: int, *, told: bool, steady: bool) -> Issue:
    """A run whose end is known from the beginning, or found by `counts`."""
    ended, ran = StopSignal(end if told else None), list[Op]()

    def counts(op: Op) -> None:
        ran.append(op)
        if op.batch == end:
            ended.found_at(end)

    lanes = Noted(chosen)
    work = {**dict.fromkeys(Kind, ran.append), Kind.COUNTS: counts}
    trace = run(chosen, work, lanes, batches=ended, steady=steady)  # type: ignore[arg-type]
    return Issue(lanes.submitted, ran, sorted(span.name for span in trace.spans), lanes.waited)


@pytest.mark.parametrize("chosen", ALL_SHAPES, ids=lambda p: f"{p.name}-{p.shape.retrieval.value}")
def test_steps_from_the_list_of_a_tick_are_those_of_the_plan(chosen: Plan):
    for end in (0, 1, 12, 33):
        listed = issued(chosen, end, told=True, steady=True)
        assert listed == issued(chosen, end, told=True, steady=False)


@pytest.mark.parametrize("chosen", ALL_SHAPES, ids=lambda p: f"{p.name}-{p.shape.retrieval.value}")
def test_an_end_found_in_the_middle_of_a_listed_tick_changes_nothing(chosen: Plan):
    """The tick is issued to its end: what is beyond the data is skipped, and holds up nobody."""
    for end in (12, 33):
        listed = issued(chosen, end, told=False, steady=True)
        asked = issued(chosen, end, told=False, steady=False)
        assert (listed.ran, listed.spans) == (asked.ran, asked.spans)
        waits = {op: after for _, op, after, _, _ in listed.submitted}
        for lane, op, after, *others in asked.submitted:
            if op.batch < end:
                known = all_before(op, waits)
                assert {b for b in after if b.batch < end} <= known, f"`{op}` on {lane}: {others}"


def all_before(op: Op, waits: dict[Op, set[Op]]) -> set[Op]:
    """What an op waits for, and what that waits for; far enough for the edges of a plan."""
    known, new = set[Op](), {op}
    while new:
        new = {b for a in new for b in waits.get(a, ()) if b.batch >= op.batch - 8} - known
        known |= new
    return known


@every_plan
def test_most_ticks_are_issued_from_the_list(chosen: Plan, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    steps_of = Plan.steps_of

    def noted(self: Plan, opened: int, *rest: Any) -> Any:
        asked.append(opened)
        return steps_of(self, opened, *rest)

    monkeypatch.setattr(Plan, "steps_of", noted)
    run(chosen, idle(), InlineLanes(), batches=StopSignal(200))
    assert len(asked) < 60


@every_plan
def test_batches_in_flight_stay_within_the_look_ahead(chosen: Plan):
    watch = Watch()
    slow = inject_delays(idle(), seed=2, max_ms=0.5)
    run(chosen, watch.over(slow), ThreadLanes(), batches=StopSignal(12))
    shape, flying, most = chosen.shape, 0, 0
    for what, op in watch.events:
        flying += (what, op.kind) == ("start", Kind.PREFETCH)
        flying -= (what, op) == ("end", shape.retire(op.batch))
        most = max(most, flying)
    assert most <= shape.lookahead


@dataclass
class Issued:
    """Lanes that also note the newest batch that was issued."""

    inner: ThreadLanes
    newest: int = -1

    def __enter__(self):
        self.inner.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.inner.__exit__(*failure)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, lane: Lane):
        self.lane = self.inner[lane]
        return self

    def submit(self, act: Act, op: Op, after: list[Event], **ties: Any) -> Event:
        self.newest = max(self.newest, op.batch)
        return self.lane.submit(act, op, after, **ties)


@every_plan
def test_the_issuing_loop_waits_for_a_stuck_lane(chosen: Plan):
    stuck = threading.Event()
    lanes = Issued(ThreadLanes())

    def dense(op: Op) -> None:
        if op.batch == 3:
            stuck.wait()

    runner = threading.Thread(
        target=run, args=(chosen, idle(dense=dense), lanes), kwargs={"batches": StopSignal(40)}
    )
    runner.start()
    time.sleep(0.1)
    reached = lanes.newest
    stuck.set()
    runner.join()
    assert reached <= 3 + chosen.shape.lookahead
    assert lanes.newest == 39


@pytest.mark.parametrize("kind", [Kind.PREFETCH, Kind.COPY, Kind.UNION, Kind.RETRIEVE, Kind.ROWS])
@both_lanes
def test_a_failure_on_any_lane_ends_the_run(kind: Kind, lanes: Callable[[], Lanes]):
    ran: list[Op] = []

    def fail(op: Op) -> None:
        if op.batch == 2:
            raise ValueError("broken")

    work = {**idle(update=ran.append), kind: fail}
    threads = threading.active_count()
    with pytest.raises(ValueError, match="broken") as failure:
        run(NESTED, work, lanes())
    assert failure.value.__notes__[0].startswith(f"in `{kind} 2")
    assert failure.traceback[-1].name == "fail"
    assert Op(Kind.UPDATE, 2) not in ran
    assert threading.active_count() == threads


@both_lanes
def test_a_failure_names_the_lane_on_which_the_op_ran(lanes: Callable[[], Lanes]):
    def fail(op: Op) -> None:
        raise ValueError("broken")

    for chosen, lane in ((NESTED, "net"), (with_separate_key_group(NESTED), "keys")):
        with pytest.raises(ValueError, match="broken") as failure:
            run(chosen, idle(keys=fail), lanes())
        assert failure.value.__notes__ == [f"in `keys 0` on lane {lane}"]


def test_a_failure_on_the_compute_lane_is_prompt_and_the_first_one_counts():
    started = threading.Event()

    def dense(op: Op) -> None:
        started.set()
        raise ValueError("first")

    def copy(op: Op) -> None:
        if op.batch == 3:
            started.wait()
            time.sleep(0.05)
            raise KeyError("second")

    with pytest.raises(ValueError, match="first"):
        run(NESTED, idle(dense=dense, copy=copy), ThreadLanes())


def test_pending_ops_are_skipped_after_a_failure():
    ran: list[Op] = []

    def fail(op: Op) -> None:
        time.sleep(0.05)  # meanwhile the loop issues what waits for this op
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        run(NESTED, idle(prefetch=fail, copy=ran.append, update=ran.append), ThreadLanes())
    assert not ran


def test_an_interrupt_stops_the_lanes_and_leaves_no_thread():
    threads = threading.active_count()
    seen: list[Op] = []

    def ends() -> int | None:
        if len(seen) > 20:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        run(NESTED, idle(dense=seen.append), ThreadLanes(), batches=ends)
    assert threading.active_count() == threads


@both_lanes
def test_only_the_last_batches_are_kept(lanes: Callable[[], Lanes]):
    trace = run(
        NESTED,
        idle(),
        lanes(),
        batches=StopSignal(50),
        spans=HostSpans(keep_batches=NESTED.shape.lookahead),
    )
    kept = range(50 - NESTED.shape.lookahead, 50)
    wanted = {str(op) for batch in kept for op in ops_of_batch(batch, NESTED.shape)}
    assert {span.name for span in trace.spans} == wanted


def test_facts_of_the_caller_join_those_of_the_plan():
    trace = run(NESTED, idle(), InlineLanes(), batches=StopSignal(1), facts={"workers": 4})
    assert trace.facts == {"plan": "nested", "micro_batches": 2, "retrieval": "whole", "workers": 4}


def test_collectives_are_named_after_their_ops():
    comm = LocalCommunicator()
    names: list[str] = []

    def note(op: Op) -> None:
        names.append(comm.op_label.what)

    work = name_collectives(idle(rows=note, dense=note), comm.op_label)
    run(plan("serial"), work, InlineLanes(), batches=StopSignal(2))
    assert names == ["rows 0.0", "", "rows 1.0", ""]


def test_a_delay_belongs_to_its_op_whatever_runs_it(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr("nestpipe.runtime.executor.time.sleep", slept.append)

    def delays(lanes: Lanes, seed: int) -> list[float]:
        slept.clear()
        run(
            plan("serial"),
            inject_delays(idle(), seed=seed, max_ms=40),
            lanes,
            batches=StopSignal(1),
        )
        return sorted(slept)

    inline = delays(InlineLanes(), 5)
    assert len(set(inline)) == len(plan("serial").schedule(1)), "every op has a delay of its own"
    assert max(inline) <= 0.040
    assert delays(ThreadLanes(), 5) == inline
    assert delays(InlineLanes(), 6) != inline


def test_spans_of_another_clock_are_brought_to_this_one():
    (span,) = at_rate(1.5, [Span("union", "route", 3, None, 0, 10.0, 14.0)])
    assert (span.start, span.end, span.name) == (15.0, 21.0, "union 3")
