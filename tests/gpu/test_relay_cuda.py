"""Relay serving on a GPU: whatever way a prefix comes to its ranking, the scores are the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from nestpipe.models import HstuConfig
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.kv_memory import Reload
from nestpipe.serve.engine.rank_model import HstuRankModel
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

PATIENCE_S = 120.0
"""Kernels are compiled on the way."""
REQUESTS = 50
ITEMS = 500
BOUNDS = [("float32", 1e-5), ("bfloat16", 0.1)]
"""Deviation allowed, as a share of the scores' standard deviation: those of the tests on a CPU."""
CONFIG = HstuConfig(
    blocks=4, heads=2, dim=64, attention_dim=32, value_dim=32, max_len=512, position_buckets=64,
    time_buckets=16,
)  # fmt: skip
SETTINGS = ServeSettings(chunk=200, host_mb=256, target_ms=1e6, life_s=1e6, host_ttl_s=1e6)
SLEEP = 20_000_000
"""Cycles of the GPU, about ten milliseconds: longer than a whole ranking takes."""


def make_request(seed: int) -> RankRequest:
    """Some items are unknown: the model has 1 to ITEMS."""
    random = np.random.default_rng(seed)
    length, short = int(random.integers(1, 700)), int(random.integers(0, 60))
    times_N = np.cumsum(random.integers(0, 1000, length + short))
    items_N = random.integers(1, ITEMS + 20, length + short)
    long = History(items_N[:length], times_N[:length])
    late = History(items_N[length:], times_N[length:])
    candidates_C = random.integers(1, ITEMS + 20, int(random.integers(1, 100)))
    return RankRequest(str(seed), long, late, candidates_C, time=int(times_N[-1]) + 50)


def full(model: HstuRankModel, request: RankRequest) -> Scores:
    whole = request.long.joined(request.short)
    return model.full([RankItem(whole, request.candidates_C, time=request.time)])[0]


def cached(model: HstuRankModel, request: RankRequest, past: KV) -> Scores:
    return model.rank([RankItem(request.short, request.candidates_C, past, request.time)])[0]


def until(instance: Instance, **numbers: float) -> dict[str, float]:
    change = instance._state.change
    there = lambda: numbers.items() <= instance.stats().items()  # noqa: E731
    with change:
        for _ in range(1000):  # what is freed on the way to the next task is not announced
            if change.wait_for(there, PATIENCE_S / 1000):
                return instance.stats()
    raise AssertionError(f"not {numbers} but {instance.stats()}")


def rank_all(instance: Instance, requests: list[RankRequest]) -> list[Answer]:
    futures = [instance.rank(request) for request in requests]
    return [future.result(PATIENCE_S) for future in futures]


def deviation(answers: list[Answer], wanted: list[Scores], spread: float) -> float:
    """The largest, in standard deviations of scores."""
    apart = [
        np.abs(answer.scores_C - full_C).max()
        for answer, full_C in zip(answers, wanted, strict=True)
    ]
    assert np.isfinite(apart).all()
    return float(max(apart)) / spread


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("by_layer", [True, False])
def test_scores_by_slot_by_reload_and_in_full_agree(dtype: str, bound: float, by_layer: bool):
    model = HstuRankModel.random(CONFIG, ITEMS, 1, "cuda", dtype)
    requests = [make_request(seed) for seed in range(REQUESTS)]
    wanted = [full(model, request) for request in requests]
    spread = float(np.concatenate(wanted).std())
    with Instance(model, replace(SETTINGS, reload_by_layer=by_layer)) as instance:
        for request in requests:
            assert (
                instance.prefetch(Signal(request.user, request.long)) is AdmissionOutcome.ADMITTED
            )
        until(instance, entries_ready=REQUESTS)
        by_slot = rank_all(instance, requests)
        until(instance, offloads=REQUESTS, device_bytes=0)
        assert instance._state.cache.host_tier is not None
        for kept in instance._state.cache.host_tier._kept.values():
            assert kept.kv is not None
            assert kept.kv.keys_LNHA.is_pinned()
            assert kept.kv.values_LNHV.is_pinned()
        by_reload = rank_all(instance, requests)
        stats = until(instance, reloads=REQUESTS, device_bytes=0)
    assert {answer.path for answer in by_slot} == {RankPath.HBM_HIT}
    assert {answer.path for answer in by_reload} == {RankPath.DRAM_HIT}
    assert deviation(by_slot, wanted, spread) <= bound
    assert deviation(by_reload, wanted, spread) <= bound
    assert (stats["faults"], stats["failed_batches"], stats["failed_reloads"]) == (0, 0, 0)
    assert by_layer or stats["early_batches"] == 0


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
def test_memory_that_is_used_again_and_again_spoils_no_score(dtype: str, bound: float):
    """Room for a few prefixes only, so that copies and rankings follow each other in it."""
    model = HstuRankModel.random(CONFIG, ITEMS, 1, "cuda", dtype)
    requests = [make_request(seed) for seed in range(8)]
    wanted = [full(model, request) for request in requests]
    spread = float(np.concatenate(wanted).std())
    room = 3 * model.kv_bytes(700) / 2**20
    settings = replace(SETTINGS, device_mb=room, batch=2, life_s=0.05)
    with Instance(model, settings) as instance, ThreadPoolExecutor(4) as clients:

        def client(number: int) -> float:
            random = np.random.default_rng(number)
            worst = 0.0
            for _ in range(40):
                user = int(random.integers(len(requests)))
                instance.prefetch(Signal(str(user), requests[user].long))
                (answer,) = rank_all(instance, [requests[user]])
                worst = max(worst, deviation([answer], [wanted[user]], spread))
            return worst

        assert max(clients.map(client, range(4))) <= bound
        stats = until(instance, open_rankings=0, queue_reloads=0)
    assert stats["reloads"] > 0
    assert (stats["faults"], stats["broken"]) == (0, 0)


# A layer is read after its event


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.cuda.Stream]:
    """The GPU takes a rest before it copies a layer."""
    copy = Reload.copy

    def late_copy(reload: Reload, layer: int) -> None:
        torch.cuda._sleep(SLEEP)
        copy(reload, layer)

    with monkeypatch.context() as patch:
        patch.setattr(Reload, "copy", late_copy)
        yield torch.cuda.Stream()


def spoil(kv: KV) -> None:
    """Whatever is read before it was copied makes every score a NaN."""
    with torch.inference_mode():
        kv.keys_LNHA.fill_(float("nan"))
        kv.values_LNHV.fill_(float("nan"))


@pytest.mark.parametrize("dtype", [dtype for dtype, _ in BOUNDS])
def test_no_layer_is_read_before_it_was_copied(monkeypatch: pytest.MonkeyPatch, dtype: str):
    model = HstuRankModel.random(CONFIG, ITEMS, 1, "cuda", dtype)
    request = make_request(3)
    host = model.to_host(model.prefix([PrefixItem(request.long)])[0])
    whole = model.to_device(host)
    expected_C = cached(model, request, whole)
    with late(monkeypatch) as stream, ThreadPoolExecutor(1) as copier:
        with torch.cuda.stream(stream):
            reload = model.begin_reload(host)
            spoil(reload.kv)

        def bring() -> KV:
            with torch.cuda.stream(stream):
                return reload.run()

        copying = copier.submit(bring)
        found_C = cached(model, request, reload.kv)
        complete = copying.result(PATIENCE_S)
    np.testing.assert_array_equal(found_C, expected_C)
    assert complete.layer_events is None
    assert torch.equal(complete.keys_LNHA, whole.keys_LNHA)
    assert torch.equal(complete.values_LNHV, whole.values_LNHV)
    np.testing.assert_array_equal(cached(model, request, complete), expected_C)


def test_the_test_above_would_see_a_layer_that_is_read_early():
    model = HstuRankModel.random(CONFIG, ITEMS, 1, "cuda")
    request = make_request(3)
    reload = model.begin_reload(model.to_host(model.prefix([PrefixItem(request.long)])[0]))
    spoil(reload.kv)
    assert np.isnan(cached(model, request, replace(reload.kv, layer_events=None))).all()
