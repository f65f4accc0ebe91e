"""`nestpipe checkpoint` from the outside."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file
from safetensors.torch import load_file

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import (
    DENSE,
    MANIFEST,
    Parent,
    open_checkpoint,
    paths_in,
    read_manifest,
    verified,
)
from nestpipe.checkpoint.merging import compact, difference, merged_rows
from nestpipe.cli.app import main
from support.checkpoints import change_manifest, flip_bit
from support.warm_python import REAL
from unit.train.test_resume import job_of, trained


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs with a checkpoint every four steps; the second has another learning rate."""
    one, other = (tmp_path_factory.mktemp(name) for name in ("one", "other"))
    every = {"checkpoint_every": 4, "steps": 12}
    trained(job_of(one, run=every))
    trained(job_of(other, run=every, rows={"lr": 0.1}))
    return one, other


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def go(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["checkpoint", *map(str, arguments)])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return go


@pytest.fixture
def copy(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[0], tmp_path / "copy"))


def test_checkpoints_are_listed_with_what_is_wrong(run: Any, copy: Path):
    (copy / "step-00000008" / DENSE).write_bytes(b"")
    status, out, _ = run("ls", copy)
    assert status == 0
    assert "step-00000012" in out
    assert "damaged" in out
    status, out, _ = run("ls", copy, "--json", "-")
    first, broken, last = json.loads(out)
    assert (first["step"], last["kind"], last["parents"]) == (4, "full", [])
    assert "has 0 bytes" in broken["damage"]


def test_a_checkpoint_says_what_it_holds(run: Any, folders: tuple[Path, Path]):
    status, out, _ = run("show", folders[0])
    assert status == 0
    assert "step = 12" in out
    assert "rows.lr = 0.05" in out
    status, out, _ = run("show", folders[1] / "step-00000004", "--json", "-")
    assert json.loads(out)["config"]["rows"]["lr"] == 0.1


def test_verify_reads_everything(run: Any, copy: Path):
    assert run("verify", copy)[0] == 0
    flip_bit(copy / "step-00000008" / DENSE, 999)
    status, out, _ = run("verify", copy)
    assert status == 1
    assert "step-00000004: good" in out
    assert "step-00000008: " in out
    assert "is damaged: its contents" in out
    assert run("verify", copy / "step-00000012")[0] == 0


def test_prune_keeps_what_the_rules_say(run: Any, copy: Path):
    assert run("prune", copy)[1].splitlines()[-1].startswith("0 removed, 3 in the folder: ")
    assert "would remove step-00000004" in run("prune", copy, "--keep-last", 2, "--dry-run")[1]
    assert len(paths_in(copy)) == 3
    assert run("prune", copy, "--keep-last", 2)[0] == 0
    assert [path.name for path in paths_in(copy)] == ["step-00000008", "step-00000012"]
    flip_bit(copy / "step-00000008" / DENSE, 999)
    assert run("prune", copy, "--damaged")[0] == 0
    assert [path.name for path in paths_in(copy)] == ["step-00000012"]
    assert not list(copy.glob(".trash*"))


def test_what_would_keep_nothing_is_refused(run: Any, copy: Path):
    status, _, said = run("prune", copy, "--keep-last", 1, "--keep-best", "auk")
    assert (status, said.count("\n")) == (2, 1)
    assert "has the metric 'auk'; they have auc, " in said
    status, out, _ = run("prune", copy, "--keep-best", "auc")
    assert (status, out) == (
        0,
        "0 removed, 3 in the folder: without --keep-last or --keep-hours all stay\n",
    )


def test_a_checkpoint_in_the_place_of_its_folder_is_taken_or_told(run: Any, copy: Path):
    status, out, _ = run("ls", copy / "step-00000008")
    assert status == 0
    assert re.findall(r"step-\d+", out.partition("─")[2]) == ["step-00000008"]
    status, _, said = run("prune", copy / "step-00000008", "--keep-last", 1)
    assert (status, said.count("\n")) == (2, 1)
    assert said.endswith("step-00000008' is a checkpoint; name the folder that it is in\n")


def of_later_format(checkpoint: Path) -> None:
    """As a later program might write it: `hash` covers `format`, too."""
    body = json.loads((checkpoint / MANIFEST).read_text())
    body |= {"format": 3, "hash": "blake3:0123"}
    (checkpoint / MANIFEST).write_text(json.dumps(body))


def test_what_cannot_be_judged_here_is_not_taken_for_damage(
    run: Any, copy: Path, monkeypatch: pytest.MonkeyPatch
):
    of_later_format(copy / "step-00000008")
    status, out, _ = run("ls", copy, "--json", "-")
    assert [facts["kind"] for facts in json.loads(out)] == ["full", "unknown", "full"]
    status, out, _ = run("prune", copy, "--damaged")
    assert (status, len(paths_in(copy))) == (0, 3)
    assert "kept step-00000008: " in out
    assert "is of format 3, and this program reads up to 2" in out
    monkeypatch.setattr(disk, "xxhash", None)
    status, out, _ = run("prune", copy, "--damaged")
    assert (status, len(paths_in(copy))) == (0, 3)
    assert out.count("pip install xxhash") == 2


def test_an_increment_keeps_its_parent(run: Any, copy: Path):
    parent = Parent(name="step-00000004", hash=read_manifest(copy / "step-00000004").hash)
    change_manifest(copy / "step-00000012", parent=parent)
    run("prune", copy, "--keep-last", 1)
    assert [path.name for path in paths_in(copy)] == ["step-00000004", "step-00000012"]


def test_tensors_of_one_checkpoint_alone_have_no_difference_but_a_place():
    def holding(**tensors: torch.Tensor) -> Any:
        return SimpleNamespace(
            dense=lambda: tensors, manifest=SimpleNamespace(tables=[], config={})
        )

    found = difference(
        holding(same=torch.ones(2), grown=torch.ones(2), moved=torch.ones(2), old=torch.ones(1)),
        holding(same=torch.ones(2), grown=torch.ones(3), moved=torch.zeros(2), new=torch.ones(1)),
    )
    assert found.tensors == {
        "grown": "of shape (2,) and (3,)",
        "moved": 1.0,
        "new": "only in the second",
        "old": "only in the first",
    }


def test_two_runs_are_compared(run: Any, folders: tuple[Path, Path], copy: Path):
    one, other = folders
    status, out, _ = run("diff", one, other)
    assert status == 1
    assert "rows.lr: 0.05 and 0.1" in out
    assert "common rows differ" in out
    status, out, _ = run("diff", one, copy)
    assert status == 0
    assert out.splitlines()[-1] == "the same bits"
    status, out, _ = run("diff", one / "step-00000004", one, "--json", "-")
    found = json.loads(out)
    assert status == 1
    assert found["rows"]["c0"]["only_second"] > 0
    assert found["rows"]["c0"]["only_first"] == 0


def test_weights_are_exported_without_optimizer_state(
    run: Any, folders: tuple[Path, Path], tmp_path: Path
):
    assert run("export", folders[0], tmp_path / "out")[0] == 0
    checkpoint = open_checkpoint(folders[0] / "step-00000012")
    table = load_file(tmp_path / "out" / "c0.safetensors")
    keys, rows = merged_rows(checkpoint, "c0")
    assert torch.equal(table["keys"], keys)
    assert torch.equal(table["weights"], rows[:, :4])
    dense = load_file(tmp_path / "out" / DENSE)
    assert all(not name.startswith("optimizer") for name in dense)
    status, _, said = run("export", folders[0], tmp_path / "out")
    assert status == 2
    assert "exists already" in said


def test_compaction_keeps_every_bit(run: Any, copy: Path):
    """An increment whose rows go over those of its parent, key by key."""
    parent = Parent(name="step-00000004", hash=read_manifest(copy / "step-00000004").hash)
    change_manifest(copy / "step-00000012", parent=parent)
    before = open_checkpoint(copy / "step-00000012")
    expected = {name: merged_rows(before, name) for name in ("c0", "c1")}
    assert before.parents
    assert run("compact", copy)[0] == 0
    after = verified(copy / "step-00000012")
    assert not after.parents
    for name, (keys, rows) in expected.items():
        found = merged_rows(after, name)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], rows)
    compact(after.path)
    assert verified(copy / "step-00000012").manifest.hash == after.manifest.hash


EXPORTS = """
import json, os, sys
import pyarrow.parquet, torch, nestpipe.checkpoint.export
from nestpipe.cli.app import main

(command, *arguments), *disks = json.loads(sys.argv[1]), *sys.argv[2:]
found = []
for disk in disks:
    if os.fork() == 0:
        main([command, arguments[0], f"{disk}/out", *arguments[1:]])
    found.append([os.waitstatus_to_exitcode(os.wait()[1]), os.listdir(disk)])
print(json.dumps(found))
"""
"""An export to each of several disks, by forks; prints how each ended, and what it left there."""


@pytest.mark.needs("unshare")
@pytest.mark.parametrize("form", ["npy", "parquet", "safetensors"])
def test_an_export_to_a_full_disk_is_one_sentence_and_leaves_nothing(
    folders: tuple[Path, Path], tmp_path: Path, form: str
):
    """Who writes into a mapped file there is ended by the system, without a word.

    REAL: a fork of a warm interpreter would not see what is mounted.
    """
    disks = {tmp_path / f"{size}k": size for size in (4, 8, 16)}
    mount = ""
    for place, size in disks.items():
        place.mkdir()
        mount += f"mount -t tmpfs -o size={size}k none {place} || exit 77; "
    export = ["export", str(folders[0]), "--state", "--format", form]
    command = [REAL, "-c", EXPORTS, json.dumps(export), *map(str, disks)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount + shlex.join(command)], capture_output=True, text=True
    )
    if done.returncode in (1, 77):
        pytest.skip("a process here may not mount a file system of its own")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[2, []]] * len(disks), done.stderr
    sentence = r"error: cannot write to .*[nN]o space left on device.*\n"
    assert re.fullmatch(f"({sentence}){{{len(disks)}}}", done.stderr)


def increments(copy: Path) -> list[Path]:
    """Three checkpoints, each of which goes on from the one before."""
    first, *others = paths_in(copy)
    for before, path in zip([first, *others], others, strict=False):
        change_manifest(path, parent=Parent(name=before.name, hash=read_manifest(before).hash))
    return [first, *others]


def test_what_others_go_on_from_is_not_compacted(run: Any, copy: Path):
    """Its manifest would have another hash, so all later ones would be damaged."""
    _, middle, last = increments(copy)
    status, _, said = run("compact", middle)
    assert status == 2
    assert "cannot be made full, as step-00000012 goes on from it; compact step-00000012" in said
    assert run("verify", copy)[0] == 0
    assert run("compact", last)[0] == 0
    assert run("compact", middle)[0] == 0
    assert run("verify", copy)[0] == 0


def test_rows_that_do_not_add_up_are_not_compacted(run: Any, copy: Path):
    _, _, last = increments(copy)
    first, *others = read_manifest(last).tables
    change_manifest(last, tables=({**first, "rows": first["rows"] + 1}, *others))
    status, _, said = run("compact", last)
    assert status == 2
    assert "its files add up to" in said
    assert read_manifest(last).parent is not None


def test_a_checkpoint_that_lost_its_parent_says_so(run: Any, copy: Path):
    first, *_ = increments(copy)
    shutil.rmtree(first)
    assert "step-00000004, from which it goes on, is missing" in run("verify", copy)[1]


def test_a_checkpoint_is_found_from_inside(run: Any, copy: Path, monkeypatch: Any):
    _, _, last = increments(copy)
    monkeypatch.chdir(last)
    assert "name = step-00000012" in run("show", ".")[1]
    assert run("compact", ".")[0] == 0
    assert read_manifest(last).parent is None


@pytest.mark.parametrize("options", [["--keep-last", 1], ["--keep-hours", 1e-9]], ids=str)
def test_a_damaged_checkpoint_makes_no_good_one_go(run: Any, copy: Path, options: list[Any]):
    flip_bit(copy / "step-00000012" / DENSE, 999)
    assert run("prune", copy, *options)[0] == 0
    assert [path.name for path in paths_in(copy)] == ["step-00000008", "step-00000012"]
    flip_bit(copy / "step-00000008" / DENSE, 999)
    assert run("prune", copy, *options)[0] == 2
    assert len(paths_in(copy)) == 2


def test_links_and_files_in_the_place_of_checkpoints_go_too(run: Any, copy: Path, tmp_path: Path):
    """Of a checkpoint that was moved elsewhere the link goes, and no more."""
    moved = (copy / "step-00000004").rename(tmp_path / "step-00000004")
    (copy / "step-00000004").symlink_to(moved)
    (copy / "step-00000009").write_text("no folder")
    assert run("prune", copy, "--damaged")[0] == 0
    assert run("prune", copy, "--keep-last", 2)[0] == 0
    assert sorted(path.name for path in copy.glob("*step*")) == ["step-00000008", "step-00000012"]
    assert read_manifest(moved).step == 4
    (copy / ".trash-of-an-earlier-version").symlink_to(moved)
    (copy / ".partial-file").write_text("no folder")
    trained(job_of(copy, run={"steps": 13}), "auto")
    assert not list(copy.glob(".*-*"))
    assert read_manifest(moved).step == 4


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])
def test_a_folder_without_checkpoints_is_one_sentence(run: Any, tmp_path: Path, command: str):
    status, _, said = run(command, tmp_path / "nothing")
    assert status == 2
    assert said.startswith("error: there is no checkpoint in")
    assert said.count("\n") == 1


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
def export_run(capsys) -> Run:
    def go(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return go


@pytest.fixture(scope="module")
def export_trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        return load_arrays(folder / f"{table}.safetensors")
    if form == "npy":
        names = ("keys", "weights", "state")
        files = {name: folder / f"{table}.{name}.npy" for name in names}
        return {name: np.load(file) for name, file in files.items() if file.exists()}
    found = pq.read_table(folder / f"{table}.parquet").to_pydict()
    lists = {name: np.array(found[name], np.float32) for name in found if name != "key"}
    return {"keys": np.array(found["key"]), **lists}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_newest_row_of_each_key(
    export_run: Run, export_trained: Path, tmp_path: Path, form: str
):
    out = tmp_path / "out"
    status, said, error = export_run("export", export_trained, out, "--format", form, "--state")
    assert status == 0, error
    assert str(out / "dense.safetensors") in said.replace("\n", "")
    keys, rows = merged_rows(open_checkpoint(export_trained / "step-00000008"), "c1")
    found = read(out, "c1", form)
    assert np.array_equal(found["keys"], keys.numpy())
    assert np.array_equal(found["weights"], rows[:, :4].numpy())
    assert np.array_equal(found["state"], rows[:, 4:].numpy())
    about = json.loads((out / "export.json").read_text())
    assert (about["format"], about["optimizer"]) == (form, "rowwise_adagrad")
    assert about["tables"][1]["rows"] == len(keys)


@pytest.mark.parametrize("form", FORMS)
def test_what_was_exported_goes_in_again_bit_for_bit(
    export_run: Run, export_trained: Path, tmp_path: Path, form: str
):
    out, warm = tmp_path / "out", tmp_path / "warm"
    assert export_run("export", export_trained, out, "--format", form, "--state")[0] == 0
    status, said, error = export_run("import", out, warm, *SMALL)
    assert status == 0, error
    assert "c0: " in said
    one, other = (
        open_checkpoint(export_trained / "step-00000008"),
        open_checkpoint(warm / "step-00000000"),
    )
    for table in ("c0", "c1"):
        for ours, theirs in zip(merged_rows(one, table), merged_rows(other, table), strict=True):
            assert torch.equal(ours, theirs)
    dense, again = one.dense(), other.dense()
    assert all(torch.equal(dense[name], again[name]) for name in dense if name[:5] == "model")
    figures = [
        json.loads(export_run("eval", path, "--json", "-")[1]) for path in (export_trained, warm)
    ]
    assert figures[0] == figures[1]


def test_a_table_alone_goes_onto_a_checkpoint(
    export_run: Run, export_trained: Path, tmp_path: Path
):
    out, warm = tmp_path / "out", tmp_path / "warm"
    out.mkdir()
    vectors = {"key": [10**12, 5], "weights": [[1.0, 2.0, 3.0, 4.0], [0.0] * 4]}
    pq.write_table(pa.table(vectors), out / "c0.parquet")
    status, _, error = export_run("import", out, warm, "--onto", export_trained)
    assert status == 0, error
    keys, rows = merged_rows(open_checkpoint(warm / "step-00000008"), "c0")
    before, _ = merged_rows(open_checkpoint(export_trained / "step-00000008"), "c0")
    assert set(keys.tolist()) == {*before.tolist(), 10**12, 5}
    assert rows[keys == 10**12][0, :4].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_only_what_is_asked_for_is_written(export_run: Run, export_trained: Path, tmp_path: Path):
    arguments = ("--format", "npy", "--table", "c1", "--no-dense")
    assert export_run("export", export_trained, tmp_path / "out", *arguments)[0] == 0
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["c1.keys.npy", "c1.weights.npy", "export.json"]


def test_the_old_name_writes_the_same(export_run: Run, export_trained: Path, tmp_path: Path):
    assert export_run("export", export_trained, tmp_path / "new")[0] == 0
    assert export_run("checkpoint", "export", export_trained, tmp_path / "old")[0] == 0
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
def test_what_cannot_be_imported_is_told(export_run: Run, tmp_path: Path, mistake: str):
    write, told = MISTAKES[mistake]
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder)
    status, _, said = export_run("import", folder, tmp_path / "warm", *SMALL)
    assert status == 2
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "warm").exists()


def test_an_export_needs_a_table_that_is_there_and_a_new_folder(
    export_run: Run, export_trained: Path, tmp_path: Path
):
    status, _, said = export_run("export", export_trained, tmp_path / "out", "--table", "c9")
    assert (status, said) == (2, "error: there is no table 'c9'; the tables are c0, c1\n")
    assert not (tmp_path / "out").exists()
