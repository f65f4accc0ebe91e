"""`HstuRankModel`: the trained ranker as serving calls it, whole or in two legs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.errors import CapacityError, CheckpointError, ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.models import HstuConfig, HstuRanker
from nestpipe.models.sequence import Prefix, PrefixParts
from nestpipe.serve.engine.weights import ItemRows, Weights, read_weights, reject_non_finite
from nestpipe.serve.kv_cache.host_tier import HostArena, Reload
from nestpipe.serve.types import KV, History, Ids, PrefixItem, RankItem, Scores

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
        """Memory of a prefix of so many events: exactly that of the `KV` that `prefix` gives."""
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
