"""The requests of a load test: the same for every arm, and what the settings say they are."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import pytest

from nestpipe.errors import ConfigError
from nestpipe.loadtest.settings import WorkloadSettings
from nestpipe.loadtest.workload import Histories, legs, reuse_share, visits
from nestpipe.serve.types import PrefixKey, RankRequest, Signal

PLAIN = WorkloadSettings(rate=100, seconds=50, length=128, short=16)


def test_the_same_seed_makes_the_same_requests():
    assert visits(PLAIN) == visits(PLAIN)
    assert visits(PLAIN) != visits(replace(PLAIN, seed=1))


def test_another_length_changes_nothing_else():
    def others(settings):
        return [(visit.signal_s, visit.rank_s, visit.user) for visit in visits(settings)]

    assert others(PLAIN) == others(replace(PLAIN, length=1024, candidates=7))


def test_arrivals_are_poisson():
    signals = np.array([visit.signal_s for visit in visits(replace(PLAIN, seconds=200))])
    gaps = np.diff(signals)
    assert len(signals) == pytest.approx(20_000, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # an exponential distribution's mark
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_a_ranking_follows_its_signal_after_both_delays():
    made = visits(PLAIN)
    delays_ms = [1e3 * (visit.rank_s - visit.signal_s) for visit in made]
    assert fmean(delays_ms) == pytest.approx(100, rel=0.02)
    assert np.std(delays_ms) == pytest.approx((12**2 + 8**2) ** 0.5, rel=0.05)
    exact = visits(replace(PLAIN, delay_jitter=0))
    assert {round(1e3 * (visit.rank_s - visit.signal_s), 6) for visit in exact} == {100.0}


@pytest.mark.parametrize("tail", ["log_normal", "pareto"])
def test_the_return_share_is_the_rate_of_reuse(tail):
    base = replace(PLAIN, seconds=100, return_median_s=0.5, popularity=0, return_tail=tail)
    for share in (0.0, 0.3, 0.6, 0.9):
        found = reuse_share(visits(replace(base, return_share=share, new_events=0)))
        assert found == pytest.approx(share, abs=0.06)


def test_users_come_back_after_about_the_median_time():
    made = visits(replace(PLAIN, seconds=100, return_median_s=2.0, popularity=0, users=10**9))
    last: dict[int, float] = {}
    gaps: list[float] = []
    for visit in made:
        if visit.user in last:
            gaps.append(visit.signal_s - last[visit.user])
        last[visit.user] = visit.signal_s
    assert median(gaps) == pytest.approx(2.0, rel=0.15)
    assert max(gaps) > 5 * median(gaps)


def test_popular_users_come_more_often():
    alone = replace(PLAIN, return_share=0, users=1000, popularity=1.0)
    often = Counter(visit.user for visit in visits(alone))
    assert often[0] / often.total() == pytest.approx(0.1, abs=0.03)


def test_lengths_spread_around_the_median_and_are_capped():
    made = visits(replace(PLAIN, length_spread=0.8, most_length=400, new_events=0))
    lengths = {visit.user: visit.asked for visit in made}
    assert median(lengths.values()) == pytest.approx(128, rel=0.1)
    assert max(lengths.values()) == 400
    assert min(lengths.values()) >= 2
    assert all(visit.long >= 1 for visit in made)


def test_a_history_grows_at_its_newer_end_and_in_steps():
    settings = replace(PLAIN, users=1, new_events=3, grow_by=8, most_length=160, seconds=1)
    made = visits(settings)
    histories = Histories(settings)
    whole = [np.concatenate([part.items_N for part in histories.of(visit)]) for visit in made]
    for before, after in pairwise(whole):
        assert np.array_equal(after[: len(before)], before)
    assert [visit.asked for visit in made[:4]] == [128, 131, 134, 137]
    assert [visit.long for visit in made[:4]] == [112, 112, 112, 120]
    assert made[-1].asked == 160
    assert {visit.long % 8 for visit in made} == {0}


def test_a_user_who_returns_has_the_same_prefix():
    settings = replace(PLAIN, users=3, seconds=2, new_events=0)
    keys: dict[str, set[PrefixKey]] = {}
    for leg in legs(settings, visits(settings)):
        key = PrefixKey.of(leg.message.user, leg.message.long, "v", "float32")
        keys.setdefault(leg.message.user, set()).add(key)
    assert len(keys) == 3
    assert all(len(of_user) == 1 for of_user in keys.values())


def test_legs_come_in_order_and_in_pairs():
    made = visits(PLAIN)
    sent = list(legs(PLAIN, made))
    assert [leg.due_s for leg in sent] == sorted(leg.due_s for leg in sent)
    signals = [leg for leg in sent if isinstance(leg.message, Signal)]
    assert len(signals) == len(sent) - len(signals) == len(made)


def test_a_cap_keeps_the_newest_events():
    made = visits(replace(PLAIN, seconds=1))

    def rankings(cap=None) -> list[RankRequest]:
        sent = [leg.message for leg in legs(PLAIN, made, cap)]
        return [message for message in sent if isinstance(message, RankRequest)]

    for whole, capped in zip(rankings(), rankings(cap=40), strict=True):
        full, sent = whole.long.joined(whole.short), capped.long.joined(capped.short)
        assert np.array_equal(sent.items_N, full.items_N[-40:])


def test_events_have_times_where_the_model_reads_them():
    settings = replace(PLAIN, times=True, seconds=1)
    for leg in legs(settings, visits(settings)):
        assert leg.message.long.times_N is not None
        if isinstance(leg.message, RankRequest):
            times_N = leg.message.long.joined(leg.message.short).times_N
            assert times_N is not None
            assert (np.diff(times_N) > 0).all()
            assert (leg.message.time or 0) > times_N[-1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rate": 0}, "rate is 0; give a number above 0"),
        ({"return_share": 1.5}, "return_share is 1.5; give a number from 0 to 1"),
        ({"length": 16}, "length is 16 and its newest 16 events are the short history"),
        ({"length": 20_000}, "length is 20000, but most_length 16384"),
        ({"warmup_s": 50}, "leave some seconds to measure"),
    ],
)
def test_wrong_settings_are_one_sentence(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(PLAIN, **changes)
