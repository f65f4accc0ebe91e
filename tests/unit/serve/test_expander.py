"""Host memory: least recently used first out, nothing from under a copy, nothing for ever."""

from __future__ import annotations

import pytest
import torch

from nestpipe.serve.kv_cache.host_tier import Expander
from nestpipe.serve.types import KV, PrefixKey


def key(user: str, version: str = "1") -> PrefixKey:
    return PrefixKey(user, version, 2, "events", "float32")


def kv(number: float = 0.0) -> KV:
    return KV(torch.full((1, 2, 1, 1), number), torch.full((1, 2, 1, 1), number))


def keep(expander: Expander, user: str, now: float, num_bytes: int = 10) -> bool:
    if not expander.begin(key(user), num_bytes, now):
        return False
    expander.finish(key(user), kv(), now)
    return True


def held(expander: Expander, now: float) -> str:
    return "".join(user for user in "abcdef" if expander.holds(key(user), now))


def test_the_least_recently_used_goes_first():
    expander = Expander(bound=30, ttl_s=100.0)
    for now, user in enumerate("abc"):
        assert keep(expander, user, now)
    expander.pin(key("a"), 3.0)
    expander.unpin(key("a"))
    assert keep(expander, "d", 4.0)
    assert held(expander, 5.0) == "acd"
    assert (expander.num_bytes, expander.evicted) == (30, 1)


def test_room_is_made_before_the_copy():
    expander = Expander(bound=30, ttl_s=100.0)
    for user in "abc":
        assert keep(expander, user, 0.0)
    assert expander.begin(key("d"), 20, 1.0)
    assert expander.num_bytes == 30
    assert held(expander, 1.0) == "c"
    expander.cancel(key("d"))
    assert (expander.num_bytes, key("d") in expander) == (10, False)


def test_what_is_copied_or_reloaded_is_not_evicted():
    expander = Expander(bound=20, ttl_s=100.0)
    assert keep(expander, "a", 0.0)
    expander.pin(key("a"), 0.0)
    assert expander.begin(key("b"), 10, 0.0)
    assert not keep(expander, "c", 1.0)
    assert expander.read(key("a")).num_bytes == kv().num_bytes
    expander.unpin(key("a"))
    assert keep(expander, "c", 2.0)


def test_what_is_here_already_is_not_copied_again():
    expander = Expander(bound=20, ttl_s=100.0)
    assert keep(expander, "a", 0.0)
    assert not expander.begin(key("a"), 10, 1.0)
    assert expander.begin(key("b"), 10, 1.0)
    assert not expander.begin(key("b"), 10, 1.0), "its copy is under way"
    assert not expander.holds(key("b"), 1.0)


def test_what_is_larger_than_all_of_it_evicts_nothing():
    expander = Expander(bound=20, ttl_s=100.0)
    assert keep(expander, "a", 0.0)
    assert not keep(expander, "b", 1.0, num_bytes=21)
    assert held(expander, 1.0) == "a"


def test_what_nobody_comes_for_expires_and_use_renews():
    expander = Expander(bound=100, ttl_s=10.0)
    for user in "abc":
        assert keep(expander, user, 0.0)
    expander.pin(key("b"), 5.0)
    expander.unpin(key("b"))
    expander.pin(key("c"), 5.0)
    assert held(expander, 9.9) == "abc"
    assert held(expander, 10.0) == "bc"
    expander.expire(15.0)
    assert held(expander, 15.0) == "c", "it is being reloaded"
    assert (expander.num_bytes, expander.expired) == (10, 2)
    expander.unpin(key("c"))
    expander.expire(15.0)
    assert len(expander) == 0


def test_what_is_stale_is_dropped_but_not_from_under_a_reload():
    expander = Expander(bound=100, ttl_s=10.0)
    for user in "abc":
        assert keep(expander, user, 0.0)
    expander.pin(key("b"), 0.0)
    expander.drop_where(lambda kept: kept.user != "c")
    assert held(expander, 0.0) == "bc"


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
    expander = Expander(bound=100, ttl_s=10.0)
    assert keep(expander, "a", 0.0)
    with pytest.raises(AssertionError, match=sentence):
        misuse(expander)
