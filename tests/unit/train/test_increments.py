"""Increments hold what was touched, are written while training goes on, and restore every bit."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import difference, newest, open_checkpoint, paths_in, verified
from nestpipe.embedding.store import open_store
from nestpipe.embedding.store.protocol import StoreLayout
from nestpipe.errors import CheckpointError
from nestpipe.train import train_job
from nestpipe.train.checkpoint import TrackedStore
from nestpipe.train.job import prepare
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


def test_a_store_notes_what_is_written_or_located():
    layout = StoreLayout(table_seeds=(1, 2), init_stds=(0.1, 0.1), dim=2, state_dim=1)
    store = TrackedStore(open_store(layout, native=True))
    rows = torch.arange(9.0).reshape(3, 3)
    store.scatter(torch.tensor([5, 3, 7]), [2, 1], rows)
    store.track()
    assert [len(keys) for keys, _ in store.touched_rows()] == [0, 0]
    store.scatter(torch.tensor([3, 9, 8]), [2, 1], rows)
    located = store.abilities.locate
    assert located is not None
    for key in range(100, 170):
        located.locate(torch.tensor([key]), [1, 0])
    (first, _), (second, second_rows) = store.touched_rows()
    assert first.tolist() == [3, 9, *range(100, 170)]
    assert second.tolist() == [8]
    assert torch.equal(second_rows, rows[2:])
    store.close()
