"""An epoch's order in virtual shards, so that each rank reads only its share of the data.

The chunks, in an order that the seed decides, are one long row of samples. It is cut into V ranges
of equal size, the shards; in each, windows are permuted. Position p of the epoch is the next sample
of shard `turn[p % V]`: the shards take turns. Global batch g is positions [g G, (g + 1) G), listed
shard by shard, and rank r has the r-th contiguous part of that list: samples of few shards.
So the batches are the same for any number of ranks, and each rank reads its shards alone. Where
ranks do not divide the shards, or batches the turns, neighbours read a shard that they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.order import Permutation, Share, mix
from nestpipe.data.readers.text import Broken
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.take import (
    PieceColumns,
    RowSpan,
    rows_of,
    take,
    take_permuted,
)

# Shapes: B samples, V shards

I64 = NDArray[np.int64]
SHARD_WINDOW = 8_192
"""Samples that a shard's window has at least, where the number of shards is chosen."""
MOST_SHARDS = 64
"""Shards at most, where their number is chosen."""
EDGE = 65_536
"""Samples at most that one shard keeps for the one before it, instead of reading them twice."""


def choose_shards(wanted: int, window: int, num_chunks: int) -> int:
    """How many shards: as wanted, or a power of two with windows and chunks enough for each."""
    if wanted:
        return wanted
    most = max(1, min(MOST_SHARDS, window // SHARD_WINDOW, num_chunks // 2))
    return 1 << (most.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class Turns:
    """Which shard has the sample at each position of an epoch."""

    shards: int
    samples: int
    place_V: I64 = field(init=False)
    """When in a round each shard has its turn."""

    def __post_init__(self) -> None:
        # Shards far apart follow each other: a part of a round is spread over all ranks.
        bits = max(1, (self.shards - 1).bit_length())
        reversed_ = [int(f"{shard:0{bits}b}"[::-1], 2) for shard in range(self.shards)]
        turn = np.argsort(reversed_, kind="stable")
        place_V = np.empty(self.shards, dtype=np.int64)
        place_V[turn] = np.arange(self.shards)
        object.__setattr__(self, "place_V", place_V)

    def counts(self, position: int) -> I64:
        """(V,) samples of each shard before a position."""
        rounds, rest = divmod(position, self.shards)
        return rounds + (self.place_V < rest)

    def parts(self, share: Share, begin: int) -> Iterator[tuple[int, int, int]]:
        """This rank's part of the batch that begins there: (shard, first, end), shard by shard."""
        end = min(begin + share.global_batch, self.samples)
        first_V = self.counts(begin)
        size_V = self.counts(end) - first_V
        before_V = np.cumsum(size_V) - size_V
        low, high = share.part(end - begin)
        from_V = np.clip(low - before_V, 0, size_V)
        to_V = np.clip(high - before_V, 0, size_V)
        for shard in np.flatnonzero(to_V > from_V).tolist():
            first = int(first_V[shard])
            yield shard, first + int(from_V[shard]), first + int(to_V[shard])


class Readable(Protocol):
    """Neighbouring samples of one file, as `Chunk` has them."""

    def read(self, broken: Broken, /) -> Iterator[Batch]: ...


@dataclass(frozen=True, slots=True)
class Order:
    """The order of one epoch; a function of the data, the seed, the epoch and these sizes."""

    counts: Sequence[int]
    """Samples of each chunk."""
    key: int
    """Of the seed and the epoch."""
    window: int
    """Samples that are permuted at a time, of all shards together."""
    shards: int
    shuffle: bool

    @property
    def turns(self) -> Turns:
        return Turns(self.shards, sum(self.counts))

    @property
    def shard_window(self) -> int:
        return max(1, self.window // self.shards)

    def window_order(self, shard: int, window: int, size: int) -> I64 | None:
        """How a window's samples are permuted; None: not at all.

        One shard alone has the order of a stream without shards.
        """
        if not self.shuffle:
            return None
        alone = self.shards == 1
        key = mix(self.key, window) if alone else mix(self.key, 1 + shard, window)
        return Permutation(size, key)(np.arange(size, dtype=np.int64))

    def chunk_order(self) -> list[int]:
        numbers = np.arange(len(self.counts), dtype=np.int64)
        return (Permutation(len(numbers), self.key)(numbers) if self.shuffle else numbers).tolist()

    def ranges(self) -> list[list[tuple[int, int, int]]]:
        """For each shard its (chunk, first, end), in order."""
        turns = self.turns
        size_V = turns.counts(turns.samples)
        cuts = [0, *np.cumsum(size_V).tolist()]
        chunks = self.chunk_order()
        begins = [0, *np.cumsum([self.counts[chunk] for chunk in chunks]).tolist()]
        found: list[list[tuple[int, int, int]]] = []
        for low, high in pairwise(cuts):
            first = int(np.searchsorted(begins, low, side="right")) - 1
            of_shard: list[tuple[int, int, int]] = []
            for number in range(first, len(chunks)):
                begin, end = begins[number], begins[number + 1]
                if begin >= high:
                    break
                if end > low and end > begin:
                    of_shard.append(
                        (chunks[number], max(low, begin) - begin, min(high, end) - begin)
                    )
            found.append(of_shard)
        return found


@dataclass(frozen=True, slots=True)
class Form:
    """How samples are picked."""

    single: frozenset[str]
    """Columns of keys that have one for each sample."""
    native: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples as they were read, or a window of them."""

    size: int
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    samples: Batch | PieceColumns
    """The latter where native code picks from it."""

    @classmethod
    def of(cls, samples: Batch, form: Form) -> Piece:
        names = (tuple(samples.dense), tuple(samples.sparse))
        if not form.native:
            return cls(samples.size, *names, samples)
        lists = [
            (keys.values, None if name in form.single else keys.offsets)
            for name, keys in samples.sparse.items()
        ]
        columns = PieceColumns.of(lists, list(samples.dense.values()))
        return cls(samples.size, *names, columns)


Held = tuple[Piece, int, int]
"""Samples [first, end) of a piece."""

Edges = dict[tuple[int, int], list[Batch]]
"""By chunk and `end`: its samples [0, end), which the shard after them had to read to get there."""


class ShardReader:
    """Reads one shard from its beginning to its end; may jump ahead, never back."""

    def __init__(
        self,
        chunks: Sequence[Readable],
        ranges: Sequence[tuple[int, int, int]],
        broken: Broken,
        form: Form,
        edges: Edges,
    ) -> None:
        self.keeps_edge = False
        """Whether the shard before is read here too."""
        self._edges = edges
        self._chunks = chunks
        self._ranges = list(ranges)
        self._broken = broken
        self._form = form
        self._pieces: Iterator[Batch] | None = None
        self._piece: Piece | None = None
        self._at = 0
        """The shard's sample that the next piece begins with."""
        self._row = 0
        """The row of the next piece that is the shard's sample `at`."""

    def read(self, low: int, high: int, order: I64 | None) -> list[Held]:
        """Samples [low, high) of the shard, in an order that is applied to all of them."""
        pieces: list[Piece] = []
        spans: list[RowSpan] = []
        while low < high:
            piece, first, row = self._piece_with(low)
            size = min(high, first + piece.size - row) - low
            begin = row + low - first
            spans.append(RowSpan(len(pieces), begin, begin + size))
            pieces.append(piece)
            low += size
        if order is None:
            return [(pieces[span.piece], span.first, span.end) for span in spans]
        window = permute(pieces, spans, order)
        return [(window, 0, window.size)]

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
            self._piece = Piece.of(found, self._form)

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
    raise DataError("a file has fewer rows than when it was opened; start again once it is whole")


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
    ) -> None:
        form = Form(single, native_wanted())
        self._order, self._turns = order, order.turns
        self._size_V = self._turns.counts(self._turns.samples)
        edges: Edges = {}
        self._readers = [
            ShardReader(chunks, ranges, broken, form, edges) for ranges in order.ranges()
        ]
        self._held = [_Held() for _ in self._readers]
        self._ahead: dict[int, tuple[int, Future[list[Held]]]] = {}
        self._threads = threads
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
        future = pool.submit(self._read, shard, window)
        self._ahead[shard] = (window, future)
        return future

    def _read(self, shard: int, window: int) -> list[Held]:
        low = window * self._order.shard_window
        high = min(low + self._order.shard_window, int(self._size_V[shard]))
        order = self._order.window_order(shard, window, high - low)
        return self._readers[shard].read(low, high, order)

    def _take(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        pieces: list[Piece] = []
        spans: list[RowSpan] = []
        for shard, first, end in parts:
            for piece, low, high in self._held[shard].spans(first, end):
                spans.append(RowSpan(len(pieces), low, high))
                pieces.append(piece)
        return pick(pieces, spans) if pieces else self._empty


def pick(pieces: Sequence[Piece], spans: Sequence[RowSpan]) -> Batch:
    """The samples of these spans of pieces behind each other."""
    columns, batches = _native_or_plain(pieces)
    if batches:
        return pick_plainly(batches, spans)
    lists, rows = take(columns, spans)
    return Batch(
        sum(span.end - span.first for span in spans),
        dict(zip(pieces[0].dense, rows, strict=True)),
        {name: Jagged(*found) for name, found in zip(pieces[0].sparse, lists, strict=True)},
    )


def permute(
    pieces: Sequence[Piece],
    spans: Sequence[RowSpan],
    order_B: I64,
) -> Piece:
    """The same samples in this order, to be picked from."""
    columns, batches = _native_or_plain(pieces)
    found = (
        pick_plainly(batches, spans, order_B) if batches else take_permuted(columns, spans, order_B)
    )
    return Piece(len(order_B), pieces[0].dense, pieces[0].sparse, found)


def _native_or_plain(pieces: Sequence[Piece]) -> tuple[list[PieceColumns], list[Batch]]:
    """Pieces of a pass are all of one form: the other list is empty."""
    columns = [one.samples for one in pieces if isinstance(one.samples, PieceColumns)]
    return columns, [one.samples for one in pieces if isinstance(one.samples, Batch)]


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
