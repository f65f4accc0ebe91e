"""A model of the user's own through the commands: train, resume, eval, verify, and what it says."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import (
    Batch,
    DataConfig,
    Jagged,
    Loss,
    ParquetConfig,
    Table,
    Trainer,
    TrainSettings,
    open_source,
    pool_rows,
)
from nestpipe.checkpoint.folder import open_checkpoint
from nestpipe.cli.app import main
from support.own_model import write_own_model

NAME = "own_towers_of_the_cli"
SMALL = (
    *("--set", "data.synthetic.samples=1000"),
    *("--set", "data.synthetic.test_samples=200"),
    *("--set", "data.synthetic.num_tables=3"),
    *("--set", "data.synthetic.num_keys=200"),
    *("--set", "run.batch=100"),
    *("--set", f"model.kind={NAME}:Towers"),
    *("--set", "model.config.dim=4"),
)
Run = Callable[..., tuple[object, str, str]]


@pytest.fixture
def run(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Commands in a folder that holds the module."""
    write_own_model(tmp_path, NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def go(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    yield go
    sys.modules.pop(NAME, None)


def test_it_trains_goes_on_and_is_evaluated_from_its_checkpoint_alone(run: Run, tmp_path: Path):
    status, _, said = run("train", *SMALL, "--set", "run.checkpoint=out", "--set", "run.steps=4")
    assert status == 0, said
    manifest = open_checkpoint(tmp_path / "out/step-00000004").manifest
    assert manifest.model["kind"] == f"{NAME}:Towers"
    assert manifest.model["config"] == {"dim": 4}
    assert [column["name"] for column in manifest.model["columns"]][:3] == ["c0", "c1", "c2"]
    more = ("--resume", "auto", "--set", "run.checkpoint=out", "--set", "run.steps=8")
    status, _, said = run("train", *more)
    assert status == 0, said
    status, out, said = run("eval", "out", "--json", "-")
    assert status == 0, said
    assert json.loads(out)["samples"] == 200


def test_a_changed_config_of_it_is_refused_on_resume(run: Run):
    assert run("train", *SMALL, "--set", "run.checkpoint=out", "--set", "run.steps=2")[0] == 0
    changed = ("--set", "run.checkpoint=out", "--set", "model.config.dim=5")
    status, _, said = run("train", *SMALL, *changed, "--resume", "auto")
    assert status == 2
    assert "model.config.dim is 5 and was 4" in said


def test_plans_change_no_bit_of_it(run: Run):
    status, out, said = run(
        "verify", *SMALL, "--steps", 4, "--set", "pipeline.micro_batches=2", "--plan", "nested"
    )
    assert status == 0, said
    assert "identical: nested and serial" in out


def test_it_is_timed_by_plans_that_take_turns(run: Run):
    few = ("--ranks", 1, "--rounds", 2, "--steps", 3)
    status, out, said = run(
        "bench", "train", *SMALL, *few, "--plan", "serial,nested", "--json", "-"
    )
    assert status == 0, said
    results = json.loads(out)["results"]
    assert [result["plan"] for result in results] == ["serial", "nested"]
    for result in results:
        assert (result["config"], result["rounds"]) == (f"{NAME}:Towers", 2)
        low, high = result["nestpipe_samples_per_s_range"]
        assert 0 < low <= result["nestpipe_samples_per_s"] <= high
        assert result["ratio"] is None
    status, out, said = run("bench", "train", *SMALL, *few, "--plan", "serial")
    assert status == 0, said
    assert f"{NAME}:Towers, serial, NestPipe" in " ".join(out.split())
    status, _, said = run("bench", "train", *SMALL, *few, "--plan", "sreial")
    assert (status, said.count("\n")) == (2, 1), said
    assert "plan is 'sreial'" in said


def test_a_wrong_key_of_its_section_names_the_nearest(run: Run):
    status, _, said = run("train", *SMALL, "--set", "model.config.dmi=4")
    assert (status, said) == (2, "error: unknown key model.config.'dmi'; did you mean dim?\n")


class Weighed(nn.Module):
    """Reads the weights that it is told to read."""

    def __init__(self, reads: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.reads = reads
        self.top = nn.Linear(4, 1)

    def tables(self) -> list[Table]:
        return [Table(name="words", dim=4, init_std=0.0)]

    def sparse_keys(self, batch: Batch) -> dict[str, Jagged]:
        return {"words": batch.sparse["words"]}

    def dense(self, rows: dict[str, Tensor], batch: Batch) -> Loss:
        words = batch.sparse["words"]
        weights = batch.sparse["tf_idf"].values if "tf_idf" in self.reads else None
        logits = self.top(pool_rows(rows["words"], words.lengths, weights)).squeeze(1)
        weight = batch.dense["weight"] if "weight" in self.reads else None
        return Loss(
            functional.binary_cross_entropy_with_logits(
                logits, batch.dense["label"], weight, reduction="sum"
            ),
            batch.size,
        )


@pytest.mark.parametrize("reads", [(), ("weight",), ("tf_idf",), ("weight", "tf_idf")])
def test_weights_that_it_does_not_read_are_told(tmp_path, caplog, reads):
    rows = {"words": [[1, 2], [3], []] * 8, "tf_idf": [[0.5, 2.0], [1.0], []] * 8}
    rows |= {"label": [0.0, 1.0, 1.0] * 8, "age": [1.0, 2.0, 3.0] * 8}
    pq.write_table(pa.table(rows), tmp_path / "words.parquet")
    columns = ParquetConfig(
        sparse=("words",), labels=("label",), sample_weight="age", weights={"words": "tf_idf"}
    )
    data = DataConfig(kind="parquet", path=str(tmp_path / "words.parquet"), parquet=columns)
    model = Weighed(reads)
    trainer = Trainer(model, model.tables(), TrainSettings(batch=12, device="cpu"))
    trainer.fit(open_source(data), steps=1)
    told = {
        "weight": "data.parquet.sample_weight does nothing: `dense` of Weighed does not read "
        "batch.dense['weight']",
        "tf_idf": "data.parquet.weights of 'words' does nothing: `dense` of Weighed does not read "
        "batch.sparse['tf_idf']",
    }
    assert {record.getMessage() for record in caplog.records} == {
        sentence for column, sentence in told.items() if column not in reads
    }
    assert model.training, "who asked left it as it was"
