"""Groups of workers with a copy of the tables each: what they merge, and how many are best."""

from dataclasses import replace

import pytest

from nestpipe.schedule import Kind, Merge, PlanOptions, plan
from nestpipe.sim import (
    Cluster,
    Layout,
    Network,
    Scale,
    Workload,
    choose_groups,
    costs,
    paper_cluster,
)
from nestpipe.sim.costs import distinct_growth, foreign_rows, merged_bytes, merged_rows
from nestpipe.sim.report import plan_for, usual_groups

WORK = Workload(shared_share=0.5)
NESTED = PlanOptions(micro_batches=8, merge_every=1)
EXACT = replace(NESTED, merge=Merge.EXACT)


def shape(every: int = 1, merge: Merge = Merge.AVERAGED):
    return plan("nested", PlanOptions(micro_batches=8, merge_every=every, merge=merge)).shape


def test_two_neighbours_have_the_rows_that_their_sharing_says():
    assert distinct_growth(WORK, 1) == 1
    assert distinct_growth(WORK, 2) == pytest.approx(1.5)
    assert distinct_growth(WORK, 4) == pytest.approx(1.5**2)
    assert distinct_growth(replace(WORK, shared_share=1.0), 64) == 1
    assert distinct_growth(replace(WORK, shared_share=0.0), 64) == pytest.approx(64)


def test_a_longer_interval_merges_more_rows_at_a_time_and_fewer_per_batch():
    sizes = [merged_rows(WORK, shape(every), groups=4) for every in (1, 4, 16)]
    assert sizes == sorted(sizes)
    per_batch = [size / every for size, every in zip(sizes, (1, 4, 16), strict=True)]
    assert per_batch == sorted(per_batch, reverse=True)


def test_exact_replicas_send_gradients_and_averaged_ones_rows_with_their_state():
    averaged, exact = (merged_bytes(WORK, shape(merge=m), groups=2) for m in Merge)
    assert averaged / exact == pytest.approx(WORK.stored_row_bytes / WORK.row_bytes)


@pytest.mark.parametrize("merge", Merge)
def test_a_single_group_merges_nothing(merge):
    assert merged_bytes(WORK, shape(merge=merge), groups=1) == 0
    assert foreign_rows(WORK, shape(merge=merge), groups=1) == 0
    alone, never = (
        costs(Cluster(workload=WORK), s, Scale(64)) for s in (shape(merge=merge), shape(0))
    )
    assert alone == never


def test_every_replica_updates_the_rows_of_all_groups_only_where_they_are_exact():
    cluster = Cluster(workload=WORK)
    averaged, exact = (costs(cluster, shape(merge=m), Scale(64, 2)) for m in Merge)
    assert exact[Kind.UPDATE] == pytest.approx(1.5 * averaged[Kind.UPDATE])


def test_rows_that_only_others_touched_come_from_host_memory():
    here, elsewhere = (
        costs(Cluster(workload=replace(WORK, merge_from_host=share)), shape(), Scale(64, 2))
        for share in (0.0, 1.0)
    )
    for kind in (Kind.RETRIEVE, Kind.WRITEBACK):
        assert elsewhere[kind] == pytest.approx(1.5 * here[kind])


def test_replicas_in_one_node_merge_at_its_speed():
    network = Network(message_us=0.0, message_us_per_peer=0.0)
    fast = Cluster(workload=WORK, network=replace(network, node_gb_per_s=1e12))
    without_network = replace(fast, network=replace(fast.network, gb_per_s=1e12))
    for groups, within in ((8, True), (16, False)):
        ms, copies_ms = (
            costs(cluster, shape(), Scale(128, groups))[Kind.REPLICA_SYNC]
            for cluster in (fast, without_network)
        )
        assert (ms == pytest.approx(copies_ms)) is within


@pytest.mark.parametrize(
    ("layout", "workers", "groups", "shards_inside", "replicas_inside"),
    [
        ("replicas", 64, 4, 2, 4),
        ("replicas", 64, 16, 1, 8),
        ("shards", 64, 4, 8, 1),
        ("shards", 8, 4, 2, 4),
        ("auto", 64, 8, 1, 8),
        ("auto", 64, 16, 4, 2),
    ],
)
def test_who_shares_a_node_of_eight(layout, workers, groups, shards_inside, replicas_inside):
    scale = Scale(workers, groups, Layout(layout))
    assert scale.shards_in_node(8) == shards_inside
    assert scale.replicas_in_node(8) == replicas_inside


def test_numbers_to_try_divide_the_workers_and_leave_shards():
    assert usual_groups(1536) == [1, 2, 4, 8, 16, 32, 64]
    assert usual_groups(12) == [1, 2, 4]
    assert usual_groups(8) == [1, 2, 4]
    assert usual_groups(1) == [1]


def test_a_single_group_has_no_merge_in_its_plan():
    assert plan_for("nested", NESTED, 1).shape.merge_every == 0
    assert plan_for("nested", NESTED, 2).shape.merge_every == 1


@pytest.mark.parametrize("workers", [1536, 4096])
def test_groups_are_faster_on_the_papers_cluster(workers):
    choice = choose_groups("nested", NESTED, paper_cluster(), workers, usual_groups(workers))
    (one, *_) = choice.rows
    assert one.groups == 1
    assert one.merged_bytes == one.exposed_merge_ms == 0
    assert choice.best.groups > 1
    assert choice.best.efficiency > one.efficiency
    assert choice.best.figures.step_ms == min(row.figures.step_ms for row in choice.rows)


def test_efficiency_is_that_of_the_published_table_for_one_group():
    (row,) = choose_groups("nested", NESTED, paper_cluster(), 1536, [1]).rows
    assert row.efficiency == pytest.approx(94.07, abs=1.5)


def test_a_slow_host_makes_one_group_best():
    """Where every replica must fetch what only others touched, copies cost more than they save."""
    cluster = paper_cluster()
    slow = replace(cluster, workload=replace(cluster.workload, merge_from_host=1.0))
    choice = choose_groups("nested", NESTED, slow, 1536, [1, 2, 8])
    assert choice.best.groups == 1


def test_a_rare_merge_costs_its_share_of_every_step():
    cluster = paper_cluster()
    seen = choose_groups("nested", replace(NESTED, merge_every=16), cluster, 1536, [8]).best
    merge_ms = costs(cluster, shape(16), Scale(1536, 8))[Kind.REPLICA_SYNC]
    assert seen.exposed_merge_ms == pytest.approx(merge_ms / 16, rel=0.01)


def test_exact_copies_cost_more_than_averaged_ones():
    averaged, exact = (
        choose_groups("nested", options, paper_cluster(), 1536, [8]).best.figures.step_ms
        for options in (NESTED, EXACT)
    )
    assert exact > averaged
