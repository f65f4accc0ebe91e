"""Costs fitted to a trace give the trace back, and predict other plans."""

import pytest

from nestpipe.errors import ParseError
from nestpipe.schedule import Kind, PlanOptions, plan
from nestpipe.schedule.schedule import DENSE_GROUP_KINDS, REPLICA_KINDS, SPECULATIVE_KINDS
from nestpipe.sim import Scale, Stragglers, costs, fit, paper_cluster, replay, simulate
from nestpipe.trace import Span, Trace, read_chrome, write_chrome

SCALE = Scale(16)


def run(name: str, micro_batches: int, stragglers: Stragglers | None = None) -> Trace:
    """A trace of all workers, as training would write it."""
    chosen = plan(name, PlanOptions(micro_batches=micro_batches))
    at = costs(paper_cluster(), chosen.shape, SCALE)
    played = replay(chosen, at, SCALE, batches=20, stragglers=stragglers, record=range(16))
    return played.trace


def test_a_fit_to_serial_predicts_nested(tmp_path):
    file = tmp_path / "serial.json"
    write_chrome(run("serial", 4), file)
    fitted = fit([read_chrome(file)])
    nested = plan("nested", PlanOptions(micro_batches=4))
    cluster = paper_cluster()
    predicted = simulate(nested, cluster, SCALE, op_costs=fitted.at(nested, cluster, SCALE))
    true = simulate(nested, cluster, SCALE)
    assert set(fitted.missing) == {
        *REPLICA_KINDS,
        *SPECULATIVE_KINDS,
        *DENSE_GROUP_KINDS,
        Kind.SYNC,
        Kind.SWAP,
        Kind.NORM,
    }
    # A serial run of the whole working set has no refresh, so its cost cannot be known.
    assert predicted.step_ms == pytest.approx(true.step_ms - true.exposed_ms["sync"], rel=1e-3)


def test_waiting_for_a_slow_peer_is_not_a_cost_of_the_network():
    fitted = fit([run("nested", 4, Stragglers(jitter=0.3, seed=5))])
    true = costs(paper_cluster(), plan("nested", PlanOptions(micro_batches=4)).shape, SCALE)
    fixed, shared = fitted.per_micro[Kind.ROWS]
    assert fixed + shared / 4 == pytest.approx(true[Kind.ROWS], rel=1e-6)


def test_traces_with_different_micro_batches_separate_the_cost_per_message():
    fitted = fit([run("nested", micro_batches) for micro_batches in (1, 2, 8)])
    nested = plan("nested", PlanOptions(micro_batches=32))
    predicted = fitted.at(nested, paper_cluster(), SCALE)
    true = costs(paper_cluster(), nested.shape, SCALE)
    for kind in (Kind.ROWS, Kind.DENSE, Kind.GRADS):
        assert predicted[kind] == pytest.approx(true[kind], rel=1e-6)


def test_other_numbers_of_workers_follow_the_hardware():
    fitted = fit([run("nested", 4)])
    nested, cluster = plan("nested", PlanOptions(micro_batches=4)), paper_cluster()
    at = fitted.at(nested, cluster, Scale(1536))
    true = costs(cluster, nested.shape, Scale(1536))
    assert at[Kind.ROWS] == pytest.approx(true[Kind.ROWS], rel=1e-3)


def test_a_trace_without_training_is_refused():
    lonely = Trace((Span("rows", "net", 0, 0, 0, 0.0, 1.0),))
    with pytest.raises(ParseError, match="no `dense` op"):
        fit([lonely])


def test_an_unknown_kind_is_named():
    odd = Trace((Span("teleport", "net", 0, 0, 0, 0.0, 1.0),))
    with pytest.raises(ParseError, match="unknown kind 'teleport'"):
        fit([odd])


def test_traces_of_different_sizes_do_not_mix():
    small = plan("serial", PlanOptions())
    other = replay(small, dict.fromkeys(Kind, 1.0), Scale(2), batches=4).trace
    with pytest.raises(ParseError, match="same number of workers"):
        fit([run("serial", 1), other])
