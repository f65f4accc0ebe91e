"""HSTU: who may influence whom, and a prefix that is as good as the whole."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged
from nestpipe.models import (
    Hstu,
    HstuConfig,
    HstuRanker,
    HstuRetriever,
    SampledSoftmaxConfig,
    Tokens,
)

ITEMS = 30
CONFIG = HstuConfig(
    blocks=3, heads=2, dim=8, attention_dim=4, value_dim=4, max_len=8, position_buckets=4,
    time_buckets=5,
)  # fmt: skip
assert_same = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
"""For float64: all that may differ is the order in which products are added."""


@pytest.fixture(name="table_ND")
def make_table() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ITEMS + 1, CONFIG.dim, dtype=torch.float64)


@pytest.fixture
def ranker(table_ND: Tensor) -> HstuRanker:
    return HstuRanker(CONFIG).double()


def request_of(histories: list[list[int]], candidates: list[list[int]], time: int = 99) -> Batch:
    """Item number n of a history happened at time n * n + 1; labels are all 1."""
    history, asked = Jagged.from_lists(histories), Jagged.from_lists(candidates)
    times = Jagged.from_lists([[n * n + 1 for n in range(len(row))] for row in histories])
    labels = Jagged(torch.ones_like(asked.values), asked.lengths)
    sparse = {"history": history, "candidates": asked, "timestamps": times, "labels": labels}
    return Batch(len(histories), {"time": torch.full((len(histories),), time)}, sparse)


def rows_of(table_ND: Tensor, batch: Batch) -> dict[str, Tensor]:
    return {name: table_ND[batch.sparse[name].values] for name in ("history", "candidates")}


def logits(ranker: HstuRanker, table_ND: Tensor, batch: Batch) -> Tensor:
    return ranker.logits(rows_of(table_ND, batch), batch).detach()


def test_a_candidate_changes_only_its_own_score(ranker, table_ND):
    before = logits(ranker, table_ND, request_of([[1, 2, 3], [4]], [[5, 6, 7], [8, 9]]))
    after = logits(ranker, table_ND, request_of([[1, 2, 3], [4]], [[5, 20, 7], [8, 9]]))
    assert (before - after).abs()[1] > 1e-6
    others = torch.tensor([0, 2, 3, 4])
    assert_same(after[others], before[others])


def test_candidates_may_come_in_any_order_and_number(ranker, table_ND):
    together = logits(ranker, table_ND, request_of([[1, 2, 3]], [[5, 6, 7]]))
    turned = logits(ranker, table_ND, request_of([[1, 2, 3]], [[7, 5, 6]]))
    assert_same(turned, together[torch.tensor([2, 0, 1])])
    alone = logits(ranker, table_ND, request_of([[1, 2, 3]], [[6]]))
    assert_same(alone, together[1:2])


def test_a_history_changes_the_scores_of_its_own_sample_only(ranker, table_ND):
    before = logits(ranker, table_ND, request_of([[1, 2], [3, 4]], [[5, 6], [5, 6]]))
    after = logits(ranker, table_ND, request_of([[1, 9], [3, 4]], [[5, 6], [5, 6]]))
    assert ((before - after).abs()[:2] > 1e-9).all()
    assert_same(after[2:], before[2:])


def test_an_appended_item_does_not_change_earlier_outputs(table_ND):
    encoder = Hstu(CONFIG).double()
    short, long = [3, 1, 4, 1], [3, 1, 4, 1, 5, 9]
    times = torch.tensor([1, 2, 5, 9, 30, 31])
    encoded = [
        encoder(table_ND[items], Tokens(torch.tensor([len(items)]), times_T=times[: len(items)]))
        for items in (short, long)
    ]
    assert_same(encoded[1][:4], encoded[0])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_sample_is_the_same_alone_and_in_a_batch(ranker, table_ND, dtype, bound):
    ranker, table_ND = ranker.to(dtype), table_ND.to(dtype)
    histories = [[1, 2, 3], list(range(1, 29)), [], [7]]
    candidates = [[4, 5], [6], [7, 8, 9], []]
    together = logits(ranker, table_ND, request_of(histories, candidates))
    alone = [
        logits(ranker, table_ND, request_of([history], [asked]))
        for history, asked in zip(histories, candidates, strict=True)
    ]
    assert (torch.cat(alone) - together).abs().max() <= bound * together.abs().max()


@pytest.mark.parametrize("cuts", [[2, 0, 5], [4, 0, 9], [0, 0, 0]])
def test_scores_from_a_prefix_are_those_of_the_whole(ranker, table_ND, cuts):
    """The prefix is made in another batch, before the candidates and at another time."""
    histories = [[1, 2, 3, 4], [5, 6], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
    candidates = [[7, 8], [9], [10, 11, 12]]
    batch = request_of(histories, candidates)
    whole = logits(ranker, table_ND, batch)
    old = request_of([h[:c] for h, c in zip(histories, cuts, strict=True)], [[]] * 3, time=50)
    prefix = ranker.prefix(rows_of(table_ND, old), old)
    new = request_of([h[c:] for h, c in zip(histories, cuts, strict=True)], candidates)
    late = [range(c, len(h)) for h, c in zip(histories, cuts, strict=True)]
    times = Jagged.from_lists([[n * n + 1 for n in row] for row in late])
    new = Batch(3, new.dense, {**new.sparse, "timestamps": times})
    scores = ranker.logits(rows_of(table_ND, new), new, prefix)
    assert_same(scores, whole)


def test_a_prefix_grows_piece_by_piece(table_ND):
    encoder = Hstu(CONFIG).double()
    items, times = torch.tensor([3, 1, 4, 1, 5, 9]), torch.tensor([1, 2, 5, 9, 30, 31])

    def tokens(start: int, stop: int) -> Tokens:
        return Tokens(torch.tensor([stop - start]), times_T=times[start:stop])

    whole = encoder(table_ND[items], tokens(0, 6))
    prefix = encoder.prefix(table_ND[items[:2]], tokens(0, 2))
    prefix = encoder.prefix(table_ND[items[2:3]], tokens(2, 3), prefix)
    assert_same(encoder(table_ND[items[3:]], tokens(3, 6), prefix), whole[3:])


def test_a_candidate_gets_into_no_prefix(ranker, table_ND):
    with pytest.raises(AssertionError, match="must not be kept"):
        ranker.encoder.prefix(table_ND[:2], Tokens(torch.tensor([2]), torch.tensor([1])))


def test_a_label_is_needed_for_each_candidate(ranker, table_ND):
    batch = request_of([[1]], [[2, 3]])
    batch = Batch(1, batch.dense, {**batch.sparse, "labels": Jagged.from_lists([[1]])})
    with pytest.raises(DataError, match="1 labels for 2 candidates"):
        ranker.dense(rows_of(table_ND, batch), batch)


def walk(histories: list[list[int]], **columns: list[int]) -> Batch:
    dense = {"sample_id": list(range(len(histories))), **columns}
    return Batch(
        len(histories),
        {name: torch.tensor(column) for name, column in dense.items()},
        {"history": Jagged.from_lists(histories)},
    )


def make_retriever(**settings) -> HstuRetriever:
    torch.manual_seed(0)
    config = HstuConfig(blocks=1, dim=8, attention_dim=4, value_dim=4, max_len=8)
    softmax = SampledSoftmaxConfig(num_items=ITEMS, **settings)
    return HstuRetriever(config, softmax).double()


@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 0, 2], [1, 1, 1, 1]])
def test_negatives_are_the_same_under_any_split(sizes: list[int]):
    model = make_retriever(negatives=5)
    batch = walk([[1, 2], [3], [], [4, 5, 6]], step=[8, 8, 9, 9])
    whole = model.sparse_keys(batch)["negatives"]
    torch.rand(1)  # the global generator has no say
    parts = [model.sparse_keys(part)["negatives"] for part in batch.split(sizes)]
    assert torch.cat([part.values for part in parts]).tolist() == whole.values.tolist()
    assert whole.lengths.tolist() == [5] * 4
    assert whole.values.min() >= 1
    assert whole.values.max() <= ITEMS


def test_another_step_draws_other_negatives():
    model = make_retriever(negatives=20)
    draws = [model.negatives(walk([[1, 2]], step=[step])) for step in (0, 1)]
    assert not torch.equal(*draws)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("sampling", ["uniform", "log_uniform"])
def test_the_loss_is_sampled_softmax_without_accidental_hits(table_ND, sampling, normalise):
    model = make_retriever(negatives=60, sampling=sampling, normalise=normalise, temperature=0.5)
    histories = [[1, 2, 3], [4], [], [5, 6]]
    batch = walk(histories)
    rows = {name: table_ND[keys.values] for name, keys in model.sparse_keys(batch).items()}
    loss = model.dense(rows, batch)
    total, hits = 0.0, 0
    for history, drawn in zip(histories, model.negatives(batch), strict=True):
        for position in range(1, len(history)):
            seen = walk([history[:position]])
            vector = model.encode({"history": table_ND[history[:position]]}, seen)
            hits += int((drawn == history[position]).sum())
            others = drawn[drawn != history[position]]
            items = torch.cat([torch.tensor([history[position]]), others])
            scores = model.score(vector, table_ND[items])[0]
            scores = scores - model.sampler.log_chance(items)
            total -= float(torch.log_softmax(scores, 0)[0].detach())
    assert hits > 0
    assert loss.weight == 3
    assert float(loss.total.detach()) == pytest.approx(total, rel=1e-9)


def test_users_without_a_history_have_the_zero_vector(table_ND):
    model = make_retriever()
    batch = walk([[], [1, 2], []])
    rows = {name: table_ND[keys.values] for name, keys in model.query_keys(batch).items()}
    vectors = model.encode(rows, batch)
    assert vectors.abs().sum(1).gt(0).tolist() == [False, True, False]
    assert model.encode({"history": table_ND[:0]}, walk([])).shape == (0, 8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"max_len": 0}, "max_len is 0"), ({"time_buckets": -1}, "time_buckets is -1")],
)
def test_impossible_shapes_are_refused(settings, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        HstuConfig(**settings)


def test_a_softmax_needs_items():
    with pytest.raises(ConfigError, match="num_items is 0"):
        SampledSoftmaxConfig(num_items=0)


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
@pytest.mark.parametrize("window", [0, 2])
def test_work_is_counted_from_visible_pairs_and_rows(kind, window: int):
    """Twice the multiplications, three times the forward pass, pair by pair."""
    config = replace(CONFIG, kind=kind, max_attention=window)
    model = HstuRanker(config)
    histories, candidates = [0, 1, 5, 3], [2, 0, 3, 0]
    batch = request_of([[1] * n for n in histories], [[2] * n for n in candidates])
    channels = 3 if kind == "fuxi" else 1
    weights = [p.numel() for p in model.encoder.blocks.parameters() if p.ndim == 2 and len(p) > 2]
    head = config.dim * (config.dim + 1)
    expected = []
    for history, asked in zip(histories, candidates, strict=True):
        far = window or 99
        pairs = sum(1 for i in range(history) for j in range(i + 1) if i - j <= far)
        pairs += asked * (1 + sum(1 for j in range(history) if history - j <= far))
        widths = config.heads * (config.attention_dim + channels * config.value_dim)
        products = sum(weights) * (history + asked) + config.blocks * widths * pairs
        expected.append(6.0 * (products + head * asked))
    assert model.step_flops(batch).tolist() == expected


@pytest.mark.parametrize("pool", [0, 8])
@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_a_step_never_waits_for_the_device(kind, pool: int, monkeypatch: pytest.MonkeyPatch):
    """To read a number of a device without memory is an error; a GPU makes the host wait."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # meta has none
    config = replace(CONFIG, kind=kind, dropout=0.1)
    softmax = SampledSoftmaxConfig(num_items=ITEMS, negatives=4, pool=pool)
    batch = request_of([[1, 2, 3], [], [4, 5]], [[6], [7, 8], [9]])
    for model in (HstuRanker(config), HstuRetriever(config, softmax)):
        keys = model.sparse_keys(batch)
        there = {
            name: torch.empty(len(of.values), CONFIG.dim, device="meta", requires_grad=True)
            for name, of in keys.items()
        }
        loss = model.to("meta").dense(there, batch.pack().to("meta"))
        loss.total.backward()
        assert loss.weight == (4 if isinstance(model, HstuRanker) else 3)
