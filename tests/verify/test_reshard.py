"""A run goes on in another shape: other ranks, groups and tiers, and nothing of it changes.

At each hop other ranks load what the ones before saved, save it again untouched, train a batch and
save that. What is saved untouched must have every bit: rows, optimizer state, dense weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nestpipe import Table, Trainer, TrainSettings
from nestpipe.checkpoint.folder import Checkpoint, verified
from nestpipe.checkpoint.merging import merged_rows
from nestpipe.comm import Communicator
from nestpipe.config import build
from nestpipe.data import DataConfig, SyntheticConfig, open_source
from nestpipe.embedding.store.ssd import SsdStore
from nestpipe.models import LogisticRegression
from nestpipe.serve.engine.rank_model import read_rows
from nestpipe.train.background import BackgroundWriter
from nestpipe.train.config import PipelineSettings
from support.thread_ranks import run_ranks

DIMS = {"items": 4, "tags": 4, "users": 2}


@dataclass(frozen=True)
class Shape:
    """How one part of a run is laid out."""

    ranks: int
    groups: int = 1


SHAPES = (Shape(1), Shape(4), Shape(3), Shape(4, groups=2), Shape(1))
"""1 -> 4 -> 3 -> 2x2 -> 1"""
TIERS = {
    "host": ("host", "new"),
    "pool": ("host", "pooled"),
    "ssd": ("ssd", "whole"),
    "pool over ssd": ("ssd", "pooled"),
}
"""Where rows live, and how a batch gets them."""
ORDERS = (
    ("pool", "host", "ssd", "host", "pool"),
    ("host", "ssd", "pool over ssd", "ssd", "host"),
    ("ssd", "pool", "ssd", "pool over ssd", "ssd"),
)


def world_of(make_world, shape: Shape, tier: str, optimizer: str, folder: Path):
    store, _ = TIERS[tier]
    of = {"store": store, "store_path": str(folder / "rows") if store == "ssd" else ""}
    # Room for two or three rows of each table.
    return make_world(
        keys="growing",
        optimizer=optimizer,
        parallel={"groups": shape.groups},
        store={**of, "host_memory": "0.3KB"},
    )


def trainer_of(make_world, shape: Shape, tier: str, optimizer: str, folder: Path, comm):
    given = {"plan": "nested", "retrieval": TIERS[tier][1], "micro_batches": 2}
    world = world_of(make_world, shape, tier, optimizer, folder)
    return world.trainer(build(PipelineSettings, given), comm), world.source


def rows_in(checkpoint: Checkpoint) -> dict[str, dict[int, bytes]]:
    """Every row with its state, as bits, by table and key; no key may come twice."""
    found: dict[str, dict[int, bytes]] = {}
    for table in DIMS:
        of_table = found.setdefault(table, {})
        for keys, rows in checkpoint.rows(table):
            for key, row in zip(keys.tolist(), rows, strict=True):
                assert key not in of_table
                of_table[key] = row.numpy().tobytes()
    return found


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].numpy().tobytes() == other[name].numpy().tobytes(), name


@pytest.mark.parametrize("tiers", ORDERS, ids=" > ".join)
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_every_shape_and_tier_loads_what_any_other_saved(make_world, tmp_path, tiers, optimizer):
    before: Path | None = None
    for hop, (shape, tier) in enumerate(zip(SHAPES, tiers, strict=True)):

        def one(
            comm: Communicator, before=before, shape=shape, tier=tier, hop=hop
        ) -> tuple[Path | None, Path]:
            trainer, source = trainer_of(make_world, shape, tier, optimizer, tmp_path, comm)
            again = None
            if before is not None:
                trainer.load(before)
                again = trainer.save(tmp_path / f"again-{hop}")
            assert trainer.fit(source, steps=1).step == hop + 1
            trained = trainer.save(tmp_path / f"trained-{hop}")
            inner = [tracked._store for tracked in trainer.stores]
            on_ssd = [store for store in inner if isinstance(store, SsdStore)]
            assert len(on_ssd) == (len(inner) if "ssd" in tier else 0)
            # A rank of four may have too few rows for memory to overflow.
            assert shape.ranks > 1 or all(store.traffic().rows_written for store in on_ssd)
            trainer.close()
            return again, trained

        again, trained = run_ranks(shape.ranks, one)[0]
        if before is not None:
            assert again is not None
            was, now = verified(before), verified(again)
            assert rows_in(now) == rows_in(was)
            assert_same_bits(now.dense(), was.dense())
            assert now.manifest.ranks == shape.ranks
        changed = rows_in(verified(trained))
        assert before is None or changed != rows_in(verified(before))
        before = trained
    assert before is not None
    served_as_saved(verified(before))


def served_as_saved(checkpoint: Checkpoint) -> None:
    """The rows that `serve` reads are the weights of those that were saved."""
    for table, rows in rows_in(checkpoint).items():
        keys, weights = read_rows(checkpoint, table, DIMS[table])
        assert keys.tolist() == sorted(rows)
        for key, row in zip(keys.tolist(), weights, strict=True):
            assert row.numpy().tobytes() == rows[key][: 4 * DIMS[table]]


@pytest.mark.parametrize("tier", ["ssd", "pool over ssd"])
@pytest.mark.parametrize(("ranks", "increments"), [(1, 5), (2, 5), (2, 0)])
def test_what_is_written_in_the_background_from_an_ssd_restores_every_bit(
    make_world, tmp_path, tier, ranks, increments
):
    def write(comm: Communicator) -> tuple[Path, Path]:
        trainer, source = trainer_of(make_world, Shape(ranks), tier, "adam", tmp_path, comm)
        trainer.fit(source, steps=2)
        last = trainer.save(tmp_path / "run")
        trainer.track_rows()
        writer = BackgroundWriter(tmp_path / "run", trainer.mesh, increments)
        for _ in range(2):
            trainer.fit(source, steps=1)
            last = trainer.save_in_background(writer, last)
            writer.wait()
        whole = trainer.save(tmp_path / "whole")
        trainer.close()
        return last, whole

    last, whole = run_ranks(ranks, write)[0]
    assert len(verified(last).parents) == (2 if increments else 0)

    def read(comm: Communicator) -> Path:
        trainer, _ = trainer_of(make_world, Shape(3), "host", "adam", tmp_path, comm)
        trainer.load(last)
        return trainer.save(tmp_path / "again")

    again = verified(run_ranks(3, read)[0])
    assert rows_in(again) == rows_in(verified(whole))
    assert_same_bits(again.dense(), verified(whole).dense())
    assert torch.equal(again.dense()["model.seen"], verified(whole).dense()["model.seen"])


@pytest.mark.parametrize("changed", ["order", "rate"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tables_in_another_order_or_group_have_every_row(tmp_path, ranks, changed):
    """A table's number in its group says which rank has a key: other ranks read its rows then."""
    world = SyntheticConfig(samples=600, num_tables=2, num_keys=200)
    source = open_source(DataConfig(synthetic=world))
    model = partial(LogisticRegression, ("c0", "c1"), 13)
    one, other = (Table(name=f"c{n}", dim=1, pooling="sum", init_std=0.0) for n in (0, 1))
    after = [other, one] if changed == "order" else [one, replace(other, lr=0.5)]

    def saved(comm: Communicator) -> Path:
        trainer = Trainer(model(), [one, other], TrainSettings(batch=50), comm)
        trainer.fit(source, steps=4)
        return trainer.save(tmp_path / "run")

    first = run_ranks(ranks, saved)[0]

    def gone_on(comm: Communicator) -> tuple[Path, Path]:
        trainer = Trainer(model(), after, TrainSettings(batch=50), comm)
        trainer.load(first)
        again = trainer.save(tmp_path / "again")
        trainer.track_rows()
        writer = BackgroundWriter(tmp_path / "run", trainer.mesh, 0)
        trainer.fit(source, steps=2)
        last = trainer.save_in_background(writer, first)
        writer.wait()
        assert trainer.save(tmp_path / "whole").name == last.name
        return again, last

    again, last = run_ranks(ranks, gone_on)[0]
    for path, same in ((first, again), (last, tmp_path / "whole" / last.name)):
        for table in ("c0", "c1"):
            keys, rows = merged_rows(verified(path), table)
            found = merged_rows(verified(same), table)
            assert len(keys) > 50
            assert torch.equal(keys, found[0])
            assert torch.equal(rows, found[1])
