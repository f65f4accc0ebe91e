"""Real streams: the device keeps the order of the plan while the host runs ahead."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from nestpipe.runtime import CudaLanes, CudaSpans, StopSignal, ThreadLanes, Work, lanes_for, run
from nestpipe.runtime.cuda import HOST_CLOCK, HOST_LANES, StreamPlace
from nestpipe.schedule import (
    Kind,
    Lane,
    Op,
    PlanOptions,
    Retrieval,
    plan,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.trace import Trace
from nestpipe.train.ops import backward

BATCHES = 8
MOST_CYCLES = 2_000_000
"""A kernel that waits about a millisecond."""
LONG_CYCLES = 600_000_000
"""About 0.3 s: no host takes that long to issue the next op."""
SLACK_MS = 0.01
"""Several times what the device's clock can tell apart."""
PLANS = [
    plan(name, PlanOptions(micro_batches=3, retrieval=retrieval))
    for name in ("dual_buffer", "frozen_window", "nested")
    for retrieval in Retrieval
]


@dataclass
class Flags:
    """One flag per op, on the device: an op counts the flags that it misses, then sets its own."""

    schedule: Any
    seed: int
    long: dict[Op, int] = field(default_factory=dict)
    """Cycles of ops that take longer than chance lets them."""
    place: dict[Op, int] = field(init=False)
    after: dict[Op, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {op: n for n, op in enumerate(self.schedule.ops)}
        self.after = {s.op: [self.place[b] for b in s.after] for s in self.schedule}
        self.set = torch.zeros(len(self.place), dtype=torch.int64, device="cuda")
        self.missed = torch.zeros(len(self.place), dtype=torch.int64, device="cuda")
        self.waits = {op: torch.tensor(b, device="cuda") for op, b in self.after.items() if b}

    def act(self, op: Op) -> None:
        if op in self.waits:
            here = self.place[op]
            self.missed[here] = (self.set[self.waits[op]] == 0).sum()
        short = random.Random(f"{self.seed} {op}").randrange(MOST_CYCLES)
        torch.cuda._sleep(self.long.get(op, short))
        # Not `set[...] = 1`: the host would wait until the device has done it.
        self.set[self.place[op]].fill_(1)

    def work(self) -> Work:
        return dict.fromkeys(Kind, self.act)


@pytest.mark.parametrize("chosen", PLANS, ids=lambda p: f"{p.name}-{p.shape.retrieval.value}")
def test_the_device_does_every_op_after_what_it_waits_for(chosen):
    lanes = CudaLanes(torch.device("cuda"))
    for seed in range(3):
        flags = Flags(chosen.schedule(BATCHES), seed)
        trace = run(chosen, flags.work(), lanes, batches=StopSignal(BATCHES), spans=CudaSpans())
        assert int(flags.missed.sum()) == 0
        assert bool(flags.set.all())
        assert_spans_keep_the_order(trace, flags.schedule)


POOLS = [
    with_separate_key_group(
        plan("nested", PlanOptions(retrieval=Retrieval.POOLED, buffers=buffers))
    )
    for buffers in (2, 3)
]


@pytest.mark.parametrize("chosen", POOLS, ids=["2", "3"])
def test_lanes_of_rows_whose_streams_alone_wait_keep_the_order(chosen):
    lanes = CudaLanes(torch.device("cuda"), by_device=True, alone=True)
    for seed in range(3):
        flags = Flags(chosen.schedule(BATCHES), seed)
        trace = run(chosen, flags.work(), lanes, batches=StopSignal(BATCHES), spans=CudaSpans())
        assert int(flags.missed.sum()) == 0
        assert bool(flags.set.all())
        assert_spans_keep_the_order(trace, flags.schedule)


def assert_spans_keep_the_order(trace: Trace, schedule: Any) -> None:
    spans = {span.name: span for span in trace.spans}
    assert set(spans) == {str(op) for op in schedule.ops}
    for before, after in schedule.edges:
        if HOST_CLOCK.isdisjoint(
            {spans[str(op)].lane for op in (before, after)}
        ):  # that clock is another one
            late = spans[str(before)].end - spans[str(after)].start
            assert late <= SLACK_MS, f"{before} -> {after}"


class Careless(StreamPlace):
    """A stream that waits for no other."""

    def wait_for(self, marks: object) -> None:
        pass


def test_without_the_waits_of_streams_ops_miss_each_other():
    """The test above can fail: while the device is long in one op, those after it do not wait.

    The same streams first run with their waits. So kernels are loaded and every stream has its
    memory: either may make the host wait for the device, and that would keep the order too.
    """
    chosen = PLANS[-1]
    streams = {lane: torch.cuda.Stream() for lane in Lane}

    def missed(place: type[StreamPlace]) -> int:
        flags = Flags(chosen.schedule(BATCHES), 1, {Op(Kind.COPY, 0): LONG_CYCLES})
        torch.cuda.synchronize()
        lanes = ThreadLanes(lambda lane: place(streams[lane]))
        run(chosen, flags.work(), lanes, batches=StopSignal(BATCHES))
        torch.cuda.synchronize()
        return int(flags.missed.sum())

    assert missed(StreamPlace) == 0
    assert missed(Careless) > 0


@pytest.mark.parametrize("here", [True, False])
def test_a_backward_pass_runs_on_the_thread_that_calls_it_if_told(here: bool):
    threads: list[int] = []
    streams: list[int] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            streams.append(torch.cuda.current_stream().cuda_stream)
            return gradients[0] * 2

    leaf = torch.arange(3.0, device="cuda").requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward((Watched.apply(leaf) * leaf).sum(), here=here)  # type: ignore[operator]
    torch.cuda.synchronize()
    assert (threads == [threading.get_ident()]) == here
    assert streams == [stream.cuda_stream]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 3.0, 6.0]


def test_backward_stays_on_the_stream_of_the_compute_lane():
    streams: dict[str, int] = {}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            streams["forward"] = torch.cuda.current_stream().cuda_stream
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            streams["backward"] = torch.cuda.current_stream().cuda_stream
            return gradients[0]

    leaf = torch.ones(3, device="cuda", requires_grad=True)

    def dense(op: Op) -> None:
        Watched.apply(leaf).sum().backward()  # type: ignore[union-attr]

    work = {**dict.fromkeys(Kind, lambda op: None), Kind.DENSE: dense}
    run(plan("nested"), work, CudaLanes(torch.device("cuda")), batches=StopSignal(2))
    assert streams["forward"] == streams["backward"] != torch.cuda.default_stream().cuda_stream
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((3,), 2.0, device="cuda"))


def test_all_streams_but_that_of_compute_have_high_priority():
    priorities: dict[Lane, int] = {}
    third = plan("nested", PlanOptions(retrieval=Retrieval.NEW, buffers=3))
    every_lane = with_separate_dense_group(with_separate_key_group(third))

    def note(op: Op) -> None:
        priorities[every_lane.shape.lane(op.kind)] = torch.cuda.current_stream().priority

    run(
        every_lane,
        dict.fromkeys(Kind, note),
        CudaLanes(torch.device("cuda")),
        batches=StopSignal(1),
    )
    low, _ = torch.cuda.Stream.priority_range()  # pyright: ignore[reportCallIssue]  it is static
    assert {lane for lane, priority in priorities.items() if priority < low} == {
        *set(Lane) - {Lane.COMPUTE}
    }


def test_host_time_and_device_time_share_their_beginning():
    """A host op comes after a device op and the other way round: their spans keep that order."""
    chosen = plan("serial")
    cycles = torch.cuda._sleep

    def act(op: Op) -> None:
        cycles(MOST_CYCLES)
        torch.cuda.current_stream().synchronize()

    lanes = CudaLanes(torch.device("cuda"))
    timed = CudaSpans()
    trace = run(chosen, dict.fromkeys(Kind, act), lanes, batches=StopSignal(4), spans=timed)
    spans = {span.name: span for span in trace.spans}
    slack = 0.2 + timed.clocks_differ_ms
    for before, after in chosen.schedule(4).edges:
        one, two = spans[str(before)], spans[str(after)]
        # These lanes wait until the act before has returned. Its last event may come later: a GPU
        # that others use too came to some of them after 6 ms.
        returned = two.lane in HOST_CLOCK - HOST_LANES and one.lane not in HOST_CLOCK
        first = one.start if returned else one.end
        assert first <= two.start + slack, f"{before} -> {after}"


@pytest.mark.parametrize("retrieval", Retrieval)
def test_in_serial_nothing_overlaps_although_the_host_could_run_ahead(retrieval):
    chosen = with_separate_key_group(
        plan("serial", PlanOptions(micro_batches=2, retrieval=retrieval))
    )
    timed = CudaSpans()

    def act(op: Op) -> None:
        torch.cuda._sleep(MOST_CYCLES)

    lanes = lanes_for(chosen.shape, torch.device("cuda"))
    trace = run(chosen, dict.fromkeys(Kind, act), lanes, batches=StopSignal(4), spans=timed)
    spans = {span.name: span for span in trace.spans}
    slack = 0.2 + timed.clocks_differ_ms
    for before, after in chosen.schedule(4).edges:
        # An op of the host that only puts something there is over before the device has done it.
        assert spans[str(before)].end <= spans[str(after)].start + slack, f"{before} -> {after}"
