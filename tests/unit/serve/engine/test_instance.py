"""The instance with a model whose keys and values say what they were made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from nestpipe.errors import DataError, RunError, ShedError
from nestpipe.serve.engine.admission import EngineLoad, Work
from nestpipe.serve.engine.calibration import Probes
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.kv_memory import Reload
from nestpipe.serve.engine.state import ClosingError
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Answer,
    History,
    PrefixItem,
    RankItem,
    RankModel,
    RankPath,
    RankRequest,
    Scores,
    ServeSettings,
    Signal,
)

BYTES = 16
"""Of one event in a prefix."""
PATIENCE_S = 20.0
"""No test waits that long unless it fails."""
BAD_ITEM = 666


class Model:
    """Scores are a hash of every event, of the model that turned it into keys, and the candidate.

    Keys are the items, values the version: a wrong, mixed or stale prefix gives a wrong score.
    `during` is called at the start of every call, with its name and its size.
    """

    dtype = "float32"

    def __init__(self, version: int = 1, during: Callable[[str, int], None] | None = None):
        self.version = str(version)
        self.during = during or (lambda name, size: None)

    def kv_bytes(self, length: int) -> int:
        return BYTES * length

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        self.during("prefix", sum(len(item.history) for item in items))
        return [self._kv(item.history, item.past) for item in items]

    def _kv(self, history: History, past: KV | None) -> KV:
        keys = torch.from_numpy(np.array(history.items_N)).reshape(1, -1, 1, 1)
        values = torch.full_like(keys, int(self.version))
        if past is not None:
            keys = torch.cat([past.keys_LNHA, keys], 1)
            values = torch.cat([past.values_LNHV, values], 1)
        return KV(keys, values)

    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        self.during("rank", len(items))
        for item in items:
            if BAD_ITEM in item.candidates_C:
                raise ValueError("an item that no model can read")
        return [self._scores(item) for item in items]

    def _scores(self, item: RankItem) -> Scores:
        kv = self._kv(item.history, item.past)
        state = 7
        keys, values = kv.keys_LNHA.flatten().tolist(), kv.values_LNHV.flatten().tolist()
        for key, value in zip(keys, values, strict=True):
            state = (state * 31 + key * 5 + value) % 65521
        return ((item.candidates_C * 13 + state) % 65521).astype(np.float32)

    def to_host(self, kv: KV) -> KV:
        self.during("to_host", len(kv))
        return KV(kv.keys_LNHA.clone(), kv.values_LNHV.clone())

    def to_device(self, kv: KV) -> KV:
        self.during("to_device", len(kv))
        return KV(kv.keys_LNHA.clone(), kv.values_LNHV.clone())


class Layered(Model):
    """Its prefixes come back by layers, if they come: each copy may fail too."""

    def begin_reload(self, host: KV) -> Reload:
        self.during("to_device", len(host))
        model = self

        class Shaky(Reload):
            def copy(self, layer: int) -> None:
                model.during("layer", layer)
                super().copy(layer)

        reload = Shaky(host, torch.device("cpu"))
        with torch.inference_mode():
            reload.kv.keys_LNHA.fill_(-1)  # wrong where it is read before it has come
        return reload

    def _kv(self, history: History, past: KV | None) -> KV:
        if past is not None and past.layer_events is not None:
            past.layer_events.wait_for(0)
        return super()._kv(history, past)


class Stops:
    """Calls of the model by name, in order; those of a closed gate wait until it is opened."""

    def __init__(self, *closed: str):
        self.calls: list[tuple[str, int]] = []
        self.faults: dict[str, int] = {}
        self._closed = set(closed)
        self._change = threading.Condition()

    def __call__(self, name: str, size: int) -> None:
        with self._change:
            self.calls.append((name, size))
            self._change.notify_all()
            assert self._change.wait_for(lambda: name not in self._closed, PATIENCE_S)
            if self.faults.get(name):
                self.faults[name] -= 1
                raise MemoryError("no room for this")

    def open(self, name: str) -> None:
        with self._change:
            self._closed.discard(name)
            self._change.notify_all()

    def reached(self, name: str, times: int = 1) -> None:
        """Return when the model is inside that call."""
        with self._change:
            many = lambda: sum(call[0] == name for call in self.calls) >= times  # noqa: E731
            assert self._change.wait_for(many, PATIENCE_S), f"{name} was never called"


class Time:
    """Stands still."""

    def __init__(self):
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds


class Costs:
    """A millisecond for each event; with a prefix only one."""

    def inline_ms(self, length: int, candidates: int) -> float:
        return float(length)

    def prefix_ms(self, length: int) -> float:
        return float(length)

    def cached_ms(self, length: int, candidates: int) -> float:
        return 1.0

    def reload_ms(self, num_bytes: int) -> float:
        return 1.0


class AdmissionControl:
    """Says what it is told to, and keeps what it hears."""

    def __init__(self, outcome: AdmissionOutcome | Exception = AdmissionOutcome.ADMITTED):
        self.outcome = outcome
        self.costs = Costs()
        self.asked: list[tuple[int, int, EngineLoad]] = []
        self.heard: list[tuple[Work, int, int]] = []

    def decide(self, length: int, candidates: int, load: EngineLoad) -> AdmissionOutcome:
        self.asked.append((length, candidates, load))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def observe(self, work: Work, ms: float, size: int, candidates: int = 0) -> None:
        self.heard.append((work, size, candidates))


SETTINGS = ServeSettings(chunk=4, cut_length=8, batch=8, target_ms=100.0, margin=0.0)


@contextmanager
def served(
    model: Model | None = None,
    asking: AdmissionControl | None = None,
    clock: Time | None = None,
    **changes: float | bool,
) -> Iterator[Instance]:
    settings = replace(SETTINGS, **changes)  # pyright: ignore[reportArgumentType]
    with Instance(model or Model(), settings, asking, clock or Time()) as instance:
        yield instance


def until(instance: Instance, **numbers: float) -> dict[str, float]:
    """Wait until the instance counts so many of each; what it says of itself then."""
    change = instance._state.change

    def there() -> bool:
        stats = instance.stats()
        return all(stats[name] == number for name, number in numbers.items())

    with change:
        for _ in range(1000):  # what is freed on the way to the next task is not announced
            if change.wait_for(there, PATIENCE_S / 1000):
                return instance.stats()
    raise AssertionError(f"not {numbers} but {instance.stats()}")


def history(*items: int) -> History:
    return History(np.array(items, dtype=np.int64))


LONG = history(*range(1, 11))


def request(user: str = "ann", long: History = LONG, short: int = 3, candidates: int = 5):
    newer = history(*range(100, 100 + short))
    return RankRequest(user, long, newer, np.arange(candidates, dtype=np.int64))


def answer(instance: Instance, asked: RankRequest) -> Answer:
    return checked(asked, instance.rank(asked).result(PATIENCE_S))


def checked(asked: RankRequest, got: Answer) -> Answer:
    """The answer, if its scores are those of its version and length, computed at once."""
    events = asked.long.joined(asked.short).last(got.length_used)
    at_once = Model(int(got.version)).rank([RankItem(events, asked.candidates_C)])[0]
    np.testing.assert_array_equal(got.scores_C, at_once)
    assert got.length_used == (
        8 if got.path is RankPath.MISS_CUT else len(asked.long.joined(asked.short))
    )
    return got


# The ways of a ranking


def test_a_signal_makes_its_ranking_a_hit():
    stops = Stops()
    with served(Model(during=stops)) as instance:
        assert instance.prefetch(Signal("ann", LONG)) is AdmissionOutcome.ADMITTED
        until(instance, entries_ready=1)
        got = answer(instance, request())
    assert got.path is RankPath.HBM_HIT
    assert got.length_used == 13
    assert [call for call in stops.calls if call[0] != "to_host"] == [
        ("prefix", 4),
        ("prefix", 4),
        ("prefix", 2),
        ("rank", 1),
    ]


def test_without_a_signal_all_is_computed_at_once():
    with served() as instance:
        assert answer(instance, request()).path is RankPath.MISS_FULL


def test_another_history_of_the_same_length_is_another_prefix():
    with served() as instance:
        instance.prefetch(Signal("ann", history(*range(2, 12))))
        until(instance, entries_ready=1)
        assert answer(instance, request()).path is RankPath.MISS_FULL


def test_a_ranking_waits_for_a_prefix_on_its_way():
    stops = Stops("prefix")
    with served(Model(during=stops)) as instance:
        instance.prefetch(Signal("ann", LONG))
        stops.reached("prefix")
        futures = [instance.rank(request()) for _ in range(3)]
        stops.open("prefix")
        paths = [checked(request(), future.result(PATIENCE_S)).path for future in futures]
        assert paths == [RankPath.LATE_HIT] * 3
        assert until(instance, open_rankings=0)["fills"] == 1


def test_a_user_who_returns_is_served_from_host_memory():
    with served() as instance:
        instance.prefetch(Signal("ann", LONG))
        answer(instance, request())
        until(instance, offloads=1, device_bytes=0, host_bytes=10 * BYTES)
        assert answer(instance, request()).path is RankPath.DRAM_HIT
        assert until(instance, device_bytes=0)["offloads"] == 1, "it was still in host memory"


def test_a_signal_brings_a_prefix_back_before_the_ranking():
    with served() as instance:
        instance.prefetch(Signal("ann", LONG))
        answer(instance, request())
        until(instance, offloads=1, device_bytes=0)
        assert instance.prefetch(Signal("ann", LONG)) is AdmissionOutcome.ALREADY_CACHED
        until(instance, reloads=1, entries_ready=1)
        assert answer(instance, request()).path is RankPath.HBM_HIT


def test_what_does_not_fit_the_target_is_cut():
    with served(asking=AdmissionControl(), target_ms=12.0) as instance:
        got = answer(instance, request())
        assert (got.path, got.length_used) == (RankPath.MISS_CUT, 8)
        assert answer(instance, request(long=history(1, 2))).path is RankPath.MISS_FULL


def test_nothing_is_cut_where_nothing_is_predicted():
    with served(target_ms=1e-6) as instance:
        assert answer(instance, request()).path is RankPath.MISS_FULL


def test_a_ranking_does_not_wait_for_what_comes_too_late():
    stops = Stops("prefix")
    with served(Model(during=stops), AdmissionControl(), target_ms=9.5) as instance:
        instance.prefetch(Signal("ann", LONG))
        stops.reached("prefix")
        future = instance.rank(request())
        stops.open("prefix")
        assert checked(request(), future.result(PATIENCE_S)).path is RankPath.MISS_CUT
        assert until(instance, device_bytes=0)["abandoned_fills"] == 1


def test_a_ranking_waits_no_longer_than_it_can():
    stops, clock = Stops("to_device"), Time()
    with served(Model(during=stops), clock=clock) as instance:
        instance.prefetch(Signal("ann", LONG))
        answer(instance, request())
        until(instance, offloads=1, device_bytes=0)
        future = instance.rank(request())
        stops.reached("to_device")
        clock.seconds += 0.2
        instance.wake()
        assert checked(request(), future.result(PATIENCE_S)).path is RankPath.MISS_FULL
        stops.open("to_device")
        until(instance, device_bytes=0, queue_reloads=0)


class SlowReloads(Costs):
    """A tenth of a second each."""

    def reload_ms(self, num_bytes: int) -> float:
        return 100.0


@pytest.mark.parametrize("passed_ms", [0, 95, 200])
def test_a_reload_that_has_begun_is_awaited_for_what_is_left_of_it(passed_ms: int):
    stops, clock, admission = Stops("to_device"), Time(), AdmissionControl()
    admission.costs = SlowReloads()
    with served(Model(during=stops), admission, clock, target_ms=50.0) as instance:
        instance.prefetch(Signal("ann", LONG))
        answer(instance, request())
        until(instance, offloads=1, device_bytes=0)
        instance.prefetch(Signal("ann", LONG))
        stops.reached("to_device")
        clock.seconds += passed_ms / 1e3
        future = instance.rank(request())
        if passed_ms:
            until(instance, open_rankings=1, queue_rankings=0)
            stops.open("to_device")
        expected = RankPath.LATE_HIT if passed_ms else RankPath.MISS_FULL
        assert checked(request(), future.result(PATIENCE_S)).path is expected
        stops.open("to_device")


def test_a_user_without_a_long_history_is_ranked():
    with served() as instance:
        assert instance.prefetch(Signal("ann", history())) is AdmissionOutcome.NOT_AT_RISK
        assert answer(instance, request(long=history())).path is RankPath.MISS_FULL


def test_times_reach_the_model_in_the_chunks_of_their_events():
    seen: list[list[int]] = []

    class Timed(Model):
        def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
            assert items[0].history.times_N is not None
            seen.append(items[0].history.times_N.tolist())
            return super().prefix(items)

    with served(Timed()) as instance:
        instance.prefetch(Signal("ann", History(LONG.items_N, LONG.items_N * 2)))
        until(instance, entries_ready=1)
    assert seen == [[2, 4, 6, 8], [10, 12, 14, 16], [18, 20]]


# Order of work


def test_rankings_that_wait_are_computed_together():
    stops = Stops("rank")
    with served(Model(during=stops), batch=3) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, entries_ready=1)
        asked = [request("first"), request(), request("bob", short=0), request("eve", history(1))]
        asked += [request("tim", candidates=2)]
        futures = [instance.rank(asked[0])]
        stops.reached("rank")
        futures += [instance.rank(one) for one in asked[1:]]
        stops.open("rank")
        paths = [checked(a, f.result(PATIENCE_S)).path for a, f in zip(asked, futures, strict=True)]
        assert paths == [RankPath.MISS_FULL, RankPath.HBM_HIT] + 3 * [RankPath.MISS_FULL]
    assert [call for call in stops.calls if call[0] == "rank"] == [("rank", n) for n in (1, 3, 1)]


def test_a_ranking_goes_before_the_next_chunk():
    stops = Stops("prefix")
    with served(Model(during=stops)) as instance:
        instance.prefetch(Signal("bob", LONG))
        stops.reached("prefix")
        future = instance.rank(request())
        stops.open("prefix")
        future.result(PATIENCE_S)
        until(instance, entries_ready=1)
    assert [name for name, _ in stops.calls] == ["prefix", "rank", "prefix", "prefix"]


def test_chunks_that_a_ranking_waits_for_take_turns_with_rankings():
    stops = Stops("prefix")
    with served(Model(during=stops), batch=1) as instance:
        instance.prefetch(Signal("ann", LONG))
        stops.reached("prefix")
        futures = [instance.rank(request(user)) for user in ("ann", "a", "b", "c")]
        stops.open("prefix")
        wait(futures, PATIENCE_S)
    assert [name for name, _ in stops.calls if name != "to_host"] == [
        *("prefix", "rank", "prefix", "rank", "prefix", "rank", "rank")
    ]


def test_short_prefixes_are_computed_in_one_call():
    stops = Stops("rank")
    with served(Model(during=stops), chunk=6) as instance:
        instance.rank(request("first"))
        stops.reached("rank")
        for user, length in (("a", 2), ("b", 3), ("c", 2), ("d", 9)):
            instance.prefetch(Signal(user, history(*range(length))))
        stops.open("rank")
        until(instance, entries_ready=4)
        for user, length in (("a", 2), ("b", 3), ("c", 2), ("d", 9)):
            asked = request(user, history(*range(length)))
            assert answer(instance, asked).path is RankPath.HBM_HIT
    prefixes = [size for name, size in stops.calls if name == "prefix"]
    assert prefixes == [2 + 3, 2, 6, 3], "no call has more events than a chunk"


def test_one_prefix_that_fails_does_not_take_those_beside_it_along():
    class Picky(Model):
        def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
            if any(BAD_ITEM in item.history.items_N for item in items):
                raise MemoryError("not with this one")
            return super().prefix(items)

    stops = Stops("rank")
    with served(Picky(during=stops), chunk=100) as instance:
        first = instance.rank(request("first"))
        stops.reached("rank")
        for user, item in (("a", 1), ("b", BAD_ITEM), ("c", 3)):
            instance.prefetch(Signal(user, history(item)))
        stops.open("rank")
        first.result(PATIENCE_S)
        stats = until(instance, entries_ready=2, queue_fills=0)
        assert (stats["failed_fills"], stats["fills"]) == (1, 2)
        assert answer(instance, request("b", history(BAD_ITEM))).path is RankPath.MISS_FULL
        assert answer(instance, request("c", history(3))).path is RankPath.HBM_HIT


# Memory


def test_no_more_than_fits_is_promised():
    with served(device_mb=25 * BYTES / 2**20) as instance:
        outcomes = [instance.prefetch(Signal(user, LONG)) for user in "abc"]
        assert outcomes == [
            AdmissionOutcome.ADMITTED,
            AdmissionOutcome.ADMITTED,
            AdmissionOutcome.REJECTED_FOOTPRINT,
        ]
        assert until(instance, entries_ready=2)["device_bytes"] == 20 * BYTES


def test_a_prefix_that_nobody_comes_for_is_given_up():
    clock = Time()
    with served(clock=clock) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, entries_ready=1)
        clock.seconds += SETTINGS.life_s
        instance.wake()
        until(instance, device_bytes=0, wasted_prefixes=1, offloads=0)


def test_without_host_memory_a_prefix_goes_when_it_was_used():
    with served(host_mb=0.0) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, entries_ready=1)
        answer(instance, request())
        assert until(instance, device_bytes=0)["offloads"] == 0
        assert answer(instance, request()).path is RankPath.MISS_FULL


# Arms


def test_without_relay_signals_are_ignored_and_rankings_keep_their_prefix():
    with served(relay=False) as instance:
        assert instance.prefetch(Signal("ann", LONG)) is AdmissionOutcome.NOT_AT_RISK
        assert answer(instance, request()).path is RankPath.MISS_FULL
        until(instance, offloads=1)
        assert answer(instance, request()).path is RankPath.DRAM_HIT


def test_without_relay_a_prefix_is_kept_that_its_ranking_could_not_wait_for():
    with served(asking=AdmissionControl(), relay=False, target_ms=9.5) as instance:
        assert answer(instance, request()).path is RankPath.MISS_CUT
        until(instance, offloads=1)
        assert answer(instance, request()).path is RankPath.DRAM_HIT


def test_without_relay_and_host_memory_nothing_is_kept():
    stops = Stops()
    with served(Model(during=stops), relay=False, host_mb=0.0) as instance:
        assert [answer(instance, request()).path for _ in range(2)] == [RankPath.MISS_FULL] * 2
    assert stops.calls == [("rank", 1)] * 2


def test_without_single_flight_two_signals_compute_the_same_twice():
    stops = Stops("prefix")
    with served(Model(during=stops), single_flight=False) as instance:
        outcomes = [instance.prefetch(Signal("ann", LONG)) for _ in range(2)]
        assert outcomes == [AdmissionOutcome.ADMITTED] * 2
        stops.open("prefix")
        until(instance, fills=2)
        answer(instance, request())


# The admission


@pytest.mark.parametrize(
    "outcome", [o for o in AdmissionOutcome if o is not AdmissionOutcome.ADMITTED]
)
def test_what_the_trigger_refuses_is_not_prepared(outcome: AdmissionOutcome):
    admission = AdmissionControl(outcome)
    with served(asking=admission) as instance:
        assert instance.prefetch(Signal("ann", LONG)) is outcome
        stats = instance.stats()
        assert (stats[f"outcome_{outcome}"], stats["device_bytes"]) == (1, 0)
        assert answer(instance, request()).path is RankPath.MISS_FULL


def test_a_fault_of_the_trigger_means_inline():
    with served(asking=AdmissionControl(ZeroDivisionError("oh"))) as instance:
        assert instance.prefetch(Signal("ann", LONG)) is AdmissionOutcome.FAILED
        assert answer(instance, request()).path is RankPath.MISS_FULL


def test_the_trigger_learns_what_the_instance_is_busy_with():
    stops, admission = Stops("prefix"), AdmissionControl()
    with served(Model(during=stops), admission) as instance:
        answer(instance, request("bob", candidates=7))
        instance.prefetch(Signal("ann", LONG))
        stops.reached("prefix")
        instance.prefetch(Signal("eve", history(1, 2)))
        stops.open("prefix")
        until(instance, entries_ready=2)
        # As long as a ranking would be: three events have come after the long history of late.
        assert admission.asked[0] == (10 + 3, 7, EngineLoad())
        assert admission.asked[1] == (2 + 3, 7, EngineLoad(10 * BYTES, 0.0, 10.0))
        answer(instance, request())
        until(instance, open_rankings=0)
    heard = {(Work.INLINE, 13, 7), (Work.PREFIX, 10, 0), (Work.PREFIX, 2, 0), (Work.CACHED, 10, 5)}
    assert heard <= set(admission.heard)


def test_switched_off_the_trigger_is_not_asked():
    admission = AdmissionControl(AdmissionOutcome.NOT_AT_RISK)
    with served(asking=admission, admission=False) as instance:
        assert instance.prefetch(Signal("ann", LONG)) is AdmissionOutcome.ADMITTED
    assert admission.asked == []


# Faults


def test_where_a_prefix_cannot_be_computed_the_ranking_runs_inline():
    stops = Stops("prefix")
    stops.faults["prefix"] = 1
    with served(Model(during=stops)) as instance:
        instance.prefetch(Signal("ann", LONG))
        stops.reached("prefix")
        future = instance.rank(request())
        stops.open("prefix")
        assert checked(request(), future.result(PATIENCE_S)).path is RankPath.MISS_FULL
        assert until(instance, open_rankings=0, device_bytes=0)["failed_fills"] == 1


def test_a_prefix_larger_than_its_promise_is_not_kept():
    class Liar(Model):
        def kv_bytes(self, length: int) -> int:
            return BYTES * length - 1

    with served(Liar()) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, failed_fills=1, device_bytes=0)
        assert answer(instance, request()).path is RankPath.MISS_FULL


@pytest.mark.parametrize("name", ["to_host", "to_device"])
def test_a_failed_copy_costs_time_but_no_answer(name: str):
    stops = Stops()
    stops.faults[name] = 1
    with served(Model(during=stops)) as instance:
        instance.prefetch(Signal("ann", LONG))
        answer(instance, request())
        until(instance, device_bytes=0)
        assert answer(instance, request()).path is RankPath.MISS_FULL
        until(instance, device_bytes=0, faults=1)


def test_a_bad_request_fails_alone():
    stops = Stops("rank")
    with served(Model(during=stops)) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, entries_ready=1)
        first = instance.rank(request("first"))
        stops.reached("rank")
        bad = replace(request("bad"), candidates_C=np.array([BAD_ITEM]))
        futures = [instance.rank(one) for one in (request(), bad, request("bob"))]
        stops.open("rank")
        first.result(PATIENCE_S)
        paths = [checked(request(), futures[n].result(PATIENCE_S)).path for n in (0, 2)]
        assert paths == [RankPath.HBM_HIT, RankPath.MISS_FULL]
        with pytest.raises(RunError, match=r"13 events and 1 candidates failed \(ValueError"):
            futures[1].result(PATIENCE_S)
        stats = until(instance, open_rankings=0)
        assert (stats["failed_rankings"], stats["failed_batches"], stats["broken"]) == (1, 1, 0)


def test_a_prefix_that_the_model_chokes_on_is_thrown_away():
    class Choking(Model):
        def rank(self, items: Sequence[RankItem]) -> list[Scores]:
            if any(item.past is not None for item in items):
                raise RuntimeError("cannot read this past")
            return super().rank(items)

    with served(Choking()) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, entries_ready=1)
        assert answer(instance, request()).path is RankPath.MISS_FULL
        stats = until(instance, device_bytes=0)
        assert (stats["discarded"], stats["offloads"]) == (1, 0)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (request(candidates=0), "a ranking has 0 candidates; give 1 to 20"),
        (request(candidates=21), "a ranking has 21 candidates; give 1 to 20"),
        (request(long=history(*range(31))), "a history has 31 events and at most 30 are accepted"),
        (request(long=history(*range(28))), "a ranking has 31 events and at most 30 are accepted"),
        (replace(request(), deadline_s=0.0), "a deadline is 0.0 s; give a number above 0"),
        (
            request(long=History(np.arange(3), np.arange(2))),
            "a history has 3 events and 2 times; give a time for each",
        ),
    ],
)
def test_a_bad_request_is_refused_with_a_sentence(asked: RankRequest, sentence: str):
    with served(max_events=30, max_candidates=20) as instance:
        with pytest.raises(DataError, match=sentence):
            instance.rank(asked).result(PATIENCE_S)
        assert answer(instance, request()).path is RankPath.MISS_FULL


def test_a_bad_signal_is_refused_with_a_sentence():
    with served(max_events=5) as instance, pytest.raises(DataError, match="has 10 events"):
        instance.prefetch(Signal("ann", LONG))


def test_a_thread_that_dies_leaves_nobody_waiting():
    class Dead(Model):
        def rank(self, items: Sequence[RankItem]) -> list[Scores]:
            raise SystemExit("the device is gone")

    with served(Dead()) as instance:
        future = instance.rank(request())
        with pytest.raises(RunError, match="the instance has failed"):
            future.result(PATIENCE_S)
        with pytest.raises(RunError, match="the instance has failed"):
            instance.rank(request())
        assert instance.stats()["broken"] == 1
        assert instance.drain(0.0)


# Limits, the end, another model


def test_more_than_the_queue_holds_is_shed():
    stops = Stops("rank")
    with served(Model(during=stops), queue=2) as instance:
        futures = [instance.rank(request())]
        stops.reached("rank")
        futures += [instance.rank(request()) for _ in range(2)]
        with pytest.raises(ShedError, match="2 rankings wait already"):
            instance.rank(request())
        assert instance.stats()["shed"] == 1
        stops.open("rank")
        assert all(future.result(PATIENCE_S) for future in futures)
        answer(instance, request())


def test_a_ranking_that_nobody_waits_for_any_more_is_not_computed():
    stops = Stops("rank")
    with served(Model(during=stops)) as instance:
        instance.prefetch(Signal("ann", LONG))
        until(instance, entries_ready=1)
        first = instance.rank(request("bob"))
        stops.reached("rank")
        dropped = instance.rank(request())
        assert dropped.cancel()
        stops.open("rank")
        first.result(PATIENCE_S)
        until(instance, open_rankings=0, cancelled=1, entries_in_use=0)
    assert [call for call in stops.calls if call[0] == "rank"] == [("rank", 1)]


def test_a_drain_answers_all_that_was_accepted_and_takes_no_more():
    stops = Stops("rank")
    with served(Model(during=stops)) as instance:
        futures = [instance.rank(request(user)) for user in "abc"]
        assert not instance.drain(0.0)
        for call in (
            lambda: instance.rank(request()),
            lambda: instance.prefetch(Signal("a", LONG)),
        ):
            with pytest.raises(ClosingError, match="closing"):
                call()
        stats = instance.stats()
        assert (stats["refused_closing"], stats["shed"]) == (2, 0)
        stops.open("rank")
        assert instance.drain(PATIENCE_S)
        assert all(checked(request(), future.result(0.0)) for future in futures)


def test_closing_refuses_what_has_not_begun():
    stops = Stops("rank")
    with served(Model(during=stops)) as instance:
        first = instance.rank(request())
        stops.reached("rank")
        second = instance.rank(request())
        closing = threading.Thread(target=instance.close)
        closing.start()
        with instance._state.change:
            assert instance._state.change.wait_for(lambda: instance._state.closed, PATIENCE_S)
        stops.open("rank")
        closing.join(PATIENCE_S)
        assert first.result(PATIENCE_S).path is RankPath.MISS_FULL
        with pytest.raises(ClosingError, match="closed before"):
            second.result(PATIENCE_S)
        stats = instance.stats()
        assert (stats["refused_closing"], stats["shed"]) == (1, 0)


def test_another_model_takes_over_and_what_was_begun_ends_on_the_old_one():
    stops = Stops("prefix")
    with served(Model(1, stops)) as instance:
        instance.prefetch(Signal("bob", LONG))
        instance.prefetch(Signal("ann", LONG))
        stops.reached("prefix")
        before = instance.rank(request())
        instance.swap_model(Model(2))
        after = instance.rank(request())
        stops.open("prefix")
        old, new = before.result(PATIENCE_S), after.result(PATIENCE_S)
        assert (old.version, old.path) == ("1", RankPath.LATE_HIT)
        assert (new.version, new.path) == ("2", RankPath.MISS_FULL)
        checked(request(), old)
        checked(request(), new)
        stats = until(instance, open_rankings=0, device_bytes=0)
        assert (stats["offloads"], stats["fills"], instance.version) == (0, 1, "2")


# What another model costs


def measured(instance: Instance, stops: Stops, model: Model) -> None:
    """Swap, and wait until the first reading of the model is under way."""
    instance.swap_model(model)
    stops.reached("rank")


@contextmanager
def recalibrating(clock: Time | None = None) -> Iterator[tuple[Instance, list[str], Stops]]:
    """An instance that takes three readings of each new model, and the models so measured."""
    known: list[str] = []
    stops = Stops("rank")

    def recalibrate(model: RankModel, run: Callable[[Callable[[], float]], float]) -> None:
        item = RankItem(history(1), np.arange(3))
        found = [run(lambda: float(len(model.rank([item])))) for _ in range(3)]
        assert found == [1.0] * 3
        known.append(model.version)

    with Instance(Model(), SETTINGS, None, clock or Time(), recalibrate) as instance:
        yield instance, known, stops
        stops.open("rank")


def test_a_model_that_takes_over_is_measured_beside_the_requests():
    with recalibrating() as (instance, known, stops):
        measured(instance, stops, Model(2, stops))
        future = instance.rank(request())
        stops.open("rank")
        assert checked(request(), future.result(PATIENCE_S)).version == "2"
        stops.reached("rank", 4)
        instance.close()
        assert known == ["2"]
    assert [size for name, size in stops.calls if name == "rank"] == [1] * 4


def test_the_same_model_is_not_measured_again():
    with recalibrating() as (instance, known, stops):
        instance.swap_model(Model(1, stops))
        assert not instance._calibrating
    assert known == stops.calls == []


def test_a_model_that_is_replaced_while_it_is_measured_is_not_measured_further():
    with recalibrating() as (instance, known, stops):
        measured(instance, stops, Model(2, stops))
        others = Stops()
        instance.swap_model(Model(3, others))
        stops.open("rank")
        others.reached("rank", 3)
        for thread in instance._calibrating:
            thread.join(PATIENCE_S)
        assert known == ["3"]
    assert len(stops.calls) == 1


def test_closing_ends_a_measurement():
    with recalibrating() as (instance, known, stops):
        measured(instance, stops, Model(2, stops))
        closing = threading.Thread(target=instance.close)
        closing.start()
        with instance._state.change:
            assert instance._state.change.wait_for(lambda: instance._state.closed, PATIENCE_S)
        stops.open("rank")
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert not any(thread.is_alive() for thread in instance._calibrating)
    assert (known, len(stops.calls)) == ([], 1)


def test_a_measurement_that_fails_changes_nothing():
    with recalibrating() as (instance, known, stops):
        stops.faults["rank"] = 1
        measured(instance, stops, Model(2, stops))
        stops.open("rank")
        assert answer(instance, request()).version == "2"
    assert known == []


def test_where_there_is_no_end_of_requests_measurements_take_a_small_part_of_the_time():
    clock = Time()
    probes = Probes(clock)

    def slow() -> float:
        clock.seconds += 0.01
        return 10.0

    for _ in range(3):
        probes.ask(slow)
    first = probes.take(idle=False)
    assert first
    first()
    assert probes.take(idle=False) is None
    clock.seconds += 0.18
    assert probes.take(idle=False) is None
    clock.seconds += 0.02
    assert probes.take(idle=False)
    assert probes.take(idle=True), "nothing else is to be done"
    assert probes.take(idle=True) is None


# Everything at once


@pytest.mark.parametrize("seed", range(6))
def test_many_clients_at_once_get_only_right_scores(seed: int):
    random = Random(seed)

    def during(name: str, size: int) -> None:
        if random.random() < 0.05:
            raise MemoryError(f"{name} of {size}")

    versions = [(Layered if seed % 2 else Model)(version, during) for version in range(3)]
    changes = {"device_mb": 60 * BYTES / 2**20, "host_mb": 50 * BYTES / 2**20, "life_s": 1e-3}
    settings = replace(SETTINGS, **changes, single_flight=seed % 3 > 0, relay=seed % 3 > 1)
    bound = 60 * BYTES
    with Instance(versions[0], settings) as instance:

        def client(number: int) -> None:
            mine = Random(1000 * seed + number)
            for _ in range(60):
                user = mine.randrange(8)
                long = history(*range(user, 2 * user + mine.randrange(1, 3)))
                act = mine.random()
                if act < 0.4:
                    instance.prefetch(Signal(str(user), long))
                elif act < 0.43:
                    instance.swap_model(mine.choice(versions))
                elif act < 0.47:
                    instance.rank(request(str(user), long)).cancel()
                else:
                    asked = request(str(user), long, short=mine.randrange(3))
                    try:
                        checked(asked, instance.rank(asked).result(PATIENCE_S))
                    except RunError as error:
                        if not isinstance(error.__cause__, MemoryError):  # failed inline too
                            raise
                    assert instance.stats()["device_bytes"] <= bound
                done.append(None)

        done: list[None] = []
        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(PATIENCE_S)
        assert len(done) == 240, "a client failed"
        assert instance.drain(PATIENCE_S)
        until(instance, device_bytes=0, queue_fills=0, queue_reloads=0, broken=0)
