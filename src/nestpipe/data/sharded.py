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

from nestpipe.batch import Batch
from nestpipe.data.order import Order, Share
from nestpipe.data.readers.text import Broken
from nestpipe.data.windows import (
    ColumnEdges,
    ColumnReader,
    Edges,
    Held,
    Piece,
    PieceReader,
    Readable,
    WindowReader,
    pick,
)
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.take import RowSpan


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
        self._order, self._turns = order, order.turns
        self._size_V = self._turns.counts(self._turns.samples)
        self._readers = _readers(chunks, order, broken, single)
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
        return pick(pieces, spans) if pieces else self._empty


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
