"""The comparison itself: one flipped bit, anywhere, is found and named."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestpipe.config import build
from nestpipe.embedding.store.host import PlainStore
from nestpipe.embedding.store.protocol import StoreLayout
from nestpipe.train.config import PipelineSettings
from nestpipe.train.verify import (
    Findings,
    Trained,
    bits,
    both_values,
    combine,
    compare,
    side_by_side,
    train_to_compare,
    verify,
)
from support.thread_ranks import run_ranks

SERIAL = build(PipelineSettings, {"plan": "serial"})
NAMES = ("serial", "nested")


@pytest.fixture(scope="module")
def world(make_world):
    return make_world(optimizer="adagrad")


@pytest.fixture
def twins(world):
    """The same run twice; a test may spoil the second."""

    def train(name: str) -> Trained:
        trainer = world.trainer(SERIAL)
        return train_to_compare(trainer, world.source, name, 3, 1, lambda report: None)

    made = [train(name) for name in NAMES]
    yield made
    for trained in made:
        trained.trainer.close()


def flip(tensor: Tensor, place: tuple[int, ...]) -> None:
    """Change the lowest bit of one number."""
    bits(tensor)[place] ^= 1


def spoil_row(trained: Trained, store: int, table: int, column: int) -> int:
    """Change the lowest bit of one number of one stored row; returns its key."""
    rows = trained.trainer.stores[store]
    number, keys, values = next(piece for piece in rows.export() if piece[0] == table)
    counts = [0] * rows.layout.num_tables
    counts[number] = 1
    row = values[2:3].clone()
    flip(row, (0, column))
    rows.scatter(keys[2:3].clone(), counts, row)
    return int(keys[2])


def test_two_equal_runs_are_equal(twins, world):
    found = compare(*twins)
    assert found.rows_compared > 50
    assert found.tensors_compared == 4 + 1 + 4 * 3 + 5, "weights, buffer, Adam's states, the run's"
    assert found == Findings(
        rows_compared=found.rows_compared, tensors_compared=found.tensors_compared
    )


@pytest.mark.parametrize(
    ("store", "table", "column", "named"),
    [
        (0, 0, 3, "table 'items', key {key}, weight 3: serial has "),
        (0, 1, 4, "table 'tags', key {key}, state 0: serial has "),
        (1, 0, 3, "table 'users', key {key}, state 1: serial has "),
    ],
)
def test_one_bit_of_one_row_or_of_its_state_is_named(twins, store, table, column, named):
    key = spoil_row(twins[1], store, table, column)
    found = compare(*twins)
    assert found.rows_different == 1
    assert found.tensors_different == 0
    assert 0 < found.largest_difference < 1e-6
    assert found.first_row is not None
    assert found.first_row.startswith(named.format(key=key))
    first, second = found.first_row.split(" has ")[1:]
    assert first.removesuffix(", nested") != second, "the two numbers look different"


def spoil_weight(trained: Trained) -> None:
    flip(trained.trainer.model.get_parameter("top.0.weight"), (5, 1))


def spoil_buffer(trained: Trained) -> None:
    trained.trainer.model.get_buffer("seen").add_(1)


def spoil_state(trained: Trained) -> None:
    bias = trained.trainer.model.get_parameter("top.2.bias")
    flip(trained.trainer.dense_optimizer.state[bias]["exp_avg_sq"], (0,))


def lose_state(trained: Trained) -> None:
    bias = trained.trainer.model.get_parameter("top.2.bias")
    del trained.trainer.dense_optimizer.state[bias]["exp_avg"]


def spoil_counter(trained: Trained) -> None:
    trained.trainer.progress = replace(trained.trainer.progress, epoch=7)


def spoil_samples(trained: Trained) -> None:
    trained.samples[2] -= 1


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_weight, "dense weight top.0.weight[5, 1]: serial has "),
        (spoil_buffer, "dense buffer seen: serial has 48, nested has 49"),
        (spoil_state, "dense optimizer's exp_avg_sq of top.2.bias[0]: serial has "),
        (lose_state, "dense optimizer's exp_avg of top.2.bias: serial has this tensor, nested"),
        (spoil_counter, "counter epoch: serial has 0, nested has 7"),
        (spoil_samples, "samples of each step[2]: serial has 16, nested has 15"),
    ],
)
def test_one_bit_of_anything_else_is_named(twins, spoil: Callable[[Trained], None], named: str):
    with torch.no_grad():
        spoil(twins[1])
    found = compare(*twins)
    assert found.rows_different == 0
    assert found.tensors_different == 1
    assert found.first_tensor is not None
    assert found.first_tensor.startswith(named)


def test_a_loss_that_differs_is_named_with_its_step(twins):
    twins[1].losses[1] = math.nextafter(twins[1].losses[1], 1)
    found = compare(*twins)
    assert found.first_step == 2
    assert found.first_tensor is not None
    assert found.first_tensor.startswith("loss of each step[1]: serial has ")


def test_a_step_that_only_one_run_took_differs(twins):
    twins[1].losses.pop()
    found = compare(*twins)
    assert found.first_step == 3
    assert found.first_tensor == (
        "loss of each step: serial has (3,) of torch.float64, nested has (2,) of torch.float64"
    )


@pytest.mark.parametrize(("spoiled", "has", "lacks"), [(1, *NAMES[::-1]), (0, *NAMES)])
def test_a_row_that_only_one_run_has_is_named(twins, spoiled, has, lacks):
    store = twins[spoiled].trainer.stores[1]
    store.scatter(torch.tensor([-77]), [1], torch.zeros(1, store.layout.width))
    found = compare(*twins)
    assert found.rows_different == 1
    assert found.first_row == f"table 'users', key -77: {has} has this row, {lacks} has not"


def test_bits_count_not_values():
    assert not torch.equal(bits(torch.tensor(0.0)), bits(torch.tensor(-0.0)))
    assert torch.equal(bits(torch.tensor([math.nan])), bits(torch.tensor([math.nan])))
    zeros = both_values(NAMES, torch.tensor(0.0), torch.tensor(-0.0))
    assert zeros == "serial has 0, nested has -0"
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert both_values(NAMES, nans[0], nans[1]) == (
        "serial has nan (0x7fc00000), nested has nan (0x7fc00001)"
    )


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_number_against_none_has_no_size(wrong):
    found = Findings(rows_different=1, first_row="table 'a', key 1, weight 0: ...")
    found.note_size(torch.tensor([1.0, wrong]), torch.tensor([1.5, 0.0]))
    verdict = combine([found], plan="nested", steps=1, micro_batches=1)
    assert verdict.largest_difference is None
    assert json.loads(json.dumps(verdict.figures(), allow_nan=False))["identical"] is False


@pytest.mark.parametrize("seed", range(20))
def test_rows_meet_their_twins_whatever_keys_either_side_has(seed):
    """Against the plain way: all rows of both stores in dictionaries."""
    rng = torch.Generator().manual_seed(seed)
    layout = StoreLayout(table_seeds=(1, 2, 3), init_stds=(1.0,) * 3, dim=1, state_dim=1)
    stores = [PlainStore(layout) for _ in range(2)]
    expected: list[set[tuple[int, int]]] = []
    for store in stores:
        keys = [torch.randperm(12, generator=rng)[: seed % 11] - 6 for _ in range(3)]
        if seed % 4 == 0:
            keys[1] = keys[1][:0]
        counts = [len(of) for of in keys]
        store.scatter(torch.cat(keys), counts, torch.randn(sum(counts), 2, generator=rng))
        expected.append({(t, k) for t, of in enumerate(keys) for k in of.tolist()})
    seen: list[list[tuple[int, int]]] = [[], []]
    for pieces in side_by_side(stores[0], stores[1], chunk=3):
        ranges = []
        for side, (table, keys_K, rows_KW) in enumerate(pieces):
            assert len(keys_K) == len(rows_KW)
            seen[side] += [(table, key) for key in keys_K.tolist()]
            ranges.append({(table, key) for key in keys_K.tolist()})
        low, high = min(ranges[0] | ranges[1]), max(ranges[0] | ranges[1])
        for side, keys in enumerate(ranges):
            assert keys == {place for place in expected[side] if low <= place <= high}
    assert [sorted(expected[side]) for side in range(2)] == seen


def test_the_rank_that_differs_is_named(world):
    """Only rank 1 goes astray, after its second run."""

    def one(comm):
        made = []

        def start(settings):
            made.append(world.trainer(settings, comm))
            return made[-1], world.source

        def watch(name, total):
            return Spoiling(made[-1] if name == "nested" and comm.rank == 1 else None)

        return verify(start, build(PipelineSettings, {"plan": "nested"}), watch=watch)

    first, second = run_ranks(2, one)
    assert first == second
    assert first.tensors_different == 1
    assert first.rows_different == 0
    assert first.first_difference is not None
    assert first.first_difference.startswith("on rank 1, dense weight top.2.bias[0]: serial has ")


class Spoiling:
    """Changes a dense weight of a trainer when its run is over."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def __enter__(self):
        return lambda report: None

    def __exit__(self, *failure) -> None:
        if self.trainer is not None:
            flip(self.trainer.model.get_parameter("top.2.bias"), (0,))
