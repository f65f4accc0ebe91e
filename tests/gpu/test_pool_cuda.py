"""Rows in a pool of device memory: the bits of rows in buffers, whatever leaves and comes back.

Keys of one micro-batch are routed by the device, those of several by hosts.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.batch import WORTH_LEAVING_OUT, Batch
from nestpipe.checkpoint.folder import paths_in, verified
from nestpipe.checkpoint.merging import difference
from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.embedding.device_tables import DeviceTables
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.embedding.pool import RowPool, SlotList
from nestpipe.jagged import Jagged
from nestpipe.kernels.host_memory import CopiesToHost
from nestpipe.kernels.index.library import ask
from nestpipe.models.dlrm import Dlrm, DlrmConfig
from nestpipe.runtime import Work
from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Kind, Op
from nestpipe.train.background import BackgroundWriter
from nestpipe.train.config import PipelineSettings, TrainSettings
from nestpipe.train.evaluate import forward
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import Trained, compare, serial_twin
from support import step_memory
from support import verify_world as world

DEVICE = "cuda"
Case = dict[str, object]
PLANS = ("serial", "nested", "dual_buffer")
DATA = (*world.KEYS, "coming back")
SMALL = 125
"""Rows a table: little more than two batches of the data that comes back use."""
PLAIN: Case = {
    "plan": "nested",
    "retrieval": "pooled",
    "micro_batches": 1,
    "exchange": "micro",
    "keys": "coming back",
    "optimizer": "adam",
    "dense": "adam",
    "pin_rows": True,
}


def name_of(case: Case) -> str:
    return "-".join(str(value) for value in case.values())


def assert_identical(figures: Mapping[str, object], case: Case, ranks: int) -> None:
    assert figures["first_difference"] is None
    assert figures["identical"] is True
    assert (figures["ranks"], figures["steps"]) == (ranks, world.STEPS)
    assert figures["rows_compared"] == world.Samples(str(case["keys"])).num_rows()


# One rank


ALL_THERE = [
    {
        **PLAIN,
        "plan": plan,
        "optimizer": optimizer,
        "keys": DATA[(n + len(plan)) % len(DATA)],
        "dense": ("adam", "sgd")[n % 2],
    }
    for n, optimizer in enumerate(OPTIMIZERS)
    for plan in PLANS
]
"""Every plan with every optimizer, in a pool that nothing leaves."""
LEAVING = [
    {
        **PLAIN,
        "plan": PLANS[n % 3],
        "optimizer": optimizer,
        "pin_rows": pin,
        "pool_rows": SMALL,
    }
    for n, optimizer in enumerate(OPTIMIZERS)
    for pin in (True, False)
]
THREE = [
    {**PLAIN, "plan": plan, "pin_rows": pin, "buffers": 3, "pool_rows": SMALL * 3 // 2}
    for plan in ("nested", "dual_buffer")
    for pin in (True, False)
]
"""Room is made one batch ahead: the pool holds little more than three batches."""
"""Rows are moved by the device and by the host, in a pool of little more than two batches."""
BY_HOST = [
    {
        **PLAIN,
        "plan": PLANS[n % 3],
        "micro_batches": 2 + n % 3,
        "exchange": ("micro", "window")[n % 2],
        "optimizer": OPTIMIZERS[n],
        "pool_rows": SMALL,
    }
    for n in range(len(OPTIMIZERS))
]
ROUNDED = [{**PLAIN, "comm_dtype": "bfloat16", "micro_batches": micros} for micros in (1, 2)]


@pytest.mark.parametrize("case", [*ALL_THERE, *LEAVING, *THREE, *BY_HOST, *ROUNDED], ids=name_of)
def test_a_pool_changes_no_bit(case):
    with world.counted_leavers() as left:
        figures = world.prove(case, LocalCommunicator(), DEVICE).figures()
    assert_identical(figures, case, 1)
    assert (sum(left) > 0) == ("pool_rows" in case), "rows leave a small pool, and no other"


@pytest.fixture
def hasty_pool(monkeypatch):
    """A pool that gives up every row that it may, in every batch; how many leave."""
    left: list[int] = []
    make_room, admit = RowPool._make_room, RowPool._admit

    def make_all_room(self: RowPool, in_use_from: int, least_free: int) -> list[SlotList]:
        return make_room(self, in_use_from, self.num_slots)

    def count_leaving(self: RowPool, batch: int, *keys: Any, sure: bool) -> Tensor:
        found = admit(self, batch, *keys, sure=sure)
        left.extend(of.count for of in self._admitted[batch].leaving)
        return found

    monkeypatch.setattr(RowPool, "_make_room", make_all_room)
    monkeypatch.setattr(RowPool, "_admit", count_leaving)
    monkeypatch.setattr(RowPool, "_surely_free", lambda self, keys: False)
    return left


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_leave_in_every_batch_change_no_bit(hasty_pool, plan, micro_batches):
    case = {**PLAIN, "plan": plan, "micro_batches": micro_batches}
    assert_identical(world.prove(case, LocalCommunicator(), DEVICE).figures(), case, 1)
    assert sum(left > 0 for left in hasty_pool) >= world.STEPS - 2


@pytest.mark.parametrize("seed", range(6))
def test_no_delay_of_host_or_device_changes_a_bit(hasty_pool, seed):
    case = {**PLAIN, "plan": ("nested", "dual_buffer")[seed % 2], "micro_batches": 1 + seed // 4}
    around = partial(world.delayed, seed=seed)
    assert_identical(world.prove(case, LocalCommunicator(), DEVICE, around).figures(), case, 1)
    assert sum(hasty_pool) > 0


def test_rows_that_leave_unsaved_are_caught(hasty_pool, monkeypatch):
    monkeypatch.setattr(RowPool, "writeback", lambda self, batch: 0)
    assert not world.prove(PLAIN, LocalCommunicator(), DEVICE).identical


# Runs that follow each other


@contextmanager
def trainer_of(pipeline: PipelineSettings, **more: object) -> Iterator[Trainer]:
    case = {**PLAIN, "pool_rows": SMALL, **more}
    made = world.make_trainer(case, pipeline, LocalCommunicator(), DEVICE)
    try:
        yield made
    finally:
        made.close()


POOLED = build(PipelineSettings, {"plan": "nested", "retrieval": "pooled"})
TWIN = serial_twin(POOLED)
SOURCE: Any = world.Samples("coming back")
"""Columns are not asked for."""


def fit(trainer: Trainer, steps: int) -> None:
    trainer.fit(SOURCE, steps=steps)


def seen_by(trainer: Trainer) -> list[Tensor]:
    """The rows of every batch as an evaluation finds them."""
    return [
        rows[name].cpu()
        for _, rows in forward(trainer, SOURCE, lambda batch: batch.sparse)
        for name in sorted(rows)
    ]


def assert_same(one: Trainer, other: Trainer) -> None:
    found = compare(Trained("twin", one, [], []), Trained("pool", other, [], []))
    assert found.first_row is None
    assert found.first_tensor is None
    assert found.rows_compared > 100


def test_runs_that_follow_each_other_with_an_evaluation_between_change_no_bit():
    with trainer_of(TWIN) as twin, trainer_of(POOLED) as pooled:
        for steps in (2, 1, 3):
            fit(twin, steps)
            fit(pooled, steps)
            for one, other in zip(seen_by(twin), seen_by(pooled), strict=True):
                assert torch.equal(one, other)
        assert_same(twin, pooled)


def test_a_checkpoint_is_resumed_through_an_empty_pool(tmp_path: Path):
    with trainer_of(TWIN) as twin, trainer_of(POOLED) as pooled, trainer_of(POOLED) as fresh:
        fit(twin, world.STEPS)
        fit(pooled, 3)
        fresh.load(pooled.save(tmp_path))
        assert fresh.progress.step == 3
        for trainer in (pooled, fresh):
            fit(trainer, world.STEPS - 3)
            assert_same(twin, trainer)


def test_a_checkpoint_is_resumed_through_a_pool_with_later_rows(tmp_path: Path):
    """All batches but the last have the same keys, so that the checkpoint has every row."""
    data: Any = world.Samples("all shared")
    with trainer_of(TWIN) as twin, trainer_of(POOLED, pool_rows=world.ENOUGH_ROWS) as pooled:
        twin.fit(data, steps=5)
        pooled.fit(data, steps=3)
        saved = pooled.save(tmp_path)
        for _ in range(2):
            pooled.fit(data, steps=2)
            assert_same(twin, pooled)
            pooled.load(saved)


# Checkpoints in the background


SHARED: Any = world.Samples("all shared")
SPIN = 200_000_000
"""Cycles: about a tenth of a second, in which many batches are trained."""


def write_while_training(folder: Path, trainer: Trainer, *, on_device: bool, data: Any) -> None:
    """Increments after every batch, but for the last one."""
    trainer.track_rows()
    writer = BackgroundWriter(folder, trainer.mesh, 1e9, on_device=on_device)
    last = None
    for _ in range(world.STEPS - 1):
        trainer.fit(data, steps=1)
        last = trainer.save_in_background(writer, last)
    trainer.fit(data, steps=1)
    writer.wait()


@pytest.mark.parametrize("slow", [False, True], ids=["", "slowly"])
@pytest.mark.parametrize(
    "more",
    [{}, {"pool_rows": SMALL}, {"pool_rows": SMALL, "pin_rows": False}, {"micro_batches": 2}],
    ids=lambda more: "-".join(f"{name}-{value}" for name, value in more.items()) or "all there",
)
def test_rows_copied_on_the_gpu_are_those_of_a_flush(tmp_path, monkeypatch, more, slow):
    """Whatever is trained before the copies reach the host; `slowly`: that is a while."""
    fetch = CopiesToHost.fetch

    def fetch_late(self: CopiesToHost, tensor: Tensor) -> Tensor:
        torch.cuda._sleep(SPIN)
        return fetch(self, tensor)

    if slow:
        monkeypatch.setattr(CopiesToHost, "fetch", fetch_late)
    pipeline = replace(POOLED, micro_batches=more.get("micro_batches", 1))
    for on_device in (True, False):
        with trainer_of(pipeline, **more) as trainer:
            folder = tmp_path / str(on_device)
            write_while_training(folder, trainer, on_device=on_device, data=SOURCE)
    for path in paths_in(tmp_path / "True"):
        flushed = verified(tmp_path / "False" / path.name)
        assert difference(flushed, verified(path)).same_state, path.name


def test_a_checkpoint_does_not_flush_the_pool(tmp_path, monkeypatch):
    with trainer_of(POOLED, pool_rows=world.ENOUGH_ROWS) as trainer:
        trainer.track_rows()

        def refuse(self: RowPool) -> None:
            raise AssertionError("a flush")

        with monkeypatch.context() as patch:
            patch.setattr(RowPool, "flush", refuse)
            writer = BackgroundWriter(tmp_path, trainer.mesh, 1e9)
            trainer.fit(SHARED, steps=2)
            trainer.save_in_background(writer, None)
            writer.wait()
        assert writer.stood_still.for_flush == 0
        assert all(
            store.num_rows() == [0] * len(store.num_rows()) for store in trainer._storage.tracked
        )


def test_what_is_fetched_is_what_the_callers_stream_had_made():
    """The thread that fetches neither reads too early, nor does the caller wait for it."""
    copies, there = CopiesToHost(), torch.zeros(1000, device=DEVICE)
    torch.cuda._sleep(SPIN)
    there.fill_(7)
    copies.begin([there])
    found: list[Tensor] = []

    def read() -> None:
        with copies.entered():
            found.append(copies.fetch(there))

    reader = Thread(target=read)
    reader.start()
    reader.join()
    assert bool((found[0] == 7).all())
    assert found[0].is_pinned()


# CUDA graphs of the dense half


CLICKS = DlrmConfig(features=("a", "b", "c"), dense_features=4, dim=16, bottom=(32,), top=(32,))
STEPS, SAMPLES = 9, 64


class Clicks:
    """Batches of one shape: a graph of the first ones serves the others."""

    def batches(self, *, start: int, **_: object) -> Iterator[Batch]:
        return (click_batch(number) for number in range(start, STEPS))

    def empty(self) -> Batch:
        return click_batch(0).empty()


def click_batch(number: int) -> Batch:
    draw = torch.Generator().manual_seed(number)

    def keys() -> Jagged:
        values = torch.randint(-100, 100, (2 * SAMPLES,), generator=draw)
        return Jagged(values, torch.full((SAMPLES,), 2))

    dense = {
        "features": torch.rand(SAMPLES, 4, generator=draw),
        "label": torch.randint(0, 2, (SAMPLES,), generator=draw).float(),
    }
    return Batch(SAMPLES, dense, {name: keys() for name in CLICKS.features})


@contextmanager
def clicks_trainer(model: Dlrm, pipeline: Mapping[str, str], **more: object) -> Iterator[Trainer]:
    given = {"batch": SAMPLES, "device": DEVICE, "device_memory": "1MB", "pipeline": pipeline}
    settings = build(TrainSettings, {**given, "store_threads": 1, **more})
    trainer = Trainer(deepcopy(model), model.tables(), settings)
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_dense_graphs_change_no_bit(plan):
    torch.manual_seed(7)
    model, clicks = Dlrm(CLICKS), Clicks()
    pooled = {"plan": plan, "retrieval": "pooled"}
    with (
        clicks_trainer(model, {"owner_sums": "off"}) as twin,
        clicks_trainer(model, pooled, cuda_graphs=False) as eager,
        clicks_trainer(model, pooled) as replayed,
    ):
        for trainer in (twin, eager, replayed):
            for steps in (6, STEPS - 6):
                trainer.fit(clicks, steps=steps)  # type: ignore[arg-type]
        assert eager._dense.graphs is None
        assert replayed._dense.graphs is not None
        assert len(replayed._dense.graphs._captured) == 1, "batches of one shape share a graph"
        assert_same(twin, eager)
        assert_same(twin, replayed)


# Nothing on the steady path makes the host wait


STEADY = (Kind.DEDUP, Kind.UNION, Kind.ROWS, Kind.DENSE, Kind.UPDATE)
WARM = 5
"""Batches until the pool has all rows, and the dense half is a graph."""


def refusing_to_wait(work: Work, ran: list[Op]) -> Work:
    """The ops of the steady path fail where torch waits for the device."""

    def strict(act: Act) -> Act:
        def call(op: Op) -> None:
            if op.batch < WARM:
                act(op)
                return
            try:
                torch.cuda.set_sync_debug_mode("error")
                act(op)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            ran.append(op)

        return call

    return {kind: strict(act) if kind in STEADY else act for kind, act in work.items()}


told_once = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
"""What torch says when the mode is first set; as an error it would leave the mode on."""


@told_once
def test_torch_tells_of_a_wait():
    number = torch.ones(1, device=DEVICE)
    try:
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            number.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@told_once
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_act_of_the_steady_path_waits_for_the_device(cuda_graphs):
    ran: list[Op] = []
    pooled = {"plan": "serial", "retrieval": "pooled"}
    with clicks_trainer(Dlrm(CLICKS), pooled, cuda_graphs=cuda_graphs) as trainer:
        trainer.around = partial(refusing_to_wait, ran=ran)
        tables = trainer._make_training_tables(trainer.plan)
        assert isinstance(tables, DeviceTables), "keys are routed by the device"
        trainer.fit(Clicks(), steps=STEPS)  # type: ignore[arg-type]
    assert {(op.kind, op.batch) for op in ran} == {
        (kind, batch) for kind in STEADY for batch in range(WARM, STEPS)
    }


# NCCL ranks on one GPU


TABLES = ["table", "rows", "table"]
ON_RANKS = [
    {
        **PLAIN,
        "plan": PLANS[n % 3],
        "optimizer": OPTIMIZERS[n % len(OPTIMIZERS)],
        "keys": DATA[(n + 5) % len(DATA)],
        "comm_dtype": comm_dtype,
        "micro_batches": micros,
        "exchange": ("micro", "window")[n // 2 % 2],
        "pin_rows": n % 3 > 0,
        **({"placements": TABLES} if by_table else {}),
    }
    for n, (comm_dtype, micros, by_table) in enumerate(
        (comm_dtype, micros, by_table)
        for comm_dtype in ("float32", "bfloat16")
        for micros in (1, 2)
        for by_table in (False, True)
    )
]
"""Routing by devices and by hosts, rows by owner and by table, both types between ranks."""
LEAVING_ON_RANKS = [
    {**PLAIN, "micro_batches": micros, "optimizer": optimizer, "plan": plan}
    for micros, optimizer, plan in ((1, "adam", "nested"), (2, "rowwise_adagrad", "dual_buffer"))
]
LATE = [{**PLAIN, "delays": seed, "micro_batches": 1 + seed % 2} for seed in range(4)]
POOL_ROWS = {2: 70, 4: 45}
"""Rows a table and rank, by the number of ranks: little more than two batches use."""


@pytest.mark.needs("nvidia-cuda-mps-control")
@pytest.mark.parametrize("ranks", [2, 4])
def test_nccl_ranks_on_one_gpu_change_no_bit(tmp_path: Path, ranks):
    small = [{**case, "pool_rows": POOL_ROWS[ranks]} for case in (*LEAVING_ON_RANKS, *LATE)]
    cases = [*ON_RANKS, *small]
    for case, found in zip(cases, world.verdicts_of(cases, ranks, tmp_path, DEVICE), strict=True):
        assert_identical(found, case, ranks)
        assert (found["rows_left"] > 0) == ("pool_rows" in case)


# What a step takes of device memory


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_a_step_takes_the_memory_of_the_formula(plan: str):
    """Of docs/store.md, ten percent either way; `nested` may have fewer batches in flight."""
    samples = 50_000
    source = step_memory.Samples(samples, pinned=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained = step_memory.make_trainer(plan, DEVICE, samples)
    trained.fit(source)  # type: ignore[arg-type]
    peak = torch.cuda.max_memory_allocated() - before - step_memory.pool_bytes(samples)

    bits = step_memory.slots_for(samples).bit_length()

    def sort_bytes(terms: int) -> int:
        return ask(torch.device(DEVICE), "nestpipe_sort_bytes", terms, bits)

    wanted = step_memory.formula(trained.plan, samples, sort_bytes)
    trained.close()
    said = f"{peak:,} bytes where the formula has {wanted:,}"
    assert peak <= 1.1 * wanted, said
    assert peak >= (0.9 if plan == "serial" else 0.4) * wanted, said


def test_equal_lengths_that_the_device_writes_are_those_of_the_host():
    samples = WORTH_LEAVING_OUT // 2
    keys = [Jagged(torch.arange(2 * samples) + n, torch.full((samples,), 2)) for n in range(2)]
    lists = {"a": keys[0], "b": keys[1]}
    packed = Batch(samples, {"x": torch.arange(samples)}, lists).pack(pin_memory=True).packed
    assert packed is not None
    assert packed.equal_lengths is not None
    there = packed.to(DEVICE, non_blocking=True)
    for dtype, part in packed.parts.items():
        assert torch.equal(there.parts[dtype].cpu(), part)
