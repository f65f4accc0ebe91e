"""A rank of `nestpipe train --resume auto` that is killed at a chosen op, for a few attempts.

Arguments: the folder of the run, a seed, and how many attempts are killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from nestpipe.cli.app import main
from nestpipe.schedule.schedule import Op
from nestpipe.train.ops import TrainingWork

SETTINGS = (
    *("run.batch=8", "run.device=cpu", "run.checkpoint_every=7", "run.keep_last=3"),
    *("data.synthetic.samples=240", "data.synthetic.test_samples=16"),
    *("data.synthetic.num_tables=2", "model.dim=4", "pipeline.plan=nested"),
)
OPS = ("prefetch", "counts", "retrieve", "dense", "update", "writeback")
STEPS = 30


def die_at(name: str, number: int, notes: Path) -> None:
    """SIGKILL to this process at the n-th op of a kind, with a line that says so."""
    act = getattr(TrainingWork, name)
    seen = 0

    def killed(self: TrainingWork, op: Op) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            with notes.open("a") as file:
                file.write(f"{name} {number}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        act(self, op)

    setattr(TrainingWork, name, killed)


def run(folder: str, seed: str, kills: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rng = random.Random(f"{seed} {attempt}")
    victim = rng.randrange(int(os.environ["WORLD_SIZE"]))
    name, number = rng.choice(OPS), rng.randrange(1, 9)  # each attempt gets a little further
    if attempt < kills and int(os.environ["RANK"]) == victim:
        die_at(name, number, Path(f"{folder}.kills"))
    arguments = [word for s in (*SETTINGS, f"run.checkpoint={folder}") for word in ("--set", s)]
    main(["train", "--resume", "auto", *arguments])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
