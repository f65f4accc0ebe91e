"""Device memory: what fits, what makes room, and when promises end."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import CapacityError
from nestpipe.serve.engine.kv_memory import (
    GRAIN,
    DevicePool,
    Entry,
    EntryState,
    HostArena,
    HostTier,
    KVSource,
    Need,
    give_arena,
    hand_over_arena,
)
from nestpipe.serve.types import KV, History, PrefixKey
from support.examples import examples


class Model:
    version = "1"
    dtype = "float32"

    def kv_bytes(self, length: int) -> int:
        return 8 * length


def need(user: str, length: int = 2) -> Need:
    return Need.of(user, History(np.arange(length)), Model())  # pyright: ignore


def kv(length: int) -> KV:
    return KV(torch.zeros(1, length, 1, 1), torch.zeros(1, length, 1, 1))


def reserved(device_pool: DevicePool, user: str, length: int = 2) -> Entry:
    entry = device_pool.reserve(need(user, length), KVSource.COMPUTED)
    assert entry
    return entry


def test_the_bound_is_exact():
    device_pool = DevicePool(bound=40)
    reserved(device_pool, "ann", 3)
    reserved(device_pool, "bob", 2)
    assert device_pool.num_bytes == 40
    assert device_pool.reserve(need("eve", 1), KVSource.COMPUTED) is None


def test_only_what_is_done_makes_room_the_oldest_first():
    device_pool = DevicePool(bound=48)
    entries = {user: reserved(device_pool, user) for user in ("ann", "bob", "eve")}
    device_pool.idle(entries["bob"])
    device_pool.idle(entries["ann"])
    assert device_pool.promised_bytes == 16
    reserved(device_pool, "tim")
    assert device_pool.find(need("bob").key) is None
    assert device_pool.find(need("ann").key) is entries["ann"]
    assert device_pool.reserve(need("max", 5), KVSource.COMPUTED) is None, "eve is promised"
    assert device_pool.find(need("ann").key) is entries["ann"], "it was evicted for nothing"
    assert (device_pool.evicted, device_pool.num_bytes) == (1, 48)


def test_what_is_being_copied_makes_no_room():
    device_pool = DevicePool(bound=16)
    entry = reserved(device_pool, "ann")
    entry.copying = True
    device_pool.idle(entry)
    assert device_pool.reserve(need("bob"), KVSource.COMPUTED) is None


def test_what_somebody_needs_is_never_freed():
    device_pool = DevicePool(bound=16)
    entry = reserved(device_pool, "ann")
    entry.users = 1
    with pytest.raises(AssertionError, match="while it is needed"):
        device_pool.free(entry)
    entry.users, entry.copying = 0, True
    with pytest.raises(AssertionError, match="while it is copied"):
        device_pool.free(entry)


def test_what_is_unlisted_is_not_found_but_counts_until_it_is_freed():
    device_pool = DevicePool(bound=16)
    entry = reserved(device_pool, "ann")
    device_pool.unlist(entry)
    assert device_pool.find(entry.key) is None
    assert (device_pool.num_bytes, list(device_pool)) == (16, [entry])
    device_pool.free(entry)
    assert (device_pool.num_bytes, list(device_pool)) == (0, [])


def test_of_two_of_a_key_the_further_one_is_found():
    device_pool = DevicePool(bound=64)
    first, second = reserved(device_pool, "ann"), reserved(device_pool, "ann")
    assert device_pool.find(first.key) is first
    second.kv = kv(1)
    assert device_pool.find(first.key) is second
    first.state = EntryState.READY
    assert device_pool.find(first.key) is first


def test_a_promise_ends_at_the_latest_time_that_was_given():
    device_pool = DevicePool(bound=64)
    ann, bob = reserved(device_pool, "ann"), reserved(device_pool, "bob")
    device_pool.promise(ann, until=1.0)
    device_pool.promise(bob, until=2.0)
    device_pool.promise(ann, until=3.0)
    assert device_pool.next_end() == 1.0
    assert list(device_pool.ended(now=2.5)) == [bob]
    assert list(device_pool.ended(now=3.0)) == [ann]
    assert device_pool.next_end() is None


@pytest.mark.parametrize("state", [EntryState.FILLING, EntryState.IN_USE, EntryState.DONE])
def test_a_promise_does_not_end_under_those_who_work_with_it(state: EntryState):
    device_pool = DevicePool(bound=64)
    entry = reserved(device_pool, "ann")
    entry.state = state
    device_pool.promise(entry, until=1.0)
    assert list(device_pool.ended(now=2.0)) == []


@pytest.mark.parametrize(("events", "accepted"), [(1, False), (2, True), (3, True), (4, False)])
def test_an_entry_takes_only_more_of_its_own(events: int, accepted: bool):
    entry = Entry(need("ann", 3), KVSource.COMPUTED, kv=kv(1))
    assert entry.accepts(kv(events)) == accepted


def test_an_entry_takes_no_more_bytes_than_were_set_aside():
    entry = Entry(need("ann", 3), KVSource.COMPUTED)
    wide = KV(torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 1, 2))
    assert not entry.accepts(wide)


def key(user: str, version: str = "1") -> PrefixKey:
    return PrefixKey(user, version, 2, "events", "float32")


def host_kv(number: float = 0.0) -> KV:
    return KV(torch.full((1, 2, 1, 1), number), torch.full((1, 2, 1, 1), number))


def keep(host_tier: HostTier, user: str, now: float, num_bytes: int = 10) -> bool:
    if not host_tier.begin(key(user), num_bytes, now):
        return False
    host_tier.finish(key(user), host_kv(), now)
    return True


def held(host_tier: HostTier, now: float) -> str:
    return "".join(user for user in "abcdef" if host_tier.holds(key(user), now))


def test_the_least_recently_used_goes_first():
    host_tier = HostTier(bound=30, ttl_s=100.0)
    for now, user in enumerate("abc"):
        assert keep(host_tier, user, now)
    host_tier.pin(key("a"), 3.0)
    host_tier.unpin(key("a"))
    assert keep(host_tier, "d", 4.0)
    assert held(host_tier, 5.0) == "acd"
    assert (host_tier.num_bytes, host_tier.evicted) == (30, 1)


def test_room_is_made_before_the_copy():
    host_tier = HostTier(bound=30, ttl_s=100.0)
    for user in "abc":
        assert keep(host_tier, user, 0.0)
    assert host_tier.begin(key("d"), 20, 1.0)
    assert host_tier.num_bytes == 30
    assert held(host_tier, 1.0) == "c"
    host_tier.cancel(key("d"))
    assert (host_tier.num_bytes, key("d") in host_tier) == (10, False)


def test_what_is_copied_or_reloaded_is_not_evicted():
    host_tier = HostTier(bound=20, ttl_s=100.0)
    assert keep(host_tier, "a", 0.0)
    host_tier.pin(key("a"), 0.0)
    assert host_tier.begin(key("b"), 10, 0.0)
    assert not keep(host_tier, "c", 1.0)
    assert host_tier.read(key("a")).num_bytes == host_kv().num_bytes
    host_tier.unpin(key("a"))
    assert keep(host_tier, "c", 2.0)


def test_what_is_here_already_is_not_copied_again():
    host_tier = HostTier(bound=20, ttl_s=100.0)
    assert keep(host_tier, "a", 0.0)
    assert not host_tier.begin(key("a"), 10, 1.0)
    assert host_tier.begin(key("b"), 10, 1.0)
    assert not host_tier.begin(key("b"), 10, 1.0), "its copy is under way"
    assert not host_tier.holds(key("b"), 1.0)


def test_what_is_larger_than_all_of_it_evicts_nothing():
    host_tier = HostTier(bound=20, ttl_s=100.0)
    assert keep(host_tier, "a", 0.0)
    assert not keep(host_tier, "b", 1.0, num_bytes=21)
    assert held(host_tier, 1.0) == "a"


def test_what_nobody_comes_for_expires_and_use_renews():
    host_tier = HostTier(bound=100, ttl_s=10.0)
    for user in "abc":
        assert keep(host_tier, user, 0.0)
    host_tier.pin(key("b"), 5.0)
    host_tier.unpin(key("b"))
    host_tier.pin(key("c"), 5.0)
    assert held(host_tier, 9.9) == "abc"
    assert held(host_tier, 10.0) == "bc"
    host_tier.expire(15.0)
    assert held(host_tier, 15.0) == "c", "it is being reloaded"
    assert (host_tier.num_bytes, host_tier.expired) == (10, 2)
    host_tier.unpin(key("c"))
    host_tier.expire(15.0)
    assert len(host_tier) == 0


def test_what_is_stale_is_dropped_but_not_from_under_a_reload():
    host_tier = HostTier(bound=100, ttl_s=10.0)
    for user in "abc":
        assert keep(host_tier, user, 0.0)
    host_tier.pin(key("b"), 0.0)
    host_tier.drop_where(lambda kept: kept.user != "c")
    assert held(host_tier, 0.0) == "bc"


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (lambda e: e.read(key("a")), "read without a pin"),
        (lambda e: e.unpin(key("a")), "has no pin"),
        (lambda e: e.finish(key("a"), host_kv(), 0.0), "was copied twice"),
        (lambda e: e.cancel(key("a")), "has come"),
    ],
)
def test_a_bug_of_ours_is_noticed(misuse, sentence: str):
    host_tier = HostTier(bound=100, ttl_s=10.0)
    assert keep(host_tier, "a", 0.0)
    with pytest.raises(AssertionError, match=sentence):
        misuse(host_tier)


SIZES = st.integers(0, 6 * GRAIN)


@examples("few")
@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=60))
def test_pieces_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]):
    arena = HostArena(32 * GRAIN, pinned=False)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (give_back, size) in enumerate(steps):
        if give_back and held:
            held.pop(size % len(held))
        else:
            try:
                held.append((number % 251, arena.empty((size,), torch.uint8)))
            except CapacityError:
                assert arena.free_bytes < 12 * GRAIN  # not all in one piece
                continue
            held[-1][1].fill_(number % 251)
        assert all(bool((tensor[::97] == value).all()) for value, tensor in held)
    assert all(bool((tensor == value).all()) for value, tensor in held)
    held.clear()
    gc.collect()
    assert arena.free_bytes == arena.num_bytes
    assert len(arena.empty((arena.num_bytes,), torch.uint8)) == arena.num_bytes


def test_a_view_keeps_its_piece():
    arena = HostArena(8 * GRAIN, pinned=False)
    layer = arena.empty((4, GRAIN), torch.bfloat16)[2]
    gc.collect()
    assert arena.free_bytes == arena.num_bytes - 8 * GRAIN
    del layer
    assert arena.free_bytes == arena.num_bytes


def test_what_does_not_fit_is_said_in_one_sentence():
    arena = HostArena(8 * GRAIN, pinned=False)
    with pytest.raises(CapacityError, match=r"serve\.host_mb"):
        arena.empty((2 * arena.num_bytes,), torch.uint8)


class ArenaModel:
    arena: HostArena | None = None
    wants_arena = False


def test_a_model_on_the_host_needs_none():
    model = ArenaModel()
    give_arena(model, 100)
    assert model.arena is None


def test_another_model_goes_on_with_the_same_memory():
    old, new = ArenaModel(), ArenaModel()
    old.arena, new.wants_arena = HostArena(GRAIN, pinned=False), True
    hand_over_arena(old, new)
    assert new.arena is old.arena
