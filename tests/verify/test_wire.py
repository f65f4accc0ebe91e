"""What bfloat16 between ranks rounds, seen from a whole run: rows, gradients, and nothing else."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.config import Table, build
from nestpipe.embedding import sharded as tables
from nestpipe.embedding import transports
from nestpipe.jagged import Jagged
from nestpipe.kernels.rows import segments as rows
from nestpipe.models import Loss
from nestpipe.train.config import PipelineSettings, TrainSettings
from nestpipe.train.evaluate import forward
from nestpipe.train.trainer import Trainer
from support import thread_ranks as threads
from support.thread_ranks import run_ranks

DIM, SAMPLES, KEYS = 4, 12, 5
LR = 0.5


class Weighted(nn.Module):
    """The loss is a sum of rows times given numbers, which are thus their gradients."""

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        total = (rows["items"] * batch.dense["times"]).sum() + (rows["users"] * 0.3).sum()
        return Loss(total, batch.size)


def make_samples() -> Batch:
    """One key of either table in each sample; all keys come on every rank."""
    times = torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1))
    keys = torch.arange(SAMPLES) % KEYS
    sparse = {"items": Jagged.one_each(keys), "users": Jagged.one_each(keys + 100)}
    return Batch(SAMPLES, {"times": times}, sparse)


class OneBatch:
    """One global batch; ranks have equal parts."""

    num_samples = SAMPLES

    def empty(self) -> Batch:
        return make_samples().empty()

    def batches(self, *, rank: int, ranks: int, start: int = 0, **_: int) -> Iterator[Batch]:
        part = SAMPLES // ranks
        return iter([make_samples().slice(rank * part, (rank + 1) * part)][start:])


def make_trainer(comm, **pipeline: object) -> Trainer:
    given = {
        "batch": SAMPLES,
        "device": "cpu",
        "rows": {"optimizer": "sgd", "lr": LR},
        "pipeline": pipeline,
    }
    two_stores = [
        Table(name="items", dim=DIM, init_std=0.3),
        Table(name="users", dim=2, init_std=0.3),
    ]
    return Trainer(Weighted(), two_stores, build(TrainSettings, given), comm)


def seen_by(ranks: int, wire: str) -> tuple[Tensor, Tensor]:
    """The rows of all samples as the model sees them, and as they are stored."""

    def one(comm) -> tuple[Tensor, Tensor]:
        trainer = make_trainer(comm, comm_dtype=wire)
        trainer.fit(OneBatch())  # type: ignore[arg-type]
        ((_, seen),) = forward(trainer, OneBatch(), lambda batch: batch.sparse)  # type: ignore[arg-type]
        stored = trainer.rows_of("items", make_samples().sparse["items"].values)
        trainer.close()
        return seen["items"].detach().clone(), stored

    every = run_ranks(ranks, one)
    return torch.cat([seen for seen, _ in every]), every[0][1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_model_sees_rounded_rows_whoever_owns_them(ranks):
    seen, stored = seen_by(ranks, "bfloat16")
    assert torch.equal(seen, stored.bfloat16().float())
    assert not torch.equal(seen, stored), "the stored rows are finer"
    seen, stored = seen_by(ranks, "float32")
    assert torch.equal(seen, stored)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("exchange", ["micro", "window"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_gradient_is_rounded_once_on_its_way(
    ranks, micro_batches, exchange, native, monkeypatch
):
    """That of a micro-batch, or, where they share rows, of all micro-batches of a rank."""
    monkeypatch.setenv("NESTPIPE_NATIVE", native)
    keys = torch.arange(KEYS)

    def one(comm) -> tuple[Tensor, Tensor]:
        trainer = make_trainer(
            comm, comm_dtype="bfloat16", micro_batches=micro_batches, exchange=exchange
        )
        before = trainer.rows_of("items", keys)
        trainer.fit(OneBatch())  # type: ignore[arg-type]
        after = trainer.rows_of("items", keys)
        trainer.close()
        return before, after

    before, after = run_ranks(ranks, one)[0]
    pieces = ranks if exchange == "window" else ranks * micro_batches
    part, times = SAMPLES // pieces, make_samples().dense["times"]
    expected = torch.zeros(KEYS, DIM)
    for piece in range(pieces):
        sums = torch.zeros(KEYS, DIM)
        for sample in range(piece * part, (piece + 1) * part):
            sums[sample % KEYS] += times[sample]
        expected += sums.bfloat16().float()
    change = before - after
    assert torch.allclose(change, LR * expected / SAMPLES, rtol=1e-5, atol=1e-6)


def traffic_of(make_world, monkeypatch, **pipeline: object) -> dict[str, dict[torch.dtype, int]]:
    """For each kind of op, how many numbers of each type two ranks exchange."""
    numbers: dict[str, dict[torch.dtype, int]] = defaultdict(lambda: defaultdict(int))
    send = threads._ThreadCommunicator.all_to_all

    def counted(self, received, sent, *splits):
        numbers[self.op_label.what.split()[0]][sent.dtype] += sent.numel()
        send(self, received, sent, *splits)

    def one(comm) -> None:
        world = make_world()
        trainer = world.trainer(build(PipelineSettings, pipeline), comm)
        trainer.fit(world.source)
        trainer.close()

    with monkeypatch.context() as patch:
        patch.setattr(threads._ThreadCommunicator, "all_to_all", counted)
        run_ranks(2, one)
    return numbers


@pytest.mark.parametrize("exchange", ["micro", "window"])
def test_rows_and_gradients_travel_in_bfloat16_and_the_rest_as_ever(
    make_world, exchange, monkeypatch
):
    chosen = {"plan": "nested", "micro_batches": 2, "exchange": exchange}
    whole = traffic_of(make_world, monkeypatch, comm_dtype="float32", **chosen)
    half = traffic_of(make_world, monkeypatch, comm_dtype="bfloat16", **chosen)
    assert whole.keys() == half.keys()
    for kind in ("rows", "grads"):
        assert set(whole[kind]) == {torch.float32}
        assert set(half[kind]) == {torch.bfloat16}
        assert half[kind][torch.bfloat16] > 0
    for kind in whole.keys() - {"rows", "grads"}:
        assert set(whole[kind]) == set(half[kind])


@pytest.mark.parametrize("exchange", ["micro", "window"])
def test_sums_by_torch_round_as_native_ones_do(make_world, exchange, monkeypatch):
    """As on a GPU, where keys are routed on the host and rows are added by torch."""
    settings = build(
        PipelineSettings, {"micro_batches": 3, "exchange": exchange, "comm_dtype": "bfloat16"}
    )

    def outcome() -> list[list[tuple[int, Tensor, Tensor]]]:
        world = make_world()

        def one(comm) -> list[tuple[int, Tensor, Tensor]]:
            trainer = world.trainer(settings, comm)
            trainer.fit(world.source)
            stored = [
                (table, keys.clone(), of_table.clone())
                for store in trainer.stores
                for table, keys, of_table in store.export()
            ]
            trainer.close()
            return stored

        return run_ranks(2, one)

    native = outcome()
    for module in (rows, transports, tables):
        monkeypatch.setattr(module, "use_native", lambda device: False)
    for mine, theirs in zip(native, outcome(), strict=True):
        for (_, keys, of_native), (_, same_keys, by_torch) in zip(mine, theirs, strict=True):
            assert torch.equal(keys, same_keys)
            assert torch.equal(of_native, by_torch)
