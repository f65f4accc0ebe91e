"""A model without a prefix is served: its scores are those of training, whatever is beside it."""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from nestpipe import Dlrm, DlrmConfig, Table, Trainer, TrainSettings
from nestpipe.batch import Batch
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import MISSING, Column
from nestpipe.errors import CheckpointError, ConfigError, DataError, NestpipeError
from nestpipe.jagged import Jagged
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.score_model import ScoreModel, open_model
from nestpipe.serve.types import Context, History, RankItem, RankRequest, ServeSettings, Signal
from nestpipe.train.checkpoint import describe_model
from nestpipe.train.job import JobConfig, make_job
from support.own_model import write_own_model

USERS, ITEMS = [[7], [8], [7]], [[1, 2], [3], [4]]
NUMBERS = torch.tensor([[0.5, -1.0], [2.0, 0.25], [0.0, 1.0]])
NONE = History(np.zeros(0, np.int64))


class Clicks:
    """A source of one batch, again and again."""

    def __init__(self) -> None:
        sparse = {"user": Jagged.from_lists(USERS), "item": Jagged.from_lists(ITEMS)}
        dense = {"features": NUMBERS, "label": torch.tensor([1.0, 0.0, 1.0])}
        self.batch = Batch(3, dense, sparse)

    def batches(self, **_: object):
        return iter([self.batch] * 4)

    def empty(self) -> Batch:
        return self.batch.empty()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Trainer]:
    """The checkpoint of a DLRM, and its trainer."""
    torch.manual_seed(0)
    model = Dlrm(DlrmConfig(features=("user", "item"), dense_features=2, dim=4))
    tables = [Table(name=name, dim=4, pooling="sum", init_std=0.5) for name in ("user", "item")]
    trainer = Trainer(model, tables, TrainSettings(batch=3, device="cpu"))
    trainer.fit(Clicks())  # type: ignore[arg-type]
    return trainer.save(tmp_path), trainer


def item(user: int, candidates: list[int], numbers: list[float]) -> RankItem:
    context = Context({"user": np.array([user])}, {"features": np.array(numbers, np.float32)})
    return RankItem(NONE, np.array(candidates), context=context)


def logits(trainer: Trainer, user: int, candidates: list[int], numbers: list[float]) -> np.ndarray:
    """By hand: the trainer's rows through the trainer's model."""
    count = len(candidates)
    rows = {
        "user": trainer.rows_of("user", torch.tensor([user] * count)),
        "item": trainer.rows_of("item", torch.tensor(candidates)),
    }
    batch = Batch(count, {"features": torch.tensor([numbers] * count)})
    assert isinstance(trainer.model, Dlrm)
    return trainer.model.logits(rows, batch).detach().numpy()


def test_a_dlrm_scores_as_it_was_trained_also_keys_never_seen(saved: tuple[Path, Trainer]):
    path, trainer = saved
    model = open_model(path, "cpu")
    asked = [(7, [1, 3, 999], [0.5, -1.0]), (5, [4, 2], [1.0, 2.0])]
    together = model.rank([item(*one) for one in asked])
    for one, scores in zip(asked, together, strict=True):
        np.testing.assert_allclose(scores, logits(trainer, *one), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model.rank([item(*one)])[0], scores, rtol=1e-5, atol=1e-6)


def test_several_keys_of_a_candidate_are_pooled(saved: tuple[Path, Trainer]):
    path, trainer = saved
    model = open_model(path, "cpu", candidate_feature="user")
    lists = [np.array(keys) for keys in ITEMS]
    context = Context(
        candidate_keys={"item": lists}, candidate_values={"features": NUMBERS.numpy()}
    )
    scores = model.rank([RankItem(NONE, np.array([7, 8, 7]), context=context)])[0]
    rows = {
        "user": trainer.rows_of("user", torch.tensor([7, 8, 7])),
        "item": torch.stack([trainer.rows_of("item", torch.tensor(k)).sum(0) for k in ITEMS]),
    }
    assert isinstance(trainer.model, Dlrm)
    wanted = trainer.model.logits(rows, Clicks().batch).detach().numpy()
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-6)


def test_an_instance_answers_without_a_history_and_signals_do_nothing(saved: tuple[Path, Trainer]):
    path, trainer = saved
    settings = ServeSettings(relay=False, host_mb=0.0, target_ms=5000)
    with Instance(open_model(path, "cpu"), settings) as instance:
        assert instance.prefetch(Signal("u", NONE)) == "not_at_risk"
        asked = item(7, [1, 2], [0.5, -1.0])
        long = History(np.array([1, 2, 3]))  # the model reads none, and nothing is cached
        request = RankRequest("u", long, NONE, asked.candidates_C, context=asked.context)
        answer = instance.rank(request).result(timeout=60)
    np.testing.assert_allclose(answer.scores_C, logits(trainer, 7, [1, 2], [0.5, -1.0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (Context(), "reads 'user', which the request does not have"),
        (Context({"user": np.array([1])}), "reads 'features', which the request does not have"),
        (
            Context({"user": np.array([1])}, {"features": np.zeros(5, np.float32)}),
            "`score` of Dlrm failed (RuntimeError",
        ),
        (
            Context(candidate_keys={"user": [np.array([1])]}),
            "candidate_features.user has 1 lists for 2 candidates",
        ),
        (
            Context({"user": np.array([1])}, candidate_values={"features": NUMBERS.numpy()}),
            "candidate_values.features has 3 entries for 2 candidates",
        ),
    ],
)
def test_what_a_request_lacks_is_told(saved: tuple[Path, Trainer], context: Context, told: str):
    model = open_model(saved[0], "cpu")
    with pytest.raises(NestpipeError) as caught:
        model.rank([RankItem(NONE, np.array([1, 2]), context=context)])
    assert told in str(caught.value)
    assert caught.value.exit_status == 2


def test_which_feature_candidates_are_keys_of_must_be_known(saved: tuple[Path, Trainer]):
    with pytest.raises(ConfigError, match="candidate_feature is 'itm', but the tables of"):
        open_model(saved[0], "cpu", candidate_feature="itm")
    with pytest.raises(ConfigError, match="dtype is 'bfloat16', which is for rankers"):
        open_model(saved[0], "cpu", "bfloat16")


def test_a_model_of_ones_own_is_made_again_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kind = write_own_model(tmp_path, "own_towers_to_serve")
    data = {"samples": 400, "num_tables": 2, "num_keys": 50, "keys_per_sample": [1, 1]}
    config = build(
        JobConfig,
        {
            "data": {"synthetic": data},
            "model": {"kind": kind, "config": {"dim": 4}},
            "run": {"device": "cpu", "batch": 50},
        },
    )
    job = make_job(config, LocalCommunicator())
    job.trainer.fit(job.train)
    path = job.trainer.save(tmp_path / "out")
    with pytest.raises(ConfigError, match="say which one candidates are keys of"):
        open_model(path, "cpu")
    model = open_model(path, "cpu", candidate_feature="c1")
    assert isinstance(model, ScoreModel)
    context = Context({"c0": np.array([3])})
    scores = model.rank([RankItem(NONE, np.array([1, 2]), context=context)])[0]
    rows = {
        "c0": job.trainer.rows_of("c0", torch.tensor([3, 3])),
        "c1": job.trainer.rows_of("c1", torch.tensor([1, 2])),
    }
    wanted = job.trainer.model.score(rows, Batch(2)).detach().numpy()  # type: ignore[operator]
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-6)


def test_a_model_without_scores_is_not_served(tmp_path: Path):
    config = build(JobConfig, {"data": {"synthetic": {"flavour": "sequence", "samples": 50}}})
    path = make_job(config, LocalCommunicator()).trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no model that can be served"):
        open_model(path, "cpu")


def test_rankings_with_other_columns_are_answered_one_by_one(saved: tuple[Path, Trainer]):
    model = open_model(saved[0], "cpu")
    odd = RankItem(NONE, np.array([1]), context=Context({"user": np.array([1])}))
    with pytest.raises(DataError, match="different columns"):
        model.rank([item(7, [1], [0.0, 0.0]), odd])


COLUMNS = (
    Column("user", "keys", "int64", single=True),
    Column("item", "keys", "int64"),
    Column("features", "features", "float32", ("price", "age")),
)


@pytest.fixture
def with_columns(saved: tuple[Path, Trainer]) -> tuple[ScoreModel, Trainer]:
    """The model of a checkpoint that says what the columns of its data were."""
    path, trainer = saved
    columns = {"columns": [asdict(column) for column in COLUMNS]}
    trainer.about_model = {**describe_model(trainer.model), **columns}
    model = open_model(trainer.save(path.parent / "columns"), "cpu")
    assert isinstance(model, ScoreModel)
    return model, trainer


def test_no_key_of_a_feature_with_one_is_the_missing_one(with_columns: tuple[ScoreModel, Trainer]):
    model, trainer = with_columns
    numbers = np.array([0.5, -1.0], np.float32)
    context = Context({"user": np.zeros(0, np.int64)}, {"features": numbers})
    (scores,) = model.rank([RankItem(NONE, np.array([1, 3]), context=context)])
    expected = logits(trainer, MISSING, [1, 3], [0.5, -1.0])
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "numbers", "told"),
    [
        ([7, 8], [0.5, 1.0], "feature user has 2 keys for a sample, and training had one"),
        ([7], [0.5], "values.features has 1 number for a sample, and the model reads 2: price, a"),
        ([7], [1.0, 2.0, 3.0], "values.features has 3 numbers for a sample"),
    ],
)
def test_a_request_of_another_shape_than_the_data_is_refused(
    with_columns: tuple[ScoreModel, Trainer], keys: list[int], numbers: list[float], told: str
):
    context = Context({"user": np.array(keys)}, {"features": np.array(numbers, np.float32)})
    with pytest.raises(DataError, match=told):
        with_columns[0].rank([RankItem(NONE, np.array([1, 3]), context=context)])
