"""The life of rows: which keys of a table get one, and which rows leave again.

For tables with a policy (`RowPolicy`) the owner of a key notes the last step that used it and in
how many batches that was. A batch is noted at its `update`, so look-ahead is never seen. All else
happens at boundaries, where no batch is in flight: rows whose time is over leave, keys that were
used often enough get a row, and at its capacity a table gives up the rows that its policy names.

Everything is a function of the batches so far, the policy and the seed. Ranks agree on thresholds
by counts alone, and ties are broken by the key, so the number of ranks changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.config import Table
from nestpipe.embedding.store import RowStore, StoreLayout, open_store
from nestpipe.embedding.store.protocol import HASH_STEP, MASK, StoreAbilities, mix
from nestpipe.embedding.table_groups import TableGroup
from nestpipe.errors import CapacityError

# Shapes: K keys, n some of them, C tables of a group, W width of a row

MOST_COUNT = 2**31 - 1
"""Counts stop here."""
LAST, COUNT = 0, 1
"""Columns of `uses`: the last step that used a key, and in how many batches that was."""
_DIGIT = 16
"""Bits of a number that ranks agree on at a time."""
_CHUNK = 1 << 16
"""Rows that are looked at together."""
_DRAW_SALT, _TIE_SALT = 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
SPARE_SHARE = 4
"""At a boundary at most one in so many rows is given up for keys to come."""
SPARE_TIMES = 2
"""Room is kept for so many times the new rows that any batch has brought so far."""

Uints = NDArray[np.uint64]
Mask = NDArray[np.bool_]


_NO_KEYS, _NO_USES = torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class KnownUses:
    """Keys of one table on this rank, ascending, with their uses."""

    keys: Tensor
    uses: Tensor
    """(n, 2) of keys with a row ..."""
    waiting: Tensor
    waiting_uses: Tensor
    """... and of those that wait for one."""


class RowLedger:
    """Last use and count of keys: of those with a row, and of those that wait for one.

    It is a store of its own, whose rows are two 32-bit integers instead of weights.
    """

    def __init__(self, num_tables: int, *, native: bool | None, threads: int | None) -> None:
        self._tables = num_tables
        layout = StoreLayout(
            table_seeds=(0,) * (2 * num_tables),
            init_stds=(0.0,) * (2 * num_tables),
            dim=2,
            state_dim=0,
        )
        self._store = open_store(layout, native=native, threads=threads)

    def read(self, keys_K: Tensor, counts: Sequence[int], *, waiting: bool = False) -> Tensor:
        """(K, 2) int32 uses; a key that is not known was last used at step 0."""
        numbers = torch.empty(len(keys_K), 2)
        self._store.gather(keys_K.contiguous(), self._counts(counts, waiting), numbers)
        # First values are 0.0 or -0.0.
        return numbers.view(torch.int32).bitwise_and_(MOST_COUNT)

    def write(
        self, keys_K: Tensor, counts: Sequence[int], uses_K2: Tensor, *, waiting: bool = False
    ) -> None:
        numbers = uses_K2.to(torch.int32).contiguous().view(torch.float32)
        self._store.scatter(keys_K.contiguous(), self._counts(counts, waiting), numbers)

    def erase(self, table: int, keys_K: Tensor, *, waiting: bool = False) -> None:
        self._store.erase(keys_K.contiguous(), self._counts(self.only(table, keys_K), waiting))

    def snapshot(self) -> list[KnownUses]:
        """Every key of every table as it is now, ascending; 16 bytes a key."""
        keys: list[list[Tensor]] = [[_NO_KEYS] for _ in range(2 * self._tables)]
        uses: list[list[Tensor]] = [[_NO_USES] for _ in range(2 * self._tables)]
        for table, keys_n, numbers in self._store.export():
            keys[table].append(keys_n)
            uses[table].append(numbers.view(torch.int32))
        found = [(torch.cat(k), torch.cat(u)) for k, u in zip(keys, uses, strict=True)]
        return [KnownUses(*found[n], *found[n + self._tables]) for n in range(self._tables)]

    def only(self, table: int, keys_K: Tensor) -> list[int]:
        """Counts for keys of one table."""
        counts = [0] * self._tables
        counts[table] = len(keys_K)
        return counts

    def num_bytes(self) -> int:
        return self._store.num_bytes()

    def close(self) -> None:
        self._store.close()

    def _counts(self, counts: Sequence[int], waiting: bool) -> list[int]:
        nothing = [0] * self._tables
        return [*nothing, *counts] if waiting else [*counts, *nothing]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Keys of one table whose rows left at a boundary; those of this rank, ascending."""

    table: str
    keys: Tensor


class RowLifecycle:
    """The policies of the tables of one store, on the rank that owns a part of their keys."""

    def __init__(
        self,
        group: TableGroup,
        store: RowStore,
        limits: Sequence[int],
        comm: Communicator,
        *,
        native: bool | None = None,
        threads: int | None = None,
    ) -> None:
        """`limits`: rows of each table over all ranks. `comm`: the ranks that share its keys."""
        self.group, self._store, self._limits, self._comm = group, store, list(limits), comm
        tables = group.tables
        self.ledger = RowLedger(len(tables), native=native, threads=threads)
        self._followed_C = torch.tensor([table.has_lifecycle for table in tables])
        self._at_once_C = torch.tensor([table.admit_count == 1 for table in tables])
        self.selects = any(table.selects for table in tables)
        """Whether some keys have no row."""
        self._new: list[Tensor] = []
        """(C,) new rows of each batch that ranks have not told each other of."""
        self.peaks = [0] * len(tables)
        """The most new rows that one batch has brought so far, by table."""

    # Batches

    def touch(self, keys_K: Tensor, counts: Sequence[int], step: int) -> Tensor | None:
        """Note the keys of a batch; returns the positions of those without a row, if any."""
        table_K = self._table_of(counts)
        followed_K = self._followed_C[table_K]
        every = bool(followed_K.all())
        keys_n, table_n = (keys_K, table_K) if every else (keys_K[followed_K], table_K[followed_K])
        uses = self.ledger.read(keys_n, self._count(table_n))
        new_n = uses[:, LAST] == 0
        drawn_n = self._drawn(keys_n, table_n)
        held_n = ~new_n | (drawn_n & self._at_once_C[table_n])
        self._new.append(torch.bincount(table_n[new_n & held_n], minlength=len(counts)))
        self._note(keys_n, table_n, held_n, uses, step)
        if bool(held_n.all()):
            return None
        waits_n = ~held_n & drawn_n
        waiting = self.ledger.read(keys_n[waits_n], self._count(table_n[waits_n]), waiting=True)
        uses[waits_n] = waiting
        self._note(keys_n, table_n, waits_n, uses, step, waiting=True)
        positions_n = torch.arange(len(keys_K)) if every else followed_K.nonzero().squeeze(1)
        return positions_n[~held_n]

    def _note(
        self,
        keys_n: Tensor,
        table_n: Tensor,
        chosen_n: Tensor,
        uses_n2: Tensor,
        step: int,
        *,
        waiting: bool = False,
    ) -> None:
        uses = uses_n2[chosen_n]
        uses[:, LAST] = step
        uses[:, COUNT] = uses[:, COUNT].clamp(max=MOST_COUNT - 1) + 1
        counts = self._count(table_n[chosen_n])
        self.ledger.write(keys_n[chosen_n], counts, uses, waiting=waiting)

    def put(self, number: int, keys_K: Tensor, step: int) -> None:
        """Note rows of one table that came from elsewhere, as used once."""
        if self.group.tables[number].has_lifecycle:
            uses = torch.tensor([[max(step, 1), 1]], dtype=torch.int32).repeat(len(keys_K), 1)
            self.ledger.erase(number, keys_K, waiting=True)
            self.ledger.write(keys_K, self.ledger.only(number, keys_K), uses)

    def admitted(self, keys_K: Tensor, counts: Sequence[int]) -> Tensor:
        """(K,) whether a key has a row, or gets it at first use; constant between boundaries."""
        table_K = self._table_of(counts)
        known_K = self.ledger.read(keys_K, list(counts))[:, LAST] > 0
        known_K |= self._at_once_C[table_K]
        return known_K & self._drawn(keys_K, table_K)

    def _table_of(self, counts: Sequence[int]) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(list(counts)))

    def _count(self, table_n: Tensor) -> list[int]:
        return torch.bincount(table_n, minlength=len(self.group.tables)).tolist()

    def _drawn(self, keys_n: Tensor, table_n: Tensor) -> Tensor:
        drawn_n = torch.ones(len(keys_n), dtype=torch.bool)
        for number, table in enumerate(self.group.tables):
            if table.admit_probability < 1:
                of_table = table_n == number
                bits = self._bits(number, keys_n[of_table], _DRAW_SALT) >> np.uint64(11)
                share = bits.astype(np.float64) * 2.0**-53
                drawn_n[of_table] = torch.from_numpy(share < table.admit_probability)
        return drawn_n

    def _bits(self, number: int, keys_n: Tensor, salt: int) -> Uints:
        """64 bits for each key, by the table's seed; no two keys have the same."""
        seed = np.array([(self._store.layout.table_seeds[number] ^ salt) & MASK], np.uint64)
        return mix(keys_n.numpy().view(np.uint64) ^ mix(seed + HASH_STEP))

    # Boundaries

    def settle(self) -> None:
        """All ranks tell each other how many new rows each batch brought."""
        if self._new:
            new = torch.stack(self._new)
            self._comm.all_reduce(new)
            self.peaks = torch.maximum(new.amax(0), torch.tensor(self.peaks)).tolist()
            self._new = []

    def sweep(self, step: int, steps: int) -> list[Evicted]:
        """Let rows go and come, after the batch of that step; the next boundary is `steps` away.

        No batch may be in flight, and the store must hold all rows.
        """
        self.settle()
        return [
            Evicted(table.name, self._sweep_table(number, table, known, step, steps))
            for number, (table, known) in enumerate(
                zip(self.group.tables, self.ledger.snapshot(), strict=True)
            )
            if table.has_lifecycle
        ]

    def steps_to_go(self, number: int, steps: int) -> int:
        """After how many batches a table may be full, at most `steps`."""
        if not self._grows_to_limit(number):
            return steps
        of_batch = SPARE_TIMES * self.peaks[number]
        room = self._limits[number] - self._total(self._store.num_rows()[number])
        return max(1, min(steps, room // of_batch if of_batch else 1))

    def _grows_to_limit(self, number: int) -> bool:
        table = self.group.tables[number]
        return table.evict != "none" and table.admit_count == 1

    def _sweep_table(
        self, number: int, table: Table, known: KnownUses, step: int, steps: int
    ) -> Tensor:
        stored = self._store.num_rows()[number]
        assert len(known.keys) == stored, f"{len(known.keys)} keys are noted, {stored} rows stored"
        often = self._used_often(table, known.waiting_uses, step)
        keys_n = torch.cat([known.keys, known.waiting[often]])
        uses_n2 = torch.cat([known.uses, known.waiting_uses[often]])
        new_n = np.arange(len(keys_n)) >= stored
        gone_n = self._expired(table, uses_n2, step)
        limit = self._limits[number]
        if limit and table.keeps_to_limit:
            self._refuse_excess(number, table, stored, step)
            over = self._total(int((~gone_n).sum())) - (limit - self._spare(number, steps))
            if over > 0:
                free_n = ~gone_n if table.evict != "none" else ~gone_n & new_n
                score_n = self._scores(number, table, keys_n, uses_n2, new_n)
                tie_n = self._bits(number, keys_n, _TIE_SALT)
                gone_n |= lowest(score_n, tie_n, free_n, over, self._comm)
        evicted = keys_n[torch.from_numpy(gone_n & ~new_n)]
        self._store.erase(evicted, self.ledger.only(number, evicted))
        self.ledger.erase(number, evicted)
        came_n = torch.from_numpy(new_n & ~gone_n)
        self._admit(number, keys_n[came_n], uses_n2[came_n])
        waits = ~torch.isin(known.waiting, keys_n[came_n])
        self._forget_waiting(number, table, known.waiting[waits], known.waiting_uses[waits], step)
        return evicted

    def _spare(self, number: int, steps: int) -> int:
        """Rows to keep free for the keys that come at first use until the next boundary."""
        if not self._grows_to_limit(number):
            return 0
        wanted = SPARE_TIMES * self.peaks[number] * steps
        return min(wanted, self._limits[number] // SPARE_SHARE)

    def _refuse_excess(self, number: int, table: Table, stored: int, step: int) -> None:
        limit, rows = self._limits[number], self._total(stored)
        if rows > limit and self._grows_to_limit(number):
            raise CapacityError(
                f"table {table.name!r} has {rows:,} rows after step {step} and may have {limit:,}: "
                f"one batch brought {self.peaks[number]:,} new keys; raise its max_rows, make "
                "batches smaller, or set admit_count to 2"
            )

    def _expired(self, table: Table, uses_n2: Tensor, step: int) -> Mask:
        if not table.ttl:
            return np.zeros(len(uses_n2), np.bool_)
        return (uses_n2[:, LAST] <= step - table.ttl).numpy()

    def _used_often(self, table: Table, uses_n2: Tensor, step: int) -> Tensor:
        """Which of the keys that wait are to have a row."""
        in_time_n = torch.from_numpy(~self._expired(table, uses_n2, step))
        return in_time_n & (uses_n2[:, COUNT] >= table.admit_count)

    def _admit(self, number: int, came: Tensor, uses: Tensor) -> None:
        """Give keys a row with its first value."""
        self.ledger.erase(number, came, waiting=True)
        self.ledger.write(came, self.ledger.only(number, came), uses)
        for keys in came.split(_CHUNK) if len(came) else ():
            counts = self.ledger.only(number, keys)
            rows = torch.empty(len(keys), self._store.layout.width)
            self._store.gather(keys, counts, rows)
            self._store.scatter(keys, counts, rows)

    def _forget_waiting(
        self, number: int, table: Table, keys_n: Tensor, uses_n2: Tensor, step: int
    ) -> None:
        """Keep the counts of the keys that were used last, and of no more than may be kept."""
        if table.admit_count == 1:
            return
        gone_n = self._expired(table, uses_n2, step)
        over = self._total(int((~gone_n).sum())) - table.admit_candidates
        if over > 0:
            last_n = uses_n2[:, LAST].numpy().astype(np.uint64)
            tie_n = self._bits(number, keys_n, _TIE_SALT)
            gone_n |= lowest(last_n, tie_n, ~gone_n, over, self._comm)
        self.ledger.erase(number, keys_n[torch.from_numpy(gone_n)], waiting=True)

    def _scores(
        self, number: int, table: Table, keys_n: Tensor, uses_n2: Tensor, new_n: Mask
    ) -> Uints:
        """Numbers of which the lowest leave first."""
        last, count = (uses_n2[:, i].numpy().astype(np.uint64) for i in (LAST, COUNT))
        if table.evict == "lru":
            return (last << np.uint64(32)) | count
        if table.evict != "norm":
            return (count << np.uint64(32)) | last
        squares_n = np.full(len(keys_n), np.inf)
        old = len(keys_n) - int(new_n.sum())  # a row without its first update is not judged yet
        for begin in range(0, old, _CHUNK):
            keys = keys_n[begin : min(begin + _CHUNK, old)].contiguous()
            rows = torch.empty(len(keys), self._store.layout.width)
            self._store.gather(keys, self.ledger.only(number, keys), rows)
            squares_n[begin : begin + len(keys)] = _squares(rows.numpy()[:, : self.group.dim])
        return squares_n.view(np.uint64)  # in the order of the numbers, as none is negative

    def _total(self, count: int) -> int:
        """The sum over all ranks."""
        total = torch.tensor([count])
        self._comm.all_reduce(total)
        return int(total)


def _squares(weights_nD: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sums of squares, column by column: no library may choose the order of these sums."""
    total_n = np.zeros(len(weights_nD))
    for column_n in weights_nD.T.astype(np.float64):
        total_n += column_n * column_n
    return total_n


def lowest(score_n: Uints, tie_n: Uints, free_n: Mask, count: int, comm: Communicator) -> Mask:
    """The `count` lowest of all ranks by score, then by tie, among those that are free.

    All are, where fewer are free. No two ties of all ranks may be the same.
    """
    score, below = _threshold(score_n[free_n], count, comm)
    equal_n = free_n & (score_n == score)
    tie, _ = _threshold(tie_n[equal_n], count - below, comm)
    return free_n & ((score_n < score) | (equal_n & (tie_n <= tie)))


def _threshold(values_n: Uints, count: int, comm: Communicator) -> tuple[np.uint64, int]:
    """The count-th smallest value of all ranks, and how many are smaller; digit by digit."""
    value, below = 0, 0
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        digits_n = (values_n >> np.uint64(shift)) & np.uint64(2**_DIGIT - 1)
        counts = torch.from_numpy(np.bincount(digits_n.astype(np.int64), minlength=2**_DIGIT))
        comm.all_reduce(counts)
        upto = counts.cumsum(0)
        digit = int(torch.searchsorted(upto, count - below))
        digit = min(digit, 2**_DIGIT - 1)  # fewer than `count` in all
        below += int(upto[digit] - counts[digit])
        value = (value << _DIGIT) | digit
        values_n = values_n[digits_n == digit]
    return np.uint64(value), below


class AdmittedRows:
    """A store as training sees it: a key without admission is read, but never stored."""

    def __init__(self, store: RowStore, lifecycle: RowLifecycle) -> None:
        self._store, self._lifecycle = store, lifecycle
        # A pool has slots for keys without a row as well, so it may be larger than the table.
        self.layout = replace(store.layout, max_rows=())
        self.abilities = StoreAbilities()  # who locates rows inserts them
        self.gather, self.num_rows, self.erase = store.gather, store.num_rows, store.erase
        self.num_bytes, self.export, self.close = store.num_bytes, store.export, store.close

    def scatter(self, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
        admitted_K = self._lifecycle.admitted(keys_K, counts)
        if not bool(admitted_K.all()):
            counts = [int(of.sum()) for of in torch.split(admitted_K, list(counts))]
            keys_K, rows_KW = keys_K[admitted_K], rows_KW[admitted_K]
        self._store.scatter(keys_K, counts, rows_KW)


class Lifecycle:
    """The policies of all tables, and when the next boundary is."""

    def __init__(self, of_groups: Sequence[RowLifecycle | None], every: int) -> None:
        self.of_groups, self._every = list(of_groups), every
        self.next_boundary = 0
        """The step after which rows come and go next."""
        self._plan_boundary(0)

    def __iter__(self) -> Iterator[RowLifecycle]:
        return (of for of in self.of_groups if of is not None)

    def touch(self, g: int, keys_K: Tensor, counts: Sequence[int], step: int) -> Tensor | None:
        """Note the keys of a batch of a group of tables; see `RowLifecycle.touch`."""
        of_group = self.of_groups[g]
        return None if of_group is None else of_group.touch(keys_K, counts, step)

    def sweep(self, step: int) -> list[Evicted]:
        """Rows of all tables go and come; plans the next boundary."""
        steps = self._every - step % self._every
        found = [evicted for of_group in self for evicted in of_group.sweep(step, steps)]
        self._plan_boundary(step)
        return found

    def _plan_boundary(self, step: int) -> None:
        """At the next multiple of `every`, or earlier where a table may be full before."""
        steps = self._every - step % self._every
        for of_group in self:
            for number in range(len(of_group.group.tables)):
                steps = of_group.steps_to_go(number, steps)
        self.next_boundary = step + steps

    def state(self) -> dict[str, Any]:
        """What a run goes on with, besides the ledgers; all ranks ask for it together."""
        for of_group in self:
            of_group.settle()
        peaks = {
            table.name: peak
            for of_group in self
            for table, peak in zip(of_group.group.tables, of_group.peaks, strict=True)
            if table.has_lifecycle
        }
        return {"next_boundary": self.next_boundary, "peaks": peaks}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from a checkpoint of that step; one without a lifecycle gives no state."""
        peaks = state.get("peaks", {})
        for of_group in self:
            of_group.peaks = [int(peaks.get(table.name, 0)) for table in of_group.group.tables]
        self._plan_boundary(step)
        self.next_boundary = int(state.get("next_boundary", self.next_boundary))

    def close(self) -> None:
        for of_group in self:
            of_group.ledger.close()
