"""The made-up world: sample by sample the same, uneven as asked, and worth learning from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestpipe.config import build
from nestpipe.data import DENSE, DataConfig, SyntheticConfig, open_source
from nestpipe.data.order import draw
from nestpipe.data.synthetic import make, write, zipf
from nestpipe.errors import ConfigError, DataError

WORLDS = {
    "ctr": SyntheticConfig(samples=1000, num_keys=50),
    "several keys": SyntheticConfig(samples=1000, num_keys=50, keys_per_sample=(0, 4)),
    "sequence": SyntheticConfig(samples=1000, flavour="sequence"),
}


@pytest.fixture(params=WORLDS)
def world(request) -> SyntheticConfig:
    return WORLDS[request.param]


def test_a_sample_depends_on_its_number_alone(world, lists):
    together = lists(make(world)(np.arange(9_000)))
    for number in (0, 1, 8_191, 8_192, 8_999):
        assert lists(make(world)(np.array([number]))) == [together[number]]
    assert len({str(sample) for sample in together}) == 9_000


def test_another_seed_is_another_world(world, lists):
    other = make(replace(world, seed=1))(np.arange(10))
    assert lists(other) != lists(make(world)(np.arange(10)))


def test_splits_are_ranges_of_numbers_without_overlap(lists):
    world = SyntheticConfig(samples=20, test_samples=5)
    config = DataConfig(synthetic=world, shuffle=False)
    options = {"global_batch": 100, "rank": 0, "ranks": 1, "seed": 0}
    splits = ("train", "validation", "test")
    found = [lists(next(open_source(config, split).batches(**options))) for split in splits]
    assert [*found[0], *found[1], *found[2]] == lists(make(world)(np.arange(30)))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_keys_are_as_uneven_as_asked(exponent):
    size = 1000
    counts = np.bincount(zipf(draw(1, np.arange(200_000)), size, exponent), minlength=size)
    assert len(counts) == size
    edges = np.arange(1, size + 2, dtype=float)
    if exponent == 1:
        chance = np.diff(np.log(edges))
    else:
        chance = np.diff(edges ** (1 - exponent)) / (1 - exponent)
    expected = 200_000 * chance / chance.sum()
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    ranks = scores.argsort().argsort().double() + 1
    ones = labels.sum()
    return float((ranks[labels == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


@pytest.mark.parametrize(("keys", "bar"), [((1, 1), 0.7), ((1, 3), 0.63)])
def test_clicks_can_be_learnt_from_keys_and_numbers(keys, bar):
    """Counting clicks per key of one feature, with a pinch of smoothing, beats chance by far."""
    world = SyntheticConfig(samples=50_000, num_tables=4, num_keys=1000, keys_per_sample=keys)
    batch = make(world)(np.arange(60_000))
    label, is_train = batch.dense["label"], torch.arange(60_000) < 50_000
    assert 0.2 < float(label.mean()) < 0.4
    score = torch.zeros(60_000)
    for feature in ("c0", "c1", "c2", "c3"):
        jagged = batch.sparse[feature]
        rows = torch.repeat_interleave(torch.arange(60_000), jagged.lengths)
        seen, clicks = torch.zeros(1000), torch.zeros(1000)
        train = is_train[rows]
        seen.index_add_(0, jagged.values[train], torch.ones(int(train.sum())))
        clicks.index_add_(0, jagged.values[train], label[rows[train]])
        rate = (clicks + 3) / (seen + 10)
        score.index_add_(0, rows, torch.logit(rate[jagged.values]))
    assert auc(score[~is_train], label[~is_train]) > bar
    dense = batch.dense[DENSE]
    weights = torch.linalg.lstsq(dense[is_train], label[is_train, None]).solution
    assert auc((dense @ weights)[~is_train, 0], label[~is_train]) > 0.57


def test_without_signal_there_is_nothing_to_learn():
    label = make(SyntheticConfig(signal=0.0))(np.arange(20_000)).dense["label"]
    assert float(label.mean()) == pytest.approx(0.269, abs=0.01)


def test_the_next_item_is_likely_of_the_community_of_the_last_ones():
    world = SyntheticConfig(flavour="sequence", num_communities=20)
    batch = make(world, "test")(np.arange(5_000))
    last = batch.sparse["history"].values[batch.sparse["history"].offsets[1:] - 1]
    same = (last % 20 == batch.dense["target"] % 20).float().mean()
    assert float(same) > 0.55
    assert 1 <= int(batch.dense["target"].min()) <= int(batch.dense["target"].max()) <= 10_000
    lengths = batch.sparse["history"].lengths
    assert (int(lengths.min()), int(lengths.max())) == (9, 49)


def test_a_user_pauses_for_days_before_the_community_changes():
    """Times go up within a user, and say something about what comes next."""
    world = SyntheticConfig(flavour="sequence", num_communities=20, coherence=1.0, drift=0.1)
    batch = make(world)(np.arange(500))
    moved, stayed = [], []
    for items, times in zip(
        batch.sparse["history"].to_lists(), batch.sparse["timestamps"].to_lists(), strict=True
    ):
        pauses = np.diff(times)
        assert (pauses >= 0).all()
        other = np.diff(np.array(items) % 20) != 0
        moved += pauses[other].tolist()
        stayed += pauses[~other].tolist()
    assert min(moved) >= 86_400
    assert np.median(stayed) < 600


@pytest.mark.parametrize("files", [1, 3])
def test_files_hold_the_samples_that_the_generator_makes(world, files, tmp_path, lists):
    write(tmp_path / "data", world, files=files, force=False)
    options = {"global_batch": 256, "rank": 1, "ranks": 2, "seed": 5}
    path = str(tmp_path / "data")
    config = DataConfig(kind="parquet", path=path, test_path=path, shuffle=False)
    again = open_source(config)
    made = open_source(DataConfig(synthetic=world, shuffle=False))
    assert again.columns == made.columns
    assert again.num_samples in (None, made.num_samples)
    for one, other in zip(again.batches(**options), made.batches(**options), strict=True):
        assert lists(one) == lists(other)


def test_an_earlier_data_set_is_replaced_only_when_asked(tmp_path):
    world = SyntheticConfig(samples=10)
    write(tmp_path, world, files=3, force=False)
    with pytest.raises(DataError, match=r"already holds part-00000.parquet.*--force"):
        write(tmp_path, world, files=1, force=False)
    write(tmp_path, world, files=1, force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["part-00000.parquet"]
    (tmp_path / "mine.parquet").touch()
    with pytest.raises(DataError, match=r"already holds mine\.parquet"):
        write(tmp_path, world, files=1, force=True)


def test_a_write_that_is_stopped_leaves_nothing_and_loses_nothing(tmp_path):
    write(tmp_path, SyntheticConfig(samples=10), files=1, force=False)
    before = (tmp_path / "part-00000.parquet").read_bytes()

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, SyntheticConfig(samples=20), files=2, force=True, progress=stop)
    assert [file.name for file in tmp_path.iterdir()] == ["part-00000.parquet"]
    assert (tmp_path / "part-00000.parquet").read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "parket"}, "data.kind is 'parket'; did you mean 'parquet'?"),
        ({"kind": "parquet"}, "data.path is missing; say where the parquet files are"),
        ({"path": "x"}, "data.path is 'x' but kind is 'synthetic'; say what it holds"),
        ({"shuffle_windw": 3}, "unknown key data.'shuffle_windw'; did you mean shuffle_window?"),
        ({"shuffle_window": 0}, "data.shuffle_window is 0; give a number above 0"),
        ({"test_every": 2}, "data.test_every is 2; give 3 or more rows, or 0"),
        (
            {"synthetic": {"keys_per_sample": [3, 1]}},
            "data.synthetic.keys_per_sample is [3, 1]; "
            "give the fewest and the most, such as [1, 4]",
        ),
        (
            {"kuairand": {"test_days": [20220501]}},
            "data.kuairand.test_days is [20220501]; give the first and last day as yyyymmdd, "
            "such as [20220501, 20220508]",
        ),
        (
            {"parquet": {"sparse": ["a"], "dense": ["a"]}},
            "in data.parquet: column a is named twice; give it one use",
        ),
        ({"movielens": {"max_len": 1}}, "data.movielens.max_len is 1; give 2 or more items"),
    ],
)
def test_a_bad_setting_is_one_sentence(settings, sentence):
    with pytest.raises(ConfigError) as refused:
        build(DataConfig, settings, "data")
    assert str(refused.value) == sentence


def test_a_split_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="there is no split 'tset'; use train, validation, test"):
        open_source(DataConfig(), "tset")  # pyright: ignore[reportArgumentType]
