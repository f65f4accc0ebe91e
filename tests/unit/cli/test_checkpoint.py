"""`nestpipe checkpoint` from the outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nestpipe.checkpoint.folder import (
    DENSE,
    Parent,
    open_checkpoint,
    paths_in,
    read_manifest,
    verified,
)
from nestpipe.checkpoint.merging import compact, merged_rows
from nestpipe.cli.app import main
from support.checkpoints import change_manifest, flip_bit
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
    assert run("prune", copy)[1].splitlines()[-1] == "0 checkpoints, 3 in the folder"
    assert "would remove step-00000004" in run("prune", copy, "--keep-last", 2, "--dry-run")[1]
    assert len(paths_in(copy)) == 3
    assert run("prune", copy, "--keep-last", 2)[0] == 0
    assert [path.name for path in paths_in(copy)] == ["step-00000008", "step-00000012"]
    flip_bit(copy / "step-00000008" / DENSE, 999)
    assert run("prune", copy, "--damaged")[0] == 0
    assert [path.name for path in paths_in(copy)] == ["step-00000012"]
    assert not list(copy.glob(".trash*"))


def test_an_increment_keeps_its_parent(run: Any, copy: Path):
    parent = Parent(name="step-00000004", hash=read_manifest(copy / "step-00000004").hash)
    change_manifest(copy / "step-00000012", parent=parent)
    run("prune", copy, "--keep-last", 1)
    assert [path.name for path in paths_in(copy)] == ["step-00000004", "step-00000012"]


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


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])
def test_a_folder_without_checkpoints_is_one_sentence(run: Any, tmp_path: Path, command: str):
    status, _, said = run(command, tmp_path / "nothing")
    assert status == 2
    assert said.startswith("error: there is no checkpoint in")
    assert said.count("\n") == 1
