"""Even work: no sample lost, parts nearly alike, and the same global batches on any ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.data import DataConfig, SyntheticConfig, open_source
from nestpipe.data.clustering import deal_evenly, even_parts, partition
from nestpipe.data.source import HISTORY, SAMPLE_ID
from nestpipe.jagged import Jagged


def work_of(batch: Batch) -> Tensor:
    lengths_B = batch.sparse[HISTORY].lengths.double()
    return lengths_B * (lengths_B + 1)


def zipf_lengths(size: int) -> Tensor:
    """Most histories are short, a few are as long as there can be."""
    drawn = np.random.default_rng(0).zipf(1.3, size)
    return torch.from_numpy(np.minimum(16 * drawn, 4096))


def unevenness(work_B: Tensor, parts: list[Tensor]) -> float:
    """The largest part over the mean."""
    sums = torch.stack([work_B[part].sum() for part in parts])
    return float(sums.max() / sums.mean())


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 6))
def test_every_sample_is_in_one_part_and_no_part_can_give_one_away(work, parts: int):
    found = even_parts(torch.tensor(work, dtype=torch.float64), [1.0] * parts)
    assert sorted(sample for part in found for sample in part.tolist()) == list(range(len(work)))
    assert all(part.tolist() == sorted(part.tolist()) for part in found)
    sums = [sum(work[sample] for sample in part.tolist()) for part in found]
    for part, total in zip(found, sums, strict=True):
        smallest = min((work[sample] for sample in part.tolist()), default=0)
        assert total - smallest <= min(sums)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_zipf_lengths_are_even_by_work_where_they_are_not_by_samples(parts: int):
    lengths_B = zipf_lengths(512).double()
    work_B = lengths_B * (lengths_B + 1024)
    by_samples = [part.long() for part in torch.arange(512).chunk(parts)]
    assert unevenness(work_B, by_samples) > 1.05
    assert unevenness(work_B, even_parts(work_B, [1.0] * parts)) < 1.005


def test_a_part_of_half_the_share_has_half_the_work():
    work_B = zipf_lengths(512).double()
    parts = even_parts(work_B, [0.5, 1.0, 1.0])
    sums = [float(work_B[part].sum()) for part in parts]
    assert sums[0] / sums[1] == pytest.approx(0.5, rel=0.02)


def test_clustering_keeps_within_its_slack_of_work():
    lengths_B = zipf_lengths(256).clamp(max=200)
    keys = {"history": Jagged(torch.arange(int(lengths_B.sum())) % 997, lengths_B)}
    work_B = lengths_B.double() ** 2
    by_tokens = partition(keys, [64] * 4)
    by_work = partition(keys, [64] * 4, work_B=work_B)
    assert unevenness(work_B, by_work) <= 1.1 + 1e-6
    assert unevenness(work_B, by_work) < unevenness(work_B, by_tokens)
    assert sorted(torch.cat(by_work).tolist()) == list(range(256))


def test_made_up_histories_of_uneven_lengths_are_dealt_evenly():
    """Most are short, some as long as may be; four ranks of 16 samples each."""
    world = SyntheticConfig(
        flavour="sequence", samples=256, min_len=8, max_len=256, length_exponent=1.05
    )
    source = open_source(DataConfig(synthetic=world))
    batch = next(source.batches(global_batch=64, rank=0, ranks=1, seed=0))
    lengths_B = batch.sparse[HISTORY].lengths
    assert int(lengths_B.median()) < 32
    assert int(lengths_B.max()) > 150
    assert int(lengths_B.min()) >= 8
    by_samples = [part.long() for part in torch.arange(64).chunk(4)]
    assert unevenness(work_of(batch), by_samples) > 1.3
    assert unevenness(work_of(batch), even_parts(work_of(batch), [1.0] * 4)) < 1.01


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_share_the_same_global_batches(ranks: int):
    world = SyntheticConfig(flavour="sequence", samples=70, min_len=2, max_len=40)
    source = open_source(DataConfig(synthetic=world))
    asked = {"global_batch": 32, "seed": 4, "epoch": 1, "start": 1}
    whole = list(source.batches(rank=0, ranks=1, **asked))
    dealt = [list(deal_evenly(source, work_of, rank=r, ranks=ranks, **asked)) for r in range(ranks)]
    for number, batch in enumerate(whole):
        parts = [of_rank[number] for of_rank in dealt]
        ids = torch.cat([part.dense[SAMPLE_ID] for part in parts])
        assert sorted(ids.tolist()) == sorted(batch.dense[SAMPLE_ID].tolist())
        sums = [float(work_of(part).sum()) for part in parts]
        largest = float(work_of(batch).max())
        assert max(sums) - min(sums) <= largest
    assert all(len(of_rank) == len(whole) for of_rank in dealt)
