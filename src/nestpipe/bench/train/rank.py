"""`nestpipe bench train`: our trainer and TorchRec take turns in the same rank processes.

Run as `python -m nestpipe.bench.train.rank CASE ...` under torchrun; rank 0 writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import torch

from nestpipe.batch import Batch
from nestpipe.bench.repeated import Repeated
from nestpipe.bench.train.cases import CASES, BenchModel, Case
from nestpipe.bench.train.torchrec_peer import make_step as make_peer_step
from nestpipe.comm import Communicator, connect
from nestpipe.errors import NestpipeError
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.trainer import Trainer

LR = 0.05


def make_own_rounds(
    case: Case, batches: Sequence[Batch], comm: Communicator, steps: int, plan: str
) -> Callable[[], None]:
    """A function that trains ours for one round of steps."""
    settings = TrainSettings(
        batch=case.batch * comm.size,
        device="cpu",
        pipeline=PipelineSettings(plan=plan),
        rows=RowSettings(optimizer="rowwise_adagrad", lr=LR),
        dense=DenseSettings(optimizer="sgd", lr=1e-3),
    )
    trainer = Trainer(BenchModel(case), case.tables(), settings, comm)
    source = Repeated(batches, steps)
    epochs = 0

    def go() -> None:
        nonlocal epochs
        epochs += 1
        trainer.fit(source, epochs=epochs)  # type: ignore[arg-type]

    return go


def compare(case: Case, comm: Communicator, *, rounds: int, steps: int, peer: bool, plan: str):
    """Alternate rounds of both systems; samples per second of each, by the median round."""
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [case.make_batch(generator) for _ in range(8)]
    own = make_own_rounds(case, batches, comm, steps, plan)
    systems: dict[str, Callable[[], None]] = {"nestpipe": own}
    if peer:
        step = make_peer_step(case, batches, LR)
        systems["torchrec"] = lambda: _repeat(step, steps)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for round_number in range(rounds + 1):
        for name, go in systems.items():
            comm.barrier()
            start = time.perf_counter()
            go()
            comm.barrier()
            if round_number > 0:
                times[name].append(time.perf_counter() - start)
    samples = case.batch * comm.size * steps
    speed = {name: samples / median(values) for name, values in times.items()}
    result: dict[str, object] = {
        "config": case.name,
        "ranks": comm.size,
        "plan": plan,
        "rounds": rounds,
        "steps": steps,
        "nestpipe_samples_per_s": speed["nestpipe"],
        "torchrec_samples_per_s": speed.get("torchrec"),
        "ratio": speed["nestpipe"] / speed["torchrec"] if peer else None,
    }
    return result


def _repeat(step: Callable[[int], None], steps: int) -> None:
    for i in range(steps):
        step(i)


def main() -> None:
    """One rank of the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plan", default="serial")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with closing(connect("gloo")) as comm:
        try:
            result = compare(
                CASES[given.case],
                comm,
                rounds=given.rounds,
                steps=given.steps,
                peer=not given.no_peer,
                plan=given.plan,
            )
        except NestpipeError as error:
            if comm.rank == 0:
                sys.stderr.write(f"error: {error}\n")
            sys.exit(error.exit_status)
        if comm.rank == 0:
            given.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
