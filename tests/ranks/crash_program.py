"""Runs that are killed, or whose file system fails, at chosen points and go on; prints what came
out, as JSON.

Arguments: what to do, an empty folder, the first one, how many, and of how many parts which:

- `matrix`: each call that changes the file system, and each kind of op, in every way of saving;
- `crashes`: several kills of one run, at points that a seed chooses;
- `two`: two trainers in one folder at once.

Each run is a fork of this process, which itself computes nothing: so it costs no import of torch.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401 - every run would import it, and the next ones
import torch._dynamo  # noqa: F401

import nestpipe.data.synthetic
import nestpipe.embedding.store.host  # noqa: F401
from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import Retention, newest, paths_in, prune, verified
from nestpipe.checkpoint.merging import compact, difference
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.errors import CheckpointError
from nestpipe.schedule.schedule import Kind, Op
from nestpipe.train import JobConfig, train_job
from nestpipe.train.job import Job, prepare
from nestpipe.train.ops import TrainingWork

STEPS = 6
NUM_POINTS = 300
"""At which runs end in `make test`; in the long profile at all."""
KINDS = (Kind.PREFETCH, Kind.DEDUP, Kind.COUNTS, Kind.KEYS, Kind.UNION, Kind.RETRIEVE, Kind.ROWS)
KINDS += (Kind.DENSE, Kind.GRADS, Kind.REDUCE, Kind.UPDATE, Kind.WRITEBACK)
WAYS: dict[str, dict[str, Any]] = {
    "full": {"checkpoint_every": 2},
    "full, pruned": {"checkpoint_every": 2, "keep_last": 1},
    "increments": {"checkpoint_every": 2, "incremental": True, "full_every": 0},
    "increments, full, pruned": {
        "checkpoint_every": 2,
        "incremental": True,
        "full_every": 1,
        "keep_last": 1,
    },
    "from a pool": {
        "checkpoint_every": 2,
        "incremental": True,
        "full_every": 1,
        "retrieval": "pooled",
    },
}
"""How a run saves."""
TIDY = "compact, prune"
"""What the commands do to a folder of increments."""
ACTS = ("kill", "ENOSPC", "EIO")
WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR
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


def made(
    folder: Path, resume: str | None, plan: str = "serial", retrieval: str = "whole", **run: Any
) -> Job:
    config = build(
        JobConfig,
        {
            "data": {"synthetic": {"samples": STEPS * 8, "test_samples": 8, "num_tables": 2}},
            "model": {"dim": 4, "bottom": [], "top": []},
            "run": {"batch": 8, "device": "cpu", "checkpoint": str(folder), **run},
            "pipeline": {"plan": plan, "retrieval": retrieval, "owner_sums": "off"},
        },
    )
    return prepare(config, LocalCommunicator(), resume)


def train(folder: Path, resume: str | None = "auto", **run: Any) -> None:
    train_job(made(folder, resume, **run), lambda report: None)


def save_each_step(folder: Path) -> None:
    """What all runs are compared with: nothing is in the background, nobody is killed."""
    job = made(folder, None)
    for _ in range(STEPS):
        job.trainer.fit(job.train, steps=1)
        job.trainer.save(folder)


def tidy(folder: Path) -> None:
    """What `nestpipe checkpoint compact` and `prune` do."""
    with disk.locked(folder):
        disk.remove_leftovers(folder)
        found = newest(folder, tell=False)
        if found is not None:
            compact(found.path)
            prune(folder, Retention(last=1), 0.0, last=found.manifest.step)


# Points


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, act: str, seen: list[str] | None = None) -> None:
    """Die, or let the call fail, at the n-th call that changes the file system.

    Python tells of those that open, rename and remove; of writes and syncs the project does.
    """
    count = 0

    def hear(call: str, path: object) -> None:
        nonlocal count
        count += 1
        if seen is not None:
            seen.append(call)
        if count == number:
            if act == "kill":
                die()
            code = getattr(errno, act)
            raise OSError(code, os.strerror(code), str(path))

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.remove", "os.rmdir", "os.mkdir", "os.rename"):
            hear(event.removeprefix("os."), arguments[0])
        elif event == "open" and arguments[2] & WRITING and "checkpoints" in str(arguments[0]):
            hear("open", arguments[0])

    def told(call: str, path: Path) -> None:
        if call in ("write", "sync", "exchange"):
            hear(call, path)

    disk.before_call = told
    sys.addaudithook(audit)


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


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run ends before its time, and how."""

    way: str
    act: str
    call: int = 0
    """Of the file system, from 1; 0: an op ends it."""
    kind: Kind | None = None
    batch: int = 0
    plan: str = "serial"

    def arm(self) -> None:
        if self.kind is not None:
            die_at_op(self.kind, self.batch)
        else:
            at_call(self.call, self.act)


def points(calls: dict[str, list[str]], *, each: bool) -> Iterator[Point]:
    """Every call once, killed or failing in turn, and of writes in a row some; or `each` thrice."""
    for way, made_calls in calls.items():
        alike = 0
        for number, call in enumerate(made_calls, 1):
            alike = alike + 1 if call == "write" and made_calls[number - 2] == "write" else 0
            if each:
                yield from (Point(way, act, number) for act in ACTS)
            elif alike % 16 == 0:
                yield Point(way, ACTS[number % len(ACTS)], number)
    for way in WAYS:
        for n, kind in enumerate(KINDS):
            for plan in ("serial", "nested") if each else (("serial", "nested")[n % 2],):
                for batch in range(STEPS) if each else (n % STEPS,):
                    yield Point(way, "kill", 0, kind, batch, plan)


def some(found: list[Point]) -> list[Point]:
    """As many as `make test` takes, chosen once for all."""
    count = min(NUM_POINTS, len(found))
    chosen = random.Random(len(found)).sample(range(len(found)), count)
    return [found[number] for number in sorted(chosen)]


def calls_of(folder: Path) -> dict[str, list[str]]:
    """The file-system calls of every way, of runs that end."""
    found: dict[str, list[str]] = {}
    for way in (*WAYS, TIDY):
        notes = folder / f"{way}.json"

        def note(way: str = way, notes: Path = notes) -> None:
            seen: list[str] = []
            at_call(0, "kill", seen)
            begun(folder / "checkpoints" / way, way)()
            notes.write_text(json.dumps(seen))

        if way == TIDY:
            assert in_fork(lambda: train(folder / "begin", **WAYS["increments"])) == 0
            shutil.copytree(folder / "begin", folder / "checkpoints" / way)
        assert in_fork(note) == 0
        found[way] = json.loads(notes.read_text())
    return found


def begun(folder: Path, way: str, plan: str = "serial") -> Callable[[], None]:
    """What a point is a point of."""
    if way == TIDY:
        return lambda: tidy(folder)
    return lambda: train(folder, plan=plan, **WAYS[way])


def at_point(folder: Path, reference: Path, point: Point) -> dict[str, Any]:
    """End a run there; then the same command ends bit for bit where it should."""
    if point.way == TIDY:
        shutil.copytree(reference.parent / "begin", folder)
    act = begun(folder, point.way, point.plan)
    status = in_fork(partial(in_turn, point.arm, act))
    allowed = (0, -signal.SIGKILL) if point.act == "kill" else (0, REFUSED)

    def go_on() -> None:
        matches(folder, reference)
        act()
        at_the_end(folder, reference)

    good = status in allowed and in_fork(go_on) == 0
    if good:
        shutil.rmtree(folder)
    return {"point": str(point), "good": good, "status": status}


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
    run |= rng.choice([{}, {"retrieval": "pooled"}])
    killed: list[str] = []
    for _ in range(rng.choice([2, 3, 4])):
        act = partial(train, folder, plan=rng.choice(["serial", "nested"]), **run)
        if rng.random() < 0.3:
            kind, batch = rng.choice(KINDS), rng.randrange(STEPS)
            point, arm = f"{kind.value} {batch}", partial(die_at_op, kind, batch)
        else:
            number = rng.randrange(1, 120)
            point, arm = f"call {number}", partial(at_call, number, "kill")
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


def main(what: str, folder: Path, first: int, count: int, part: int, parts: int) -> None:
    gc.freeze()  # what runs share is not touched, so not copied
    reference = folder / "reference"
    assert in_fork(lambda: save_each_step(reference)) == 0
    if what == "matrix":
        found_points = list(points(calls_of(folder), each=count < 0))
        chosen = (found_points if count < 0 else some(found_points))[part::parts]
        work = folder / "checkpoints"
        found = [at_point(work / f"p{n}", reference, one) for n, one in enumerate(chosen)]
    else:
        one = {"crashes": attempt, "two": two_trainers}[what]
        seeds = range(first, first + count)[part::parts]
        found = [one(folder / f"checkpoints{seed}", reference, seed) for seed in seeds]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:7]))
