"""Micro-batches are a partition of the batch with the sizes asked for, and share few keys."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nestpipe.batch import Batch
from nestpipe.data.clustering import Balance, count_keys_sent, join_keys, micro_batches, partition
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.kernels.clustering import WINDOW, ClusterTask, cluster, seat_by_tokens
from support.examples import examples

WAYS = ["contiguous", "random", "clustered"]

keys_of_samples = st.lists(st.lists(st.integers(-3, 12), max_size=8), max_size=24)


@st.composite
def cases(draw):
    """Keys of a few samples, and sizes of micro-batches that fit them; some have none."""
    lists = draw(keys_of_samples)
    cuts = draw(st.lists(st.integers(0, len(lists)), max_size=40))
    ends = [0, *sorted(cuts), len(lists)]
    return lists, [b - a for a, b in pairwise(ends)]


def task_of(lists, sizes, balance=None) -> ClusterTask:
    offsets_B1, keys_T = join_keys({"items": Jagged.from_lists(lists)})
    sizes_P = np.array(sizes, np.int64)
    least_P, most_P = (balance or Balance()).bounds(len(keys_T), sizes_P)
    return ClusterTask(
        offsets_B1=offsets_B1,
        keys_T=keys_T,
        tokens_B=np.diff(offsets_B1),
        sizes_P=sizes_P,
        least_P=least_P,
        most_P=most_P,
    )


def planted(groups: int, each: int, seed: int = 0):
    """Samples of groups that share no key, shuffled; lengths from 10 to 20."""
    random = np.random.default_rng(seed)
    group_of = random.permutation(np.repeat(np.arange(groups), each))
    return [
        (group * 1000 + random.integers(0, 40, random.integers(10, 21))).tolist()
        for group in group_of
    ]


@given(cases(), st.booleans())
@example(([], [0]), False)
@example(([[1]], [0, 1, 0]), False)
@example(([[], [], []], [2, 1]), True)
def test_native_code_and_its_twin_agree(case, both_sides):
    lists, sizes = case
    task = task_of(lists, sizes, Balance(both_sides=both_sides))
    assert cluster(task, native=True).tolist() == cluster(task, native=False).tolist()


@pytest.mark.parametrize("parts", [2, 8, 9, 17, 33, 70])
def test_the_twin_agrees_on_every_width_of_counts(parts):
    random = np.random.default_rng(parts)
    lists = [random.integers(0, 400, random.integers(10, 60)).tolist() for _ in range(140)]
    sizes = [len(lists) // parts + (p < len(lists) % parts) for p in range(parts)]
    task = task_of(lists, sizes)
    native = cluster(task, native=True)
    assert native.tolist() == cluster(task, native=False).tolist()
    assert np.bincount(native, minlength=parts).tolist() == sizes


def test_the_twin_agrees_where_partners_are_looked_for_in_a_window():
    random = np.random.default_rng(3)
    lists = [random.integers(0, 3000, 8).tolist() for _ in range(WINDOW + 80)]
    task = task_of(lists, [len(lists) // 2] * 2)
    native = cluster(task, native=True)
    assert native.tolist() == cluster(task, native=False).tolist()
    moved = native[seat_by_tokens(task)] != np.repeat([0, 1], len(lists) // 2)
    assert moved.sum() > WINDOW // 4


def test_counts_are_wide_enough_for_very_long_samples():
    long = list(range(70_000))
    lists = [long, [1, 2], long[::-1], [1, 2]]
    native = cluster(task_of(lists, [2, 2], Balance(slack=10.0)), native=True).tolist()
    assert native[0] == native[2] != native[1] == native[3]


@given(cases(), st.sampled_from(WAYS))
def test_every_sample_is_in_one_micro_batch_of_the_size_asked_for(case, how):
    lists, sizes = case
    parts = partition({"items": Jagged.from_lists(lists)}, sizes, how)
    assert [len(part) for part in parts] == sizes
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lists)))
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


@given(cases(), st.sampled_from(WAYS))
def test_micro_batches_hold_the_samples_in_their_order(case, how):
    lists, sizes = case
    keys = Jagged.from_lists(lists)
    batch = Batch(len(lists), {"id": torch.arange(len(lists))}, {"items": keys})
    micros = micro_batches(batch, batch.sparse, sizes, how)
    parts = partition(batch.sparse, sizes, how)
    assert [micro.dense["id"].tolist() for micro in micros] == [part.tolist() for part in parts]
    for micro in micros:
        assert micro.sparse["items"].to_lists() == [lists[i] for i in micro.dense["id"]]


@given(cases(), st.booleans())
def test_tokens_stay_within_bounds_or_where_they_started(case, both_sides):
    lists, sizes = case
    task = task_of(lists, sizes, Balance(both_sides=both_sides))
    part_at = np.repeat(np.arange(len(sizes)), sizes)
    start = np.bincount(part_at, task.tokens_B[seat_by_tokens(task)], minlength=len(sizes))
    end = np.bincount(cluster(task), task.tokens_B, minlength=len(sizes))
    assert (end <= np.maximum(task.most_P, start)).all()
    assert (end >= np.minimum(task.least_P, start)).all()


@pytest.mark.parametrize("sizes", [[32] * 8, [8] * 32, [16, 40, 40, 48, 48, 40, 16, 8]])
def test_tokens_of_uneven_samples_are_within_a_tenth(sizes):
    random = np.random.default_rng(1)
    lists = [random.integers(0, 500, random.integers(5, 100)).tolist() for _ in range(256)]
    keys = {"items": Jagged.from_lists(lists)}
    share = sum(map(len, lists)) / len(lists)
    parts = partition(keys, sizes, balance=Balance(both_sides=True))
    for part, size in zip(parts, sizes, strict=True):
        assert sum(len(lists[i]) for i in part) == pytest.approx(share * size, rel=0.1)


def test_the_lightest_micro_batches_are_at_the_ends():
    random = np.random.default_rng(2)
    lists = [random.integers(0, 500, random.integers(5, 100)).tolist() for _ in range(64)]
    parts = partition({"items": Jagged.from_lists(lists)}, [8] * 8)
    first, *inner, last = [sum(len(lists[i]) for i in part) for part in parts]
    assert first <= last <= min(inner)


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_planted_groups_are_found(parts):
    lists = planted(groups=16, each=16)
    keys = {"items": Jagged.from_lists(lists)}
    sizes = [len(lists) // parts] * parts
    random = count_keys_sent(keys, partition(keys, sizes, "random")).ratio
    clustered = count_keys_sent(keys, partition(keys, sizes, "clustered")).ratio
    assert clustered - 1 <= 0.4 * (random - 1)


def test_clustering_sends_less_than_its_start():
    lists = planted(groups=5, each=13, seed=4)
    task = task_of(lists, [13] * 5)
    keys = {"items": Jagged.from_lists(lists)}
    order, found = seat_by_tokens(task), cluster(task)
    start = [torch.from_numpy(order[p * 13 : p * 13 + 13]) for p in range(5)]
    end = [torch.from_numpy(np.flatnonzero(found == p)) for p in range(5)]
    assert count_keys_sent(keys, end).total < count_keys_sent(keys, start).total


@pytest.mark.parametrize("how", WAYS)
def test_the_same_batch_is_always_cut_alike(how):
    keys = {"items": Jagged.from_lists(planted(groups=4, each=8))}
    first, second = (torch.cat(partition(keys, [8] * 4, how)).tolist() for _ in range(2))
    assert first == second


def test_random_cuts_follow_the_seed():
    keys = {"items": Jagged.from_lists(planted(groups=4, each=8))}
    cuts = {tuple(torch.cat(partition(keys, [8] * 4, "random", seed=s)).tolist()) for s in range(5)}
    assert len(cuts) == 5


def test_without_keys_samples_keep_their_order():
    batch = Batch(5, {"id": torch.arange(5)})
    micros = micro_batches(batch, {}, [3, 2])
    assert [micro.dense["id"].tolist() for micro in micros] == [[0, 1, 2], [3, 4]]


def test_keys_are_counted_by_table():
    keys = {
        "history": Jagged.from_lists([[1, 2], [2, 2], []]),
        "negatives": Jagged.from_lists([[2], [3], [1]]),
        "user": Jagged.from_lists([[1], [2], [1]]),
    }
    parts = [torch.tensor([0]), torch.tensor([1, 2])]
    table_of = {"history": "items", "negatives": "items", "user": "users"}
    sent = count_keys_sent(keys, parts, table_of)
    assert (sent.per_micro, sent.whole) == ((3, 5), 5)
    assert sent.ratio == 8 / 5
    assert count_keys_sent(keys, parts).whole == 2 + 3 + 2


def test_the_same_key_of_two_tables_is_two_keys():
    keys = {"a": Jagged.from_lists([[7], [7, 7]]), "b": Jagged.from_lists([[7], []])}
    offsets_B1, keys_T = join_keys(keys)
    assert offsets_B1.tolist() == [0, 2, 4]
    assert keys_T[0] == keys_T[2] == keys_T[3] != keys_T[1]
    _, together_T = join_keys(keys, {"a": "t", "b": "t"})
    assert set(together_T.tolist()) == {7}


def test_an_unknown_way_is_one_sentence():
    with pytest.raises(ConfigError, match="cannot be cut 'sorted'; use contiguous, random, clus"):
        partition({"a": Jagged.from_lists([[1]])}, [1], "sorted")  # type: ignore[arg-type]


@examples("few")
@given(cases())
def test_the_environment_chooses_the_twin(case):
    lists, sizes = case
    keys = {"items": Jagged.from_lists(lists)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NESTPIPE_NATIVE", "0")
        plain = partition(keys, sizes)
    assert [p.tolist() for p in plain] == [p.tolist() for p in partition(keys, sizes)]
