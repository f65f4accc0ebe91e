"""Sequences as rankings: what comes next against what was drawn."""

from __future__ import annotations

import pytest

from nestpipe.batch import Batch
from nestpipe.data import (
    Catalogue,
    DataConfig,
    Ranking,
    RankingOptions,
    SyntheticConfig,
    concat,
    open_source,
)
from nestpipe.data.config import Split
from nestpipe.errors import ConfigError

ITEMS = 60
WORLD = SyntheticConfig(
    flavour="sequence", samples=40, test_samples=30, num_items=ITEMS, num_communities=6,
    min_len=2, max_len=15,
)  # fmt: skip


def rankings(split: Split = "train", **options) -> Ranking:
    sequences = open_source(DataConfig(synthetic=WORLD), split)
    return Ranking(sequences, RankingOptions(catalogue=Catalogue(ITEMS), negatives=5, **options))


def read(source, ranks: int = 1, epoch: int = 0, size: int = 16) -> list[Batch]:
    """Whole global batches, put together from the parts of all ranks."""
    parts = [
        source.batches(global_batch=size, rank=rank, ranks=ranks, seed=3, epoch=epoch)
        for rank in range(ranks)
    ]
    return [concat(list(batch)) for batch in zip(*parts, strict=True)]


def lists(batches: list[Batch], name: str) -> list[list[int]]:
    return [one for batch in batches for one in batch.sparse[name].to_lists()]


def test_history_and_liked_candidates_are_a_piece_of_the_sequence():
    source = rankings(positives=3)
    found, sequences = read(source), lists(read(source.sequences), "history")
    assert found[0].sparse.keys() == {"history", "candidates", "labels", "timestamps"}
    lengths = set()
    for history, candidates, labels, whole in zip(
        *(lists(found, name) for name in ("history", "candidates", "labels")),
        sequences,
        strict=True,
    ):
        cut, liked = len(history), sum(labels)
        lengths.add(liked)
        assert liked == min(3, len(whole) - cut)
        assert labels == [1] * liked + [0] * (len(candidates) - liked)
        assert history + candidates[:liked] == whole[: cut + liked]
        drawn = candidates[liked:]
        assert 0 < len(drawn) <= 5 * liked
        assert not set(drawn) & set(whole)
        assert all(1 <= item <= ITEMS for item in drawn)
    assert lengths == {1, 2, 3}


def test_times_are_cut_where_histories_are_and_the_request_comes_after_them():
    for split in ("train", "test"):
        source = rankings(split)
        found, whole = read(source), read(source.sequences)
        asked = [time for batch in found for time in batch.dense["time"].tolist()]
        later = [time for batch in whole for time in batch.dense.get("time", []) if split == "test"]
        sequences = lists(whole, "timestamps")
        for i, (history, times) in enumerate(
            zip(lists(found, "history"), lists(found, "timestamps"), strict=True)
        ):
            known = [*sequences[i], *later[i : i + 1]]
            assert len(times) == len(history)
            assert [*times, asked[i]] == known[: len(times) + 1]


def test_a_held_out_item_is_the_one_to_be_liked():
    source = rankings("test")
    for batch, sequences in zip(read(source), read(source.sequences), strict=True):
        assert batch.sparse["history"].to_lists() == sequences.sparse["history"].to_lists()
        candidates = batch.sparse["candidates"].to_lists()
        assert [one[0] for one in candidates] == sequences.dense["target"].tolist()
        assert {sum(one) for one in batch.sparse["labels"].to_lists()} == {1}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_share_the_same_rankings(ranks: int):
    one, many = read(rankings()), read(rankings(), ranks)
    for name in ("history", "candidates", "labels"):
        assert lists(one, name) == lists(many, name)


def test_another_pass_cuts_and_draws_anew():
    def by_id(epoch: int) -> dict[int, tuple[list[int], list[int]]]:
        found = read(rankings(), epoch=epoch)
        ids = [number for batch in found for number in batch.dense["sample_id"].tolist()]
        pairs = zip(lists(found, "history"), lists(found, "candidates"), strict=True)
        return dict(zip(ids, pairs, strict=True))

    first, second = by_id(0), by_id(1)
    assert first.keys() == second.keys()
    assert sum(first[number] != second[number] for number in first) > 0.9 * len(first)
    assert first == by_id(0)


def test_an_empty_batch_has_the_same_columns():
    source = rankings()
    assert source.empty().sparse.keys() == read(source)[0].sparse.keys()
    assert source.empty().dense.keys() == read(source)[0].dense.keys()


def test_nothing_to_draw_from_is_refused():
    with pytest.raises(ConfigError, match="num_items is 0"):
        Catalogue(0)
