"""Rows between the slots of a pool and its host store.

Where the store is pinned a GPU reads and writes rows by itself (`DirectTransfer`). It must know
where each row lives: a thread asks the store for that as soon as a batch has its slots, long before
its rows are read. Else the store gathers and scatters rows by key (`StagedTransfer`), the twin.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from nestpipe.embedding.store.protocol import RowStore
from nestpipe.embedding.transports import has_triton
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.index.device_index import COUNTERS
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows.native import RowPointers, copy_rows

# Shapes: S slots, V slots of a list, n those of them that count, W weights and state


EACH_WITH_ITS_TABLE = True
"""Whether the store is asked for keys as they come; False: sorted by table, the twin."""


def _pinned_like(numbers: Tensor) -> Tensor:
    """Room on the host that a GPU copies from and to by itself, in a fraction of the time."""
    return torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)


class Told:
    """Counters of an index as they are now; on a GPU a copy that is on its way."""

    def __init__(self, counters: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if counters.is_cuda:
            self._numbers = torch.empty(len(counters), dtype=counters.dtype, pin_memory=True)
            self._numbers.copy_(counters, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers = counters.clone()

    @property
    def is_here(self) -> bool:
        """Whether nobody would wait."""
        return (event := self._event) is None or event.query()

    def __getitem__(self, name: str) -> int:
        """Wait for the copy, and read it."""
        if (event := self._event) is not None:  # several threads may ask
            event.synchronize()
            self._event = None
        return int(self._numbers[COUNTERS.index(name)])


@dataclass(slots=True)
class SlotList:
    """Slots with the keys that they have at this time; the index may change later."""

    slots_V: Tensor
    keys_V: Tensor
    tables_V: Tensor
    counter: str
    """Of the index, which says how many of them count"""
    told: Told | None = None
    count_there: Tensor | None = None
    """(1,) the counter's number, on the device"""
    located: Future[LocatedRows | None] | None = None
    """Where the host store has their rows, once somebody has asked it."""

    def tell(self, told: Told, counters: Tensor) -> None:
        """The counters as they are when the whole batch has its slots."""
        i = COUNTERS.index(self.counter)
        self.told, self.count_there = told, counters[i : i + 1]

    @property
    def count(self) -> int:
        """How many of them count; waits for the device."""
        assert self.told is not None, "nobody has told yet"
        return self.told[self.counter]

    def on_host(self) -> tuple[Tensor, Tensor]:
        """Keys and tables of those that count, on the host, as they come; waits for the stream."""
        lists = self.keys_V[: self.count], self.tables_V[: self.count]
        if not self.keys_V.is_cuda:
            return lists
        keys_n, tables_n = (_pinned_like(of).copy_(of, non_blocking=True) for of in lists)
        torch.cuda.current_stream(self.keys_V.device).synchronize()
        return keys_n, tables_n

    def by_table(self, num_tables: int) -> tuple[Tensor, Tensor, list[int]]:
        """Slots on the device, keys on the host, table by table, and how many of each."""
        n = self.count
        tables_n, order_n = torch.sort(self.tables_V[:n], stable=True)
        keys_n = self.keys_V[:n].index_select(0, order_n)
        if keys_n.is_cuda:
            keys_n = _pinned_like(keys_n).copy_(keys_n, non_blocking=True)
        # Reading the counts waits for the stream, hence for the keys before them.
        counts = torch.bincount(tables_n, minlength=num_tables).tolist()
        return self.slots_V[:n].index_select(0, order_n).long(), keys_n, counts


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """Slots and where the host store has their rows, on the device, in the order of addresses."""

    slots_n: Tensor
    addresses_n: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Let the current stream wait until both lists are there."""
        if self.ready is not None:
            torch.cuda.current_stream(self.slots_n.device).wait_event(self.ready)


class SlotTransfer(Protocol):
    """Moves rows of slots from and to the host store."""

    def expect(self, of: SlotList, *, leaving: bool) -> None:
        """These rows will be read, or written where they are leaving."""
        ...

    def read(self, of: SlotList) -> int:
        """Fill the slots; returns how many."""
        ...

    def write(self, of: SlotList) -> int:
        """Save the rows of the slots; returns how many."""
        ...

    def rows_were_made(self) -> None:
        """Rows have been made on the device, so that the store need not have them."""
        ...


def slot_transfer(
    store: RowStore, rows_SW: Tensor, stored_S: Tensor, num_tables: int, *, pin: bool
) -> SlotTransfer:
    """`stored_S`: what `read` notes of slots while the store notes what is written: whether it has
    a row of their key. `pin`: let a GPU read and write rows of the host store by itself, where it
    can."""
    can, by_store = store.abilities, StagedTransfer(store, rows_SW, stored_S, num_tables)
    can_reach = can.locate is not None and can.pin is not None
    if pin and can_reach and rows_SW.is_cuda and has_triton() and native_wanted():
        return DirectTransfer(store, rows_SW, stored_S, num_tables, by_store)
    return by_store


class StagedTransfer:
    """The store gathers and scatters rows by key, through staging memory for a GPU.

    Host threads do that, and no stream can hold them back: `by_table` waits until the stream is
    past all that it waits for, earlier copies of rows included, before the store is asked.
    """

    def __init__(self, store: RowStore, rows_SW: Tensor, stored_S: Tensor, num_tables: int) -> None:
        self._store, self._rows_SW, self._num_tables = store, rows_SW, num_tables
        self._stored_S, can = stored_S, store.abilities
        self._keys, self._notes = can.keys, can.notes

    def expect(self, of: SlotList, *, leaving: bool) -> None:
        """The store finds rows when it copies them."""

    def rows_were_made(self) -> None:
        """The store takes rows of any key."""

    def read(self, of: SlotList) -> int:
        if not of.count:
            return 0
        slots_n, keys_n, counts = of.by_table(self._num_tables)
        device = self._rows_SW.device
        shape = len(keys_n), self._rows_SW.shape[1]
        rows_nW = empty(shape, torch.float32, torch.device("cpu"), pinned=device.type == "cuda")
        new = self._store.gather(keys_n, counts, rows_nW)
        self._rows_SW.index_copy_(0, slots_n, rows_nW.to(device, non_blocking=True))
        if self._notes is not None and self._notes.tracking:
            self._note_stored(slots_n, keys_n, counts, new)
        return len(keys_n)

    def _note_stored(
        self, slots_n: Tensor, keys_n: Tensor, counts: Sequence[int], new: int
    ) -> None:
        """Of which slots the store has a row; `new`: how many it has not."""
        if new in (0, len(keys_n)):
            self._stored_S.index_fill_(0, slots_n, not new)
        elif self._keys is not None:
            stored_n = self._keys.stored(keys_n, counts)
            self._stored_S.index_copy_(0, slots_n, stored_n.to(self._stored_S.device))

    def write(self, of: SlotList) -> int:
        if not of.count:
            return 0
        slots_n, keys_n, counts = of.by_table(self._num_tables)
        rows_nW = self._rows_SW.index_select(0, slots_n).cpu().contiguous()
        self._store.scatter(keys_n, counts, rows_nW)
        return len(keys_n)


class DirectTransfer:
    """The GPU copies rows from and to where they live; the host only finds out where that is."""

    def __init__(
        self,
        store: RowStore,
        rows_SW: Tensor,
        stored_S: Tensor,
        num_tables: int,
        by_store: StagedTransfer,
    ) -> None:
        can = store.abilities
        assert can.locate is not None
        assert can.pin is not None
        self._locator, self._pinner, self._notes = can.locate, can.pin, can.notes
        self._rows_SW, self._num_tables, self._by_store = rows_SW, num_tables, by_store
        self._stored_S = stored_S
        self._addresses_S = torch.zeros(len(rows_SW), dtype=torch.int64, device=rows_SW.device)
        """Where the host store has the row of each slot; 0: not known."""
        self._all_located = True
        """Whether that is known of all rows, those that are about to be read included."""
        self._refused = False
        """Whether the system does not let the GPU reach rows: the host copies from then on."""
        self._ahead = _Worker(rows_SW.device)

    def rows_were_made(self) -> None:
        self._all_located = False

    def expect(self, of: SlotList, *, leaving: bool) -> None:
        """Find out where rows live, beside whatever else runs.

        Rows that leave were located when they came, but for those that were made on the device.
        """
        if self._refused or (leaving and self._all_located):
            return
        of.located = self._ahead.submit(lambda: self._locate(of, leaving=leaving))

    def read(self, of: SlotList) -> int:
        n = of.count
        if not n:
            return 0
        found = self._located(of, leaving=False)
        if found is None:
            return self._by_store.read(of)
        self._know(found)
        self._copy(found.slots_n, to_store=False)
        self._stored_S.index_fill_(0, found.slots_n, value=True)  # who locates a row inserts it
        return n

    def write(self, of: SlotList) -> int:
        n = of.count
        if not n:
            return 0
        if of.located is None and self._all_located and not self._refused:
            self._note(of)
            slots_n = of.slots_V[:n].long()
            order_n = self._addresses_S.index_select(0, slots_n).argsort()
            self._copy(slots_n.index_select(0, order_n), to_store=True)
            return n
        found = self._located(of, leaving=True)
        if found is None:
            return self._by_store.write(of)
        self._know(found)
        self._copy(found.slots_n, to_store=True)
        return n

    def _located(self, of: SlotList, *, leaving: bool) -> LocatedRows | None:
        if of.located is not None:
            return of.located.result()
        return None if self._refused else self._locate(of, leaving=leaving)

    def _locate(self, of: SlotList, *, leaving: bool) -> LocatedRows | None:
        """Ask the store; None where the system refuses to let the GPU reach its rows.

        Rows that are read will change here: it is the pool that knows of those.
        """
        if not of.count:
            return None
        quiet = nullcontext() if leaving or self._notes is None else self._notes.unnoted()
        with quiet:
            slots_n, addresses_n = self._asked(of)
        if not self._pinner.pin():
            self._refused = True
            return None
        device = slots_n.device
        addresses_n = addresses_n.to(device, non_blocking=True)
        # Rows of one page of host memory come one after the other: `in_order_of_addresses` says
        # why.
        addresses_n, order_n = torch.sort(addresses_n)
        ready = torch.cuda.Event() if device.type == "cuda" else None
        made = LocatedRows(slots_n.index_select(0, order_n), addresses_n, ready)
        if ready is not None:
            ready.record()
        return made

    def _asked(self, of: SlotList) -> tuple[Tensor, Tensor]:
        """Slots, and what the store answers for their keys: pinned, where that is for a GPU."""
        if not EACH_WITH_ITS_TABLE:
            slots_n, keys_n, counts = of.by_table(self._num_tables)
            addresses_n = self._locator.locate(keys_n, counts).addresses_K
            return slots_n, addresses_n.pin_memory() if slots_n.is_cuda else addresses_n
        keys_n, tables_n = of.on_host()
        addresses_n = _pinned_like(keys_n) if of.keys_V.is_cuda else torch.empty_like(keys_n)
        self._locator.locate_each(keys_n, tables_n, addresses_n)
        return of.slots_V[: len(keys_n)].long(), addresses_n

    def _know(self, found: LocatedRows) -> None:
        found.wait()
        self._addresses_S.index_copy_(0, found.slots_n, found.addresses_n)

    def _note(self, of: SlotList) -> None:
        """Tell whoever notes which rows of the store change: it sees no call."""
        if self._notes is not None and self._notes.tracking:
            _, keys_n, counts = of.by_table(self._num_tables)
            self._notes.note(keys_n, counts)

    def _copy(self, slots_n: Tensor, *, to_store: bool) -> None:
        """Copy rows whose slots are in the order of addresses."""
        if not self._rows_SW.is_cuda:  # as tests do it without a GPU
            pointers = RowPointers(self._addresses_S[slots_n], self._rows_SW.shape[1])
            copy_rows(pointers, self._rows_SW, positions_n=slots_n, to_store=to_store, threads=1)
            return
        from nestpipe.kernels.rows.row_copy_triton import copy_rows_by_gpu

        # At full speed: a batch that lacks rows waits for nothing else as long.
        copy_rows_by_gpu(
            *(self._addresses_S, slots_n, self._rows_SW),
            to_store=to_store,
            alone=True,
            in_order=True,
        )


class _Worker:
    """A thread, on a GPU with a stream of its own, that does one thing after the other.

    It ends with this object.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tasks: SimpleQueue[_LocateTask | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._started = False

    def submit(self, act: Callable[[], LocatedRows | None]) -> Future[LocatedRows | None]:
        """Do it behind all that is on the caller's stream by now."""
        if not self._started:  # not before it is needed: a fork would lose it
            work = partial(_work_on, self._tasks, self._stream)
            threading.Thread(target=work, name="locate rows", daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)
            self._started = True
        issued = None
        if self._stream is not None:
            issued = torch.cuda.Event()
            issued.record()
        task = _LocateTask(act, issued)
        self._tasks.put(task)
        return task.done


def _work_on(tasks: SimpleQueue[_LocateTask | None], stream: torch.cuda.Stream | None) -> None:
    torch.set_num_threads(1)
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        while (task := tasks.get()) is not None:
            task.run(stream)
            del task  # it may hold the last reference to the pool


@dataclass(frozen=True, slots=True)
class _LocateTask:
    act: Callable[[], LocatedRows | None]
    issued: torch.cuda.Event | None
    done: Future[LocatedRows | None] = field(default_factory=Future["LocatedRows | None"])

    def run(self, stream: torch.cuda.Stream | None) -> None:
        try:
            if stream is not None and self.issued is not None:
                stream.wait_event(self.issued)
            self.done.set_result(self.act())
        except BaseException as error:  # noqa: BLE001  raised by whoever asks for the result
            self.done.set_exception(error)


def fill_with_nan(rows_SW: Tensor, of: SlotList) -> None:
    """So that whoever reads rows that have left is found out."""
    rows_SW.index_fill_(0, of.slots_V[: of.count].long(), math.nan)
