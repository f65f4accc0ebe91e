"""Dense sums in a network of their own, as beside GPUs, move no bit on a CPU either."""

import threading

import pytest

from nestpipe.comm import Communicator
from nestpipe.config import build
from nestpipe.schedule import Plan, with_separate_dense_group
from nestpipe.train.config import PipelineSettings
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import Verdict, verify
from support.thread_ranks import run_ranks, thread_communicators

STEPS = 5


def placed(trainer: Trainer, plan: Plan) -> Plan:
    """Only what is compared with `serial` gets the network."""
    return with_separate_dense_group(plan) if plan.shape.overlaps else plan


@pytest.mark.parametrize("plan", ["sparse_dist", "nested"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", ["plain", "clipped", "clipped dense", "scheduled"])
def test_dense_sums_beside_rows_change_no_bit(make_world, monkeypatch, plan, ranks, recipe):
    monkeypatch.setattr(Trainer, "placed", placed)
    world = make_world(optimizer="adam", recipe=recipe)
    networks = thread_communicators(ranks)
    settings = build(PipelineSettings, {"plan": plan, "micro_batches": 2})
    sums: list[tuple[int, str]] = []

    def one(comm: Communicator) -> Verdict:
        def all_reduce_dense(tensor):
            sums.append((comm.rank, threading.current_thread().name))
            networks[comm.rank].all_reduce(tensor)

        comm.all_reduce_dense = all_reduce_dense
        return verify(
            lambda settings: (world.trainer(settings, comm), world.source), settings, steps=STEPS
        )

    for verdict in run_ranks(ranks, one):
        assert verdict.identical, verdict.first_difference
        assert verdict.steps == STEPS
    assert len({thread for rank, thread in sums if rank == 0}) == 1, "sums have one lane"
    # Each batch sums its loss and its gradients.
    assert sorted(rank for rank, _ in sums) == sorted(list(range(ranks)) * 2 * STEPS)
