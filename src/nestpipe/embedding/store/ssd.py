"""A store for more rows than host memory holds: hot rows in memory, all others in a file.

Native code does the work (`kernels/native/ssd`). The file is scratch space of this process: it has
no name, so it is gone when the process ends, however it ends. What persists is a checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.config.load import memory_size, show_memory
from nestpipe.embedding.store.host import NativeRows, exported, int64s, native_shape
from nestpipe.embedding.store.protocol import (
    MOST_THREADS,
    SsdOptions,
    SsdTraffic,
    StoreAbilities,
    StoreLayout,
    check_layout,
    check_rows,
    default_threads,
    repeated,
    too_many_rows,
    weight_bytes,
)
from nestpipe.errors import CapacityError, ConfigError, RunError
from nestpipe.kernels.library import (
    SsdCounters,
    SsdShape,
    Status,
    StoreReport,
    free_memory,
    library,
)

# Shapes: K keys, W width of a row as it travels

PAGE = 4096
HEADER_BYTES = 16
"""Of a row in the file: its key, its table, a sum of its bytes."""
FRAME_BYTES = 24
"""Of a row in memory, beside its numbers."""
FILL_BYTES = 1 << 20
"""What is written at once to fill a file that the disk is timed with."""
AUTO_SHARE = 0.5
"""Of free host memory, for the caches of all ranks of a machine."""


class SsdStore(NativeRows):
    """Calls may come from several Python threads and take turns; `close` must be the last.

    It belongs to the process that opened it: a forked child has the same file, and is refused.
    """

    def __init__(
        self, layout: StoreLayout, options: SsdOptions, *, threads: int | None = None
    ) -> None:
        self._address: int | None = None
        self._file = -1
        check_layout(layout)
        self.layout = layout
        self.options = options
        self.threads = default_threads() if threads is None else threads
        for name, number in (("threads", self.threads), ("depth", options.depth)):
            if not 1 <= number <= MOST_THREADS:
                raise ValueError(f"{name} is {number}; give 1 to {MOST_THREADS}")
        self._library = library()
        self._scatter, self._erase = (
            self._library.nestpipe_ssd_scatter,
            self._library.nestpipe_ssd_erase,
        )
        self._process = os.getpid()
        _refuse_small_disk(layout, options)
        self._file, align = open_scratch(options.folder)
        self.direct = align > 0
        """Whether reads and writes go past the system's own cache of files."""
        self._align = align or PAGE
        ssd = SsdShape(
            self._file,
            self._align,
            options.cache_bytes,
            max(PAGE, options.segment_bytes),
            options.depth,
        )
        shape = native_shape(layout)
        self._address = self._library.nestpipe_ssd_open(shape, ssd, self.threads)
        if self._address is None:
            os.close(self._file)
            raise CapacityError(
                f"cannot open a store of {layout.num_tables} tables with "
                f"{self.threads + options.depth} threads; free memory, or allow more threads "
                "(ulimit -u)"
            )

    @property
    def abilities(self) -> StoreAbilities:
        """Rows move between memory and file, so they are read and written by key alone."""
        return StoreAbilities(keys=self, file=self)

    def gather(self, keys_K: Tensor, counts: Sequence[int], out_KW: Tensor) -> int:
        return self._gather(keys_K, counts, out_KW, admit=True)

    def _gather(self, keys_K: Tensor, counts: Sequence[int], out_KW: Tensor, *, admit: bool) -> int:
        check_rows(self.layout, keys_K, counts, out_KW)
        num_new, report = ctypes.c_int64(), StoreReport()
        status = self._library.nestpipe_ssd_gather(
            *(self._open, keys_K.data_ptr(), int64s(counts), out_KW.data_ptr(), admit),
            *(num_new, report),
        )
        self._raise(status, report, keys_K)
        return num_new.value

    def num_rows(self) -> list[int]:
        count, index = self._library.nestpipe_store_num_rows, self._index
        return [count(index, table) for table in range(self.layout.num_tables)]

    def num_bytes(self) -> int:
        """Memory in use; `traffic` has the size of the file."""
        return self._library.nestpipe_ssd_num_bytes(self._open)

    def traffic(self) -> SsdTraffic:
        """What was read and written so far."""
        counters = SsdCounters()
        self._library.nestpipe_ssd_counters(self._open, counters)
        return SsdTraffic(**{f.name: getattr(counters, f.name) for f in fields(SsdTraffic)})

    def disk_seconds(self, block: int, count: int, *, write: bool) -> float:
        """How long the disk itself takes for random blocks of a file as large as this store's."""
        align = self._align
        block = -(-block // align) * align
        blocks = max(count, self.traffic().file_bytes // block)
        file, _ = open_scratch(self.options.folder)
        try:
            size = -(-blocks * block // FILL_BYTES) * FILL_BYTES
            self._probe(file, FILL_BYTES, np.arange(0, size, FILL_BYTES), write=True)
            chosen = np.random.default_rng(block).choice(blocks, count, replace=False)
            return self._probe(file, block, np.sort(chosen) * block, write=write)
        finally:
            os.close(file)

    def _probe(self, file: int, block: int, offsets: np.ndarray, *, write: bool) -> float:
        seconds, report = ctypes.c_double(), StoreReport()
        offsets = np.ascontiguousarray(offsets, np.int64)
        status = self._library.nestpipe_ssd_probe(
            *(file, block, offsets.ctypes.data, len(offsets), self.options.depth, write),
            *(seconds, report),
        )
        self._raise(status, report, torch.empty(0))
        return seconds.value

    def export(self, chunk: int = 65536) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every row in order of table and key; what is in memory stays there."""

        def read(keys_K: Tensor, counts: Sequence[int], out_KW: Tensor) -> int:
            return self._gather(keys_K, counts, out_KW, admit=False)

        return exported(self.layout, self._index, read, chunk)

    def close(self) -> None:
        # A forked child has the memory but not the threads that `close` waits for.
        if self._address is not None and os.getpid() == self._process:
            self._library.nestpipe_ssd_close(self._address)
            os.close(self._file)
        self._address = None

    def __del__(self) -> None:
        self.close()

    @property
    def _open(self) -> int:
        if self._address is None:
            raise ValueError("the store is closed")
        if os.getpid() != self._process:
            raise ValueError("a store with a file belongs to the process that opened it")
        return self._address

    @property
    def _index(self) -> int:
        """The native store of its keys."""
        return self._library.nestpipe_ssd_index(self._open)

    def _raise(self, status: int, report: StoreReport, keys_K: Tensor) -> None:
        where = str(self.options.folder)
        match status:
            case Status.OK:
                return
            case Status.TOO_MANY_ROWS:
                raise CapacityError(
                    too_many_rows(self.layout, report.table, report.asked, report.limit)
                )
            case Status.REPEATED_KEY:
                raise repeated(report.table, report.key)
            case Status.NO_MEMORY:
                raise CapacityError(
                    f"host memory is full: the index of {sum(self.num_rows()):,} rows and a batch "
                    f"of {keys_K.numel():,} do not fit beside the "
                    f"{show_memory(self.num_bytes())} in use here; lower run.host_memory, free "
                    "memory, or spread tables over more machines"
                )
            case Status.FILE_FAILED:
                raise _failed(where, report.key, report.asked)
            case Status.FILE_DAMAGED:
                raise RunError(
                    f"a row in the file in {where!r} is not the one that was written; check the "
                    "disk, and go on from the newest checkpoint"
                )
            case _:
                raise AssertionError(f"the native store answered {status}")


def _failed(where: str, call: int, number: int) -> CapacityError | RunError:
    reason = os.strerror(number)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CapacityError(
            f"cannot keep more rows in {where!r}: {reason}; free space, raise run.host_memory, or "
            "name another folder in run.store_path"
        )
    done = ("read rows from", "write rows to", "reserve space in")[call]
    return RunError(
        f"cannot {done} {where!r}: {reason}; check the disk, and go on from the newest checkpoint"
    )


# The file


def open_scratch(folder: Path) -> tuple[int, int]:
    """A file without a name in a folder, and what direct reads and writes are aligned to.

    The system frees its space when the process ends, however it ends. 0: the file system has no
    direct access, and its own cache is in between.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for direct in (os.O_DIRECT, 0):
            file = _open_unnamed(folder, direct)
            if file is None:
                continue
            with ExitStack() as unless_it_works:
                unless_it_works.callback(os.close, file)
                for align in (512, PAGE):
                    if _writes(file, align):
                        unless_it_works.pop_all()
                        return file, align if direct else 0
    except OSError as error:
        raise ConfigError(
            f"cannot keep rows in {str(folder)!r}: {error.strerror}; make it a folder that can be "
            "written, or name another in run.store_path"
        ) from None
    raise ConfigError(
        f"cannot keep rows in {str(folder)!r}: no file there takes writes; name another folder in "
        "run.store_path"
    )


def _open_unnamed(folder: Path, direct: int) -> int | None:
    """An empty file; None: not with direct access."""
    flags = os.O_RDWR | os.O_CLOEXEC | direct
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    named, name = tempfile.mkstemp(prefix=".nestpipe-rows-", dir=folder)
    os.close(named)
    try:
        return os.open(name, flags)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            return None
        raise
    finally:
        Path(name).unlink()


def _writes(file: int, align: int) -> bool:
    """Whether a block of that size can be written."""
    with mmap.mmap(-1, PAGE) as block:
        try:
            done = os.pwrite(file, memoryview(block)[:align], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    os.ftruncate(file, 0)
    return done == align


def _refuse_small_disk(layout: StoreLayout, options: SsdOptions) -> None:
    """Where all tables have a limit, the disk must have room for what memory has not."""
    if not layout.max_rows or not all(layout.max_rows):
        return
    row = row_bytes(layout)
    rows = max(0, sum(layout.max_rows) - options.cache_bytes // (row + FRAME_BYTES))
    folder = options.folder
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        about = os.statvfs(folder)
    except OSError:
        return
    free, needed = about.f_bavail * about.f_frsize, rows * (row + HEADER_BYTES)
    if needed > free:
        raise ConfigError(
            f"{str(options.folder)!r} has {show_memory(free)} free, and {rows:,} rows beyond "
            f"memory take {show_memory(needed)}; free space, raise run.host_memory, lower "
            "max_rows, or name another folder in run.store_path"
        )


def row_bytes(layout: StoreLayout) -> int:
    """A row in memory: weights, then state, padded to 16 bytes."""
    weights = weight_bytes(layout.dim, layout.dtype)
    return -(-(weights + 4 * layout.state_dim) // 16) * 16


def share_memory(
    folder: str, host_memory: str, layouts: Sequence[StoreLayout], sharing: int
) -> list[SsdOptions]:
    """Options for each store of a rank: every table has as many rows in memory."""
    memory = memory_size(
        "host_memory", host_memory, auto=AUTO_SHARE, free=lambda: free_memory() / sharing
    )
    parts = [layout.num_tables * (row_bytes(layout) + FRAME_BYTES) for layout in layouts]
    return [
        SsdOptions(folder=Path(folder), cache_bytes=int(memory * part / sum(parts)))
        for part in parts
    ]
