"""The summary of a run, on traces short enough to add up by hand."""

import pytest

from nestpipe.schedule import Kind, Op, plan
from nestpipe.trace import ShortTraceError, Span, Trace
from nestpipe.train.loggers import Traffic, peak_tflops, summarise, without_waiting
from nestpipe.train.ops import StepReport

STEP_MS = 10.0
SHAPE = plan("nested").shape


def span(kind: Kind, batch: int, start: float, end: float, rank: int = 0) -> Span:
    op = Op(kind, batch, 0 if kind in (Kind.ROWS, Kind.DENSE, Kind.GRADS) else None)
    return Span(kind, SHAPE.lane(kind), batch, op.micro, rank, start, end)


def steps(rank: int = 0, late: float = 0.0) -> list[Span]:
    """Each step: 1 ms idle, rows 2 ms, dense 4 ms over 2 ms of retrieve, grads 2, update 1.

    A rank that is `late` comes so much later to `rows` and to the end of it.
    """
    spans: list[Span] = []
    for batch in range(12):
        t = batch * STEP_MS
        spans += [
            span(Kind.ROWS, batch, t + 1 + late, t + 3, rank),
            span(Kind.DENSE, batch, t + 3, t + 7, rank),
            span(Kind.RETRIEVE, batch, t + 4, t + 6, rank),
            span(Kind.GRADS, batch, t + 7, t + 9, rank),
            span(Kind.UPDATE, batch, t + 9, t + 10, rank),
        ]
    return spans


def test_what_is_exposed_adds_up_to_the_step():
    summary = summarise(Trace(tuple(steps())), Traffic())
    assert summary.step_ms == pytest.approx(STEP_MS)
    assert summary.idle_ms == pytest.approx(1)
    retrieve = summary.kinds["retrieve"]
    assert (retrieve.ms, retrieve.hidden_ms, retrieve.exposed_ms) == pytest.approx((2, 2, 0))
    exposed = {kind: time.exposed_ms for kind, time in summary.kinds.items()}
    assert exposed == pytest.approx({"retrieve": 0, "rows": 2, "dense": 4, "grads": 2, "update": 1})
    assert sum(exposed.values()) + summary.idle_ms == pytest.approx(summary.step_ms)
    assert list(summary.kinds) == ["retrieve", "rows", "dense", "grads", "update"]


def test_the_busiest_lane_bounds_the_step():
    summary = summarise(Trace(tuple(steps())), Traffic())
    assert summary.busiest_lane == "compute"
    assert summary.busiest_ms == pytest.approx(5)
    assert summary.efficiency == pytest.approx(0.5)


def test_waiting_for_a_late_peer_is_no_work_of_the_network():
    long_wait = [span(Kind.ROWS, b, 10 * b - 5, 10 * b + 3) for b in range(12)]
    alone = Trace((*long_wait, *(s for s in steps() if s.kind != "rows")))
    assert summarise(alone, Traffic()).busiest_lane == "net"
    both = Trace((*alone.spans, *steps(rank=1, late=1.5)))
    summary = summarise(both, Traffic())
    assert summary.busiest_lane == "compute"
    short = without_waiting(both)
    assert {s.duration for s in short.spans if s.kind == "rows"} == {0.5}
    assert summary.kinds["rows"].ms == pytest.approx((8 + 0.5) / 2), "the time stays as it was"


def test_traffic_is_per_batch_and_rank():
    mine, peer = Traffic(), Traffic()
    for traffic in (mine, peer):
        for step in (1, 2, 3):
            refreshed = 0 if step == 1 else 30
            report = StepReport(step, 0.5, 8, 100, refreshed, 70, 250)
            traffic.count(report, rows=100, compared=step > 1)
    peer.bytes_sent = 6000
    summary = summarise(Trace(tuple(steps())), Traffic.total([mine, peer]))
    assert (summary.rows_read, summary.rows_refreshed, summary.rows_written) == (100, 20, 70)
    assert summary.keys_asked == 250
    assert summary.bytes_sent == 1000
    assert summary.shared_keys == pytest.approx(0.3), "the first batch had none before it"


def test_a_plan_that_compares_nothing_says_so():
    assert summarise(Trace(tuple(steps())), Traffic(batches=3)).shared_keys is None


@pytest.mark.parametrize("spans", [[], steps()[:5]])
def test_a_run_of_one_batch_has_no_steady_step(spans: list[Span]):
    with pytest.raises(ShortTraceError):
        summarise(Trace(tuple(spans)), Traffic())


def test_mfu_is_the_models_own_work_over_the_peak():
    """Two ranks of 12 batches each; a step of 10 ms with 4 TFLOP is 400 TFLOP/s."""
    ranks = [Traffic(batches=12, flops=12 * 4e12), Traffic(batches=12, flops=12 * 4e12)]
    summary = summarise(Trace(tuple(steps())), Traffic.total(ranks), 989.0)
    assert summary.tflops == pytest.approx(400)
    assert summary.mfu == pytest.approx(400 / 989)
    assert summarise(Trace(tuple(steps())), Traffic.total(ranks)).mfu is None
    assert summarise(Trace(tuple(steps())), Traffic(batches=12), 989.0).tflops is None


@pytest.mark.parametrize(
    ("name", "precision", "given", "peak"),
    [
        ("NVIDIA H200", "bf16", 0.0, 989.0),
        ("NVIDIA H200", "fp32", 0.0, 67.0),
        ("NVIDIA H100 PCIe", "bf16", 0.0, 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 0.0, 312.0),
        ("NVIDIA A10", "bf16", 0.0, 125.0),
        ("", "bf16", 0.0, None),
        ("", "fp32", 0.5, 0.5),
    ],
)
def test_the_peak_is_the_devices_or_what_the_user_says(name, precision, given, peak):
    assert peak_tflops(name, precision, given) == peak
