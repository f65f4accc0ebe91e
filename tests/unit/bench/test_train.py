"""`nestpipe bench train`: what is reported of both systems, and that the peer's dedup is exact."""

from importlib.util import find_spec

import pytest
import torch

from nestpipe.bench.train import (
    CASES,
    TrainCase,
    jagged_keys,
    look_up_all,
    look_up_distinct,
    train_result,
)
from nestpipe.cli.bench import train_table


def test_speeds_are_of_the_median_round_beside_their_range():
    times = {"nestpipe": [1.0, 4.0, 2.0], "torchrec": [4.0, 5.0, 4.0], "torchrec_dedup": [3.0]}
    found = train_result(times, samples=60)
    assert found["nestpipe_samples_per_s"] == 30
    assert found["nestpipe_samples_per_s_range"] == [15, 60]
    assert found["ratio"] == pytest.approx(2.0)
    assert found["ratio_dedup"] == pytest.approx(1.5)


def test_without_a_peer_there_are_no_ratios():
    found = train_result({"nestpipe": [1.0]}, samples=60)
    assert found["torchrec_samples_per_s"] is found["ratio"] is found["ratio_dedup"] is None
    assert train_table([{"config": "dlrm1", **found}]).row_count == 1


@pytest.mark.skipif(not find_spec("torchrec"), reason="TorchRec is not installed: make bench-deps")
def test_the_peer_looks_the_same_rows_up_once():
    """Dedup must not change rows or their gradients, or the peer does other work."""
    from torchrec import EmbeddingCollection, EmbeddingConfig  # pyright: ignore[reportMissingImports]

    case = TrainCase("sequence", ("item",), 50, keys=4, batch=8, pooled=False, dim=8)
    keys = jagged_keys(case, case.make_batch(torch.Generator().manual_seed(1)))
    assert len(torch.unique(keys.values())) < len(keys.values())
    table = EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=50, feature_names=["item"])
    embeddings = EmbeddingCollection(tables=[table])
    (weight,) = embeddings.parameters()
    found = []
    for look_up in (look_up_all, look_up_distinct):
        weight.grad = None
        rows = look_up(case, embeddings, keys)
        (rows * torch.arange(rows.numel()).view_as(rows)).sum().backward()
        found.append((rows.detach(), weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


def test_only_a_sequence_is_looked_up_without_pooling():
    assert [name for name, case in CASES.items() if not case.pooled] == ["sequence"]
