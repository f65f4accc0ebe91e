"""Proof that a plan changes nothing: the same job with `serial` and with the plan, compared.

Each rank compares its own shard. Floats are compared as the integers that their bits are: NaN
equals itself, -0.0 is not 0.0.

Exact groups are compared with the same run in one dimension. Groups add gradients in another order:
first inside a group, then over groups. So bits differ, and what can be asked is that no number is
further off than float32 sums in another order explain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nestpipe.comm import Communicator
from nestpipe.comm.communicator import Mesh
from nestpipe.data import Source, StreamingSource
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.errors import ConfigError, DataError, LossError, RunError
from nestpipe.runtime import Work, inject_delays
from nestpipe.train.checkpoint import known_keys
from nestpipe.train.config import AUTO, JobConfig, ParallelSettings, PipelineSettings
from nestpipe.train.dense import local
from nestpipe.train.job import make_job
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer

# Shapes: K keys, W width of a stored row as it travels: D weights, then state; S steps

Piece = tuple[int, Tensor, Tensor]
"""Some rows of one table: its number, ascending keys, rows with state."""
Plans = tuple[str, str]
"""The names of the two runs, as sentences call them."""

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Trained:
    """A trainer after its run, and what each step said of itself."""

    name: str
    """What sentences call it: the plan."""
    trainer: Trainer
    losses: list[float]
    samples: list[int]
    evicted: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Keys whose rows left, by table and step."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes besides rows, by a name for people."""
        progress = self.trainer.progress
        return {
            **dense_tensors(self.trainer),
            "counter step": torch.tensor(progress.step),
            "counter epoch": torch.tensor(progress.epoch),
            "counter position": torch.tensor(progress.position),
            "samples of each step": torch.tensor(self.samples, dtype=torch.int64),
            "loss of each step": torch.tensor(self.losses, dtype=torch.float64),
            **lifecycle_tensors(self.trainer),
            **self.evicted,
        }


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was compared, and what of it differs."""

    rows_compared: int = 0
    rows_different: int = 0
    tensors_compared: int = 0
    tensors_different: int = 0
    largest_difference: float = 0.0
    """Between two numbers; infinite where one of them is infinite or not a number."""
    first_row: str | None = None
    """The first row that differs, as a sentence; then the first tensor."""
    first_tensor: str | None = None
    first_step: int | None = None
    """The first step, counted from 1, whose loss differs."""

    def note_size(self, one: Tensor, two: Tensor) -> None:
        """Take the distance of these numbers, which differ, into account."""
        largest = float((one.double() - two.double()).abs().max())
        size = largest if math.isfinite(largest) else math.inf
        self.largest_difference = max(self.largest_difference, size)


def compare(serial: Trained, other: Trained) -> Findings:
    """Compare every row with its state, every dense tensor, all counters and losses."""
    found = Findings(first_step=_first_different_step(serial.losses, other.losses))
    plans = (serial.name, other.name)
    for group, one, two in zip(
        serial.trainer.groups, serial.trainer.stores, other.trainer.stores, strict=True
    ):
        names = [table.name for table in group.tables]
        _compare_stores(found, names, plans, one, two)
    _compare_tensors(found, plans, serial.tensors(), other.tensors())
    return found


def dense_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Every weight and buffer of the model, and every state of their optimizer; of shards this
    rank's own."""
    model = trainer.model
    found: dict[str, Tensor] = {f"dense weight {n}": p for n, p in model.named_parameters()}
    found |= {f"dense buffer {name}": buffer for name, buffer in model.named_buffers()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, states in trainer.dense_optimizer.state.items():
        for state, value in states.items():
            if value is not None:
                owner = names.get(id(parameter), "nothing")  # a model may have no weights at all
                found[f"dense optimizer's {state} of {owner}"] = torch.as_tensor(value)
    return {name: _real(local(tensor.detach()).cpu()) for name, tensor in found.items()}


def lifecycle_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """What is known of the keys of each table with a policy, and when rows leave next."""
    found: dict[str, Tensor] = {}
    for name, known in known_keys(trainer.lifecycle).items():
        found |= {
            f"keys with a row in {name}": known.keys,
            f"last use and count of rows of {name}": known.uses,
            f"keys that wait for a row in {name}": known.waiting,
            f"last use and count of keys that wait in {name}": known.waiting_uses,
        }
    if trainer.lifecycle is not None:
        found["counter next boundary"] = torch.tensor(trainer.lifecycle.next_boundary)
    return found


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same size."""
    return tensor.detach().contiguous().view(_SAME_SIZE[tensor.element_size()])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# Rows


class _Reader:
    """The rows of one export, taken in order of table and key."""

    def __init__(self, pieces: Iterator[Piece], width: int) -> None:
        self._pieces = pieces
        self._nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, width)
        self._piece = next(pieces, None)

    @property
    def end(self) -> tuple[int, int] | None:
        """Table and key of the last row at hand; None where all were taken."""
        return None if self._piece is None else (self._piece[0], int(self._piece[1][-1]))

    def take(self, table: int, key: int) -> tuple[Tensor, Tensor]:
        """Keys and rows at hand of that table, up to that key."""
        if self._piece is None or self._piece[0] != table:
            return self._nothing
        _, keys_K, rows_KW = self._piece
        cut = int(torch.searchsorted(keys_K, key, right=True))
        rest = (table, keys_K[cut:], rows_KW[cut:])
        self._piece = rest if cut < len(keys_K) else next(self._pieces, None)
        return keys_K[:cut], rows_KW[:cut]


def side_by_side(one: RowStore, two: RowStore, chunk: int = 65536) -> Iterator[tuple[Piece, Piece]]:
    """Every row of two stores, in pairs of pieces that cover the same range of one table's keys."""
    readers = [_Reader(store.export(chunk), store.layout.width) for store in (one, two)]
    while ends := [reader.end for reader in readers if reader.end is not None]:
        table, key = min(ends)
        first, second = (reader.take(table, key) for reader in readers)
        yield (table, *first), (table, *second)


def _compare_stores(
    found: Findings, names: list[str], plans: Plans, one: RowStore, two: RowStore
) -> None:
    for (table, keys_one, rows_one), (_, keys_two, rows_two) in side_by_side(one, two):
        about = f"table {names[table]!r}"
        if not torch.equal(keys_one, keys_two):
            both_one, both_two = torch.isin(keys_one, keys_two), torch.isin(keys_two, keys_one)
            _count_missing(found, about, plans, keys_one[~both_one])
            _count_missing(found, about, (plans[1], plans[0]), keys_two[~both_two])
            keys_one, rows_one, rows_two = (
                keys_one[both_one],
                rows_one[both_one],
                rows_two[both_two],
            )
        _compare_rows(found, about, plans, keys_one, rows_one, rows_two, one.layout.dim)


def _count_missing(found: Findings, about: str, plans: Plans, keys_K: Tensor) -> None:
    """Rows that the first of the plans has and the second does not."""
    found.rows_compared += len(keys_K)
    found.rows_different += len(keys_K)
    if len(keys_K) and found.first_row is None:
        has, lacks = plans
        found.first_row = f"{about}, key {int(keys_K[0])}: {has} has this row, {lacks} has not"


def _compare_rows(
    found: Findings,
    about: str,
    plans: Plans,
    keys_K: Tensor,
    one_KW: Tensor,
    two_KW: Tensor,
    dim: int,
) -> None:
    found.rows_compared += len(keys_K)
    differs_KW = bits(one_KW) != bits(two_KW)
    if not differs_KW.any():
        return
    found.rows_different += int(differs_KW.any(1).sum())
    found.note_size(one_KW[differs_KW], two_KW[differs_KW])
    if found.first_row is None:
        k, column = (int(i) for i in differs_KW.nonzero()[0])
        where = f"weight {column}" if column < dim else f"state {column - dim}"
        values = both_values(plans, one_KW[k, column], two_KW[k, column])
        found.first_row = f"{about}, key {int(keys_K[k])}, {where}: {values}"


# Tensors


def _compare_tensors(
    found: Findings, plans: Plans, one: Mapping[str, Tensor], two: Mapping[str, Tensor]
) -> None:
    for name in {**one, **two}:
        found.tensors_compared += 1
        sentence = _difference(found, plans, one.get(name), two.get(name))
        if sentence is not None:
            found.tensors_different += 1
            found.first_tensor = found.first_tensor or f"{name}{sentence}"


def _difference(
    found: Findings, plans: Plans, one: Tensor | None, two: Tensor | None
) -> str | None:
    """What to say after the name of a tensor, or None where there is nothing to say."""
    if one is None or two is None:
        has, lacks = plans if two is None else plans[::-1]
        return f": {has} has this tensor, {lacks} has not"
    if one.shape != two.shape or one.dtype != two.dtype:
        forms = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (one, two)]
        return f": {plans[0]} has {forms[0]}, {plans[1]} has {forms[1]}"
    differs = bits(one) != bits(two)
    if not differs.any():
        return None
    found.note_size(one[differs], two[differs])
    place = tuple(int(i) for i in differs.nonzero()[0])
    index = f"[{', '.join(map(str, place))}]" if place else ""
    return f"{index}: {both_values(plans, one[place], two[place])}"


def _first_different_step(one: Sequence[float], two: Sequence[float]) -> int | None:
    shared = min(len(one), len(two))
    losses = [torch.tensor(part[:shared], dtype=torch.float64) for part in (one, two)]
    different_S = (bits(losses[0]) != bits(losses[1])).nonzero()
    if len(different_S):
        return int(different_S[0]) + 1
    return shared + 1 if len(one) != len(two) else None


def both_values(plans: Plans, one: Tensor, two: Tensor) -> str:
    """Two numbers, told so that they look different."""
    texts = [_text(value) for value in (one, two)]
    if texts[0] == texts[1]:  # two kinds of NaN
        width = 2 * one.element_size()
        mask = (1 << 4 * width) - 1
        texts = [f"{_text(v)} (0x{int(bits(v)) & mask:0{width}x})" for v in (one, two)]
    return f"{plans[0]} has {texts[0]}, {plans[1]} has {texts[1]}"


def _text(value: Tensor) -> str:
    """Enough digits to tell neighbours apart."""
    if not value.is_floating_point():
        return str(value.item())
    return f"{value.item():.{17 if value.element_size() == 8 else 9}g}"


# The two runs


DELAY_MS, DELAYED_SHARE = 25.0, 0.2
"""Few ops and long delays: where all are late, none overtakes another."""
Tell = Callable[[StepReport], None]
Watch = Callable[[str, int | None], AbstractContextManager[Tell]]
"""Called before each run with its name and steps, if known; yields what each step calls."""
Start = Callable[[PipelineSettings], tuple[Trainer, Source]]
"""A fresh trainer with these settings, and its data; the same weights and order every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether two runs came to the same bits, over all ranks."""

    plan: str
    ranks: int
    steps: int
    """Batches that `serial` trained."""
    micro_batches: int
    rows_compared: int
    """Rows of all tables, each with its optimizer state."""
    tensors_compared: int
    """Dense weights, states of their optimizer, counters and losses, on every rank."""
    rows_different: int
    tensors_different: int
    largest_difference: float | None
    """None where one of two different numbers is infinite or not a number."""
    first_different_step: int | None
    """The first step whose loss differs."""
    first_difference: str | None

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    def figures(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"identical": self.identical, **asdict(self)}


def unwatched(name: str, total: int | None) -> AbstractContextManager[Tell]:
    """Nobody looks on."""
    return nullcontext(lambda report: None)


def serial_twin(pipeline: PipelineSettings) -> PipelineSettings:
    """The plain settings that must come to the same bits: nothing overlaps, all rows are read."""
    return replace(
        pipeline,
        plan="serial",
        retrieval="whole",
        speculative_rows=False,
        buffers=2,
        owner_sums="auto" if pipeline.owners_add_up else "off",
    )


def verify_job(
    config: JobConfig,
    comm: Communicator,
    watch: Watch = unwatched,
    delays: int | None = None,
) -> Verdict:
    """Train a config's job with `serial` and with its plan, and compare what came out.

    Nothing is evaluated or saved. All ranks take part, and all get the same verdict.
    """

    def start(pipeline: PipelineSettings) -> tuple[Trainer, Source]:
        job = make_job(replace(config, pipeline=pipeline), comm)
        return job.trainer, job.train

    run = config.run
    length = {"steps": run.steps or None, "epochs": run.epochs}
    return verify(start, config.pipeline, **length, watch=watch, delays=delays)


def verify(
    start: Start,
    pipeline: PipelineSettings,
    *,
    steps: int | None = None,
    epochs: int = 1,
    watch: Watch = unwatched,
    delays: int | None = None,
) -> Verdict:
    """Train twice from the same start, with `serial` and with `pipeline`, and compare.

    Both trainers live until the comparison is made, so host memory holds all rows twice. With
    `delays`, a seed, some ops of the second run take longer by chance, others on each rank.
    """
    if pipeline.plan == AUTO:
        raise ConfigError("plan is 'auto', which is chosen by a run; verify a plan by its name")
    ends: Mapping[str, int] | None = None
    with ExitStack() as closing:

        def train(settings: PipelineSettings, name: str, seed: int | None = None) -> Trained:
            nonlocal ends
            trainer, source = start(settings)
            closing.callback(trainer.close)
            if isinstance(source, StreamingSource):  # what comes meanwhile would differ
                ends = source.freeze(trainer.comm.all_gather_values, ends)
            if seed is not None:
                trainer.around = delay_ops(seed, trainer.comm)
                trainer.poison_buffers = True
            with watch(name, expected_steps(trainer, source, steps, epochs)) as tell:
                return train_to_compare(trainer, source, name, steps, epochs, tell)

        twin = serial_twin(pipeline)
        serial = train(twin, twin.plan)
        again = " again" if pipeline.plan == twin.plan else ""
        with races_named(pipeline.plan, delays):
            other = train(pipeline, pipeline.plan + again, delays)
        findings = compare(serial, other)
        comm = serial.trainer.comm
        return combine(
            [
                Findings(**cast("dict[str, Any]", of))
                for of in comm.all_gather_values(asdict(findings))
            ],
            plan=pipeline.plan,
            steps=serial.trainer.progress.step,
            micro_batches=pipeline.micro_batches,
        )


@contextmanager
def races_named(plan: str, delays: int | None) -> Generator[None]:
    """Say that a broken loss of the delayed run is a race: the serial run before it had none."""
    try:
        yield
    except LossError as error:
        if delays is None:
            raise
        raise RunError(
            f"{plan} loses a race: with delays {delays} the loss of step {error.step} is "
            f"{error.loss}, with serial it is finite; find the op that reads rows too early"
        ) from error


def delay_ops(seed: int, comm: Communicator) -> Callable[[Work], Work]:
    """Hold some ops up for so long that whatever does not wait for them overtakes them."""
    own = seed * comm.size + comm.rank
    return partial(inject_delays, seed=own, max_ms=DELAY_MS, share=DELAYED_SHARE)


def expected_steps(trainer: Trainer, source: Source, steps: int | None, epochs: int) -> int | None:
    """How many steps a run will have, if that can be known."""
    if source.num_samples is None:
        return steps
    every = epochs * -(-source.num_samples // trainer.settings.batch)
    return min(every, steps) if steps else every


def train_to_compare(
    trainer: Trainer, source: Source, name: str, steps: int | None, epochs: int, tell: Tell
) -> Trained:
    """Train, and keep what every step says."""
    losses: list[float] = []
    samples: list[int] = []

    def on_step(report: StepReport) -> None:
        losses.append(report.loss)
        samples.append(report.samples)
        tell(report)

    evicted: dict[str, Tensor] = {}

    def on_evicted(step: int, keys: Mapping[str, Tensor]) -> None:
        evicted.update({f"keys that left {table} at {step}": of for table, of in keys.items()})

    trainer.on_evicted = on_evicted
    trainer.fit(source, steps=steps, epochs=epochs, on_step=on_step)
    if not losses:  # a stream, which has no end, does not say so itself
        raise DataError(
            "verify compared nothing, because the stream has fewer samples than a batch or window; "
            "give it more, or set a smaller run.batch or data.stream.shuffle_window"
        )
    return Trained(name, trainer, losses, samples, evicted)


def combine(of_ranks: Sequence[Findings], *, plan: str, steps: int, micro_batches: int) -> Verdict:
    """What all ranks found, together; their shards have no row in common."""
    largest = max(found.largest_difference for found in of_ranks)
    different = [found.first_step for found in of_ranks if found.first_step is not None]
    return Verdict(
        plan=plan,
        ranks=len(of_ranks),
        steps=steps,
        micro_batches=micro_batches,
        rows_compared=sum(found.rows_compared for found in of_ranks),
        tensors_compared=sum(found.tensors_compared for found in of_ranks),
        rows_different=sum(found.rows_different for found in of_ranks),
        tensors_different=sum(found.tensors_different for found in of_ranks),
        largest_difference=largest if math.isfinite(largest) else None,
        first_different_step=min(different, default=None),
        first_difference=_first(of_ranks),
    )


def _first(of_ranks: Sequence[Findings]) -> str | None:
    """The first row that differs on any rank, else the first tensor."""
    rows = [(rank, found.first_row) for rank, found in enumerate(of_ranks)]
    tensors = [(rank, found.first_tensor) for rank, found in enumerate(of_ranks)]
    for rank, sentence in rows + tensors:
        if sentence is not None:
            return f"on rank {rank}, {sentence}"
    return None


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
