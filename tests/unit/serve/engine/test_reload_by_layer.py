"""A prefix that comes back layer by layer: never read early, the same bits as the whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.errors import RunError
from nestpipe.models import HstuConfig
from nestpipe.models.hstu import HstuBlock
from nestpipe.serve.engine.admission import EngineLoad, Work
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.kv_memory import LayerEvents, Reload
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.engine.scheduler import AdmissionPolicy
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Answer,
    History,
    PrefixItem,
    RankItem,
    RankPath,
    RankRequest,
    Scores,
    ServeSettings,
    Signal,
)

PATIENCE_S = 20.0
LAYERS = 3
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "blocks": LAYERS, "heads": 2, "dim": 16, "attention_dim": 8, "value_dim": 4, "max_len": 48,
}  # fmt: skip
SETTINGS = ServeSettings(chunk=16, target_ms=1e6, life_s=1e3)


def make_model(dtype: str = "float32", time_buckets: int = 8) -> HstuRankModel:
    config = HstuConfig(**SHAPE, time_buckets=time_buckets)
    return HstuRankModel.random(config, 100, 1, "cpu", dtype)


def asked(user: int = 0) -> RankRequest:
    random = np.random.default_rng(user)
    long = History(random.integers(1, 100, 30 + user), np.arange(30 + user) * 60)
    short = History(random.integers(1, 100, 5), 3000 + np.arange(5))
    return RankRequest(str(user), long, short, random.integers(1, 100, 7), time=4000)


def host_of(model: HstuRankModel, user: int = 0) -> KV:
    return model.to_host(model.prefix([PrefixItem(asked(user).long)])[0])


def scores(model: HstuRankModel, past: KV, user: int = 0) -> Scores:
    request = asked(user)
    return model.rank([RankItem(request.short, request.candidates_C, past, request.time)])[0]


class Log:
    """What was copied and computed, in order; a copy may be held back, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.held: set[int] = set()
        self.broken: set[int] = set()
        self.change = threading.Condition()
        copy, forward, wait_for = Reload.copy, HstuBlock.forward, LayerEvents.wait_for

        def held_copy(reload: Reload, layer: int) -> None:
            with self.change:
                assert self.change.wait_for(lambda: layer not in self.held, PATIENCE_S)
            if layer in self.broken:
                raise MemoryError("the copy stops here")
            copy(reload, layer)
            self.say(f"copied {layer}")

        def said_forward(block: HstuBlock, *given, **named):
            self.say("computed")
            return forward(block, *given, **named)

        def said_wait_for(layer_events: LayerEvents, layer: int) -> None:
            self.say(f"wants {layer}")
            wait_for(layer_events, layer)

        monkeypatch.setattr(LayerEvents, "wait_for", said_wait_for)
        monkeypatch.setattr(Reload, "copy", held_copy)
        monkeypatch.setattr(HstuBlock, "forward", said_forward)

    def say(self, what: str) -> None:
        with self.change:
            self.said.append(what)
            self.change.notify_all()

    def reached(self, what: str, times: int = 1) -> None:
        with self.change:
            there = lambda: self.said.count(what) >= times  # noqa: E731
            assert self.change.wait_for(there, PATIENCE_S), f"{what} not {times} times: {self.said}"

    def let_go(self, layer: int) -> None:
        with self.change:
            self.held.discard(layer)
            self.change.notify_all()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


# The copy and the model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("time_buckets", [0, 8])
def test_by_layers_comes_back_what_comes_back_as_a_whole(dtype: str, time_buckets: int):
    model = make_model(dtype, time_buckets)
    host = host_of(model)
    reload, whole = model.begin_reload(host), model.to_device(host)
    complete = reload.run()
    assert complete.layer_events is None
    for found in (reload.kv, complete):
        assert torch.equal(found.keys_LNHA, whole.keys_LNHA)
        assert torch.equal(found.values_LNHV, whole.values_LNHV)
        assert found.num_bytes == whole.num_bytes == model.kv_bytes(len(host))
        np.testing.assert_array_equal(scores(model, found), scores(model, whole))


def fill(kv: KV, value: float) -> None:
    with torch.inference_mode():
        kv.keys_LNHA.fill_(value)
        kv.values_LNHV.fill_(value)


@pytest.mark.parametrize("held", range(LAYERS))
def test_a_layer_is_not_read_before_it_is_there(log: Log, held: int):
    model = make_model()
    host = host_of(model)
    expected = scores(model, model.to_device(host))
    log.said.clear()
    log.held = {held}
    reload = model.begin_reload(host)
    fill(reload.kv, float("nan"))  # whatever is read early spoils every score
    with ThreadPoolExecutor(2) as pool:
        ranking = pool.submit(scores, model, reload.kv)
        ranking.add_done_callback(lambda _: log.say("ranked"))
        copying = pool.submit(reload.run)
        with log.change:  # until it waits, or went on without
            said = lambda: {f"wants {held}", "ranked"} & set(log.said)  # noqa: E731
            assert log.change.wait_for(said, PATIENCE_S)
            assert log.said.count("computed") == held, "the layers before it, and no more"
        log.let_go(held)
        found = ranking.result(PATIENCE_S)
        copying.result(PATIENCE_S)
    np.testing.assert_array_equal(found, expected)
    computed = [place for place, what in enumerate(log.said) if what == "computed"]
    for layer, place in enumerate(computed):
        assert log.said.index(f"copied {layer}") < place, log.said


def test_the_test_above_would_see_a_layer_that_is_read_early():
    model = make_model()
    reload = model.begin_reload(host_of(model))
    fill(reload.kv, float("nan"))
    assert np.isnan(scores(model, replace(reload.kv, layer_events=None))).all()


def test_in_a_batch_every_prefix_is_waited_for(log: Log):
    model = make_model()
    hosts = [host_of(model, user) for user in range(3)]
    pasts = [model.to_device(host) for host in hosts]
    reload = model.begin_reload(hosts[1])
    fill(reload.kv, float("nan"))
    items = [
        RankItem(asked(user).short, asked(user).candidates_C, past, 4000)
        for user, past in enumerate(pasts)
    ]
    expected = model.rank(items)
    items[1] = replace(items[1], past=reload.kv)
    with ThreadPoolExecutor(1) as pool:
        ranking = pool.submit(model.rank, items)
        reload.run()
        for found, wanted in zip(ranking.result(PATIENCE_S), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_reload_that_fails_half_way_fails_whoever_reads_it(log: Log):
    model = make_model()
    host = host_of(model)
    log.broken = {1}
    reload = model.begin_reload(host)
    with ThreadPoolExecutor(1) as pool:
        ranking = pool.submit(scores, model, reload.kv)
        with pytest.raises(MemoryError, match="stops here"):
            reload.run()
        with pytest.raises(RunError, match="came back only in part"):
            ranking.result(PATIENCE_S)
    with pytest.raises(RunError, match="came back only in part"):
        scores(model, reload.kv)


def test_the_device_waits_for_the_event_of_the_layer_that_is_read(monkeypatch: pytest.MonkeyPatch):
    waited: list[object] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            waited.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    arrival, events = LayerEvents(CPU), [object() for _ in range(3)]
    for event in events:
        arrival.add(event)  # pyright: ignore[reportArgumentType]
    for layer in (0, 2, 1):
        arrival.wait_for(layer)
    assert waited == [events[0], events[2], events[1]]


# The instance


@contextmanager
def returning(
    model: HstuRankModel, admission: AdmissionPolicy | None = None, **changes: float | bool
) -> Iterator[Instance]:
    """An instance with the prefixes of users 0 and 1 in host memory, and nothing on the device."""
    settings = replace(SETTINGS, **changes)  # pyright: ignore[reportArgumentType]
    with Instance(model, settings, admission, StillClock()) as instance:
        for user in range(2):
            instance.prefetch(Signal(str(user), asked(user).long))
            instance.rank(asked(user)).result(PATIENCE_S)
        until(instance, offloads=2, device_bytes=0)
        yield instance


def until(instance: Instance, **numbers: float) -> dict[str, float]:
    change = instance._state.change
    there = lambda: numbers.items() <= instance.stats().items()  # noqa: E731
    with change:
        for _ in range(1000):
            if change.wait_for(there, PATIENCE_S / 1000):
                return instance.stats()
    raise AssertionError(f"not {numbers} but {instance.stats()}")


class StillClock:
    def now(self) -> float:
        return 0.0


class Times:
    """Costs as they are given, and a admission that admits everybody; reloads go by their bytes."""

    def __init__(self, cached_ms: float, reload_ms: float, num_bytes: int) -> None:
        self.costs = self
        self._cached_ms = cached_ms
        self._reload_ms_per_byte = reload_ms / num_bytes

    def inline_ms(self, length: int, candidates: int) -> float:
        return 0.0

    def prefix_ms(self, length: int) -> float:
        return 0.0

    def cached_ms(self, length: int, candidates: int) -> float:
        return self._cached_ms

    def reload_ms(self, num_bytes: int) -> float:
        return self._reload_ms_per_byte * num_bytes

    def decide(self, length: int, candidates: int, load: EngineLoad) -> AdmissionOutcome:
        return AdmissionOutcome.ADMITTED

    def observe(self, work: Work, ms: float, size: int, candidates: int = 0) -> None:
        pass


@pytest.mark.parametrize(
    ("by_layer", "reload_ms", "cached_ms", "path"),
    [
        (False, 60, 39, RankPath.DRAM_HIT),
        (False, 60, 41, RankPath.MISS_FULL),
        # By layers it ends with the last copy ...
        (True, 60, 41, RankPath.DRAM_HIT),
        (True, 99, 50, RankPath.DRAM_HIT),
        (True, 101, 50, RankPath.MISS_FULL),
        # ... or so long after the first of three, if that is later.
        (True, 60, 79, RankPath.DRAM_HIT),
        (True, 60, 82, RankPath.MISS_FULL),
    ],
)
def test_a_reload_is_in_time_if_the_ranking_under_it_is(
    by_layer: bool, reload_ms: float, cached_ms: float, path: RankPath
):
    model = make_model()
    times = Times(cached_ms, reload_ms, model.kv_bytes(30))
    given: dict[str, float | bool] = {"target_ms": 100.0, "margin": 0.0}
    with returning(model, times, reload_by_layer=by_layer, **given) as instance:
        (answer,) = results(instance.rank(asked()))
    assert answer.path is path


def results(*futures: Future[Answer]) -> list[Answer]:
    return [future.result(PATIENCE_S) for future in futures]


def test_a_ranking_begins_while_its_prefix_comes_back(log: Log):
    model = make_model()
    with returning(model, reload_by_layer=False) as instance:
        (whole,) = results(instance.rank(asked()))
        assert until(instance, device_bytes=0)["early_batches"] == 0
    with returning(model) as instance:
        log.said.clear()
        log.held = {1}
        future = instance.rank(asked())
        log.reached("computed")
        assert not future.done()
        stats = instance.stats()
        assert (stats["reloads"], stats["queue_reloads"], stats["entries_in_use"]) == (0, 1, 1)
        log.let_go(1)
        (answer,) = results(future)
        stats = until(instance, reloads=1, device_bytes=0, queue_reloads=0)
    assert answer.path is whole.path is RankPath.DRAM_HIT
    assert (stats["early_batches"], stats["offloads"], stats["faults"]) == (1, 2, 0)
    np.testing.assert_array_equal(answer.scores_C, whole.scores_C)


def test_who_comes_while_it_comes_back_shares_the_reload(log: Log):
    with returning(make_model()) as instance:
        log.held = {2}
        first = instance.rank(asked())
        log.reached("copied 1")
        second = instance.rank(asked())
        log.let_go(2)
        answers = results(first, second)
        stats = until(instance, reloads=1, device_bytes=0)
    assert [answer.path for answer in answers] == [RankPath.DRAM_HIT, RankPath.LATE_HIT]
    np.testing.assert_allclose(answers[0].scores_C, answers[1].scores_C, rtol=0, atol=1e-5)
    assert stats["failed_reloads"] == 0


def test_nothing_goes_from_host_memory_while_it_is_read(log: Log):
    model = make_model()
    both = model.kv_bytes(30) + model.kv_bytes(31)
    with returning(model, host_mb=both / 2**20, reloads=3) as instance:
        log.held = {1}
        for user in range(2):
            instance.prefetch(Signal(str(user), asked(user).long))
        log.reached("copied 0", 2)
        instance.prefetch(Signal("2", asked(2).long))
        results(instance.rank(asked(2)))  # then there is no room for it in host memory
        stats = until(instance, device_bytes=both)
        assert (stats["host_entries"], stats["host_evicted"], stats["offloads"]) == (2, 0, 2)
        log.let_go(1)
        until(instance, reloads=2)
        answers = results(*(instance.rank(asked(user)) for user in range(2)))
    assert [answer.path for answer in answers] == [RankPath.HBM_HIT] * 2


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_reload_that_fails_half_way_costs_time_but_no_answer(log: Log, layer: int):
    model = make_model()
    with returning(model) as instance:
        log.held, log.broken = {layer}, {layer}
        running = instance.rank(asked())
        until(instance, entries_in_use=1)
        late = instance.rank(asked())
        log.let_go(layer)
        answers = results(running, late)
        stats = until(instance, device_bytes=0, queue_reloads=0, open_rankings=0)
        assert (stats["failed_reloads"], stats["reloads"], stats["broken"]) == (1, 0, 0)
        log.broken.clear()
        (again,) = results(instance.rank(asked()))
        until(instance, device_bytes=0, reloads=1)
    assert again.path is RankPath.DRAM_HIT, "it is still in host memory"
    for answer in answers:
        assert answer.path is RankPath.MISS_FULL
        assert answer.length_used == 35
        np.testing.assert_allclose(answer.scores_C, again.scores_C, rtol=0, atol=1e-5)


def test_a_promise_that_ends_while_it_comes_back_frees_it_after_the_copy(log: Log):
    class Time:
        seconds = 0.0

        def now(self) -> float:
            return self.seconds

    clock, model = Time(), make_model()
    with Instance(model, replace(SETTINGS, life_s=1.0), clock=clock) as instance:
        instance.prefetch(Signal("0", asked().long))
        results(instance.rank(asked()))
        until(instance, offloads=1, device_bytes=0)
        log.held = {1}
        instance.prefetch(Signal("0", asked().long))
        log.reached("copied 0")
        clock.seconds += 2.0
        instance.wake()
        stats = until(instance, wasted_prefixes=1)
        assert stats["device_bytes"] == model.kv_bytes(30), "it is written to"
        log.let_go(1)
        assert until(instance, device_bytes=0, reloads=1)["broken"] == 0
