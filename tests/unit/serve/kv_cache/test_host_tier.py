"""Host memory: least recently used first out, nothing from under a copy, nothing for ever."""

from __future__ import annotations

import pytest
import torch

from nestpipe.serve.engine.kv_memory import HostTier
from nestpipe.serve.types import KV, PrefixKey


def key(user: str, version: str = "1") -> PrefixKey:
    return PrefixKey(user, version, 2, "events", "float32")


def kv(number: float = 0.0) -> KV:
    return KV(torch.full((1, 2, 1, 1), number), torch.full((1, 2, 1, 1), number))


def keep(host_tier: HostTier, user: str, now: float, num_bytes: int = 10) -> bool:
    if not host_tier.begin(key(user), num_bytes, now):
        return False
    host_tier.finish(key(user), kv(), now)
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
    assert host_tier.read(key("a")).num_bytes == kv().num_bytes
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
        (lambda e: e.finish(key("a"), kv(), 0.0), "was copied twice"),
        (lambda e: e.cancel(key("a")), "has come"),
    ],
)
def test_a_bug_of_ours_is_noticed(misuse, sentence: str):
    host_tier = HostTier(bound=100, ttl_s=10.0)
    assert keep(host_tier, "a", 0.0)
    with pytest.raises(AssertionError, match=sentence):
        misuse(host_tier)
