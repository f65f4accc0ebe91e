"""Lanes of a GPU without a GPU: a device that does what its streams hold when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from nestpipe.runtime import Act, StopSignal, ThreadLanes, Work, run
from nestpipe.runtime.cuda import HOST_LANES, ROW_LANES, StreamPlace
from nestpipe.schedule import (
    Kind,
    Lane,
    Op,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    with_separate_key_group,
)

NESTED = plan("nested", PlanOptions(micro_batches=2))
THREE_BUFFERS = plan("nested", PlanOptions(micro_batches=2, retrieval=Retrieval.NEW, buffers=3))
"""Rows are written back on a lane of their own."""
POOLED = plan("nested", PlanOptions(retrieval=Retrieval.POOLED))
CACHE = with_separate_key_group(plan("nested", PlanOptions(retrieval=Retrieval.POOLED, buffers=3)))
"""A pool that makes room one batch ahead, as one rank has it."""
ON_HOST = {Kind.PREFETCH, Kind.RETRIEVE, Kind.WRITEBACK}
"""Ops that read or write host memory."""


class Device:
    """Streams that hold what they are given; `work` lets the device do all that it can."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.done: list[Op] = []
        self.busy = threading.Lock()

    def work(self) -> None:
        """Each stream goes on until it meets an event that has not happened."""
        with self.busy:
            while any(stream.go_on() for stream in self.streams):
                pass


@dataclass
class FakeEvent:
    """Happens when the device reaches it; the host may wait for that."""

    device: Device
    happened: bool = False

    def synchronize(self) -> None:
        self.device.work()
        assert self.happened, "the host waits for the device, which waits for the host"


@dataclass(eq=False)
class FakeStream:
    """A queue of kernels and events."""

    device: Device
    queue: list[Callable[[], bool]] = field(default_factory=list)
    waits: int = 0

    def put(self, kernel: Callable[[], bool]) -> None:
        """A kernel says whether it could run."""
        with self.device.busy:
            self.queue.append(kernel)

    def go_on(self) -> bool:
        moved = False
        while self.queue and self.queue[0]():
            self.queue.pop(0)
            moved = True
        return moved

    def wait_event(self, event: FakeEvent) -> None:
        self.waits += 1
        self.put(lambda: event.happened)

    def record_event(self, event: FakeEvent) -> FakeEvent:
        event.happened = False  # one that was recorded before means this point from now on

        def happen() -> bool:
            event.happened = True
            return True

        self.put(happen)
        return event


class FakeLanes:
    """Thread lanes on fake streams, and work that puts a kernel on its thread's stream."""

    def __init__(
        self, inline: frozenset[Lane] = frozenset(), on_host: frozenset[Lane] = HOST_LANES
    ) -> None:
        self.device = Device()
        self.current = threading.local()
        self.places = {lane: self._place(lane in on_host) for lane in Lane}
        self.lanes = ThreadLanes(self.places.__getitem__, inline)

    def _place(self, host_work: bool) -> StreamPlace:
        stream = FakeStream(self.device)
        self.device.streams.append(stream)
        return StreamPlace(
            stream,
            host_work=host_work,
            new_event=lambda: FakeEvent(self.device),
            current=self._entered,
            use=self._use,
        )

    @contextmanager
    def _entered(self, stream: FakeStream) -> Iterator[None]:
        self.current.stream = stream
        yield

    def _use(self, stream: FakeStream) -> None:
        self.current.stream = stream

    def launch(self, op: Op) -> None:
        """An act that returns before the device has done anything."""

        def kernel() -> bool:
            self.device.done.append(op)
            return True

        self.current.stream.put(kernel)

    def work(self, **acts: Act) -> Work:
        return {kind: acts.get(kind.value, self.launch) for kind in Kind}


ON_STREAMS = frozenset(Lane) - HOST_LANES
BATCHES = 2 * (2 * NESTED.shape.lookahead + 3)
"""So many that most ticks are alike."""


@pytest.mark.parametrize("on_host", [HOST_LANES, HOST_LANES - ROW_LANES], ids=["host", "streams"])
@pytest.mark.parametrize("inline", [frozenset(), ON_STREAMS], ids=["threads", "inline"])
@pytest.mark.parametrize(
    "shaped", [NESTED, THREE_BUFFERS, POOLED, CACHE], ids=["nested", "3", "pool", "cache"]
)
def test_the_device_does_every_op_after_what_it_waits_for(
    shaped: Plan, inline: frozenset[Lane], on_host: frozenset[Lane]
):
    fake = FakeLanes(inline, on_host)
    run(shaped, fake.work(), fake.lanes, batches=StopSignal(BATCHES))
    fake.device.work()
    schedule = shaped.schedule(BATCHES)
    place = {op: n for n, op in enumerate(fake.device.done)}
    assert sorted(place, key=str) == sorted(schedule.ops, key=str)
    for before, after in schedule.edges:
        assert place[before] < place[after], f"{before} -> {after}"


@pytest.mark.parametrize("inline", [frozenset(), ON_STREAMS], ids=["threads", "inline"])
@pytest.mark.parametrize("shaped", [POOLED, CACHE], ids=["pool", "cache"])
def test_ops_with_nothing_to_do_hand_on_what_they_wait_for(shaped: Plan, inline: frozenset[Lane]):
    """Some of them, in the ticks that are alike; marks of early batches serve later ones."""
    batches = 12 * (shaped.shape.lookahead + 1)
    fake = FakeLanes(inline)
    told: list[Op] = []

    def idle(op: Op) -> bool:
        if op.batch % 5 < 3:
            told.append(op)
        return op.batch % 5 < 3

    run(shaped, fake.work(), fake.lanes, batches=StopSignal(batches), idle=idle)
    fake.device.work()
    schedule = shaped.schedule(batches)
    place = {op: n for n, op in enumerate(fake.device.done)}
    assert len(told) > batches // 4
    assert {op.kind for op in told} == {Kind.RETRIEVE}
    assert place.keys() == set(schedule.ops) - set(told)
    waits = {step.op: step.after for step in schedule}

    def with_work(before: Op) -> list[Op]:
        return [before] if before in place else [op for of in waits[before] for op in with_work(of)]

    for op in place:
        for before in waits[op]:
            reached = with_work(before)
            assert all(place[earlier] < place[op] for earlier in reached), f"{before} -> {op}"


def test_many_ops_in_a_row_with_nothing_to_do_hand_on_no_more_than_a_few():
    """In a large pool all of them are: each waits for the one before, hundreds of batches back."""
    fake = FakeLanes(ON_STREAMS, HOST_LANES - ROW_LANES)
    waits: list[int] = []

    def rows(op: Op) -> None:
        waits.append(fake.current.stream.waits)
        fake.current.stream.waits = 0

    nothing = fake.work(**{kind.value: lambda op: None for kind in Kind})
    work = {**nothing, Kind.ROWS: rows}
    run(CACHE, work, fake.lanes, batches=StopSignal(400), idle=lambda op: op.batch > 50)
    assert max(waits[300:]) <= 2 * max(waits[20:50]) + CACHE.shape.lookahead


HOST_ACTS = frozenset({Kind.COUNTS, Kind.KEYS, Kind.GRADS, Kind.REDUCE})
"""What one rank has nothing to do for."""


@pytest.mark.parametrize("inline", [frozenset(), ON_STREAMS], ids=["threads", "inline"])
@pytest.mark.parametrize("acts", [HOST_ACTS, {Kind.UNION}, {Kind.ROWS, Kind.GRADS, Kind.DEDUP}])
def test_acts_without_a_device_hand_on_what_they_wait_for(
    acts: frozenset[Kind], inline: frozenset[Lane]
):
    host_acts = frozenset(acts)
    fake = FakeLanes(inline)
    called: list[Op] = []
    work = fake.work(**{kind.value: called.append for kind in host_acts})
    run(POOLED, work, fake.lanes, batches=StopSignal(BATCHES), host_acts=host_acts)
    fake.device.work()
    schedule = POOLED.schedule(BATCHES)
    waits = {step.op: step.after for step in schedule}

    def on_device(befores: tuple[Op, ...]) -> set[Op]:
        found = {before for before in befores if before.kind not in host_acts}
        return found.union(*(on_device(waits[b]) for b in befores if b.kind in host_acts))

    place = {op: n for n, op in enumerate(fake.device.done)}
    assert set(place) | set(called) == set(schedule.ops)
    for op in place:
        for before in on_device(waits[op]):
            assert place[before] < place[op], f"{before} -> {op}"


def test_an_op_is_issued_before_the_device_has_done_what_it_waits_for():
    fake = FakeLanes()
    issued: list[Op] = []

    def dense(op: Op) -> None:
        issued.append(op)
        assert not [done for done in fake.device.done if done.kind is Kind.ROWS]
        fake.launch(op)

    # One batch: nothing makes the host wait for the device between `retrieve` and the end.
    run(plan("dual_buffer"), fake.work(dense=dense), fake.lanes, batches=StopSignal(1))
    assert issued == [Op(Kind.DENSE, 0, 0)]


def test_union_waits_for_no_rows_of_an_earlier_batch():
    """Keys of one rank have a network of their own: else a later union would wait for `rows`."""
    fake = FakeLanes(ON_STREAMS)
    work = fake.work(**{kind.value: lambda op: None for kind in HOST_ACTS})
    schedule = CACHE.schedule(BATCHES)
    run(CACHE, work, fake.lanes, batches=StopSignal(BATCHES), host_acts=HOST_ACTS)
    waits = {step.op: step.after for step in schedule}

    def reached(op: Op) -> set[Op]:
        found, left = set[Op](), [op]
        while left:
            for before in waits[left.pop()]:
                if before not in found:
                    found.add(before)
                    left.append(before)
        return found

    union = Op(Kind.UNION, 9)
    rows = {op.batch for op in reached(union) if op.kind is Kind.ROWS}
    # What bounds the batches in flight: `prefetch` of this batch waits for an update long ago.
    assert max(rows) == union.batch - CACHE.shape.lookahead


def test_rows_of_a_later_batch_are_asked_for_while_others_are_on_their_way():
    """Where streams alone wait, `retrieve` is issued before the one of the batch before ends."""
    fake = FakeLanes(on_host=HOST_LANES - ROW_LANES)
    ahead: list[bool] = []

    def retrieve(op: Op) -> None:
        ahead.append(Op(Kind.RETRIEVE, op.batch - 1) not in fake.device.done)
        fake.launch(op)

    run(CACHE, fake.work(retrieve=retrieve), fake.lanes, batches=StopSignal(BATCHES))
    assert any(ahead[1:])


@pytest.mark.parametrize("shaped", [NESTED, THREE_BUFFERS], ids=["host", "host and write"])
def test_work_on_host_memory_starts_when_the_device_has_done_what_it_waits_for(shaped: Plan):
    """No stream can hold back an act on host memory, whichever lane does it."""
    fake = FakeLanes()
    schedule = shaped.schedule(5)
    lane = shaped.shape.lane
    waits = {step.op: step.after for step in schedule}
    seen: list[Op] = []

    def host_act(op: Op) -> None:
        seen.append(op)
        missing = [b for b in waits[op] if b not in fake.device.done]
        assert not missing, f"`{op}` started before {missing}"
        own = [o for o in schedule.ops if lane(o.kind) is lane(op.kind)]
        assert set(own[: own.index(op)]) <= set(fake.device.done), "one op of a lane at a time"
        fake.launch(op)

    acts = {kind.value: host_act for kind in ON_HOST}
    run(shaped, fake.work(**acts), fake.lanes, batches=StopSignal(5))
    assert {op.kind for op in seen} == ON_HOST


def test_the_issuing_loop_waits_for_the_device():
    fake = FakeLanes()
    ahead: list[int] = []

    def prefetch(op: Op) -> None:
        updates = sum(done.kind is Kind.UPDATE for done in fake.device.done)
        ahead.append(op.batch - updates)

    run(NESTED, fake.work(prefetch=prefetch), fake.lanes, batches=StopSignal(12))
    assert max(ahead) <= NESTED.shape.lookahead


def test_a_failure_ends_the_run_and_names_its_op():
    fake = FakeLanes()

    def rows(op: Op) -> None:
        if op.batch == 2:
            raise ValueError("broken")
        fake.launch(op)

    with pytest.raises(ValueError, match="broken") as failure:
        run(NESTED, fake.work(rows=rows), fake.lanes)
    assert failure.value.__notes__[0].startswith("in `rows 2")


def test_a_lane_whose_thread_cannot_start_ends_the_run():
    fake = FakeLanes()

    def refused(stream: object) -> None:
        raise RuntimeError("no such device")

    stream = fake.places[Lane.NET].stream
    fake.places[Lane.NET] = StreamPlace(stream, current=refused)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no such device"):
        run(NESTED, fake.work(), fake.lanes)
