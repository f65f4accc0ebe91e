"""Faults of disk, memory and files, from the outside: one sentence each, and nothing lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import DENSE, MANIFEST, paths_in, verified
from nestpipe.cli.app import main
from nestpipe.embedding.store.host import NativeStore
from nestpipe.train.ops import TrainingWork
from support.checkpoints import flip_bit

SETTINGS = (
    *("data.synthetic.samples=64", "data.synthetic.test_samples=8", "data.synthetic.num_tables=2"),
    *("model.dim=4", "model.bottom=[4]", "model.top=[4]", "run.batch=16", "run.device=cpu"),
    "run.checkpoint_every=2",
)
Said = Callable[..., tuple[int, str]]


@pytest.fixture
def train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Status and last words of `nestpipe train` with these settings."""

    def run(*more: str, folder: Path = tmp_path / "run") -> tuple[int, str]:
        capsys.readouterr()
        given = (*SETTINGS, f"run.checkpoint={folder}", *more)
        words = [word for one in given for word in ("--set", one)]
        with pytest.raises(SystemExit) as end:
            main(["train", "--resume", "auto", *words])
        return int(end.value.code or 0), capsys.readouterr().err

    return run


def failing(monkeypatch: pytest.MonkeyPatch, where: str, error: int) -> None:
    def fail(call: str, path: Path) -> None:
        if where in str(path):
            raise OSError(error, os.strerror(error), str(path))

    monkeypatch.setattr(disk, "before_call", fail)


def assert_sentence(said: tuple[int, str], expected: str, status: int = 2) -> None:
    assert said[0] == status, said[1]
    assert expected in said[1]
    lines = [line for line in said[1].splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in said[1]


def test_a_full_disk_in_the_middle_keeps_the_checkpoint_before(
    train: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    failing(monkeypatch, "step-00000004", errno.ENOSPC)
    assert_sentence(train(), "No space left on device")
    (kept,) = paths_in(tmp_path / "run")
    assert verified(kept).manifest.step == 2
    monkeypatch.undo()
    assert train()[0] == 0


def test_a_folder_without_permission_is_noticed_before_training(
    train: Said, monkeypatch: pytest.MonkeyPatch
):
    """Root may write anywhere, so the system's answer is given by hand."""
    failing(monkeypatch, ".partial-probe", errno.EACCES)
    steps: list[object] = []
    monkeypatch.setattr(TrainingWork, "dense", lambda *a: steps.append(a))
    assert_sentence(train(), "Permission denied")
    assert not steps


def test_a_folder_that_is_a_file_is_noticed_before_training(train: Said, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert_sentence(train(folder=tmp_path / "file"), "cannot write to")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["python", "torch", "gpu"],
)
def test_no_memory_is_the_machine_s_fault_not_ours(
    train: Said, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(TrainingWork, "dense", fail)
    assert_sentence(train(), "memory is full; use smaller batches", status=3)


def test_no_memory_for_copies_is_a_sentence(train: Said, monkeypatch: pytest.MonkeyPatch):
    """At the first checkpoint, where rows are copied."""
    gather = NativeStore.gather

    def fail(self: NativeStore, keys_K: Any, counts: Any, out_KW: Any) -> int:
        if len(keys_K) and (keys_K[1:] > keys_K[:-1]).all() and len(keys_K) > 20:
            raise MemoryError
        return gather(self, keys_K, counts, out_KW)

    monkeypatch.setattr(NativeStore, "gather", fail)
    assert_sentence(train(), "memory is full", status=3)


@pytest.mark.parametrize("name", [DENSE, MANIFEST, "rows-c0-00000-00000.safetensors"])
def test_where_the_only_checkpoint_is_damaged_it_is_named(train: Said, tmp_path: Path, name: str):
    assert train("run.steps=2")[0] == 0
    flip_bit(tmp_path / "run" / "step-00000002" / name, 999)
    assert_sentence(train(), "damaged")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("run.batsh=3", "did you mean batch?"),
        ("run.batch=many", "batch"),
        ("rows.optimizer=adamm", "adamm"),
        ("run.full_every=-1", "full_every"),
    ],
)
def test_a_wrong_setting_is_named(train: Said, tmp_path: Path, setting: str, says: str):
    assert_sentence(train(setting), says)
    assert not (tmp_path / "run").exists()
