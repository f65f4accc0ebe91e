"""`HstuRankModel`: the trained ranker as serving calls it, whole or in two legs.

Its weights come from a checkpoint, without the trainer, and so does the lookup of item rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.checkpoint.folder import (
    MANIFEST,
    Checkpoint,
    Manifest,
    RowChange,
    appearing,
    first_good,
    open_noted,
)
from nestpipe.checkpoint.merging import newest_places
from nestpipe.config import build
from nestpipe.embedding.store.protocol import first_weights, rounded
from nestpipe.errors import CapacityError, CheckpointError, ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.models import HstuConfig, HstuRanker
from nestpipe.models.sequence import Prefix, PrefixParts
from nestpipe.serve.engine.kv_memory import HostArena, Reload
from nestpipe.serve.types import KV, History, Ids, PrefixItem, RankItem, Scores

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
    found = first_good(appearing(path), read)
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
        return torch.from_numpy(rounded(weights_UD, self.dtype))


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


# Shapes: B users, T events of all users together, K items, D width, L layers, N events of a user

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HstuRankModel:
    """Weights on one device; each user's result depends on that user alone.

    A score is the log-odds that the candidate is chosen, always float32. `dtype` is that of the
    weights, of what is computed, and of the keys and values that are kept.
    """

    def __init__(self, ranker: HstuRanker, rows: ItemRows, version: str) -> None:
        """Use `from_checkpoint`, `from_model` or `random`; here all is on the device already."""
        self.ranker = ranker.eval().requires_grad_(False)
        self.rows = rows
        self.config = ranker.config
        self.device = rows.rows_KD.device
        self._dtype = rows.rows_KD.dtype
        self._version = version
        self.arena: HostArena | None = None
        """Where `to_host` puts prefixes; None: into memory of their own."""

    @classmethod
    def from_checkpoint(
        cls, path: Path | str, device: str = "auto", dtype: str = "float32"
    ) -> HstuRankModel:
        """The ranker of a checkpoint, or of the newest in a folder that verifies."""
        weights = read_weights(Path(path))
        ranker = HstuRanker(weights.config)
        try:
            ranker.load_state_dict(dict(weights.dense))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"the model of {str(path)!r} does not fit ({reason}); use another checkpoint"
            ) from None
        version = f"step-{weights.step:08d}-{_digest(weights)}"
        return cls._placed(ranker, weights, version, device, dtype)

    @classmethod
    def from_model(
        cls,
        ranker: HstuRanker,
        items_K: Ids,
        rows_KD: Tensor,
        device: str = "auto",
        dtype: str = "float32",
    ) -> HstuRankModel:
        """A copy of a ranker, with the rows of these items; other items have a row of zeros."""
        dense = {name: tensor.detach().cpu() for name, tensor in ranker.state_dict().items()}
        order_K = np.argsort(items_K, kind="stable")
        rows_KD = rows_KD.detach().cpu().float()[torch.from_numpy(order_K)]
        weights = Weights(ranker.config, dense, items_K[order_K].astype(np.int64), rows_KD)
        reject_non_finite(weights, "the model")
        return cls._placed(deepcopy(ranker), weights, f"model-{_digest(weights)}", device, dtype)

    @classmethod
    def random(
        cls,
        config: HstuConfig,
        num_items: int,
        seed: int = 0,
        device: str = "auto",
        dtype: str = "float32",
    ) -> HstuRankModel:
        """Untrained weights of any size, items 1 to `num_items`; for tests and measurements.

        They follow from the arguments and the kind of device.
        """
        place, kind = choose_device(device), _dtype(dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ranker = HstuRanker(config)
        generator = torch.Generator(place).manual_seed(seed)
        rows_KD = torch.randn(num_items, config.dim, generator=generator, device=place)
        rows_KD = (rows_KD * config.dim**-0.5).to(kind)
        made_of = hashlib.blake2b(f"{config} {num_items} {seed} {place.type}".encode())
        items = ItemRows(np.arange(1, num_items + 1), rows_KD)
        return cls(ranker.to(place, kind), items, f"random-{made_of.hexdigest()[:16]}")

    @classmethod
    def _placed(
        cls, ranker: HstuRanker, weights: Weights, version: str, device: str, dtype: str
    ) -> HstuRankModel:
        place, kind = choose_device(device), _dtype(dtype)
        try:
            rows_KD = weights.rows_KD.to(place, kind)
            ranker = ranker.to(place, kind)
        except torch.OutOfMemoryError:
            size = weights.rows_KD.numel() * torch.finfo(kind).bits / 8e9
            raise CapacityError(
                f"the rows of {len(weights.items_K)} items, {size:.1f} GB, do not fit {place}; use "
                "bfloat16 or a larger device"
            ) from None
        return cls(ranker, ItemRows(weights.items_K, rows_KD, weights.first), version)

    @property
    def version(self) -> str:
        """The step of the checkpoint, and a hash of all weights."""
        return self._version

    @property
    def dtype(self) -> str:
        """Of weights, keys and values: float32 or bfloat16."""
        return str(self._dtype).removeprefix("torch.")

    @torch.inference_mode()
    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        """Keys and values of everything so far, the past included; each item by itself."""
        if not items:
            return []
        histories = [item.history for item in items]
        pasts = [self._checked(item.past) for item in items]
        events = [history.items_N for history in histories]
        rows = {"history": self.rows.rows(joined(events))}
        sparse = {"history": jagged(events, self.device), **self._times(histories)}
        batch = Batch(len(items), {}, sparse)
        new = self.ranker.prefix(rows, batch, past_of(pasts))
        return grown(pasts, new, [len(history) for history in histories])

    @torch.inference_mode()
    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        """Scores of the candidates of each item, whatever else is in the batch.

        Whether it returns or fails, nothing reads the pasts any more: they may be freed.
        """
        if not items:
            return []
        histories = [item.history for item in items]
        events = [history.items_N for history in histories]
        asked = [item.candidates_C for item in items]
        rows_TD = self.rows.rows(joined([*events, *asked]))
        num_events = sum(len(history) for history in histories)
        rows = {"history": rows_TD[:num_events], "candidates": rows_TD[num_events:]}
        sparse = {
            "history": jagged(events, self.device),
            "candidates": jagged(asked, self.device),
            **self._times(histories),
        }
        batch = Batch(len(items), self._asked_at(items), sparse)
        past = past_of([self._checked(item.past) for item in items])
        try:
            logits_C = self.ranker.logits(rows, batch, past).float().cpu().numpy()
        except BaseException:
            self._synchronize()
            raise
        ends = np.cumsum([len(candidates) for candidates in asked])
        return [part.copy() for part in np.split(logits_C, ends[:-1])]

    def full(self, items: Sequence[RankItem]) -> list[Scores]:
        """Scores without a past: the reference of `rank`."""
        assert all(item.past is None for item in items), "give the whole history instead of a past"
        return self.rank(items)

    def kv_bytes(self, length: int) -> int:
        """Memory of a prefix of this length: exactly that of the `KV` that `prefix` returns."""
        config = self.config
        width = config.heads * (config.attention_dim + config.value_dim)
        times = torch.int64.itemsize if config.time_buckets else 0
        return length * (config.blocks * width * self._dtype.itemsize + times)

    def to_host(self, kv: KV) -> KV:
        """A copy in (pinned) host memory, complete when this returns."""
        return self._copied(kv, self._empty_on_host)

    def to_device(self, kv: KV) -> KV:
        """A copy in device memory, ready for the next call of `rank` on any stream."""
        return self._copied(kv, lambda tensor: torch.empty_like(tensor, device=self.device))

    def begin_reload(self, host: KV) -> Reload:
        """The same copy, one layer after the other: `rank` may read it while it is made."""
        return Reload(host, self.device)

    @torch.inference_mode()
    def _copied(self, kv: KV, empty: Callable[[Tensor], Tensor]) -> KV:
        def copy(tensor: Tensor) -> Tensor:
            return empty(tensor).copy_(tensor, non_blocking=True)

        times_N = None if kv.times_N is None else copy(kv.times_N)
        copied = KV(copy(kv.keys_LNHA), copy(kv.values_LNHV), times_N)
        self._synchronize()
        return copied

    def _empty_on_host(self, like: Tensor) -> Tensor:
        if self.arena is not None:
            return self.arena.empty(like.shape, like.dtype)
        return torch.empty_like(like, device="cpu", pin_memory=self.wants_arena)

    @property
    def wants_arena(self) -> bool:
        """Whether host memory must be pinned for its device."""
        return self.device.type == "cuda"

    def _synchronize(self) -> None:
        """Return when all that this thread asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _checked(self, past: KV | None) -> KV | None:
        if past is not None:
            found = past.keys_LNHA.dtype
            assert found == self._dtype, f"a past of {found} for a model of {self._dtype}"
        return past

    def _times(self, histories: Sequence[History]) -> dict[str, Jagged]:
        return {"timestamps": times_of(histories, self.device)} if self.config.time_buckets else {}

    def _asked_at(self, items: Sequence[RankItem]) -> dict[str, Tensor]:
        if not self.config.time_buckets:
            return {}
        times = [item.time for item in items if item.time is not None]
        if len(times) < len(items):
            raise DataError("a ranking has no time, which the model reads; say when it is asked")
        return {"time": torch.tensor(times, dtype=torch.int64, device=self.device)}


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` takes a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} but torch finds no GPU; use 'cpu' or 'auto'")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; use {' or '.join(DTYPES)}")
    return DTYPES[name]


def _digest(weights: Weights) -> str:
    """Of everything that a score depends on: any other number gives another digest."""
    digest = hashlib.blake2b(f"{weights.config} {weights.first}".encode(), digest_size=8)
    for part in _bytes_of(weights):
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(weights: Weights) -> Iterable[bytes | memoryview]:
    for name in sorted(weights.dense):
        yield name.encode()
        yield weights.dense[name].contiguous().numpy().data
    yield np.ascontiguousarray(weights.items_K).data
    yield weights.rows_KD.contiguous().numpy().data


# Shapes: B users, T events of all users together, N events of one, L layers, H heads, A width of
# keys, V width of values


def joined(lists: Sequence[Ids]) -> Ids:
    """The lists, one after the other."""
    return np.concatenate([np.zeros(0, np.int64), *lists]).astype(np.int64, copy=False)


def jagged(lists: Sequence[Ids], device: torch.device) -> Jagged:
    """A list per user."""
    lengths_B = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    return Jagged(torch.from_numpy(joined(lists)), lengths_B).to(device)


def times_of(histories: Sequence[History], device: torch.device) -> Jagged:
    """The events' own times, for a model that reads them."""
    return jagged([_own_times(history) for history in histories], device)


def _own_times(history: History) -> Ids:
    times_N = np.zeros(0, np.int64) if history.times_N is None else history.times_N
    if len(times_N) != len(history):
        raise DataError(
            f"a history of {len(history)} events has {len(times_N)} times, and the model reads "
            "them; give the time of each event"
        )
    return times_N


def past_of(pasts: Sequence[KV | None]) -> PrefixParts | None:
    """What was computed before for each user, read where it lies; None where that is nothing.

    Layers that are still on their way to the device are waited for before they are read.
    """
    kept = [past for past in pasts if past is not None]
    if not kept:
        return None
    nothing = KV(kept[0].keys_LNHA[:, :0], kept[0].values_LNHV[:, :0], _first(kept[0].times_N, 0))
    all_B = [past or nothing for past in pasts]
    times = [past.times_N for past in all_B if past.times_N is not None]
    assert len(times) in (0, len(all_B)), "some prefixes were made without times"
    arrivals = [past.layer_events for past in kept if past.layer_events is not None]

    def wait_for(layer: int) -> None:
        for arrival in arrivals:
            arrival.wait_for(layer)

    keys, values = [past.keys_LNHA for past in all_B], [past.values_LNHV for past in all_B]
    return PrefixParts(keys, values, times or None, wait_for)


def grown(pasts: Sequence[KV | None], new: Prefix, lengths: Sequence[int]) -> list[KV]:
    """Each user's past and new rows, in memory of its own."""
    bounds = pairwise(accumulate(lengths, initial=0))
    return [
        _grown(past, new, slice(begin, end))
        for past, (begin, end) in zip(pasts, bounds, strict=True)
    ]


def _grown(past: KV | None, new: Prefix, own: slice) -> KV:
    keys_LNHA = torch.stack([keys_THA[own] for keys_THA in new.keys])
    values_LNHV = torch.stack([values_THV[own] for values_THV in new.values])
    times_N = None if new.times_T is None else new.times_T[own].clone()
    if past is None:
        return KV(keys_LNHA, values_LNHV, times_N)
    if times_N is not None and past.times_N is not None:
        times_N = torch.cat([past.times_N, times_N])
    return KV(
        torch.cat([past.keys_LNHA, keys_LNHA], 1),
        torch.cat([past.values_LNHV, values_LNHV], 1),
        times_N,
    )


def _first(times_N: Tensor | None, count: int) -> Tensor | None:
    return None if times_N is None else times_N[:count]
