"""A prefix computed early gives the scores of the whole: any split, any chunks, any batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.models import HstuConfig
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import KV, History, Ids, PrefixItem, RankItem, Scores
from nestpipe.train.job import JobConfig, make_job
from support.examples import examples

ITEMS = 200
SHAPE: dict[str, Any] = {
    "blocks": 3, "heads": 2, "dim": 16, "attention_dim": 8, "value_dim": 4, "max_len": 48,
    "position_buckets": 16,
}  # fmt: skip
LONGEST = 70
"""Longer than `max_len`: such histories must work too."""
EXACT = 1e-5
"""Deviation allowed in float32, as a share of the scores' standard deviation."""
ROUGH = 0.1
"""The same in bfloat16; the largest seen on a CPU was 0.03, from float32 0.04."""


@dataclass(frozen=True)
class User:
    """A ranking, and how its history is cut into chunks: all but the last are computed early."""

    history: History
    candidates_C: Ids
    cuts: tuple[int, ...]

    @property
    def chunks(self) -> list[History]:
        bounds = [0, *self.cuts, len(self.history)]
        return [part_of(self.history, a, b) for a, b in pairwise(bounds)]

    @property
    def time(self) -> int:
        times = self.history.times_N
        assert times is not None
        return int(times.max(initial=0)) + 50


def part_of(history: History, begin: int, end: int) -> History:
    assert history.times_N is not None
    return History(history.items_N[begin:end], history.times_N[begin:end])


def make_user(seed: int, length: int, candidates: int, cuts: list[int]) -> User:
    """Some items are unknown: the model has 1 to ITEMS."""
    draw = np.random.default_rng(seed)
    times_N = np.cumsum(draw.integers(0, 40, length))
    history = History(draw.integers(1, ITEMS + 20, length), times_N)
    return User(history, draw.integers(1, ITEMS + 20, candidates), tuple(sorted(cuts)))


@st.composite
def users(draw: st.DrawFn) -> User:
    length = draw(st.integers(0, LONGEST))
    cuts = draw(st.lists(st.integers(0, length), min_size=1, max_size=4))
    return make_user(draw(st.integers(0, 1000)), length, draw(st.integers(0, 6)), cuts)


def prefixes(model: HstuRankModel, asked: list[User]) -> list[KV]:
    """All users' first chunks in one batch, then all second ones, ...; some have fewer."""
    kept: dict[int, KV] = {}
    for number in range(max(len(user.cuts) for user in asked)):
        due = [n for n, user in enumerate(asked) if number < len(user.cuts)]
        items = [PrefixItem(asked[n].chunks[number], kept.get(n)) for n in due]
        kept |= dict(zip(due, model.prefix(items), strict=True))
    return [kept[n] for n in range(len(asked))]


def cached(model: HstuRankModel, asked: list[User]) -> list[Scores]:
    pasts = prefixes(model, asked)
    return model.rank(
        [
            RankItem(user.chunks[-1], user.candidates_C, past, user.time)
            for user, past in zip(asked, pasts, strict=True)
        ]
    )


def full(model: HstuRankModel, user: User) -> Scores:
    """Alone, and without a past."""
    return model.full([RankItem(user.history, user.candidates_C, None, user.time)])[0]


@cache
def spread(model: HstuRankModel) -> float:
    """The standard deviation of scores, over users and candidates."""
    asked = [make_user(seed, 30, 30, [0]) for seed in range(8)]
    return float(np.concatenate([full(model, user) for user in asked]).std())


def deviation(model: HstuRankModel, asked: list[User]) -> float:
    """Cached and together against full and alone, in standard deviations of scores."""
    apart = [np.zeros(1)]
    for scores, user in zip(cached(model, asked), asked, strict=True):
        assert scores.dtype == np.float32
        assert scores.shape == user.candidates_C.shape
        apart.append(np.abs(scores - full(model, user)))
    return float(np.concatenate(apart).max()) / spread(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> HstuRankModel:
    """A little training: enough for weights that are no longer those of the beginning."""
    sizes = {"samples": 300, "test_samples": 10, "num_items": ITEMS, "num_communities": 10}
    config = build(
        JobConfig,
        {
            "data": {"synthetic": {"flavour": "sequence", **sizes}},
            "model": {
                "kind": "ranker", "dim": 16, "attention_dim": 8, "max_len": 48, "negatives": 16,
            },
            "run": {"batch": 32, "epochs": 9, "device": "cpu"},
            "rows": {"optimizer": "adam", "lr": 0.02},
            "dense": {"optimizer": "adam", "lr": 0.01},
        },
    )  # fmt: skip
    job = make_job(config, LocalCommunicator())
    job.trainer.fit(job.train, steps=20, epochs=9)
    checkpoint = job.trainer.save(tmp_path_factory.mktemp("run"))
    job.trainer.close()
    return HstuRankModel.from_checkpoint(checkpoint, "cpu")


@pytest.fixture(scope="module", params=[0, 8])
def untrained(request) -> HstuRankModel:
    return HstuRankModel.random(HstuConfig(**SHAPE, time_buckets=request.param), ITEMS, 1, "cpu")


@pytest.fixture(scope="module")
def rough() -> HstuRankModel:
    return HstuRankModel.random(HstuConfig(**SHAPE, time_buckets=8), ITEMS, 1, "cpu", "bfloat16")


@given(asked=st.lists(users(), min_size=1, max_size=4))
@examples("few")
def test_any_split_chunking_and_batch_is_exact_with_random_weights(untrained, asked):
    assert deviation(untrained, asked) <= EXACT


@given(asked=st.lists(users(), min_size=1, max_size=4))
@examples("few")
def test_any_split_chunking_and_batch_is_exact_with_trained_weights(trained, asked):
    assert deviation(trained, asked) <= EXACT


@pytest.mark.parametrize("cut", range(13))
def test_every_split_point_of_a_history_is_exact(untrained, cut: int):
    assert deviation(untrained, [make_user(3, 12, 5, [cut])]) <= EXACT


@pytest.mark.parametrize("length", [0, 1, 2])
def test_the_shortest_histories_are_exact(untrained, length: int):
    assert (
        deviation(untrained, [make_user(4, length, 5, [length]), make_user(5, 9, 1, [4])]) <= EXACT
    )


def test_a_long_history_in_many_chunks_is_exact():
    shape = {**SHAPE, "dim": 64, "attention_dim": 32, "value_dim": 32, "max_len": 512}
    model = HstuRankModel.random(HstuConfig(**shape, time_buckets=8), ITEMS, 2, "cpu")
    assert deviation(model, [make_user(6, 400, 32, list(range(50, 400, 50)))]) <= EXACT


@given(asked=st.lists(users(), min_size=1, max_size=4))
@examples("few")
def test_bfloat16_stays_within_its_bound(rough, asked):
    assert deviation(rough, asked) <= ROUGH


def test_bfloat16_scores_are_near_those_of_float32(rough):
    exact = HstuRankModel.random(rough.config, ITEMS, 1, "cpu")
    user = make_user(7, 60, 40, [30])
    apart = np.abs(full(exact, user) - full(rough, user)).max() / spread(exact)
    assert 0 < apart <= ROUGH
    (past,) = prefixes(rough, [user])
    assert past.keys_LNHA.dtype == past.values_LNHV.dtype == torch.bfloat16


def test_scores_do_not_depend_on_the_rest_of_the_batch(untrained):
    asked = [make_user(seed, length, 4, [length // 2]) for seed, length in enumerate((5, 70, 0, 1))]
    items = [RankItem(user.history, user.candidates_C, None, user.time) for user in asked]
    for user, scores in zip(asked, untrained.rank(items), strict=True):
        np.testing.assert_allclose(
            scores, full(untrained, user), rtol=0, atol=EXACT * spread(untrained)
        )
    without, with_past = cached(untrained, asked[:1]), cached(untrained, asked)
    np.testing.assert_allclose(with_past[0], without[0], rtol=0, atol=EXACT * spread(untrained))


def test_a_candidate_does_not_change_the_score_of_another(untrained):
    user = make_user(8, 20, 6, [10])
    changed = User(user.history, np.array([*user.candidates_C[:5], 77]), user.cuts)
    before, after = full(untrained, user), full(untrained, changed)
    assert abs(before[5] - after[5]) > 0.01 * spread(untrained)
    np.testing.assert_allclose(after[:5], before[:5], rtol=0, atol=EXACT * spread(untrained))


def test_a_ranking_leaves_the_kept_prefix_as_it_was(untrained):
    user = make_user(9, 20, 6, [12])
    (past,) = prefixes(untrained, [user])
    keys, values = past.keys_LNHA.clone(), past.values_LNHV.clone()
    cached_once = untrained.rank([RankItem(user.chunks[-1], user.candidates_C, past, user.time)])
    assert len(past) == 12
    assert torch.equal(past.keys_LNHA, keys)
    assert torch.equal(past.values_LNHV, values)
    again = untrained.rank([RankItem(user.chunks[-1], user.candidates_C, past, user.time)])
    assert np.array_equal(cached_once[0], again[0])


def test_a_prefix_has_a_row_for_each_event_and_exactly_the_memory_it_says(untrained):
    asked = [make_user(seed, length, 3, [length]) for seed, length in enumerate((0, 1, 7, 70))]
    for user, kv in zip(asked, prefixes(untrained, asked), strict=True):
        assert len(kv) == len(user.history)
        assert kv.num_bytes == untrained.kv_bytes(len(user.history))
        storages = [kv.keys_LNHA.untyped_storage(), kv.values_LNHV.untyped_storage()]
        owned = sum(storage.nbytes() for storage in storages)
        assert owned == kv.keys_LNHA.nbytes + kv.values_LNHV.nbytes


def test_copies_to_the_host_and_back_are_the_same_and_apart(untrained):
    user = make_user(10, 20, 6, [12])
    (past,) = prefixes(untrained, [user])
    host = untrained.to_host(past)
    back = untrained.to_device(host)
    expected = cached(untrained, [user])[0]
    with torch.inference_mode():
        for tensor in (past.keys_LNHA, host.values_LNHV):
            tensor.zero_()
    scores = untrained.rank([RankItem(user.chunks[-1], user.candidates_C, back, user.time)])
    assert np.array_equal(scores[0], expected)


def test_nothing_asked_is_nothing_answered(untrained):
    assert untrained.rank([]) == []
    assert untrained.prefix([]) == []
