"""The instance with the real ranker: whatever way a ranking takes, its scores are the same."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.models import HstuConfig
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    History,
    RankItem,
    RankPath,
    RankRequest,
    ServeSettings,
    Signal,
)

PATIENCE_S = 60.0
CONFIG = HstuConfig(dim=16, blocks=2, heads=2, attention_dim=8, value_dim=8, time_buckets=8)
SETTINGS = ServeSettings(chunk=7, target_ms=1e6, life_s=1e3)


def timed(items_N: np.ndarray, start: int) -> History:
    return History(items_N, start + 60 * np.arange(len(items_N)))


def asked(user: int) -> RankRequest:
    random = np.random.default_rng(user)
    long = timed(random.integers(1, 100, 20 + 9 * user), 1000)
    short = timed(random.integers(1, 100, 1 + user), 100_000)
    return RankRequest(str(user), long, short, random.integers(1, 100, 10 + user), time=200_000)


def full(model: HstuRankModel, request: RankRequest) -> np.ndarray:
    whole = request.long.joined(request.short)
    return model.full([RankItem(whole, request.candidates_C, time=request.time)])[0]


@pytest.fixture(scope="module")
def model() -> HstuRankModel:
    return HstuRankModel.random(CONFIG, num_items=100, device="cpu")


def rank_all(instance: Instance, users: range) -> list[Answer]:
    futures = [instance.rank(asked(user)) for user in users]
    return [future.result(PATIENCE_S) for future in futures]


def test_every_way_gives_the_scores_of_the_full_pass(model: HstuRankModel):
    users = range(6)
    seen: set[RankPath] = set()
    with Instance(model, SETTINGS) as instance:
        for user in users[:4]:
            assert (
                instance.prefetch(Signal(str(user), asked(user).long)) is AdmissionOutcome.ADMITTED
            )
        answers = [*rank_all(instance, users), *rank_all(instance, users)]
        for user, answer in zip([*users, *users], answers, strict=True):
            expected_C = full(model, asked(user))
            assert np.abs(answer.scores_C - expected_C).max() <= 1e-5 * expected_C.std()
            assert answer.length_used == len(asked(user).long) + len(asked(user).short)
            seen.add(answer.path)
        stats = instance.stats()
    assert RankPath.MISS_FULL in seen
    assert seen & {RankPath.HBM_HIT, RankPath.LATE_HIT}
    assert (stats["fills"], stats["failed_fills"], stats["faults"]) == (4, 0, 0)


def test_memory_is_counted_to_the_byte(model: HstuRankModel):
    with Instance(model, SETTINGS) as instance:
        instance.prefetch(Signal("0", asked(0).long))
        change = instance._state.change
        with change:
            assert change.wait_for(lambda: instance.stats()["entries_ready"], PATIENCE_S)
            (entry,) = instance._state.cache.device_pool
            assert entry.kv is not None
            assert instance.stats()["device_bytes"] == entry.kv.num_bytes == model.kv_bytes(20)
