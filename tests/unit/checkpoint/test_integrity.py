"""Any damage to a checkpoint is noticed, and the newest good one is used."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import stat
from collections.abc import Callable
from dataclasses import asdict
from io import FileIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import xxhash

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import (
    DENSE,
    MANIFEST,
    Checkpoint,
    KnownManifests,
    Manifest,
    Parent,
    candidates,
    first_good,
    newest,
    open_checkpoint,
    paths_in,
    read_manifest,
    verified,
    write_checkpoint,
)
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.errors import CheckpointError, NestpipeError, RunError
from nestpipe.models import HstuConfig, HstuRanker
from nestpipe.serve.engine.rank_model import read_weights
from nestpipe.train import JobConfig, make_job, train_job
from nestpipe.train.job import Job
from nestpipe.train.loop import _refuse_newer
from support.checkpoints import change_manifest, flip_bit, set_number
from support.examples import num_examples

CONFIG = HstuConfig(blocks=1, heads=1, dim=4, attention_dim=4, value_dim=4, max_len=8)
ROWS = "rows-items-00000-00000.safetensors"


def write(folder: Path, step: int) -> Path:
    """A small ranker, other weights for each step."""
    rng = torch.Generator().manual_seed(step)
    weights = HstuRanker(CONFIG).state_dict()
    return write_checkpoint(
        folder,
        Manifest(
            step=step,
            tables=({"name": "items", "dim": 4, "dtype": "float32"},),
            model={"kind": "ranker", "config": asdict(CONFIG)},
        ),
        {
            f"model.{k}": torch.randn(v.shape, generator=rng, dtype=v.dtype)
            for k, v in weights.items()
        },
        {"items": (torch.arange(9), torch.randn(9, 5, generator=rng))},
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 and 2."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    return tmp_path


def test_what_is_written_reads_back(folder: Path):
    checkpoint = verified(folder / "step-00000002")
    (keys, rows) = next(iter(checkpoint.rows("items")))
    expected = torch.Generator().manual_seed(2)
    assert keys.tolist() == list(range(9))
    assert rows.shape == (9, 5)
    assert checkpoint.manifest.tables[0]["rows"] == checkpoint.manifest.num_rows == 9
    first = next(iter(HstuRanker(CONFIG).state_dict().items()))
    written = torch.randn(first[1].shape, generator=expected)
    assert torch.equal(checkpoint.dense()[f"model.{first[0]}"], written)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_of_any_kind_and_shape_read_back(tmp_path: Path, dtype: torch.dtype):
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0), (2, 3)]
    tensors = {f"t{n}": torch.ones(shape).to(dtype) for n, shape in enumerate(shapes)}
    tensors["turned"] = torch.arange(6).reshape(2, 3).t().to(dtype)
    written = disk.write_tensors(tmp_path / "file", tensors)
    read = disk.read_tensors(tmp_path / "file", written)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("way", ["direct", "cached", "larger blocks", "short writes"])
def test_long_files_have_the_bytes_and_the_hash_of_what_was_written(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
):
    """Past the cache of files, where that is refused or turns out not to work, and bit by bit."""
    direct, write = disk._go_direct, disk._write

    def refuse_direct(file: FileIO, staged: memoryview, path: Path) -> None:
        write(cast("FileIO", _OddFile(file, way)), staged, path)

    if way == "cached":
        monkeypatch.setattr(disk, "_go_direct", lambda file, *, on: False)
    elif way != "direct":
        monkeypatch.setattr(disk, "_go_direct", lambda file, *, on: direct(file.file, on=on))
        monkeypatch.setattr(disk, "_write", refuse_direct)
    least, staged = disk.LEAST_DIRECT, disk.STAGED_BYTES
    for size in (0, 1, least - 1, least, least + 1, staged, staged + 1, 2 * staged + least + 4097):
        contents = random.Random(size).randbytes(size)
        cuts = [0, size // 3, size // 3, size]
        pieces = [contents[a:b] for a, b in pairwise(cuts)]
        written = disk.write_bytes(tmp_path / f"{size}", iter(pieces))
        assert (tmp_path / f"{size}").read_bytes() == contents
        assert written == disk.hash_of(tmp_path / f"{size}", written.kind)
        assert written.hash == f"xxh3-128:{xxhash.xxh3_128(contents).hexdigest()}"


def test_files_without_xxhash_have_sha_256_and_every_environment_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, contents = tmp_path / "file", b"rows"
    with monkeypatch.context() as without:
        without.setattr(disk, "xxhash", None)
        written = disk.write_bytes(path, iter([contents]))
        assert written.hash == hashlib.sha256(contents).hexdigest()
        assert disk.read_bytes(path, written) == contents
    assert disk.read_bytes(path, written) == contents
    path.write_bytes(b"rowS")
    with pytest.raises(CheckpointError, match="not those that were written"):
        disk.read_bytes(path, written)


def test_hashes_that_this_environment_cannot_compare_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "file"
    written = disk.write_bytes(path, iter([b"rows"]))
    monkeypatch.setattr(disk, "xxhash", None)
    with pytest.raises(CheckpointError, match="pip install xxhash"):
        disk.read_bytes(path, written)
    with pytest.raises(CheckpointError, match="unknown kind, 'md5'"):
        disk.read_bytes(path, disk.WrittenFile(4, "md5:ab"))


class _OddFile:
    """A file that refuses direct writes, or takes fewer bytes than it is given."""

    def __init__(self, file: FileIO, way: str) -> None:
        self.file, self._way = file, way

    def write(self, data: memoryview) -> int:
        direct = fcntl.fcntl(self.file, fcntl.F_GETFL) & os.O_DIRECT
        if direct and self._way == "larger blocks":
            raise OSError(errno.EINVAL, "blocks of 64 KiB")
        if self._way == "short writes":
            return self.file.write(data[: max(4096, len(data) // 3 // 4096 * 4096)])
        return self.file.write(data)


def test_every_flipped_bit_is_noticed_and_the_one_before_is_used(folder: Path, tmp_path: Path):
    """Bits are chosen over all files by their size, manifest included; the seed names them."""
    rng = random.Random(19)
    path = folder / "step-00000002"
    before = read_weights(folder / "step-00000001")
    sizes = {file: file.stat().st_size for file in path.iterdir()}
    for _ in range(num_examples("bit flips")):
        file = rng.choices(list(sizes), weights=list(sizes.values()))[0]
        bit = rng.randrange(8 * sizes[file])
        flip_bit(file, bit)
        with pytest.raises(CheckpointError, match=r"damaged|format"):
            verified(path)
        with pytest.raises(CheckpointError, match=r"damaged|format"):
            read_weights(path)
        used = read_weights(folder)
        assert used.step == 1
        assert torch.equal(used.rows_KD, before.rows_KD)
        flip_bit(file, bit)
    assert verified(path).manifest.step == 2


def truncate(path: Path) -> None:
    for file in path.iterdir():
        contents = file.read_bytes()
        file.write_bytes(contents[: len(contents) // 2])


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def take_from_before(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(
        (path.parent / "step-00000001" / name).read_bytes()
    )


def add_file(path: Path) -> None:
    shutil.copy(path / ROWS, path / "rows-items-00001-00000.safetensors")


def swap(path: Path) -> None:
    one, other = path / ROWS, path / DENSE
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)


def be_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / "step-00000001", path)


def lose_all(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        remove(DENSE),
        remove(ROWS),
        remove(MANIFEST),
        take_from_before(DENSE),
        take_from_before(ROWS),
        take_from_before(MANIFEST),
        add_file,
        swap,
        be_another_step,
        lose_all,
    ],
    ids=lambda damage: getattr(damage, "__qualname__", "").split(".")[0],
)
def test_a_file_short_missing_swapped_older_or_extra_is_noticed(
    folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
):
    damage(folder / "step-00000002")
    with pytest.raises(CheckpointError) as caught:
        verified(folder / "step-00000002")
    assert "\n" not in str(caught.value)
    good = newest(folder)
    assert good is not None
    assert good.name == "step-00000001"
    assert "skipped step-00000002: " in caplog.text
    assert read_weights(folder).step == 1


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EIO])
def test_one_that_is_removed_or_refused_while_it_is_opened_is_skipped(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """By a retention beside it, a mode or a disk: no reason to leave the others unused."""
    look = Path.iterdir

    def fail(path: Path):
        if path.name == "step-00000002":
            raise OSError(number, os.strerror(number), str(path))
        return look(path)

    monkeypatch.setattr(Path, "iterdir", fail)
    assert read_weights(folder).step == 1
    assert "skipped step-00000002: " in caplog.text


def test_what_comes_while_others_are_read_and_removed_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that keeps one checkpoint replaces it while a service loads it."""
    shutil.rmtree(folder / "step-00000001")
    read = disk.read_bytes
    steps = iter([3, 4])

    def train_on(path: Path, expected: disk.WrittenFile | None) -> bytearray:
        if path.name == ROWS and (step := next(steps, None)) is not None:
            write(folder, step)
            shutil.rmtree(path.parent)
        return read(path, expected)

    monkeypatch.setattr(disk, "read_bytes", train_on)
    assert read_weights(folder).step == 4


def test_one_that_is_written_anew_while_it_is_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """As `compact` does; the older one must not be taken instead."""
    verify, times = Checkpoint.verify, iter(range(1))

    def compacted(checkpoint: Checkpoint) -> None:
        if next(times, None) is not None:
            set_number(checkpoint.path, DENSE, "model.head.3.bias", 7.0)
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", compacted)
    good = newest(folder)
    assert good is not None
    assert good.name == "step-00000002"


def test_every_truncation_of_a_small_file_is_noticed(folder: Path):
    path = folder / "step-00000002"
    for file in list(path.iterdir()):
        contents = file.read_bytes()
        for size in range(0, len(contents), 1 + len(contents) // 40):
            file.write_bytes(contents[:size])
            with pytest.raises(CheckpointError):
                verified(path)
        file.write_bytes(contents)
    verified(path)


def test_where_all_are_damaged_the_newest_one_s_reason_is_told(folder: Path):
    for path in paths_in(folder):
        (path / DENSE).unlink()
    with pytest.raises(CheckpointError, match=r"of the newest: .*step-00000002.*missing"):
        newest(folder)


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nothing") is None


def test_a_manifest_that_fits_nothing_is_refused(folder: Path):
    path = folder / "step-00000002"
    (path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="no JSON"):
        open_checkpoint(path)
    files = {"../../etc/passwd": read_manifest(folder / "step-00000001").files[DENSE]}
    shutil.copy(folder / "step-00000001" / MANIFEST, path / MANIFEST)
    with pytest.raises(ValueError, match="names a file"):
        change_manifest(path, step=2, files=files)
    with pytest.raises(CheckpointError, match="does not read as a manifest"):
        open_checkpoint(path)


def test_a_checkpoint_without_checksums_loads_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    """Format 1, as it was written before."""
    path = folder / "step-00000002"
    about = json.loads((path / MANIFEST).read_text())
    old = {name: about[name] for name in ("step", "epoch", "position", "optimizer", "tables")}
    (path / MANIFEST).unlink()
    old |= {"format": 1, "model": about["model"], "first_rows": {}}
    (path / "run.json").write_text(json.dumps(old))
    assert read_weights(folder).step == 2
    assert "is of format 1, which has no checksums" in caplog.text


def test_a_checkpoint_in_the_making_is_none(folder: Path):
    (folder / "step-00000002").rename(folder / ".partial-step-00000002")
    assert [path.name for path in candidates(folder)] == ["step-00000001"]
    write(folder, 3)
    assert not list(folder.glob(".partial-*"))


def test_a_step_that_is_written_again_replaces_the_old_one_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """There is a good checkpoint of that name at every moment."""
    hash_before = read_manifest(folder / "step-00000002").hash
    seen: list[str] = []

    def look(call: str, path: Path) -> None:
        seen.append(verified(folder / "step-00000002").manifest.hash)

    set_number(folder / "step-00000002", DENSE, "model.head.3.bias", 7.0)
    changed = read_manifest(folder / "step-00000002").hash
    assert changed != hash_before
    monkeypatch.setattr(disk, "before_call", look)
    write(folder, 2)
    assert set(seen) == {hash_before, changed}


def test_where_names_cannot_be_swapped_a_good_one_is_found_at_every_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on NFS; so a process that ends anywhere leaves the newest step."""
    monkeypatch.setattr(disk.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=None))
    found: list[tuple[str, int | None]] = []

    def look(call: str, path: Path) -> None:
        good = newest(folder, tell=False)
        found.append((call, None if good is None else good.manifest.step))
        if call == "rename" and path == folder / "step-00000002":
            shutil.copytree(folder, ended, ignore=shutil.ignore_patterns(".lock"))

    ended = folder.parent / f"{folder.name}-ended"
    monkeypatch.setattr(disk, "before_call", look)
    write(folder, 2)
    assert {call for call, _ in found} >= {"exchange", "rename", "remove"}
    assert {step for _, step in found} == {2}
    assert [path.name for path in paths_in(folder)] == ["step-00000001", "step-00000002"]
    monkeypatch.undo()
    assert [path.name for path in paths_in(ended)] == ["step-00000001", "step-000000002"]
    write(ended, 2)
    assert [path.name for path in paths_in(ended)][-1] == "step-00000002"
    assert verified(ended / "step-00000002")


def test_modes_follow_the_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        path = write(tmp_path / "run", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nothing_that_is_not_finite_is_ever_saved(tmp_path: Path, value: float):
    with pytest.raises(RunError, match="holds NaN or inf, so the checkpoint is not written"):
        disk.write_tensors(tmp_path / "file", {"w": torch.tensor([1.0, value])})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "No space left on device .*; free space, keep fewer checkpoints"),
        (errno.EACCES, "Permission denied .*; make the folder writable"),
        (errno.EIO, "Input/output error .*; check the disk"),
    ],
)
def test_a_fault_of_the_disk_is_one_sentence_and_leaves_the_old_ones(
    folder: Path, number: int, says: str, monkeypatch: pytest.MonkeyPatch
):
    """At every call that changes the file system, one after the other."""
    calls = 0

    def count(call: str, path: Path) -> None:
        nonlocal calls
        calls += 1

    with monkeypatch.context() as patched:
        patched.setattr(disk, "before_call", count)
        write(folder, 3)
    shutil.rmtree(folder / "step-00000003")
    for failing in range(calls):
        left = failing

        def fail(call: str, path: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number), str(path))

        with monkeypatch.context() as patched:
            patched.setattr(disk, "before_call", fail)
            with pytest.raises(CheckpointError, match=says) as caught:
                write(folder, 3)
        assert "\n" not in str(caught.value)
        good = newest(folder)
        assert good is not None
        assert good.manifest.step in (2, 3)
        shutil.rmtree(folder / "step-00000003", ignore_errors=True)
    write(folder, 3)
    assert verified(folder / "step-00000003")


def test_a_lock_that_cannot_be_written_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else the next try, by the same process too, would find it taken."""

    def full(file: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", full)
        with pytest.raises(CheckpointError, match="No space left on device"), disk.locked(tmp_path):
            pytest.fail("it is not locked")
    with disk.locked(tmp_path):
        assert "process" in (tmp_path / disk.LOCK).read_text()


def test_manifests_of_other_checkpoints_do_not_pile_up(folder: Path):
    known = KnownManifests()
    first = known.open(folder / "step-00000001")
    assert known.knows(first)
    second = known.open(folder / "step-00000002")
    assert known.knows(second)
    assert not known.knows(first)


def test_a_run_does_not_begin_before_a_step_of_more_digits(tmp_path: Path):
    write(tmp_path, 100_000_000)
    job = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(checkpoint=str(tmp_path))),
        trainer=SimpleNamespace(
            progress=SimpleNamespace(step=99_999_999), comm=LocalCommunicator()
        ),
    )
    with pytest.raises(CheckpointError, match="already holds step-100000000"):
        _refuse_newer(cast("Job", job))
    job.trainer.progress.step = 100_000_000
    _refuse_newer(cast("Job", job))


@pytest.mark.parametrize("form", [3, "two"])
def test_a_run_does_not_take_the_place_of_a_later_format(tmp_path: Path, form: object):
    """The newest one is skipped, as if it were damaged; going on would write over it."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = tmp_path / "step-00000002" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": form, "hash": "other"}))
    assert read_weights(tmp_path).step == 1
    job = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(checkpoint=str(tmp_path))),
        trainer=SimpleNamespace(progress=SimpleNamespace(step=1), comm=LocalCommunicator()),
    )
    if form == 3:
        with pytest.raises(CheckpointError, match=r"at step 1, and .* is of format 3, and this"):
            _refuse_newer(cast("Job", job))
    else:
        _refuse_newer(cast("Job", job))  # that is damage


def test_a_flipped_bit_in_the_number_of_the_format_is_damage(folder: Path):
    path = folder / "step-00000002" / MANIFEST
    text = path.read_text()
    path.write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(CheckpointError, match="is damaged: its contents"):
        read_manifest(path.parent)


def test_a_checkpoint_without_its_manifest_is_damaged(folder: Path):
    (folder / "step-00000002" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: it has no manifest\.json; use another"):
        open_checkpoint(folder / "step-00000002")


def test_a_second_writer_is_refused_in_one_sentence(folder: Path):
    """A process of its own holds the lock."""
    parent, child = os.pipe()
    pid = os.fork()
    if pid == 0:  # it ends without pytest's own clean-up
        with disk.locked(folder / "held"):
            os.write(child, b"x")
            signal.pause()
    os.read(parent, 1)
    try:
        with (
            pytest.raises(CheckpointError, match=rf"process {pid} on \S+ writes checkpoints to"),
            disk.locked(folder / "held"),
        ):
            pass
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    with disk.locked(folder / "held"), disk.locked(folder / "held"):
        write(folder / "held", 1)


def test_a_folder_that_cannot_be_written_is_noticed_before_training(tmp_path: Path):
    (tmp_path / "file").write_text("")
    config = build(
        JobConfig,
        {
            "data": {"synthetic": {"samples": 64, "num_tables": 2}},
            "run": {"batch": 16, "device": "cpu", "checkpoint": str(tmp_path / "file")},
        },
    )
    steps: list[object] = []
    with pytest.raises(CheckpointError, match=r"cannot write to .*; check the disk"):
        train_job(make_job(config, LocalCommunicator()), steps.append)
    assert not steps


def test_errors_of_use_are_not_hidden(folder: Path):
    def refuse(path: Path) -> None:
        raise NestpipeError("another matter")

    with pytest.raises(NestpipeError, match="another matter"):
        first_good(candidates(folder), refuse)


def test_a_newer_row_of_an_increment_wins(folder: Path):
    """Serving reads the parent, then the increment."""
    full = read_manifest(folder / "step-00000001")
    write_checkpoint(
        folder,
        Manifest(step=3, tables=full.tables, model=full.model),
        open_checkpoint(folder / "step-00000001").dense(),
        {"items": (torch.tensor([2, 40]), torch.full((2, 5), 7.0))},
    )
    parent = Parent(name="step-00000001", hash=full.hash)
    change_manifest(folder / "step-00000003", parent=parent)
    weights = read_weights(folder)
    assert weights.step == 3
    assert weights.items_K.tolist() == [*range(9), 40]
    assert np.array_equal(weights.rows_KD[2].numpy(), np.full(4, 7.0, np.float32))
    before = read_weights(folder / "step-00000001")
    assert torch.equal(weights.rows_KD[3], before.rows_KD[3])
    set_number(folder / "step-00000001", ROWS, "rows", 0.5)  # another one of that name
    with pytest.raises(CheckpointError, match="is not the checkpoint that it goes on from"):
        open_checkpoint(folder / "step-00000003")
