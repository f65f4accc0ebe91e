"""A run in exact groups beside the same run in one dimension: the same rows, but for rounding.

Groups add gradients in another order: first inside a group, then over groups. So bits differ, and
what can be asked is that no number is further off than float32 sums in another order explain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nestpipe.comm import Communicator
from nestpipe.comm.communicator import Mesh
from nestpipe.data import StreamingSource
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.errors import ConfigError
from nestpipe.train.config import ParallelSettings
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import (
    Trained,
    Watch,
    dense_tensors,
    expected_steps,
    serial_twin,
    train_to_compare,
    unwatched,
)

# Shapes: K keys, W width of a stored row

BOUND = 1e-5
"""How far a number may be off, over the largest number of its kind: weights of a table, state of a
table, a dense tensor. A gradient that nearly cancels has few digits left, and AdaGrad divides it by
its own size; so this is far above the 6e-8 of a single rounding."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the two runs have in common; the same on every rank."""

    groups: int
    ranks: int
    steps: int
    rows_compared: int
    tensors_compared: int
    rows_missing: int
    """Rows that only one of the two has."""
    largest_difference: float
    """Over the largest number of the kind."""
    replicas_identical: bool
    """Whether all groups have the same bits."""
    bound: float = BOUND

    @property
    def agrees(self) -> bool:
        return (
            self.replicas_identical
            and self.rows_missing == 0
            and self.largest_difference <= self.bound
        )

    def figures(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"agrees": self.agrees, **asdict(self)}


def verify_one_dimension(
    config: JobConfig, comm: Communicator, watch: Watch = unwatched
) -> Agreement:
    """Train a config's job in its groups, and with `serial` in one dimension, and compare."""
    if config.parallel.groups == 1 or config.parallel.merge != "exact":
        raise ConfigError(
            f"groups is {config.parallel.groups} and merge {config.parallel.merge!r}: only several "
            "exact groups equal one dimension; set parallel.groups=2 and parallel.merge=exact"
        )
    if config.pipeline.comm_dtype != "float32":
        raise ConfigError(
            f"comm_dtype is {config.pipeline.comm_dtype!r}, which may round a different last bit "
            "further than the order of sums explains; set pipeline.comm_dtype=float32"
        )
    plain = replace(
        config,
        parallel=ParallelSettings(dense=config.parallel.dense),
        pipeline=serial_twin(config.pipeline),
    )
    ends: Mapping[str, int] | None = None
    with ExitStack() as closing:

        def train(of: JobConfig, name: str) -> Trained:
            nonlocal ends
            job = make_job(of, comm)
            closing.callback(job.trainer.close)
            if isinstance(job.train, StreamingSource):
                ends = job.train.freeze(comm.all_gather_values, ends)
            steps, epochs = of.run.steps or None, of.run.epochs
            with watch(name, expected_steps(job.trainer, job.train, steps, epochs)) as tell:
                return train_to_compare(job.trainer, job.train, name, steps, epochs, tell)

        one = train(plain, "one dimension")
        two = train(config, f"{config.parallel.groups} groups")
        return agreement(one.trainer, two.trainer)


def agreement(one: Trainer, two: Trainer) -> Agreement:
    """Compare a trainer of one dimension with one of several groups; all ranks take part."""
    mesh = two.mesh
    off, rows, missing = 0.0, 0, 0
    for number, (keys, theirs, mine_keys, mine) in _tables(one, two):
        dim = two.groups[number].dim
        both = torch.isin(mine_keys, keys)
        missing += int((~both).sum()) + int((~torch.isin(keys, mine_keys)).sum())
        rows += len(mine_keys)
        mine, theirs = mine[both], theirs[torch.isin(keys, mine_keys)]
        off = max(off, _off(mine[:, :dim], theirs[:, :dim]), _off(mine[:, dim:], theirs[:, dim:]))
    dense = [dense_tensors(trainer) for trainer in (one, two)]
    off = max([off, *(_off(tensor, dense[0][name]) for name, tensor in dense[1].items())])
    prints = mesh.replicas.all_gather_values(_fingerprint(two))
    found = mesh.world.all_gather_values([off, rows, missing, len(set(map(str, prints))) == 1])
    of_ranks: list[list[Any]] = [list(of) for of in found]  # type: ignore[call-overload]
    return Agreement(
        groups=mesh.groups,
        ranks=mesh.world.size,
        steps=two.progress.step,
        rows_compared=sum(of[1] for of in of_ranks),
        tensors_compared=len(dense[1]),
        rows_missing=sum(of[2] for of in of_ranks),
        largest_difference=max(of[0] for of in of_ranks),
        replicas_identical=all(of[3] for of in of_ranks),
    )


def _off(one: Tensor, two: Tensor) -> float:
    """The largest difference over the largest number; infinite where a number is none."""
    if not one.numel():
        return 0.0
    one, two = one.double(), two.double()
    largest = float(torch.maximum(one.abs().max(), two.abs().max()))
    difference = float((one - two).abs().nan_to_num(nan=float("inf")).max())
    return difference / largest if largest else difference


def _tables(
    one: Trainer, two: Trainer
) -> Iterator[tuple[int, tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Every table of this rank's shard: number of its store, then keys and rows of both runs."""
    for number, group in enumerate(two.groups):
        for table in range(len(group.tables)):
            theirs = _sent_to_groups(one, two.mesh, number, table)
            yield number, (*theirs, *_exported(two, number, table))


def _exported(trainer: Trainer, number: int, table: int) -> tuple[Tensor, Tensor]:
    """Keys in ascending order, and rows with state, of one table of this rank."""
    store = trainer.stores[number]
    keys, rows = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, store.layout.width)]
    for of_table, keys_K, rows_KW in store.export():
        if of_table == table:
            keys.append(keys_K)
            rows.append(rows_KW)
    return torch.cat(keys), torch.cat(rows)


def _sent_to_groups(one: Trainer, mesh: Mesh, number: int, table: int) -> tuple[Tensor, Tensor]:
    """The rows of the run in one dimension that this rank's shard should have, from all ranks."""
    world = mesh.world
    keys_K, rows_KW = _exported(one, number, table)
    home = one.groups[number].table_owners[table]
    shard_K = owner_of(keys_K, table, mesh.shards.size, home)
    shards = [int(str(shard)) for shard in world.all_gather_values(mesh.shards.rank)]
    chosen = [(shard_K == shard).nonzero()[:, 0] for shard in shards]
    counts = torch.tensor([len(part) for part in chosen])
    arriving = torch.empty_like(counts)
    world.all_to_all(arriving, counts, [1] * world.size, [1] * world.size)
    order, splits = torch.cat(chosen), (arriving.tolist(), counts.tolist())
    keys = torch.empty(int(arriving.sum()), dtype=torch.int64)
    rows = torch.empty(len(keys), rows_KW.shape[1])
    world.all_to_all(keys, keys_K[order], *splits)
    world.all_to_all(rows, rows_KW[order], *splits)
    ascending = torch.argsort(keys)
    return keys[ascending], rows[ascending]


def _fingerprint(trainer: Trainer) -> str:
    """Of every row of this rank, with its state."""
    digest = hashlib.sha256()
    for store in trainer.stores:
        for table, keys_K, rows_KW in store.export():
            digest.update(str(table).encode())
            digest.update(keys_K.numpy().tobytes())
            digest.update(rows_KW.numpy().tobytes())
    return digest.hexdigest()
