"""Saving and loading a run: the model, its tables and where its data goes on, on all ranks.

`checkpoint/` says what is on disk. Each rank writes the rows of its shard, with their state; rank 0
adds dense weights and, last of all, the manifest. Any number of ranks can load it: each keeps the
keys that it owns. A fault of one rank is raised on all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import (
    DENSE,
    Checkpoint,
    FileEntry,
    Manifest,
    RowChange,
    counted,
    finite,
    is_old,
    name_of,
    open_noted,
    write_manifest,
)
from nestpipe.checkpoint.merging import cut, rows_in_part, uses_of, write_keys, write_rows
from nestpipe.comm.communicator import Communicator, Mesh
from nestpipe.embedding.lifecycle import KnownUses, Lifecycle, RowLedger, RowLifecycle
from nestpipe.embedding.pool import SNAPSHOT_SHARE, memory_left
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.embedding.store.protocol import FLOAT16_INF, RowStore
from nestpipe.embedding.table_groups import TableGroup
from nestpipe.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DataError,
    MisfitError,
    NestpipeError,
    RunError,
    UnjudgedError,
)
from nestpipe.models import Dlrm, HstuRanker, LogisticRegression
from nestpipe.train.dense import is_sharded, sharded_as, whole

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands, besides its weights."""

    step: int
    """Batches trained."""
    epoch: int
    position: int
    """Global batches of the epoch already trained ..."""
    samples: int
    """... and their samples; -1 where the checkpoint does not say."""
    optimizer: str
    """The row optimizer, whose state the rows carry."""
    dense_optimizer: str = ""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    lifecycle: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What row policies go on with."""
    cursor: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of a stream: the offset of each partition after the last trained sample."""
    data: str = ""
    """Tells the files apart that are trained on."""
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How to make the model again; empty: what the model itself says, if it is a shipped one."""
    choices: Sequence[Mapping[str, Any]] = ()
    """Of an adaptive run: its settings so far, each from a step on."""


def save_checkpoint(
    folder: Path,
    state: RunState,
    model: nn.Module,
    dense_optimizer: torch.optim.Optimizer,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    mesh: Mesh,
    lifecycle: Lifecycle | None = None,
) -> Path:
    """Write a full checkpoint; it has its name only once every rank has written all of it."""
    comm, target = mesh.world, folder / name_of(state.step)
    partial = folder / f".partial-{target.name}"
    manifest = manifest_of(state, model, groups, stores, mesh)
    dense = dense_tensors(model, dense_optimizer, keep=comm.rank == 0)

    def write_part() -> dict[str, FileEntry]:
        entries: dict[str, FileEntry] = {}
        if mesh.group == 0:  # the others have the same
            entries |= _save_rows(partial, groups, stores, mesh.shards.rank, lifecycle)
            entries |= write_waiting(partial, known_keys(lifecycle), mesh.shards.rank)
        if comm.rank == 0:
            entries[DENSE] = FileEntry.of(disk.write_tensors(partial / DENSE, dense))
        return entries

    with ExitStack() as lock:

        def begin() -> dict[str, FileEntry]:
            if comm.rank == 0:
                lock.enter_context(disk.locked(folder))
                disk.remove_leftovers(folder)
                disk.make_folder(partial)
            return {}

        def end() -> dict[str, FileEntry]:
            if comm.rank == 0:
                _publish(partial, target, manifest, entries)
            return {}

        all_write(comm, target, begin)
        entries = all_write(comm, target, write_part)
        all_write(comm, target, end)
    return target


def _publish(
    partial: Path, target: Path, manifest: Manifest, entries: dict[str, FileEntry]
) -> None:
    tables = counted(manifest.tables, entries)
    write_manifest(partial, replace(manifest, tables=tables, files=entries))
    disk.publish(partial, target)


def all_write(
    comm: Communicator, target: Path, write: Callable[[], dict[str, FileEntry]]
) -> dict[str, FileEntry]:
    """What every rank writes; a rank that fails is heard of by all, and all raise its sentence."""
    mine: dict[str, FileEntry] = {}

    def do() -> None:
        with disk.explained(f"the checkpoint {str(target)!r}"):
            mine.update(write())

    fault = fault_of(do)
    told = comm.all_gather_values([fault, {name: asdict(entry) for name, entry in mine.items()}])
    told = cast("list[tuple[list[str] | None, dict[str, Any]]]", told)
    raise_first([of_rank[0] for of_rank in told])
    return {name: FileEntry(**entry) for _, entries in told for name, entry in entries.items()}


def raise_everywhere(comm: Communicator, do: Callable[[], None]) -> None:
    """Do something on every rank; what one is refused, all raise."""
    raise_first(cast("list[list[str] | None]", comm.all_gather_values(fault_of(do))))


def gathered_from_first(comm: Communicator, value: T) -> T:
    """What rank 0 has, on every rank."""
    return cast("list[T]", comm.all_gather_values(value))[0]


def fault_of(do: Callable[[], None]) -> list[str] | None:
    """The kind and the sentence of an error meant for people; others end the run as they are."""
    try:
        do()
    except MemoryError:
        return ["CapacityError", "memory is full; free some, or spread tables over more ranks"]
    except NestpipeError as error:
        return [type(error).__name__, str(error)]
    return None


class LostParentError(CheckpointError):
    """The checkpoint that the next one was to be made from cannot be read."""


_KINDS: Mapping[str, type[NestpipeError]] = {
    kind.__name__: kind
    for kind in (
        *(CapacityError, CheckpointError, ConfigError, DataError, RunError),
        LostParentError,
        MisfitError,
        UnjudgedError,
    )
}


def raise_first(faults: Sequence[list[str] | None]) -> None:
    """Raise the first of these faults, whichever rank it is of."""
    for fault in faults:
        if fault is not None:
            raise _KINDS.get(fault[0], NestpipeError)(fault[1])


def manifest_of(
    state: RunState,
    model: nn.Module,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    mesh: Mesh,
) -> Manifest:
    """What a checkpoint says of itself, before its files are there."""
    return Manifest(
        step=state.step,
        epoch=state.epoch,
        position=state.position,
        samples=state.samples,
        cursor=dict(state.cursor),
        data=state.data,
        optimizer=state.optimizer,
        dense_optimizer=state.dense_optimizer,
        ranks=mesh.world.size,
        shards=mesh.shards.size,
        tables=tuple(_about_tables(groups)),
        model=dict(state.model) or describe_model(model),
        first_rows=_about_first_rows(groups, stores),
        config=dict(state.config),
        metrics=finite(state.metrics),
        lifecycle=dict(state.lifecycle),
        choices=tuple(dict(one) for one in state.choices),
        created=time.time(),
    )


def _about_tables(groups: Sequence[TableGroup]) -> list[dict[str, Any]]:
    return [
        {
            "name": table.name,
            "dim": table.dim,
            "dtype": table.dtype,
            "number": number,
            "owner": owner,
            "features": table.feature_names,
            "pooling": table.pooling,
        }
        for group in groups
        for number, (table, owner) in enumerate(zip(group.tables, group.table_owners, strict=True))
    ]


def _declared(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What must be the same to load a checkpoint, by name; who owns a table may change."""
    found = [{key: table.get(key) for key in ("name", "dim", "dtype")} for table in tables]
    return sorted(found, key=lambda table: str(table["name"]))


def _table_difference(
    where: str, saved: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]
) -> str:
    """The first table that a checkpoint has otherwise than the model."""
    then, now = ({str(t["name"]): t for t in tables} for tables in (saved, wanted))
    for name in sorted({*then, *now}):
        if name not in now:
            return f"{where!r} has a table {name!r}, and the model has none of that name"
        if name not in then:
            return f"{where!r} has no table {name!r}, which the model has"
        for key, what in (("dim", "rows of width"), ("dtype", "weights of type")):
            if then[name][key] != now[name][key]:
                return (
                    f"table {name!r} of {where!r} has {what} {then[name][key]}, and that of the "
                    f"model {now[name][key]}"
                )
    return f"the tables of {where!r} are others than those of the model"


def state_misfit(error: RuntimeError) -> str:
    """The first thing that torch says of a `state_dict` that does not fit."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next((line for line in lines[1:] if line), lines[0]).rstrip(". ")


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What serving needs to know to make a shipped model; empty where it cannot be served."""
    if isinstance(model, HstuRanker):
        return {"kind": "ranker", "config": asdict(model.config)}
    if isinstance(model, Dlrm):
        return {"kind": "dlrm", "config": asdict(model.config)}
    if isinstance(model, LogisticRegression):
        inputs = model.linear.in_features if model.linear is not None else 0
        return {
            "kind": "logistic",
            "config": {
                "features": model.features,
                "dense_features": inputs,
                **({"weights": model.weights} if model.weights else {}),
            },
        }
    return {}


def _about_first_rows(
    groups: Sequence[TableGroup], stores: Sequence[RowStore]
) -> dict[str, dict[str, float]]:
    """From what the first values of a table's rows follow: those of keys never seen."""
    return {
        table.name: {"seed": store.layout.table_seeds[n], "std": store.layout.init_stds[n]}
        for group, store in zip(groups, stores, strict=True)
        for n, table in enumerate(group.tables)
    }


def _save_rows(
    folder: Path,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    shard: int,
    lifecycle: Lifecycle | None,
) -> dict[str, FileEntry]:
    entries: dict[str, FileEntry] = {}
    for g, (group, store) in enumerate(zip(groups, stores, strict=True)):
        exported = store.export(rows_in_part(store.layout.width))
        for number, parts in groupby(exported, key=lambda part: part[0]):
            blocks = (
                RowChange(keys, rows, known_uses(lifecycle, g, n, keys), 0)
                for n, keys, rows in parts
            )
            entries |= write_rows(folder, group.tables[number].name, shard, blocks)
    return entries


def known_uses(lifecycle: Lifecycle | None, g: int, number: int, keys_K: Tensor) -> Tensor | None:
    """(K, 2) last use and count of keys with a row, where their table has a policy."""
    policy = lifecycle.of_groups[g] if lifecycle is not None else None
    if policy is None or not policy.group.tables[number].has_lifecycle:
        return None
    return policy.ledger.read(keys_K, policy.ledger.only(number, keys_K))


def known_keys(lifecycle: Lifecycle | None) -> dict[str, KnownUses]:
    """What is known of the keys of each table with a policy."""
    return {
        table.name: known
        for policy in lifecycle or ()
        for table, known in zip(policy.group.tables, policy.ledger.snapshot(), strict=True)
        if table.has_lifecycle
    }


def write_waiting(
    partial: Path, known: Mapping[str, KnownUses], shard: int
) -> dict[str, FileEntry]:
    """Files of the keys that wait for a row."""
    entries: dict[str, FileEntry] = {}
    for table, of in known.items():
        tensors = {"keys": of.waiting, "uses": of.waiting_uses}
        entries |= write_keys(partial, table, shard, "waiting", tensors)
    return entries


def dense_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True
) -> dict[str, Tensor]:
    """Dense weights and optimizer state by name, on the host.

    All ranks ask, as what is sharded is gathered, one tensor at a time; who does not `keep` them
    gets none.
    """
    every = ((name, whole(tensor)) for name, tensor in _named_dense(model, optimizer))
    return {name: tensor.cpu().contiguous().clone() for name, tensor in every if keep}


def _named_dense(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """By name: after a load, ranks may have states in other orders."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, parameter in enumerate(_in_order(optimizer, model)):
        for name, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    return [(name, found[name].detach()) for name in sorted(found)]


@dataclass(frozen=True, slots=True)
class HeldDense:
    """Copies of dense weights and optimizer state: on the host, or on the device in few pieces."""

    host: Mapping[str, Tensor]
    pieces: Mapping[torch.dtype, Tensor]
    """The numbers of each type that are on the device, one tensor behind the other."""
    places: Mapping[str, tuple[torch.dtype, int, torch.Size]]
    """The piece of a tensor there, where it begins, and its shape."""

    def on_host(self, fetch: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """All by name, on the host, where `fetch` brings a piece."""
        here = {dtype: fetch(piece) for dtype, piece in self.pieces.items()}
        came = {
            name: here[dtype][begin:][: shape.numel()].view(shape)
            for name, (dtype, begin, shape) in self.places.items()
        }
        return dict(sorted({**self.host, **came}.items()))


def hold_dense(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool, on_device: bool
) -> HeldDense:
    """What `dense_tensors` gives, once it is on the host; all ranks ask.

    `on_device`: copy there what is on a device, so that nobody waits for it. What is sharded goes
    to the host, one tensor at a time, and so does all of it where memory is short.
    """
    named = _named_dense(model, optimizer)
    stay = [t for _, t in named if keep and on_device and _is_on_device(t)]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stay)
    if not stay or num_bytes > SNAPSHOT_SHARE * memory_left(stay[0].device):
        return HeldDense(dense_tensors(model, optimizer, keep=keep), {}, {})
    host: dict[str, Tensor] = {}
    places: dict[str, tuple[torch.dtype, int, torch.Size]] = {}
    ends = dict.fromkeys((tensor.dtype for tensor in stay), 0)
    for name, tensor in named:
        if _is_on_device(tensor):
            places[name] = tensor.dtype, ends[tensor.dtype], tensor.shape
            ends[tensor.dtype] += tensor.numel()
        else:
            host[name] = whole(tensor).cpu().contiguous().clone()
    pieces = {
        dtype: torch.cat([tensor.reshape(-1) for tensor in stay if tensor.dtype == dtype])
        for dtype in ends
    }
    return HeldDense(host, pieces, places)


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda and not is_sharded(tensor)


# Loading


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    dense_optimizer: torch.optim.Optimizer | None,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    mesh: Mesh,
    optimizer_name: str,
    dense_name: str = "",
    lifecycle: Lifecycle | None = None,
) -> RunState:
    """Fill model and stores from a checkpoint that any number of ranks wrote.

    All ranks load it or none does; a trainer whose load failed is not to be used.
    """
    loaded: list[Checkpoint] = []

    def do() -> None:
        opened = open_noted(checkpoint, tell=mesh.world.rank == 0)
        _refuse_misfits(opened, groups, optimizer_name, dense_name)
        _load_dense(opened, opened.dense(), model, dense_optimizer)
        policies = lifecycle.of_groups if lifecycle is not None else [None] * len(groups)
        for group, store, policy in zip(groups, stores, policies, strict=True):
            _load_rows(opened, group, store, mesh.shards, policy)
        loaded.append(opened)

    raise_everywhere(mesh.world, do)
    _refuse_missing_rows(loaded[0], groups, stores, mesh.shards)
    return _state_of(loaded[0].manifest)


def _refuse_missing_rows(
    checkpoint: Checkpoint,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    shards: Communicator,
) -> None:
    """All ranks together must have the rows that the checkpoint has, of every table."""
    mine = [count for store in stores for count in store.num_rows()]
    everywhere = cast("list[list[int]]", shards.all_gather_values(mine))
    names = [table.name for group in groups for table in group.tables]
    loaded = {name: sum(of) for name, *of in zip(names, *everywhere, strict=True)}
    for table in checkpoint.manifest.tables:
        if "rows" in table and loaded[table["name"]] < int(table["rows"]):
            raise CheckpointError(
                f"{str(checkpoint.path)!r} has {table['rows']} rows of {table['name']}, but "
                f"{loaded[table['name']]} were loaded; use another checkpoint"
            )


def _state_of(manifest: Manifest) -> RunState:
    return RunState(
        step=manifest.step,
        epoch=manifest.epoch,
        position=manifest.position,
        samples=manifest.samples,
        cursor=manifest.cursor,
        data=manifest.data,
        optimizer=manifest.optimizer,
        dense_optimizer=manifest.dense_optimizer,
        config=manifest.config,
        metrics=manifest.metrics,
        lifecycle=manifest.lifecycle,
        choices=manifest.choices,
    )


def _refuse_misfits(
    checkpoint: Checkpoint, groups: Sequence[TableGroup], optimizer: str, dense: str
) -> None:
    manifest, where = checkpoint.manifest, str(checkpoint.path)
    saved, wanted = _declared(manifest.tables), _declared(_about_tables(groups))
    if saved != wanted:
        raise MisfitError(
            f"{_table_difference(where, saved, wanted)}; use the config and the data that it was "
            "trained with, or another folder"
        )
    if manifest.optimizer != optimizer:
        raise MisfitError(
            f"the rows of {where!r} carry the state of {manifest.optimizer!r}, not of "
            f"{optimizer!r}; use that row optimizer"
        )
    if dense and manifest.dense_optimizer not in ("", dense):
        raise MisfitError(
            f"{where!r} carries the state of the dense optimizer {manifest.dense_optimizer!r}, not "
            f"of {dense!r}; use that one"
        )


def _load_dense(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    held = model.state_dict()
    weights = {k: sharded_as(v, held[k]) if k in held else v for k, v in weights.items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise MisfitError(
            f"the model of {str(checkpoint.path)!r} does not fit ({state_misfit(error)}); use the "
            "same model settings"
        ) from None
    if optimizer is None:
        return
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            entries.setdefault(int(index), {})[name] = value
    for index, parameter in enumerate(_in_order(optimizer, model)):
        of = entries.get(index, {})
        of.update({name: sharded_as(value, parameter) for name, value in of.items()})
    # torch numbers parameters group by group.
    order = {parameter: index for index, parameter in enumerate(_in_order(optimizer, model))}
    numbered = [order[p] for group in optimizer.param_groups for p in group["params"]]
    state = {new: entries[old] for new, old in enumerate(numbered) if old in entries}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _in_order(optimizer: torch.optim.Optimizer, model: nn.Module) -> Sequence[Tensor]:
    """The parameters in the order of the model, however they are grouped by rate."""
    known = {p: None for group in optimizer.param_groups for p in group["params"]}
    mine = [p for p in model.parameters() if p in known]
    return mine or list(known)  # a model may have none; the optimizer still has an empty one


def _load_rows(
    checkpoint: Checkpoint,
    group: TableGroup,
    store: RowStore,
    comm: Communicator,
    policy: RowLifecycle | None,
) -> None:
    """Insert the rows that this rank owns, and what is known of their keys.

    Where as many ranks wrote the checkpoint as load it, a rank's rows are all in its own files.
    """
    for number, table in enumerate(group.tables):
        owner = group.table_owners[number]
        own = wrote_alike(checkpoint, group, number, comm.size)
        shard = comm.rank if own else None
        ledger = policy.ledger if policy is not None and table.has_lifecycle else None
        for change in checkpoint.changes(table.name, shard):
            _refuse_odd_rows(checkpoint, table.name, change, store.layout.width)
            mine = owner_of(change.keys, number, comm.size, owner) == comm.rank
            _apply(cut(change, mine), store, ledger, number)
        for keys, uses in checkpoint.waiting(table.name, shard) if ledger is not None else ():
            mine = owner_of(keys, number, comm.size, owner) == comm.rank
            assert ledger is not None
            ledger.write(keys[mine], ledger.only(number, keys[mine]), uses[mine], waiting=True)


def _apply(change: RowChange, store: RowStore, ledger: RowLedger | None, number: int) -> None:
    """Store rows, or erase them, and note their uses."""
    keys, counts = change.keys.contiguous(), [0] * store.layout.num_tables
    counts[number] = len(keys)
    if change.rows is None:
        store.erase(keys, counts)
        if ledger is not None:
            ledger.erase(number, keys)
    else:
        store.scatter(keys, counts, change.rows.contiguous())
        if ledger is not None:
            ledger.write(keys, counts, uses_of(change))


def _refuse_odd_rows(checkpoint: Checkpoint, table: str, change: RowChange, width: int) -> None:
    rows, uses = change.rows, change.uses
    if rows is None:
        return
    if rows.dtype != torch.float32 or rows.shape[1:] != (width,):
        raise disk.damaged(checkpoint.path, f"rows of {table} have another shape")
    if uses is not None and (uses.dtype != torch.int32 or uses.shape[1:] != (2,)):
        raise disk.damaged(checkpoint.path, f"uses of {table} have another shape")
    if is_old(checkpoint.manifest):
        disk.refuse_non_finite(rows, f"a file of {str(checkpoint.path)!r}")


def put_rows(
    group: TableGroup,
    number: int,
    store: RowStore,
    comm: Communicator,
    keys_K: Tensor,
    weights_KD: Tensor,
    state_KS: Tensor | None,
) -> Tensor:
    """Insert rows of one table that came from elsewhere; each rank keeps the keys that it owns.

    Returns those keys.
    """
    layout, table = store.layout, group.tables[number].name
    if keys_K.dtype != torch.int64 or keys_K.ndim != 1 or len(keys_K.unique()) != len(keys_K):
        raise ConfigError(f"the keys of {table!r} are not int64 in one dimension, each once")
    if not bool(torch.isfinite(weights_KD).all()):
        raise ConfigError(f"the weights of {table!r} hold NaN or inf; leave such rows out")
    if weights_KD.shape != (len(keys_K), layout.dim):
        raise ConfigError(
            f"the weights of {table!r} have shape {tuple(weights_KD.shape)}; give "
            f"{len(keys_K)} rows of dim {layout.dim}"
        )
    if state_KS is not None and state_KS.shape != (len(keys_K), layout.state_dim):
        raise ConfigError(
            f"the state of {table!r} has shape {tuple(state_KS.shape)}, but this row optimizer "
            f"keeps {layout.state_dim} numbers a row; use the optimizer it was exported with, or "
            "import weights alone"
        )
    if layout.dtype == "float16" and bool((weights_KD.abs() >= FLOAT16_INF).any()):
        raise ConfigError(
            f"the weights of {table!r} reach {float(weights_KD.abs().max()):g}, but its dtype, "
            "float16, ends at 65,504; let the table be bfloat16 or float32"
        )
    if state_KS is None:
        state_KS = torch.full((len(keys_K), layout.state_dim), layout.state_init)
    mine = owner_of(keys_K, number, comm.size, group.table_owners[number]) == comm.rank
    counts = [0] * len(group.tables)
    counts[number] = int(mine.sum())
    rows_KW = torch.cat([weights_KD.float(), state_KS.float()], 1)
    store.scatter(keys_K[mine].contiguous(), counts, rows_KW[mine].contiguous())
    return keys_K[mine].contiguous()


def wrote_alike(checkpoint: Checkpoint, group: TableGroup, number: int, shards: int) -> bool:
    """Whether those who wrote a table owned its keys as those who load it do.

    That follows from its number among the tables of its group, too; manifests of before do not say.
    """
    mine = (group.tables[number].name, group.table_owners[number], number)
    return all(
        one.manifest.shards == shards
        and mine in [(t["name"], t.get("owner"), t.get("number")) for t in one.manifest.tables]
        for one in checkpoint.chain
    )
