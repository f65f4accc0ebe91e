"""What a step with a pool takes of device memory: the formula of docs/store.md, and its job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.config import Table
from nestpipe.embedding.pool import INDEX_BYTES
from nestpipe.jagged import Jagged
from nestpipe.models.protocol import Loss
from nestpipe.runtime import Work
from nestpipe.schedule import Kind, Plan, Retrieval
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.trainer import Trainer

DIM, LENGTH = 64, 4
STEPS = 12


class Sums(nn.Module):
    """Pooled rows, whose numbers all get the same gradient: no memory but that of rows."""

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        return Loss(rows["a"].sum(), float(batch.size))


class Samples:
    """Lists of four keys, of a few hundred; drawn ahead."""

    def __init__(self, samples: int, *, pinned: bool = False) -> None:
        self._drawn = [_drawn(samples, n).pack(pin_memory=pinned) for n in range(STEPS)]

    def batches(self, *, start: int, **_: object) -> Iterator[Batch]:
        yield from self._drawn[start:]

    def empty(self) -> Batch:
        return self._drawn[0].empty()


def _drawn(samples: int, number: int) -> Batch:
    keys = torch.randint(500, (samples * LENGTH,), generator=torch.Generator().manual_seed(number))
    return Batch(samples, {}, {"a": Jagged(keys, torch.full((samples,), LENGTH))})


Around = Callable[[Work], Work]


def as_they_are(work: Work) -> Work:
    return work


def make_trainer(plan: str, device: str, samples: int, around: Around = as_they_are) -> Trainer:
    settings = TrainSettings(
        batch=samples,
        device=device,  # type: ignore[arg-type]
        rows=RowSettings(optimizer="sgd"),
        dense=DenseSettings(optimizer="sgd"),
        pipeline=PipelineSettings(plan=plan, retrieval=Retrieval.POOLED),
        device_memory=f"{pool_bytes(samples) * 1.0001 / 1e9:.9f}GB",
    )
    tables = [Table(name="a", dim=DIM, pooling="sum")]
    return Trainer(Sums(), tables, settings, around=around)


def slots_for(samples: int) -> int:
    """So many that a batch finds a free one for each of its keys, repeats included."""
    return 4 * samples * LENGTH


def pool_bytes(samples: int) -> int:
    return slots_for(samples) * (4 * DIM + INDEX_BYTES)


def formula(plan: Plan, samples: int, sort_bytes: Callable[[int], int]) -> int:
    """Bytes of the batches in flight beside the pool, as docs/store.md has them."""
    terms, outputs = samples * LENGTH, samples
    copied, admitted, looked_up = in_flight(plan)
    room = terms + terms // 8
    of_terms = room * (16 + 4 + 16 + 0.5 + DIM / 4 + DIM / 128) + sort_bytes(room)
    of_lists = 4 * (outputs + terms)
    return round(
        copied * 8 * (terms + outputs)
        + admitted * (of_terms + of_lists)
        + looked_up * 2 * 4 * outputs * DIM
    )


def in_flight(plan: Plan) -> tuple[int, int, int]:
    """Batches whose keys, slots, and looked-up rows are on the device at the same time."""
    ahead = {slot.kind: slot.ahead for slot in plan.tick}
    saved = ahead[Kind.WRITEBACK]
    late = int(plan.shape.overlaps)  # what the same tick saves may not have been saved yet
    copied = ahead[Kind.COPY] - saved + 1
    admitted = ahead[Kind.UNION] - saved + 2
    return copied, admitted, ahead[Kind.ROWS] - saved + 1 + late
