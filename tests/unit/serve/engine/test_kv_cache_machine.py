"""Signals, rankings, endings, failures, expiries and swaps in any order, over the real cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.serve.engine.kv_cache import Cache, Fill, Load, Miss, Promised, Purpose, Use, Wait
from nestpipe.serve.engine.kv_memory import DevicePool, Entry, EntryState, HostTier, KVSource, Need
from nestpipe.serve.types import KV, History, PrefixKey

BYTES = 16
"""Of one event."""
LIFE_S = 1.0
CHUNK = 2


@dataclass(frozen=True)
class Model:
    """Its keys and values are the events themselves, and its own version."""

    version: str
    dtype: str = "float32"

    def kv_bytes(self, length: int) -> int:
        return BYTES * length

    def kv(self, history: History, past: KV | None = None) -> KV:
        items = torch.from_numpy(history.items_N).reshape(1, -1, 1, 1)
        versions = torch.full_like(items, int(self.version))
        if past is not None:
            items = torch.cat([past.keys_LNHA, items], 1)
            versions = torch.cat([past.values_LNHV, versions], 1)
        return KV(items, versions)


def contents(kv: KV | None) -> list[tuple[int, int]]:
    assert kv is not None
    items, versions = kv.keys_LNHA.flatten().tolist(), kv.values_LNHV.flatten().tolist()
    return list(zip(items, versions, strict=True))


@dataclass(eq=False)
class Ranking:
    need: Need
    answer: str | None = None
    entry: Entry | None = None

    def reads(self, entry: Entry) -> None:
        expected = [(item, int(self.need.key.version)) for item in self.need.history.items_N]
        assert contents(entry.kv) == expected, "a ranking got a prefix that is not its own"
        self.answer, self.entry = "prefix", entry


@dataclass
class World:
    """A cache, everything that is under way around it, and what must hold whatever happens."""

    seed: int
    single_flight: bool = True
    host: bool = True
    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.random = Random(self.seed)
        self.cache = Cache(
            DevicePool(BYTES * 11),
            HostTier(BYTES * 8, ttl_s=5.0) if self.host else None,
            life_s=LIFE_S,
            reloads=2,
            single_flight=self.single_flight,
        )
        self.model = Model("0")
        self.rankings: list[Ranking] = []
        self.computing: list[Entry] = []
        self.loading: list[tuple[Entry, KV]] = []
        self.copying: list[tuple[Entry, KV]] = []
        self.promised: dict[PrefixKey, float] = {}
        self.seen: Counter[str] = Counter()

    # What can happen

    def need(self) -> Need:
        user = self.random.randrange(5)
        items = np.array([10 * user + n for n in range(1 + user)], dtype=np.int64)
        if self.random.random() < 0.1:
            items = items[::-1].copy()  # another history of the same length
        return Need.of(f"u{user}", History(items), self.model)  # pyright: ignore

    def signal(self):
        need = self.need()
        step = self.cache.acquire(need, Purpose.SIGNAL, self.now)
        assert isinstance(step, Promised | Load | Fill) or step is Miss.NO_ROOM
        if not isinstance(step, Miss):
            self.promised[need.key] = self.now + LIFE_S
        return step

    def in_time(self, entry: Entry) -> bool:
        return self.random.choice([True] * 9 + [False])

    def rank(self):
        ranking = Ranking(self.need())
        self.rankings.append(ranking)
        purpose = self.random.choice([Purpose.RANK, Purpose.RANK, Purpose.RANK_AND_KEEP])
        self.promised.pop(ranking.need.key, None)
        step = self.cache.acquire(ranking.need, purpose, self.now, ranking, self.in_time)
        if isinstance(step, Use):
            ranking.reads(step.entry)
        elif isinstance(step, Miss):
            ranking.answer = "inline"
        else:
            assert isinstance(step, Wait | Load) or purpose is Purpose.RANK_AND_KEEP
            ranking.entry = step.entry
        return step

    def begin_chunk(self):
        if self.computing:
            return None
        self.computing = self.cache.next_fills(CHUNK, 3)
        if len(self.computing) > 1:
            assert sum(entry.num_missing for entry in self.computing) <= CHUNK
            self.seen["several at once"] += 1
        return self.computing or None

    def end_chunk(self):
        if not self.computing:
            return None
        entry = self.computing.pop()
        if self.random.random() < 0.1:
            return self._inline(entry, self.cache.failed(entry))
        done = entry.num_events
        chunk = History(entry.need.history.items_N[done : done + CHUNK])
        model: Any = entry.need.model
        return self._read(entry, self.cache.filled(entry, model.kv(chunk, entry.kv), self.now))

    def begin_load(self):
        if load := self.cache.next_load(self.now):
            self.loading.append(load)
        return load

    def first_layer(self):
        """A reload may be read from now on."""
        whole = [(entry, kv) for entry, kv in self.loading if not entry.arriving]
        if not whole:
            return None
        entry, kv = self.random.choice(whole)
        return self._read(entry, self.cache.begun(entry, kv, self.now))

    def end_load(self):
        if not self.loading:
            return None
        entry, kv = self.loading.pop(self.random.randrange(len(self.loading)))
        assert self.cache.host_tier is not None
        assert self.cache.host_tier._kept[entry.key].pinned, "it may go from under the copy"
        if self.random.random() < 0.2:
            self.seen["failed half way"] += entry.arriving
            return self._inline(entry, self.cache.failed(entry))
        self.seen["came by layers"] += entry.arriving
        return self._read(entry, self.cache.loaded(entry, kv, self.now))

    def begin_copy(self):
        if copy := self.cache.next_copy(self.now):
            self.copying.append(copy)
        return copy

    def end_copy(self):
        if not self.copying:
            return None
        entry, kv = self.copying.pop(self.random.randrange(len(self.copying)))
        assert contents(entry.kv) == contents(kv), "a prefix changed or went while it was copied"
        works = self.random.random() < 0.8
        self.cache.copied(entry, kv if works else None, self.now)
        return works

    def release(self):
        reading = [r for r in self.rankings if r.answer == "prefix" and r.entry]
        if not reading:
            return None
        ranking = self.random.choice(reading)
        assert ranking.entry
        ranking.reads(ranking.entry)  # still whole
        if self.random.random() < 0.1:
            self.promised.pop(ranking.need.key, None)
            self.cache.discard(ranking.entry)
        self.cache.released(ranking.entry)
        ranking.entry = None
        return ranking

    def leave(self):
        waiting = [r for r in self.rankings if r.answer is None]
        if not waiting:
            return None
        ranking = self.random.choice(waiting)
        assert ranking.entry
        self.cache.leave(ranking.entry, ranking)
        self._inline(ranking.entry, [ranking])
        return ranking

    def pass_time(self):
        self.now += self.random.choice([0.01, 0.1, 0.2, 1.0])
        self.cache.expire(self.now)
        return self.now

    def swap(self):
        old = self.model
        self.model = Model(str(self.random.randrange(3)))
        self.cache.revive(self.model.version)
        if old != self.model:
            self.cache.retire(old.version)
            self.promised.clear()
        return self.model

    def _read(self, entry: Entry, tickets: list[Ranking]) -> list[Ranking]:
        for ranking in tickets:
            assert ranking.answer is None, "a ranking was answered twice"
            ranking.reads(entry)
        return tickets

    def _inline(self, entry: Entry, tickets: list[Ranking]) -> list[Ranking]:
        self.promised.pop(entry.key, None)
        for ranking in tickets:
            assert ranking.answer is None, "a ranking was answered twice"
            ranking.answer, ranking.entry = "inline", None
        return tickets

    # What must hold

    def check(self):
        device_pool, host_tier = self.cache.device_pool, self.cache.host_tier
        entries = list(device_pool)
        assert device_pool.num_bytes == sum(e.num_bytes for e in entries) <= device_pool.bound
        if host_tier is not None:
            held = host_tier._kept
            assert host_tier.num_bytes == sum(kept.num_bytes for kept in held.values())
            assert host_tier.num_bytes <= host_tier.bound
            stale = [k for k, kept in held.items() if k.version != self.model.version]
            assert all(held[key].pinned for key in stale), "a retired model is kept"
        if self.single_flight:
            making = Counter(e.key for e in entries if e.listed and not e.complete)
            assert all(count == 1 for count in making.values()), "a key is filled twice at once"
        assert self.cache.loading == len(self.loading) <= 2
        for entry, _ in self.loading:
            assert entry in entries, "memory was freed from under a reload"
        for entry in entries:
            assert not (entry.arriving and entry in device_pool._idle), (
                "it can go from under a reload"
            )
            assert (entry.state is EntryState.IN_USE) == (entry.users > 0)
            assert entry.users == sum(
                r.entry is entry and r.answer == "prefix" for r in self.rankings
            )
        for key, until in self.promised.items():
            if self.now < until:
                assert device_pool.find(key), "what was promised was evicted"

    def step(self):
        """One thing that can happen now."""
        often = {self.signal: 4, self.rank: 4, self.begin_chunk: 4, self.end_chunk: 8}
        often |= {
            self.begin_load: 4,
            self.first_layer: 4,
            self.end_load: 4,
            self.begin_copy: 2,
            self.end_copy: 2,
        }
        often |= {self.release: 4, self.leave: 0.5, self.pass_time: 1, self.swap: 0.1}
        result = None
        while result is None:
            act = self.random.choices(list(often), list(often.values()))[0]
            result = act()
        self.log.append(act.__name__)
        name = result if isinstance(result, Miss) else type(result).__name__
        self.seen[f"{act.__name__} {name}"] += 1
        self.rankings = [r for r in self.rankings if r.answer is None or r.entry]
        self.check()

    def finish(self):
        """Nothing new comes; what is under way ends."""
        acts = [self.begin_chunk, self.end_chunk, self.begin_load, self.first_layer, self.end_load]
        acts += [self.begin_copy, self.end_copy, self.release]
        while [act for act in acts if act() is not None]:
            self.check()
        assert all(ranking.answer for ranking in self.rankings), "a ranking was never answered"
        self.now += 2 * LIFE_S
        self.cache.expire(self.now)
        while self.begin_copy():
            self.end_copy()
        assert self.cache.device_pool.num_bytes == 0, "something is pinned for ever"
        assert not list(self.cache.device_pool)
        assert len(self.cache.fills) == len(self.cache.loads) == self.cache.loading == 0
        if self.cache.host_tier is not None:
            self.cache.host_tier.expire(self.now + 100)
            assert len(self.cache.host_tier) == 0, "host memory is pinned for ever"
            assert self.cache.host_tier.num_bytes == 0


def play(world: World, steps: int = 250) -> World:
    try:
        for _ in range(steps):
            world.step()
        world.finish()
    except AssertionError as error:
        error.add_note(f"seed {world.seed}, step {len(world.log)}: {', '.join(world.log[-20:])}")
        raise
    return world


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("single_flight", [True, False])
def test_any_order_of_events_keeps_every_promise(single_flight: bool, host: bool):
    seen: Counter[str] = Counter()
    for seed in range(150):
        world = play(World(seed, single_flight, host))
        seen += world.seen + world.cache.counts
        seen["device evictions"] += world.cache.device_pool.evicted
        if world.cache.host_tier is not None:
            seen["host evictions"] += world.cache.host_tier.evicted
    reached = {"signal Fill", "signal Promised", "signal no_room", "rank Use", "rank nowhere"}
    reached |= {"rank Fill", "leave Ranking", "swap Model", "wasted_prefixes", "abandoned_fills"}
    reached |= {"several at once"}
    if host:
        reached |= {"signal Load", "rank Load", "reloads", "failed_reloads", "failed_offloads"}
        reached |= {"device evictions", "host evictions", "came by layers", "failed half way"}
    if single_flight:
        reached |= {"rank Wait", "rank too_late"}
    rarely = {name: seen[name] for name in reached if seen[name] < 20}
    assert not rarely, "the worlds do not reach all that can happen"


def test_without_single_flight_the_same_prefix_is_made_twice():
    world = World(0, single_flight=False)
    need = Need.of("u", History(np.arange(2)), world.model)  # pyright: ignore
    steps = [world.cache.acquire(need, Purpose.SIGNAL, 0.0) for _ in range(2)]
    assert [type(step) for step in steps] == [Fill, Fill]
    assert all(entry.source is KVSource.COMPUTED for entry in world.cache.device_pool)
