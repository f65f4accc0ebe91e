"""Rows used where the store has them: the same bits as rows that are copied out and back."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm import LocalCommunicator
from nestpipe.config import Table, build
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.embedding.routing.requests import make_request
from nestpipe.embedding.store.host import NativeStore
from nestpipe.embedding.table_groups import group_tables
from nestpipe.errors import CapacityError
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.evaluate import forward
from nestpipe.train.trainer import Trainer
from support.checkpoints import only_checkpoint
from support.thread_ranks import run_ranks

SAMPLES, BATCH, DIM = 48, 16, 6
TABLES = (
    Table(name="items", dim=DIM, features=("history", "candidate"), init_std=0.3),
    Table(name="tags", dim=DIM, pooling="sum", init_std=0.3),
    Table(
        name="words", dim=DIM, pooling="sum", placement="table", features=("title", "query"),
        init_std=0.3,
    ),
    Table(name="users", dim=3, placement="table", init_std=0.3),
)  # fmt: skip
SUMMED = ("tags", "title", "query")


def make_samples(seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)

    def lists(least: int, most: int, vocabulary: int) -> Jagged:
        lengths = torch.randint(least, most + 1, (SAMPLES,), generator=rng)
        values = torch.randint(0, vocabulary, (int(lengths.sum()),), generator=rng)
        return Jagged(values * 7919 - 50, lengths)

    return Batch(
        SAMPLES,
        {"label": torch.rand(SAMPLES, generator=rng).round()},
        {
            "history": lists(0, 5, 40),
            "candidate": lists(1, 1, 40),
            "tags": lists(0, 20, 900),  # many different keys: their owners add them up
            "title": lists(6, 12, 600),
            "query": lists(4, 12, 600),
            "users": lists(1, 1, 30),
        },
    )


class Samples:
    """All samples in order; rank r takes its contiguous part of each global batch."""

    def __init__(self, samples: Batch) -> None:
        self.samples = samples

    def empty(self) -> Batch:
        return self.samples.empty()

    def batches(
        self, *, global_batch: int, rank: int, ranks: int, seed: int, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        for first in range(start * global_batch, self.samples.size, global_batch):
            size = min(global_batch, self.samples.size - first)
            small, extra = divmod(size, ranks)
            begin = first + rank * small + min(rank, extra)
            yield self.samples.slice(begin, begin + small + (rank < extra))


class Model(nn.Module):
    """A small model that uses every kind of feature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.top = nn.Sequential(nn.Linear(5 * DIM + 3, 8), nn.Tanh(), nn.Linear(8, 1))

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        sample = torch.repeat_interleave(batch.sparse["history"].lengths)
        history = rows["history"].new_zeros(batch.size, DIM).index_add(0, sample, rows["history"])
        parts = [history, *(rows[f] for f in ("candidate", "tags", "title", "query", "users"))]
        logits = self.top(torch.cat(parts, 1)).squeeze(1)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.dense["label"], reduction="sum"
        )
        return Loss(total, batch.size)


def settings(
    *,
    in_place=True,
    native=True,
    optimizer="rowwise_adagrad",
    micro_batches=1,
    plan="serial",
    retrieval="whole",
    exchange="micro",
    comm_dtype="float32",
):
    return TrainSettings(
        batch=BATCH,
        device="cpu",
        native=native,
        in_place=in_place,
        seed=3,
        rows=build(
            RowSettings,
            {"optimizer": optimizer, "lr": 0.05, "eps": 1e-6, "weight_decay": 0.1},
        ),
        dense=DenseSettings(optimizer="adam", lr=0.01),
        pipeline=build(
            PipelineSettings,
            {
                "plan": plan,
                "micro_batches": micro_batches,
                "retrieval": retrieval,
                "exchange": exchange,
                "comm_dtype": comm_dtype,
            },
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
    ranks: int,
    *,
    tables=TABLES,
    save: Path | None = None,
    load: Path | None = None,
    epochs: int = 2,
    **chosen,
) -> dict[str, Tensor]:
    """Everything that is known after training on so many ranks, which are threads."""
    model = Model()

    def one(comm) -> dict[str, Tensor]:
        trainer = Trainer(deepcopy(model), tables, settings(**chosen), comm)
        if load is not None:
            trainer.load(load)
        trainer.fit(Samples(make_samples()), epochs=epochs)  # type: ignore[arg-type]
        if save is not None:
            trainer.save(save)
        result = outcome(trainer)
        trainer.close()
        return result

    merged: dict[str, Tensor] = {}
    for result in [one(LocalCommunicator())] if ranks == 1 else run_ranks(ranks, one):
        for name, value in result.items():
            assert name not in merged or name.startswith("dense."), f"{name} is on two ranks"
            merged[name] = value
    return merged


def assert_same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_samples_choose_sums_where_the_tests_count_on_it():
    group, _ = group_tables(TABLES)
    batch = make_samples().slice(0, BATCH // 2)
    request = make_request(batch.sparse, group, 0, 2)
    summed = (request.row_counts_RC < request.key_counts_RC).any(0).tolist()
    assert summed == [False, True, True]
    assert {f.name for f in group.features if summed[f.table]} == set(SUMMED)


@pytest.mark.parametrize(
    ("optimizer", "ranks", "micro_batches", "exchange"),
    [  # any two values meet
        (optimizer, 1 + (one + two) % 2, *sharing)
        for one, optimizer in enumerate(OPTIMIZERS)
        for two, sharing in enumerate([(1, "micro"), (3, "micro"), (3, "window")])
    ],
)
def test_rows_in_place_and_copied_and_all_plain_give_the_same_bits(
    optimizer, ranks, micro_batches, exchange, monkeypatch
):
    chosen = {"optimizer": optimizer, "micro_batches": micro_batches, "exchange": exchange}
    located = count_calls(monkeypatch, "locate")
    in_place = train(ranks, **chosen)
    assert located
    located.clear()
    assert_same_bits(in_place, train(ranks, in_place=False, **chosen))
    assert_same_bits(in_place, train(ranks, native=False, **chosen))
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert_same_bits(in_place, train(ranks, **chosen))
    assert not located, "only the first run was in place"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("micro_batches", "exchange"), [(1, "micro"), (2, "micro"), (3, "window")])
def test_so_do_they_where_rows_travel_in_bfloat16(ranks, micro_batches, exchange, monkeypatch):
    chosen = {
        "micro_batches": micro_batches,
        "exchange": exchange,
        "comm_dtype": "bfloat16",
        "epochs": 1,
    }
    in_place = train(ranks, **chosen)
    assert_same_bits(in_place, train(ranks, in_place=False, **chosen))
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert_same_bits(in_place, train(ranks, **chosen))


def count_calls(monkeypatch, name: str) -> list[str]:
    """A list that grows with every call of a store's method."""
    calls: list[str] = []
    method = getattr(NativeStore, name)

    def counted(*given):
        calls.append(name)
        return method(*given)

    monkeypatch.setattr(NativeStore, name, counted)
    return calls


@pytest.mark.parametrize("plan", ["dual_buffer", "nested"])
@pytest.mark.parametrize("retrieval", ["whole", "new"])
def test_plans_with_two_buffers_write_to_remembered_places(plan, retrieval, monkeypatch):
    chosen = {"micro_batches": 2, "plan": plan, "retrieval": retrieval}
    by_key = train(2, in_place=False, **chosen)
    written = count_calls(monkeypatch, "scatter")
    by_place = train(2, **chosen)
    assert_same_bits(by_key, by_place)
    new_rows = len(written)
    written.clear()
    train(2, in_place=False, **chosen)
    assert new_rows < len(written), "what has a place is written there, not by its key"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_in_half_precision_are_not_used_in_place(dtype, monkeypatch):
    tables = [replace(table, dtype=dtype) for table in TABLES]
    located = count_calls(monkeypatch, "locate")
    assert_same_bits(train(1, tables=tables), train(1, tables=tables, in_place=False))
    assert not located


def test_a_whole_table_is_on_one_rank_and_learns_what_scattered_rows_learn():
    whole = train(2)
    scattered = train(2, tables=[replace(table, placement="rows") for table in TABLES])
    assert whole.keys() == scattered.keys()
    for name, value in whole.items():
        assert torch.allclose(value, scattered[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_checkpoint_of_whole_tables_loads_on_any_number_of_ranks(tmp_path, ranks, in_place):
    saved = train(2, save=tmp_path, epochs=1)
    checkpoint = only_checkpoint(tmp_path)
    assert_same_bits(saved, train(ranks, load=checkpoint, epochs=1, in_place=in_place))
    resumed = train(ranks, load=checkpoint, epochs=2, in_place=in_place)
    straight = train(2, epochs=2)
    assert resumed.keys() == straight.keys()
    for name, value in straight.items():
        assert torch.allclose(value, resumed[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_makes_no_rows(ranks):
    model = Model()

    def one(comm) -> None:
        trainer = Trainer(deepcopy(model), TABLES, settings(), comm)
        trainer.fit(Samples(make_samples()), epochs=1)  # type: ignore[arg-type]
        before, known = outcome(trainer), [store.num_rows() for store in trainer.stores]
        unseen = Samples(make_samples(seed=1))
        seen = list(forward(trainer, unseen, lambda batch: batch.sparse))  # type: ignore[arg-type]
        assert sum(batch.size for batch, _ in seen) in (SAMPLES, SAMPLES // 2)
        assert all(rows["tags"].abs().sum() > 0 for _, rows in seen)
        assert [store.num_rows() for store in trainer.stores] == known
        assert_same_bits(before, outcome(trainer))
        trainer.close()

    run_ranks(ranks, one)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_full_table_is_an_error_that_changes_no_row(in_place):
    first, then = make_samples().slice(0, BATCH), make_samples().slice(BATCH, SAMPLES)
    items = {key for f in ("history", "candidate") for key in first.sparse[f].values.tolist()}
    tables = [replace(t, max_rows=len(items)) if t.name == "items" else t for t in TABLES]
    trainer = Trainer(Model(), tables, settings(in_place=in_place))
    trainer.fit(Samples(first), epochs=1)  # type: ignore[arg-type]
    rows = [list(store.export()) for store in trainer.stores]
    with pytest.raises(CapacityError, match=f"may have {len(items)}; raise its max_rows"):
        trainer.fit(Samples(then), epochs=2)  # type: ignore[arg-type]
    for before, store in zip(rows, trainer.stores, strict=True):
        for old, new in zip(before, store.export(), strict=True):
            assert old[0] == new[0]
            assert torch.equal(old[1], new[1])
            assert torch.equal(old[2], new[2])
    trainer.close()


def test_an_empty_rank_takes_part():
    one_sample = Samples(make_samples().slice(0, 1))
    model = Model()

    def one(comm) -> int:
        trainer = Trainer(deepcopy(model), TABLES, settings(), comm)
        trainer.fit(one_sample, epochs=2)  # type: ignore[arg-type]
        rows = sum(sum(store.num_rows()) for store in trainer.stores)
        trainer.close()
        return rows

    keys = sum(len(set(jagged.values.tolist())) for jagged in one_sample.samples.sparse.values())
    assert 0 < sum(run_ranks(3, one)) <= keys
