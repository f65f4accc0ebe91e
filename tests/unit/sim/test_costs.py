"""Costs of single ops, worked out by hand: a wrong unit or share must not hide behind a fit."""

from dataclasses import replace

import pytest

from nestpipe.schedule import Kind, PlanOptions, Retrieval, plan
from nestpipe.sim import Cluster, Layout, Network, Scale, Workload, costs

FREE = replace(
    Network(), message_us=0.0, message_us_per_peer=0.0, setup_us_per_peer=0.0, contention=()
)
SLOW_FAR = replace(FREE, gb_per_s=1.0, node_gb_per_s=float("inf"), workers_per_node=8)
"""Only bytes between nodes take time: a GB takes a second."""


def at(network: Network, work: Workload, scale: Scale, **options: object):
    shape = plan("nested", PlanOptions(**options)).shape  # type: ignore[arg-type]
    return costs(Cluster(network=network, workload=work), shape, scale)


def test_dense_gradients_are_megabytes():
    """A ring over two nodes of one worker: twice the bytes, less half. 10 MB at 1 GB/s take 10 ms.

    Kilobytes would make the dense all-reduce of a real model free.
    """
    alone = replace(SLOW_FAR, workers_per_node=1)
    found = at(alone, Workload(dense_mb=10.0), Scale(2))[Kind.REDUCE]
    assert found == pytest.approx(10.0)


def test_workers_of_a_node_share_the_bytes_of_an_all_reduce_between_nodes():
    """Eight workers of a node each send an eighth: 16 workers in two nodes take an eighth of 2.

    If each sent all bytes, a node with more workers would be slower at the dense all-reduce.
    """
    work = Workload(dense_mb=80.0)
    assert at(SLOW_FAR, work, Scale(16))[Kind.REDUCE] == pytest.approx(80 / 8)
    single = replace(SLOW_FAR, workers_per_node=1)
    assert at(single, work, Scale(2))[Kind.REDUCE] == pytest.approx(80)


def test_replicas_of_a_node_share_the_bytes_that_they_merge():
    """The same ring merges replicas: eight in a node send an eighth of the rows to the other."""
    work = Workload(shared_share=1.0)
    options = {"micro_batches": 1, "merge_every": 1}
    beside = at(SLOW_FAR, work, Scale(16, 16, Layout.REPLICAS), **options)[Kind.REPLICA_SYNC]
    single = replace(SLOW_FAR, workers_per_node=1)
    apart = at(single, work, Scale(2, 2, Layout.REPLICAS), **options)[Kind.REPLICA_SYNC]
    rows_ms = work.owned_rows * work.stored_row_bytes / 1e6
    assert apart - beside == pytest.approx(rows_ms * (1 - 1 / 8))


@pytest.mark.parametrize("shared", [0.0, 0.25, 1.0])
def test_a_patch_sends_the_rows_that_neighbouring_batches_share(shared):
    """Rows sent early are sent again where the batch before has changed them.

    A patch of no bytes would make speculative rows look free.
    """
    work = Workload(shared_share=shared)
    found = at(SLOW_FAR, work, Scale(64), micro_batches=4)
    assert found[Kind.ROWS] > 0
    assert found[Kind.PATCH] == pytest.approx(shared * found[Kind.ROWS])


@pytest.mark.parametrize("shared", [0.0, 0.25, 1.0])
def test_a_pool_moves_what_its_batches_lack(shared):
    """A pool of one batch's rows lacks what a second batch adds, as the buffer before does."""
    small, large = (Workload(shared_share=shared, pool_batches=n) for n in (1, 64))
    new = at(SLOW_FAR, small, Scale(64), micro_batches=1, retrieval=Retrieval.NEW)
    least = at(SLOW_FAR, small, Scale(64), micro_batches=1, retrieval=Retrieval.POOLED)
    most = at(SLOW_FAR, large, Scale(64), micro_batches=1, retrieval=Retrieval.POOLED)
    for kind in (Kind.RETRIEVE, Kind.WRITEBACK):
        assert least[kind] == pytest.approx(new[kind])
        assert most[kind] < least[kind] or shared in (0.0, 1.0)


def test_a_pool_that_holds_every_row_moves_none():
    found = at(
        SLOW_FAR,
        Workload(pool_batches=1e15),
        Scale(64),
        micro_batches=1,
        retrieval=Retrieval.POOLED,
    )
    assert found[Kind.RETRIEVE] == found[Kind.WRITEBACK] == pytest.approx(0, abs=1e-2)
