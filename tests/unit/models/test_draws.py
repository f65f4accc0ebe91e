"""Draws as functions of seed, sample, pass and place: the same in any batch, as likely as said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.models import (
    EncoderOptions,
    HstuConfig,
    HstuRanker,
    HstuRetriever,
    SampledSoftmaxConfig,
)
from nestpipe.models.draws import chance_of, draw_state, dropout, keep, of_each_row
from nestpipe.train.config import ModelConfig

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ITEMS = 30
HISTORIES = [[1, 2, 3, 4], [5], [], [6, 7, 8], [9, 9]]
CONFIG = HstuConfig(
    blocks=2, heads=2, dim=8, attention_dim=4, value_dim=4, max_len=8, dropout=0.4, time_buckets=4
)


def mix_in_python(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def keep_in_python(state: int, column: int, chance: float, site: int) -> bool:
    """One number of one row: which 16 bits of which hash, as a signed number."""
    at_site = mix_in_python((state + 0x94D049BB133111EB * (2 * site + 1)) & WORD)
    word = mix_in_python((at_site + (column // 4 + 1) * GOLDEN) & WORD)
    quarter = (word >> (16 * (column % 4))) & 0xFFFF
    signed = quarter - (1 << 16) if quarter >= 1 << 15 else quarter
    return signed < round(chance * (1 << 16)) - (1 << 15)


def test_what_is_kept_is_the_hash():
    states = torch.tensor([0, 1, -5, 1 << 62])
    kept = keep(states, 7, 0.3, site=2)
    expected = [
        [keep_in_python(state & WORD, column, 0.3, 2) for column in range(7)]
        for state in states.tolist()
    ]
    assert kept.tolist() == expected
    assert keep(states[:0], 7, 0.3, site=2).shape == (0, 7)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_the_mean_stays(share: float):
    states = of_each_row(torch.arange(500), torch.full((500,), 4), torch.arange(4).repeat(500))
    x = torch.ones(2000, 10, dtype=torch.float64)
    dropped = dropout(x, states, share, site=1)
    kept = chance_of(1 - share)
    assert abs(kept - (1 - share)) <= 2**-16
    spread = (kept * (1 - kept) / x.numel()) ** 0.5
    assert abs(float((dropped != 0).double().mean()) - kept) <= 5 * spread
    assert set(dropped.unique().tolist()) <= {0.0, 1 / kept}


def test_every_part_of_a_draw_matters():
    batch = make_batch()
    state = draw_state(batch, 0)
    later = replace_dense(batch, step=batch.dense["step"] + 1)
    assert len(torch.cat([state, draw_state(batch, 1), draw_state(later, 0)]).unique()) == 15
    rows = of_each_row(state[:1], torch.tensor([4]), torch.arange(4))
    masks = [keep(rows, 64, 0.5, site=site) for site in (0, 1)]
    assert not torch.equal(*masks)
    assert len({tuple(row) for mask in masks for row in mask.tolist()}) == 8


def make_batch(**sparse: Jagged) -> Batch:
    history = Jagged.from_lists(HISTORIES)
    dense = {
        "sample_id": torch.arange(40, 45),
        "step": torch.tensor([3, 3, 3, 4, 4]),
        "time": torch.tensor([9, 9, 9, 9, 9]),
    }
    times = Jagged(torch.arange(len(history.values)), history.lengths)
    return Batch(5, dense, {"history": history, "timestamps": times, **sparse})


def replace_dense(batch: Batch, **columns: Tensor) -> Batch:
    return Batch(batch.size, {**batch.dense, **columns}, batch.sparse)


def retriever(config: HstuConfig = CONFIG, **softmax: Any) -> HstuRetriever:
    torch.manual_seed(0)
    options = {"num_items": ITEMS, "negatives": 6, "seed": 3, **softmax}
    return HstuRetriever(config, SampledSoftmaxConfig(**options)).double()


def table() -> Tensor:
    return torch.randn(
        ITEMS + 1, CONFIG.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def loss_of(model: Any, batch: Batch) -> Tensor:
    rows = {name: table()[keys.values] for name, keys in model.sparse_keys(batch).items()}
    return model.dense(rows, batch).total.detach()


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
@pytest.mark.parametrize("pool", [0, 20])
@pytest.mark.parametrize("sizes", [[1, 4], [2, 0, 3], [1, 1, 1, 1, 1]])
def test_dropout_and_negatives_do_not_depend_on_the_batch(kind, pool: int, sizes: list[int]):
    model = retriever(replace(CONFIG, kind=kind), pool=pool).train()
    whole = loss_of(model, make_batch())
    torch.rand(1)  # the global generator has no say
    parts = sum(loss_of(model, part) for part in make_batch().split(sizes))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    turned = make_batch().select(torch.tensor([4, 2, 0, 1, 3]))
    torch.testing.assert_close(loss_of(model, turned), whole, rtol=1e-12, atol=0)


def test_dropout_is_for_training_alone_and_another_pass_has_another():
    model = retriever().train()
    batch = make_batch()
    later = replace_dense(batch, step=batch.dense["step"] + 1)
    rows = {name: table()[keys.values] for name, keys in model.sparse_keys(batch).items()}
    with torch.no_grad():
        totals = [model.dense(rows, of).total for of in (batch, later)]
    assert not torch.equal(*totals)
    once = model.encode(rows, batch)
    assert not torch.equal(once, model.eval().encode(rows, batch))
    none = retriever(replace(CONFIG, dropout=0.0)).eval()
    assert torch.equal(none.encode(rows, batch), model.encode(rows, batch))


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_a_ranker_drops_the_same_in_any_batch(kind):
    torch.manual_seed(0)
    model = HstuRanker(replace(CONFIG, kind=kind), seed=3).double().train()
    asked = Jagged.from_lists([[1, 2], [3], [4], [], [5, 6]])
    labels = Jagged(asked.values % 2, asked.lengths)
    batch = make_batch(candidates=asked, labels=labels)
    whole = loss_of(model, batch)
    parts = sum(loss_of(model, part) for part in batch.split([2, 1, 2]))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    assert float(loss_of(model.eval(), batch)) != float(whole)


@pytest.mark.parametrize("kind", ["hstu", "fuxi"])
def test_activations_computed_again_give_the_same_bits(kind):
    grads = []
    for again in (False, True):
        model = retriever(replace(CONFIG, kind=kind, checkpoint_activations=again)).train()
        batch = make_batch()
        rows = {
            name: table()[keys.values].requires_grad_()
            for name, keys in model.sparse_keys(batch).items()
        }
        loss = model.dense(rows, batch)
        inputs = [*rows.values(), *model.parameters()]
        grads.append([loss.total.detach(), *torch.autograd.grad(loss.total, inputs)])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_each_position_takes_negatives_of_its_own():
    """The loss is the softmax over the positive and what the position took of the pool."""
    model = retriever(replace(CONFIG, dropout=0.0), negatives=8, pool=24, temperature=0.5)
    batch, total, taken_by = make_batch(), 0.0, []
    drawn = model.negatives(batch)
    assert drawn.shape == (5, 24)
    state = draw_state(batch, 3)
    for number, history in enumerate(HISTORIES):
        for position in range(1, len(history)):
            place = torch.tensor([position - 1])
            rows = of_each_row(state[number : number + 1], torch.ones_like(place), place)
            kept = keep(rows, 24, 8 / 24, site=1 << 20)[0]
            taken_by.append(kept)
            seen = make_batch().select(torch.tensor([number]))
            short = {
                name: Jagged(keys.values[:position], torch.tensor([position]))
                for name, keys in seen.sparse.items()
            }
            vector = model.encode(
                {"history": table()[short["history"].values]}, Batch(1, {}, short)
            )
            right = history[position]
            others = drawn[number][kept & (drawn[number] != right)]
            scores = model.score(vector, table()[torch.cat([torch.tensor([right]), others])])[0]
            total -= float(torch.log_softmax(scores, 0)[0].detach())
    assert len({tuple(kept.tolist()) for kept in taken_by}) == len(taken_by)
    assert float(loss_of(model, batch)) == pytest.approx(total, rel=1e-9)


def test_the_time_of_the_next_item_is_what_the_last_one_gets_from_the_request():
    model = retriever(replace(CONFIG, time="next", time_buckets=44, dropout=0.0)).eval()
    batch = make_batch()
    rows = {"history": table()[batch.sparse["history"].values]}
    sooner = replace_dense(batch, time=torch.full((5,), 1 << 40))
    changed = (model.encode(rows, batch) != model.encode(rows, sooner)).any(1)
    assert changed.tolist() == [True, True, False, True, True]
    training = Batch(5, {name: batch.dense[name] for name in ("sample_id", "step")}, batch.sparse)
    assert torch.equal(loss_of(model, training), loss_of(model, batch))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dropout": 1.0}, "dropout is 1.0; give 0 or more, and less than 1"),
        ({"time": "next"}, "time is 'next' but time_buckets is 0"),
        ({"time": "next", "time_buckets": 4, "attention": "fused"}, "set attention = 'plain'"),
        ({"max_attention": -1}, "max_attention is -1"),
    ],
)
def test_impossible_options_are_refused(settings, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        EncoderOptions(**settings)


def test_a_ranker_has_no_next_item_and_a_pool_no_fewer_than_is_taken():
    with pytest.raises(ConfigError, match="'next', which is for retrieval"):
        HstuRanker(replace(CONFIG, time="next"))
    with pytest.raises(ConfigError, match="pool is 5, fewer than the 8 negatives"):
        SampledSoftmaxConfig(num_items=9, negatives=8, pool=5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"negative_pool": 5, "negatives": 8}, "negative_pool is 5, fewer than the 8 of negatives"),
        (
            {"kind": "ranker", "encoder": EncoderOptions(time="next", time_buckets=4)},
            "encoder.time 'next', which is for retrieval",
        ),
    ],
)
def test_a_config_says_so_before_any_data_is_opened(settings, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        ModelConfig(**settings)
