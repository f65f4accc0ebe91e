"""The admission prepares what would miss the target, within memory and time; costs are learned."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import ConfigError, ParseError
from nestpipe.serve.engine.admission import (
    ENOUGH,
    KEEP_S,
    AdmissionControl,
    Costs,
    EngineLoad,
    Fit,
    TokenBucket,
    Work,
    fit,
    p99,
    seconds_apart,
)
from nestpipe.serve.engine.calibration import calibrate, high
from nestpipe.serve.types import KV, AdmissionOutcome, ServeSettings

MB = 2**20


@dataclass
class HandClock:
    time: float = 100.0

    def now(self) -> float:
        return self.time


COSTS = Costs({Work.INLINE: Fit(n=0.01, nn=1e-5), Work.PREFIX: Fit(n=0.01)})
"""Inline: 20 ms at 1000 events, 60 ms at 2000; prefix: 10 and 20 ms."""


def admission(
    clock: HandClock | None = None, kv_bytes=lambda n: n * 1000, **settings
) -> AdmissionControl:
    return AdmissionControl(ServeSettings(**settings), COSTS, kv_bytes, clock or HandClock())


# The admission


def test_only_rankings_that_might_miss_the_target_are_prepared():
    # 40 ms are allowed: 50 less a fifth
    assert admission().decide(1000, 100, EngineLoad()) is AdmissionOutcome.NOT_AT_RISK
    assert admission().decide(2000, 100, EngineLoad()) is AdmissionOutcome.ADMITTED


def test_a_queue_before_the_ranking_puts_it_at_risk():
    assert (
        admission().decide(1000, 100, EngineLoad(rank_queue_ms=20.0))
        is AdmissionOutcome.NOT_AT_RISK
    )
    assert (
        admission().decide(1000, 100, EngineLoad(rank_queue_ms=20.1)) is AdmissionOutcome.ADMITTED
    )


def test_what_would_only_just_be_in_time_is_prepared():
    """Inline 42.2 ms of 45: by the time of its ranking it may be 45.1, and would be cut."""
    length, settings = 1614, ServeSettings()
    inline_ms = COSTS.inline_ms(length, 100)
    assert 1 - settings.risk < inline_ms / settings.target_ms < 1 - settings.margin
    assert admission().decide(length, 100, EngineLoad()) is AdmissionOutcome.ADMITTED
    assert (
        admission(risk=settings.margin).decide(length, 100, EngineLoad())
        is AdmissionOutcome.NOT_AT_RISK
    )


def test_the_risk_is_what_the_trigger_asks_for():
    # Inline: 60 ms of 100
    assert (
        admission(target_ms=100, risk=0.4).decide(2000, 100, EngineLoad())
        is AdmissionOutcome.NOT_AT_RISK
    )
    assert (
        admission(target_ms=100, risk=0.401).decide(2000, 100, EngineLoad())
        is AdmissionOutcome.ADMITTED
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"risk": 1.2}, "risk is 1.2; give a number from 0 to 1"),
        ({"risk": float("nan")}, "risk is nan; give a number from 0 to 1"),
        ({"risk": 0.05}, "risk is 0.05 and margin is 0.1; give a risk that is not below"),
        ({"margin": 0.3}, "risk is 0.2 and margin is 0.3; give a risk that is not below"),
    ],
)
def test_a_risk_that_cannot_be_used_is_refused(settings, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        ServeSettings(**settings)


@pytest.mark.parametrize(("cached_ms", "queue_ms"), [(0, 125), (5, 120), (44, 81), (60, 80)])
def test_a_prefix_that_cannot_be_ready_in_time_is_not_begun(cached_ms: float, queue_ms: float):
    """It takes 20 ms, and has the window, 100 ms, and what its ranking can wait: 45 ms less its own
    time."""
    costs = Costs({**COSTS.fits, Work.CACHED: Fit(base=cached_ms)})
    ready = AdmissionControl(ServeSettings(), costs, lambda n: n * 1000, HandClock())
    assert (
        ready.decide(2000, 100, EngineLoad(prefix_queue_ms=queue_ms)) is AdmissionOutcome.ADMITTED
    )
    late = EngineLoad(prefix_queue_ms=queue_ms + 0.1)
    assert ready.decide(2000, 100, late) is AdmissionOutcome.REJECTED_WINDOW


def test_memory_is_a_hard_bound_to_the_byte():
    def decide(live: int) -> AdmissionOutcome:
        ready = admission(kv_bytes=lambda n: MB, device_mb=3.0)
        return ready.decide(2000, 100, EngineLoad(live_bytes=live))

    assert decide(2 * MB) is AdmissionOutcome.ADMITTED
    assert decide(2 * MB + 1) is AdmissionOutcome.REJECTED_FOOTPRINT


def test_what_is_there_already_is_not_begun_again():
    assert (
        admission().decide(2000, 100, EngineLoad(already=True)) is AdmissionOutcome.ALREADY_CACHED
    )


def test_without_the_trigger_only_memory_holds_back():
    everyone = admission(admission=False, kv_bytes=lambda n: MB, device_mb=3.0)
    busy = EngineLoad(prefix_queue_ms=1e9)
    assert [everyone.decide(10, 1, busy) for _ in range(100)] == [AdmissionOutcome.ADMITTED] * 100
    assert (
        everyone.decide(10, 1, EngineLoad(live_bytes=3 * MB)) is AdmissionOutcome.REJECTED_FOOTPRINT
    )
    assert everyone.decide(10, 1, EngineLoad(already=True)) is AdmissionOutcome.ALREADY_CACHED


@pytest.mark.parametrize(
    ("bytes_each", "share", "rate"),
    [(1000, 0.5, 25.0), (1000, 0.25, 12.5), (64 * MB, 0.5, 4.0)],
    ids=["half the device", "a quarter", "memory: 2 at a time, half a second each"],
)
def test_the_rate_is_that_of_little_s_law_or_of_the_device_s_share(
    bytes_each: int, share: float, rate: float
):
    """A prefix of 2000 events takes 20 ms; 100 signals a second for a minute."""
    clock = HandClock()
    busy = admission(clock, lambda n: bytes_each, device_mb=128.0, life_s=0.5, prefix_share=share)
    for _ in range(6000):
        busy.decide(2000, 100, EngineLoad())
        clock.time += 0.01
    counts = busy.counts()
    assert counts[AdmissionOutcome.ADMITTED] == pytest.approx(60 * rate, rel=0.02)
    assert counts[AdmissionOutcome.ADMITTED] + counts[AdmissionOutcome.REJECTED_LOAD] == 6000


def test_the_rate_of_one_length_is_the_smaller_of_both_bounds():
    settings = ServeSettings(device_mb=100.0, life_s=0.5, prefix_share=0.5)
    memory = 100.0 * MB / (MB * 0.5)
    load = 0.5 / 0.020
    for num_bytes, rate in ((MB, min(memory, load)), (10 * MB, min(memory / 10, load))):
        assert 1 / seconds_apart(2000, num_bytes, COSTS, settings) == pytest.approx(rate)


def test_no_share_of_the_device_admits_nobody():
    assert (
        admission(prefix_share=0.0).decide(2000, 100, EngineLoad())
        is AdmissionOutcome.REJECTED_LOAD
    )


def test_a_fault_is_an_outcome():
    def broken(length: int) -> int:
        raise OSError("no such length")

    failing = admission(kv_bytes=broken)
    assert failing.decide(2000, 100, EngineLoad()) is AdmissionOutcome.FAILED
    assert failing.counts()[AdmissionOutcome.FAILED] == 1


def test_every_outcome_is_counted():
    counting = admission(device_mb=3.0, kv_bytes=lambda n: MB, prefix_share=1.0)
    loads = [
        (1000, EngineLoad()),
        (2000, EngineLoad()),
        (2000, EngineLoad(already=True)),
        (2000, EngineLoad(live_bytes=3 * MB)),
        (2000, EngineLoad(prefix_queue_ms=199.0)),
    ]
    for length, load in loads:
        counting.decide(length, 100, load)
    assert {outcome for outcome, count in counting.counts().items() if count == 1} == {
        AdmissionOutcome.NOT_AT_RISK,
        AdmissionOutcome.ADMITTED,
        AdmissionOutcome.ALREADY_CACHED,
        AdmissionOutcome.REJECTED_FOOTPRINT,
        AdmissionOutcome.REJECTED_WINDOW,
    }
    assert sum(counting.counts().values()) == len(loads)


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 1.0)), max_size=60),
    burst=st.floats(0.01, 1.0),
)
def test_a_bucket_never_gives_more_than_time_and_burst_and_one(
    steps: list[tuple[float, float]], burst: float
):
    bucket, now, spent, largest = TokenBucket(burst, now=0.0), 0.0, 0.0, 0.0
    for wait, seconds in steps:
        now += wait
        if bucket.spend(seconds, now):
            spent += seconds
            largest = max(largest, seconds)
    assert spent <= now + burst + largest + 1e-9


def test_live_times_change_decisions_within_a_second_and_wear_off():
    clock = HandClock()
    learning = AdmissionControl(
        ServeSettings(),
        Costs({Work.INLINE: Fit(n=0.01), Work.PREFIX: Fit(n=0.001)}),
        lambda n: 1000,
        clock,
    )
    assert learning.decide(2000, 100, EngineLoad()) is AdmissionOutcome.NOT_AT_RISK  # 20 ms
    for _ in range(ENOUGH):
        learning.observe(Work.INLINE, 60.0, 2000, 100)
    clock.time += 1.0
    assert learning.decide(2000, 100, EngineLoad()) is AdmissionOutcome.ADMITTED
    clock.time += KEEP_S + 1
    assert learning.decide(2000, 100, EngineLoad()) is AdmissionOutcome.NOT_AT_RISK


# The costs


def test_a_fit_finds_the_curve_it_was_made_of():
    made = Fit(base=1.5, n=0.01, nn=2e-6, m=0.003, nm=1e-6)
    points = [(n, m, made.at(n, m)) for n in (256, 512, 1024, 4096) for m in (32, 128, 512)]
    found = fit(points)
    for n, m, ms in [*points, (8192, 256, made.at(8192, 256))]:
        assert found.at(n, m) == pytest.approx(ms, rel=1e-6)


@given(
    samples=st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 4096), st.floats(0.0, 1e4)),
        min_size=1,
        max_size=12,
    )
)
def test_a_fit_of_anything_is_neither_negative_nor_falling(samples: list[tuple[int, int, float]]):
    found = fit(samples)
    values = [found.at(n, m) for n, m in [(0, 0), (1, 0), (100, 0), (100, 7), (10**9, 7)]]
    assert values == sorted(values)
    assert values[0] >= 0
    assert np.isfinite(values).all()


@given(
    samples=st.lists(
        st.tuples(st.integers(1, 8192), st.just(0), st.floats(1.0, 1e3)), min_size=4, max_size=9
    ),
    other=st.tuples(st.floats(0, 100), st.floats(0, 0.1), st.floats(0, 1e-5)),
)
def test_no_other_curve_fits_better(samples, other: tuple[float, float, float]):
    def error(curve: Fit) -> float:
        largest = max(ms for _, _, ms in samples)
        return sum(((curve.at(n) - ms) / max(ms, largest * 1e-3)) ** 2 for n, _, ms in samples)

    base, n, nn = other
    assert error(fit(samples)) <= error(Fit(base=base, n=n, nn=nn)) + 1e-6


def test_few_live_times_change_nothing_and_enough_give_the_p99():
    costs = Costs({Work.PREFIX: Fit(n=0.01)})
    for number in range(ENOUGH - 1):
        costs.observe(Work.PREFIX, 20.0 + number, now=0.0, size=1000)
    costs.refresh(now=0.0)
    assert costs.prefix_ms(1000) == pytest.approx(10.0)
    costs.observe(Work.PREFIX, 5.0, now=0.0, size=1000)
    costs.refresh(now=0.0)
    assert costs.prefix_ms(1000) == pytest.approx(20.0 + ENOUGH - 2)
    # Inside the bucket the prediction follows the length; other buckets know nothing of it.
    assert costs.prefix_ms(800) == pytest.approx(0.8 * costs.prefix_ms(1000))
    assert costs.prefix_ms(4000) == pytest.approx(40.0)


def test_p99_is_the_smallest_that_99_of_100_do_not_exceed():
    assert p99(range(1, 101)) == 99
    assert p99(range(1, 11)) == 10
    assert p99([7.0]) == 7.0


def test_costs_travel_as_json():
    costs = Costs({Work.INLINE: Fit(1.0, 0.5, 0.25, 0.125, 0.0625), Work.RELOAD: Fit(n=1e-6)})
    for _ in range(ENOUGH):
        costs.observe(Work.RELOAD, 12.0, now=0.0, size=5 * MB)
    costs.refresh(now=0.0)
    arrived = Costs.from_json(costs.to_json())
    arrived.refresh(now=0.0)  # what came along stays until there is something newer
    assert arrived.inline_ms(77, 5) == costs.inline_ms(77, 5)
    assert arrived.reload_ms(5 * MB) == costs.reload_ms(5 * MB) == pytest.approx(12.0)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"fits": {"inlin": [1]}, "ratios": []}', '{"fits": {"inline": ["x"]}}']
)
def test_text_that_is_no_costs_is_refused(text: str):
    with pytest.raises(ParseError, match="calibrate again"):
        Costs.from_json(text)


@dataclass
class TimedModel:
    """Takes known times on a clock of its own; the first call of each kind is very slow."""

    clock: HandClock
    version: str = "1"
    dtype: str = "float32"
    called: set[tuple[int, ...]] = field(default_factory=set)

    def _take(self, ms: float, *call: int) -> None:
        self.clock.time += (ms if call in self.called else 1000.0) / 1e3
        self.called.add(call)

    def prefix(self, items):
        (item,) = items
        self._take(1 + 0.02 * len(item.history), 0, len(item.history))
        return [KV(torch.zeros(1, len(item.history), 1, 2), torch.zeros(1, 0, 1, 2))]

    def rank(self, items):
        (item,) = items
        n, m, past = len(item.history), len(item.candidates_C), len(item.past or ())
        self._take(2 + 1e-5 * n * n + 1e-5 * m * (n + past), 1, n, m, past)
        return [np.zeros(m, dtype=np.float32)]

    def kv_bytes(self, length: int) -> int:
        return 8 * length

    def to_host(self, kv: KV) -> KV:
        return kv

    def to_device(self, kv: KV) -> KV:
        self._take(1e-4 * kv.num_bytes, 2, kv.num_bytes)
        return kv


def test_calibration_predicts_what_the_model_takes():
    clock = HandClock()
    costs = calibrate(TimedModel(clock), [256, 512, 1024], [64, 256], clock, repeats=3, short=64)
    assert costs.prefix_ms(2048) == pytest.approx(1 + 0.02 * 2048, rel=1e-6)
    assert costs.inline_ms(2048, 128) == pytest.approx(
        2 + 1e-5 * 2048**2 + 1e-5 * 128 * 2048, rel=1e-6
    )
    assert costs.cached_ms(2048, 128) == pytest.approx(
        2 + 1e-5 * 64**2 + 1e-5 * 128 * (64 + 2048), rel=1e-6
    )
    assert costs.reload_ms(8 * 4096) == pytest.approx(1e-4 * 8 * 4096, rel=1e-6)


def test_calibration_in_short_readings_predicts_about_the_same():
    clock = HandClock()
    readings: list[float] = []

    def run(reading):
        readings.append(reading())
        return readings[-1]

    model = ChunkModel(clock)
    costs = calibrate(
        model, [256, 1024], [64], clock, 3, short=64, chunk=128, longest_inline=128, run=run
    )
    assert model.longest_call == 128, "no reading is longer than a chunk"
    # Each chunk has its own overhead of 1 ms; the prefix and a ranking after it are all the work.
    assert costs.prefix_ms(512) == pytest.approx(4 + 0.02 * 512, rel=1e-6)
    cached_ms = 2 + 1e-5 * 64**2 + 1e-5 * 64 * (64 + 512)
    assert costs.inline_ms(512, 64) == pytest.approx(costs.prefix_ms(512) + cached_ms, rel=1e-6)
    assert len([ms for ms in readings if ms < 1000]) > 4 * (2 + 8 + 2 * 2)


@dataclass
class ChunkModel(TimedModel):
    """Knows how many events it was given at a time."""

    longest_call: int = 0

    def prefix(self, items):
        (item,) = items
        self.longest_call = max(self.longest_call, len(item.history))
        (kv,) = super().prefix(items)
        if item.past is None:
            return [kv]
        whole = len(item.past) + len(kv)
        return [KV(torch.zeros(1, whole, 1, 2), torch.zeros(1, 0, 1, 2))]

    def rank(self, items):
        self.longest_call = max(self.longest_call, len(items[0].history))
        return super().rank(items)


def test_no_two_readings_of_a_point_follow_each_other_or_have_the_same_events():
    seen: list[tuple[int, int, bytes]] = []

    class Seen(TimedModel):
        def rank(self, items):
            (item,) = items
            seen.append((len(item.past or ()), len(item.candidates_C), bytes(item.history.items_N)))
            return super().rank(items)

    clock = HandClock()
    calibrate(Seen(clock), [256], [64, 256], clock, repeats=3, short=64)
    assert len(seen) == 4 * 4
    assert all(one[:2] != other[:2] for one, other in pairwise(seen))
    assert len({events for _, _, events in seen}) == len(seen)


def test_a_high_reading_counts_but_not_one_that_stands_alone():
    assert high([1.0, 2.0, 3.0, 4.0, 900.0]) == 4.0
    assert high([3.0, 1.0, 2.0]) == 3.0
    assert high([7.0]) == 7.0


def test_other_costs_take_over():
    deciding = admission()
    before = deciding.decide(600, 10, EngineLoad())
    deciding.renew(Costs({Work.INLINE: Fit(base=1000.0)}))
    assert before is AdmissionOutcome.NOT_AT_RISK
    assert deciding.decide(600, 10, EngineLoad()) is AdmissionOutcome.ADMITTED


@pytest.mark.parametrize(
    ("lengths", "candidates", "repeats"), [([], [8], 3), ([8], [], 3), ([8], [8], 0), ([0], [8], 1)]
)
def test_a_calibration_of_nothing_is_refused(lengths, candidates, repeats):
    with pytest.raises(ConfigError, match="of the calibration is 0"):
        calibrate(TimedModel(HandClock()), lengths, candidates, HandClock(), repeats)
