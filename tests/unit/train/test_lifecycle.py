"""Rows that come and go: the same under every plan, number of ranks and restart, as a model says.

The model (`support/lifecycle_world.py`) is a pair of dictionaries that sees global batches alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from nestpipe.comm import LocalCommunicator
from nestpipe.comm.communicator import Communicator
from nestpipe.config import Table, build
from nestpipe.embedding.lifecycle import lowest
from nestpipe.errors import CapacityError, ConfigError
from nestpipe.train.config import TrainSettings
from nestpipe.train.trainer import Trainer
from support.examples import is_long
from support.lifecycle_world import (
    BATCH,
    EVERY,
    NAMES,
    SEED,
    Held,
    Model,
    PlainLives,
    Stream,
    held_by,
    joined,
    tables,
)
from support.thread_ranks import run_ranks

STREAM = Stream(22)
POLICIES = {
    "ttl": {"ttl": 5},
    "lru": {"evict": "lru", "max_rows": 90},
    "lfu": {"evict": "lfu", "max_rows": 90, "ttl": 9},
    "norm": {"evict": "norm", "max_rows": 90},
    "count": {"admit_count": 2, "admit_candidates": 40, "ttl": 11},
    "count and lru": {"admit_count": 2, "evict": "lru", "max_rows": 20},
    "count and norm": {"admit_count": 2, "evict": "norm", "max_rows": 20},
    "count and a full table": {"admit_count": 2, "max_rows": 15},
    "probability": {"admit_probability": 0.4, "evict": "lfu", "max_rows": 40},
}
PLANS = [
    {"plan": "serial"},
    {"plan": "nested", "micro_batches": 3},
    {"plan": "dual_buffer", "retrieval": "new"},
    {"plan": "nested", "retrieval": "pooled"},
    {"plan": "frozen_window", "micro_batches": 2, "exchange": "window"},
]


def settings(**more) -> TrainSettings:
    given = {
        "batch": BATCH,
        "device": "cpu",
        "seed": SEED,
        "store_threads": 1,
        "lifecycle_every": EVERY,
        "rows": {"optimizer": "adam", "lr": 0.05},
        "pipeline": {"plan": "serial"},
    }
    return build(TrainSettings, given | more)


def trainer_of(policy, comm: Communicator, held: Held, **more) -> Trainer:
    trainer = Trainer(Model(), tables(**policy), settings(**more), comm)

    def note(step: int, keys) -> None:
        held.evicted += [(step, name, of.tolist()) for name, of in keys.items()]

    trainer.on_evicted = note
    return trainer


def trained(policy, ranks: int = 1, stream: Stream = STREAM, **more) -> Held:
    """What all ranks hold together after a run."""

    def one(comm: Communicator) -> Held:
        seen = Held()
        trainer = trainer_of(policy, comm, seen, **more)
        trainer.fit(stream)  # pyright: ignore[reportArgumentType]
        return replace(held_by(trainer), evicted=seen.evicted)

    return joined([one(LocalCommunicator())] if ranks == 1 else run_ranks(ranks, one))


def model_of(policy, stream: Stream = STREAM, squares=None) -> PlainLives:
    made = Trainer(Model(), tables(**policy), settings())
    seeds: dict[str, int] = dict(zip(NAMES, made.stores[0].layout.table_seeds, strict=True))
    made.close()
    limit = int(policy.get("max_rows", 0))
    return PlainLives(tables(**policy), seeds, limit, EVERY).run(stream, squares or {})


def assert_as_the_model(held: Held, model: PlainLives) -> None:
    for name, life in model.tables.items():
        assert held.uses[name] == life.rows
        assert held.waiting[name] == life.waiting
        assert held.rows[name].keys() == life.rows.keys()
    assert held.evicted == model.evicted


@pytest.mark.parametrize("name", [name for name in POLICIES if "norm" not in name])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_live_as_a_plain_model_says_on_any_number_of_ranks(name, ranks):
    model = model_of(POLICIES[name])
    held = trained(POLICIES[name], ranks)
    assert_as_the_model(held, model)
    assert held.evicted or "max_rows" not in POLICIES[name] or "evict" not in POLICIES[name]


@pytest.mark.parametrize("native", [True, False], ids=["native", "plain"])
@pytest.mark.parametrize("seed", range(3))
def test_other_streams_of_keys_and_both_stores_follow_the_model(seed, native):
    stream = Stream(15, seed=seed, drift=seed * 4)
    for policy in POLICIES.values():
        if policy.get("evict") != "norm":
            assert_as_the_model(
                trained(policy, stream=stream, native=native), model_of(policy, stream)
            )


@pytest.mark.parametrize("name", POLICIES)
def test_every_plan_comes_to_the_same_rows_state_metadata_and_evicted_keys(name):
    """Every policy meets nested and one of the other plans; in the long profile all of them."""
    plain = trained(POLICIES[name], 2, pipeline=PLANS[0] | {"micro_batches": 3})
    same_sums = trained(POLICIES[name], 2, pipeline=PLANS[1])
    assert same_sums == plain
    number = list(POLICIES).index(name) % 3
    for plan in PLANS[2:] if is_long() else PLANS[2 + number :][:1]:
        twin = {k: v for k, v in plan.items() if k in ("micro_batches", "exchange")}
        one = trained(POLICIES[name], 2, pipeline={"plan": "serial", "owner_sums": "off"} | twin)
        assert trained(POLICIES[name], 2, pipeline={"owner_sums": "off"} | plan) == one


def test_groups_of_ranks_hold_the_same_rows():
    policy = POLICIES["count and lru"]

    def one(comm: Communicator) -> tuple[int, Held]:
        seen = Held()
        more = {"parallel": {"groups": 2, "merge": "exact"}}
        trainer = trainer_of(policy, comm, seen, **more)
        trainer.fit(STREAM)  # pyright: ignore[reportArgumentType]
        return trainer.mesh.group, replace(held_by(trainer), evicted=seen.evicted)

    of_ranks = run_ranks(4, one)
    model = model_of(policy)
    for group in (0, 1):
        assert_as_the_model(joined([held for g, held in of_ranks if g == group]), model)


def test_the_smallest_rows_leave_first():
    policy = POLICIES["norm"]
    squares: dict[int, dict[str, dict[int, float]]] = {}
    model = model_of(policy | {"evict": "lru"})
    # Boundaries may depend on who left: read rows before each of the run's own.
    held = Held()
    trainer = trainer_of(policy, LocalCommunicator(), held)
    assert trainer.lifecycle is not None
    sweep = trainer.lifecycle.sweep

    def watched(step: int):
        squares[step] = {
            name: {key: _squares(row[:4]) for key, row in of.items()}
            for name, of in held_by(trainer).rows.items()
        }
        return sweep(step)

    trainer.lifecycle.sweep = watched  # type: ignore[method-assign]
    trainer.fit(STREAM)  # pyright: ignore[reportArgumentType]
    model = model_of(policy, squares=squares)
    assert_as_the_model(joined([replace(held_by(trainer), evicted=held.evicted)]), model)
    assert held.evicted


def _squares(weights) -> float:
    total = 0.0
    for weight in weights:
        total += weight * weight
    return total


def test_a_key_without_admission_reads_as_its_first_value_and_learns_nothing():
    held = Held()
    trainer = trainer_of({"admit_count": 2, "ttl": 1000}, LocalCommunicator(), held)
    other = Trainer(Model(), tables(), settings())
    trainer.fit(STREAM, steps=EVERY - 1)  # pyright: ignore[reportArgumentType]
    keys = torch.tensor(sorted({k for of in STREAM.keys(1)["two"] for k in of}))
    assert torch.equal(trainer.rows_of("two", keys), other.rows_of("two", keys))
    assert trainer.stores[0].num_rows() == [0, 0]
    trainer.fit(STREAM, steps=1)  # pyright: ignore[reportArgumentType]
    admitted = held_by(trainer)
    assert admitted.rows["two"]
    assert all(count >= 2 for _, count in admitted.uses["two"].values())
    assert all(count < 2 for _, count in admitted.waiting["two"].values())
    trainer.fit(STREAM, steps=1)  # pyright: ignore[reportArgumentType]
    batch = {k for of in STREAM.keys(EVERY + 1)["two"] for k in of}
    for key in admitted.rows["two"]:
        moved = held_by(trainer).rows["two"][key] != admitted.rows["two"][key]
        assert moved == (key in batch)


def test_no_more_rows_than_the_capacity_at_any_step():
    for name in ("lru", "count and lru", "count and a full table", "probability"):
        trainer = trainer_of(POLICIES[name], LocalCommunicator(), Held())
        for _ in range(STREAM.steps):
            trainer.fit(STREAM, steps=1)  # pyright: ignore[reportArgumentType]
            assert max(trainer.stores[0].num_rows()) <= POLICIES[name]["max_rows"]


def test_where_one_batch_brings_more_than_fits_the_run_ends_in_a_sentence():
    trainer = trainer_of({"evict": "lru", "max_rows": 8}, LocalCommunicator(), Held())
    with pytest.raises(CapacityError, match="may have 8"):
        trainer.fit(STREAM)  # pyright: ignore[reportArgumentType]


def test_capacity_in_bytes_is_rows_of_weights_state_and_index():
    # Adam: 4 weights, 8 numbers of state, 128 bytes of index.
    in_bytes = trained({"evict": "lru", "max_bytes": 90 * (4 * 12 + 128) + 7})
    assert in_bytes == trained(POLICIES["lru"])


@pytest.mark.parametrize("name", ["lru", "count and norm"])
def test_rows_on_an_ssd_live_as_those_in_memory(name, tmp_path):
    ssd: dict[str, Any] = {"store": "ssd", "store_path": str(tmp_path), "host_memory": "16KB"}
    assert trained(POLICIES[name], 2, **ssd) == trained(POLICIES[name], 2)


def test_a_cut_run_comes_to_the_same_rows():
    for name, policy in POLICIES.items():
        held = Held()
        trainer = trainer_of(policy, LocalCommunicator(), held)
        for steps in (1, 2, 5, 3, None):
            trainer.fit(STREAM, steps=steps)  # pyright: ignore[reportArgumentType]
        cut = joined([replace(held_by(trainer), evicted=held.evicted)])
        assert cut == trained(policy), name


def test_the_lowest_of_all_ranks_are_those_of_one_sorted_list():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(0, 6, (60,), generator=generator).numpy().astype("uint64")
    ties = (torch.randperm(60, generator=generator) << 40).numpy().astype("uint64")
    free = torch.rand(60, generator=generator).numpy() < 0.8
    for count, ranks in itertools.product((1, 7, 30, 59), (1, 3)):
        order = sorted(range(60), key=lambda i: (scores[i], ties[i]))
        wanted = set([i for i in order if free[i]][:count])

        def one(comm: Communicator, count: int = count) -> set[int]:
            mine = slice(comm.rank, None, comm.size)
            found = lowest(scores[mine], ties[mine], free[mine], count, comm)
            return {comm.rank + comm.size * int(i) for i in found.nonzero()[0]}

        of_ranks = [one(LocalCommunicator())] if ranks == 1 else run_ranks(ranks, one)
        assert set().union(*of_ranks) == wanted


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"evict": "lru"}, "no capacity"),
        ({"ttl": -1}, "ttl is -1"),
        ({"admit_count": 0}, "admit_count is 0"),
        ({"admit_probability": 1.5}, "admit_probability is 1.5"),
        ({"evict": "fifo", "max_rows": 5}, "evict of table 't' is 'fifo'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Table(name="t", dim=4, **wrong)


def test_a_row_larger_than_the_capacity_in_bytes_is_refused():
    with pytest.raises(ConfigError, match="less than one row of 176 bytes"):
        trainer_of({"evict": "lru", "max_bytes": 100}, LocalCommunicator(), Held())


def test_groups_that_average_are_refused():
    def one(comm: Communicator) -> None:
        more = {"parallel": {"groups": 2, "merge": "averaged"}}
        with pytest.raises(ConfigError, match="merge = 'exact'"):
            trainer_of(POLICIES["ttl"], comm, Held(), **more)

    run_ranks(2, one)
