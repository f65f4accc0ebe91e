"""Reuse in a log: one pass answers for every size what a store of that size would do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.loadtest.advise import LoggedRequest, reuse, share_by_replay
from nestpipe.serve.engine.kv_memory import HostTier
from nestpipe.serve.types import KV, PrefixKey


def asked(text: str, num_bytes: int = 10) -> list[LoggedRequest]:
    """Users by letter, one a second."""
    return [LoggedRequest(float(t), (user, 0), num_bytes) for t, user in enumerate(text)]


def test_distances_by_hand():
    found = reuse(asked("ABABCA"))
    inf = np.inf
    # The last A comes after B and C: all three must fit.
    assert found.bytes_R.tolist() == [inf, inf, 20, 20, inf, 30]
    assert found.gaps_R.tolist() == [inf, inf, 2, 2, inf, 3]
    assert found.share() == 0.5
    assert found.share(num_bytes=20) == pytest.approx(2 / 6)
    assert found.share(num_bytes=19) == 0
    assert found.share(ttl_s=2) == pytest.approx(2 / 6)


def test_memory_for_a_share():
    found = reuse(asked("ABABCA"))
    assert found.bytes_for(0) == 0
    assert found.bytes_for(1 / 6) == 20
    assert found.bytes_for(2 / 6) == 20
    assert found.bytes_for(0.5) == 30
    assert found.bytes_for(0.5, ttl_s=2) is None
    assert found.bytes_for(0.6) is None


def test_a_prefix_that_grew_is_another():
    found = reuse(
        [
            LoggedRequest(0, ("A", 256), 1),
            LoggedRequest(1, ("A", 512), 2),
            LoggedRequest(2, ("A", 512), 2),
        ]
    )
    assert found.gaps_R.tolist() == [np.inf, np.inf, 1]


requests = st.lists(
    st.tuples(st.sampled_from("ABCDEF"), st.integers(0, 2), st.floats(0, 5)), max_size=60
)


def made(draws) -> list[LoggedRequest]:
    time = 0.0
    found: list[LoggedRequest] = []
    for user, step, gap in draws:
        time += gap
        size = 3 * (step + 1) + ord(user) % 5
        found.append(LoggedRequest(time, (user, step), size))
    return found


@given(requests, st.integers(16, 80), st.sampled_from([1.0, 4.0, 10.0, float("inf")]))
def test_one_pass_equals_keeping_the_store(draws, num_bytes, ttl_s):
    log = made(draws)
    assert reuse(log).share(num_bytes, ttl_s) == pytest.approx(
        share_by_replay(log, num_bytes, ttl_s)
    )


@given(requests, st.integers(16, 80), st.sampled_from([1.25, 4.25, 10.25]))
def test_the_store_is_the_expander_of_the_service(draws, num_bytes, ttl_s):
    log = made(draws)
    store = HostTier(num_bytes, ttl_s)
    served = 0
    for one in log:
        key = PrefixKey(one.key[0], "v", one.key[1], "", "float32")
        store.expire(one.time_s - 1e-9)  # a gap that is just the TTL counts as reuse
        if store.holds(key, one.time_s - 1e-9):
            served += 1
            store.pin(key, one.time_s)
            store.unpin(key)
        elif store.begin(key, one.num_bytes, one.time_s):
            store.finish(key, KV(None, None), one.time_s)  # type: ignore[arg-type]
    expected = reuse(log).share(num_bytes, ttl_s)
    assert served == pytest.approx(expected * len(log))


@given(requests, st.floats(0, 1), st.sampled_from([4.0, float("inf")]))
def test_the_memory_for_a_share_gives_it_and_less_does_not(draws, share, ttl_s):
    found = reuse(made(draws))
    need = found.bytes_for(share, ttl_s)
    if need is None:
        assert found.share(ttl_s=ttl_s) < share
    elif need > 0:
        assert found.share(need, ttl_s) >= share - 1e-9
        assert found.share(need - 1, ttl_s) < share
