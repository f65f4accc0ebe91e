"""Two-dimensional parallelism: groups of ranks that each have all tables.

Bit for bit, no plan changes what `serial` does in the same groups. Exact groups come to what one
dimension does, but for rounding; averaged ones to what a plain twin does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nestpipe.batch import Batch
from nestpipe.comm.communicator import Mesh, make_mesh
from nestpipe.config import build
from nestpipe.embedding.optimizers import OPTIMIZERS
from nestpipe.errors import ConfigError
from nestpipe.schedule import Retrieval
from nestpipe.train.config import PipelineSettings
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import BOUND, Agreement, Trained, agreement, compare, verify
from support.examples import every
from support.thread_ranks import run_ranks

SERIAL = PipelineSettings()
MESHES = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)]
"""(ranks, groups)"""
KEYS = ("some shared", "none shared", "all shared", "growing", "empty on some ranks")
PLANS = ("nested", "dual_buffer", "frozen_window")


def case_number(n: int) -> dict[str, object]:
    """Axes go round at their own pace."""
    ranks, groups = MESHES[n % len(MESHES)]
    every = (1, 1, 2, 3, 4)[n // 2 % 5]
    merge = "exact" if n % 2 else "averaged"
    return {
        "ranks": ranks,
        "parallel": {
            "groups": groups,
            "merge": merge,
            "merge_every": 1 if merge == "exact" else every,
            "layout": ("replicas", "shards")[n // 3 % 2],
        },
        "keys": (*KEYS, "each rank its own")[n // 2 % 6],
        "optimizer": OPTIMIZERS[n // 3 % len(OPTIMIZERS)],
        "dtype": ("float32", "bfloat16", "float16")[n // 5 % 3],
        "in_place": (True, False)[n // 4 % 2],
        "recipe": ("plain", "frozen", "scheduled", "by name", "decaying")[n // 2 % 5]
        if n % 4 != 3
        else "clipped",
        "pipeline": {
            "plan": PLANS[n % 3],
            "micro_batches": (1, 2, 3)[n // 3 % 3],
            "retrieval": ("whole", "new")[n // 2 % 2],
            "exchange": ("micro", "window")[n // 7 % 2],
            "comm_dtype": ("float32", "bfloat16")[n // 4 % 2],
            "buffers": 3 if n // 2 % 2 and n % 4 == 3 else 2,
        },
    }


def name_of(case: dict[str, object]) -> str:
    flat = [
        v
        for value in case.values()
        for v in (value.values() if isinstance(value, dict) else [value])
    ]
    return "-".join(map(str, flat))


@pytest.mark.parametrize("case", every(3, [case_number(n) for n in range(36)]), ids=name_of)
def test_in_groups_too_a_plan_changes_no_bit(make_world, case):
    pipeline = build(PipelineSettings, case["pipeline"])
    axes = ("parallel", "keys", "optimizer", "dtype", "in_place", "recipe")
    world = make_world(**{name: case[name] for name in axes})

    def one(comm):
        return verify(lambda settings: (world.trainer(settings, comm), world.source), pipeline)

    first, *others = run_ranks(case["ranks"], one)
    assert all(other == first for other in others)
    assert first.first_difference is None
    assert first.identical
    assert first.steps == 5
    assert first.rows_compared > 0


def pooled_case(n: int) -> dict[str, object]:
    case = case_number(n)
    pipeline = case["pipeline"]
    assert isinstance(pipeline, dict)
    pooled = {**pipeline, "retrieval": "pooled", "buffers": 2}
    return {**case, "keys": "coming back", "pipeline": pooled}


@pytest.mark.parametrize("case", every(2, [pooled_case(n) for n in range(20)]), ids=name_of)
def test_in_groups_too_a_pool_changes_no_bit(make_world, case, hasty_pool):
    test_in_groups_too_a_plan_changes_no_bit(make_world, case)
    assert sum(hasty_pool) > 0


def compared(
    make_world, ranks: int, parallel: dict[str, object], steps: int | None = None, **more: object
) -> Agreement:
    """A job in groups, nested, and the same in one dimension, serial."""
    plain, grouped = make_world(**more), make_world(parallel=parallel, **more)
    nested = PipelineSettings(plan="nested", micro_batches=2, retrieval=Retrieval.NEW)

    def one(comm) -> Agreement:
        trainers = [
            plain.trainer(replace(nested, plan="serial"), comm),
            grouped.trainer(nested, comm),
        ]
        for trainer in trainers:
            trainer.fit(plain.source, steps=steps)
        return agreement(*trainers)

    first, *others = run_ranks(ranks, one)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("ranks", "groups", "keys"),
    every(
        2,
        [
            (*mesh, keys)
            for mesh in MESHES
            for keys in (*KEYS, "each rank its own")
            if mesh not in ((2, 2), (4, 4)) or keys in ("some shared", "each rank its own")
        ],
    ),
)
def test_exact_groups_are_one_dimension_but_for_rounding(make_world, ranks, groups, keys):
    found = compared(make_world, ranks, {"groups": groups}, keys=keys)
    assert found.replicas_identical
    assert found.rows_missing == 0
    assert found.largest_difference <= BOUND
    assert found.agrees
    assert found.rows_compared > 40


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_exact_groups_with_every_optimizer(make_world, optimizer):
    found = compared(make_world, 4, {"groups": 2}, optimizer=optimizer)
    assert found.agrees, found


def test_averaged_sgd_of_equal_groups_is_one_dimension(make_world):
    """The mean of what groups do is what all do together, where steps are linear in gradients."""
    parallel = {"groups": 2, "merge": "averaged"}
    # Four batches: the fifth does not divide evenly, so groups would weigh its samples otherwise.
    found = compared(make_world, 4, parallel, steps=4, optimizer="sgd", dense="sgd")
    assert found.agrees, found


def test_averaged_adagrad_is_another_algorithm(make_world):
    found = compared(make_world, 4, {"groups": 2, "merge": "averaged", "merge_every": 2})
    assert found.replicas_identical
    assert found.rows_missing == 0
    assert found.largest_difference > 1e-3
    assert not found.agrees


@dataclass(frozen=True)
class OfGroup:
    """The samples of one group's ranks, as a source of its own."""

    source: Any
    mesh: Mesh

    def __getattr__(self, name: str) -> object:
        return getattr(self.source, name)

    def batches(self, *, rank: int, ranks: int, **more: Any) -> Iterator[Batch]:
        world = self.mesh.world
        assert (rank, ranks) == (self.mesh.shards.rank, self.mesh.shards.size)
        return self.source.batches(rank=world.rank, ranks=world.size, **more)


def average_plainly(trainer: Trainer, mesh: Mesh) -> None:
    """Every row that any group has, averaged over all groups, in lists and dicts."""
    for store in trainer.stores:
        tables = range(store.layout.num_tables)
        mine = {
            t: [int(k) for table, keys, _ in store.export() if table == t for k in keys]
            for t in tables
        }
        for table in tables:
            everyones: Any = mesh.replicas.all_gather_values(mine[table])
            keys = torch.tensor(sorted({k for of in everyones for k in of}), dtype=torch.int64)
            counts = [len(keys) if t == table else 0 for t in tables]
            rows = torch.empty(len(keys), store.layout.width)
            store.gather(keys, counts, rows)
            of_groups = [torch.tensor(of) for of in mesh.replicas.all_gather_values(rows.tolist())]
            mean = sum(of_groups[1:], of_groups[0]) * (1 / mesh.groups)
            store.scatter(keys, counts, mean.view_as(rows))


AVERAGED_MESHES = [(4, 2, "shards"), (4, 4, "replicas"), (8, 4, "replicas")]
"""(ranks, groups, layout)"""
AVERAGED_KEYS = ("some shared", "each rank its own", "growing")


@pytest.mark.parametrize(
    ("ranks", "groups", "layout", "every", "keys"),
    [  # any two values meet
        (*mesh, every, AVERAGED_KEYS[(number + every) % 3])
        for number, mesh in enumerate(AVERAGED_MESHES)
        for every in (1, 2, 3)
    ],
)
def test_averaged_groups_are_trainings_of_their_own_that_meet(
    make_world, ranks, groups, layout, every, keys
):
    """Each group as a run of its own, and after every few steps all rows averaged the plain way.

    With several micro-batches and all overlap; dense weights, which groups share, do not move.
    """
    frozen = {"optimizer": "rowwise_adagrad", "dense": "sgd", "dense_lr": 1e-30, "keys": keys}
    parallel = {"groups": groups, "layout": layout, "merge": "averaged", "merge_every": every}
    twin, grouped = make_world(**frozen), make_world(parallel=parallel, **frozen)
    steps = 4

    def one(comm):
        mesh = make_mesh(comm, groups, layout)
        pipeline = PipelineSettings(plan="nested", micro_batches=2, retrieval=Retrieval.NEW)
        plain = twin.trainer(replace(pipeline, plan="serial"), mesh.shards)
        for start in range(0, steps, every):
            plain.fit(OfGroup(twin.source, mesh), steps=min(every, steps - start))
            average_plainly(plain, mesh)
        trainer = grouped.trainer(pipeline, comm)
        trainer.fit(grouped.source, steps=steps)
        return compare(Trained("twin", plain, [], []), Trained("groups", trainer, [], []))

    for found in run_ranks(ranks, one):
        assert found.first_row is None
        assert found.rows_different == 0
        assert found.rows_compared > 10


def test_nothing_that_one_group_alone_touched_is_lost(make_world):
    """Merged only at the end of the run, each group has the rows of the other, and the same."""
    world = make_world(
        parallel={"groups": 2, "merge": "averaged", "merge_every": 5, "layout": "shards"},
        keys="each rank its own",
        optimizer="sgd",
        dense="sgd",
    )

    def one(comm):
        trainer = world.trainer(SERIAL, comm)
        trainer.fit(world.source)
        return {
            (number, table, int(key)): row
            for number, store in enumerate(trainer.stores)
            for table, keys, rows in store.export()
            for key, row in zip(keys, rows, strict=True)
        }

    of_ranks = run_ranks(4, one)
    assert of_ranks[0].keys() == of_ranks[2].keys()
    assert of_ranks[1].keys() == of_ranks[3].keys()
    for here, there in ((0, 2), (1, 3)):
        for at, row in of_ranks[here].items():
            assert torch.equal(row, of_ranks[there][at])
    # Both groups' own keys are in both: nothing that was touched is lost.
    own = {key // 10**7 for of in of_ranks for _, _, key in of if key >= 10**7 - 10**6}
    assert own >= {1, 2, 3, 4}


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (2, 2), (8, 4), (1, 1)])
@pytest.mark.parametrize("merge", ["exact", "averaged"])
def test_a_checkpoint_is_loaded_by_other_groups(make_world, tmp_path, ranks, groups, merge):
    world = make_world(parallel={"groups": 2, "merge": merge})

    def write(comm):
        trainer = world.trainer(SERIAL, comm)
        trainer.fit(world.source, steps=3)
        path = trainer.save(tmp_path)
        keys = torch.arange(40) * 7919 - 50
        return path, trainer.rows_of("items", keys)

    path, rows = run_ranks(4, write)[0]
    again = make_world(parallel={"groups": groups, "merge": merge})

    def read(comm):
        trainer = again.trainer(SERIAL, comm)
        trainer.load(path)
        found = trainer.rows_of("items", torch.arange(40) * 7919 - 50)
        trainer.fit(again.source)
        return found, trainer.progress.step

    for found, step in run_ranks(ranks, read):
        assert torch.equal(found, rows)
        assert step == 5


def test_groups_that_do_not_divide_the_ranks_are_refused(make_world):
    world = make_world(parallel={"groups": 3})
    with pytest.raises(ConfigError, match="groups is 3 and there are 4 ranks"):
        run_ranks(4, lambda comm: world.trainer(SERIAL, comm))
