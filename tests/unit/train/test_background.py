"""Checkpoints are written while training goes on; increments or full, they restore every bit."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe import Table, Trainer, TrainSettings
from nestpipe.checkpoint import disk
from nestpipe.checkpoint import folder as folder_module
from nestpipe.checkpoint.folder import (
    DENSE,
    Checkpoint,
    newest,
    open_checkpoint,
    paths_in,
    read_manifest,
    verified,
)
from nestpipe.checkpoint.merging import compact, difference, merged_rows
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import DataConfig, SyntheticConfig, open_source
from nestpipe.embedding import pool as pool_module
from nestpipe.embedding.pool import PoolSnapshot, RowPool
from nestpipe.embedding.slot_transfer import DirectTransfer, StagedTransfer
from nestpipe.embedding.store import open_store
from nestpipe.embedding.store.protocol import StoreLayout
from nestpipe.errors import CapacityError, CheckpointError, RunError
from nestpipe.kernels.index.device_index import KeyCells
from nestpipe.models import LogisticRegression
from nestpipe.train import background, train_job
from nestpipe.train import checkpoint as checkpoint_module
from nestpipe.train import trainer as trainer_module
from nestpipe.train.background import BackgroundWriter, CopyRoom, TouchedKeys, TrackedStore
from nestpipe.train.checkpoint import dense_tensors, hold_dense
from nestpipe.train.config import PipelineSettings
from nestpipe.train.job import prepare
from support.checkpoints import flip_bit
from support.emulated_kernels import pools_on_emulated_gpu
from support.examples import every, is_long
from support.thread_ranks import run_ranks
from unit.train.test_resume import assert_same, job_of, trained

EVERY: dict[str, Any] = {"checkpoint_every": 4, "incremental": True, "full_every": 0}


@pytest.mark.parametrize("plan", ["serial", "nested", "dual_buffer"])
@pytest.mark.parametrize("retrieval", ["whole", "new"])
def test_a_chain_of_increments_restores_every_bit(tmp_path: Path, plan: str, retrieval: str):
    pipeline = {"plan": plan, "retrieval": retrieval}
    trained(job_of(tmp_path / "straight", run={"checkpoint_every": 4}))
    trained(job_of(tmp_path / "run", run=EVERY, pipeline=pipeline))
    kinds = [len(open_checkpoint(path).parents) for path in paths_in(tmp_path / "run")]
    assert kinds == list(range(7))
    for path in paths_in(tmp_path / "run"):
        full = verified(tmp_path / "straight" / path.name)
        assert difference(full, verified(path)).same_state
    trained(job_of(tmp_path / "other", run={"steps": 9}))
    shutil.rmtree(tmp_path / "run" / "step-00000026")
    trained(job_of(tmp_path / "run", run=EVERY, pipeline=pipeline), "auto")
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_a_chain_is_never_longer_than_a_restore_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With run.full_every = 0 as well; a longer one would lose its oldest rows."""
    with monkeypatch.context() as patched:
        for module in (folder_module, background):
            patched.setattr(module, "MOST_PARENTS", 2)
        trained(job_of(tmp_path, run=EVERY))
        kinds = [len(verified(path).parents) for path in paths_in(tmp_path)]
        assert kinds == [0, 1, 2, 0, 1, 2, 0]
        patched.setattr(folder_module, "MOST_PARENTS", 1)
        with pytest.raises(CheckpointError, match="more than 1 parents"):
            open_checkpoint(paths_in(tmp_path)[2])


def test_every_so_many_increments_one_is_made_full_and_old_ones_go(tmp_path: Path):
    trained(job_of(tmp_path / "straight"))
    trained(job_of(tmp_path / "run", run={**EVERY, "full_every": 2, "keep_last": 2}))
    assert_same(tmp_path / "run", tmp_path / "straight")
    kept = [open_checkpoint(path) for path in paths_in(tmp_path / "run")]
    assert len(kept) <= 4
    assert any(not one.parents for one in kept)
    assert all(len(one.parents) < 3 for one in kept)


def test_an_increment_holds_little_more_than_the_touched_rows(tmp_path: Path):
    trained(job_of(tmp_path, run=EVERY))
    for path in paths_in(tmp_path)[1:]:
        one = open_checkpoint(path)
        entries = [entry for entry in one.manifest.files.values() if entry.table]
        rows = sum(entry.rows for entry in entries)
        touched = rows * (8 + 4 * 5)  # a key, four weights, one number of state
        headers = 200 * len(entries)
        assert sum(entry.num_bytes for entry in entries) <= touched + headers
        assert rows < one.manifest.num_rows


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2), (2, 1)])
def test_ranks_write_increments_together_and_others_go_on(tmp_path: Path, ranks: tuple[int, int]):
    def one(comm: Any, steps: int) -> int:
        job = prepare(job_of(tmp_path, run={**EVERY, "steps": steps}), comm, "auto")
        return train_job(job, lambda report: None).steps

    if ranks[0] == 1:
        trained(job_of(tmp_path, run={**EVERY, "steps": 10}), "auto")
    else:
        run_ranks(ranks[0], lambda comm: one(comm, 10))
    middle = newest(tmp_path)
    assert middle is not None
    assert [parent.name for parent in middle.parents] == ["step-00000004", "step-00000008"]
    if ranks[1] == 1:
        trained(job_of(tmp_path, run=EVERY), "auto")
    else:
        assert run_ranks(ranks[1], lambda comm: one(comm, 0)) == [26, 26]
    last = newest(tmp_path)
    assert last is not None
    assert len(last.parents) == 7
    counts = {str(t["name"]): int(t["rows"]) for t in last.manifest.tables}
    for name, count in counts.items():
        keys = {int(key) for part, _ in last.rows(name) for key in part}
        assert len(keys) == count


def test_a_full_disk_in_the_background_ends_the_run_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trained(job_of(tmp_path, run={**EVERY, "steps": 8}))

    def fail(call: str, path: Path) -> None:
        if "step-00000016" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(disk, "before_call", fail)
    with pytest.raises(CheckpointError, match=r"step-00000016.*No space left on device"):
        trained(job_of(tmp_path, run=EVERY), "auto")
    good = newest(tmp_path)
    assert good is not None
    assert good.name == "step-00000012"


def test_a_mistake_of_the_thread_that_writes_ends_the_run_and_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not only errors meant for people: training must not take for written what is not."""

    def fail(*_: object) -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr(background, "write_rows", fail)
    with pytest.raises(
        RunError, match=r"step-00000004' was not written: ValueError\('a mistake'\)"
    ):
        trained(job_of(tmp_path, run=EVERY))
    assert newest(tmp_path) is None


@pytest.mark.parametrize("seed", range(5))
def test_touched_keys_are_those_of_a_set(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "MANY_KEYS", 40)
    rng = random.Random(seed)
    touched, reference = TouchedKeys(3), [set[int]() for _ in range(3)]
    for _ in range(200):
        parts = [sorted(rng.sample(range(-50, 50), rng.randrange(4))) for _ in reference]
        keys = torch.tensor([key for part in parts for key in part], dtype=torch.int64)
        drops = rng.random() < 0.1
        (touched.drop if drops else touched.add)(keys, [len(part) for part in parts])
        keys.fill_(0)  # it is the caller's again
        for of, part in zip(reference, parts, strict=True):
            of.difference_update(part) if drops else of.update(part)
        if rng.random() < 0.05:
            assert [of.tolist() for of in touched.ascending()] == [sorted(of) for of in reference]
    assert [of.tolist() for of in touched.ascending()] == [sorted(of) for of in reference]


def test_copies_have_memory_of_their_own_until_the_room_is_cleared():
    room = CopyRoom()
    room.clear(30)
    taken = [room.take(2, 5), room.take(1, 3), room.take(4, 100)]
    for number, rows in enumerate(taken):
        rows.fill_(number)
    for number, rows in enumerate(taken):
        assert bool((rows == number).all())
    before = taken[0].data_ptr()
    room.clear(25)
    assert room.take(2, 5).data_ptr() == before, "the same pages again"
    room.clear(3)
    assert room.num_bytes < 30, "much less is needed, so the system gets it back"


def test_a_store_notes_what_is_written_or_located():
    layout = StoreLayout(table_seeds=(1, 2), init_stds=(0.1, 0.1), dim=2, state_dim=1)
    store = TrackedStore(open_store(layout, native=True))
    rows = torch.arange(9.0).reshape(3, 3)
    store.scatter(torch.tensor([5, 3, 7]), [2, 1], rows)
    store.track()
    assert [len(keys) for keys in store.touched()] == [0, 0]
    store.scatter(torch.tensor([3, 9, 8]), [2, 1], rows)
    located = store.abilities.locate
    assert located is not None
    for key in range(100, 170):
        located.locate(torch.tensor([key]), [1, 0])
    tables_n = torch.tensor([1, 0, 1], dtype=torch.int32)
    located.locate_each(torch.tensor([20, 170, 10]), tables_n, torch.zeros(3, dtype=torch.int64))
    first, second = store.touched()
    assert first.tolist() == [3, 9, *range(100, 171)]
    assert second.tolist() == [8, 10, 20]
    (block,) = store.rows_at(1, second[:1])
    assert torch.equal(block[1], rows[2:])
    store.close()


def assert_each_is_that_of(folder: Path, reference: Path, *, parents: bool) -> None:
    """Every checkpoint has the bits of the one that another run has of that step."""
    names = [path.name for path in paths_in(folder)]
    assert names == [path.name for path in paths_in(reference)]
    for name in names:
        found = verified(folder / name)
        assert difference(verified(reference / name), found).same_state, name
        if not parents:
            assert not found.parents
    assert parents == any(verified(folder / name).parents for name in names)


def begin_alike(*folders: Path) -> None:
    """One step for all: ranks that are threads share torch's random state, so may differ."""
    trained(job_of(folders[0], run={"steps": 1}))
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)


def write_from_memory(job: Any) -> None:
    """What full checkpoints in the background are compared with: training waits for them."""
    while job.trainer.progress.epoch < job.config.run.epochs:
        done = job.trainer.progress
        job.trainer.fit(job.train, steps=4 - done.step % 4, epochs=done.epoch + 1)
        if job.trainer.progress.step % 4 == 0:
            job.trainer.save(job.config.run.checkpoint)
    job.trainer.save(job.config.run.checkpoint)


def test_a_full_checkpoint_in_the_background_is_the_one_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its files too: parts are cut where those from memory are, also where there are many."""
    monkeypatch.setattr("nestpipe.checkpoint.merging.PART_BYTES", 800)
    write_from_memory(prepare(job_of(tmp_path / "memory"), LocalCommunicator()))
    outcome, _ = trained(job_of(tmp_path / "run", run={"checkpoint_every": 4}))
    assert_each_is_that_of(tmp_path / "run", tmp_path / "memory", parents=False)
    for path in paths_in(tmp_path / "run"):
        files = read_manifest(path).files
        assert files == read_manifest(tmp_path / "memory" / path.name).files
    assert len(read_manifest(paths_in(tmp_path / "run")[-1]).files) > 5
    assert outcome.saving.checkpoints == 7
    written = sum(read_manifest(path).num_bytes for path in paths_in(tmp_path / "run"))
    assert outcome.saving.gigabytes == pytest.approx(written / 1e9)


@pytest.mark.parametrize(
    ("merge", "merge_every", "incremental"),
    [("exact", 1, True), ("averaged", 1, False), ("averaged", 3, True)]
    + [("exact", 1, False), ("averaged", 1, True), ("averaged", 3, False)] * is_long(),
)
def test_groups_of_ranks_write_what_any_of_them_touched(
    tmp_path: Path, incremental: bool, merge: str, merge_every: int
):
    parallel = {"groups": 2, "merge": merge, "merge_every": merge_every}

    def memory(comm: Any) -> None:
        config = job_of(tmp_path / "memory", parallel=parallel)
        write_from_memory(prepare(config, comm, "auto", override=True))

    def one(comm: Any) -> int:
        run = {**EVERY, "incremental": incremental}
        config = job_of(tmp_path / "run", run=run, parallel=parallel)
        return train_job(prepare(config, comm, "auto", override=True), lambda report: None).steps

    begin_alike(tmp_path / "run", tmp_path / "memory")
    run_ranks(4, memory)
    assert run_ranks(4, one) == [26] * 4
    assert_each_is_that_of(tmp_path / "run", tmp_path / "memory", parents=incremental)
    shutil.rmtree(tmp_path / "run" / "step-00000026")
    assert run_ranks(4, one) == [26] * 4
    assert_each_is_that_of(tmp_path / "run", tmp_path / "memory", parents=incremental)


@pytest.mark.parametrize(
    ("ranks", "routed", "memory"),
    every(2, [*product([1, 2], ["by the host", "by the device", "by kernels"], ["auto", "11KB"])]),
)
def test_a_pool_s_rows_are_in_increments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, routed: str, memory: str
):
    """11 KB: rows leave the pool and come back."""
    monkeypatch.setattr(trainer_module, "can_route_on_device", lambda *_: routed != "by the host")

    def one(comm: Any, folder: str, retrieval: str, **run: Any) -> None:
        pipeline = {"plan": "nested", "retrieval": retrieval, "owner_sums": "off"}
        run = {**EVERY, "device_memory": memory, **run}
        job = prepare(job_of(tmp_path / folder, run=run, pipeline=pipeline), comm, "auto")
        train_job(job, lambda report: None)

    begin_alike(tmp_path / "run", tmp_path / "memory")
    run_ranks(ranks, lambda comm: one(comm, "memory", "whole", incremental=False))
    if routed == "by kernels":
        with pools_on_emulated_gpu():
            run_ranks(ranks, lambda comm: one(comm, "run", "pooled"))
    else:
        run_ranks(ranks, lambda comm: one(comm, "run", "pooled"))
    assert_each_is_that_of(tmp_path / "run", tmp_path / "memory", parents=True)


@dataclass
class PoolsAtCheckpoints:
    """What was asked of pools while checkpoints began."""

    copied: int = 0
    flushed: int = 0


@contextmanager
def watched_pools() -> Iterator[PoolsAtCheckpoints]:
    seen, begins = PoolsAtCheckpoints(), threading.local()
    begin, snapshot, flush = BackgroundWriter.begin, RowPool.snapshot, RowPool.flush

    def begun(*given: Any) -> Path:
        begins.now = True
        try:
            return begin(*given)
        finally:
            begins.now = False

    def taken(pool: RowPool, *, copy: bool = True) -> PoolSnapshot | None:
        found = snapshot(pool, copy=copy)
        seen.copied += found is not None
        return found

    def flushed(pool: RowPool) -> None:
        seen.flushed += getattr(begins, "now", False)
        flush(pool)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundWriter, "begin", begun)
        patch.setattr(RowPool, "snapshot", taken)
        patch.setattr(RowPool, "flush", flushed)
        yield seen


def assert_same_files(one: Path, other: Path) -> None:
    """All checkpoints have the same rows in the same files, and say the same of tables."""
    names = [path.name for path in paths_in(one)]
    assert names == [path.name for path in paths_in(other)]
    for name in names:
        ours, theirs = (read_manifest(folder / name) for folder in (one, other))
        assert ours.files == theirs.files, name
        assert ours.tables == theirs.tables, name
        verified(one / name)


POOLED: dict[str, Any] = {"plan": "nested", "retrieval": "pooled", "owner_sums": "off"}


@pytest.mark.parametrize(
    ("ranks", "routed", "memory", "incremental"),
    every(
        3,
        [
            *product(
                [1, 2],
                ["by the host", "by the device", "by kernels"],
                ["auto", "11KB"],
                [True, False],
            )
        ],
    ),
)
def test_rows_copied_in_the_pool_are_those_of_a_flush(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    routed: str,
    memory: str,
    incremental: bool,
):
    """File by file. Step 13 ends an epoch, where evaluation flushes either way."""
    monkeypatch.setattr(trainer_module, "can_route_on_device", lambda *_: routed != "by the host")
    run = {**EVERY, "incremental": incremental, "device_memory": memory}

    def one(comm: Any, on_device: bool) -> None:
        config = job_of(
            tmp_path / str(on_device),
            run={**run, "snapshot_on_device": on_device},
            pipeline=POOLED,
        )
        train_job(prepare(config, comm, "auto"), lambda report: None)

    begin_alike(tmp_path / "True", tmp_path / "False")
    for on_device in (True, False):
        with watched_pools() as seen, ExitStack() as kernels:
            if routed == "by kernels":
                kernels.enter_context(pools_on_emulated_gpu())
            run_ranks(ranks, lambda comm: one(comm, on_device))  # noqa: B023 - it ends here
        assert (seen.copied > 0) == on_device
        assert (seen.flushed == 0) == on_device
    if incremental and memory != "auto" and routed == "by kernels":
        # Which rows leave depends on timing there, and increments have those too.
        assert_each_is_that_of(tmp_path / "True", tmp_path / "False", parents=True)
    else:
        assert_same_files(tmp_path / "True", tmp_path / "False")


def written_from_a_pool(folder: Path, *, on_device: bool, **about: Any) -> None:
    """Some increments of two tables with such settings."""
    torch.manual_seed(0)
    source = open_source(DataConfig(synthetic=SyntheticConfig(samples=400, num_tables=2)))
    tables = [Table(name=f"c{n}", dim=1, pooling="sum", init_std=0.3, **about) for n in (0, 1)]
    pipeline = build(PipelineSettings, POOLED)
    settings = TrainSettings(batch=40, device="cpu", device_memory="14KB", pipeline=pipeline)
    trainer = Trainer(LogisticRegression(("c0", "c1"), 13), tables, settings)
    trainer.track_rows()
    writer = BackgroundWriter(folder, trainer.mesh, 1e9, on_device=on_device)
    last = None
    for _ in range(4):
        trainer.fit(source, steps=2)
        last = trainer.save_in_background(writer, last)
    writer.wait()
    trainer.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_few_bits_are_copied_as_the_store_would_keep_them(tmp_path: Path, dtype: str):
    for on_device in (True, False):
        written_from_a_pool(tmp_path / str(on_device), on_device=on_device, dtype=dtype)
    assert_same_files(tmp_path / "True", tmp_path / "False")


def test_a_table_beyond_its_limit_is_refused_though_its_rows_are_in_a_pool_alone(tmp_path: Path):
    """In the sentence of the store that a flush would have asked."""
    sentence = r"table 'c\d' would have [\d,]+ rows here and may have"
    for on_device in (True, False):
        with pytest.raises(CapacityError, match=sentence):
            written_from_a_pool(tmp_path / str(on_device), on_device=on_device, max_rows=60)


def test_where_the_device_has_no_room_for_copies_rows_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    trained(job_of(tmp_path / "copied", run=EVERY, pipeline=POOLED))
    monkeypatch.setattr(pool_module, "SNAPSHOT_SHARE", 0.0)
    with watched_pools() as seen:
        trained(job_of(tmp_path / "flushed", run=EVERY, pipeline=POOLED))
    assert (seen.copied, seen.flushed) == (1, 6), "the last one follows the evaluation's flush"
    assert "too much of what is left on the device" in caplog.text
    assert_same_files(tmp_path / "copied", tmp_path / "flushed")


def test_dense_weights_held_in_pieces_are_those_copied_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of several types, shapes and layouts; changing them later changes no copy."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("tilted", torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t())
    model.register_buffer("none", torch.empty(0, 5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    plain = dense_tensors(model, optimizer)
    monkeypatch.setattr(checkpoint_module, "_is_on_device", lambda tensor: tensor.ndim > 0)
    held = hold_dense(model, optimizer, keep=True, on_device=True)
    assert set(held.pieces) == {torch.float32, torch.float64}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    found = held.on_host(lambda tensor: tensor)
    assert list(found) == list(plain)
    for name, tensor in plain.items():
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name
    monkeypatch.setattr(checkpoint_module, "SNAPSHOT_SHARE", 0.0)
    assert not hold_dense(model, optimizer, keep=True, on_device=True).pieces
    assert not hold_dense(model, optimizer, keep=False, on_device=True).on_host(torch.clone)


def test_rows_that_a_gpu_writes_by_itself_are_noted():
    """Where it knows the addresses of all rows, the store sees no call."""
    layout = StoreLayout(table_seeds=(1, 2), init_stds=(0.1, 0.1), dim=3, state_dim=1)
    store = TrackedStore(open_store(layout, native=True))
    pool = RowPool(store, 8, torch.device("cpu"))
    by_store = StagedTransfer(store, pool.rows_SW, pool._stored_S, layout.num_tables)
    pool._transfer = direct = DirectTransfer(
        store, pool.rows_SW, pool._stored_S, layout.num_tables, by_store
    )
    copied: list[bool] = []
    direct._pinner.pin = lambda: True  # type: ignore[method-assign]
    direct._copy = lambda slots_n, *, to_store: copied.append(to_store)  # type: ignore[method-assign]
    pool.begin_run()
    cells = KeyCells(torch.tensor([2, 3]))
    pool.admit(0, torch.tensor([5, 3, 7]), cells)
    pool.retrieve(0)
    store.track()
    pool.flush()
    assert copied == [False, True]
    assert [keys.tolist() for keys in store.touched()] == [[3, 5], [7]]
    store.close()


def test_where_rows_do_not_fit_twice_training_waits_for_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trained(job_of(tmp_path / "copied", run=EVERY))
    monkeypatch.setattr(background, "free_memory", lambda: 0.0)
    for incremental in (True, False):
        folder = tmp_path / f"waited-{incremental}"
        trained(job_of(folder, run={**EVERY, "incremental": incremental}))
        assert_each_is_that_of(folder, tmp_path / "copied", parents=incremental)


@pytest.mark.parametrize("name", [DENSE, "rows-c0-00000-00000.safetensors"])
def test_a_parent_that_is_lost_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture
):
    """What memory holds is written anew; only checkpoints that hold the damage are damaged."""
    trained(job_of(tmp_path / "straight", run={"checkpoint_every": 4}))
    save = trainer_module.Trainer.save_in_background

    def damaging(self: Any, writer: Any, parent: Path | None, **about: Any) -> Path:
        if parent is not None and parent.name == "step-00000008":
            flip_bit(parent / name, 9000)
        return save(self, writer, parent, **about)

    monkeypatch.setattr(trainer_module.Trainer, "save_in_background", damaging)
    trained(job_of(tmp_path / "run", run={"checkpoint_every": 4}))
    assert ("the next checkpoint is written from memory" in caplog.text) == (name != DENSE)
    for path in paths_in(tmp_path / "run"):
        if path.name == "step-00000008":
            with pytest.raises(CheckpointError, match="damaged"):
                verified(path)
        else:
            assert difference(
                verified(tmp_path / "straight" / path.name), verified(path)
            ).same_state
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_a_checkpoint_of_that_name_but_of_another_run_is_no_parent(tmp_path: Path):
    trained(job_of(tmp_path / "one", run={"steps": 4}))
    trained(job_of(tmp_path / "other", run={"steps": 4, "seed": 7}))
    run = {"checkpoint_every": 4, "incremental": True}
    trained(job_of(tmp_path / "other", run=run), str(tmp_path / "one" / "step-00000004"))
    trained(job_of(tmp_path / "one", run=run), "auto")
    assert_same(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (2, 3)])
def test_a_chain_of_several_numbers_of_ranks_is_made_full(tmp_path: Path, ranks: tuple[int, int]):
    """From files alone by `compact`, and by the ranks of the run that goes on."""

    def one(comm: Any, steps: int, **run: Any) -> None:
        config = job_of(tmp_path / "run", run={**EVERY, "steps": steps, **run})
        train_job(prepare(config, comm, "auto"), lambda report: None)

    run_ranks(ranks[0], lambda comm: one(comm, 10))
    run_ranks(ranks[1], lambda comm: one(comm, 18))
    middle = newest(tmp_path / "run")
    assert middle is not None
    before = contents_of(middle)
    compact(middle.path)
    after = verified(middle.path)
    assert not after.parents
    assert same(contents_of(after), before)
    run_ranks(2, lambda comm: one(comm, 26, incremental=False))
    last = newest(tmp_path / "run")
    assert last is not None
    assert not last.parents
    for table in last.manifest.tables:
        keys = [int(key) for part, _ in last.rows(str(table["name"])) for key in part]
        assert len(keys) == len(set(keys)) == table["rows"]


def contents_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    found = dict(checkpoint.dense())
    for table in checkpoint.manifest.tables:
        keys, rows = merged_rows(checkpoint, str(table["name"]))
        found |= {f"{table['name']} keys": keys, f"{table['name']} rows": rows}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
