"""Rows that come and go, saved and restored: deletions, uses and keys that wait, on any ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe.checkpoint.disk import read_tensors
from nestpipe.checkpoint.export import export
from nestpipe.checkpoint.folder import kind_of, newest, open_checkpoint, paths_in, verified
from nestpipe.checkpoint.merging import compact, difference, merged_rows
from nestpipe.comm import LocalCommunicator
from nestpipe.comm.communicator import Communicator
from nestpipe.config import build
from nestpipe.embedding.lifecycle import RowLifecycle
from nestpipe.errors import ConfigError
from nestpipe.serve.engine.rank_model import read_rows
from nestpipe.train import train_job
from nestpipe.train.config import LifecycleConfig, PipelineSettings
from nestpipe.train.job import prepare
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import verify, verify_job
from support.examples import every
from support.lifecycle_world import Held, Model, held_by, joined, tables
from support.thread_ranks import run_ranks
from unit.train.test_lifecycle import (
    POLICIES,
    STREAM,
    assert_as_the_model,
    model_of,
    settings,
    trainer_of,
)
from unit.train.test_resume import job_of, trained

LIFE: dict[str, Any] = {"evict": "lru", "max_rows": 60, "ttl": 7}
CHOOSY: dict[str, Any] = {"admit_count": 2, "evict": "lfu", "max_rows": 12, "admit_candidates": 20}
RUN: dict[str, Any] = {"lifecycle_every": 3, "checkpoint_every": 4}
EVERY = {**RUN, "incremental": True, "full_every": 0}


def on_ranks(ranks: int, one) -> list[Any]:
    return [one(LocalCommunicator())] if ranks == 1 else run_ranks(ranks, one)


@pytest.mark.parametrize("name", ["lru", "lfu", "count", "count and lru", "probability"])
def test_a_run_goes_on_as_the_model_says_on_other_numbers_of_ranks(tmp_path: Path, name: str):
    policy, model = POLICIES[name], model_of(POLICIES[name])
    legs = [(1, 5), (4, 3), (2, 4), (3, 3), (1, STREAM.steps)]
    evicted: list[tuple[int, str, list[int]]] = []
    last: list[Held] = []
    for leg, (ranks, steps) in enumerate(legs):

        def one(comm: Communicator, leg: int = leg, steps: int = steps) -> Held:
            seen = Held()
            trainer = trainer_of(policy, comm, seen)
            if leg:
                trainer.load(
                    tmp_path / f"leg-{leg - 1}" / f"step-{sum(s for _, s in legs[:leg]):08d}"
                )
            trainer.fit(STREAM, steps=steps)  # pyright: ignore[reportArgumentType]
            trainer.save(tmp_path / f"leg-{leg}")
            return replace(held_by(trainer), evicted=seen.evicted)

        held = joined(on_ranks(ranks, one))
        evicted += held.evicted
        last = [held]
    assert_as_the_model(replace(last[0], evicted=evicted), model)


@pytest.mark.parametrize("policy", [LIFE, CHOOSY], ids=["lru", "admission"])
@pytest.mark.parametrize("plan", [{"plan": "serial"}, {"plan": "nested", "retrieval": "pooled"}])
def test_every_increment_restores_what_a_full_checkpoint_holds(tmp_path: Path, policy, plan):
    plan = {"owner_sums": "off", **plan}
    trained(job_of(tmp_path / "full", run=RUN, lifecycle=policy, pipeline=plan))
    trained(job_of(tmp_path / "run", run=EVERY, lifecycle=policy, pipeline=plan))
    found = [open_checkpoint(path) for path in paths_in(tmp_path / "run")]
    assert [len(one.parents) for one in found] == list(range(7))
    kinds = {kind_of(name) for one in found[1:] for name in one.manifest.files}
    assert kinds == {"dense", "rows", "gone"} | ({"waiting"} if "admit_count" in policy else set())
    for one in found:
        full = verified(tmp_path / "full" / one.name)
        assert difference(full, verified(one.path)).same_state
        for table in one.manifest.tables:
            keys, rows = merged_rows(one, table["name"])
            assert len(keys) == table["rows"]
            served, weights = read_rows(one, table["name"], 4)
            assert served.tolist() == keys.tolist()
            assert torch.equal(weights, rows[:, :4])
    compact(found[-1].path)
    again = verified(found[-1].path)
    assert not again.parents
    assert difference(verified(tmp_path / "full" / again.name), again).same_state


@pytest.mark.parametrize(("policy", "stop"), every(2, [*product([LIFE, CHOOSY], [5, 6, 8])]))
def test_a_run_that_goes_on_ends_where_one_in_a_piece_ends(tmp_path: Path, policy, stop: int):
    def job(name: str, **run: Any):
        run = {**EVERY, "evicted": str(tmp_path / f"{name}-evicted"), **run}
        return job_of(tmp_path / name, run=run, lifecycle=policy)

    trained(job("straight"))
    trained(job("run", steps=stop))
    trained(job("run"), "auto")
    ours, theirs = newest(tmp_path / "run"), newest(tmp_path / "straight")
    assert ours is not None
    assert theirs is not None
    assert difference(ours, theirs).same_state
    assert ours.manifest.lifecycle == theirs.manifest.lifecycle
    assert files_in(tmp_path / "run-evicted") == files_in(tmp_path / "straight-evicted")
    # What was written after a checkpoint that is lost is written again, and the same.
    shutil.rmtree(tmp_path / "run" / "step-00000026")
    shutil.rmtree(tmp_path / "run" / "step-00000024")
    trained(job("run"), "auto")
    assert files_in(tmp_path / "run-evicted") == files_in(tmp_path / "straight-evicted")


def files_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_evicted_keys_are_told_in_files_whatever_the_number_of_ranks(tmp_path: Path, ranks: int):
    def one(comm: Communicator) -> dict[int, dict[str, list[int]]]:
        run = {"lifecycle_every": 3, "evicted": str(tmp_path / "evicted")}
        job = prepare(job_of(tmp_path / "run", run=run, lifecycle=LIFE), comm)
        seen: dict[int, dict[str, list[int]]] = {}
        sweep = job.trainer._sweep

        def watched() -> None:
            tell = job.trainer.on_evicted

            def both(step: int, keys) -> None:
                seen[step] = {name: of.tolist() for name, of in keys.items()}
                tell(step, keys)

            job.trainer.on_evicted = both
            sweep()
            job.trainer.on_evicted = tell

        job.trainer._sweep = watched  # type: ignore[method-assign]
        train_job(job, lambda report: None)
        return seen

    of_ranks = on_ranks(ranks, one)
    told: dict[int, dict[str, list[int]]] = {}
    for path in (tmp_path / "evicted").iterdir():
        for line in path.read_text().splitlines():
            said = json.loads(line)
            assert path.name == f"evicted-{said['step']:08d}.jsonl"
            told.setdefault(said["step"], {})[said["table"]] = said["keys"]
    assert told
    for step, by_table in told.items():
        for name, keys in by_table.items():
            assert keys == sorted(k for seen in of_ranks for k in seen[step][name])
    left = {s for seen in of_ranks for s, of in seen.items() if any(of.values())}
    assert left == told.keys()


@pytest.mark.parametrize("ranks", [(1, 2), (3, 1)])
def test_increments_of_other_numbers_of_ranks_compact_to_every_row(tmp_path: Path, ranks):
    def one(comm: Communicator, steps: int) -> None:
        run = {**EVERY, "steps": steps}
        train_job(prepare(job_of(tmp_path, run=run, lifecycle=CHOOSY), comm, "auto"), print_nothing)

    on_ranks(ranks[0], lambda comm: one(comm, 9))
    on_ranks(ranks[1], lambda comm: one(comm, 0))
    last = newest(tmp_path)
    assert last is not None
    tables = [str(table["name"]) for table in last.manifest.tables]
    before = {name: merged_rows(last, name) for name in tables}
    copy = tmp_path / "copy" / last.name
    compact(last.path)
    shutil.copytree(last.path, copy)
    for path in paths_in(tmp_path):
        shutil.rmtree(path)
    full = verified(copy)
    for name, (keys, rows) in before.items():
        found = merged_rows(full, name)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], rows)
    for number in (1, 2):  # and it loads on any number of ranks

        def count(comm: Communicator) -> list[int]:
            job = prepare(job_of("", lifecycle=CHOOSY, run={"lifecycle_every": 3}), comm)
            job.trainer.load(copy)
            return job.trainer.stores[0].num_rows()

        totals = [sum(of) for of in zip(*on_ranks(number, count), strict=True)]
        assert totals == [len(before[name][0]) for name in tables]


def print_nothing(report: object) -> None:
    """Nobody looks on."""


def test_a_checkpoint_without_policies_goes_on_with_one(tmp_path: Path):
    trained(job_of(tmp_path, run={"steps": 9}))
    with pytest.raises(ConfigError, match=r"lifecycle\.ttl is 5 and was 0"):
        trained(job_of(tmp_path, lifecycle={"ttl": 5}), "auto")
    trained(
        job_of(tmp_path, lifecycle={"ttl": 5}, run={"lifecycle_every": 3}), "auto", override=True
    )
    last = newest(tmp_path)
    assert last is not None
    for table in last.manifest.tables:
        for change in last.changes(table["name"]):
            assert change.uses is not None
            # Boundaries were at multiples of 3, and 24 was the last.
            assert bool((change.uses[:, 0] > 24 - 5).all())


def test_a_folder_for_evicted_keys_without_a_policy_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"run\.evicted is set but no table has a row policy"):
        trained(job_of(tmp_path, run={"evicted": str(tmp_path / "evicted")}))
    with pytest.raises(ConfigError, match="names 'users', which is no table"):
        trained(job_of(tmp_path, lifecycle={"ttl": 5, "tables": ["users"]}))


@pytest.mark.parametrize("policy", [LIFE, CHOOSY], ids=["lru", "admission"])
def test_verify_compares_rows_uses_and_evicted_keys(policy):
    pipeline = {"plan": "nested", "micro_batches": 2}
    config = job_of("", run={"lifecycle_every": 3}, lifecycle=policy, pipeline=pipeline)
    verdict = verify_job(config, LocalCommunicator())
    assert verdict.identical
    without = verify_job(replace(config, lifecycle=LifecycleConfig()), LocalCommunicator())
    assert verdict.tensors_compared > without.tensors_compared + 9


@pytest.mark.parametrize("name", ["lru", "count and norm"])
def test_verify_on_several_ranks_with_delays(name: str):
    pipeline = build(PipelineSettings, {"plan": "nested", "micro_batches": 2, "retrieval": "new"})

    def one(comm: Communicator) -> bool:
        def start(of: PipelineSettings):
            made = replace(settings(), pipeline=of)
            return Trainer(Model(), tables(**POLICIES[name]), made, comm), STREAM

        return verify(start, pipeline, delays=3).identical  # pyright: ignore[reportArgumentType]

    assert run_ranks(2, one) == [True, True]


def test_verify_notices_a_plan_that_notes_other_uses(monkeypatch: pytest.MonkeyPatch):
    touch, calls = RowLifecycle.touch, 0

    def late(self: RowLifecycle, keys_K, counts, step: int):
        nonlocal calls
        calls += 1
        # The second run notes one batch a step late.
        return touch(self, keys_K, counts, step + (calls == 26 + 20))

    monkeypatch.setattr(RowLifecycle, "touch", late)
    config = job_of("", run={"lifecycle_every": 3}, lifecycle=LIFE, pipeline={"plan": "nested"})
    verdict = verify_job(config, LocalCommunicator())
    assert not verdict.identical


def test_an_export_has_no_erased_row(tmp_path: Path):
    trained(job_of(tmp_path / "run", run=EVERY, lifecycle=LIFE))
    last = newest(tmp_path / "run")
    assert last is not None
    assert any(change.rows is None for t in ("c0", "c1") for change in last.changes(t))
    export(last, tmp_path / "weights", state=True)
    for table in ("c0", "c1"):
        keys, rows = merged_rows(last, table)
        found = read_tensors(tmp_path / "weights" / f"{table}.safetensors", None)
        assert torch.equal(found["keys"], keys)
        assert torch.equal(found["weights"], rows[:, :4])
        assert torch.equal(found["state"], rows[:, 4:])


def test_rows_that_are_put_in_are_used_once_and_leave_in_their_time():
    held = Held()
    trainer = trainer_of({"ttl": 5}, LocalCommunicator(), held)
    trainer.fit(STREAM, steps=2)  # pyright: ignore[reportArgumentType]
    keys = torch.tensor([-77, -78])
    trainer.put_rows("two", keys, torch.ones(2, 4))
    assert {key: held_by(trainer).uses["two"][key] for key in (-77, -78)} == {
        -77: (2, 1),
        -78: (2, 1),
    }
    trainer.fit(STREAM)  # pyright: ignore[reportArgumentType]
    left = [step for step, name, of in held.evicted if name == "two" and -77 in of]
    assert left == [8]  # the first boundary five steps after step 2


def test_a_frozen_table_with_a_policy_is_refused():
    with pytest.raises(ConfigError, match="is frozen and has a row policy"):
        tables(ttl=5, trainable=False)
