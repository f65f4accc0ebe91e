"""`nestpipe export` and `nestpipe import`: the same rows out and in again, in every form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

from nestpipe.checkpoint.folder import open_checkpoint
from nestpipe.checkpoint.merging import merged_rows
from nestpipe.cli.app import main

SMALL = (
    *("--set", "data.synthetic.samples=800"),
    *("--set", "data.synthetic.test_samples=100"),
    *("--set", "data.synthetic.num_tables=2"),
    *("--set", "data.synthetic.num_keys=300"),
    *("--set", "run.batch=100"),
    *("--set", "model.dim=4"),
    *("--set", "run.device=cpu"),
)
Run = Callable[..., tuple[object, str, str]]
FORMS = ("safetensors", "npy", "parquet")


@pytest.fixture
def run(capsys) -> Run:
    def go(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return go


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose newest checkpoint is an increment: newer rows go over older ones."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    more = ("--set", f"run.checkpoint={folder}", "--set", "run.checkpoint_every=4")
    with pytest.raises(SystemExit) as stop:
        main(["train", *SMALL, *more, "--set", "run.incremental=true"])
    assert stop.value.code == 0
    assert open_checkpoint(folder / "step-00000008").parents
    return folder


def read(folder: Path, table: str, form: str) -> dict[str, Any]:
    """What another program reads, by its own means."""
    if form == "safetensors":
        return load_file(folder / f"{table}.safetensors")
    if form == "npy":
        names = ("keys", "weights", "state")
        files = {name: folder / f"{table}.{name}.npy" for name in names}
        return {name: np.load(file) for name, file in files.items() if file.exists()}
    found = pq.read_table(folder / f"{table}.parquet").to_pydict()
    lists = {name: np.array(found[name], np.float32) for name in found if name != "key"}
    return {"keys": np.array(found["key"]), **lists}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_newest_row_of_each_key(
    run: Run, trained: Path, tmp_path: Path, form: str
):
    out = tmp_path / "out"
    status, said, error = run("export", trained, out, "--format", form, "--state")
    assert status == 0, error
    assert str(out / "dense.safetensors") in said.replace("\n", "")
    keys, rows = merged_rows(open_checkpoint(trained / "step-00000008"), "c1")
    found = read(out, "c1", form)
    assert np.array_equal(found["keys"], keys.numpy())
    assert np.array_equal(found["weights"], rows[:, :4].numpy())
    assert np.array_equal(found["state"], rows[:, 4:].numpy())
    about = json.loads((out / "export.json").read_text())
    assert (about["format"], about["optimizer"]) == (form, "rowwise_adagrad")
    assert about["tables"][1]["rows"] == len(keys)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_exported_goes_in_again_bit_for_bit(
    run: Run, trained: Path, tmp_path: Path, form: str
):
    out, warm = tmp_path / "out", tmp_path / "warm"
    assert run("export", trained, out, "--format", form, "--state")[0] == 0
    status, said, error = run("import", out, warm, *SMALL)
    assert status == 0, error
    assert "c0: " in said
    one, other = open_checkpoint(trained / "step-00000008"), open_checkpoint(warm / "step-00000000")
    for table in ("c0", "c1"):
        for ours, theirs in zip(merged_rows(one, table), merged_rows(other, table), strict=True):
            assert torch.equal(ours, theirs)
    dense, again = one.dense(), other.dense()
    assert all(torch.equal(dense[name], again[name]) for name in dense if name[:5] == "model")
    figures = [json.loads(run("eval", path, "--json", "-")[1]) for path in (trained, warm)]
    assert figures[0] == figures[1]


def test_a_table_alone_goes_onto_a_checkpoint(run: Run, trained: Path, tmp_path: Path):
    out, warm = tmp_path / "out", tmp_path / "warm"
    out.mkdir()
    vectors = {"key": [10**12, 5], "weights": [[1.0, 2.0, 3.0, 4.0], [0.0] * 4]}
    pq.write_table(pa.table(vectors), out / "c0.parquet")
    status, _, error = run("import", out, warm, "--onto", trained)
    assert status == 0, error
    keys, rows = merged_rows(open_checkpoint(warm / "step-00000008"), "c0")
    before, _ = merged_rows(open_checkpoint(trained / "step-00000008"), "c0")
    assert set(keys.tolist()) == {*before.tolist(), 10**12, 5}
    assert rows[keys == 10**12][0, :4].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_only_what_is_asked_for_is_written(run: Run, trained: Path, tmp_path: Path):
    arguments = ("--format", "npy", "--table", "c1", "--no-dense")
    assert run("export", trained, tmp_path / "out", *arguments)[0] == 0
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["c1.keys.npy", "c1.weights.npy", "export.json"]


def test_the_old_name_writes_the_same(run: Run, trained: Path, tmp_path: Path):
    assert run("export", trained, tmp_path / "new")[0] == 0
    assert run("checkpoint", "export", trained, tmp_path / "old")[0] == 0
    for file in (tmp_path / "new").iterdir():
        assert file.read_bytes() == (tmp_path / "old" / file.name).read_bytes()


def save(folder: Path, **tensors: Any) -> None:
    save_file({name: np.asarray(value) for name, value in tensors.items()}, folder)


ONES = np.ones((2, 4), np.float32)
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no rows": (lambda folder: None, "has no rows; it needs TABLE.parquet"),
    "no weights": (lambda f: save(f / "c0.safetensors", keys=[1, 2]), "has no 'weights'"),
    "a key twice": (
        lambda f: save(f / "c0.safetensors", keys=[7, 7], weights=ONES),
        "key 7 of 'c0' comes twice",
    ),
    "another width": (
        lambda f: save(f / "c0.safetensors", keys=[1, 2], weights=ONES[:, :3]),
        "have shape (2, 3); give 2 rows of dim 4",
    ),
    "nan": (
        lambda f: save(f / "c0.safetensors", keys=[1, 2], weights=ONES * np.nan),
        "the weights of 'c0' hold NaN or inf",
    ),
    "float keys": (
        lambda f: save(f / "c0.safetensors", keys=[1.0, 2.0], weights=ONES),
        "the keys of 'c0' are float64",
    ),
    "another table": (
        lambda f: save(f / "c7.safetensors", keys=[1, 2], weights=ONES),
        "the model has no table 'c7'",
    ),
    "other state": (
        lambda f: save(f / "c0.safetensors", keys=[1, 2], weights=ONES, state=ONES),
        "keeps 1 numbers a row; use the optimizer",
    ),
    "other dense weights": (
        lambda f: [
            save(f / "dense.safetensors", odd=ONES),
            save(f / "c0.safetensors", keys=[1, 2], weights=ONES),
        ][0],
        "do not fit the model",
    ),
    "no safetensors": (
        lambda f: (f / "c0.safetensors").write_bytes(b"no"),
        "cannot be read",
    ),
    "ragged lists": (
        lambda f: pq.write_table(
            pa.table({"key": [1, 2], "weights": [[1.0], [1.0, 2.0]]}), f / "c0.parquet"
        ),
        "has lists of different lengths",
    ),
    "npy of another length": (
        lambda f: [np.save(f / "c0.keys.npy", [1]), np.save(f / "c0.weights.npy", ONES)][0],
        "has 1 keys and 2 rows",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_imported_is_told(run: Run, tmp_path: Path, mistake: str):
    write, told = MISTAKES[mistake]
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder)
    status, _, said = run("import", folder, tmp_path / "warm", *SMALL)
    assert status == 2
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "warm").exists()


def test_an_export_needs_a_table_that_is_there_and_a_new_folder(
    run: Run, trained: Path, tmp_path: Path
):
    status, _, said = run("export", trained, tmp_path / "out", "--table", "c9")
    assert (status, said) == (2, "error: there is no table 'c9'; the tables are c0, c1\n")
    assert not (tmp_path / "out").exists()
