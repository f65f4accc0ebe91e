"""One `acquire` for both legs, told as stories; in any order: test_cache_machine.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.serve.engine.kv_cache import Cache, Fill, Load, Miss, Promised, Purpose, Use, Wait
from nestpipe.serve.engine.kv_memory import DevicePool, Entry, EntryState, HostTier, Need
from nestpipe.serve.types import KV, History

SIGNAL, RANK, KEEP = Purpose.SIGNAL, Purpose.RANK, Purpose.RANK_AND_KEEP


class Model:
    dtype = "float32"

    def __init__(self, version: str = "1"):
        self.version = version

    def kv_bytes(self, length: int) -> int:
        return 8 * length


MODELS = {version: Model(version) for version in "12"}


def need(user: str = "ann", length: int = 2, version: str = "1") -> Need:
    return Need.of(user, History(np.arange(length)), MODELS[version])  # pyright: ignore


def kv(length: int = 2) -> KV:
    return KV(torch.zeros(1, length, 1, 1), torch.zeros(1, length, 1, 1))


def never(entry: Entry) -> bool:
    """Nothing comes in time."""
    return False


def cache(device_pool: int = 1000, host: int | None = 1000, **changes: Any) -> Cache:
    host_tier = None if host is None else HostTier(host, ttl_s=60.0)
    return Cache(DevicePool(device_pool), host_tier, **{"life_s": 1.0, "reloads": 2, **changes})


def ready(made: Cache, wanted: Need, now: float = 0.0) -> Entry:
    """A signal, and the prefix computed."""
    assert isinstance(made.acquire(wanted, SIGNAL, now), Fill)
    entry = made.next_fill()
    assert entry
    made.filled(entry, kv(wanted.key.length), now)
    return entry


def kept(made: Cache, wanted: Need) -> None:
    """A prefix that was used, copied to host memory, and freed."""
    entry = ready(made, wanted)
    assert isinstance(made.acquire(wanted, RANK, 0.0), Use)
    made.released(entry)
    assert made.next_copy(0.0) == (entry, entry.kv)
    made.copied(entry, kv(wanted.key.length), 0.0)
    assert made.device_pool.num_bytes == 0


def test_the_life_of_a_prefix():
    made = cache()
    step = made.acquire(need(), SIGNAL, 0.0)
    assert isinstance(step, Fill)
    entry = step.entry
    assert entry.state is EntryState.RESERVED
    assert made.next_fill() is entry
    assert entry.state is EntryState.FILLING
    assert made.filled(entry, kv(1), 0.0) == []
    assert (entry.state, made.next_fill()) == (EntryState.FILLING, entry)
    made.filled(entry, kv(2), 0.0)
    assert entry.state is EntryState.READY
    assert made.acquire(need(), RANK, 0.1) == Use(entry)
    assert entry.state is EntryState.IN_USE
    made.released(entry)
    assert entry.state is EntryState.DONE
    assert made.next_copy(0.2)
    made.copied(entry, kv(), 0.3)
    assert (made.device_pool.find(entry.key), made.device_pool.num_bytes) == (None, 0)


def test_without_host_memory_what_was_used_is_freed_at_once():
    made = cache(host=None)
    entry = ready(made, need())
    made.acquire(need(), RANK, 0.0)
    made.released(entry)
    assert (made.device_pool.num_bytes, made.next_copy(0.0)) == (0, None)


def test_several_rankings_read_one_prefix():
    made = cache(host=None)
    entry = ready(made, need())
    assert [made.acquire(need(), RANK, 0.0) for _ in range(3)] == [Use(entry)] * 3
    made.released(entry)
    made.released(entry)
    assert made.device_pool.num_bytes == 16
    made.released(entry)
    assert made.device_pool.num_bytes == 0


def test_each_signal_promises_the_prefix_to_one_more_ranking():
    made = cache(host=None)
    entry = ready(made, need())
    assert made.acquire(need(), SIGNAL, 0.0) == Promised(entry)
    assert made.acquire(need(), RANK, 0.0) == Use(entry)
    made.released(entry)
    assert entry.state is EntryState.READY
    assert made.acquire(need(), RANK, 0.0) == Use(entry)
    made.released(entry)
    assert made.device_pool.num_bytes == 0


def test_a_ranking_joins_what_is_on_its_way():
    made = cache()
    made.acquire(need("bob"), SIGNAL, 0.0)
    step = made.acquire(need(), SIGNAL, 0.0)
    assert isinstance(step, Fill)
    assert made.acquire(need(), RANK, 0.0, ticket="t1") == Wait(step.entry)
    assert made.acquire(need(), RANK, 0.0, ticket="t2") == Wait(step.entry)
    assert made.next_fill() is step.entry, "what a ranking waits for goes first"
    made.leave(step.entry, "t1")
    assert made.filled(step.entry, kv(), 0.0) == ["t2"]
    assert (step.entry.state, step.entry.users) == (EntryState.IN_USE, 1)


def test_a_ranking_never_computes_a_prefix_unless_it_is_to_be_kept():
    made = cache()
    assert made.acquire(need(), RANK, 0.0) is Miss.NOWHERE
    assert isinstance(made.acquire(need(), KEEP, 0.0, ticket="t"), Fill)
    entry = made.next_fill()
    assert entry
    assert made.filled(entry, kv(), 0.0) == ["t"]


def test_a_prefix_that_is_to_be_kept_is_computed_though_its_ranking_cannot_wait():
    made = cache()
    assert made.acquire(need(), KEEP, 0.0, "t", never) is Miss.TOO_LATE
    assert made.acquire(need(), KEEP, 0.0, "u", never) is Miss.TOO_LATE, "no second"
    entry = made.next_fill()
    assert entry
    assert made.filled(entry, kv(), 0.0) == []
    copy = made.next_copy(0.0)
    assert copy
    made.copied(*copy, 0.0)
    made.expire(10.0)
    assert made.counts["wasted_prefixes"] == made.counts["abandoned_fills"] == 0
    assert made.host_tier
    assert made.host_tier.holds(need().key, 10.0)


def test_a_prefix_that_is_to_be_kept_is_computed_though_its_ranking_left():
    made = cache()
    step = made.acquire(need(), KEEP, 0.0, ticket="t")
    assert isinstance(step, Fill)
    made.leave(step.entry, "t")
    assert made.next_fill() is step.entry


def test_a_prefix_of_a_retired_model_is_not_computed_to_be_kept():
    made = cache()
    step = made.acquire(need(), KEEP, 0.0, ticket="t")
    assert isinstance(step, Fill)
    made.leave(step.entry, "t")
    made.retire(need().key.version)
    assert made.next_fill() is None
    assert made.device_pool.num_bytes == 0


def test_a_lost_signal_still_finds_host_memory():
    made = cache()
    kept(made, need())
    step = made.acquire(need(), RANK, 0.0, ticket="t")
    assert isinstance(step, Load)
    assert made.acquire(need(), RANK, 0.0, ticket="u") == Wait(step.entry), "one reload for both"
    load = made.next_load(0.0)
    assert load
    assert made.next_load(0.0) is None
    assert made.loaded(load[0], kv(), 0.0) == ["t", "u"]


def test_a_reload_that_has_begun_is_not_begun_again_by_who_joins():
    made = cache()
    kept(made, need())
    made.acquire(need(), SIGNAL, 0.0)
    load = made.next_load(0.0)
    assert load
    assert made.acquire(need(), RANK, 0.0, ticket="t") == Wait(load[0])
    assert made.next_load(0.0) is None
    assert made.loaded(load[0], kv(), 0.0) == ["t"]


def test_only_so_many_reloads_run_at_once():
    made = cache(reloads=2)
    for user in "abc":
        kept(made, need(user))
    for user in "abc":
        assert isinstance(made.acquire(need(user), SIGNAL, 0.0), Load)
    loads = [made.next_load(0.0) for _ in range(3)]
    assert [bool(load) for load in loads] == [True, True, False]
    assert loads[0]
    made.loaded(loads[0][0], kv(), 0.0)
    assert made.next_load(0.0)


def test_what_is_still_in_host_memory_is_not_copied_there_again():
    made = cache()
    kept(made, need())
    made.acquire(need(), RANK, 0.0, ticket="t")
    load = made.next_load(0.0)
    assert load
    made.loaded(load[0], kv(), 0.0)
    made.released(load[0])
    assert (made.device_pool.num_bytes, made.next_copy(0.0)) == (0, None)


def test_a_ranking_does_not_wait_past_its_deadline_and_the_fill_is_given_up():
    made = cache()
    step = made.acquire(need(), SIGNAL, 0.0)
    assert isinstance(step, Fill)
    assert made.next_fill() is step.entry
    assert made.acquire(need(), RANK, 0.0, "t", never) is Miss.TOO_LATE
    made.filled(step.entry, kv(1), 0.0)
    assert (made.next_fill(), made.device_pool.num_bytes) == (None, 0)
    assert made.counts["abandoned_fills"] == 1


def test_a_reservation_that_its_ranking_cannot_wait_for_is_free_at_once():
    """Else it is room that nobody can have until the model's thread comes past it."""
    made = cache(device_pool=16)
    assert isinstance(made.acquire(need("ann"), SIGNAL, 0.0), Fill)
    assert made.acquire(need("ann"), RANK, 0.0, "t", never) is Miss.TOO_LATE
    assert made.device_pool.num_bytes == 0
    assert isinstance(made.acquire(need("bob"), SIGNAL, 0.0), Fill)


def test_a_prefix_that_host_memory_has_is_not_reloaded_for_nobody():
    """Only what is nowhere is made to last: a reload without a ranking costs a copy and room."""
    made = cache()
    kept(made, need())
    step = made.acquire(need(), KEEP, 0.0, "t")
    assert isinstance(step, Load)
    made.leave(step.entry, "t")
    assert (made.device_pool.num_bytes, made.next_load(0.0)) == (0, None)


def test_promised_memory_is_refused_to_others():
    made = cache(device_pool=32)
    first, _ = ready(made, need("a")), ready(made, need("b"))
    assert made.acquire(need("c"), SIGNAL, 0.0) is Miss.NO_ROOM
    made.acquire(need("a"), RANK, 0.0)
    assert made.acquire(need("c"), SIGNAL, 0.0) is Miss.NO_ROOM
    made.released(first)
    assert isinstance(made.acquire(need("c"), SIGNAL, 0.0), Fill), "a is done"
    assert made.device_pool.num_bytes == 32


def test_nobody_came_for_it():
    made = cache()
    ready(made, need(), now=0.0)
    assert not made.expire(0.99)
    assert made.expire(1.0)
    assert (made.device_pool.num_bytes, made.counts["wasted_prefixes"]) == (0, 1)
    assert made.next_copy(1.0) is None


def test_a_promise_counts_from_the_moment_that_the_prefix_is_ready():
    """A slow fill must not eat the time that its ranking has to come."""
    made = cache()
    assert isinstance(made.acquire(need(), SIGNAL, 0.0), Fill)
    entry = made.next_fill()
    assert entry
    made.filled(entry, kv(), 0.9)
    assert not made.expire(1.5)
    assert made.device_pool.find(need().key) is entry
    assert made.expire(1.9)
    assert (made.device_pool.num_bytes, made.counts["wasted_prefixes"]) == (0, 1)


def test_a_later_signal_renews_the_promise():
    made = cache()
    entry = ready(made, need(), now=0.0)
    made.acquire(need(), SIGNAL, 0.8)
    made.expire(1.5)
    assert made.acquire(need(), RANK, 1.5) == Use(entry)


def test_a_promise_that_ends_while_its_prefix_is_read_ends_after():
    made = cache()
    entry = ready(made, need(), now=0.0)
    made.acquire(need(), SIGNAL, 0.0)
    made.acquire(need(), RANK, 0.5)
    made.expire(2.0)
    made.released(entry)
    assert made.expire(2.0)
    assert (entry.state, made.counts["wasted_prefixes"]) == (EntryState.DONE, 0)


def test_a_signal_that_was_never_worked_on_ends_too():
    made = cache()
    made.acquire(need(), SIGNAL, 0.0)
    made.expire(1.0)
    assert (made.device_pool.num_bytes, made.next_fill()) == (0, None)


def test_a_failed_fill_sends_the_rankings_away():
    made = cache()
    made.acquire(need(), SIGNAL, 0.0)
    made.acquire(need(), RANK, 0.0, ticket="t")
    entry = made.next_fill()
    assert entry
    assert made.failed(entry) == ["t"]
    assert (made.device_pool.num_bytes, made.next_fill()) == (0, None)


def test_a_failed_copy_is_not_tried_for_ever():
    made = cache()
    entry = ready(made, need())
    made.acquire(need(), RANK, 0.0)
    made.released(entry)
    assert made.next_copy(0.0)
    made.copied(entry, None, 0.0)
    assert (made.next_copy(0.0), made.device_pool.num_bytes) == (None, 0)


def test_who_returns_during_the_copy_out_reads_what_is_being_copied():
    made = cache()
    entry = ready(made, need())
    made.acquire(need(), RANK, 0.0)
    made.released(entry)
    assert made.next_copy(0.0)
    assert made.acquire(need(), RANK, 0.0) == Use(entry)
    made.copied(entry, kv(), 0.0)
    assert entry.state is EntryState.IN_USE
    made.released(entry)
    assert made.device_pool.num_bytes == 0


@pytest.mark.parametrize("when", ["ready", "in use", "copying", "loading"])
def test_the_prefixes_of_a_retired_model_go_as_they_fall_free(when: str):
    made = cache()
    if when == "loading":
        kept(made, need())
        made.acquire(need(), SIGNAL, 0.0)
        load = made.next_load(0.0)
        assert load
        made.retire("1")
        made.loaded(load[0], kv(), 0.0)
    else:
        entry = ready(made, need())
        if when != "ready":
            made.acquire(need(), RANK, 0.0)
        if when == "copying":
            made.released(entry)
            made.next_copy(0.0)
        made.retire("1")
        if when == "in use":
            assert entry.kv is not None
            made.released(entry)
        if when == "copying":
            made.copied(entry, kv(), 0.0)
    assert (made.device_pool.num_bytes, made.next_copy(0.0)) == (0, None)
    assert made.host_tier is not None
    assert len(made.host_tier) == 0


def test_another_version_is_another_key():
    made = cache()
    ready(made, need())
    assert made.acquire(need(version="2"), RANK, 0.0) is Miss.NOWHERE


def test_what_is_discarded_is_found_by_nobody_and_freed_after_its_last_reader():
    made = cache()
    entry = ready(made, need())
    made.acquire(need(), RANK, 0.0)
    made.acquire(need(), RANK, 0.0)
    made.discard(entry)
    made.released(entry)
    assert made.acquire(need(), RANK, 0.0) is Miss.NOWHERE
    assert (made.device_pool.num_bytes, entry.kv is None) == (16, False)
    made.released(entry)
    assert (made.device_pool.num_bytes, made.next_copy(0.0)) == (0, None)


# Reloads that come by layers


def coming_back(made: Cache, purpose: Purpose = RANK) -> Entry:
    """A prefix of which the first layer is back; its ranking reads it."""
    kept(made, need())
    assert isinstance(made.acquire(need(), purpose, 0.0, ticket="t"), Load)
    load = made.next_load(0.0)
    assert load
    assert made.begun(load[0], kv(), 0.0) == (["t"] if purpose is RANK else [])
    return load[0]


def test_a_reload_that_has_begun_is_read_and_stays_pinned_until_it_ends():
    made = cache(host=16)
    entry = coming_back(made)
    assert made.acquire(need(), RANK, 0.0) == Use(entry), "one reload for both"
    made.released(entry)
    made.released(entry)
    assert (entry.state, made.device_pool.num_bytes, made.next_copy(0.0)) == (
        EntryState.DONE,
        16,
        None,
    )
    assert made.host_tier
    assert not made.host_tier.begin(need("bob").key, 16, 0.0), "its place was given away"
    assert made.loaded(entry, kv(), 0.0) == []
    assert (made.device_pool.num_bytes, made.loading) == (0, 0)
    assert made.host_tier.begin(need("bob").key, 16, 0.0)


def test_a_reload_that_fails_half_way_goes_when_its_readers_have_gone():
    made = cache()
    entry = coming_back(made)
    assert made.failed(entry) == []
    assert isinstance(made.acquire(need(), RANK, 0.0, ticket="u"), Load), "it was found again"
    assert (made.loading, made.device_pool.num_bytes) == (0, 32)
    made.released(entry)
    assert made.device_pool.num_bytes == 16


def test_a_promise_does_not_outlive_a_reload_that_fails_half_way():
    made = cache()
    coming_back(made, SIGNAL)
    (entry,) = made.device_pool
    assert made.failed(entry) == []
    assert made.device_pool.num_bytes == 0


# Several fills at once


@pytest.mark.parametrize(
    ("lengths", "together"), [([2, 2, 2], 3), ([2, 5, 1], 1), ([8, 1], 1), ([3, 3, 1], 2), ([6], 1)]
)
def test_short_prefixes_are_computed_together(lengths: list[int], together: int):
    made = cache()
    for number, length in enumerate(lengths):
        made.acquire(need(f"u{number}", length), SIGNAL, 0.0)
    chosen = made.next_fills(6, 8)
    assert [entry.key.user for entry in chosen] == [f"u{n}" for n in range(together)]
    assert all(entry.state is EntryState.FILLING for entry in chosen)


def test_no_more_prefixes_are_computed_together_than_a_batch_has():
    made = cache()
    for user in "abc":
        made.acquire(need(user), SIGNAL, 0.0)
    assert len(made.next_fills(100, 2)) == 2


def test_what_a_ranking_waits_for_is_not_held_up_by_what_nobody_waits_for():
    made = cache()
    for user in "abc":
        made.acquire(need(user), SIGNAL, 0.0)
    made.acquire(need("b"), RANK, 0.0, ticket="t")
    assert [entry.key.user for entry in made.next_fills(100, 8)] == ["b"]


def test_prefixes_of_different_models_are_not_computed_together():
    made = cache()
    one, other = need("a"), need("b", version="2")
    made.acquire(one, SIGNAL, 0.0)
    made.acquire(other, SIGNAL, 0.0)
    assert len(made.next_fills(100, 8)) == 1


def test_what_nobody_wants_any_more_is_not_computed_with_others():
    made = cache(life_s=1.0)
    for user in "abc":
        made.acquire(need(user), SIGNAL, 0.0)
    entry = made.device_pool.find(need("b").key)
    assert entry
    entry.promises = 0
    assert [entry.key.user for entry in made.next_fills(100, 8)] == ["a", "c"]
