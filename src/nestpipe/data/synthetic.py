"""A made-up world with something to learn in it; sample i is a function of (seed, i) alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, Split, SyntheticConfig
from nestpipe.data.order import U64, draw, mix, scatter, uniform
from nestpipe.data.source import (
    DENSE,
    HISTORY,
    LABEL,
    TARGET,
    TIME,
    TIMESTAMPS,
    Column,
    Indexed,
    Take,
    concat,
    features_column,
    history_column,
    keys_column,
    label_column,
    tensor,
    time_column,
    times_column,
)
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged

# Shapes: B samples, F features, T keys of all samples together, L longest sequence

BLOCK = 8_192
"""Samples made at a time: what they need then stays in the processor's cache."""
BIAS = -1.0
"""Of the hidden model: a bit less than one in three samples is a click."""
_UNIT = math.sqrt(3)
"""Makes a uniform number from -1 to 1 vary by 1."""


def open_synthetic(config: DataConfig, split: Split) -> Indexed:
    """A split: samples [0, samples) for training, then those to validate, then those to test."""
    world = config.synthetic
    begin = {
        "train": 0,
        "validation": world.samples,
        "test": world.samples + world.test_samples,
    }[split]
    take = make(world, split)
    return Indexed(
        columns(world, split),
        world.samples if split == "train" else world.test_samples,
        lambda numbers: take(numbers + begin),
        shuffle=config.shuffle and split == "train",
    )


def columns(world: SyntheticConfig, split: Split = "train") -> tuple[Column, ...]:
    """What a batch of this world has."""
    if world.flavour == "sequence":
        target = () if split == "train" else (Column(TARGET, "target", "int64"), time_column())
        return (history_column(world.num_items), times_column(), *target)
    keys = [
        keys_column(f"c{table}", single=world.keys_per_sample == (1, 1))
        for table in range(world.num_tables)
    ]
    dense = [features_column([f"d{i}" for i in range(world.num_dense)])] if world.num_dense else []
    return (*keys, *dense, label_column())


def make(world: SyntheticConfig, split: Split = "train") -> Take:
    """The function from numbers of samples to samples."""
    if world.flavour == "sequence":
        return lambda numbers: _in_blocks(numbers, lambda part: _sequences(world, part, split))
    hidden = _Hidden(world)
    return lambda numbers: _in_blocks(numbers, hidden.samples)


def _in_blocks(numbers: NDArray[np.int64], one_block: Take) -> Batch:
    parts = range(0, max(1, len(numbers)), BLOCK)
    return concat([one_block(numbers[begin : begin + BLOCK]) for begin in parts])


def zipf(bits: U64, size: int, exponent: float) -> NDArray[np.int64]:
    """Numbers below `size`, r with a chance of about (r + 1) ** -exponent.

    Exactly: the integral of x ** -exponent from r + 1 to r + 2, which inverts in closed form.
    """
    place = uniform(bits)
    if abs(exponent - 1) < 1e-6:
        place *= math.log(size + 1)
    else:
        place *= (size + 1) ** (1 - exponent) - 1
        np.log1p(place, out=place)
        place /= 1 - exponent
    np.exp(place, out=place)
    return np.minimum(place.astype(np.int64) - 1, size - 1)


class _Hidden:
    """The model that decides clicks: an effect per key and a weight per dense feature."""

    def __init__(self, world: SyntheticConfig) -> None:
        self.world = world
        tables = range(world.num_tables)
        self.keys = [mix(world.seed, 1, table) for table in tables]
        self.keys_F = np.array(self.keys, dtype=np.uint64)[:, None]
        self.salts_F = np.array([mix(world.seed, 2, table) for table in tables], dtype=np.uint64)
        # A few features matter most, as in real logs; all together vary by `signal`.
        weights_F = np.array([1 / (1 + table) for table in tables])
        dense = np.array([math.cos(i + 1) for i in range(world.num_dense)])
        share = 0.8 if world.num_dense else 1.0
        self.weights_F = weights_F * world.signal * math.sqrt(share / (weights_F**2).sum())
        self.dense = dense * world.signal * math.sqrt((1 - share) / max((dense**2).sum(), 1e-9))

    def samples(self, numbers_B: NDArray[np.int64]) -> Batch:
        world = self.world
        logit_B = np.full(len(numbers_B), BIAS)
        sparse: dict[str, Jagged] = {}
        single = world.keys_per_sample == (1, 1)
        for table, (jagged, effect_B) in enumerate(
            self._single(numbers_B) if single else self._several(numbers_B)
        ):
            sparse[f"c{table}"] = jagged
            logit_B += self.weights_F[table] * effect_B
        dense = {}
        if world.num_dense:
            features = self._dense(numbers_B)
            logit_B += features @ self.dense
            dense[DENSE] = tensor(features.astype(np.float32))
        chance_B = 1 / (1 + np.exp(-logit_B))
        clicked_B = uniform(draw(mix(world.seed, 3), numbers_B)) < chance_B
        dense[LABEL] = tensor(clicked_B.astype(np.float32))
        return Batch(len(numbers_B), dense, sparse)

    def _single(self, numbers_B: NDArray[np.int64]) -> Iterator[tuple[Jagged, NDArray[np.float64]]]:
        """One key per sample for every feature, made for all features at once."""
        bits_FB = draw(0, numbers_B)[None, :] + self.keys_F
        keys_FB = zipf(scatter(bits_FB), self.world.num_keys, self.world.exponent)
        ones_B = np.ones(len(numbers_B), dtype=np.int64)
        for table, keys_B in enumerate(keys_FB):
            yield Jagged(tensor(keys_B), tensor(ones_B.copy())), self._effects(table, keys_B)

    def _several(
        self, numbers_B: NDArray[np.int64]
    ) -> Iterator[tuple[Jagged, NDArray[np.float64]]]:
        """Some keys per sample; their effects add up, scaled so that the spread stays the same."""
        fewest, most = self.world.keys_per_sample
        rows_B = np.arange(len(numbers_B))
        for table, key in enumerate(self.keys):
            counts = draw(mix(key, 1), numbers_B) % np.uint64(most - fewest + 1)
            lengths_B = counts.astype(np.int64) + fewest
            rows_T = np.repeat(rows_B, lengths_B)
            slots_T = np.arange(len(rows_T)) - np.repeat(
                np.cumsum(lengths_B) - lengths_B, lengths_B
            )
            bits_T = draw(key, draw(mix(key, 2), numbers_B)[rows_T] + slots_T.astype(np.uint64))
            keys_T = zipf(bits_T, self.world.num_keys, self.world.exponent)
            summed_B = np.bincount(
                rows_T, weights=self._effects(table, keys_T), minlength=len(numbers_B)
            )
            yield (
                Jagged(tensor(keys_T), tensor(lengths_B)),
                summed_B / np.sqrt(np.maximum(lengths_B, 1)),
            )

    def _effects(self, table: int, keys: NDArray[np.int64]) -> NDArray[np.float64]:
        return (2 * uniform(draw(int(self.salts_F[table]), keys)) - 1) * _UNIT

    def _dense(self, numbers_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sums of four uniform numbers, near enough to normal, with mean 0 and spread 1."""
        found = np.empty((len(numbers_B), self.world.num_dense))
        for feature in range(self.world.num_dense):
            quarters = draw(mix(self.world.seed, 4, feature), numbers_B).view(np.uint16)
            sums_B = quarters.reshape(-1, 4).sum(axis=1, dtype=np.int64)
            found[:, feature] = (sums_B - 2 * 65_535) * (_UNIT / 65_536)
        return found


def _sequences(world: SyntheticConfig, numbers_B: NDArray[np.int64], split: Split) -> Batch:
    """Users who mostly choose items of the community that they are in, and sometimes move on.

    Items count from 1; those of a community are that many apart, the popular ones first.
    """
    size, longest = len(numbers_B), world.max_len
    lengths_B = _lengths(world, numbers_B)
    places_BL = (numbers_B[:, None] * longest + np.arange(longest)[None, :]).reshape(-1)
    moves_BL = uniform(draw(mix(world.seed, 2), places_BL)).reshape(size, longest) < world.drift
    since_BL = np.maximum.accumulate(np.where(moves_BL, np.arange(longest), 0), axis=1)
    number = np.uint64(world.num_communities)
    home_BL = draw(mix(world.seed, 3), (numbers_B[:, None] * longest + since_BL).reshape(-1))
    away_BL = draw(mix(world.seed, 4), places_BL)
    stays_BL = uniform(draw(mix(world.seed, 5), places_BL)) < world.coherence
    community_BL = (np.where(stays_BL, home_BL, away_BL) % number).astype(np.int64)
    ranks_BL = zipf(
        draw(mix(world.seed, 6), places_BL),
        world.num_items // world.num_communities,
        world.exponent,
    )
    items_BL = (ranks_BL * world.num_communities + community_BL + 1).reshape(size, longest)
    held = 0 if split == "train" else 1
    kept_BL = np.arange(longest)[None, :] < (lengths_B - held)[:, None]
    history = Jagged(tensor(items_BL[kept_BL]), tensor(lengths_B - held))
    times_BL = _times(world, places_BL, moves_BL)
    sparse = {HISTORY: history, TIMESTAMPS: Jagged(tensor(times_BL[kept_BL]), history.lengths)}
    if split == "train":
        return Batch(size, {}, sparse)
    last = (np.arange(size), lengths_B - 1)
    return Batch(size, {TARGET: tensor(items_BL[last]), TIME: tensor(times_BL[last])}, sparse)


def _lengths(world: SyntheticConfig, numbers_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many items each user has."""
    bits_B, spread = draw(mix(world.seed, 1), numbers_B), world.max_len - world.min_len + 1
    if world.length_exponent:
        return zipf(bits_B, spread, world.length_exponent) + world.min_len
    return (bits_B % np.uint64(spread)).astype(np.int64) + world.min_len


FIRST_TIME = 1_600_000_000
"""When users of a made-up world choose their first items, to the day."""


def _times(
    world: SyntheticConfig, places_BL: NDArray[np.int64], moves_BL: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """When each item was chosen: seconds to minutes apart, and days before another community."""
    longest = moves_BL.shape[1]
    bits_BL = draw(mix(world.seed, 7), places_BL).reshape(-1, longest)
    pause_BL = np.exp(uniform(bits_BL) * math.log(600)).astype(np.int64) - 1
    pause_BL[moves_BL] += 86_400
    pause_BL[:, 0] = (bits_BL[:, 0] % np.uint64(30 * 86_400)).astype(np.int64)
    return FIRST_TIME + np.cumsum(pause_BL, axis=1)


# The made-up world as Parquet files, for programs that want files.


PIECE = 65_536
"""Samples made, and written as one row group, at a time."""


def num_pieces(samples: int, files: int) -> int:
    """How often `write` reports progress."""
    return sum(-(-(end - begin) // PIECE) for begin, end in _ranges(samples, files))


def write(
    folder: Path,
    world: SyntheticConfig,
    *,
    files: int,
    force: bool,
    progress: Callable[[], object] = lambda: None,
) -> list[Path]:
    """Write the train split; files get their names only when all of them are complete."""
    targets = [folder / f"part-{i:05d}.parquet" for i in range(files)]
    old = _old_files(folder, force)
    drafts = [target.with_name(f".{target.name}.tmp") for target in targets]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for draft, (begin, end) in zip(drafts, _ranges(world.samples, files), strict=True):
            _write_file(draft, world, begin, end, progress)
        for file in old:
            file.unlink()
        for draft, target in zip(drafts, targets, strict=True):
            draft.rename(target)
    except OSError as error:
        reason = error.strerror or "unknown reason"
        raise DataError(f"cannot write {folder}: {reason}; choose another folder") from None
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return targets


def _old_files(folder: Path, force: bool) -> list[Path]:
    """Files of an earlier run, which may be replaced; other files may not."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder")
    old = sorted(folder.glob("part-*.parquet"))
    others = sorted(set(folder.rglob("*.parquet")) - set(old))
    if others:
        raise DataError(f"{folder} already holds {others[0].name}; name another folder")
    if old and not force:
        raise DataError(
            f"{folder} already holds {old[0].name}; name another folder, or use --force"
        )
    return old


def _ranges(samples: int, files: int) -> list[tuple[int, int]]:
    cuts = [samples * i // files for i in range(files + 1)]
    return list(pairwise(cuts))


def _write_file(
    path: Path, world: SyntheticConfig, begin: int, end: int, progress: Callable[[], object]
) -> None:
    take, described = make(world), columns(world)
    schema = to_arrow(take(np.arange(0, dtype=np.int64)), described).schema
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(begin, end, PIECE):
            numbers = np.arange(first, min(first + PIECE, end), dtype=np.int64)
            writer.write_table(to_arrow(take(numbers), described))
            progress()


def to_arrow(batch: Batch, described: tuple[Column, ...]) -> pa.Table:
    """A batch as columns of a table: dense features by their fields, keys as numbers or lists."""
    arrays: dict[str, pa.Array] = {}
    for column in described:
        if column.kind == "features":
            for i, name in enumerate(column.fields):
                arrays[name] = pa.array(batch.dense[DENSE][:, i].numpy())
        elif column.is_list:
            keys = batch.sparse[column.name]
            values = pa.array(keys.values.numpy())
            offsets = pa.array(keys.offsets.numpy())
            arrays[column.name] = (
                values if column.single else pa.LargeListArray.from_arrays(offsets, values)
            )
        else:
            arrays[column.name] = pa.array(batch.dense[column.name].numpy())
    assert LABEL not in arrays or arrays[LABEL].type == pa.float32(), "labels are float32"
    return pa.table(arrays)
