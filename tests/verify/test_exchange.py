"""Both exchanges train the same model: what travels differs, and in which order it is added."""

import pytest
import torch

from nestpipe.config import build
from nestpipe.embedding import sharded as tables
from nestpipe.embedding import transports
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.kernels.rows import segments as rows
from nestpipe.train.config import PipelineSettings
from support.thread_ranks import run_ranks

RTOL, ATOL = 2e-4, 2e-6
"""As between numbers of micro-batches."""


def trained(world, ranks: int, **pipeline: object) -> tuple[dict, int, int]:
    """Every row and weight after training; keys that ranks asked for; bytes that they sent."""
    settings = build(PipelineSettings, pipeline)

    def one(comm):
        trainer = world.trainer(settings, comm)
        trainer.fit(world.source)
        numbers = {
            (group.tables[table].name, key): row[: group.dim].clone()
            for group, store in zip(trainer.groups, trainer.stores, strict=True)
            for table, keys, of_table in store.export()
            for key, row in zip(keys.tolist(), of_table, strict=True)
        }
        numbers |= {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.close()
        return numbers, trainer.traffic.keys_asked, trainer.traffic.bytes_sent

    every = run_ranks(ranks, one)
    merged = {name: value for numbers, _, _ in every for name, value in numbers.items()}
    return merged, sum(keys for _, keys, _ in every), sum(sent for _, _, sent in every)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_exchanges_learn_the_same(make_world, ranks, plan, optimizer):
    world = make_world(optimizer=optimizer)
    chosen = {"plan": plan, "micro_batches": 3}
    micro, micro_keys, _ = trained(world, ranks, exchange="micro", **chosen)
    window, window_keys, _ = trained(world, ranks, exchange="window", **chosen)
    assert micro.keys() == window.keys()
    for name, value in micro.items():
        assert torch.allclose(value, window[name], rtol=RTOL, atol=ATOL), name
    assert window_keys < micro_keys


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_a_window_sends_fewer_bytes(make_world, micro_batches):
    """Although it also tells owners the last use of each row, even of rows this narrow."""
    _, _, micro = trained(make_world(), 2, micro_batches=micro_batches, exchange="micro")
    _, _, window = trained(make_world(), 2, micro_batches=micro_batches, exchange="window")
    assert 0 < window < micro


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_window_asks_for_the_keys_of_the_whole_batch(make_world, ranks):
    """However many micro-batches there are."""
    world = make_world(keys="all shared")
    _, whole, _ = trained(world, ranks, micro_batches=1)
    for micro_batches in (2, 3, 4, 8):
        _, shared, _ = trained(world, ranks, micro_batches=micro_batches, exchange="window")
        _, alone, _ = trained(world, ranks, micro_batches=micro_batches, exchange="micro")
        assert shared == whole
        assert alone > whole


def test_a_feature_that_a_model_leaves_unused_gets_no_gradient(make_world):
    """Rows that a later micro-batch uses again begin with none, and none is added."""

    class Forgetful(type(make_world().model)):
        def dense(self, seen, batch):
            users = torch.zeros_like(seen["users"])
            return super().dense({**seen, "users": users}, batch)

    model = Forgetful()
    micro, _, _ = trained(make_world(model=model), 2, micro_batches=3, exchange="micro")
    window, _, _ = trained(make_world(model=model), 2, micro_batches=3, exchange="window")
    users = [name for name in micro if name[0] == "users"]
    assert users
    for name in users:
        assert torch.equal(micro[name], window[name]), name


def test_a_window_frees_its_memory(make_world, monkeypatch):
    flights = []
    writeback = ShardedTables.writeback

    def watched(self, batch):
        flights.append(self.in_flight[batch])
        return writeback(self, batch)

    monkeypatch.setattr(ShardedTables, "writeback", watched)
    trained(make_world(), 2, plan="nested", micro_batches=3, exchange="window")
    assert flights
    assert not any(flight.windows or flight.received for flight in flights)


@pytest.mark.parametrize("exchange", ["micro", "window"])
def test_sums_by_torch_of_natively_routed_rows_have_the_same_bits(
    make_world, exchange, monkeypatch
):
    """As on a GPU, where keys are routed on the host and rows are added by torch."""
    chosen = {"micro_batches": 3, "exchange": exchange}
    native, _, _ = trained(make_world(), 2, **chosen)
    for module in (rows, transports, tables):
        monkeypatch.setattr(module, "use_native", lambda device: False)
    by_torch, _, _ = trained(make_world(), 2, **chosen)
    assert native.keys() == by_torch.keys()
    for name, value in native.items():
        assert torch.equal(value, by_torch[name]), name
