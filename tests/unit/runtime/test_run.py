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
    with_separate_key_group,
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
