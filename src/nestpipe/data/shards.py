"""An epoch's order in virtual shards, so that each rank reads only its share of the data.

The chunks, in an order that the seed decides, are one long row of samples. It is cut into V ranges
of equal size, the shards; in each, windows are permuted. Position p of the epoch is the next sample
of shard `turn[p % V]`: the shards take turns. Global batch g is positions [g G, (g + 1) G), listed
shard by shard, and rank r has the r-th contiguous part of that list: samples of few shards.
So the batches are the same for any number of ranks, and each rank reads its shards alone. Where
ranks do not divide the shards, or batches the turns, neighbours read a shard that they share.

For the windows of a shard, pieces of files are read one after the other, and permuted. Native code
takes each column of a piece while it is still in the cache, and spreads it over all windows that
the piece has samples of; so files are decoded column by column where they can be. A window that
begins in one piece and ends in another is kept in parts until all of it is there. The plain twin
joins pieces of all columns and selects from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.batch import Batch, BatchLayout, EqualLengths, PackedColumns
from nestpipe.data.order import Order, ShardWindows, Share
from nestpipe.data.text import Broken
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.take import (
    Filling,
    PieceColumns,
    RowForm,
    RowSpan,
    Target,
    rows_of,
    take,
)

# Shapes: B samples

I64 = NDArray[np.int64]
EDGE = 65_536
"""Samples at most that one shard keeps for the one before it, instead of reading them twice."""

Fill = Callable[[Filling], None]
"""Hands one column to windows."""


@dataclass(frozen=True, slots=True)
class PieceForm:
    """The columns of a piece."""

    dense: tuple[tuple[str, RowForm], ...]
    sparse: tuple[str, ...]

    @property
    def rows(self) -> tuple[RowForm, ...]:
        return tuple(form for _, form in self.dense)


class ColumnPiece(Protocol):
    """Neighbouring samples whose columns are decoded one after the other."""

    @property
    def size(self) -> int: ...

    @property
    def form(self) -> PieceForm: ...

    def columns(self) -> Iterator[Fill]:
        """Each column; its memory is good until the next one is asked for."""
        ...

    def kept(self, first: int, end: int) -> PieceColumns | None:
        """Some samples for later, where they are; None: they must be copied."""
        ...


class Readable(Protocol):
    """Neighbouring samples of one file, as `Chunk` has them."""

    def read(self, broken: Broken, /) -> Iterator[Batch]: ...

    @property
    def read_columns(self) -> Callable[[Broken], Iterator[ColumnPiece]] | None:
        """The same samples column by column, where that can be done."""
        ...


@dataclass(frozen=True, slots=True)
class DecodedPiece:
    """A piece whose columns are all there."""

    samples: Batch
    single: frozenset[str]
    """Columns of keys that have one for each sample."""

    @property
    def size(self) -> int:
        return self.samples.size

    @property
    def form(self) -> PieceForm:
        dense = self.samples.dense.items()
        return PieceForm(
            tuple((name, RowForm(tuple(one.shape[1:]), one.dtype)) for name, one in dense),
            tuple(self.samples.sparse),
        )

    def kept(self, first: int, end: int) -> PieceColumns:
        """Some samples for later, where they are."""
        columns = Piece.of(self.samples.slice(first, end), self.single, native=True).samples
        assert isinstance(columns, PieceColumns), "native code picks from it"
        return columns

    def columns(self) -> Iterator[Fill]:
        for number, rows in enumerate(self.samples.dense.values()):
            yield partial(Filling.add_rows, column=number, values=rows.numpy())
        for number, (name, keys) in enumerate(self.samples.sparse.items()):
            values = keys.values.contiguous().numpy()
            if name in self.single:
                yield partial(Filling.add_single, column=number, values=values)
            else:
                offsets = keys.offsets.contiguous().numpy()
                yield partial(Filling.add_lists, column=number, offsets=offsets, values=values)


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples as they were read, or a window of them."""

    size: int
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    samples: Batch | PieceColumns
    """The latter where native code picks from it."""

    @classmethod
    def of(cls, samples: Batch, single: frozenset[str], *, native: bool) -> Piece:
        names = (tuple(samples.dense), tuple(samples.sparse))
        if not native:
            return cls(samples.size, *names, samples)
        lists = [
            (keys.values, None if name in single else keys.offsets)
            for name, keys in samples.sparse.items()
        ]
        columns = PieceColumns.of(samples.size, lists, list(samples.dense.values()))
        return cls(samples.size, *names, columns)


Held = tuple[Piece, int, int]
"""Samples [first, end) of a piece."""


class WindowReader(Protocol):
    """Reads the windows of one shard in their order; may jump ahead, never back."""

    keeps_edge: bool
    """Whether the shard before is read here too."""

    def read(self, window: int) -> list[Held]:
        """The samples of a window, in their order."""
        ...


Ranges = Sequence[tuple[int, int, int]]
"""(chunk, first, end) of a shard, in order."""


# Column by column, in native code.


KeptPieces = list[tuple[PieceForm, PieceColumns]]
ColumnEdges = dict[tuple[int, int], KeptPieces]
"""By chunk and `end`: its samples [0, end), which the shard after them had to read to get there."""


@dataclass(frozen=True, slots=True)
class _KeptPiece:
    """What one shard kept for the one before it."""

    form: PieceForm
    samples: PieceColumns

    @property
    def size(self) -> int:
        return self.samples.size

    def columns(self) -> Iterator[Fill]:
        yield partial(Filling.add_piece, piece=self.samples)

    def kept(self, first: int, end: int) -> PieceColumns | None:
        return self.samples if first == 0 and end == self.size else None


class ColumnReader:
    """Fills all windows that a piece has samples of, column by column."""

    def __init__(
        self,
        chunks: Sequence[Readable],
        ranges: Ranges,
        broken: Broken,
        windows: ShardWindows,
        single: frozenset[str],
        edges: ColumnEdges,
    ) -> None:
        self.keeps_edge = False
        self._chunks, self._ranges = chunks, list(ranges)
        self._broken, self._single = broken, single
        self._windows, self._edges = windows, edges
        self._pieces: Iterator[ColumnPiece] | None = None
        self._at = 0
        """The shard's sample that the next piece begins with ..."""
        self._row = 0
        """... its row in the piece ..."""
        self._left = 0
        """... and how many of the chunk's samples are the shard's from there on."""
        self._edge: tuple[tuple[int, int], KeptPieces] | None = None
        self._kept: list[PieceColumns] = []
        """Parts of a window that is not complete yet ..."""
        self._kept_window = -1
        """... and which that is."""
        self._ready: dict[int, Piece] = {}

    def read(self, window: int) -> list[Held]:
        while window not in self._ready:
            self._advance(window)
        found = self._ready[window]
        self._ready = {number: piece for number, piece in self._ready.items() if number > window}
        return [(found, 0, found.size)]

    def _advance(self, window: int) -> None:
        """Read one piece; only windows from this one on are wanted."""
        if self._kept_window < window:
            self._kept = []
        if self._pieces is None:
            self._open(self._windows.bounds(window)[0])
        assert self._pieces is not None
        piece = next(self._pieces, None)
        if piece is None:
            raise DataError(FEWER_ROWS)
        before = min(self._row, piece.size)
        size = min(piece.size - before, self._left)
        self._fill(piece, before, size, window)
        self._row -= before
        self._at += size
        self._left -= size
        if not self._left:
            self._pieces = None

    def _open(self, sample: int) -> None:
        """Begin the chunk that has a sample; those wholly before it are not read."""
        sample = max(sample, self._at)
        chunk, first, end = self._ranges.pop(0)
        while sample >= self._at + end - first:
            self._at += end - first
            chunk, first, end = self._ranges.pop(0)
        kept = self._edges.pop((chunk, end), None)
        self._pieces = self._kept_pieces(kept) if kept else self._read(chunk)
        self._row, self._left = first, end - first
        wanted = self.keeps_edge and 0 < first <= EDGE
        self._edge = ((chunk, first), []) if wanted else None

    @staticmethod
    def _kept_pieces(kept: KeptPieces) -> Iterator[ColumnPiece]:
        return (_KeptPiece(form, columns) for form, columns in kept)

    def _read(self, chunk: int) -> Iterator[ColumnPiece]:
        by_column = self._chunks[chunk].read_columns
        if by_column is not None:
            return by_column(self._broken)
        pieces = self._chunks[chunk].read(self._broken)
        return (DecodedPiece(piece, self._single) for piece in pieces)

    def _fill(self, piece: ColumnPiece, row: int, size: int, window: int) -> None:
        """Have the windows from one on of the samples that begin in a row, and the edge before."""
        form, end = piece.form, self._at + size
        wanted = [number for number in self._windows.between(self._at, end) if number >= window]
        targets = {number: self._target(number, row, end) for number in wanted if size}
        edge = [Target(0, row)] if row and self._edge else []
        whole = [number for number, target in targets.items() if target.order_B is not None]
        last = targets[wanted[-1]] if len(whole) < len(targets) else None
        kept = piece.kept(last.first, last.end) if last else None
        filled = [targets[number] for number in (whole if kept else targets)]
        fillings = [Filling(some, len(form.sparse), form.rows) for some in (filled, edge) if some]
        for column in piece.columns() if fillings else ():
            for filling in fillings:
                column(filling)
        found = fillings[0].pieces() if filled else []
        self._add(form, whole, found[: len(whole)])
        if last:
            self._keep(wanted[-1], kept or found[-1])
        if edge:
            self._keep_edge(form, fillings[-1].pieces()[0], complete=row == self._row)

    def _target(self, window: int, row: int, end: int) -> Target:
        """What a window has of samples up to `end`; the row is that of sample `at`."""
        low, high = self._windows.bounds(window)
        first, stop = max(low, self._at), min(high, end)
        rows = (row + first - self._at, row + stop - self._at)
        if stop < high:  # the window goes on: this part of it is kept as it is
            return Target(*rows)
        kept = tuple(self._kept) if first > low else ()
        assert sum(part.size for part in kept) == first - low, "a part of a window is missing"
        return Target(*rows, kept, self._windows.permutation(window))

    def _add(self, form: PieceForm, whole: Sequence[int], filled: Sequence[PieceColumns]) -> None:
        """Windows that are complete."""
        dense = tuple(name for name, _ in form.dense)
        for window, columns in zip(whole, filled, strict=True):
            self._ready[window] = Piece(columns.size, dense, form.sparse, columns)

    def _keep(self, window: int, part: PieceColumns) -> None:
        self._kept = [*(self._kept if self._kept_window == window else ()), part]
        self._kept_window = window

    def _keep_edge(self, form: PieceForm, columns: PieceColumns, *, complete: bool) -> None:
        assert self._edge is not None
        place, kept = self._edge
        kept.append((form, columns))
        if complete:
            self._edges[place] = kept
            self._edge = None


FEWER_ROWS = "a file has fewer rows than when it was opened; start again once it is whole"


# All columns of a piece at once: samples that keep their order, and the plain twin.


Edges = dict[tuple[int, int], list[Batch]]
"""As `ColumnEdges`, of whole batches."""


class PieceReader:
    """Reads pieces with all of their columns."""

    def __init__(
        self,
        chunks: Sequence[Readable],
        ranges: Ranges,
        broken: Broken,
        windows: ShardWindows,
        single: frozenset[str],
        edges: Edges,
        *,
        native: bool,
    ) -> None:
        self.keeps_edge = False
        self._edges = edges
        self._chunks = chunks
        self._ranges = list(ranges)
        self._broken = broken
        self._windows = windows
        self._single = single
        self._native = native
        self._pieces: Iterator[Batch] | None = None
        self._piece: Piece | None = None
        self._at = 0
        """The shard's sample that the next piece begins with."""
        self._row = 0
        """The row of the next piece that is the shard's sample `at`."""

    def read(self, window: int) -> list[Held]:
        low, high = self._windows.bounds(window)
        pieces: list[Piece] = []
        spans: list[RowSpan] = []
        while low < high:
            piece, first, row = self._piece_with(low)
            size = min(high, first + piece.size - row) - low
            begin = row + low - first
            spans.append(RowSpan(len(pieces), begin, begin + size))
            pieces.append(piece)
            low += size
        order_B = self._windows.permutation(window)
        if order_B is None:
            return [(pieces[span.piece], span.first, span.end) for span in spans]
        batches = [piece.samples for piece in pieces if isinstance(piece.samples, Batch)]
        found = Piece.of(pick_plainly(batches, spans, order_B), self._single, native=False)
        return [(found, 0, found.size)]

    def _piece_with(self, sample: int) -> tuple[Piece, int, int]:
        """The piece with a sample, its first sample in the shard, and that one's row."""
        while True:
            if self._piece is not None:
                if sample < self._at + self._piece.size - self._row:
                    return self._piece, self._at, self._row
                self._at += self._piece.size - self._row
                self._row, self._piece = 0, None
            self._next_piece(sample)

    def _next_piece(self, sample: int) -> None:
        if self._pieces is None:
            self._open(sample)
        assert self._pieces is not None
        found = next(self._pieces, None)
        if found is None:
            self._pieces = None
        elif self._row >= found.size:  # before the shard begins
            self._row -= found.size
        else:
            self._piece = Piece.of(found, self._single, native=self._native)

    def _open(self, sample: int) -> None:
        """Begin the chunk that has a sample; those wholly before it are not read."""
        chunk, first, end = self._ranges.pop(0)
        while sample >= self._at + end - first:
            self._at += end - first
            chunk, first, end = self._ranges.pop(0)
        kept = self._edges.pop((chunk, end), None)
        pieces = _until(iter(kept) if kept else self._chunks[chunk].read(self._broken), end)
        if self.keeps_edge and 0 < first <= EDGE:
            pieces = _keeping(pieces, first, self._edges, chunk)
        self._row, self._pieces = first, pieces


def _keeping(pieces: Iterator[Batch], end: int, edges: Edges, chunk: int) -> Iterator[Batch]:
    """The same pieces; the first `end` samples are kept for the shard before this one."""
    kept: list[Batch] = []
    left = end
    for piece in pieces:
        if left > 0:
            kept.append(piece.slice(0, min(left, piece.size)))
            left -= piece.size
            if left <= 0:
                edges[chunk, end] = kept
        yield piece


def _until(pieces: Iterator[Batch], end: int) -> Iterator[Batch]:
    """The first `end` samples of a chunk; the last piece may be cut."""
    for piece in pieces:
        yield piece if piece.size <= end else piece.slice(0, end)
        end -= piece.size
        if end <= 0:
            return
    raise DataError(FEWER_ROWS)


# Batches from windows.


def pick(pieces: Sequence[Piece], spans: Sequence[RowSpan], *, pinned: bool = False) -> Batch:
    """The samples of these spans of pieces behind each other; packed by native code.

    `pinned`: into memory that a GPU copies from, where it is native code that packs.
    """
    batches = [one.samples for one in pieces if isinstance(one.samples, Batch)]
    if batches:
        return pick_plainly(batches, spans)
    columns = [one.samples for one in pieces if isinstance(one.samples, PieceColumns)]
    taken, like = take(columns, spans, pinned=pinned), pieces[0]
    dense = zip(like.dense, columns[0].forms, strict=True)
    layout = BatchLayout.shared(
        taken.size,
        tuple((name, (taken.size, *form.shape), form.dtype) for name, form in dense),
        tuple(zip(like.sparse, taken.num_keys_L, strict=True)),
    )
    equal = EqualLengths.of(taken.parts, layout)
    return PackedColumns(taken.parts, layout, frozenset(like.sparse), equal).batch()


def pick_plainly(
    batches: Sequence[Batch], spans: Sequence[RowSpan], order_B: I64 | None = None
) -> Batch:
    """The same by joining all pieces first: the twin of the native form."""
    piece_B, row_B = rows_of(spans)
    begins = np.cumsum([0, *(batch.size for batch in batches[:-1])])
    place_B = begins[piece_B] + row_B
    chosen_B = place_B if order_B is None else place_B[order_B]
    return concat(batches).select(torch.from_numpy(chosen_B))


def concat(batches: Sequence[Batch]) -> Batch:
    """The samples of several batches of the same columns, one after the other."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    return Batch(
        sum(batch.size for batch in batches),
        {name: torch.cat([batch.dense[name] for batch in batches]) for name in first.dense},
        {
            name: Jagged(
                torch.cat([batch.sparse[name].values for batch in batches]),
                torch.cat([batch.sparse[name].lengths for batch in batches]),
            )
            for name in first.sparse
        },
    )


class _Held:
    """The samples of one shard that are read and not used yet, in their order."""

    def __init__(self) -> None:
        self.end = 0
        self._pieces: list[tuple[int, Held]] = []
        """Each with the shard's sample that it begins with."""

    def add(self, pieces: Sequence[Held]) -> None:
        for piece, first, end in pieces:
            self._pieces.append((self.end, (piece, first, end)))
            self.end += end - first

    def forget(self, begin: int) -> None:
        """Drop pieces that end before `begin`; where all do, go on there."""
        self._pieces = [(at, held) for at, held in self._pieces if at + held[2] - held[1] > begin]
        if not self._pieces:
            self.end = max(self.end, begin)

    def spans(self, first: int, end: int) -> Iterator[Held]:
        """Where samples [first, end) are."""
        for at, (piece, row, stop) in self._pieces:
            low, high = max(first, at), min(end, at + stop - row)
            if low < high:
                yield piece, row + low - at, row + high - at


class ShardedPass:
    """One rank's pass over an epoch: reads windows ahead in threads, and deals batches."""

    def __init__(
        self,
        chunks: Sequence[Readable],
        order: Order,
        broken: Broken,
        empty: Batch,
        *,
        single: frozenset[str] = frozenset(),
        threads: int = 1,
        pinned: bool = False,
    ) -> None:
        self._order, self._turns = order, order.turns
        self._size_V = self._turns.counts(self._turns.samples)
        self._readers = _readers(chunks, order, broken, single)
        self._held = [_Held() for _ in self._readers]
        self._ahead: dict[int, tuple[int, Future[list[Held]]]] = {}
        self._threads, self._pinned = threads, pinned
        self._empty = empty

    def deal(self, share: Share) -> Iterator[Batch]:
        """This rank's part of each global batch from the first that is wanted on."""
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="reader")
        self._keep_edges(share)
        try:
            for begin in range(share.first, self._turns.samples, share.global_batch):
                parts = list(self._turns.parts(share, begin))
                for shard, first, end in parts:
                    self._load(pool, shard, first, end)
                yield self._take(parts)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep_edges(self, share: Share) -> None:
        """Two neighbouring shards of this rank read the chunk at their edge once."""
        mine = {shard for shard, _, _ in self._turns.parts(share, share.first)}
        for shard in mine:
            self._readers[shard].keeps_edge = shard - 1 in mine

    def _load(self, pool: ThreadPoolExecutor, shard: int, first: int, end: int) -> None:
        """Have samples [first, end) of a shard; the window after them is asked for."""
        held, size = self._held[shard], self._order.shard_window
        if held.end < end:
            # Windows that end before the first sample wanted here are other ranks'.
            held.forget(first if held.end > first else first // size * size)
        while held.end < end:
            window = held.end // size
            held.add(self._ask(pool, shard, window).result())
            del self._ahead[shard]
            if held.end < self._size_V[shard]:
                self._ask(pool, shard, window + 1)

    def _ask(self, pool: ThreadPoolExecutor, shard: int, window: int) -> Future[list[Held]]:
        """A window of a shard, asked for now where it was not before."""
        waiting = self._ahead.get(shard)
        if waiting is not None and waiting[0] == window:
            return waiting[1]
        if waiting is not None:
            waiting[1].result()  # a shard has one reader
        future = pool.submit(self._readers[shard].read, window)
        self._ahead[shard] = (window, future)
        return future

    def _take(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        pieces: list[Piece] = []
        spans: list[RowSpan] = []
        for shard, first, end in parts:
            for piece, low, high in self._held[shard].spans(first, end):
                spans.append(RowSpan(len(pieces), low, high))
                pieces.append(piece)
        return pick(pieces, spans, pinned=self._pinned) if pieces else self._empty


def _readers(
    chunks: Sequence[Readable], order: Order, broken: Broken, single: frozenset[str]
) -> list[WindowReader]:
    """One for each shard: column by column where samples are permuted by native code."""
    native, ranges, windows = native_wanted(), order.ranges(), order.windows()
    if native and order.shuffle:
        shared: ColumnEdges = {}
        return [
            ColumnReader(chunks, of_shard, broken, of, single, shared)
            for of_shard, of in zip(ranges, windows, strict=True)
        ]
    edges: Edges = {}
    return [
        PieceReader(chunks, of_shard, broken, of, single, edges, native=native)
        for of_shard, of in zip(ranges, windows, strict=True)
    ]
