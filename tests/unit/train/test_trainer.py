"""The trainer: the same result on any number of ranks, with any plan, after any restart."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm import LocalCommunicator, run_ranks
from nestpipe.config import Table, build
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.train.settings import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.trainer import Trainer

SAMPLES, BATCH = 100, 16
TABLES = (
    Table(name="items", dim=6, features=("history", "candidate"), init_std=0.3),
    Table(name="tags", dim=6, pooling="sum", init_std=0.3),
    Table(name="users", dim=3, init_std=0.3),
)


def make_samples(seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)

    def lists(most: int, vocabulary: int) -> Jagged:
        lengths = torch.randint(0, most + 1, (SAMPLES,), generator=rng)
        values = torch.randint(0, vocabulary, (int(lengths.sum()),), generator=rng) * 7919 - 50
        return Jagged(values, lengths)

    return Batch(
        SAMPLES,
        {
            "label": torch.rand(SAMPLES, generator=rng).round(),
            "features": torch.randn(SAMPLES, 4, generator=rng),
        },
        {
            "history": lists(5, 40),
            "candidate": Jagged.one_each(torch.randint(0, 40, (SAMPLES,), generator=rng) * 7919),
            "tags": lists(3, 12),
            "users": Jagged.one_each(torch.randint(0, 30, (SAMPLES,), generator=rng)),
        },
    )


class Samples:
    """All samples in order; rank r takes its contiguous part of each global batch."""

    def __init__(self, samples: Batch) -> None:
        self.samples = samples

    def empty(self) -> Batch:
        return self.samples.empty()

    def batches(
        self, *, global_batch: int, rank: int, ranks: int, seed: int, epoch: int, start: int
    ) -> Iterator[Batch]:
        for first in range(start * global_batch, self.samples.size, global_batch):
            size = min(global_batch, self.samples.size - first)
            small, extra = divmod(size, ranks)
            begin = first + rank * small + min(rank, extra)
            yield self.samples.slice(begin, begin + small + (rank < extra))


class Unequal(Samples):
    """Rank 0 runs out of data long before the others, and the last rank has none at all."""

    def batches(self, **given: int) -> Iterator[Batch]:
        every = list(super().batches(**given))  # type: ignore[arg-type]
        rank, ranks = given["rank"], given["ranks"]
        return iter(every[:2] if rank == 0 else [] if rank == ranks - 1 else every)


class Model(nn.Module):
    """A small model that uses every kind of feature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.top = nn.Sequential(nn.Linear(6 + 6 + 6 + 3 + 4, 8), nn.Tanh(), nn.Linear(8, 1))

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        lengths = batch.sparse["history"].lengths
        sample = torch.repeat_interleave(lengths)
        history = rows["history"].new_zeros(batch.size, 6).index_add(0, sample, rows["history"])
        parts = [history, rows["candidate"], rows["tags"], rows["users"], batch.dense["features"]]
        logits = self.top(torch.cat(parts, 1)).squeeze(1)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.dense["label"], reduction="sum"
        )
        return Loss(total, batch.size)


def settings(optimizer="rowwise_adagrad", micros=1, plan="serial", retrieval="whole", native=True):
    return TrainSettings(
        batch=BATCH,
        device="cpu",
        native=native,
        seed=3,
        rows=build(RowSettings, {"optimizer": optimizer, "lr": 0.05, "eps": 1e-6}),
        dense=DenseSettings(optimizer="adam", lr=0.01),
        pipeline=build(
            PipelineSettings, {"plan": plan, "micro_batches": micros, "retrieval": retrieval}
        ),
    )


def outcome(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that training changes: every row with its state, and every dense weight."""
    result = {f"dense.{k}": v.clone() for k, v in trainer.model.state_dict().items()}
    for group, store in zip(trainer.groups, trainer.stores, strict=True):
        for number, keys, rows in store.export():
            for key, row in zip(keys.tolist(), rows, strict=True):
                result[f"{group.tables[number].name}.{key}"] = row.clone()
    return result


def train(
    ranks=1, source=None, epochs=8, steps=None, load=None, save=None, tables=TABLES, **chosen
):
    """Train on so many ranks (threads); all rows together, and the losses of every step."""

    # Made here, not in the threads of the ranks, which share one random state.
    model = Model()

    def one(comm) -> tuple[dict[str, Tensor], list[float]]:
        trainer = Trainer(deepcopy(model), tables, settings(**chosen), comm)
        if load is not None:
            trainer.load(load)
        losses: list[float] = []
        trainer.fit(
            source or Samples(make_samples()),  # type: ignore[arg-type]
            epochs=epochs,
            steps=steps,
            on_step=lambda report: losses.append(report.loss),
        )
        if save is not None:
            trainer.save(save)
        result = outcome(trainer)
        trainer.close()
        return result, losses

    results = [one(LocalCommunicator())] if ranks == 1 else run_ranks(ranks, one)
    merged: dict[str, Tensor] = {}
    for rows, losses in results:
        assert losses == results[0][1], "every rank reports the loss of the global batch"
        for name, value in rows.items():
            if name in merged:
                assert name.startswith("dense."), f"{name} is on two ranks"
                assert torch.equal(merged[name], value), f"{name} differs between ranks"
            merged[name] = value
    return merged, results[0][1]


def assert_close(first, second, rtol=2e-4, atol=2e-5):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.allclose(value, second[name], rtol=rtol, atol=atol), name


def assert_identical(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_learns_the_same(optimizer, ranks):
    alone, losses = train(1, optimizer=optimizer)
    together, losses_together = train(ranks, optimizer=optimizer)
    assert len(losses) == 56
    assert losses_together == pytest.approx(losses, rel=1e-4)
    assert_close(alone, together)


@pytest.mark.parametrize("micros", [2, 3, 8])
def test_any_number_of_micro_batches_learns_the_same(micros):
    whole, _ = train(1)
    split, _ = train(1, micros=micros)
    assert_close(whole, split)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_retrieving_only_new_rows_changes_no_bit(optimizer):
    for ranks in (1, 2):
        whole, _ = train(ranks, optimizer=optimizer, micros=2)
        new, _ = train(ranks, optimizer=optimizer, micros=2, retrieval="new")
        assert_identical(whole, new)


@pytest.mark.parametrize("plan", ["sparse_dist", "dual_buffer", "frozen_window", "nested"])
@pytest.mark.parametrize("retrieval", ["whole", "new"])
def test_every_exact_plan_changes_no_bit(plan, retrieval):
    serial, _ = train(2, micros=2)
    other, _ = train(2, micros=2, plan=plan, retrieval=retrieval)
    assert_identical(serial, other)


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_rows_kept_in_bfloat16_do_not_depend_on_the_plan(plan):
    tables = [replace(table, dtype="bfloat16") for table in TABLES]
    serial, _ = train(2, tables=tables)
    other, _ = train(2, tables=tables, plan=plan, retrieval="new")
    assert_identical(serial, other)
    assert not torch.equal(serial["users.3"], train(2)[0]["users.3"])


def test_two_runs_are_identical():
    assert_identical(train(2)[0], train(2)[0])


def test_the_plain_store_gives_the_same_bits():
    assert_identical(train(1)[0], train(1, native=False)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restart_with_other_ranks_ends_in_the_same_place(optimizer, tmp_path):
    straight, _ = train(1, optimizer=optimizer)
    train(2, optimizer=optimizer, steps=25, save=tmp_path)
    (checkpoint,) = tmp_path.iterdir()
    resumed, losses = train(4, optimizer=optimizer, load=checkpoint)
    assert len(losses) == 56 - 25
    assert_close(straight, resumed)


def test_a_restart_with_the_same_ranks_changes_no_bit(tmp_path):
    straight, _ = train(2)
    train(2, steps=25, save=tmp_path)
    resumed, _ = train(2, load=next(tmp_path.iterdir()))
    assert_identical(straight, resumed)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_uneven_data_never_hangs(ranks, plan):
    rows, losses = train(ranks, source=Unequal(make_samples()), epochs=2, plan=plan, micros=2)
    assert len(losses) in (4, 14)
    assert rows


def test_losses_fall():
    _, losses = train(1, epochs=30)
    assert sum(losses[-7:]) < 0.7 * sum(losses[:7])


def test_data_without_samples_is_refused():
    with pytest.raises(ConfigError, match="no samples"):
        train(1, source=Samples(make_samples().empty()))


def test_a_model_without_its_halves_is_refused():
    with pytest.raises(ConfigError, match="sparse_keys"):
        Trainer(nn.Linear(1, 1), TABLES)


def test_features_without_a_table_are_named():
    tables = [table for table in TABLES if table.name != "users"]
    trainer = Trainer(Model(), tables, settings())
    with pytest.raises(ConfigError, match="feature 'users'"):
        trainer.fit(Samples(make_samples()))  # type: ignore[arg-type]


def test_a_checkpoint_of_other_tables_or_another_optimizer_is_refused(tmp_path):
    train(1, steps=3, save=tmp_path)
    checkpoint = next(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="use that row optimizer"):
        train(1, load=checkpoint, optimizer="adam")
    trainer = Trainer(Model(), TABLES[:2], settings())
    with pytest.raises(CheckpointError, match="declare the same ones"):
        trainer.load(checkpoint)
    with pytest.raises(CheckpointError, match=r"no run\.json"):
        trainer.load(tmp_path)
    (checkpoint / "dense.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(1, load=checkpoint)
