"""Small jobs for `verify` on any device, and as many of them as asked for on the ranks of a group.

python verify_world.py CASES OUT DEVICE    (under torchrun; CASES: a JSON list, OUT: the verdicts)
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.bench.machines import QUEUES, look_like_a_host, mps_daemon
from nestpipe.comm import Communicator, LocalCommunicator, connect
from nestpipe.config import Table, build
from nestpipe.embedding.optimizers import row_optimizer
from nestpipe.embedding.pool import INDEX_BYTES, RowPool
from nestpipe.embedding.table_groups import group_tables
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.runtime import Work, inject_delays
from nestpipe.runtime.cuda import CudaLanes
from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Lane, Op
from nestpipe.train.config import PipelineSettings, TrainSettings
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import Verdict, verify

BATCH, STEPS = 48, 6
DIM, USER_DIM, FEATURES = 16, 8, 3
TIMEOUT_S = float(os.environ.get("VERIFY_TIMEOUT_S", "60"))
DELAY_MS = 3.0
MAX_MS, MAX_CYCLES = 1.0, 2_000_000
"""Delays of the host, and of the device: about a millisecond."""
ENOUGH_ROWS = 600
"""Rows a table of a pool that nothing leaves."""

Case = dict[str, object]
PIPELINE = (
    "plan",
    "retrieval",
    "micro_batches",
    "exchange",
    "comm_dtype",
    "speculative_rows",
    "buffers",
)


def one_batch(b: int, first: int, vocabulary: int, keys_seed: int | None = None) -> Batch:
    """Batch b, keys from `first` to before `first + vocabulary`; the last batch is shorter."""
    size = BATCH if b < STEPS - 1 else BATCH // 3
    of_keys = torch.Generator().manual_seed(b if keys_seed is None else keys_seed)
    of_values = torch.Generator().manual_seed(b)

    def keys(count: int) -> Tensor:
        return torch.randint(first, first + vocabulary, (count,), generator=of_keys) * 7919 - 50

    def lists(most: int) -> Jagged:
        lengths = torch.randint(0, most + 1, (size,), generator=of_keys)
        return Jagged(keys(int(lengths.sum())), lengths)

    dense = {
        "label": torch.rand(size, generator=of_values).round(),
        "features": torch.randn(size, FEATURES, generator=of_values),
    }
    sparse = {"history": lists(6), "tags": lists(3), "user": Jagged.one_each(keys(size))}
    return Batch(size, dense, sparse)


KEYS: Mapping[str, Callable[[int], Batch]] = {
    "some shared": lambda b: one_batch(b, 0, 150),
    "none shared": lambda b: one_batch(b, 1000 * b, 150),
    "all shared": lambda b: one_batch(b, 0, 150, keys_seed=0),
    "growing": lambda b: one_batch(b, 0, 20 + 60 * b),
    "empty on some ranks": lambda b: one_batch(b, 0, 150),
}
"""How the keys of neighbouring batches meet: batch b of each kind of data."""
DATA = {**KEYS, "coming back": lambda b: one_batch(b, 60 * (b % 3), 80)}
"""With keys that a small pool gives up and needs again."""


@dataclass(frozen=True)
class Samples:
    """`STEPS` global batches, cut into parts for the ranks."""

    keys: str

    @property
    def num_samples(self) -> int:
        return sum(DATA[self.keys](b).size for b in range(STEPS))

    def empty(self) -> Batch:
        return DATA[self.keys](0).empty()

    def batches(self, *, rank: int, ranks: int, start: int = 0, **_: int) -> Iterator[Batch]:
        return (self._part(b, rank, ranks) for b in range(start, STEPS))

    def _part(self, b: int, rank: int, ranks: int) -> Batch:
        batch, members = DATA[self.keys](b), list(range(ranks))
        if self.keys == "empty on some ranks" and ranks > 1:
            members = [r for r in members if (b + r) % 2 == 0]
        if rank not in members:
            return batch.empty()
        place, parts = members.index(rank), len(members)
        return batch.slice(batch.size * place // parts, batch.size * (place + 1) // parts)

    def num_rows(self) -> int:
        """Different rows that training touches, counted the plain way."""
        batches = [DATA[self.keys](b).sparse for b in range(STEPS)]
        names = batches[0]
        return sum(len({k for b in batches for k in b[name].values.tolist()}) for name in names)


class Model(nn.Module):
    """Sequences, pooled lists and single keys; its sums have one order on every device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        inputs = 2 * DIM + USER_DIM + FEATURES
        self.top = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 1))

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        lengths_B, rows_TD = batch.sparse["history"].lengths, rows["history"]
        samples_B = torch.arange(batch.size, device=lengths_B.device)
        sample_T = torch.repeat_interleave(lengths_B, output_size=len(rows_TD))
        # A product, not an index_add: that adds by atomics on a GPU.
        history_BD = (samples_B[:, None] == sample_T).to(rows_TD.dtype) @ rows_TD
        parts = [history_BD, rows["tags"], rows["user"], batch.dense["features"]]
        logits_B = self.top(torch.cat(parts, 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits
        return Loss(losses(logits_B, batch.dense["label"], reduction="sum"), batch.size)


TABLES = [
    build(Table, {"name": "history", "dim": DIM, "init_std": 0.3}),
    build(Table, {"name": "tags", "dim": DIM, "pooling": "sum", "init_std": 0.3}),
    build(Table, {"name": "user", "dim": USER_DIM, "init_std": 0.3}),
]
"""Two stores: one of width 16 with two tables, one of width 8."""


def make_trainer(
    case: Case,
    pipeline: PipelineSettings,
    comm: Communicator,
    device: str,
    around: Callable[[Work], Work] = lambda work: work,
) -> Trainer:
    given = {
        "batch": BATCH,
        "device": device,
        "seed": 3,
        "store_threads": 1,
        "rows": {"optimizer": case["optimizer"], "lr": 0.05, "eps": 1e-6, "weight_decay": 0.1},
        "dense": {"optimizer": case["dense"], "lr": 0.01},
        # What `serial` does is the slow and plain way.
        "pin_rows": pipeline.plan != "serial" and case["pin_rows"],
        "parallel": case.get("parallel", {}),
        "device_memory": memory_of(case),
    }
    settings = replace(build(TrainSettings, given), pipeline=pipeline)
    trainer = Trainer(Model(), tables_of(case), settings, comm, around=around)
    if case.get("one_stream") and isinstance(trainer.lanes, CudaLanes):
        use_one_stream(trainer, trainer.lanes)
    return trainer


def tables_of(case: Case) -> list[Table]:
    """The tables, each placed as the case says: by rows unless told."""
    placements = case.get("placements", ["rows"] * len(TABLES))
    assert isinstance(placements, list)
    return [
        build(
            Table,
            {"name": t.name, "dim": t.dim, "pooling": t.pooling, "init_std": t.init_std}
            | {"placement": placement},
        )
        for t, placement in zip(TABLES, placements, strict=True)
    ]


def memory_of(case: Case) -> str:
    """`device_memory` for `pool_rows` rows a table."""
    optimizer = row_optimizer(str(case["optimizer"]), 0.05, 1e-6, 1.0)
    widths = [
        (len(group.tables), group.dim + optimizer.state_dim(group.dim))
        for group in group_tables(TABLES)
    ]
    of_all = sum(tables * (-(-width // 4) * 16 + INDEX_BYTES) for tables, width in widths)
    return f"{int(str(case.get('pool_rows', ENOUGH_ROWS))) * of_all / 1e3:.3f}KB"


@contextmanager
def counted_leavers() -> Iterator[list[int]]:
    """How many rows leave a pool at each write-back."""
    left: list[int] = []
    write = RowPool.writeback

    def counted(self: RowPool, batch: int) -> int:
        left.append(write(self, batch))
        return left[-1]

    RowPool.writeback = counted
    try:
        yield left
    finally:
        RowPool.writeback = write


def use_one_stream(trainer: Trainer, lanes: CudaLanes) -> None:
    """A tool for tests: collectives that two threads start share what there is least of."""
    assert trainer._dense.buckets is not None
    lanes._places[Lane.DENSE_NET] = lanes._places[Lane.NET]


def prove(
    case: Case,
    comm: Communicator,
    device: str,
    around: Callable[[Work], Work] = lambda work: work,
) -> Verdict:
    """The verdict on one case; only the plan's own run has something `around` its work."""
    pipeline = build(PipelineSettings, {name: case[name] for name in PIPELINE if name in case})
    source = Samples(str(case["keys"]))

    def start(settings: PipelineSettings):
        hook = around if settings == pipeline else (lambda work: work)
        return make_trainer(case, settings, comm, device, hook), source

    return verify(start, pipeline)  # pyright: ignore[reportArgumentType]  columns are not asked for


def delayed(work: Work, seed: int) -> Work:
    """Every op takes longer by chance: on its thread, and before and after its work on its
    stream."""

    def on_device(act: Act) -> Act:
        def call(op: Op) -> None:
            chance = random.Random(f"{seed} device {op}")
            torch.cuda._sleep(chance.randrange(MAX_CYCLES))
            act(op)
            torch.cuda._sleep(chance.randrange(MAX_CYCLES))

        return call

    slower = {kind: on_device(act) for kind, act in work.items()}
    return inject_delays(slower, seed=seed, max_ms=MAX_MS)


def ends_of(text: str, most: int = 3000) -> str:
    """The first and the last part of what ranks wrote: the cause, and the launcher's view."""
    return text if len(text) <= 2 * most else f"{text[:most]}\n...\n{text[-most:]}"


def verdicts_of(cases: Sequence[Case], ranks: int, folder: Path, device: str) -> list[dict]:
    """What ranks, processes of one machine, find for these cases: one start for all of them."""
    given, out = folder / "cases.json", folder / "verdicts.json"
    given.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", __file__, str(given), str(out), device]
    with mps_daemon():
        # The daemon's folders are in the environment only inside.
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": QUEUES, "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, ends_of(done.stderr)
    return json.loads(out.read_text())


def delays_of(case: Case, rank: int) -> Callable[[Work], Work]:
    """Others on every rank, where the case asks for some."""
    if "delays" not in case:
        return lambda work: work
    return partial(inject_delays, seed=1000 * int(str(case["delays"])) + rank, max_ms=DELAY_MS)


def main() -> None:
    """One rank: every case, one after the other; rank 0 writes the verdicts."""
    cases, out, device = sys.argv[1:]
    if int(os.environ["WORLD_SIZE"]) == 1:
        comm = LocalCommunicator()
    elif device == "cuda":
        look_like_a_host()
        comm = connect("nccl", timeout_s=TIMEOUT_S)
    else:
        comm = connect("gloo", timeout_s=TIMEOUT_S)
    verdicts: list[dict] = []
    for case in json.loads(Path(cases).read_text()):
        with counted_leavers() as left:
            found = prove(case, comm, device, delays_of(case, comm.rank))
        of_ranks = cast("list[int]", comm.all_gather_values(sum(left)))
        verdicts.append({**found.figures(), "rows_left": sum(of_ranks)})
    if comm.rank == 0:
        Path(out).write_text(json.dumps(verdicts))
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
