"""A pool of rows in device memory: rows stay there from batch to batch, used and updated in place.

Per store and rank there are slots, each with the weights and the state of a row, and an index from
(table, key) to slot. `admit` gives every key of a batch a slot, if need be that of a victim: a row
that neither this batch nor the one before uses. `retrieve` fills the slots of keys that were not
there, `writeback` saves the rows of victims before that. With room for all rows nothing ever moves.

The host store stays the home of rows that left: `flush` brings it up to date. A checkpoint needs no
flush: `snapshot` copies the rows that were touched, on the device, and a thread takes them from
there while training goes on. Which rows leave, and which slot a key gets, changes no result.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nestpipe.config.load import memory_size, show_memory
from nestpipe.embedding.routing.owners import WorkingSet
from nestpipe.embedding.slot_transfer import SlotList, Told, fill_with_nan, slot_transfer
from nestpipe.embedding.store.protocol import RowStore, StoreLayout, round_weights
from nestpipe.errors import ConfigError
from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.index import library
from nestpipe.kernels.index.device_index import (
    COUNTERS,
    FREE_STAMP,
    DeviceIndex,
    FirstValues,
    FoundSlots,
    KeyCells,
    PlainIndex,
)
from nestpipe.kernels.index.library import ask
from nestpipe.kernels.index.steady import TermBuffers
from nestpipe.kernels.library import free_memory as free_host_memory
from nestpipe.kernels.rows.cuda import aligned_rows
from nestpipe.kernels.rows.segments import Segments, lists_on

# Shapes: N keys asked for, S slots, V slots of a list, n those of them that count, C tables,
# W weights and state

log = logging.getLogger("nestpipe.pool")

INDEX_BYTES = 59
"""Of a slot beside its row: places of the index, key, table, stamp, heat, free list, address, and
whether the host store has a row of its key."""
SPARE = 1024
"""Slots that are made free beyond what the last batches needed."""
MOST_SLOTS = 2**30 - 1
FLUSH_ROWS = 1 << 20
"""Rows that `flush` moves at a time."""
COUNTED_SLOTS = 1 << 24
"""Slots that are looked at together, so that counting needs little memory."""
SNAPSHOT_SHARE = 0.25
"""Of the memory of the device that is left: what the copies of a snapshot may take."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of a working set, where the pool has them."""

    rows_SW: Tensor
    slots_K: Tensor

    def at(self, positions: Tensor) -> SlotRows:
        """Some of them."""
        return SlotRows(self.rows_SW, self.slots_K.index_select(0, positions))

    def read(self) -> Tensor:
        """(K, W) a copy of these rows."""
        return self.rows_SW.index_select(0, self.slots_K)

    def write(self, rows_KW: Tensor) -> None:
        """Put rows there; a slot that comes twice gets the same row twice."""
        self.rows_SW.index_copy_(0, self.slots_K.long(), rows_KW)

    def round_weights(self, dim: int, dtype: str) -> Tensor | None:
        """What the function of that name does to rows of their own."""
        rows_KW = self.read()
        beyond = round_weights(rows_KW[:, :dim], dtype)
        self.write(rows_KW)
        return beyond


@dataclass(slots=True)
class Admission:
    """What one batch does to a pool."""

    slots_N: Tensor | None
    new: list[SlotList] = field(default_factory=list[SlotList])
    leaving: list[SlotList] = field(default_factory=list[SlotList])
    """Rows that `writeback` of the batch before the last saves ..."""
    urgent: list[SlotList] = field(default_factory=list[SlotList])
    """... and those that `retrieve` itself saves, because this batch takes their slots already."""
    terms: TermBuffers | None = None
    """Slots and segments of a batch for which nothing moves, in memory that is used again."""
    told: Told | None = None
    """What the device says of it; whoever needs a number waits for it, but not `admit`."""


Fetch = Callable[[Tensor], Tensor]
"""Brings a tensor of the device to the host."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Copies of rows of a pool, in the order of their slots, on its device."""

    keys_K: Tensor
    tables_K: Tensor
    rows_KW: Tensor
    not_stored: list[int]
    """Rows of each table that the pool had then, and the host store not."""

    def of_tables(self, fetch: Fetch, most: int) -> list[tuple[Tensor, Iterator[Tensor]]]:
        """Of each table its keys, ascending, and their rows: at most so many at a time.

        All of it on the host, where `fetch` brings it. Any thread may ask.
        """
        order_K = _by_table_and_key(self.tables_K, self.keys_K)
        keys_K = fetch(self.keys_K.index_select(0, order_K))
        counts = torch.bincount(self.tables_K, minlength=len(self.not_stored)).tolist()
        of_tables = zip(keys_K.split(counts), order_K.split(counts), strict=True)
        return [(keys, self._rows(order, fetch, most)) for keys, order in of_tables]

    def _rows(self, order_n: Tensor, fetch: Fetch, most: int) -> Iterator[Tensor]:
        for some in order_n.split(most) if len(order_n) else ():
            shape = len(some), self.rows_KW.shape[1]
            block = empty(shape, self.rows_KW.dtype, self.rows_KW.device)
            torch.index_select(self.rows_KW, 0, some, out=block)
            yield fetch(block)


def _by_table_and_key(tables_K: Tensor, keys_K: Tensor) -> Tensor:
    """Places in ascending order of table, then key; none comes twice."""
    if keys_K.is_cuda:
        order = keys_K.argsort()
        return order[tables_K[order].argsort(stable=True)]
    # By vector instructions, which torch on a CPU does not use.
    return torch.from_numpy(np.lexsort((keys_K.numpy(), tables_K.numpy())))


class RowPool:
    """Slots on a device before a host store. Batches are admitted in order."""

    def __init__(
        self, store: RowStore, num_slots: int, device: torch.device, *, pin: bool = False
    ) -> None:
        """`pin`: let a GPU read and write rows of the host store by itself."""
        layout = store.layout
        self._store, self._layout, self.device = store, layout, device
        self.num_slots = num_slots
        by_kernels = library.has_kernels(device)
        self.rows_SW = aligned_rows(num_slots, layout.width, device)
        self.index = DeviceIndex(num_slots, device) if by_kernels else PlainIndex(num_slots)
        self._first = _first_values(layout, device) if by_kernels else None
        self._stored_S = torch.zeros(num_slots, dtype=torch.bool, device=device)
        """Whether the host store has a row of the slot's key; known while it notes what is written.
        A row that is made here begins in a slot that has never been used."""
        self._transfer = slot_transfer(
            store, self.rows_SW, self._stored_S, layout.num_tables, pin=pin
        )
        self._notes = store.abilities.notes if store.abilities.keys is not None else None
        self._copies_KW = self.rows_SW[:0]
        """Memory for the copies of a snapshot, which the next one uses again."""
        self._sorts = by_kernels and ask(device, "nestpipe_sort_bytes", 1, 1) >= 0
        """Whether the library has a sort of its own."""
        self._free_terms: list[TermBuffers] = []
        self._most_terms = 0
        self._admitted: dict[int, Admission] = {}
        self._first_batch = 0
        """The stamp of the run's batch 0."""
        self._last_stamp = -1
        self._dirty_from = 0
        """Rows with this stamp or a later one may differ from those in the host store ..."""
        self._touched_from = 0
        """... and those from this one on were touched after the last snapshot or flush."""
        self._outside = layout.dtype != "float32" or not by_kernels
        """Whether a key that is not here may be in the host store, or must have its first value
        from there."""
        self._flushed = 0
        """Rows of the host store that are known to be here too."""
        self._free_known, self._asked_since = num_slots, 0
        """Slots that were free when the host last heard of it, and keys asked for since."""
        self._next_told: tuple[Told, int] | None = None
        self._made_room = False
        """Whether rows have left in this run, so that a free slot may be yet to be saved."""
        self._untold: deque[Told] = deque()
        """Of batches that may have made rows leave, those not yet looked at."""
        self._recent_new, self._spare = 0, min(SPARE, num_slots // 16)
        self._holds = 2
        self.poison = False
        """Fill the slots of rows that left with NaN, so that a late reader is found out."""

    def begin_run(self, holds: int = 2) -> None:
        """Batches are numbered from 0 again.

        `holds`: neighbouring batches whose rows are here together. With three, rows leave one batch
        before their slots are needed, so that some are written while others are read.
        """
        self._holds = holds
        self._admitted.clear()
        self._learn(wait=True)
        self._made_room = False
        self._outside |= sum(self._store.num_rows()) > self._flushed
        self._first_batch = self._last_stamp + 3

    # What a batch does, in the order of its ops

    def admit(self, batch: int, keys_N: Tensor, cells: KeyCells) -> Tensor:
        """(N,) the slot of every key; keys, repeats allowed, are on the device."""
        return self._admit(batch, keys_N, cells, sure=self._surely_free(len(keys_N)))

    def admit_terms(
        self, batch: int, keys_T: Tensor, cells: KeyCells, outputs_T: Tensor | None
    ) -> Tensor | TermBuffers:
        """(T,) the slot of every key; or, where nothing moves, slots and segments by one call.

        `outputs_T`: the output of each key; None: each is its own.
        """
        sure = self._surely_free(len(keys_T))
        if not (sure and self._sorts and self._nothing_moves):
            return self._admit(batch, keys_T, cells, sure=sure)
        terms = self._room_for(len(keys_T))
        self._last_stamp = self._first_batch + batch
        terms.admit(keys_T, cells, self._last_stamp, outputs_T)
        self._transfer.rows_were_made()
        self._admitted[batch] = Admission(None, terms=terms)
        return terms

    def moves_nothing(self, batch: int) -> bool:
        """Whether a batch that was admitted neither reads rows nor writes any."""
        admitted = self._admitted.get(batch)
        return admitted is not None and admitted.terms is not None

    @property
    def _nothing_moves(self) -> bool:
        """Every slot that is given away was never used, so nothing need be saved or read before."""
        return not self._outside and not self._made_room

    def _room_for(self, terms: int) -> TermBuffers:
        """Buffers of a batch that is over, else new ones, for somewhat more than is asked for."""
        while self._free_terms:
            found = self._free_terms.pop()
            if found.most_terms >= terms:
                return found
        assert isinstance(self.index, DeviceIndex)
        assert self._first is not None
        self._most_terms = max(self._most_terms, terms + terms // 8)
        return TermBuffers(self._most_terms, self.index, self.rows_SW, self._first)

    def _admit(self, batch: int, keys_N: Tensor, cells: KeyCells, *, sure: bool) -> Tensor:
        stamp = self._first_batch + batch
        self._last_stamp = stamp
        if sure and self._nothing_moves:
            found = self.index.find_or_insert(keys_N, cells, stamp)
            self._make(found.new_slots_N)
            self._admitted[batch] = Admission(found.slots_N)
            return found.slots_N
        self._learn()
        admitted = Admission(None)
        if not sure and not self._makes_room_ahead:
            admitted.leaving += self._make_room(stamp - 1, self._wanted_free)
        found = self._insert(admitted, keys_N, cells, sure=sure)
        admitted.slots_N = found.slots_N
        if not sure and self._makes_room_ahead:
            admitted.leaving += self._make_room(stamp - 1, self._wanted_free)
        self._tell(admitted, sure=sure)
        self._admitted[batch] = admitted
        return found.slots_N

    def _insert(
        self, admitted: Admission, keys_N: Tensor, cells: KeyCells, *, sure: bool
    ) -> FoundSlots:
        """A slot for every key; where too few are free, rows leave at once.

        It is the device that finds out whether they must, so that nobody waits here. Where even
        that is not enough, `retrieve` says so.
        """
        stamp = self._last_stamp
        found = self.index.find_or_insert(keys_N, cells, stamp)
        if not sure:
            urgent = self._make_urgent_room(stamp + 1 - self._holds, len(keys_N))
            (admitted.urgent if self._makes_room_ahead else admitted.leaving).append(urgent)
            found = self.index.insert_missing(found, keys_N, cells, stamp)
        admitted.new.append(self._listed(found.new_slots_N, "num_new"))
        return found

    def _tell(self, admitted: Admission, *, sure: bool) -> None:
        """Send all counts to the host by one copy, and say which rows will move."""
        counters = self.index.counters.clone()
        admitted.told = Told(counters)
        for of in (*admitted.new, *admitted.leaving, *admitted.urgent):
            of.tell(admitted.told, counters)
        if not sure:
            self._untold.append(admitted.told)
        if self._outside or self._made_room:
            for of in admitted.new:
                self._transfer.expect(of, leaving=False)
        for of in (*admitted.urgent, *admitted.leaving):
            self._transfer.expect(of, leaving=True)

    def _learn(self, *, wait: bool = False) -> None:
        """What the device has said of earlier batches by now."""
        while self._untold and (wait or self._untold[0].is_here):
            told = self._untold.popleft()
            self._recent_new = max(self._recent_new * 3 // 4, told["num_new"])
            self._know_free(told)

    @property
    def _makes_room_ahead(self) -> bool:
        """Whether rows leave for the batch after: then reading need not wait for their writing."""
        return self._holds > 2

    @property
    def _wanted_free(self) -> int:
        """Slots that are free when a batch asks for new ones."""
        return self._recent_new * 5 // 4 + self._spare

    def retrieve(self, batch: int) -> int:
        """Fill the slots of keys that were not here; returns how many rows the host store gave."""
        admitted = self._admitted[batch]
        if admitted.told is not None and (missing := admitted.told["num_missing"]):
            raise self._too_small(batch, missing)
        self._write_all(admitted.urgent)
        if batch < 2:  # no op of this run writes them before
            self._write_all(admitted.leaving)
        came = 0
        for of in admitted.new:
            if self._outside or of.located is not None:
                came += self._transfer.read(of)
            else:
                self._make(of.slots_V, of)
        return came

    def writeback(self, batch: int) -> int:
        """Save the rows that leave by the union of the batch after the next; returns how many."""
        taking = self._admitted.get(batch + 2)
        return self._write_all(taking.leaving) if taking is not None else 0

    def forget(self, batch: int) -> None:
        """Drop what a batch left; the device is done with it."""
        admitted = self._admitted.pop(batch, None)
        if admitted is not None and admitted.terms is not None:
            self._free_terms.append(admitted.terms)

    # Between runs

    def flush(self) -> None:
        """Bring the host store up to date; rows stay here."""
        if self._dirty_from > self._last_stamp:  # no batch since the last time
            return
        outside = self._outside
        # Of rows that a snapshot has, the store need not note that they are written.
        with nullcontext() if self._notes is None else self._notes.unnoted():
            self._write_stamped(self._dirty_from, self._touched_from)
        self._write_stamped(self._touched_from, self._last_stamp + 1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._nothing_is_dirty()
        self._outside = outside  # what was written is still here
        self._flushed = sum(self._store.num_rows())

    def _write_stamped(self, first: int, end: int) -> None:
        """Write the rows whose stamp is one of [first, end)."""
        stamps_S = self.index.stamps_S
        slots = ((stamps_S >= first) & (stamps_S < end)).nonzero().squeeze(1).int()
        for slots_V in torch.split(slots, FLUSH_ROWS) if len(slots) else ():
            keys_V = self.index.slot_keys_S[slots_V.long()]
            tables_V = self.index.slot_tables_S[slots_V.long()]
            all_V = torch.full((len(COUNTERS),), len(slots_V), dtype=torch.int32)
            self._write(SlotList(slots_V, keys_V, tables_V, COUNTERS[0], Told(all_V), all_V[:1]))
            self._stored_S.index_fill_(0, slots_V.long(), value=True)

    def _nothing_is_dirty(self) -> None:
        self._dirty_from = self._touched_from = self._last_stamp + 1

    def snapshot(self, *, copy: bool = True) -> PoolSnapshot | None:
        """Copy the rows touched since the last snapshot or flush; they stay dirty.

        The copies of the snapshot before are lost. Touched rows that have left are in the host
        store, which has noted them. None where only a flush will do: the store does not note what
        is written, or the copies would take too much memory. `copy`: else there are none.
        """
        if self._notes is None:
            return None
        # The host waits for this number. No batch is in flight, so the device has nothing else.
        slots_K = (self.index.stamps_S >= self._touched_from).nonzero().squeeze(1)
        slots_K = slots_K if copy else slots_K[:0]
        rows_KW = self._room_for_copies(len(slots_K))
        if rows_KW is None:
            return None
        torch.index_select(self.rows_SW, 0, slots_K, out=rows_KW)
        keys_K = self.index.slot_keys_S.index_select(0, slots_K)
        tables_K = self.index.slot_tables_S.index_select(0, slots_K)
        self._touched_from = self._last_stamp + 1
        return PoolSnapshot(keys_K, tables_K, rows_KW, self._not_stored())

    def _room_for_copies(self, rows: int) -> Tensor | None:
        """Memory for so many rows; None, and a warning, where that is more than may be taken."""
        if not rows <= len(self._copies_KW) <= 4 * rows:
            self._copies_KW = self.rows_SW[:0]  # the old ones first
            shape = rows + rows // 8, self._layout.width
            if 4 * shape[0] * shape[1] > SNAPSHOT_SHARE * memory_left(self.device):
                log.warning(
                    "copies of %s touched rows take %s, too much of what is left on the device; "
                    "training waits until these rows are in host memory; lower device_memory, or "
                    "save more often",
                    *(f"{rows:,}", show_memory(4 * shape[0] * shape[1])),
                )
                return None
            self._copies_KW = torch.empty(shape, device=self.device)
        return self._copies_KW[:rows]

    def _not_stored(self) -> list[int]:
        """Rows of each table that are here and not in the host store."""
        num_tables, index = self._layout.num_tables, self.index
        counts = torch.zeros(num_tables, dtype=torch.int64, device=self.device)
        of_slots = (index.stamps_S, self._stored_S, index.slot_tables_S)
        for stamps, stored, tables in zip(
            *(of.split(COUNTED_SLOTS) for of in of_slots), strict=True
        ):
            others = (stamps == FREE_STAMP) | stored
            found = torch.bincount(tables.masked_fill(others, num_tables), minlength=num_tables + 1)
            counts += found[:num_tables]
        return counts.tolist()

    def clear(self) -> None:
        """Forget all rows, without saving them: the host store has been changed."""
        self.index.erase((self.index.stamps_S != FREE_STAMP).nonzero().squeeze(1).int())
        self.index.rebuild()
        self._admitted.clear()
        self._stored_S.fill_(value=False)
        self._outside = True
        self._know_free(Told(self.index.counters))
        self._nothing_is_dirty()

    def forget_rows(self, table: int, keys: Tensor) -> None:
        """Drop rows that were erased from the host store; the pool must have been flushed."""
        if not len(keys):
            return
        index = self.index
        here_S = (index.stamps_S != FREE_STAMP) & (index.slot_tables_S == table)
        here_S &= torch.isin(index.slot_keys_S, keys.to(self.device))
        index.erase(here_S.nonzero().squeeze(1).int())
        self._stored_S &= ~here_S
        index.rebuild()
        self._know_free(Told(index.counters))
        self._flushed = min(self._flushed, sum(self._store.num_rows()))

    @property
    def free_known(self) -> int:
        """Slots that were free when the host last heard of it; waits for nobody."""
        return self._free_known

    def num_bytes(self) -> int:
        """Device memory of rows and index."""
        return self.num_slots * (self.rows_SW.stride(0) * 4 + INDEX_BYTES)

    # Room

    def _surely_free(self, keys: int) -> bool:
        """Whether so many keys find a slot without victims, for all that the host knows.

        It asks again before it must know, so that it does not wait for the answer. Once rows have
        left, free slots are few, and it is not asked any more.
        """
        if self._made_room:
            return False
        if self._next_told is None and 2 * self._asked_since > self._free_known:
            self._next_told = Told(self.index.counters), self._asked_since
        self._asked_since += keys
        if self._asked_since > self._free_known and self._next_told is not None:
            told, asked_before = self._next_told
            asked_since = self._asked_since - asked_before
            self._know_free(told)
            self._asked_since = asked_since
        return self._asked_since <= self._free_known

    def _know_free(self, told: Told) -> None:
        """So many slots are free, before any key that is asked for from now on."""
        self._free_known, self._asked_since, self._next_told = told["free"], 0, None

    def _make_room(self, in_use_from: int, least_free: int) -> list[SlotList]:
        """Let rows leave that no batch from that stamp on uses, so that as many slots are free."""
        victims_V = self.index.choose_victims(in_use_from, min(least_free, self.num_slots))
        return [self._let_go(victims_V, "num_victims")]

    def _make_urgent_room(self, in_use_from: int, keys: int) -> SlotList:
        """The same for keys of this very batch that found no slot, if there are any."""
        victims_V = self.index.choose_for_missing(in_use_from, keys)
        return self._let_go(victims_V, "num_urgent")

    def _let_go(self, victims_V: Tensor, counter: str) -> SlotList:
        self._made_room = True
        listed = self._listed(victims_V, counter)
        self.index.erase(victims_V, self._counter(counter))
        self.index.rebuild()
        return listed

    def _listed(self, slots_V: Tensor, counter: str) -> SlotList:
        keys_V, tables_V = self.index.keys_of(slots_V, self._counter(counter))
        return SlotList(slots_V, keys_V, tables_V, counter)

    def _counter(self, name: str) -> Tensor:
        """(1,) a number of the index, in device memory."""
        i = COUNTERS.index(name)
        return self.index.counters[i : i + 1]

    def _too_small(self, batch: int, missing: int) -> ConfigError:
        first, fewer = max(0, batch + 1 - self._holds), ""
        need = f"batches {first} and {batch} of this run need" if batch else "batch 0 needs"
        if batch > 1 and self._makes_room_ahead:
            need = f"batches {first} to {batch} of this run need"
            fewer = ", set pipeline.buffers = 2 to hold two batches only"
        return ConfigError(
            f"the pool of {self.num_slots:,} rows ({show_memory(self.num_bytes())}) is too small: "
            f"{need} up to {missing:,} more; raise device_memory{fewer}, or make batches smaller"
        )

    # Rows between slots and the host store

    def _make(self, slots_V: Tensor, of: SlotList | None = None) -> None:
        """First values, made on the device: no key that is new here can be in the host store.

        `of`: the same slots with the keys that they had, where the index may have changed since.
        """
        assert isinstance(self.index, DeviceIndex)
        assert self._first is not None
        count = self.index.num_new if of is None else of.count_there
        assert count is not None, "nobody has told yet"
        keys = None if of is None else (of.keys_V, of.tables_V)
        self.index.write_first_rows(self._first, self.rows_SW, slots_V, count, keys)
        self._transfer.rows_were_made()

    def _write_all(self, leaving: list[SlotList]) -> int:
        return sum(self._write(of) for of in leaving)

    def _write(self, of: SlotList) -> int:
        written = self._transfer.write(of)
        if written:
            self._outside = True
        if self.poison:
            fill_with_nan(self.rows_SW, of)
        return written


def _first_values(layout: StoreLayout, device: torch.device) -> FirstValues:
    """What first values are made of, on the device."""
    seeds = [seed - 2**64 if seed >= 2**63 else seed for seed in layout.table_seeds]
    return FirstValues(
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(layout.init_stds, dtype=torch.float64, device=device),
        layout.dim,
        layout.state_dim,
        layout.state_init,
    )


AUTO_SHARE = 0.5
"""Of free device memory, for all pools together."""
AUTO_ROWS_ON_HOST = 1 << 18
"""Rows of a pool in host memory, which is there to be compared with, unless a size is given."""


def pool_sizes(
    device_memory: str, layouts: Sequence[StoreLayout], device: torch.device, sharing: int = 1
) -> list[int]:
    """Slots for each store: as many rows a table as fit into that memory.

    `device_memory`: `auto`, a size such as `40GB`, or a share of what is free, such as `0.4`.
    `sharing`: processes with pools on the same device; a size is what each of them gets.
    """
    tables = [layout.num_tables for layout in layouts]
    memory = memory_size(
        "device_memory",
        device_memory,
        auto=AUTO_SHARE,
        free=lambda: free_memory(device) / sharing,
    )
    of_table = int(memory // _bytes_of_a_row_each(layouts))
    slots = [max(1, of_table * t) for t in tables]
    if device_memory == "auto":
        slots = [min(s, _most_rows(layout)) for s, layout in zip(slots, layouts, strict=True)]
        if device.type != "cuda":
            slots = [min(s, AUTO_ROWS_ON_HOST) for s in slots]
    slots = [min(s, MOST_SLOTS) for s in slots]
    _refuse_more_than_free(device_memory, pools_bytes(slots, layouts), device)
    return slots


def _refuse_more_than_free(device_memory: str, wanted: float, device: torch.device) -> None:
    """Say so before training, rather than when memory is full."""
    if wanted > (free := free_memory(device)):
        where = "device" if device.type == "cuda" else "host"
        raise ConfigError(
            f"device_memory is {device_memory!r}, and {show_memory(free)} of {where} memory are "
            "free; give less, or 'auto' for half of what is free"
        )


def _bytes_of_a_row_each(layouts: Sequence[StoreLayout]) -> int:
    """Memory of one row for each table."""
    return pools_bytes([of.num_tables for of in layouts], layouts)


def pools_bytes(slots: Sequence[int], layouts: Sequence[StoreLayout]) -> int:
    """The memory that pools of so many slots take."""
    row_bytes = [-(-of.width // 4) * 16 + INDEX_BYTES for of in layouts]
    return sum(n * b for n, b in zip(slots, row_bytes, strict=True))


def memory_for(rows: Sequence[int], new: Sequence[int], layouts: Sequence[StoreLayout]) -> int:
    """The memory with which the pool of each store keeps so many rows, while `new` of a batch come.

    Rows leave before new ones come, and some more: `RowPool._wanted_free`. Tables have equal parts
    of the memory, so the fullest store decides.
    """
    needed = [kept + -(-5 * came // 4) for kept, came in zip(rows, new, strict=True)]
    slots = [need + min(SPARE, need // 15 + 1) for need in needed]
    of_table = max(-(-s // of.num_tables) for s, of in zip(slots, layouts, strict=True))
    return of_table * _bytes_of_a_row_each(layouts)


def pools_on_one_device(device: torch.device, ranks: int) -> int:
    """Ranks of this machine that share a device."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    return -(-local // max(1, torch.cuda.device_count())) if device.type == "cuda" else local


def free_memory(device: torch.device) -> float:
    """Bytes of the device, or of the host, that are left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def memory_left(device: torch.device) -> float:
    """The share of this process of what is left on the device, torch's own reserve included."""
    sharing = pools_on_one_device(device, 1)
    if device.type != "cuda":
        return free_host_memory() / sharing
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory(device) / sharing + reserve


def _most_rows(layout: StoreLayout) -> int:
    """Rows that the tables can have at most."""
    limits = layout.max_rows
    return sum(limits) if limits and all(limits) else MOST_SLOTS


def memory_for_all(layouts: Sequence[StoreLayout]) -> int:
    """The memory that holds every row which tables with limits can have; 0: some have no limit."""
    most = [_most_rows(layout) for layout in layouts]
    return 0 if MOST_SLOTS in most else memory_for(most, [0] * len(most), layouts)


class PoolRows:
    """The rows of the batches in flight in the pools of all stores, where keys are routed by hosts.

    It stands where `RowBuffers` stands for the other forms of retrieval.
    """

    compares = False

    def __init__(self, pools: Sequence[RowPool]) -> None:
        self.pools = list(pools)
        self._rows: dict[int, list[SlotRows]] = {}
        """[batch][group]"""

    @property
    def poison(self) -> bool:
        return any(pool.poison for pool in self.pools)

    @poison.setter
    def poison(self, wanted: bool) -> None:
        for pool in self.pools:
            pool.poison = wanted

    def admit(self, batch: int, working: Sequence[WorkingSet]) -> list[WorkingSet]:
        """Give every key a slot; the same working sets, with slots for rows to send."""
        rows = [self._admitted(batch, *of) for of in zip(self.pools, working, strict=True)]
        self._rows[batch] = rows
        return [
            replace(of_store, serve=[_by_slot(serve, slots.slots_K) for serve in of_store.serve])
            for of_store, slots in zip(working, rows, strict=True)
        ]

    def _admitted(self, batch: int, pool: RowPool, working: WorkingSet) -> SlotRows:
        ends_C = torch.tensor(working.table_counts, dtype=torch.int64).cumsum(0)
        keys_K, ends_C = lists_on(pool.device, [working.keys_K, ends_C])
        return SlotRows(pool.rows_SW, pool.admit(batch, keys_K, KeyCells(ends_C)))

    def of(self, batch: int) -> list[SlotRows]:
        return self._rows[batch]

    def retrieve(self, batch: int, working: Sequence[WorkingSet]) -> int:
        return sum(pool.retrieve(batch) for pool in self.pools)

    def sync(self, batch: int, working: Sequence[WorkingSet]) -> int:
        """Nothing: batches that share a row use the same memory."""
        return 0

    def writeback(
        self, batch: int, working: Sequence[WorkingSet], then: Sequence[WorkingSet] | None
    ) -> int:
        """Rows that make room for those of later batches."""
        return sum(pool.writeback(batch) for pool in self.pools)

    def forget(self, batch: int) -> None:
        self._rows.pop(batch, None)
        for pool in self.pools:
            pool.forget(batch)


def _by_slot(segments: Segments, slots_K: Tensor) -> Segments:
    """The same sums of rows, which are numbered by slot."""
    rows_T = slots_K.index_select(0, segments.rows_T).to(segments.rows_T.dtype)
    return Segments(rows_T, segments.ends_S1)
