"""The contract between data sets and training: exact batches for any number of ranks.

The contract: the order of samples is a function of (data, seed, epoch) alone. Global batch g is
samples [g G, (g + 1) G) of that order, and rank r has the r-th contiguous part of it. So 1, 2 and 4
ranks see the same global batches, and a run that resumes at batch g sees what it would have seen.

An `Indexed` source has its samples by number. A `Stream` only reads them in passing: its chunks (a
file, a row group) come in an order that the seed decides, are cut into windows, and each window is
permuted. Where the chunks say how many samples they have, `data/shards.py` deals them, so that
each rank reads its share; else every rank reads and decodes all, and keeps its part of each batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, Split
from nestpipe.data.order import Order, Permutation, Share, choose_shards, mix
from nestpipe.data.shards import ColumnPiece, ShardedPass, concat
from nestpipe.data.text import Broken
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged

log = logging.getLogger("nestpipe.data")

DENSE = "features"
"""Name of the column that holds all dense features, (size, features)."""
LABEL = "label"
HISTORY = "history"
TARGET = "target"
TIMESTAMPS = "timestamps"
"""When each item of `history` was chosen: lists of the same lengths, whole seconds."""
TIME = "time"
"""When the sample itself was: of `target`, of the candidates, or of the event; whole seconds."""
SAMPLE_ID, PASS = "sample_id", "step"
"""Which sample it is, and in which pass over the data: what is drawn for it follows from both."""

WEIGHT = "weight"
"""Weight of a sample's loss, float32."""

MISSING = -1
"""The key of a category that is not known; features of one key per sample always have one."""


ListKind = Literal["keys", "weights", "times"]


@dataclass(frozen=True, slots=True)
class Column:
    """One entry of a batch."""

    name: str
    kind: ListKind | Literal["features", "label", "weight", "target", "time", "id"]
    """Lists are in `Batch.sparse`, the rest is in `Batch.dense`."""
    dtype: Literal["int64", "float32"]
    fields: tuple[str, ...] = ()
    """For `features`: what each of the tensor's columns is."""
    single: bool = False
    """For `keys`: every sample has exactly one."""
    of: str = ""
    """For `weights`: the column of keys that they are of."""
    max_key: int | None = field(default=None, compare=False)
    """For a `history`: the greatest key there is in any split, where that is known."""
    items: Callable[[], NDArray[np.int64]] | None = field(default=None, compare=False, repr=False)
    """For a `history`: reads the different keys of all splits, sorted, where that can be done."""

    @property
    def is_list(self) -> bool:
        """Whether it is in `Batch.sparse`."""
        return self.kind in get_args(ListKind)

    def empty(self) -> Tensor:
        shape = (0, len(self.fields)) if self.kind == "features" else (0,)
        return torch.empty(shape, dtype=getattr(torch, self.dtype))


@runtime_checkable
class Source(Protocol):
    """Samples in an order that only the data, the seed and the epoch decide."""

    @property
    def columns(self) -> tuple[Column, ...]: ...

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, or None where only reading all of them would tell."""
        ...

    @property
    def broken(self) -> Broken:
        """Rows that the latest pass has skipped so far."""
        ...

    def batches(
        self,
        *,
        global_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        offset: int = 0,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from `start` on; every rank gets as many.

        `offset` skips that many samples more.
        """
        ...

    def empty(self) -> Batch:
        """A batch of the same columns without samples."""
        ...


@runtime_checkable
class PinsBatches(Protocol):
    """A source that can put batches into pinned memory itself, which saves a copy."""

    pinned: bool
    """Whether it does, for passes that begin from now on."""


def keys_column(name: str, single: bool = False) -> Column:
    """A column of 64-bit keys."""
    return Column(name, "keys", "int64", single=single)


def weights_column(name: str, of: str) -> Column:
    """A column of weights, one for each key of another."""
    return Column(name, "weights", "float32", of=of)


def weight_column() -> Column:
    """The column of samples' weights."""
    return Column(WEIGHT, "weight", "float32")


def history_column(
    max_key: int | None = None, items: Callable[[], NDArray[np.int64]] | None = None
) -> Column:
    """The column of users' items."""
    return Column(HISTORY, "keys", "int64", max_key=max_key, items=items)


def times_column() -> Column:
    """The column of times beside `history`."""
    return Column(TIMESTAMPS, "times", "int64")


def time_column() -> Column:
    """The column of the samples' own times."""
    return Column(TIME, "time", "int64")


def features_column(fields: Sequence[str]) -> Column:
    """The column of all dense features."""
    return Column(DENSE, "features", "float32", tuple(fields))


def label_column(name: str = LABEL) -> Column:
    """A column of labels."""
    return Column(name, "label", "float32")


def pass_column() -> Column:
    """The column of passes, beside that of the samples' names."""
    return Column(PASS, "id", "int64")


def empty_batch(columns: Sequence[Column]) -> Batch:
    """No samples of these columns."""
    return Batch(
        0,
        {column.name: column.empty() for column in columns if not column.is_list},
        {
            column.name: Jagged(column.empty(), column.empty())
            for column in columns
            if column.is_list
        },
    )


def as_words(weights: NDArray[np.floating]) -> NDArray[np.int64]:
    """Weights as readers move them, in the 64 bits of a key each."""
    return weights.astype(np.float64).view(np.int64)


def with_weights(batches: Iterator[Batch], columns: Sequence[Column]) -> Iterator[Batch]:
    """The same batches, with weights as numbers again."""
    names = {column.name for column in columns if column.kind == "weights"}
    return (_with_weights(batch, names) for batch in batches) if names else batches


def _with_weights(batch: Batch, names: Set[str]) -> Batch:
    sparse = dict(batch.sparse)
    for name in names:
        words = sparse[name]
        if words.values.dtype == torch.int64:  # of an empty batch they are numbers already
            numbers = words.values.view(torch.float64).to(torch.float32)
            sparse[name] = Jagged(numbers, words.lengths)
    return Batch(batch.size, batch.dense, sparse)


def watch_labels(batches: Iterator[Batch], columns: Sequence[Column]) -> Iterator[Batch]:
    """The same batches; says at their end where a label never changed."""
    found: dict[str, float] = {}
    names = {column.name for column in columns if column.kind == "label"}
    samples = 0
    for batch in batches:
        samples += batch.size
        for name in sorted(names) if batch.size else ():
            low, high = (float(bound) for bound in torch.aminmax(batch.dense[name]))
            if low != high or found.setdefault(name, low) != low:
                names.discard(name)  # it changes, so it is not looked at again
        yield batch
    for name in sorted(names & found.keys()) if samples > 1 else ():
        log.warning(
            "every %s of the pass was %g, so there was nothing to learn; check the labels",
            name,
            found[name],
        )


def tensor(array: NDArray[np.generic]) -> Tensor:
    """An array as a tensor, without a copy.

    Arrow's memory is read-only, and torch has no read-only tensors: nothing may write to batches.
    """
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_ReadOnly(array)))


class _ReadOnly:
    """Keeps an array, and shows its memory as if it might be written to."""

    def __init__(self, array: NDArray[np.generic]) -> None:
        self.array = array
        pointer, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


# Samples with random access, from memory or made on demand.


Take = Callable[[NDArray[np.int64]], Batch]
"""The samples of these numbers, in this order."""


class Indexed:
    """A source that makes exactly the samples that a rank asks for; shuffles all of them."""

    def __init__(
        self,
        columns: Sequence[Column],
        num_samples: int,
        take: Take,
        *,
        shuffle: bool = True,
        broken: Broken | None = None,
        name: str = "the data set",
    ) -> None:
        if num_samples == 0:
            raise DataError(f"{name} has no samples; check the split and the files")
        self._named = any(column.name == HISTORY for column in columns)
        ids = [Column(name, "id", "int64") for name in (SAMPLE_ID, PASS)] if self._named else []
        self._columns = (*columns, *ids)
        self._num_samples = num_samples
        self._take = take
        self._shuffle = shuffle
        self._broken = broken or Broken()

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def broken(self) -> Broken:
        return self._broken

    def empty(self) -> Batch:
        return empty_batch(self._columns)

    def batches(
        self,
        *,
        global_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        offset: int = 0,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from `start` on; every rank gets as many.

        `offset` skips that many samples more.
        """
        share = Share(global_batch=global_batch, rank=rank, ranks=ranks, start=start, offset=offset)
        batches = self._deal(share, Permutation(self._num_samples, mix(seed, epoch)), epoch)
        return watch_labels(batches, self._columns) if rank == 0 and not share.first else batches

    def _deal(self, share: Share, permutation: Permutation, epoch: int) -> Iterator[Batch]:
        step = share.global_batch
        for begin in range(share.first, self._num_samples, step):
            low, high = share.part(min(step, self._num_samples - begin))
            numbers = np.arange(begin + low, begin + high, dtype=np.int64)
            if not numbers.size:
                yield self.empty()
            else:
                numbers = permutation(numbers) if self._shuffle else numbers
                samples = self._take(numbers)
                yield _with_ids(samples, numbers, epoch) if self._named else samples


def _with_ids(samples: Batch, numbers: NDArray[np.int64], epoch: int) -> Batch:
    ids = torch.from_numpy(np.ascontiguousarray(numbers))
    return with_pass(Batch(samples.size, {**samples.dense, SAMPLE_ID: ids}, samples.sparse), epoch)


def with_pass(samples: Batch, epoch: int) -> Batch:
    """The same samples, which say in which pass over the data they come."""
    passes = torch.full_like(samples.dense[SAMPLE_ID], epoch)
    return Batch(samples.size, {**samples.dense, PASS: passes}, samples.sparse)


def from_memory(samples: Batch) -> Take:
    """Samples of a batch that holds them all."""
    return lambda numbers: samples.select(torch.from_numpy(numbers))


# Samples that can only be streamed, shuffled in windows.


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring samples of one file, readable from their beginning."""

    read: Callable[[Broken], Iterator[Batch]]
    """Pieces of bounded size; rows that cannot be read are reported to `Broken`."""
    count: Callable[[], int | None] = lambda: None
    """Samples that `read` will give, where that is known without reading them."""
    read_columns: Callable[[Broken], Iterator[ColumnPiece]] | None = None
    """The same samples, decoded column by column; not used where broken rows may be skipped."""


class Stream:
    """A source over chunks. The order is set by the seed, the epoch and the window's size.

    `broken` says how many broken rows are too many, and which there were before the first pass.
    """

    pinned = False
    """Whether batches of shards are picked into pinned memory."""

    def __init__(
        self,
        columns: Sequence[Column],
        chunks: Sequence[Chunk],
        *,
        window: int,
        shuffle: bool = True,
        shards: int = 1,
        threads: int = 1,
        broken: Broken | None = None,
        name: str = "the data set",
    ) -> None:
        """`shards` 0 chooses; they are used where the counts of all chunks are known."""
        self._named = any(column.name == SAMPLE_ID for column in columns)
        self._columns = (*columns, *([pass_column()] if self._named else []))
        self._chunks = tuple(chunks)
        self._window = window
        self._shuffle = shuffle
        self.shards = choose_shards(shards, window, len(self._chunks))
        self._threads = threads
        self._name = name
        self._opened = broken or Broken()
        self._broken = self._opened
        self._counts: dict[int, int | None] = {}

    @property
    def columns(self) -> tuple[Column, ...]:
        return self._columns

    @property
    def num_samples(self) -> int | None:
        total = 0
        for chunk in range(len(self._chunks)):
            count = self._count(chunk)
            if count is None:
                return None
            total += count
        return total

    @property
    def broken(self) -> Broken:
        return self._broken

    def empty(self) -> Batch:
        return empty_batch(self._columns)

    def batches(
        self,
        *,
        global_batch: int,
        rank: int,
        ranks: int,
        seed: int,
        epoch: int = 0,
        start: int = 0,
        offset: int = 0,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from `start` on; every rank gets as many.

        `offset` skips that many samples more.
        """
        share = Share(global_batch=global_batch, rank=rank, ranks=ranks, start=start, offset=offset)
        deal = self._deal if self.num_samples is None else self._deal_shards
        batches = with_weights(deal(share, mix(seed, epoch)), self._columns)
        if rank == 0 and not share.first:
            batches = watch_labels(batches, self._columns)
        return (with_pass(batch, epoch) for batch in batches) if self._named else batches

    def _deal_shards(self, share: Share, key: int) -> Iterator[Batch]:
        """This rank's batches, read from the shards that they come from."""
        counts = [self._count(chunk) or 0 for chunk in range(len(self._chunks))]
        if not sum(counts):
            raise DataError(f"{self._name} has no samples; check the split and the files")
        broken = self._broken = self._opened.copy()
        order = Order(counts, key, self._window, self.shards, self._shuffle)
        single = frozenset(column.name for column in self._columns if column.single)
        empty = empty_batch([column for column in self._columns if column.name != PASS])
        of_pass = {"single": single, "threads": self._threads, "pinned": self.pinned}
        return ShardedPass(self._chunks, order, broken, empty, **of_pass).deal(share)

    def _deal(self, share: Share, key: int) -> Iterator[Batch]:
        """Cut the windows into global batches, and keep this rank's part of each."""
        step, wanted = share.global_batch, share.first
        window = wanted // self._window
        position = window * self._window
        carry = self.empty()  # samples of all ranks that do not fill a batch yet
        for samples in self._windows(key, position):
            order = self._order(samples.size, mix(key, window))
            begin = max(0, wanted - position)
            if carry.size:
                begin = min(step - carry.size, samples.size)
                carry = concat([carry, samples.select(order[:begin])])
                if carry.size == step:
                    yield carry.slice(*share.part(step))
                    carry = self.empty()
            low, high = share.part(step)
            while begin + step <= samples.size:
                yield samples.select(order[begin + low : begin + high])
                begin += step
            if begin < samples.size:
                carry = samples.select(order[begin:])
            position += samples.size
            window += 1
        if carry.size:
            yield carry.slice(*share.part(carry.size))

    def _windows(self, key: int, drop: int) -> Iterator[Batch]:
        """Windows of the chunks' samples without the first `drop`, which are whole windows."""
        held: list[Batch] = []
        size = 0
        for piece in self._pieces(key, drop):
            rest = piece
            while size + rest.size >= self._window:
                cut = self._window - size
                yield concat([*held, rest.slice(0, cut)])
                held, size, rest = [], 0, rest.slice(cut, rest.size)
            if rest.size:
                held.append(rest)
                size += rest.size
        if held:
            yield concat(held)

    def _pieces(self, key: int, drop: int) -> Iterator[Batch]:
        """The chunks' samples without the first `drop`; chunks wholly before are not read."""
        broken = self._broken = self._opened.copy()
        found = False
        for chunk in self._order(len(self._chunks), key).tolist():
            count = self._count(chunk) if drop else None
            if count is not None and count <= drop:
                drop -= count
                found = found or count > 0
                continue
            for piece in self._chunks[chunk].read(broken):
                found = found or piece.size > 0
                kept = piece.slice(min(drop, piece.size), piece.size)
                drop -= piece.size - kept.size
                if kept.size:
                    yield kept
        if not found:
            raise DataError(f"{self._name} has no samples; check the split and the files")

    def _order(self, size: int, key: int) -> torch.Tensor:
        numbers = np.arange(size, dtype=np.int64)
        return torch.from_numpy(Permutation(size, key)(numbers) if self._shuffle else numbers)

    def _count(self, chunk: int) -> int | None:
        if self._opened.limit:
            return None  # how many rows will be skipped is not known before reading them
        if chunk not in self._counts:
            self._counts[chunk] = self._chunks[chunk].count()
        return self._counts[chunk]


# From a config to a source.


def open_source(config: DataConfig, split: Split = "train") -> Source:
    """The samples of one split. The train split is shuffled, others keep the files' order."""
    if split not in get_args(Split):
        raise ConfigError(f"there is no split {split!r}; use {', '.join(get_args(Split))}")
    if config.kind == "synthetic":
        from nestpipe.data.synthetic import open_synthetic

        return open_synthetic(config, split)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"reading {config.kind} files needs pyarrow; run pip install 'nestpipe[train]'"
        ) from None
    if config.kind == "stream":
        from nestpipe.data.streaming import open_stream

        return open_stream(config, split)
    return _open_files(config, split)


def data_digest(config: DataConfig) -> str:
    """Tells files apart that a run would not read the same samples from, wherever they are.

    It knows their order, sizes and ends. Empty: made-up data, and a stream, whose cursor tells.
    """
    if config.kind in ("synthetic", "stream"):
        return ""
    from nestpipe.data import inputs, parquet, public_sets

    if config.kind == "parquet":
        files = parquet.find_data(config.path)
    else:
        files = inputs.find_files(config.path, public_sets.FILES[config.kind], config.kind)
    return blake2b(b"".join(map(inputs.digest_of, files)), digest_size=16).hexdigest()


def _open_files(config: DataConfig, split: Split) -> Source:
    """Readers are imported when used: the made-up world does without Arrow."""
    if config.kind == "parquet":
        from nestpipe.data.parquet import open_parquet

        return open_parquet(config, split)
    if config.kind == "movielens":
        from nestpipe.data.public_sets import open_movielens

        return open_movielens(config, split)
    if config.kind == "kuairand":
        from nestpipe.data.public_sets import open_kuairand

        return open_kuairand(config, split)
    from nestpipe.data.public_sets import open_criteo

    return open_criteo(config, split)
