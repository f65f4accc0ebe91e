"""Device memory: what fits, what makes room, and when promises end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.serve.kv_cache.device_pool import Entry, Need, Slots, Source, State
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


def reserved(slots: Slots, user: str, length: int = 2) -> Entry:
    entry = slots.reserve(need(user, length), Source.COMPUTED)
    assert entry
    return entry


def test_the_bound_is_exact():
    slots = Slots(bound=40)
    reserved(slots, "ann", 3)
    reserved(slots, "bob", 2)
    assert slots.num_bytes == 40
    assert slots.reserve(need("eve", 1), Source.COMPUTED) is None


def test_only_what_is_done_makes_room_the_oldest_first():
    slots = Slots(bound=48)
    entries = {user: reserved(slots, user) for user in ("ann", "bob", "eve")}
    slots.idle(entries["bob"])
    slots.idle(entries["ann"])
    assert slots.promised_bytes == 16
    reserved(slots, "tim")
    assert slots.find(need("bob").key) is None
    assert slots.find(need("ann").key) is entries["ann"]
    assert slots.reserve(need("max", 5), Source.COMPUTED) is None, "eve is promised"
    assert slots.find(need("ann").key) is entries["ann"], "it was evicted for nothing"
    assert (slots.evicted, slots.num_bytes) == (1, 48)


def test_what_is_being_copied_makes_no_room():
    slots = Slots(bound=16)
    entry = reserved(slots, "ann")
    entry.copying = True
    slots.idle(entry)
    assert slots.reserve(need("bob"), Source.COMPUTED) is None


def test_what_somebody_needs_is_never_freed():
    slots = Slots(bound=16)
    entry = reserved(slots, "ann")
    entry.users = 1
    with pytest.raises(AssertionError, match="while it is needed"):
        slots.free(entry)
    entry.users, entry.copying = 0, True
    with pytest.raises(AssertionError, match="while it is copied"):
        slots.free(entry)


def test_what_is_unlisted_is_not_found_but_counts_until_it_is_freed():
    slots = Slots(bound=16)
    entry = reserved(slots, "ann")
    slots.unlist(entry)
    assert slots.find(entry.key) is None
    assert (slots.num_bytes, list(slots)) == (16, [entry])
    slots.free(entry)
    assert (slots.num_bytes, list(slots)) == (0, [])


def test_of_two_of_a_key_the_further_one_is_found():
    slots = Slots(bound=64)
    first, second = reserved(slots, "ann"), reserved(slots, "ann")
    assert slots.find(first.key) is first
    second.kv = kv(1)
    assert slots.find(first.key) is second
    first.state = State.READY
    assert slots.find(first.key) is first


def test_a_promise_ends_at_the_latest_time_that_was_given():
    slots = Slots(bound=64)
    ann, bob = reserved(slots, "ann"), reserved(slots, "bob")
    slots.promise(ann, until=1.0)
    slots.promise(bob, until=2.0)
    slots.promise(ann, until=3.0)
    assert slots.next_end() == 1.0
    assert list(slots.ended(now=2.5)) == [bob]
    assert list(slots.ended(now=3.0)) == [ann]
    assert slots.next_end() is None


@pytest.mark.parametrize("state", [State.FILLING, State.IN_USE, State.DONE])
def test_a_promise_does_not_end_under_those_who_work_with_it(state: State):
    slots = Slots(bound=64)
    entry = reserved(slots, "ann")
    entry.state = state
    slots.promise(entry, until=1.0)
    assert list(slots.ended(now=2.0)) == []


@pytest.mark.parametrize(("events", "accepted"), [(1, False), (2, True), (3, True), (4, False)])
def test_an_entry_takes_only_more_of_its_own(events: int, accepted: bool):
    entry = Entry(need("ann", 3), Source.COMPUTED, kv=kv(1))
    assert entry.accepts(kv(events)) == accepted


def test_an_entry_takes_no_more_bytes_than_were_set_aside():
    entry = Entry(need("ann", 3), Source.COMPUTED)
    wide = KV(torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 1, 2))
    assert not entry.accepts(wide)
