"""Weights of a ranker from a checkpoint, without the trainer, and the lookup of item rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nestpipe.checkpoint.folder import (
    MANIFEST,
    Checkpoint,
    Manifest,
    RowChange,
    candidates,
    first_good,
    open_noted,
)
from nestpipe.checkpoint.merging import newest_places
from nestpipe.config import build
from nestpipe.embedding.store.protocol import first_weights, round_to_bfloat16
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.models import HstuConfig
from nestpipe.serve.types import Ids

# Shapes: K items, D width of a row, W weights and optimizer state

TABLE = "items"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything that scores depend on, in host memory, float32."""

    config: HstuConfig
    dense: Mapping[str, Tensor]
    items_K: Ids
    """Ascending."""
    rows_KD: Tensor
    first: FirstRows | None = None
    step: int | None = None
    """Batches that it was trained on."""


def read_weights(path: Path) -> Weights:
    """The ranker of a checkpoint, or of the newest in a folder that verifies."""
    return read_newest(path, _read)


def read_newest(path: Path, read: Callable[[Path], T]) -> T:
    """What is read of a checkpoint, or of the newest in a folder that verifies."""
    found = first_good(candidates(path), read)
    if found is None:
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint: it has no {MANIFEST}; name a folder `step-...`"
        )
    return found


def _read(path: Path) -> Weights:
    """What a checkpoint holds of a ranker; every file is verified while it is read."""
    checkpoint = open_noted(path)
    where = str(checkpoint.path)
    try:
        config = _config(where, checkpoint.manifest)
        tensors = checkpoint.dense()
        dense = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        items_K, rows_KD = read_rows(checkpoint, TABLE, config.dim)
        first = first_rows(checkpoint.manifest, TABLE)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where!r} cannot be read ({error}); use another checkpoint"
        ) from None
    weights = Weights(config, dense, items_K, rows_KD, first, checkpoint.manifest.step)
    reject_non_finite(weights, repr(where))
    return weights


def reject_non_finite(weights: Weights, where: str) -> None:
    """Reject NaN and inf weights."""
    for name, tensor in {**weights.dense, f"the rows of {TABLE}": weights.rows_KD}.items():
        refuse_non_finite(tensor, name, where)


def refuse_non_finite(tensor: Tensor, name: str, where: str) -> None:
    """Reject a tensor with NaN or inf."""
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{where} holds nan or inf in {name}; serve another checkpoint, and train with "
            "smaller learning rates"
        )


def _config(where: str, manifest: Manifest) -> HstuConfig:
    model = manifest.model
    if model.get("kind") != "ranker":
        raise CheckpointError(f"{where!r} holds no ranker; train one with model.kind = 'ranker'")
    try:
        config = build(HstuConfig, model["config"])
    except ConfigError as error:
        raise CheckpointError(
            f"the model of {where!r} does not fit this program ({error}); use the one that wrote it"
        ) from None
    if config.kind != "hstu" or config.max_attention:
        what = "FuXi" if config.kind != "hstu" else "a window of attention"
        raise CheckpointError(
            f"the ranker of {where!r} has {what}, which is trained and not served; train one with "
            "model.encoder.kind = 'hstu' and max_attention = 0"
        )
    return config


def first_rows(manifest: Manifest, table: str) -> FirstRows | None:
    """What the rows of keys never seen begin with; None where the checkpoint does not say."""
    said = manifest.first_rows.get(table)
    if said is None:
        return None
    dtypes = [str(t["dtype"]) for t in manifest.tables if t["name"] == table]
    if not dtypes:
        raise ValueError(f"it says nothing of the table {table!r}")
    dtype = dtypes[0]
    return FirstRows(int(said["seed"]), float(said["std"]), dtype)


def read_rows(checkpoint: Checkpoint, table: str, dim: int) -> tuple[Ids, Tensor]:
    """Keys in ascending order with the weights of their rows; of optimizer state nothing stays."""
    parts = [RowChange(torch.empty(0, dtype=torch.int64), torch.empty(0, dim), None, 0)]
    for change in checkpoint.changes(table):
        rows = change.rows
        if rows is not None and rows.shape[1] < dim:
            raise ValueError(f"rows have {rows.shape[1]} weights, not {dim}")
        kept = None if rows is None else rows[:, :dim].clone()
        parts.append(RowChange(change.keys, kept, None, change.step))
    newest = newest_places(parts)
    items = np.concatenate([part.keys.numpy() for part in parts if part.rows is not None])
    # Only increments may bring a key again.
    if not checkpoint.parents and len(newest) != len(items):
        raise ValueError("an item has two rows")
    rows = torch.cat([part.rows for part in parts if part.rows is not None])
    return items[newest], rows[torch.from_numpy(newest)]


# Shapes: K items of the table, T items asked for, U of them that the table does not have, D width

SPARSEST = 8
"""Largest span of keys per row for a direct index; sparser keys are searched."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The initial row of an item that training never saw."""

    seed: int
    std: float
    dtype: str = "float32"
    """How the table keeps its weights."""

    def rows(self, items_U: Ids, dim: int) -> Tensor:
        weights_UD = first_weights(self.seed, items_U, dim, self.std)
        if self.dtype == "bfloat16":
            weights_UD = round_to_bfloat16(weights_UD)
        return torch.from_numpy(weights_UD)


class ItemRows:
    """Looks rows up; unknown items get their initial row, or zeros.

    Unknown items are normal: new ones appear before the next training run. Where the checkpoint
    says how the table's rows begin, that is what they get, as in training; else a row of zeros.
    """

    def __init__(self, items_K: Ids, rows_KD: Tensor, first: FirstRows | None = None) -> None:
        """Items ascend, each with its row, which is on the device and of the type to serve."""
        assert len(items_K) == len(rows_KD), "every item has one row"
        self.rows_KD = rows_KD
        self.first = first
        self._items_K = items_K
        self._place_of = _place_by_key(items_K)

    @property
    def num_items(self) -> int:
        return len(self._items_K)

    def rows(self, items_T: Ids) -> Tensor:
        """(T, D) on the device."""
        places_T, known_T = self._find(items_T)
        device, dim = self.rows_KD.device, self.rows_KD.shape[1]
        if known_T.all():
            return self.rows_KD.index_select(0, torch.from_numpy(places_T).to(device))
        rows_TD = self.rows_KD.new_zeros(len(items_T), dim)
        known = torch.from_numpy(np.flatnonzero(known_T)).to(device)
        places = torch.from_numpy(places_T[known_T]).to(device)
        rows_TD.index_copy_(0, known, self.rows_KD.index_select(0, places))
        if self.first is not None:
            unknown = torch.from_numpy(np.flatnonzero(~known_T)).to(device)
            first_UD = self.first.rows(items_T[~known_T], dim)
            rows_TD.index_copy_(0, unknown, first_UD.to(device, rows_TD.dtype))
        return rows_TD

    def _find(self, items_T: Ids) -> tuple[Ids, np.ndarray]:
        """Where each item's row is, and whether there is one at all."""
        if not self.num_items:
            return np.zeros_like(items_T), np.zeros(len(items_T), dtype=bool)
        if self._place_of is not None:
            low, high = self._items_K[0], self._items_K[-1]
            inside_T = (items_T >= low) & (items_T <= high)
            places_T = self._place_of[np.where(inside_T, items_T, low) - low]
            return places_T, inside_T & (places_T >= 0)
        places_T = np.searchsorted(self._items_K, items_T)
        places_T = np.minimum(places_T, self.num_items - 1)
        return places_T, self._items_K[places_T] == items_T


def _place_by_key(items_K: Ids) -> Ids | None:
    """The place of every key from the first to the last, -1 for none; None where that is wasteful.

    It is several times faster than a search, which matters for long histories.
    """
    if not len(items_K) or int(items_K[-1]) - int(items_K[0]) >= SPARSEST * len(items_K):
        return None
    place_of = np.full(int(items_K[-1]) - int(items_K[0]) + 1, -1, dtype=np.int64)
    place_of[items_K - items_K[0]] = np.arange(len(items_K))
    return place_of
