"""Any damage to a chain of checkpoints is noticed by `train`, `eval` and `serve` at load."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nestpipe.checkpoint.folder import DENSE, open_checkpoint, paths_in
from nestpipe.comm import LocalCommunicator
from nestpipe.errors import CheckpointError
from nestpipe.serve.engine.score_model import open_model
from nestpipe.train.job import prepare
from support.checkpoints import flip_bit
from support.examples import num_examples
from unit.train.test_resume import job_of, trained

CHAINS = {26: (24, 26), 24: (24,), 16: (8, 16), 8: (8,)}
"""Steps that are read for a step: two full checkpoints, each with an increment."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    trained(job_of(folder, run={"checkpoint_every": 8, "incremental": True, "full_every": 1}))
    for step, chain in CHAINS.items():
        found = open_checkpoint(folder / f"step-{step:08d}").chain
        assert [one.manifest.step for one in found] == list(chain)
    return folder


def served(path: Path) -> Any:
    return open_model(path, candidate_feature="c0")


def expect_noticed(world: Path, file: Path, trainer: Any, *, everywhere: bool) -> None:
    """Loading a step that needs the damaged file is refused; a folder gives the newest other one.

    Dense weights of a parent are not read, so they are needed for the parent alone.
    """
    damaged = int(file.parent.name.removeprefix("step-"))
    users = [step for step, chain in CHAINS.items() if damaged in chain]
    if file.name == DENSE and users != [damaged]:
        users, everywhere = [damaged], False
    for step in users:
        for load in (trainer.load, served):
            with pytest.raises(CheckpointError) as caught:
                load(world / f"step-{step:08d}")
            assert "\n" not in str(caught.value)
    if everywhere:
        good = next(step for step in CHAINS if step not in users)
        for exact in (True, False):  # what `train --resume` and what `eval` do
            job = prepare(job_of(world), LocalCommunicator(), str(world), exact=exact)
            assert job.trainer.progress.step == good
            job.trainer.close()
        assert served(world).version.startswith(f"step-{good:08d}-")


def test_every_flipped_bit_is_noticed(world: Path):
    """Bits are chosen over all files of the folder by their size; the seed names them."""
    rng = random.Random(2026)
    sizes = {file: file.stat().st_size for path in paths_in(world) for file in path.iterdir()}
    trainer = prepare(job_of(), LocalCommunicator()).trainer
    for n in range(num_examples("damage")):
        file = rng.choices(list(sizes), weights=list(sizes.values()))[0]
        bit = rng.randrange(8 * sizes[file])
        flip_bit(file, bit)
        expect_noticed(world, file, trainer, everywhere=n % 50 == 0)
        flip_bit(file, bit)
    trainer.load(world / "step-00000026")
    trainer.close()


def truncated(file: Path, rng: random.Random) -> None:
    contents = file.read_bytes()
    file.write_bytes(contents[: rng.randrange(len(contents))])


def missing(file: Path, rng: random.Random) -> None:
    file.unlink()


def swapped(file: Path, rng: random.Random) -> None:
    """With another file of its checkpoint."""
    other = rng.choice([one for one in sorted(file.parent.iterdir()) if one != file])
    ours, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(ours)


def older(file: Path, rng: random.Random) -> None:
    """That of another step."""
    others = [p / file.name for p in paths_in(file.parent.parent) if p != file.parent]
    file.write_bytes(rng.choice([one for one in others if one.exists()]).read_bytes())


def extra(file: Path, rng: random.Random) -> None:
    shutil.copy(file, file.with_name(rng.choice(["rows-c0-00007-00000.safetensors", "notes"])))


@pytest.mark.parametrize("damage", [truncated, missing, swapped, older, extra])
def test_every_file_that_is_not_what_it_was_is_noticed(
    world: Path, damage: Callable[[Path, random.Random], None]
):
    rng = random.Random(damage.__name__)
    trainer = prepare(job_of(), LocalCommunicator()).trainer
    files = [file for path in paths_in(world) for file in sorted(path.iterdir())]
    for n, file in enumerate(files):
        kept = {one: one.read_bytes() for one in file.parent.iterdir()}
        damage(file, rng)
        expect_noticed(world, file, trainer, everywhere=n % 5 == 0)
        for one in set(file.parent.iterdir()) - kept.keys():
            one.unlink()
        for one, contents in kept.items():
            one.write_bytes(contents)
    trainer.close()
