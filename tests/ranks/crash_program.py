"""Runs that are killed at seeded points and go on; prints what came out, as JSON.

Arguments: `crashes` or `two` (trainers in one folder at once), an empty folder, the first seed, and
how many. Each run is a fork of this process, which
itself computes nothing: so a run costs no import of torch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import (
    Retention,
    newest,
    paths_in,
    prune,
    verified,
)
from nestpipe.checkpoint.merging import compact, difference
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.errors import CheckpointError
from nestpipe.schedule.op import Kind, Op
from nestpipe.train import JobConfig, train_job
from nestpipe.train.job import prepare
from nestpipe.train.ops import TrainingWork

STEPS = 12
KINDS = (Kind.PREFETCH, Kind.COUNTS, Kind.RETRIEVE, Kind.ROWS, Kind.DENSE, Kind.GRADS)
KINDS += (Kind.REDUCE, Kind.UPDATE, Kind.WRITEBACK)


REFUSED = 2


def in_fork(do: Callable[[], object]) -> int:
    """Do it in a child; its exit status, negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(do), 0)[1])


def fork(do: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            do()
            status = 0
        except CheckpointError as error:
            status = REFUSED
            sys.stderr.write(f"{error}\n")
        except BaseException as error:  # noqa: BLE001 - it ends the process
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def train(folder: Path, resume: str | None = "auto", **run: Any) -> None:
    config = build(
        JobConfig,
        {
            "data": {"synthetic": {"samples": STEPS * 8, "test_samples": 8, "num_tables": 2}},
            "model": {"dim": 4, "bottom": [4], "top": [4]},
            "run": {"batch": 8, "device": "cpu", "checkpoint": str(folder), **run},
            "pipeline": {"plan": "serial"},
        },
    )
    train_job(prepare(config, LocalCommunicator(), resume), lambda report: None)


def tidy(folder: Path) -> None:
    """What `nestpipe checkpoint compact` and `prune` do."""
    with disk.locked(folder):
        found = newest(folder, tell=False)
        if found is not None:
            compact(found.path)
        prune(folder, Retention(last=1), 0.0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(number: int) -> None:
    """At the n-th call that changes the file system."""
    left = number

    def count(call: str, path: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    disk.before_call = count


def die_at_op(kind: Kind, batch: int) -> None:
    functions = TrainingWork.functions

    def killing(self: TrainingWork) -> Any:
        acts = dict(functions(self))

        def killed(op: Op) -> None:
            if op.batch + self.first_step == batch:
                die()
            acts[kind](op)

        return {**acts, kind: killed} if kind in acts else acts

    TrainingWork.functions = killing  # type: ignore[method-assign]


def in_turn(*acts: Callable[[], None]) -> None:
    for act in acts:
        act()


def matches(folder: Path, reference: Path) -> None:
    """Every checkpoint that verifies is that of the run that nobody killed."""
    for path in paths_in(folder):
        try:
            found = verified(path)
        except CheckpointError:
            continue
        assert difference(verified(reference / path.name), found).same_state, path.name


def at_the_end(folder: Path, reference: Path) -> None:
    matches(folder, reference)
    found = newest(folder)
    assert found is not None, "there is no checkpoint at all"
    assert found.manifest.step == STEPS, found.name
    assert not [path for path in folder.iterdir() if path.name.startswith((".partial", ".trash"))]


def attempt(folder: Path, reference: Path, seed: int) -> dict[str, Any]:
    """Kill a run a few times, then let it end; what was killed, and whether all is well."""
    rng = random.Random(seed)
    run: dict[str, Any] = {"checkpoint_every": rng.choice([1, 2, 3])}
    run |= rng.choice([{}, {"incremental": True, "full_every": rng.choice([0, 1, 2])}])
    run |= rng.choice([{}, {"keep_last": rng.choice([1, 2])}])
    killed: list[str] = []
    for _ in range(rng.choice([1, 2, 3])):
        act = partial(train, folder, **run)
        if rng.random() < 0.3:
            kind, batch = rng.choice(KINDS), rng.randrange(STEPS)
            point, arm = f"{kind.value} {batch}", partial(die_at_op, kind, batch)
        else:
            number = rng.randrange(1, 90)
            point, arm = f"call {number}", partial(die_at_call, number)
        if rng.random() < 0.2 and paths_in(folder):
            act, point = partial(tidy, folder), f"tidy {point}"
        status = in_fork(partial(in_turn, arm, act))
        killed += [point] if status == -signal.SIGKILL else []
        if status not in (0, -signal.SIGKILL) or in_fork(lambda: matches(folder, reference)):
            return {"seed": seed, "good": False, "at": point, "status": status}
    good = in_fork(lambda: train(folder, **run)) == 0
    good = good and in_fork(lambda: at_the_end(folder, reference)) == 0
    return {"seed": seed, "good": good, "killed": killed}


def two_trainers(folder: Path, reference: Path, seed: int) -> dict[str, Any]:
    """Two fresh runs in one folder at the same time: one ends, the other is refused."""
    run = {"checkpoint_every": 1 + seed % 3, "incremental": bool(seed % 2)}
    pids = [fork(lambda: train(folder, None, **run)) for _ in range(2)]
    ends = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    good = ends == [0, REFUSED] and in_fork(lambda: at_the_end(folder, reference)) == 0
    return {"seed": seed, "good": good, "ends": ends}


def main(what: str, folder: Path, first: int, count: int) -> None:
    reference = folder / "reference"
    assert in_fork(lambda: train(reference, checkpoint_every=1)) == 0
    one = {"crashes": attempt, "two": two_trainers}[what]
    found = [one(folder / str(seed), reference, seed) for seed in range(first, first + count)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
