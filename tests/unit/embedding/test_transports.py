"""Every way of moving rows gives the bits of rows gathered and scattered by key."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import nestpipe
from nestpipe.embedding import transports
from nestpipe.embedding.replicas import read_rows, write_rows
from nestpipe.embedding.routing.lists import OwnerRequests
from nestpipe.embedding.routing.owners import WorkingSet, make_working_set
from nestpipe.embedding.store import open_store
from nestpipe.embedding.store.protocol import RowStore, StoreAbilities, StoreLayout
from nestpipe.embedding.transports import (
    BatchPointers,
    GpuTransport,
    InPlaceTransport,
    KeyTransport,
    PointerTransport,
    SlotTransport,
    Staging,
    choose_transport,
)
from nestpipe.kernels.rows.native import RowPointers, copy_rows
from nestpipe.schedule import Retrieval

CPU = torch.device("cpu")
TABLES, DIM, STATE = 2, 5, 2
LAYOUT = StoreLayout(table_seeds=(7, 8), init_stds=(0.1, 0.2), dim=DIM, state_dim=STATE)
BATCHES = (
    ((1, 2, 3, -9), (10, 11)),
    ((2, 3, 4), (11, 12, 13)),
    ((1, 3, 5, 2**62), ()),
    ((1, 2, 4), (10, 11)),
    ((), (12,)),
    ((5, 1, -9), (10, 13, 99)),
)


class SlotStore:
    """A store that keeps its rows in the slots of one tensor: a device pool in its barest form."""

    layout = LAYOUT

    def __init__(self) -> None:
        self._first = open_store(LAYOUT, native=False)
        self._slot_of: dict[tuple[int, int], int] = {}
        self.rows_SW = torch.full((64, LAYOUT.width), torch.nan)
        self.abilities = StoreAbilities(device=self)

    def slots(self, keys_K: Tensor, counts: Sequence[int]) -> Tensor:
        first_KW = torch.empty(len(keys_K), LAYOUT.width)
        self._first.gather(keys_K, counts, first_KW)
        slots: list[int] = []
        for table, key, row in zip(tables_of(counts), keys_K.tolist(), first_KW, strict=True):
            slot = self._slot_of.setdefault((table, key), len(self._slot_of))
            if self.rows_SW[slot].isnan().all():
                self.rows_SW[slot] = row
            slots.append(slot)
        return torch.tensor(slots, dtype=torch.int64)

    def contents(self) -> dict[tuple[int, int], list[float]]:
        return {name: self.rows_SW[slot].tolist() for name, slot in self._slot_of.items()}


def tables_of(counts: Sequence[int]) -> list[int]:
    return [table for table, count in enumerate(counts) for _ in range(count)]


def contents(store: RowStore) -> dict[tuple[int, int], list[float]]:
    return {
        (table, key): row.tolist()
        for table, keys, rows in store.export()
        for key, row in zip(keys.tolist(), rows, strict=True)
    }


def working_sets(buffers: int) -> list[WorkingSet]:
    """What an owner makes of the batches, each compared with the ones before."""
    made: list[WorkingSet] = []
    for tables in BATCHES:
        counts = torch.tensor([[list(map(len, tables))]])
        keys_A = torch.tensor([key for keys in tables for key in keys], dtype=torch.int64)
        asked = OwnerRequests(keys_A, keys_A[:0], counts, counts, 0)
        before = made[-1] if made and buffers > 1 else None
        older = made[-2] if len(made) > 1 and buffers > 2 else None
        made.append(make_working_set(asked, before, CPU, older=older, compared=buffers > 1))
    return made


def run(
    store, transport, *, buffers: int, retrieval: Retrieval, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int]]:
    """Train on all batches with one transport; returns rows read and written, batch by batch."""
    monkeypatch.setattr(
        "nestpipe.embedding.transports.choose_transport", lambda *_, **__: transport
    )
    shape = SimpleNamespace(retrieval=retrieval, buffers=buffers)
    held = transports.RowBuffers([store], shape, CPU, in_place=True, pin=True)  # type: ignore[arg-type]
    sets = working_sets(buffers)
    moved: list[tuple[int, int]] = []
    for batch, working in enumerate(sets):
        read = held.retrieve(batch, [working])
        if buffers > 1:
            held.sync(batch, [working])
        update(held.of(batch)[0], working, batch)
        following = sets[batch + 1] if batch + 1 < len(sets) else None
        stays = following if retrieval is Retrieval.NEW and buffers > 1 else None
        moved.append((read, held.writeback(batch, [working], None if stays is None else [stays])))
        held.forget(batch - buffers + 1)
    return moved


def update(rows: Tensor | RowPointers, working: WorkingSet, batch: int) -> None:
    """Something that depends on every number of a row, on its key and on the batch."""
    everything = torch.arange(working.size)
    values_KW = read_rows(rows, everything)
    keys_K1 = (working.keys_K % 97).float()[:, None]
    write_rows(rows, everything, values_KW * 1.5 + keys_K1 * (batch + 1))


def by_key(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[float]]:
    """The reference: one batch at a time, every row read and written by key."""
    store = open_store(LAYOUT, native=False)
    plain = KeyTransport(store, Staging(LAYOUT.width, CPU))
    run(store, plain, buffers=1, retrieval=Retrieval.WHOLE, monkeypatch=monkeypatch)
    return contents(store)


def pointers_of(store: RowStore) -> BatchPointers:
    assert store.abilities.locate is not None
    return BatchPointers(store.abilities.locate)


def on_gpu(store: RowStore, pinner) -> GpuTransport:
    by_host = PointerTransport(pointers_of(store), Staging(LAYOUT.width, CPU))
    return GpuTransport(by_host, pinner, CPU, alone=True)


class Pinner:
    """Pins so many times, then refuses."""

    def __init__(self, times: int) -> None:
        self.left = times

    def pin(self) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.fixture
def host_for_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The host in the GPU's stead; a list of the copies that it makes."""
    copies: list[bool] = []

    def copy(addresses_K, positions_n, rows_KW, *, to_store, alone):
        pointers = RowPointers(addresses_K, rows_KW.shape[1]).at(positions_n)
        copies.append(to_store)
        copy_rows(pointers, rows_KW, positions_n=positions_n, to_store=to_store, threads=1)

    module = ModuleType("row_copy_triton")
    module.copy_rows_by_gpu = copy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nestpipe.kernels.rows.row_copy_triton", module)
    monkeypatch.setattr(GpuTransport, "_sent", lambda _, numbers: numbers.clone())
    return copies


BUFFERED = pytest.mark.parametrize(
    ("buffers", "retrieval"),
    [(1, Retrieval.WHOLE), (2, Retrieval.WHOLE), (2, Retrieval.NEW), (3, Retrieval.NEW)],
)


@BUFFERED
@pytest.mark.parametrize("native", [False, True])
def test_rows_by_key(buffers, retrieval, native, monkeypatch):
    store = open_store(LAYOUT, native=native, threads=1)
    transport = KeyTransport(store, Staging(LAYOUT.width, CPU))
    moved = run(store, transport, buffers=buffers, retrieval=retrieval, monkeypatch=monkeypatch)
    assert contents(store) == by_key(monkeypatch)
    sizes = [sum(map(len, tables)) for tables in BATCHES]
    if retrieval is Retrieval.WHOLE:
        assert moved == [(size, size) for size in sizes]
    else:
        assert sum(read for read, _ in moved) < sum(sizes), "what stays is not read again"


@BUFFERED
def test_rows_by_pointer(buffers, retrieval, monkeypatch):
    store = open_store(LAYOUT, native=True, threads=1)
    transport = PointerTransport(pointers_of(store), Staging(LAYOUT.width, CPU))
    run(store, transport, buffers=buffers, retrieval=retrieval, monkeypatch=monkeypatch)
    assert contents(store) == by_key(monkeypatch)


@BUFFERED
def test_rows_through_staging_memory(buffers, retrieval, monkeypatch):
    monkeypatch.setattr(Staging, "needed", True)
    monkeypatch.setattr(transports, "empty", lambda shape, *_, **__: torch.empty(shape))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=int))
    expected = by_key(monkeypatch)
    for located in (False, True):
        store = open_store(LAYOUT, native=True, threads=1)
        staging = Staging(LAYOUT.width, CPU)
        transport = (
            PointerTransport(pointers_of(store), staging)
            if located
            else KeyTransport(store, staging)
        )
        run(store, transport, buffers=buffers, retrieval=retrieval, monkeypatch=monkeypatch)
        assert contents(store) == expected


def test_rows_in_place(monkeypatch):
    store = open_store(LAYOUT, native=True, threads=1)
    transport = InPlaceTransport(pointers_of(store))
    run(store, transport, buffers=1, retrieval=Retrieval.WHOLE, monkeypatch=monkeypatch)
    assert contents(store) == by_key(monkeypatch)


@BUFFERED
def test_rows_by_the_gpu(buffers, retrieval, host_for_gpu, monkeypatch):
    store = open_store(LAYOUT, native=True, threads=1)
    transport = on_gpu(store, Pinner(100))
    run(store, transport, buffers=buffers, retrieval=retrieval, monkeypatch=monkeypatch)
    assert contents(store) == by_key(monkeypatch)
    assert len(host_for_gpu) == 2 * len(BATCHES)


@BUFFERED
@pytest.mark.parametrize("pinned", [0, 1, 3])
def test_the_host_copies_once_the_system_refuses_to_pin(
    buffers, retrieval, pinned, host_for_gpu, monkeypatch
):
    store = open_store(LAYOUT, native=True, threads=1)
    transport = on_gpu(store, Pinner(pinned))
    with pytest.warns(UserWarning, match="set pin_rows = false") as warned:
        run(store, transport, buffers=buffers, retrieval=retrieval, monkeypatch=monkeypatch)
    assert contents(store) == by_key(monkeypatch)
    assert len(warned) == 1
    assert len(host_for_gpu) == 2 * pinned, "batches that began on the GPU end there"


@BUFFERED
def test_rows_that_live_on_the_device(buffers, retrieval, monkeypatch):
    store = SlotStore()
    transport = SlotTransport(store)
    run(store, transport, buffers=buffers, retrieval=retrieval, monkeypatch=monkeypatch)
    assert store.contents() == by_key(monkeypatch)


def chosen(store, *, buffers=2, device="cpu", in_place=True, pin=True):
    shape = SimpleNamespace(buffers=buffers, retrieves_ahead=False)
    return choose_transport(
        store,
        shape,  # type: ignore[arg-type]
        torch.device(device),
        in_place=in_place,
        pin=pin,
    )


def test_the_transport_follows_from_abilities_device_and_shape(monkeypatch):
    monkeypatch.setattr(transports, "has_triton", lambda: True)
    native, plain = (open_store(LAYOUT, native=native) for native in (True, False))
    assert isinstance(chosen(native, buffers=1), InPlaceTransport)
    assert isinstance(chosen(native, buffers=2), PointerTransport)
    assert isinstance(chosen(native, device="cuda"), GpuTransport)
    assert isinstance(chosen(native, buffers=1, device="cuda"), GpuTransport)
    assert isinstance(chosen(native, device="cuda", pin=False), PointerTransport)
    assert isinstance(chosen(native, in_place=False), KeyTransport)
    assert isinstance(chosen(native, device="cuda", in_place=False), KeyTransport)
    assert isinstance(chosen(plain, buffers=1), KeyTransport)
    assert isinstance(chosen(SlotStore()), SlotTransport)
    monkeypatch.setattr(transports, "has_triton", lambda: False)
    assert isinstance(chosen(native, device="cuda"), PointerTransport)
    monkeypatch.setenv("NESTPIPE_NATIVE", "0")
    assert isinstance(chosen(native), KeyTransport)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_in_half_precision_have_no_address(dtype):
    layout = StoreLayout(table_seeds=(7,), init_stds=(0.1,), dim=4, state_dim=1, dtype=dtype)
    store = open_store(layout, native=True)
    assert store.abilities == StoreAbilities(keys=store)  # type: ignore[arg-type]
    assert isinstance(chosen(store, buffers=1), KeyTransport)


def test_only_the_store_room_knows_its_stores():
    root = Path(nestpipe.__file__).parent
    room = root / "embedding" / "store"
    concrete = {f"nestpipe.embedding.store.{name}" for name in ("host", "reference", "ssd")}
    importers = [
        path.relative_to(root).as_posix()
        for path in sorted(root.rglob("*.py"))
        for text in [path.read_text(encoding="utf-8")]
        if any(name in text for name in concrete)  # parsing all files would take seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in concrete and path.parent != room
    ]
    assert not importers, f"open stores with open_store: {room}"
