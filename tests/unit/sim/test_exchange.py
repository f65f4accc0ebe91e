"""How exposed communication depends on the number of micro-batches."""

from dataclasses import replace

import pytest

from nestpipe.schedule import Exchange, Kind, PlanOptions, plan
from nestpipe.sim import Cluster, Scale, costs, paper_cluster, simulate

SCALE = Scale(1536)


def exposed(cluster: Cluster, micro_batches: int, name: str = "nested") -> float:
    return simulate(
        plan(name, PlanOptions(micro_batches=micro_batches)), cluster, SCALE
    ).exposed_comm_ms


def with_message_cost(ms: float) -> Cluster:
    cluster = paper_cluster()
    network = replace(cluster.network, message_us=1000 * ms, message_us_per_peer=0.0)
    return replace(cluster, network=network)


@pytest.mark.parametrize("name", ["nested", "frozen_window"])
def test_exposed_communication_falls_as_one_over_n(name):
    free_messages = with_message_cost(0.0)
    whole = exposed(free_messages, 1, name)
    for micro_batches in (2, 4, 8, 16, 32):
        assert exposed(free_messages, micro_batches, name) == pytest.approx(
            whole / micro_batches, rel=1e-6
        )


def test_it_stops_falling_where_the_cost_per_message_dominates():
    slow_messages = with_message_cost(5.0)
    curve = {
        micro_batches: exposed(slow_messages, micro_batches)
        for micro_batches in (1, 2, 4, 8, 16, 32, 64, 128)
    }
    floor = 3 * 5.0  # the first rows, the last gradients and the dense reduction are exposed
    assert curve[2] < 0.6 * curve[1]
    assert curve[4] < 0.6 * curve[2]
    assert curve[32] > floor
    assert curve[64] > 0.7 * curve[32]
    assert curve[128] > curve[64], "more messages than compute can hide"


def test_an_exchange_longer_than_its_compute_cannot_hide():
    cluster = paper_cluster()
    slow = replace(cluster, network=replace(cluster.network, gb_per_s=1.0))
    nested = plan("nested", PlanOptions(micro_batches=8))
    at = costs(slow, nested.shape, SCALE)
    assert at[Kind.ROWS] > at[Kind.DENSE]
    run = simulate(nested, slow, SCALE)
    assert run.busiest_lane == "net"
    assert run.step_ms >= 8 * (at[Kind.ROWS] + at[Kind.GRADS])


def test_keys_met_again_swell_the_exchange():
    cluster = paper_cluster()
    swollen = replace(cluster, workload=replace(cluster.workload, split_growth=0.1))
    assert exposed(swollen, 8) == pytest.approx(1.1**3 * exposed(cluster, 8), rel=0.01)


def test_a_window_asks_for_no_row_twice():
    cluster = paper_cluster()
    swollen = replace(cluster, workload=replace(cluster.workload, split_growth=0.1))
    micro, window = (
        costs(swollen, plan("nested", PlanOptions(micro_batches=8, exchange=form)).shape, SCALE)
        for form in Exchange
    )
    unsplit = costs(cluster, plan("nested", PlanOptions(micro_batches=8)).shape, SCALE)
    for kind in (Kind.ROWS, Kind.GRADS):
        assert window[kind] == unsplit[kind] < micro[kind]


def test_smaller_groups_shorten_the_exchange():
    cluster = paper_cluster()
    shape = plan("serial", PlanOptions()).shape
    ms = [costs(cluster, shape, Scale(1536, groups))[Kind.ROWS] for groups in (1, 2, 4, 8)]
    assert ms == sorted(ms, reverse=True)
