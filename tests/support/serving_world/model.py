"""A model so plain that its answers can be told by hand, and the users whom it ranks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from torch import Tensor

from nestpipe.serve.engine.kv_memory import Reload
from nestpipe.serve.types import KV, History, Ids, PrefixItem, RankItem, Scores
from support.serving_world.turns import Change, Turns

LAYERS = 2
BYTES = 16 * LAYERS
"""Of one event in a prefix."""
CHUNK = 4
"""A long history grows by so many events at once; what is newer is short."""
LONGEST = 20
PRIME = 16_777_213
"""Scores stay below it: float32 holds them exactly."""

# Shapes: L layers, N events, H = A = V = 1


def plain_scores(events: Sequence[int], version: int, candidates: Sequence[int]) -> list[float]:
    """What any ranking must come to: a hash of all events in order, the version, the candidate."""
    state = 7
    for layer in range(LAYERS):
        for event in events:
            state = _hash(state, _key(event, layer), version)
    return [_score(state, version, candidate) for candidate in candidates]


def _key(event: int, layer: int) -> int:
    return event * 3 + layer


def _hash(state: int, key: int, version: int) -> int:
    return (state * 8191 + key * 127 + version) % PRIME


def _score(state: int, version: int, candidate: int) -> float:
    return float((state * 31 + candidate * 1009 + version) % PRIME)


class FaultError(Exception):
    """A fault that the model was told to have."""


Around = Callable[[str, Sequence[KV | None]], AbstractContextManager[None]]
"""Entered before a call of the model, left after it: its name, and the prefixes that it reads."""


class Model:
    """Keys are the events, values the version that made them, in each layer alike.

    So a prefix that is not its ranking's own, or not there yet, gives other scores.
    """

    dtype = "float32"

    def __init__(self, version: int, around: Around, turns: Turns) -> None:
        self.version = str(version)
        self._around = around
        self._turns = turns

    def kv_bytes(self, length: int) -> int:
        return BYTES * length

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        with self._around("prefix", [item.past for item in items]):
            return [self._grown(item.history, item.past) for item in items]

    def _grown(self, history: History, past: KV | None) -> KV:
        events = history.items_N.tolist()
        keys_LN = torch.tensor(
            [[_key(event, layer) for event in events] for layer in range(LAYERS)]
        )
        keys_LNHA = keys_LN.reshape(LAYERS, -1, 1, 1)
        values_LNHV = torch.full_like(keys_LNHA, int(self.version))
        if past is None:
            return KV(keys_LNHA, values_LNHV)
        return KV(
            torch.cat([past.keys_LNHA, keys_LNHA], 1), torch.cat([past.values_LNHV, values_LNHV], 1)
        )

    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        with self._around("rank", [item.past for item in items]):
            return [self._scores(item) for item in items]

    def _scores(self, item: RankItem) -> Scores:
        state, version, past = 7, int(self.version), item.past
        for layer in range(LAYERS):
            if past is not None:
                if past.layer_events is not None:
                    past.layer_events.wait_for(layer)
                keys, values = _numbers(past.keys_LNHA[layer]), _numbers(past.values_LNHV[layer])
                for key, made_by in zip(keys, values, strict=True):
                    state = _hash(state, key, made_by)
            for event in item.history.items_N.tolist():
                state = _hash(state, _key(event, layer), version)
        scores = [_score(state, version, candidate) for candidate in item.candidates_C.tolist()]
        return np.array(scores, dtype=np.float32)

    def to_host(self, kv: KV) -> KV:
        with self._around("to_host", [kv]):
            return KV(kv.keys_LNHA.clone(), kv.values_LNHV.clone())

    def to_device(self, kv: KV) -> KV:
        with self._around("to_device", [kv]):
            return KV(kv.keys_LNHA.clone(), kv.values_LNHV.clone())

    def begin_reload(self, host: KV) -> Reload:
        return SlowReload(host, self._around, self._turns)


class SlowReload(Reload):
    """Anything may happen between two layers."""

    @torch.inference_mode()
    def __init__(self, host: KV, around: Around, turns: Turns) -> None:
        super().__init__(host, torch.device("cpu"))
        self.kv.keys_LNHA.fill_(-1)  # what nobody may read
        self._arrival._change = Change(turns)  # pyright: ignore[reportAttributeAccessIssue]
        self._around = around

    def copy(self, layer: int) -> None:
        with self._around("to_device", [self._host]):
            super().copy(layer)


def _numbers(tensor: Tensor) -> list[int]:
    return tensor.flatten().tolist()


@dataclass
class User:
    """Somebody whose history grows; no event of anybody is like another."""

    number: int
    events: list[int] = field(default_factory=list)
    num_seen: int = 0

    @property
    def name(self) -> str:
        return f"u{self.number}"

    def grow(self, count: int) -> None:
        """New events; when there are too many the oldest go."""
        new = range(self.num_seen, self.num_seen + count)
        self.events += [1000 * self.number + number for number in new]
        self.num_seen += count
        if len(self.events) > LONGEST:
            del self.events[:CHUNK]

    def slide(self) -> None:
        """A new event for the oldest one: another history of the same length."""
        del self.events[:1]
        self.grow(1)

    @property
    def long(self) -> History:
        return History(_ids(self.events[: self._split]))

    @property
    def short(self) -> History:
        return History(_ids(self.events[self._split :]))

    @property
    def _split(self) -> int:
        return len(self.events) // CHUNK * CHUNK


def some_users(chance: Random, count: int) -> list[User]:
    users = [User(number) for number in range(1, count + 1)]
    for user in users:
        user.grow(chance.choice([0, 6, *range(8, LONGEST)]))
    return users


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, dtype=np.int64)
