"""An index in device memory, from (table, key) to the slot of a row, and its plain twin.

Which slot a key gets depends on timing and changes no result: rows are found by slot, and sums run
in the order of samples.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.errors import ConfigError
from nestpipe.kernels.index.library import (
    CellsStruct,
    FirstRowsStruct,
    IndexStruct,
    KeysStruct,
    call,
    check_list,
    pointer,
)

# Shapes: N keys, repeats included, G cells of keys, S slots, V victims, C tables

PLACES_PER_ROW = 1.6
"""Places of the index for each slot."""
MOST_USED = 0.9
"""The share of places that keys, erased ones included, may take before a rebuild."""
FREE_STAMP = -(2**31)
AGES = 2048
FADING = -math.log(0.98)
"""A use counts 2 % less with every batch."""
COUNTERS = ("free", "used", "num_new", "num_missing", "num_victims", "hand", "num_urgent")
"""What the first numbers of `DeviceIndex.counters` mean; those after them are zero."""
_ALL_COUNTERS = 11


@dataclass(frozen=True, slots=True)
class KeyCells:
    """Where the keys of each table lie: cell after cell, all keys of a cell in one table."""

    ends_G: Tensor
    """int64: where each cell ends."""
    tables_G: Tensor | None = None
    """int32: the table of each cell; None: cell c is table c."""

    def struct(self) -> CellsStruct:
        check_list(self.ends_G, torch.int64, 1, "ends of cells")
        check_list(self.tables_G, torch.int32, len(self.ends_G), "tables of cells")
        return CellsStruct(self.ends_G.data_ptr(), pointer(self.tables_G), len(self.ends_G))

    def tables_of_keys(self, count: int) -> list[int]:
        """The table of each key, on the host."""
        tables = range(len(self.ends_G)) if self.tables_G is None else self.tables_G.tolist()
        found: list[int] = []
        for end, table in zip(self.ends_G.tolist(), tables, strict=True):
            found += [table] * (min(end, count) - len(found))
        return found


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """What `find_or_insert` finds and makes."""

    slots_N: Tensor
    """int32: the slot of each key; -1 where no slot is left for it."""
    new_slots_N: Tensor
    """int32: slots of keys that are new; the first `num_new` count, the others are 0."""


@dataclass(frozen=True, slots=True)
class FirstValues:
    """What the first values of rows are made of; `native/store/first_values.h` says how."""

    seeds_C: Tensor
    """int64, the bits of the unsigned seed of each table."""
    stds_C: Tensor
    """float64: the spread of each table's weights."""
    dim: int
    state_dim: int
    state_init: float = 0.0

    def struct(
        self, rows_SW: Tensor, keys_V: Tensor | None = None, tables_V: Tensor | None = None
    ) -> FirstRowsStruct:
        """As kernels take it, for rows by slot."""
        assert rows_SW.stride(1) == 1, "a row has gaps"
        assert rows_SW.dtype == torch.float32, f"rows are {rows_SW.dtype}"
        return FirstRowsStruct(
            *(rows_SW.data_ptr(), rows_SW.stride(0), self.dim, self.state_dim),
            *(self.state_init, self.seeds_C.data_ptr(), self.stds_C.data_ptr()),
            *(pointer(keys_V), pointer(tables_V)),
        )


class DeviceIndex:
    """Slots for keys. Every call goes to the current stream, and none waits for the device.

    Counts stay in device memory, in `counters`: copy them to the host where it must know them.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        if not 0 < num_slots < 2**30:
            raise ConfigError(f"a pool has {num_slots} slots; give 1 to {2**30 - 1}")
        self.num_slots, self.device = num_slots, device
        self.num_places = -(-int(num_slots * PLACES_PER_ROW + 2) // 2) * 2
        self._places = torch.zeros(self.num_places, 2, dtype=torch.int64, device=device)
        self.slot_keys_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.slot_tables_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.stamps_S = torch.full((num_slots,), FREE_STAMP, dtype=torch.int32, device=device)
        """The last batch that uses each slot; `FREE_STAMP` where the slot is free."""
        self.heats_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        """How much each slot is used: see `warmer`."""
        self._free_S = torch.arange(num_slots, dtype=torch.int32, device=device).flip(0)
        self.counters = torch.zeros(_ALL_COUNTERS, dtype=torch.int32, device=device)
        self.counters[0] = num_slots
        self._ages = torch.zeros(AGES, dtype=torch.int32, device=device)
        self.struct = IndexStruct(
            *(self._places.data_ptr(), self.num_places),
            *(self.slot_keys_S.data_ptr(), self.slot_tables_S.data_ptr()),
            *(self.stamps_S.data_ptr(), self.heats_S.data_ptr(), self._free_S.data_ptr()),
            *(num_slots, self.counters.data_ptr()),
        )

    @property
    def num_new(self) -> Tensor:
        """(1,) how many slots of the last `find_or_insert` are new, in device memory."""
        return self.counters[2:3]

    @property
    def num_victims(self) -> Tensor:
        """(1,) how many slots the last `choose_victims` found, in device memory."""
        return self.counters[4:5]

    @property
    def num_urgent(self) -> Tensor:
        """(1,) how many slots the last `choose_for_missing` found, in device memory."""
        return self.counters[6:7]

    def num_bytes(self) -> int:
        """Memory of the index, rows not counted."""
        of_slots = (self.slot_keys_S, self.slot_tables_S, self.stamps_S, self.heats_S, self._free_S)
        parts = (self._places, *of_slots)
        return sum(part.numel() * part.element_size() for part in parts)

    def find_or_insert(self, keys_N: Tensor, cells: KeyCells, batch: int) -> FoundSlots:
        """Find the slot of every key, or give it one; the batches given must not decrease."""
        slots_N = torch.empty(len(keys_N), dtype=torch.int32, device=self.device)
        new_N = torch.zeros_like(slots_N)
        self._call("find_or_insert", self._keys(keys_N, cells), batch, slots_N, new_N)
        return FoundSlots(slots_N, new_N)

    def find(self, keys_N: Tensor, cells: KeyCells) -> Tensor:
        """(N,) the slot of every key, -1 where it has none; changes nothing."""
        slots_N = torch.empty(len(keys_N), dtype=torch.int32, device=self.device)
        self._call("find", self._keys(keys_N, cells), slots_N)
        return slots_N

    def choose_victims(
        self, oldest_in_flight: int, least_free: int, window: int | None = None
    ) -> Tensor:
        """(least_free,) slots to erase, so that `least_free` are free then; `num_victims` count.

        Least used first, see `warmer`, among `window` slots from where the last choice ended (None:
        all slots). A slot that a batch from `oldest_in_flight` on uses is never chosen.
        """
        victims_V = torch.zeros(max(least_free, 0), dtype=torch.int32, device=self.device)
        window = self.num_slots if window is None else window
        self._call("choose", oldest_in_flight, least_free, window, 0, self._ages, victims_V)
        return victims_V

    def choose_for_missing(self, oldest_in_flight: int, most: int) -> Tensor:
        """(most,) slots to erase for keys that found none, `most` or fewer; `num_urgent` count.

        The device knows how many keys those are; for none it chooses none.
        """
        victims_V = torch.zeros(most, dtype=torch.int32, device=self.device)
        self._call("choose", oldest_in_flight, 0, self.num_slots, 1, self._ages, victims_V)
        return victims_V

    def insert_missing(
        self, found: FoundSlots, keys_N: Tensor, cells: KeyCells, batch: int
    ) -> FoundSlots:
        """Give slots to keys that `find_or_insert` left without one, now that more are free."""
        given = self._keys(keys_N, cells), batch, found.slots_N, found.new_slots_N
        self._call("insert_missing", *given)
        return found

    def keys_of(self, slots_V: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """(V,) the keys and tables that some slots have now, the first `count` of them."""
        keys_V = torch.empty(len(slots_V), dtype=torch.int64, device=self.device)
        tables_V = torch.empty(len(slots_V), dtype=torch.int32, device=self.device)
        self._call("list", slots_V, count, len(slots_V), keys_V, tables_V)
        return keys_V, tables_V

    def erase(self, slots_V: Tensor, count: Tensor | None = None) -> None:
        """Forget the keys of some slots, of which the first `count` count; the slots are free."""
        check_list(slots_V, torch.int32, len(slots_V), "slots to erase")
        if count is None:
            count = torch.full((1,), len(slots_V), dtype=torch.int32, device=self.device)
        self._call("erase", slots_V, count, len(slots_V))

    def rebuild(self, most_used: float = MOST_USED) -> None:
        """Drop the places of erased keys, where new ones might not find a place otherwise.

        That is where all free slots, given away, would bring the places in use above that share.
        The device decides; before `find_or_insert` it costs two empty launches.
        """
        self._call("rebuild", int(most_used * self.num_places))

    def write_first_rows(
        self,
        first: FirstValues,
        rows_SW: Tensor,
        slots_V: Tensor,
        count: Tensor,
        of: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write first weights and state into the rows of some slots, the first `count` of them.

        `of`: the (V,) keys and tables of these slots, where the index may have changed since.
        """
        keys_V, tables_V = of or (None, None)
        check_list(keys_V, torch.int64, len(slots_V), "keys of slots")
        check_list(tables_V, torch.int32, len(slots_V), "tables of slots")
        check_list(slots_V, torch.int32, len(slots_V), "slots")
        given = first.struct(rows_SW, keys_V, tables_V)
        self._call("first_rows", ctypes.byref(given), slots_V, count, len(slots_V))

    def _keys(self, keys_N: Tensor, cells: KeyCells) -> object:
        check_list(keys_N, torch.int64, len(keys_N), "keys")
        return ctypes.byref(KeysStruct(keys_N.data_ptr(), len(keys_N), cells.struct()))

    def _call(self, verb: str, *arguments: object) -> None:
        given = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        call(self.device, f"nestpipe_index_{verb}", ctypes.byref(self.struct), *given)


class PlainIndex:
    """The twin: a dictionary, on the host, with the same slots for the same keys but in order."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.device = num_slots, torch.device("cpu")
        self._slots: dict[tuple[int, int], int] = {}
        self.slot_keys_S = torch.zeros(num_slots, dtype=torch.int64)
        self.slot_tables_S = torch.zeros(num_slots, dtype=torch.int32)
        self.stamps_S = torch.full((num_slots,), FREE_STAMP, dtype=torch.int32)
        self.heats_S = torch.zeros(num_slots, dtype=torch.int32)
        self._free = list(reversed(range(num_slots)))
        self.counters = torch.zeros(_ALL_COUNTERS, dtype=torch.int32)
        self._count(free=num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_missing(self) -> int:
        return int(self.counters[COUNTERS.index("num_missing")])

    def find_or_insert(self, keys_N: Tensor, cells: KeyCells, batch: int) -> FoundSlots:
        """What the device does; new slots are listed in the order of their keys."""
        slots: list[int] = []
        new: list[int] = []
        for table, key in zip(cells.tables_of_keys(len(keys_N)), keys_N.tolist(), strict=True):
            slot = self._slots.get((table, key), -1)
            if slot < 0 and self._free:
                slot = self._slots[table, key] = self._free.pop()
                self.slot_keys_S[slot], self.slot_tables_S[slot] = key, table
                new.append(slot)
            slots.append(slot)
        found = FoundSlots(_int32(slots), _int32(new))
        self._use(found.slots_N[found.slots_N >= 0].unique().long(), batch)
        self._count(free=len(self._free), num_new=len(new), num_missing=slots.count(-1))
        return found

    def _use(self, slots_K: Tensor, batch: int) -> None:
        before_K = self.stamps_S[slots_K]
        warm_K = warmer(self.heats_S[slots_K], batch)
        first_K = torch.where(before_K == FREE_STAMP, batch, warm_K)
        self.heats_S[slots_K] = torch.where(before_K == batch, self.heats_S[slots_K], first_K)
        self.stamps_S[slots_K] = batch

    def find(self, keys_N: Tensor, cells: KeyCells) -> Tensor:
        """(N,) the slot of every key, -1 where it has none."""
        pairs = zip(cells.tables_of_keys(len(keys_N)), keys_N.tolist(), strict=True)
        return _int32([self._slots.get(pair, -1) for pair in pairs])

    def choose_victims(self, oldest_in_flight: int, least_free: int) -> Tensor:
        """Slots to erase, the least used first."""
        in_use = (self.stamps_S != FREE_STAMP) & (self.stamps_S < oldest_in_flight)
        slots = in_use.nonzero().squeeze(1)
        coldest_first = slots[self.heats_S[slots].argsort(stable=True)]
        victims_V = coldest_first[: max(0, least_free - len(self._free))].int()
        self._count(num_victims=len(victims_V))
        return victims_V

    def choose_for_missing(self, oldest_in_flight: int, most: int) -> Tensor:
        """Slots to erase for keys that found none."""
        before = int(self.num_victims)
        victims_V = self.choose_victims(oldest_in_flight, min(most, self.num_missing))
        self._count(num_victims=before, num_urgent=len(victims_V))
        return victims_V

    def insert_missing(
        self, found: FoundSlots, keys_N: Tensor, cells: KeyCells, batch: int
    ) -> FoundSlots:
        """Give slots to keys that `find_or_insert` left without one."""
        if not self.num_missing:
            return found
        again = self.find_or_insert(keys_N, cells, batch)
        new = torch.cat([found.new_slots_N, again.new_slots_N])
        self._count(num_new=len(new))
        return FoundSlots(again.slots_N, new)

    def keys_of(self, slots_V: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and tables that some slots have now."""
        slots = slots_V[: int(count)].long()
        return self.slot_keys_S[slots], self.slot_tables_S[slots]

    def erase(self, slots_V: Tensor, count: Tensor | None = None) -> None:
        """Forget the keys of some slots, of which the first `count` count."""
        slots_V = slots_V if count is None else slots_V[: int(count)]
        for slot in sorted(set(slots_V.tolist())):
            if self.stamps_S[slot] == FREE_STAMP:
                continue
            del self._slots[int(self.slot_tables_S[slot]), int(self.slot_keys_S[slot])]
            self.stamps_S[slot] = FREE_STAMP
            self._free.append(slot)
        self._count(free=len(self._free))

    @property
    def num_new(self) -> Tensor:
        """(1,) how many slots of the last `find_or_insert` are new."""
        return self._counter("num_new")

    @property
    def num_victims(self) -> Tensor:
        """(1,) how many slots the last `choose_victims` found."""
        return self._counter("num_victims")

    @property
    def num_urgent(self) -> Tensor:
        """(1,) how many slots the last `choose_for_missing` found."""
        return self._counter("num_urgent")

    def _counter(self, name: str) -> Tensor:
        i = COUNTERS.index(name)
        return self.counters[i : i + 1]

    def rebuild(self) -> None:
        """A dictionary needs none."""

    def _count(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.counters[COUNTERS.index(name)] = number


def warmer(heats_K: Tensor, batch: int) -> Tensor:
    """The heats of slots that are used once more, in a batch.

    A heat is the number of the batch whose single use would count as much as all uses of the slot
    do, where each counts 2 % less with every batch. So the coldest slot has been used least.
    """
    since_K = (batch - heats_K).clamp(-4096, 4096).float()
    ahead_K = ((-FADING * since_K).exp().log1p() / FADING).round()
    return (batch + ahead_K).to(torch.int32)


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
