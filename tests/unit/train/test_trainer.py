"""The trainer: the same result on any number of ranks, with any plan, after any restart."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm import LocalCommunicator
from nestpipe.config import Table, build
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.runtime import InlineLanes, ThreadLanes, executor, inject_delays
from nestpipe.trace import Trace
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.loggers import Traffic
from nestpipe.train.trainer import Trainer
from support.checkpoints import only_checkpoint
from support.thread_ranks import run_ranks

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


def settings(
    optimizer="rowwise_adagrad", micro_batches=1, plan="serial", retrieval="whole", native=True
):
    return TrainSettings(
        batch=BATCH,
        device="cpu",
        native=native,
        seed=3,
        rows=build(
            RowSettings,
            {"optimizer": optimizer, "lr": 0.05, "eps": 1e-6, "weight_decay": 0.1},
        ),
        dense=DenseSettings(optimizer="adam", lr=0.01),
        pipeline=build(
            PipelineSettings, {"plan": plan, "micro_batches": micro_batches, "retrieval": retrieval}
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
    ranks=1,
    source=None,
    epochs=8,
    steps=None,
    load=None,
    save=None,
    tables=TABLES,
    lanes=lambda: None,
    delays=None,
    model=Model,
    **chosen,
):
    """Train on so many ranks (threads); all rows together, and the losses of every step.

    With `delays`, a seed, every op takes longer by chance.
    """

    # Made here, not in the threads of the ranks, which share one random state.
    made = model()

    def one(comm) -> tuple[dict[str, Tensor], list[float]]:
        def slower(work):
            if delays is None:
                return work
            return inject_delays(work, seed=delays * 10 + comm.rank, max_ms=1.0)

        trainer = Trainer(
            deepcopy(made), tables, settings(**chosen), comm, lanes=lanes(), around=slower
        )
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


@cache
def reference(ranks, **chosen):
    """What several tests compare with, trained once."""
    return train(ranks, **chosen)


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
    alone, losses = reference(1, optimizer=optimizer)
    together, losses_together = train(ranks, optimizer=optimizer)
    assert len(losses) == 56
    assert losses_together == pytest.approx(losses, rel=1e-4)
    assert_close(alone, together)


class OddlyKept(Model):
    """Weights of three types, one of them kept column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.exact = nn.Linear(3, 1, dtype=torch.float64)
        self.rough = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        loss = super().dense(rows, batch)
        crossed = batch.dense["features"] @ self.turned.t() * self.rough
        return replace(loss, total=loss.total + self.exact(crossed.double()).square().sum())


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_ranks_sum_gradients_of_any_type_and_layout(plan):
    chosen = {"epochs": 2, "model": OddlyKept, "plan": plan}
    alone, losses = train(1, **chosen)
    together, losses_together = train(2, **chosen)
    assert losses_together == pytest.approx(losses, rel=1e-3)
    assert {alone[f"dense.{name}"].dtype for name in ("turned", "exact.weight", "rough")} == {
        *(torch.float32, torch.float64, torch.bfloat16)
    }
    assert_close(alone, together, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("micro_batches", [2, 3, 8])
def test_any_number_of_micro_batches_learns_the_same(micro_batches):
    whole, _ = reference(1)
    split, _ = train(1, micro_batches=micro_batches)
    assert_close(whole, split)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_retrieving_only_new_rows_changes_no_bit(optimizer):
    for ranks in (1, 2):
        chosen = {"optimizer": optimizer, "micro_batches": 2, "epochs": 3}
        whole, _ = train(ranks, **chosen)
        new, _ = train(ranks, retrieval="new", **chosen)
        assert_identical(whole, new)


@pytest.mark.parametrize("plan", ["sparse_dist", "dual_buffer", "frozen_window", "nested"])
@pytest.mark.parametrize("retrieval", ["whole", "new"])
def test_every_exact_plan_changes_no_bit(plan, retrieval):
    serial, _ = reference(2, micro_batches=2, epochs=3)
    other, _ = train(2, micro_batches=2, epochs=3, plan=plan, retrieval=retrieval)
    assert_identical(serial, other)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("plan", ["dual_buffer", "frozen_window", "nested"])
def test_threads_and_random_delays_change_no_bit(plan, ranks):
    serial, serial_losses = reference(ranks, micro_batches=3, epochs=2, lanes=InlineLanes)
    for delays, retrieval in enumerate(["whole", "new"]):
        chosen = {"plan": plan, "micro_batches": 3, "epochs": 2, "retrieval": retrieval}
        threads, losses = train(ranks, lanes=ThreadLanes, delays=delays, **chosen)
        assert losses == serial_losses
        assert_identical(serial, threads)


def test_every_plan_but_serial_runs_on_threads_and_leaves_a_trace():
    for plan, lanes in (("serial", InlineLanes), ("nested", ThreadLanes)):
        trainer = Trainer(Model(), TABLES, settings(plan=plan, micro_batches=2))
        assert isinstance(trainer.lanes, lanes)
        trainer.fit(Samples(make_samples()), epochs=3, steps=16)  # type: ignore[arg-type]
        of_an_epoch = trainer.trace
        names = {span.name for span in of_an_epoch.spans}
        assert {"prefetch 0", "dense 6.1", "writeback 6"} <= names, "the longest run is kept"
        assert of_an_epoch.facts["plan"] == plan
        assert of_an_epoch.facts["samples_per_worker"] == BATCH


def test_a_trace_is_put_together_when_somebody_asks_and_is_that_of_its_run(
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[Trace] = []
    trace_of = executor.trace_of

    def noted(*given: Any) -> Trace:
        made.append(trace_of(*given))
        return made[-1]

    monkeypatch.setattr(executor, "trace_of", noted)
    trainer = Trainer(Model(), TABLES, settings(plan="nested"))
    for steps in (2, 3, 1):
        trainer.fit(Samples(make_samples()), epochs=9, steps=steps)  # type: ignore[arg-type]
    assert not made
    assert {span.batch for span in trainer.trace.spans} == {0, 1, 2}
    assert trainer.trace is made[0]
    assert len(made) == 1
    trainer.fit(Samples(make_samples()), epochs=9, steps=2)  # type: ignore[arg-type]
    assert trainer.trace is made[0], "a shorter run is not kept"


@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.parametrize("retrieval", ["whole", "new"])
def test_rows_that_move_are_counted(plan, retrieval):
    def one(comm) -> Trainer:
        chosen = settings(plan=plan, retrieval=retrieval, micro_batches=2)
        trainer = Trainer(deepcopy(model), TABLES, chosen, comm)
        trainer.fit(Samples(make_samples()))  # type: ignore[arg-type]
        trainer.close()
        return trainer

    model = Model()
    trainers = run_ranks(2, one)
    total = Traffic.total([trainer.traffic for trainer in trainers])
    rows = rows_of_every_batch()
    shared = sum(len(now & before) for before, now in pairwise(rows))
    assert total.batches == 2 * len(rows)
    if (plan, retrieval) == ("serial", "whole"):
        assert total.rows_compared == total.rows_refreshed == 0
    else:
        assert total.rows_compared == sum(map(len, rows[1:]))
        assert total.rows_refreshed == shared
    moved = sum(map(len, rows)) - (shared if retrieval == "new" else 0)
    assert total.rows_read == total.rows_written == moved
    for trainer in trainers:
        # The first weights were shared before training.
        assert 0 < trainer.traffic.bytes_sent < trainer.comm.bytes_sent


def rows_of_every_batch() -> list[set[tuple[str, int]]]:
    """The keys of each global batch, by table."""
    batches = Samples(make_samples()).batches(
        global_batch=BATCH, rank=0, ranks=1, seed=0, epoch=0, start=0
    )
    table_of = {"history": "items", "candidate": "items", "tags": "tags", "users": "users"}
    return [
        {(table, key) for f, table in table_of.items() for key in batch.sparse[f].values.tolist()}
        for batch in batches
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_rows_kept_in_half_precision_do_not_depend_on_the_plan(plan, dtype):
    tables = tuple(replace(table, dtype=dtype) for table in TABLES)
    serial, _ = reference(2, tables=tables, epochs=3)
    other, _ = train(2, tables=tables, epochs=3, plan=plan, retrieval="new")
    assert_identical(serial, other)
    assert not torch.equal(serial["users.3"], reference(2, epochs=3)[0]["users.3"])


def test_two_runs_are_identical():
    assert_identical(train(2)[0], train(2)[0])


def test_the_plain_store_gives_the_same_bits():
    assert_identical(train(1)[0], train(1, native=False)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restart_with_other_ranks_ends_in_the_same_place(optimizer, tmp_path):
    straight, _ = reference(1, optimizer=optimizer)
    train(2, optimizer=optimizer, steps=25, save=tmp_path)
    resumed, losses = train(4, optimizer=optimizer, load=only_checkpoint(tmp_path))
    assert len(losses) == 56 - 25
    assert_close(straight, resumed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_restart_with_the_same_ranks_changes_no_bit(tmp_path, dtype):
    tables = tuple(replace(table, dtype=dtype) for table in TABLES)
    straight, _ = reference(2, tables=tables)
    train(2, steps=25, save=tmp_path, tables=tables)
    resumed, _ = train(2, load=only_checkpoint(tmp_path), tables=tables)
    assert_identical(straight, resumed)


class Passes(Samples):
    """Notes where each pass over it began: epoch and batch."""

    def __init__(self, samples: Batch) -> None:
        super().__init__(samples)
        self.begun: list[tuple[int, int]] = []

    def batches(self, **given: int) -> Iterator[Batch]:
        self.begun.append((given["epoch"], given["start"]))
        return super().batches(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_a_run_in_pieces_reads_each_epoch_once(plan):
    """Reading anew would decode and shuffle a window once more, at each checkpoint."""
    source: Any = Passes(make_samples())
    losses: list[float] = []
    with closing(Trainer(Model(), TABLES, settings(plan=plan))) as trainer:
        for _ in range(14):
            trainer.fit(
                source, epochs=2, steps=1, on_step=lambda report: losses.append(report.loss)
            )
        found = outcome(trainer)
    assert source.begun == [(0, 0), (1, 0)]
    straight, expected = train(1, epochs=2, plan=plan)
    assert losses == expected
    assert_identical(found, straight)


def test_a_run_that_goes_on_elsewhere_reads_anew(tmp_path):
    source: Any = Passes(make_samples())
    other: Any = Passes(make_samples(1))
    with closing(Trainer(Model(), TABLES, settings())) as trainer:
        trainer.fit(source, steps=2)
        trainer.save(tmp_path)
        trainer.fit(other, steps=1)
        trainer.fit(source, steps=1)
        trainer.load(only_checkpoint(tmp_path))
        trainer.fit(source, steps=1)
    assert source.begun == [(0, 0), (0, 3), (0, 2)]
    assert other.begun == [(0, 2)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_uneven_data_never_hangs(ranks, plan):
    rows, losses = train(
        ranks, source=Unequal(make_samples()), epochs=2, plan=plan, micro_batches=2
    )
    assert len(losses) in (4, 14)
    assert rows


def test_losses_fall():
    _, losses = train(1, epochs=30)
    assert sum(losses[-7:]) < 0.7 * sum(losses[:7])


class Undealt(Samples):
    """Gives every rank the whole batch."""

    def batches(self, **given: int) -> Iterator[Batch]:
        return super().batches(**{**given, "rank": 0, "ranks": 1})  # type: ignore[arg-type]


def test_ranks_that_train_the_same_samples_are_told_once(caplog):
    train(2, source=Samples(make_samples()), steps=2)
    assert not caplog.records
    train(2, source=Undealt(make_samples()), steps=2)
    (told,) = caplog.records
    assert told.getMessage().startswith("a batch has 32 samples over 2 ranks, and settings say 16:")


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
    checkpoint = only_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="use that row optimizer"):
        train(1, load=checkpoint, optimizer="adam")
    trainer = Trainer(Model(), TABLES[:2], settings())
    with pytest.raises(CheckpointError, match=r"has a table .users., and the model has none"):
        trainer.load(checkpoint)
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        trainer.load(tmp_path)
    (checkpoint / "dense.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="is damaged: it has 6 bytes"):
        train(1, load=checkpoint)
