import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import NestpipeError
from nestpipe.trace import IDLE, USEFUL, Span, exposure, lane_busy, steady_interval

times = st.floats(0, 100) | st.integers(0, 12).map(float)
spans_of_one_rank = st.lists(
    st.builds(
        lambda kind, pair: Span(kind, "net", 0, None, 0, min(pair), max(pair)),
        st.sampled_from(["dense", "update", "rows", "grads", "sync", "retrieve"]),
        st.tuples(times, times),
    ),
    max_size=25,
)


def span(kind: str, start: float, end: float, lane: str = "net", batch: int = 0) -> Span:
    return Span(kind, lane, batch, None, 0, start, end)


def test_what_runs_under_dense_is_hidden_and_the_rest_exposed():
    found = exposure([span("rows", 0, 4), span("dense", 1, 3), span("update", 4, 5)])
    assert found.exposed == {"rows": 2.0}
    assert found.hidden("rows") == 2.0
    assert (found.total_ms, found.compute_ms) == (5.0, 3.0)
    assert found.busy == {"dense": 2.0, "rows": 4.0, "update": 1.0}


def test_useful_kinds_hide_others_and_are_not_hidden():
    assert exposure([span("dense", 0, 4)]).hidden("dense") == 0.0


def test_a_gap_is_charged_to_the_chain_that_ended_it():
    chain = [span("keys", 0, 2), span("retrieve", 2, 5), span("sync", 6, 7)]
    found = exposure([*chain, span("dense", 7, 9)])
    assert found.exposed == {"keys": 2.0, "retrieve": 3.0, IDLE: 1.0, "sync": 1.0}


def test_a_background_op_is_not_blamed_for_a_gap_it_outlives():
    background = span("retrieve", 1, 30)
    found = exposure([background, span("rows", 0, 9.9), span("dense", 10, 20)], end=20)
    assert found.exposed["rows"] == pytest.approx(9.9)
    assert found.exposed["retrieve"] == pytest.approx(0.1)


def test_of_two_ops_that_end_together_the_later_start_is_charged_first():
    found = exposure([span("retrieve", 0, 4), span("rows", 3, 4), span("dense", 4, 5)])
    assert found.exposed == {"retrieve": 3.0, "rows": 1.0}


def test_only_the_interval_asked_for_counts():
    found = exposure([span("rows", 0, 10), span("dense", 10, 20)], start=8, end=12)
    assert (found.total_ms, found.compute_ms) == (4.0, 2.0)
    assert found.exposed == {"rows": 2.0}
    assert exposure([span("rows", 0, 10)], start=50).total_ms == 0.0


def test_nothing_ran_in_an_empty_trace():
    assert exposure([]).total_ms == 0.0
    assert exposure([], start=0, end=3).exposed == {IDLE: 3.0}


def test_spans_of_several_ranks_are_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="one rank"):
        exposure([span("rows", 0, 1), Span("rows", "net", 0, None, 1, 0, 1)])


@given(spans_of_one_rank, st.none() | times, st.none() | times)
def test_compute_and_exposed_time_add_up(spans: list[Span], start: float | None, end: float | None):
    found = exposure(spans, start, end)
    assert found.compute_ms + found.exposed_ms == pytest.approx(found.total_ms, abs=1e-6)
    assert all(ms >= 0 for ms in (*found.exposed.values(), *found.busy.values()))
    assert not USEFUL & set(found.exposed)
    for kind in set(found.exposed) - {IDLE}:
        assert found.exposed[kind] <= found.busy[kind] + 1e-6


@given(spans_of_one_rank)
def test_idle_is_exactly_the_time_in_which_nothing_ran(spans: list[Span]):
    found = exposure(spans)
    assert found.exposed.get(IDLE, 0.0) == pytest.approx(
        found.total_ms - lane_busy(spans, 0, 100).get("net", 0.0), abs=1e-6
    )


def test_ten_thousand_spans_are_walked_once():
    spans = [span("rows", t, t + 1) for t in range(10_000)]
    assert exposure(spans).exposed == {"rows": 10_000.0}


def updates(count: int) -> list[Span]:
    return [span("update", 10 * b + 9, 10 * b + 10, "compute", b) for b in range(count)]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (2, (10, 20, 1)),
        (3, (20, 30, 1)),
        (8, (50, 60, 1)),
        (16, (70, 120, 5)),
        (40, (110, 300, 19)),
    ],
)
def test_the_steady_interval_skips_warm_up_and_drain(
    count: int, expected: tuple[float, float, int]
):
    assert steady_interval(updates(count)) == expected


@given(st.integers(2, 200))
def test_a_steady_interval_holds_whole_steps(count: int):
    start, end, num_batches = steady_interval(updates(count))
    assert end - start == 10 * num_batches >= 10


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_batches_have_no_steady_state(count: int):
    with pytest.raises(NestpipeError, match=f"has {count}; trace more batches"):
        steady_interval(updates(count))


def test_a_lane_is_busy_once_however_many_ops_overlap():
    spans = [span("rows", 0, 4), span("keys", 2, 6), span("dense", 1, 2, "compute")]
    assert lane_busy(spans, 1, 5) == {"compute": 1.0, "net": 4.0}
