"""A run goes on exactly where it was, or is refused with the setting that is in the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe.batch import Batch
from nestpipe.checkpoint.folder import DENSE, Manifest, newest, paths_in
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.data import DataConfig, SyntheticConfig, open_source
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.train import JobConfig, train_job
from nestpipe.train.job import (
    changes,
    config_in,
    effect_of,
    prepare,
    refuse_changes,
    saved_config,
    with_old_order,
)
from support.checkpoints import change_manifest, flip_bit
from support.thread_ranks import run_ranks

SAMPLES, BATCH = 208, 16
WORLD: dict[str, dict[str, Any]] = {
    "data": {"synthetic": {"samples": SAMPLES, "test_samples": 32, "num_tables": 2}},
    "model": {"dim": 4, "bottom": [8, 4], "top": [8]},
    "run": {"batch": BATCH, "device": "cpu", "epochs": 2},
}


def job_of(folder: Path | str = "", **sections: dict[str, Any]) -> JobConfig:
    merged = {
        name: {**WORLD.get(name, {}), **sections.get(name, {})} for name in {*WORLD, *sections}
    }
    merged["run"] = {"checkpoint": str(folder), **merged["run"]}
    return build(JobConfig, merged)


def trained(config: JobConfig, resume: str | None = None, **options: Any):
    losses: list[float] = []
    job = prepare(config, LocalCommunicator(), resume, **options)
    outcome = train_job(job, lambda report: losses.append(report.loss))
    return outcome, losses


def contents(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint."""
    good = newest(path)
    assert good is not None
    rows = {
        (table["name"], int(key)): row
        for table in good.manifest.tables
        for keys, rows in good.rows(table["name"])
        for key, row in zip(keys, rows, strict=True)
    }
    return {**good.dense(), **{str(name): row for name, row in rows.items()}}


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_one_launch_line_begins_and_goes_on_bit_for_bit(tmp_path: Path):
    straight, losses = trained(job_of(tmp_path / "straight"), "auto")
    first, begun = trained(job_of(tmp_path / "run", run={"steps": 5}), "auto")
    assert first.steps == 5
    last, rest = trained(job_of(tmp_path / "run"), "auto")
    assert last.steps == straight.steps == 26
    assert begun + rest == losses
    assert_same(tmp_path / "run", tmp_path / "straight")
    again, none = trained(job_of(tmp_path / "run"), "auto")
    assert (again.steps, none, again.checkpoint) == (26, [], last.checkpoint)


def test_the_newest_good_checkpoint_is_gone_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    trained(job_of(tmp_path / "straight"))
    trained(job_of(tmp_path / "run", run={"checkpoint_every": 5, "steps": 15}))
    flip_bit(tmp_path / "run" / "step-00000015" / DENSE, 5000)
    outcome, losses = trained(job_of(tmp_path / "run"), "auto")
    assert "skipped step-00000015" in caplog.text
    assert len(losses) == 16
    assert outcome.steps == 26
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_a_fresh_start_in_a_folder_with_checkpoints_is_refused(tmp_path: Path):
    trained(job_of(tmp_path, run={"steps": 3}))
    with pytest.raises(CheckpointError, match=r"already holds step-00000003.*--resume"):
        trained(job_of(tmp_path))
    with pytest.raises(ConfigError, match=r"run\.checkpoint is empty"):
        trained(job_of(), "auto")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        trained(job_of(tmp_path), str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "batch", 8),
        ("run", "seed", 1),
        ("rows", "lr", 0.1),
        ("rows", "eps", 1e-3),
        ("dense", "lr", 0.1),
        ("model", "init_std", 0.1),
        ("model", "top", [9]),
        ("data", "shuffle", False),
        ("data", "synthetic", {"samples": SAMPLES, "num_tables": 2, "seed": 5}),
        ("pipeline", "comm_dtype", "bfloat16"),
    ],
)
def test_a_changed_setting_that_changes_results_is_named(
    tmp_path: Path, section: str, key: str, value: object
):
    trained(job_of(tmp_path, run={"steps": 3}))
    with pytest.raises(ConfigError, match=rf"{section}\.{key}[\w.]* is .* and was .*--override"):
        trained(job_of(tmp_path, **{section: {key: value}}), "auto")


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("pipeline", "micro_batches", 2, "changes only the order of sums"),
        ("pipeline", "exchange", "window", "exchange is 'window' instead of 'micro', which"),
        ("pipeline", "owner_sums", "off", "changes only the order of sums"),
        ("pipeline", "retrieval", "pooled", "changes only the order of sums"),
        ("pipeline", "retrieval", "new", ""),
        ("pipeline", "plan", "nested", ""),
        ("run", "in_place", False, ""),
        ("run", "checkpoint_every", 4, ""),
    ],
)
def test_speed_may_change_and_sums_are_noted(
    tmp_path: Path,
    section: str,
    key: str,
    value: object,
    says: str,
    caplog: pytest.LogCaptureFixture,
):
    trained(job_of(tmp_path, run={"steps": 3}))
    outcome, _ = trained(job_of(tmp_path, **{section: {key: value}}), "auto")
    assert outcome.steps == 26
    assert says in caplog.text
    assert bool(caplog.text) == bool(says)


@pytest.mark.parametrize("key", ["checkpoint_every", "eval_every"])
@pytest.mark.parametrize(("merge", "every"), [("exact", 1), ("averaged", 1), ("averaged", 4)])
def test_what_merges_replicas_once_more_may_not_change(
    tmp_path: Path, key: str, merge: str, every: int
):
    """A checkpoint and an evaluation merge what is left; every batch, there is nothing left."""
    parallel = {"groups": 2, "merge": merge, "merge_every": every}
    saved, now = (job_of(tmp_path, parallel=parallel, run={key: n}) for n in (2, 3))
    manifest = Manifest(step=2, config=asdict(saved))
    if every == 1:
        refuse_changes(now, manifest, tmp_path, override=False)
        return
    with pytest.raises(ConfigError, match=rf"run\.{key} is 3 and was 2 in .*--override"):
        refuse_changes(now, manifest, tmp_path, override=False)
    refuse_changes(now, manifest, tmp_path, override=True)


def test_every_key_of_a_section_that_may_change_exists():
    from nestpipe.train import job as resume

    for table in (resume._RESULTS, resume._SUMS):
        for section, keys in table.items():
            known = {f.name for f in fields(getattr(JobConfig(), section))}
            assert keys <= known, section
    assert effect_of("rows.lr") == "results"
    assert effect_of("data.test_path") == "none"
    assert effect_of("run.device") == "sums"


@pytest.mark.parametrize("optimizer", ["dense", "rows"])
def test_another_optimizer_is_refused_even_when_overridden(tmp_path: Path, optimizer: str):
    trained(job_of(tmp_path, run={"steps": 3}))
    other = {optimizer: {"optimizer": "sgd"}}
    with pytest.raises(CheckpointError, match=r"carr.*the state of"):
        trained(job_of(tmp_path, **other), "auto", override=True)


class Noted:
    """A source that notes the labels it deals, in order."""

    def __init__(self) -> None:
        world = SyntheticConfig(samples=SAMPLES, test_samples=32, num_tables=2)
        self.source = open_source(DataConfig(synthetic=world))
        self.seen: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def batches(self, **given: Any) -> Iterator[Batch]:
        for batch in self.source.batches(**given):
            self.seen += batch.dense["features"].sum(1).tolist()
            yield batch


@pytest.mark.parametrize("batch", [8, 24, 7])
def test_another_batch_size_goes_on_at_the_right_sample(
    tmp_path: Path, batch: int, caplog: pytest.LogCaptureFixture
):
    trained(job_of(tmp_path, run={"steps": 5}))
    config = job_of(tmp_path, run={"batch": batch, "epochs": 1})
    job = prepare(config, LocalCommunicator(), "auto", override=True)
    assert f"run.batch is {batch} instead of {BATCH}, which changes results" in caplog.text
    source, whole = Noted(), Noted()
    job.trainer.fit(source)  # type: ignore[arg-type]
    list(whole.batches(global_batch=SAMPLES, rank=0, ranks=1, seed=0))
    assert source.seen == whole.seen[5 * BATCH :]
    assert job.trainer.progress.epoch == 1


def test_a_checkpoint_holds_its_config(tmp_path: Path):
    config = job_of(tmp_path, rows={"lr": 0.123}, run={"steps": 2})
    trained(config)
    good = newest(tmp_path)
    assert good is not None
    assert saved_config(good.manifest, good.path) == config
    assert build(JobConfig, config_in(str(tmp_path))) == config
    assert config_in(str(tmp_path / "nothing")) == {}
    change_manifest(good.path, config={**asdict(config), "rows": {"colour": 1}})
    with pytest.raises(CheckpointError, match=r"unknown key rows\.'colour'"):
        trained(config, "auto")


def test_several_ranks_refuse_alike(tmp_path: Path):
    trained(job_of(tmp_path, run={"steps": 3}))

    def one(comm: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            prepare(job_of(tmp_path, rows={"lr": 0.1}), comm, "auto")
        return str(caught.value)

    assert len(set(run_ranks(2, one))) == 1


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_rank_with_another_config_is_refused_on_all_ranks(tmp_path: Path, resume: str | None):
    def one(comm: Any) -> str:
        own = {"rows": {"lr": 0.1}, "run": {"threads": 1}} if comm.rank == 1 else {}
        with pytest.raises(ConfigError) as caught:
            prepare(job_of(tmp_path, **own), comm, resume)
        return str(caught.value)

    (told,) = set(run_ranks(2, one))
    assert told.startswith("rows.lr is 0.1 on rank 1 and 0.05 on rank 0; start all ranks with the")


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from nestpipe.train import loop

    values = iter([0.5, 0.9, 0.6, 0.7, 0.8])
    monkeypatch.setattr(loop, "evaluate", lambda trainer, source: {"auc": next(values)})
    every = {"eval_every": 2, "checkpoint_every": 2, "steps": 10, "keep_last": 2}
    trained(job_of(tmp_path, run={**every, "keep_best": "auc"}))
    names = [path.name for path in paths_in(tmp_path)]
    assert names == ["step-00000004", "step-00000008", "step-00000010"]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_damaged_newer_checkpoint_makes_no_new_one_go(tmp_path: Path, incremental: bool):
    """It opens, so to go by names alone would keep it and remove what this run writes."""
    every = {"checkpoint_every": 4, "keep_last": 1, "incremental": incremental, "full_every": 1}
    trained(job_of(tmp_path, run={**every, "keep_last": 0, "steps": 24}))
    flip_bit(tmp_path / "step-00000024" / DENSE, 5000)
    flip_bit(tmp_path / "step-00000020" / DENSE, 5000)
    flip_bit(tmp_path / "step-00000016" / DENSE, 5000)
    outcome, _ = trained(job_of(tmp_path, run={**every, "steps": 19}), "auto")
    assert outcome.checkpoint == str(tmp_path / "step-00000019")
    good = newest(tmp_path)
    assert good is not None
    assert good.manifest.step == 19


def test_without_a_rule_all_checkpoints_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    trained(job_of(tmp_path, run={"checkpoint_every": 3, "steps": 9}))
    assert len(paths_in(tmp_path)) == 3


def test_a_checkpoint_from_before_there_were_shards_keeps_its_order():
    old = asdict(JobConfig())
    del old["data"]["shards"]
    saved = build(JobConfig, with_old_order(old))
    assert changes(JobConfig(), saved) == {"data.shards": (1, 0)}
    assert effect_of("data.shards") == "results"
    assert effect_of("data.threads") == "none"
    assert with_old_order(asdict(JobConfig())) == asdict(JobConfig())


@pytest.mark.parametrize("clip_rows", [True, False])
@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_a_clipped_run_goes_on_bit_for_bit(tmp_path: Path, plan: str, clip_rows: bool):
    """From the middle of an epoch; the norms are told again as they were."""
    chosen = {"clip_norm": 0.02, "clip_rows": clip_rows}

    def norms(folder: str, steps: int = 0) -> list[float]:
        found: list[float] = []
        config = job_of(tmp_path / folder, run={**chosen, "steps": steps}, pipeline={"plan": plan})
        train_job(
            prepare(config, LocalCommunicator(), "auto"),
            lambda report: found.append(report.grad_norm),
        )
        return found

    straight = norms("straight")
    assert len(straight) == 26
    assert min(straight) > 0.02, "every step is clipped"
    assert norms("run", steps=5) + norms("run") == straight
    assert_same(tmp_path / "run", tmp_path / "straight")


class ClickFiles:
    """A folder of Parquet files of clicks, and a run on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder / "clicks", folder / "run"
        self.folder.mkdir()
        for number in range(2):
            self.write(f"part-{number}.parquet", seed=number)

    def write(self, name: str, seed: int) -> None:
        draw = np.random.default_rng(seed)
        keys = {name: draw.integers(0, 9, 64) for name in ("user", "item")}
        table = pa.table({**keys, "label": draw.integers(0, 2, 64) * 1.0})
        pq.write_table(table, self.folder / name)

    def train(self, steps: int, *, override: bool = False, path: Path | None = None) -> int:
        data = {"kind": "parquet", "path": str(path or self.folder)}
        config = job_of(self.run, data=data, run={"steps": steps})
        return trained(config, "auto", override=override)[0].steps


@pytest.mark.parametrize("change", ["added", "removed", "written again"])
def test_files_that_are_not_those_of_the_checkpoint_are_refused(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
):
    files = ClickFiles(tmp_path)
    files.train(3)
    if change == "added":
        files.write("part-2.parquet", seed=2)
    elif change == "removed":
        (files.folder / "part-1.parquet").unlink()
    else:
        files.write("part-1.parquet", seed=3)
    with pytest.raises(ConfigError, match=r"files of data\.path .* are not those that"):
        files.train(5)
    assert files.train(5, override=True) == 5
    assert "which changes results" in caplog.text


def test_the_same_files_in_another_place_are_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    files = ClickFiles(tmp_path)
    files.train(3)
    moved = files.folder.rename(tmp_path / "moved")
    assert files.train(5, path=moved) == 5
    assert not caplog.text
