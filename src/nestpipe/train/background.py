"""Checkpoints that are written while training goes on.

At a batch boundary every rank copies the rows touched since the checkpoint before, and rank 0 the
dense weights; a thread of each rank then writes them. What is on a GPU is copied there, and the
thread brings it to the host. An increment holds these rows alone. A full checkpoint holds them
merged with the files of the checkpoint before: each rank reads those of its own shard, part by
part, so memory does not grow with the tables.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import (
    DENSE,
    MOST_PARENTS,
    Checkpoint,
    FileEntry,
    KnownManifests,
    Manifest,
    Parent,
    RowChange,
    counted,
    name_of,
    write_manifest,
)
from nestpipe.checkpoint.merging import (
    cut,
    merged_blocks,
    row_streams,
    rows_in_part,
    write_keys,
    write_rows,
)
from nestpipe.comm.communicator import Communicator, Mesh
from nestpipe.embedding.lifecycle import Lifecycle
from nestpipe.embedding.pool import PoolSnapshot, RowPool
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.embedding.store.protocol import RowStore, too_many_rows
from nestpipe.embedding.table_groups import TableGroup
from nestpipe.errors import CapacityError, CheckpointError
from nestpipe.kernels.host_memory import CopiesToHost
from nestpipe.kernels.library import free_memory
from nestpipe.kernels.rows.native import RowPointers
from nestpipe.train.checkpoint import (
    LostParentError,
    RunState,
    all_write,
    fault_of,
    gathered_from_first,
    hold_dense,
    known_keys,
    known_uses,
    manifest_of,
    raise_first,
    write_waiting,
    wrote_alike,
)

log = logging.getLogger("nestpipe.checkpoint")

# Shapes: K keys of a table, W weights and state of a row

MANY_KEYS = 1 << 20
"""Touched keys of a store that are kept as they come before they are sorted: 8 MiB."""
COPIED_SHARE = 0.25
"""Of the memory that is left: what copies of touched rows may take, all ranks of a machine."""
FAILED = ".failed"
WAIT_S, POLL_S = 3600.0, 0.02
"""How long rank 0 waits for the files of other ranks, and how often it looks."""


class TouchedKeys:
    """Keys of the tables of a store, each once.

    New ones are sorted in when they are many, and as many as those before: sorting is what costs.
    """

    def __init__(self, num_tables: int) -> None:
        self._sorted = [torch.empty(0, dtype=torch.int64)] * num_tables
        self._recent: list[tuple[Tensor, list[int]]] = []
        self._num_recent = 0
        self._lock = threading.RLock()
        """Rows are located by one thread while another one writes some."""

    @property
    def num_tables(self) -> int:
        return len(self._sorted)

    def add(self, keys_K: Tensor, counts: Sequence[int]) -> None:
        if not len(keys_K):
            return
        with self._lock:
            self._recent.append((keys_K.clone(), list(counts)))
            self._num_recent += len(keys_K)
            if self._num_recent >= max(MANY_KEYS, sum(map(len, self._sorted))):
                self.ascending()

    def drop(self, keys_K: Tensor, counts: Sequence[int]) -> None:
        """Forget some."""
        with self._lock:
            for table, keys in enumerate(torch.split(keys_K, list(counts))):
                if len(keys):
                    every = self.ascending()[table]
                    self._sorted[table] = every[~torch.isin(every, keys)]

    def ascending(self) -> list[Tensor]:
        """All of them by table, in order."""
        with self._lock:
            if self._recent:
                recent = [torch.split(keys, counts) for keys, counts in self._recent]
                of_tables = zip(self._sorted, *recent, strict=True)
                self._sorted = [_each_once(*of) for of in of_tables]
                self._recent, self._num_recent = [], 0
            return list(self._sorted)


def _each_once(before: Tensor, *recent: Tensor) -> Tensor:
    """All keys in order; numpy sorts by vector instructions, which torch on a CPU does not."""
    if not any(map(len, recent)):
        return before
    keys_K = torch.cat([before, *recent])
    keys_K.numpy().sort()
    return torch.unique_consecutive(keys_K)


class CopyRoom:
    """Memory for copies of rows, which the next checkpoint uses again.

    To ask the system for new pages takes longer than to copy rows there.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._used = 0

    @property
    def num_bytes(self) -> int:
        return 4 * len(self._memory)

    def clear(self, numbers: int) -> None:
        """Make room for so many numbers; what was taken before is not used any more."""
        self._used = 0
        if not numbers <= len(self._memory) <= 4 * numbers:
            self._memory = torch.empty(0)  # the old one first
            self._memory = torch.empty(numbers + numbers // 4)

    def take(self, rows: int, width: int) -> Tensor:
        """Some of it, from the beginning of a cache line; once there is no more, other memory."""
        end = self._used + rows * width
        if end > len(self._memory):
            return torch.empty(rows, width)
        begin, self._used = self._used, -(-end // 16) * 16
        return self._memory[begin:end].view(rows, width)


class TrackedStore:
    """A store that notes which keys were written, or located to be written, and which erased."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self.layout = store.layout
        self.gather, self.num_rows = store.gather, store.num_rows
        self.num_bytes, self.export, self.close = store.num_bytes, store.export, store.close
        self._touched: TouchedKeys | None = None
        self._gone = TouchedKeys(self.layout.num_tables)
        can = store.abilities
        self._locator = can.locate
        self.abilities = replace(can, locate=self if can.locate is not None else None, notes=self)
        self._quiet = threading.local()
        """`now`: whether the thread has asked for no notes."""

    @property
    def threads(self) -> int:
        assert self._locator is not None
        return self._locator.threads

    def locate(self, keys_K: Tensor, counts: Sequence[int]) -> RowPointers:
        assert self._locator is not None
        self.note(keys_K, counts)
        return self._locator.locate(keys_K, counts)

    def locate_each(self, keys_n: Tensor, tables_n: Tensor, addresses_n: Tensor) -> None:
        assert self._locator is not None
        if self._touched is not None and not self._is_quiet:
            tables, order = torch.sort(tables_n, stable=True)
            counts = torch.bincount(tables, minlength=self._touched.num_tables).tolist()
            self.note(keys_n[order], counts)
        self._locator.locate_each(keys_n, tables_n, addresses_n)

    def scatter(self, keys_K: Tensor, counts: Sequence[int], rows_KW: Tensor) -> None:
        self.note(keys_K, counts)
        self._store.scatter(keys_K, counts, rows_KW)

    def erase(self, keys_K: Tensor, counts: Sequence[int]) -> int:
        if self._touched is not None:  # a restore erases, then stores what was touched since
            self._touched.drop(keys_K, counts)
            self._gone.add(keys_K, counts)
        return self._store.erase(keys_K, counts)

    @property
    def tracking(self) -> bool:
        return self._touched is not None

    def note(self, keys_K: Tensor, counts: Sequence[int]) -> None:
        """These rows are written, by whatever way."""
        if self._touched is not None and not self._is_quiet:
            self._touched.add(keys_K, counts)

    @property
    def _is_quiet(self) -> bool:
        return getattr(self._quiet, "now", False)

    @contextmanager
    def unnoted(self) -> Generator[None]:
        """Inside, what the calling thread writes or locates is not noted: somebody else knows."""
        self._quiet.now = True
        try:
            yield
        finally:
            self._quiet.now = False

    def track(self, *, on: bool = True) -> None:
        """Note keys from now on, and forget those so far; or note none."""
        self._touched = TouchedKeys(self.layout.num_tables) if on else None
        self._gone = TouchedKeys(self.layout.num_tables)

    def gone(self) -> list[Tensor]:
        """Keys erased since `track`, by table, ascending; some may be stored again."""
        return self._gone.ascending()

    def touched(self) -> list[Tensor]:
        """Keys touched since `track`, by table, ascending."""
        assert self._touched is not None, "nobody has asked to track"
        return self._touched.ascending()

    def rows_at(
        self, table: int, keys_K: Tensor, room: CopyRoom | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Copies of rows of a table, in parts."""
        counts, width = [0] * self.layout.num_tables, self.layout.width
        for keys in keys_K.split(rows_in_part(width)) if len(keys_K) else ():
            counts[table] = len(keys)
            rows_KW = torch.empty(len(keys), width) if room is None else room.take(len(keys), width)
            self.gather(keys, counts, rows_KW)
            yield keys, rows_KW


@dataclass(frozen=True, slots=True)
class _TouchedTable:
    """What an increment holds of a table."""

    group: TableGroup
    number: int
    """The table's in its group."""
    gone: Tensor
    """Keys that were erased; then come the rows."""
    keys: Tensor
    width: int
    blocks: Sequence[RowChange] | Iterator[RowChange]
    """Rows of these keys, from the host store."""

    @property
    def name(self) -> str:
        return self.group.tables[self.number].name

    def num_bytes(self, pool_keys: Tensor) -> int:
        """Of keys and rows, with those that come from a pool; some keys may be among both."""
        twice = int(torch.isin(self.keys, pool_keys).sum()) if len(self.keys) else 0
        return (8 + 4 * self.width) * (len(self.keys) + len(pool_keys) - twice)

    def parent_streams(self, parent: Checkpoint, comm: Communicator) -> list[Iterator[RowChange]]:
        """What the chain has of this rank's rows."""
        alike = wrote_alike(parent, self.group, self.number, comm.size)
        noted = self.group.tables[self.number].has_lifecycle
        streams = row_streams(parent, self.name, comm.rank if alike else None, noted=noted)
        return streams if alike else [self._owned(stream, comm) for stream in streams]

    def _owned(self, stream: Iterator[RowChange], comm: Communicator) -> Iterator[RowChange]:
        owner = self.group.table_owners[self.number]
        for change in stream:
            mine = owner_of(change.keys, self.number, comm.size, owner) == comm.rank
            yield cut(change, mine)


@dataclass(slots=True)
class StoodStill:
    """Seconds that training stood still for checkpoints on one rank, and for what."""

    for_copies: float = 0.0
    for_flush: float = 0.0
    """Until rows of pools were in the host store, where they are not copied on the device."""
    for_writes: float = 0.0
    """Until the checkpoint before was written."""

    @property
    def seconds(self) -> float:
        return self.for_copies + self.for_flush + self.for_writes

    def __add__(self, other: StoodStill) -> StoodStill:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return StoodStill(*(mine + more for mine, more in pairs))

    def __truediv__(self, count: int) -> StoodStill:
        return StoodStill(*(seconds / count for seconds in astuple(self)))


class BackgroundWriter:
    """Writes checkpoints while training goes on; one at a time, all ranks alike.

    `begin` copies what a checkpoint holds, at a batch boundary, and a thread writes it. Ranks tell
    rank 0 by a file each that theirs are written; its thread writes the manifest and publishes.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, increments: float, *, on_device: bool = True
    ) -> None:
        """`increments`: so many in a row at most, then a full one; 0: all are full.

        `on_device`: copy what is on a device there; False: bring it to the host first, the twin.
        """
        self._folder, self._mesh, self._increments = folder, mesh, increments
        self._on_device = on_device
        self._thread: threading.Thread | None = None
        self._fault: list[str] | None = None
        self._manifests = KnownManifests()
        self._room, self._to_host = CopyRoom(), CopiesToHost()
        self._published: Checkpoint | None = None
        """The last one, opened by the thread that wrote it."""
        self.stood_still = StoodStill()
        self.num_bytes = 0
        """What this rank has written."""
        self._touched_here = 0
        self.bytes_touched = 0
        """Keys and rows that had been touched, of all checkpoints that are written, all ranks."""

    def begin(
        self,
        parent: Path | None,
        state: RunState,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        groups: Sequence[TableGroup],
        stores: Sequence[TrackedStore],
        lifecycle: Lifecycle | None = None,
        pools: Sequence[RowPool] = (),
    ) -> Path:
        """Copy what was touched since the parent, and begin to write it; returns where to.

        Without a parent the touched rows must be all rows. `pools`: before the stores, if there are
        any. Raises `LostParentError` on all ranks where the parent cannot be read.
        """
        self.wait()
        began, flushed = time.perf_counter(), self.stood_still.for_flush
        comm, target = self._mesh.world, self._folder / name_of(state.step)
        partial = self._folder / f".partial-{target.name}"
        of_parent = self._asked_parent(parent)
        manifest = replace(manifest_of(state, model, groups, stores, self._mesh), parent=of_parent)

        def make() -> dict[str, FileEntry]:
            if comm.rank == 0:
                disk.remove_leftovers(self._folder)
                disk.make_folder(partial)
            return {}

        all_write(comm, target, make)
        snapshots = self._snapshots(pools, lifecycle)
        manifest = replace(manifest, tables=self._with_rows(manifest, stores, snapshots))
        dense = hold_dense(model, dense_optimizer, keep=comm.rank == 0, on_device=self._on_device)
        touched, copied = self._touched(groups, stores, lifecycle)
        waiting = known_keys(lifecycle) if self._mesh.group == 0 else {}
        for store in stores:
            store.track()
        self._to_host.begin([*dense.pieces.values(), *(pool.rows_SW for pool in pools)])

        def write() -> None:
            merge_with = None if of_parent is not None else parent
            entries = write_waiting(partial, waiting, self._mesh.shards.rank)
            with self._to_host.entered(), _device_has_room():
                dense_tensors = dense.on_host(self._to_host.fetch)
                from_pools = self._from_pools(groups, snapshots)
                entries |= self._write_rows(
                    partial, touched, from_pools, merge_with, full=of_parent is None
                )
            if comm.rank != 0:
                _tell(partial, comm.rank, entries)
                return
            entries[DENSE] = FileEntry.of(disk.write_tensors(partial / DENSE, dense_tensors))
            self._publish(partial, target, manifest, entries)

        self._start(target, write)
        flushed = self.stood_still.for_flush - flushed
        self.stood_still.for_copies += time.perf_counter() - began - flushed
        if not copied:  # rows are read while they are written, so nobody may change them
            self.wait()
        return target

    @property
    def seconds(self) -> float:
        """Time that training has stood still."""
        return self.stood_still.seconds

    def _snapshots(
        self, pools: Sequence[RowPool], lifecycle: Lifecycle | None
    ) -> list[PoolSnapshot | None]:
        """Of each pool; None where its rows are in the host store now.

        Of tables with a policy the uses of keys belong to their rows, and hosts have those.
        """
        if not pools:  # rows are in buffers, which are written back after every batch
            return []
        policies = lifecycle.of_groups if lifecycle is not None else [None] * len(pools)
        found: list[PoolSnapshot | None] = []
        for pool, policy in zip(pools, policies, strict=True):
            here = self._on_device and policy is None
            # Ranks of the other groups have the same rows.
            taken = pool.snapshot(copy=self._mesh.group == 0) if here else None
            if taken is None:
                began = time.perf_counter()
                pool.flush()
                self.stood_still.for_flush += time.perf_counter() - began
            found.append(taken)
        return found

    def _from_pools(
        self, groups: Sequence[TableGroup], snapshots: Sequence[PoolSnapshot | None]
    ) -> dict[str, tuple[Tensor, Iterator[RowChange]]]:
        """Keys of each table whose rows a snapshot has, and these rows, on the host."""
        found: dict[str, tuple[Tensor, Iterator[RowChange]]] = {}
        for group, taken in zip(groups, snapshots, strict=False):  # there may be no pools
            if taken is None:
                continue
            most = rows_in_part(taken.rows_KW.shape[1])
            of_tables = taken.of_tables(self._to_host.fetch, most)
            for table, (keys, rows) in zip(group.tables, of_tables, strict=True):
                found[table.name] = keys, _changes(keys, rows)
        return found

    def _asked_parent(self, parent: Path | None) -> Parent | None:
        """What an increment names as its parent; None where a full checkpoint is due."""
        found: list[Checkpoint] = []

        def look() -> None:
            if parent is not None and self._mesh.world.rank == 0:
                found.append(self._opened_parent(parent))

        raise_first(cast("list[list[str] | None]", self._everywhere(fault_of(look))))
        most = min(self._increments, MOST_PARENTS)
        increment = bool(found) and len(found[0].parents) < most
        mine = [found[0].name, found[0].manifest.hash] if increment else None
        told = gathered_from_first(self._mesh.world, mine)
        return None if told is None else Parent(name=told[0], hash=told[1])

    def _opened_parent(self, parent: Path) -> Checkpoint:
        """Looking at every file of a long chain takes milliseconds in which training waits."""
        last = self._published
        if last is not None and last.path == parent and self._manifests.knows(last):
            return last
        return _opened(parent, self._manifests)

    def _everywhere(self, value: object) -> list[object]:
        return cast("list[object]", self._mesh.world.all_gather_values(value))

    def _with_rows(
        self,
        manifest: Manifest,
        stores: Sequence[TrackedStore],
        snapshots: Sequence[PoolSnapshot | None],
    ) -> tuple[dict[str, object], ...]:
        """What is known of each table, with its rows of all shards at this step."""
        here = [store.num_rows() for store in stores]
        for g, taken in enumerate(snapshots):
            if taken is not None:
                here[g] = [sum(of) for of in zip(here[g], taken.not_stored, strict=True)]
        fault = fault_of(lambda: _refuse_excess(stores, here))
        counts = [count for of_store in here for count in of_store]
        told = cast("list[Any]", self._mesh.shards.all_gather_values([fault, counts]))
        raise_first([of_rank[0] for of_rank in told])
        totals = cast("list[list[int]]", [of_rank[1] for of_rank in told])
        return tuple(
            {**table, "rows": sum(of)} for table, *of in zip(manifest.tables, *totals, strict=True)
        )

    def _touched(
        self,
        groups: Sequence[TableGroup],
        stores: Sequence[TrackedStore],
        lifecycle: Lifecycle | None,
    ) -> tuple[list[_TouchedTable], bool]:
        """What the host stores have of it, and whether that was copied.

        Where copies need much memory, there are none.
        """
        if self._mesh.group != 0:  # the others have the same
            stores = ()
        keys = [store.touched() for store in stores]
        rows = [sum(map(len, tables)) for tables in keys]
        numbers = sum(n * store.layout.width for n, store in zip(rows, stores, strict=True))
        need = 8 * sum(rows) + 4 * numbers
        left = COPIED_SHARE * free_memory() / _local_ranks() + self._room.num_bytes
        needs = self._everywhere(need <= left)
        copied = all(needs)
        self._room.clear(numbers if copied else 0)
        room = self._room if copied else None
        found: list[_TouchedTable] = []
        for g, (group, store, tables) in enumerate(zip(groups, stores, keys, strict=False)):
            for number, (keys_K, gone_K) in enumerate(zip(tables, store.gone(), strict=True)):
                blocks = _noted(store.rows_at(number, keys_K, room), lifecycle, g, number)
                kept = list(blocks) if copied else blocks
                found.append(_TouchedTable(group, number, gone_K, keys_K, store.layout.width, kept))
        return found, copied

    def _write_rows(
        self,
        partial: Path,
        touched: Sequence[_TouchedTable],
        from_pools: Mapping[str, tuple[Tensor, Iterator[RowChange]]],
        merge_with: Path | None,
        *,
        full: bool,
    ) -> dict[str, FileEntry]:
        """This rank's files: what was touched alone, or merged with those of another checkpoint."""
        entries: dict[str, FileEntry] = {}
        shards, self._touched_here = self._mesh.shards, 0
        merged = (
            _opened(merge_with, self._manifests) if merge_with is not None and touched else None
        )
        for table in touched:
            older = [] if merged is None else table.parent_streams(merged, shards)
            streams = [_read_from_parent(stream) for stream in older]
            if full:
                streams.append(iter([RowChange(table.gone, None, None, 0)]))
            else:
                gone = {"keys": table.gone}
                entries |= write_keys(partial, table.name, shards.rank, "gone", gone)
            pool_keys, newest = from_pools.get(table.name, (table.gone[:0], iter(())))
            self._touched_here += table.num_bytes(pool_keys)
            # A row of a pool is newer than that of its key in the store.
            blocks = merged_blocks([*streams, iter(table.blocks), newest])
            entries |= write_rows(partial, table.name, shards.rank, blocks)
        self.num_bytes += sum(entry.num_bytes for entry in entries.values())
        return entries

    def _publish(
        self, partial: Path, target: Path, manifest: Manifest, entries: dict[str, FileEntry]
    ) -> None:
        self.num_bytes += entries[DENSE].num_bytes
        for rank in range(1, self._mesh.world.size):
            entries |= _told(partial, rank)
        if manifest.parent is None:
            _refuse_lost_rows(counted(manifest.tables, entries), manifest.tables)
        write_manifest(partial, replace(manifest, files=entries))
        disk.publish(partial, target)
        self._published = self._manifests.open(target)

    def _start(self, target: Path, write: Callable[[], None]) -> None:
        def run() -> None:
            def explained() -> None:
                with disk.explained(f"the checkpoint {str(target)!r}"):
                    write()

            try:
                self._fault = fault_of(explained)
            except Exception as error:  # else training would take it for written
                log.exception("the checkpoint %r was not written", str(target))
                why = f"the checkpoint {str(target)!r} was not written: {error!r}"
                self._fault = ["RunError", f"{why}; the lines above say where"]
            if self._fault is not None and self._mesh.world.rank != 0:
                # Rank 0 need not wait; where this cannot be written either, it gives up by itself.
                with suppress(OSError):
                    (self._folder / f".partial-{target.name}" / FAILED).touch()

        # A process that ends does not wait for it: what is half written has no name.
        self._thread = threading.Thread(target=run, name="nestpipe-checkpoint", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Give a write that has begun some time, on this rank alone; for runs that fail."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wait(self) -> None:
        """Until the checkpoint is published, on all ranks; raises where one could not write."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.stood_still.for_writes += time.perf_counter() - began
        mine = self._fault, self._touched_here
        self._fault, self._touched_here = None, 0
        told = cast("list[tuple[list[str] | None, int]]", self._everywhere(mine))
        self.bytes_touched += sum(touched for _, touched in told)
        raise_first([fault for fault, _ in told[::-1]])  # rank 0 may have heard of another's


def _noted(
    blocks: Iterator[tuple[Tensor, Tensor]], lifecycle: Lifecycle | None, g: int, number: int
) -> Iterator[RowChange]:
    """Rows with the uses of their keys."""
    for keys, rows in blocks:
        yield RowChange(keys, rows, known_uses(lifecycle, g, number, keys), 0)


def _changes(keys_K: Tensor, blocks: Iterator[Tensor]) -> Iterator[RowChange]:
    """Rows with their keys, block by block."""
    begin = 0
    for rows in blocks:
        yield RowChange(keys_K[begin : begin + len(rows)], rows, None, 0)
        begin += len(rows)


def _refuse_excess(stores: Sequence[TrackedStore], rows: Sequence[Sequence[int]]) -> None:
    """Rows that only a pool has count for the limits of their store, as if they were in it."""
    for store, counts in zip(stores, rows, strict=True):
        for table, (count, limit) in enumerate(zip(counts, store.layout.max_rows, strict=False)):
            if limit and count > limit:
                raise CapacityError(too_many_rows(store.layout, table, count, limit))


@contextmanager
def _device_has_room() -> Generator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise CapacityError(
            "the device has no memory left to bring touched rows to the host; lower device_memory, "
            "or set run.snapshot_on_device = false"
        ) from None


def _opened(parent: Path, manifests: KnownManifests) -> Checkpoint:
    try:
        return manifests.open(parent)
    except CheckpointError as error:
        raise LostParentError(str(error)) from None


def _read_from_parent(stream: Iterator[RowChange]) -> Iterator[RowChange]:
    try:
        yield from stream
    except CheckpointError as error:
        raise LostParentError(str(error)) from None


def _refuse_lost_rows(
    found: Sequence[Mapping[str, object]], expected: Sequence[Mapping[str, object]]
) -> None:
    """What is merged must have the rows that memory has, of every table."""
    for files, memory in zip(found, expected, strict=True):
        if files["rows"] != memory["rows"]:
            raise LostParentError(
                f"files have {files['rows']} rows of {files['name']}, and memory has "
                f"{memory['rows']}"
            )


def _local_ranks() -> int:
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _tell(partial: Path, rank: int, entries: Mapping[str, FileEntry]) -> None:
    """Say which files a rank has written; the name appears when all of it is there."""
    text = json.dumps({name: asdict(entry) for name, entry in entries.items()}).encode()
    hidden = partial / f".rank-{rank}.part"
    disk.write_bytes(hidden, iter([text]))
    hidden.rename(partial / f".rank-{rank}")


def _told(partial: Path, rank: int) -> dict[str, FileEntry]:
    """Wait for another rank's files."""
    path, give_up = partial / f".rank-{rank}", time.monotonic() + WAIT_S
    while not path.exists():
        if (partial / FAILED).exists():
            raise CheckpointError(f"a rank could not write its part of {partial.name}")
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"rank {rank} has not written its part of {partial.name} in {WAIT_S:g} s; check "
                "that all ranks see the same folder"
            )
        time.sleep(POLL_S)
    entries = json.loads(path.read_text())
    path.unlink()
    return {name: FileEntry(**entry) for name, entry in entries.items()}
