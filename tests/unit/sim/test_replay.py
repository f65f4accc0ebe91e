"""The replay: lanes, edges, collectives and stragglers on many workers."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nestpipe.schedule import PLANS, Kind, PlanOptions, Retrieval, plan
from nestpipe.sim import (
    Cluster,
    Scale,
    Stragglers,
    Workload,
    costs,
    paper_cluster,
    replay,
    simulate,
)
from nestpipe.sim.report import plan_for

ONE_MS = dict.fromkeys(Kind, 1.0)


def test_serial_takes_the_sum_of_its_ops():
    serial = plan("serial", PlanOptions(micro_batches=3))
    played = replay(serial, ONE_MS, Scale(4), batches=5)
    ops = len(serial.schedule(5))
    assert played.trace.duration == pytest.approx(ops)


def test_no_lane_does_two_things_at_once_and_no_edge_is_broken():
    nested = plan("nested", PlanOptions(micro_batches=3))
    at = costs(paper_cluster(), nested.shape, Scale(64))
    stragglers = Stragglers(jitter=0.3)
    spans = replay(nested, at, Scale(64), batches=12, stragglers=stragglers).trace.spans
    when = {span.name: span for span in spans}
    for lane in {span.lane for span in spans}:
        mine = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        for first, second in pairwise(mine):
            assert second.start >= first.end - 1e-9
    for before, after in nested.schedule(12).edges:
        assert when[str(after)].start >= when[str(before)].end - 1e-9


def test_a_collective_ends_for_everyone_at_the_slowest():
    nested = plan("nested", PlanOptions(micro_batches=2))
    slow = Stragglers(jitter=0.5, seed=3)
    trace = replay(nested, ONE_MS, Scale(6), batches=6, stragglers=slow, record=range(6)).trace
    for span in trace.of_rank(0):
        if span.lane == "net":
            twins = [s for s in trace.spans if s.name == span.name]
            assert {s.end for s in twins} == {span.end}
            assert span.end == pytest.approx(max(s.start for s in twins) + 1.0)


def test_replicas_of_a_shard_wait_for_each_other_and_for_nobody_else():
    """Workers 0 and 4 hold the same shard of two groups: only they end a merge together.

    Were it the workers of a group, a slow replica elsewhere would never be seen to hold up a merge.
    """
    nested = plan_for("nested", PlanOptions(merge_every=1), 2)
    slow = Stragglers(jitter=0.5, seed=1)
    costs_ms = {**dict.fromkeys(Kind, 1.0), Kind.REDUCE: 0.0}
    trace = replay(nested, costs_ms, Scale(8, 2), batches=2, stragglers=slow, record=range(8)).trace
    ends = {s.rank: s.end for s in trace.spans if s.kind == Kind.REPLICA_SYNC and s.batch == 1}
    assert [ends[rank] == ends[rank + 4] for rank in range(4)] == [True] * 4
    assert len(set(ends.values())) == 4


def test_groups_wait_only_for_themselves_until_the_dense_reduction():
    serial = plan("serial", PlanOptions())
    slow = Stragglers(jitter=0.5, seed=1)
    scale = Scale(8, 2)
    trace = replay(serial, ONE_MS, scale, batches=1, stragglers=slow, record=range(8)).trace
    ends = {kind: [s.end for s in trace.spans if s.kind == kind] for kind in ("rows", "reduce")}
    assert len(set(ends["rows"])) == 2
    assert len(set(ends["reduce"])) == 1


def test_slow_workers_slow_everyone():
    nested = plan("nested", PlanOptions(micro_batches=4))
    cluster = paper_cluster()
    slowed = replace(cluster, stragglers=Stragglers(slow_share=0.01, slow_factor=1.5))
    usual = simulate(nested, cluster, Scale(256))
    held_up = simulate(nested, slowed, Scale(256))
    assert held_up.step_ms > 1.4 * usual.step_ms


def test_jitter_costs_more_with_more_workers():
    nested = plan("nested", PlanOptions(micro_batches=4))
    even = replace(paper_cluster(), network=Cluster().network)
    shaken = replace(even, stragglers=Stragglers(jitter=0.1))
    few, many = (simulate(nested, shaken, Scale(w)).step_ms for w in (8, 1024))
    assert many > few


def test_a_replay_is_repeatable():
    nested = plan("nested", PlanOptions(micro_batches=2))
    shaken = Stragglers(jitter=0.2, seed=11)
    first, second = (
        replay(nested, ONE_MS, Scale(32), batches=8, stragglers=shaken).update_ends
        for _ in range(2)
    )
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_replays_with_one_worker(name):
    run = simulate(plan(name, PlanOptions(micro_batches=2)), paper_cluster(), Scale(1))
    assert run.exposed_comm_ms == 0
    assert run.step_ms >= run.compute_ms > 0


@pytest.mark.parametrize("name", ["serial", "dual_buffer", "nested"])
def test_retrieving_fewer_rows_is_never_slower(name):
    shared = replace(paper_cluster(), workload=Workload(shared_share=0.5))
    whole, new, pooled = (
        simulate(plan(name, PlanOptions(retrieval=form)), shared, Scale(256)).step_ms
        for form in Retrieval
    )
    assert pooled <= new <= whole


def test_pipelines_are_ordered_as_expected():
    cluster = paper_cluster()
    step = {
        name: simulate(plan(name, PlanOptions(micro_batches=8)), cluster, Scale(1536)).step_ms
        for name in PLANS
    }
    assert step["nested"] < step["dual_buffer"] < step["sparse_dist"] < step["serial"]
    assert step["nested"] < step["frozen_window"] < step["serial"]


def test_1536_workers_times_50_batches_replay_within_the_look_ahead_memory():
    """The size that must take seconds; that it does is printed by `nestpipe simulate`."""
    nested = plan("nested", PlanOptions(micro_batches=8))
    played = replay(nested, ONE_MS, Scale(1536), batches=50)
    assert len(played.update_ends) == 50


@pytest.mark.parametrize("name", PLANS)
def test_one_worker_stands_for_all_where_all_are_alike(name):
    chosen = plan(name, PlanOptions(micro_batches=3))
    costs_ms = {kind: 1.0 + 0.37 * place for place, kind in enumerate(Kind)}
    one, each = (
        replay(chosen, costs_ms, Scale(8, 2), batches=7, record=(0, 5), every_worker=every)
        for every in (False, True)
    )
    assert one.trace == each.trace
    assert one.update_ends.tolist() == each.update_ends.tolist()
