"""Keys routed where the rows are: the same bits as keys routed by hosts, and as rows in buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from nestpipe.batch import Batch, PackedColumns
from nestpipe.comm import Communicator
from nestpipe.embedding import device_tables
from nestpipe.embedding.pool import RowPool
from nestpipe.embedding.slot_transfer import SlotList
from nestpipe.jagged import Jagged
from nestpipe.kernels import host_memory
from nestpipe.kernels.index.library import ask
from nestpipe.models.dlrm import Dlrm, DlrmConfig
from nestpipe.runtime import Act, ThreadLanes, Work
from nestpipe.schedule import Kind, Lane, Op, Retrieval, with_separate_key_group
from nestpipe.train import trainer as trainer_module
from nestpipe.train.config import PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.ops import TrainingWork
from nestpipe.train.trainer import Trainer
from support import step_memory
from support.emulated_kernels import pools_on_emulated_gpu
from support.thread_ranks import run_ranks

SAMPLES, BATCHES = 24, 9
CONFIG = DlrmConfig(features=("a", "b", "c"), dense_features=4, dim=8)
ROWS, TABLES = ("rows",) * 3, ("table", "rows", "table")
ODD_KEYS = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
Outcome = tuple[list[float], list[Tensor]]


def make_batch(number: int) -> Batch:
    """Lists of none to three keys; some keys are rare, some in every batch, some odd numbers."""
    draw = torch.Generator().manual_seed(number)
    sparse: dict[str, Jagged] = {}
    for feature in CONFIG.features:
        lengths = torch.randint(0, 4, (SAMPLES,), generator=draw)
        if feature == "c" and number == 3:
            lengths.zero_()
        values = torch.randint(-30, 30, (int(lengths.sum()),), generator=draw) * 7
        values[: len(ODD_KEYS)] = ODD_KEYS[: len(values)]
        sparse[feature] = Jagged(values, lengths)
    dense = {
        "features": torch.rand(SAMPLES, 4, generator=draw),
        "label": torch.randint(0, 2, (SAMPLES,), generator=draw).float(),
    }
    return Batch(SAMPLES, dense, sparse)


class Batches:
    """The same batches for any number of ranks."""

    def batches(self, *, rank: int, ranks: int, start: int, **_: object) -> Iterator[Batch]:
        share = SAMPLES // ranks
        for number in range(start, BATCHES):
            yield make_batch(number).slice(rank * share, (rank + 1) * share)

    def empty(self) -> Batch:
        return make_batch(0).empty()


MODEL = Dlrm(CONFIG)


def train(
    comm: Communicator | None,
    pipeline: PipelineSettings,
    placements: tuple[str, ...] = ROWS,
    device_memory: str = "auto",
    optimizer: str = "adam",
    dtype: str = "float32",
    rows: RowSettings | None = None,
) -> Outcome:
    """Two runs, so that the pool meets rows that it has kept; losses, then all rows and weights."""
    model = copy.deepcopy(MODEL)
    tables = [
        replace(table, placement=placement, dtype=dtype)
        for table, placement in zip(model.tables(), placements, strict=True)
    ]
    settings = TrainSettings(
        batch=SAMPLES,
        device="cpu",
        pipeline=pipeline,
        device_memory=device_memory,
        rows=rows or RowSettings(optimizer=optimizer),  # type: ignore[arg-type]
    )
    trained = Trainer(model, tables, settings, comm)
    losses: list[float] = []
    for steps in (4, BATCHES - 4):
        trained.fit(
            Batches(),  # type: ignore[arg-type]
            steps=steps,
            on_step=lambda report: losses.append(report.loss),
        )
    stored = [part for store in trained.stores for piece in store.export() for part in piece[1:]]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    trained.close()
    return losses, [*stored, *weights]


def check_same(one: Outcome, other: Outcome) -> None:
    assert one[0] == other[0], "losses differ"
    assert len(one[1]) == len(other[1])
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a, b), "rows or weights differ"


@pytest.fixture
def on_device(monkeypatch):
    """Tables that route their own keys, whatever the device: on a CPU by plain twins."""
    monkeypatch.setattr(trainer_module, "can_route_on_device", lambda *_: True)
    calls: list[str] = []
    union = device_tables.DeviceTables.union
    monkeypatch.setattr(
        device_tables.DeviceTables,
        "union",
        lambda self, batch: (calls.append("union"), union(self, batch)),
    )
    yield
    assert calls, "the tables of the device did nothing"


@pytest.mark.parametrize("device_memory", ["auto", "25.8KB"])
@pytest.mark.parametrize(
    "plan", ["serial", "sparse_dist", "dual_buffer", "frozen_window", "nested"]
)
def test_rows_in_a_pool_have_the_bits_of_rows_in_buffers(plan, device_memory):
    """25.8 KB: rows leave and come back."""
    for micro_batches in (1, 2):
        pipeline = PipelineSettings(
            plan=plan, retrieval=Retrieval.POOLED, micro_batches=micro_batches
        )
        twin = train(None, PipelineSettings(micro_batches=micro_batches))
        check_same(twin, train(None, pipeline, device_memory=device_memory))


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        *(("sgd", "float32"), ("adagrad", "float32"), ("adam", "float32")),
        *(("rowwise_adagrad", "float32"), ("adam", "bfloat16"), ("adam", "float16")),
    ],
)
@pytest.mark.usefixtures("on_device")
def test_one_rank_that_routes_its_keys_has_the_bits_of_the_host(optimizer, dtype):
    twin = train(None, PipelineSettings(), optimizer=optimizer, dtype=dtype)
    for plan in ("serial", "nested"):
        pipeline = PipelineSettings(plan=plan, retrieval=Retrieval.POOLED)
        for memory in ("auto", "25.8KB"):
            made = train(None, pipeline, device_memory=memory, optimizer=optimizer, dtype=dtype)
            check_same(twin, made)


@pytest.mark.parametrize("comm_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("placements", [ROWS, TABLES])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.usefixtures("on_device")
def test_ranks_that_route_their_keys_have_the_bits_of_hosts(ranks, placements, comm_dtype):
    plain = PipelineSettings(owner_sums="off", comm_dtype=comm_dtype)
    pooled = PipelineSettings(plan="nested", retrieval=Retrieval.POOLED, comm_dtype=comm_dtype)
    twins = run_ranks(ranks, lambda comm: train(comm, plain, placements))
    made = run_ranks(ranks, lambda comm: train(comm, pooled, placements, "15.6KB"))
    for twin, other in zip(twins, made, strict=True):
        check_same(twin, other)


@pytest.mark.parametrize("emulated", [False, True], ids=["twins", "kernels"])
@pytest.mark.parametrize(("buffers", "memory"), [(2, "25.8KB"), (3, "26.4KB")])
@pytest.mark.usefixtures("on_device")
def test_one_rank_with_the_plan_and_lanes_of_a_gpu_has_the_bits_of_the_host(
    buffers, memory, emulated, monkeypatch
):
    """Keys have a network of their own, and the issuing thread runs all that no host waits for."""
    twin = train(None, PipelineSettings())
    waiting = frozenset({Lane.LOADER, Lane.HOST, Lane.WRITE})
    monkeypatch.setattr(Trainer, "placed", lambda self, plan: with_separate_key_group(plan))
    lanes = ThreadLanes(inline=frozenset(Lane) - waiting)
    monkeypatch.setattr(trainer_module, "lanes_for", lambda *_, **__: lanes)
    left: list[int] = []
    write_all = RowPool._write_all

    def counted(self: RowPool, leaving: list[SlotList]) -> int:
        left.append(write_all(self, leaving))
        return left[-1]

    monkeypatch.setattr(RowPool, "_write_all", counted)
    pipeline = PipelineSettings(plan="nested", retrieval=Retrieval.POOLED, buffers=buffers)
    with pools_on_emulated_gpu() if emulated else nullcontext():
        check_same(twin, train(None, pipeline, device_memory=memory))
    assert sum(left) > 0, "rows leave while batches are in flight"


KERNELS = {
    *("nestpipe_index_find_or_insert", "nestpipe_index_erase", "nestpipe_index_rebuild"),
    *("nestpipe_index_choose", "nestpipe_index_first_rows", "nestpipe_cut_segments"),
    *("nestpipe_look_up", "nestpipe_update_segments"),
}
"""What every job with a small pool needs; several ranks also need `nestpipe_dedup`."""


@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
@pytest.mark.parametrize(
    ("ranks", "placements", "memory"),
    [(1, ROWS, "25.8KB"), (2, ROWS, "15.6KB"), (2, TABLES, "15.6KB")],
)
@pytest.mark.usefixtures("on_device")
def test_kernels_of_the_gpu_have_the_bits_of_the_host(ranks, placements, memory, optimizer, plan):
    plain = PipelineSettings(owner_sums="off")
    pooled = PipelineSettings(plan=plan, retrieval=Retrieval.POOLED)
    twins = run_ranks(ranks, lambda comm: train(comm, plain, placements, optimizer=optimizer))
    with pools_on_emulated_gpu() as called:
        made = run_ranks(
            ranks, lambda comm: train(comm, pooled, placements, memory, optimizer=optimizer)
        )
    for twin, other in zip(twins, made, strict=True):
        check_same(twin, other)
    assert called >= KERNELS
    assert ("nestpipe_dedup" in called) == (ranks > 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("on_device")
def test_kernels_of_the_gpu_have_the_bits_of_the_host_for_rows_in_half_precision(ranks, dtype):
    plain = PipelineSettings(owner_sums="off")
    pooled = PipelineSettings(plan="nested", retrieval=Retrieval.POOLED)
    twins = run_ranks(ranks, lambda comm: train(comm, plain, dtype=dtype))
    with pools_on_emulated_gpu() as called:
        made = run_ranks(
            ranks,
            lambda comm: train(
                comm, pooled, device_memory="25.8KB" if ranks == 1 else "15.6KB", dtype=dtype
            ),
        )
    for twin, other in zip(twins, made, strict=True):
        check_same(twin, other)
    assert "nestpipe_update_segments" in called


TUNED = RowSettings(
    optimizer="adamw",
    weight_decay=0.3,
    schedule="step",
    decay_steps=2,
    decay=0.5,
    rates=("a=0.2",),
    frozen=("b",),
)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("on_device")
def test_schedules_rates_and_frozen_tables_have_the_bits_of_the_host(ranks, kernels):
    plain = PipelineSettings(owner_sums="off")
    pooled = PipelineSettings(plan="nested", retrieval=Retrieval.POOLED)
    twins = run_ranks(ranks, lambda comm: train(comm, plain, rows=TUNED))
    with pools_on_emulated_gpu() if kernels else nullcontext():
        made = run_ranks(ranks, lambda comm: train(comm, pooled, ROWS, "46.4KB", rows=TUNED))
    for twin, other in zip(twins, made, strict=True):
        check_same(twin, other)


@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rowwise_adagrad"])
@pytest.mark.usefixtures("on_device")
def test_a_batch_for_which_nothing_moves_takes_few_calls_and_has_the_bits_of_the_host(
    optimizer, plan
):
    """In the second run too: its keys are in the pool."""
    twin = train(None, PipelineSettings(), optimizer=optimizer)
    pooled = PipelineSettings(plan=plan, retrieval=Retrieval.POOLED)
    with pools_on_emulated_gpu() as called:
        check_same(twin, train(None, pooled, optimizer=optimizer))
    assert called == {
        *("nestpipe_outputs_sums", "nestpipe_outputs", "nestpipe_sort_bytes", "nestpipe_admit"),
        *("nestpipe_look_up", "nestpipe_update_terms", "nestpipe_tell"),
    }


class Operations(TorchDispatchMode):
    """Notes the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


FEW = {
    **dict.fromkeys(("counts", "keys", "union", "retrieve", "grads", "reduce"), 0),
    "prefetch": 0,
    "copy": 0,
    "dedup": 4,
    "rows": 1,
    "writeback": 1,
}
"""Operations of torch in a steady batch; on a GPU a copy more for each type of column, and few of
its batches have predictions to add up in `writeback`."""


@pytest.mark.usefixtures("on_device")
def test_a_steady_step_has_few_operations():
    """Each costs the host more than a small kernel takes; `dense` and its update are torch's."""
    noted: dict[str, list[str]] = {}

    def around(work):
        def counted(act):
            def call(op):
                with Operations() as operations:
                    act(op)
                if op.batch == BATCHES:
                    noted[op.kind.value] = operations.names

            return call

        return {kind: counted(act) for kind, act in work.items()}

    packed = [make_batch(number).pack() for number in (0, 1)]

    class Packed(Batches):
        def batches(self, **_: object) -> Iterator[Batch]:
            return iter(packed * BATCHES)

    model = copy.deepcopy(MODEL)
    pipeline = PipelineSettings(plan="nested", retrieval=Retrieval.POOLED)
    settings = TrainSettings(batch=SAMPLES, device="cpu", pipeline=pipeline)
    with pools_on_emulated_gpu():
        trainer = Trainer(model, model.tables(), settings, around=around)
        trainer.fit(Packed())  # type: ignore[arg-type]
        trainer.close()
    assert {kind: len(noted[kind]) for kind in FEW} == FEW


@pytest.mark.usefixtures("on_device")
def test_a_step_takes_the_memory_of_the_formula(monkeypatch):
    """Of docs/store.md; what a device would have is host memory here. Ten percent either way."""
    samples = 400

    def copied(self: Batch, *_: object, **__: object) -> Batch:
        if self.packed is None:  # the one behind the end
            return self
        parts = {dtype: part.clone() for dtype, part in self.packed.parts.items()}
        return PackedColumns(parts, self.packed.layout).unpack(self)

    monkeypatch.setattr(Batch, "to", copied)
    monkeypatch.setattr(host_memory._MEMORY, "empty", lambda s, dtype: torch.empty(*s, dtype=dtype))
    source = step_memory.Samples(samples)
    with pools_on_emulated_gpu():
        trained = step_memory.make_trainer("serial", "cpu", samples)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trained.fit(source)  # type: ignore[arg-type]
        assert trained.plan.shape.pooled
        assert all(pool.moves_nothing(step_memory.STEPS - 1) for pool in trained._storage.pools)
        wanted = step_memory.formula(trained.plan, samples, sort_bytes_on_cpu(samples))
        trained.close()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    every = profiler.profiler.kineto_results.events()
    taken = sorted(
        (of.start_ns(), of.nbytes())  # type: ignore[attr-defined]
        for of in every
        if of.name() == "[memory]"
    )
    peak = max(accumulate(num_bytes for _, num_bytes in taken)) - step_memory.pool_bytes(samples)
    assert 0.9 * wanted <= peak <= 1.1 * wanted, f"{peak:,} bytes where the formula has {wanted:,}"


def sort_bytes_on_cpu(samples: int) -> Callable[[int], int]:
    bits = step_memory.slots_for(samples).bit_length()
    return lambda terms: ask(torch.device("cpu"), "nestpipe_sort_bytes", terms, bits)


@pytest.mark.parametrize("plan", ["serial", "nested"])
@pytest.mark.usefixtures("on_device")
def test_as_many_batches_are_in_device_memory_as_the_formula_has(plan, monkeypatch):
    """Never more, however far the host runs ahead; and so many."""
    waiting = frozenset({Lane.LOADER, Lane.HOST, Lane.WRITE})
    if plan == "nested":
        monkeypatch.setattr(Trainer, "placed", lambda self, made: with_separate_key_group(made))
        lanes = ThreadLanes(inline=frozenset(Lane) - waiting)
        monkeypatch.setattr(trainer_module, "lanes_for", lambda *_, **__: lanes)
    most = {Kind.COPY: 0, Kind.UNION: 0, Kind.ROWS: 0}

    def around(work: Work) -> Work:
        training = cast("TrainingWork", getattr(work[Kind.COPY], "__self__"))  # noqa: B009

        def alive(kind: Kind) -> int:
            batches = list(training.tables.in_flight.values())
            if kind is Kind.COPY:
                return sum(bool(of.micros) for of in list(training.in_flight.values()))
            held = "terms" if kind is Kind.UNION else "seen_OD"
            return sum(getattr(of[0], held) is not None for of in batches)  # type: ignore[index]

        def counted(kind: Kind, act: Act) -> Act:
            def call(op: Op) -> None:
                act(op)
                most[kind] = max(most[kind], alive(kind))

            return call if kind in most else act

        return {kind: counted(kind, act) for kind, act in work.items()}

    with pools_on_emulated_gpu():
        trained = step_memory.make_trainer(plan, "cpu", 20, around)
        trained.fit(step_memory.Samples(20))  # type: ignore[arg-type]
        bound = step_memory.in_flight(trained.plan)
        trained.close()
    assert all(found <= many for found, many in zip(most.values(), bound, strict=True))
    if plan == "serial":
        assert tuple(most.values()) == bound
