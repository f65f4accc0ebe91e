"""Device memory: what fits, what makes room, and when promises end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.serve.engine.kv_memory import DevicePool, Entry, EntryState, KVSource, Need
from nestpipe.serve.types import KV, History


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
