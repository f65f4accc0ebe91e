"""One rank of a run under `nested`, of which the last is lost in the middle of a window.

python train_program.py killed | silent | "killed sharded"
"""

from __future__ import annotations

import os
import signal
import sys
import time

from nestpipe.config import build, override
from nestpipe.data import open_source
from nestpipe.errors import NestpipeError
from nestpipe.runtime import Act, Work
from nestpipe.schedule import Kind, Op
from nestpipe.train.job import JobConfig, make_model
from nestpipe.train.loop import communicator
from nestpipe.train.trainer import Trainer

SETTINGS = (
    "run.batch=64",
    "run.timeout_s=4",
    "run.device=cpu",
    "data.synthetic.samples=6400",
    "data.synthetic.num_keys=500",
    "data.synthetic.num_tables=2",
    "model.dim=4",
    "pipeline.plan=nested",
    "pipeline.micro_batches=4",
)
LAST_OP = Op(Kind.DENSE, 3, 1)
"""What the lost rank does last: two micro-batches of the window are still to come."""


def lost_in(work: Work, how: str) -> Work:
    def dense(act: Act) -> Act:
        def call(op: Op) -> None:
            if op == LAST_OP:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            act(op)

        return call

    return {**work, Kind.DENSE: dense(work[Kind.DENSE])}


def main(scenario: str) -> None:
    how, _, dense = scenario.partition(" ")
    settings = [*SETTINGS, f"parallel.dense={dense or 'replicated'}"]
    config = build(JobConfig, override({}, settings))
    comm = communicator(config)
    source = open_source(config.data, "train")
    model, tables = make_model(config, source)

    def around(work: Work) -> Work:
        return lost_in(work, how) if comm.rank == comm.size - 1 else work

    trainer = Trainer(model, tables, config.settings(), comm, around=around)
    try:
        trainer.fit(source)
    except NestpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(error.exit_status)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
