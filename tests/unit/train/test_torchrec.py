"""TorchRec's tables in and out: the same predictions, the same next step, and TorchRec loads it."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import (
    Batch,
    DenseSettings,
    Jagged,
    Loss,
    RowSettings,
    Table,
    Trainer,
    TrainSettings,
)
from nestpipe.errors import NestpipeError
from nestpipe.train.torchrec import (
    export_torchrec,
    import_torchrec,
    jagged_from_kjt,
    kjt_from_jagged,
    tables_from_torchrec,
)

ROOT = Path(__file__).parents[3]
LISTS = {"a": [[1, 2], [], [0]], "b": [[4], [4, 3, 4], [2]]}


@pytest.fixture(scope="module")
def torchrec() -> Any:
    return pytest.importorskip("torchrec", reason="needs `make bench-deps`")


class Sum(nn.Module):
    """Without dense weights: the loss is the sum of what is looked up, per sample squared."""

    def __init__(self, *features: str) -> None:
        super().__init__()
        self.features = features

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in self.features}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        total = torch.stack([rows[name].square().sum() for name in self.features]).sum()
        return Loss(total, batch.size)


class Lists:
    columns = ()

    def __init__(self) -> None:
        self.batch = Batch(3, {}, {name: Jagged.from_lists(of) for name, of in LISTS.items()})

    def batches(self, **_: object) -> Iterator[Batch]:
        return iter([self.batch])

    def empty(self) -> Batch:
        return self.batch.empty()


def trainer_of(collection: Any, *features: str, optimizer: Any = "rowwise_adagrad") -> Trainer:
    settings = TrainSettings(
        batch=3,
        device="cpu",
        rows=RowSettings(optimizer=optimizer, lr=0.05),
        dense=DenseSettings(optimizer="sgd"),
    )
    return Trainer(Sum(*features), tables_from_torchrec(collection), settings)


def configs(torchrec: Any) -> list[Any]:
    kinds = torchrec.PoolingType
    return [
        torchrec.EmbeddingBagConfig(
            name=f"table_{name}",
            embedding_dim=4,
            num_embeddings=5,
            feature_names=[name],
            pooling=pooling,
        )
        for name, pooling in (("a", kinds.SUM), ("b", kinds.MEAN))
    ]


def test_tables_say_what_the_collection_says(torchrec: Any):
    bags = torchrec.EmbeddingBagCollection(tables=configs(torchrec))
    assert tables_from_torchrec(bags) == [
        Table(name="table_a", dim=4, features=("a",), pooling="sum", init_std=0.0),
        Table(name="table_b", dim=4, features=("b",), pooling="mean", init_std=0.0),
    ]
    plain = torchrec.EmbeddingConfig(
        name="t", embedding_dim=4, num_embeddings=5, feature_names=["a", "b"]
    )
    rows = torchrec.EmbeddingCollection(tables=[plain])
    assert tables_from_torchrec(rows)[0].pooling == "none"
    assert tables_from_torchrec(rows)[0].features == ("a", "b")


def test_a_large_collection_goes_in_and_out(torchrec: Any, monkeypatch: pytest.MonkeyPatch):
    """The script of the full size, small: it fails where predictions differ beyond rounding."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    assert import_module("torchrec_roundtrip").main(rows=3000, tables=3, dim=8) == 0


@pytest.mark.parametrize("kind", ["rowwise_adagrad", "adagrad"])
def test_the_next_step_with_imported_state_is_torchrecs(torchrec: Any, kind: str):
    fused = import_module("torchrec.modules.fused_embedding_modules")
    optim = import_module("torchrec.optim")

    torch.manual_seed(0)
    kinds = {"rowwise_adagrad": optim.RowWiseAdagrad, "adagrad": torch.optim.Adagrad}
    theirs = fused.FusedEmbeddingBagCollection(
        configs(torchrec),
        optimizer_type=kinds[kind],
        optimizer_kwargs={"lr": 0.05, "eps": 1e-8},
        device=torch.device("cpu"),
    )
    source = Lists()

    def step() -> None:
        pooled = theirs(kjt_from_jagged(source.batch.sparse)).to_dict()
        (torch.stack([of.square().sum() for of in pooled.values()]).sum() / 3).backward()

    for _ in range(3):
        step()
    ours = trainer_of(theirs, "a", "b", optimizer=kind)
    state = theirs.fused_optimizer().state_dict()
    assert import_torchrec(ours, theirs.state_dict(), optimizer_state=state) == {
        "table_a": 5,
        "table_b": 5,
    }
    ours.fit(source)  # type: ignore[arg-type]
    step()
    found = export_torchrec(ours, {"table_a": 5, "table_b": 5})
    for name, wanted in theirs.state_dict().items():
        torch.testing.assert_close(found[name], wanted.cpu(), rtol=1e-5, atol=1e-6)


def test_indices_may_stand_for_other_keys(torchrec: Any):
    config = torchrec.EmbeddingConfig(
        name="t", embedding_dim=4, num_embeddings=3, feature_names=["a"]
    )
    theirs = torchrec.EmbeddingCollection(tables=[config])
    ours = trainer_of(theirs, "a")
    keys = {"t": torch.tensor([10**12, -5, 7])}
    import_torchrec(ours, theirs.state_dict(), keys=keys)
    weights = theirs.state_dict()["embeddings.t.weight"]
    assert torch.equal(ours.rows_of("t", keys["t"]), weights)
    again = export_torchrec(ours, {"t": 3}, prefix="model.", keys=keys)
    assert torch.equal(again["model.embeddings.t.weight"], weights)


def test_keyed_jagged_tensors_go_both_ways(torchrec: Any):
    sparse = Lists().batch.sparse
    kjt = kjt_from_jagged(sparse)
    assert kjt.keys() == ["a", "b"]
    for name, of in jagged_from_kjt(kjt).items():
        assert of.to_lists() == LISTS[name]
    narrow = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["a"],
        values=torch.tensor([1, 2], dtype=torch.int32),
        lengths=torch.tensor([1, 1], dtype=torch.int32),
    )
    assert jagged_from_kjt(narrow)["a"].values.dtype == torch.int64


def weighted_kjt(torchrec: Any) -> Any:
    one = torch.ones(1, dtype=torch.int64)
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["a"], values=one, lengths=one, weights=torch.ones(1)
    )


def test_rows_that_no_index_has_are_told(torchrec: Any, caplog: pytest.LogCaptureFixture):
    bags = torchrec.EmbeddingBagCollection(tables=configs(torchrec))
    trainer = trainer_of(bags, "a", "b")
    counts = import_torchrec(trainer, bags.state_dict())
    export_torchrec(trainer, counts)
    assert not caplog.text
    export_torchrec(trainer, {**counts, "table_a": 2})
    assert "table 'table_a' has 5 rows and num_embeddings is 2" in caplog.text


def test_what_does_not_map_is_told(torchrec: Any):
    bags = torchrec.EmbeddingBagCollection(tables=configs(torchrec))
    ours, state = trainer_of(bags, "a", "b"), bags.state_dict()
    mistakes = {
        "is no collection of TorchRec": lambda: tables_from_torchrec(nn.Linear(1, 1)),
        "has no rows of 'table_b'": lambda: import_torchrec(
            ours, {"x.embedding_bags.table_a.weight": torch.zeros(5, 4)}
        ),
        "give 5 rows of dim 4": lambda: import_torchrec(
            ours, {name: value[:, :3] for name, value in state.items()}
        ),
        "are a list; gather them": lambda: import_torchrec(ours, {key: [] for key in state}),
        "has no momentum1": lambda: import_torchrec(ours, state, optimizer_state={"state": {}}),
        "num_embeddings has no 'table_a'": lambda: export_torchrec(ours, {}),
        "give a torch.int64 for each of its 5": lambda: import_torchrec(
            ours, state, keys={"table_a": torch.zeros(2)}
        ),
        "has weights; pass them on": lambda: jagged_from_kjt(weighted_kjt(torchrec)),
    }
    for told, act in mistakes.items():
        with pytest.raises(NestpipeError) as caught:
            act()
        assert told in str(caught.value)
