"""Checkpoints: everything a run needs to go on, written atomically, loaded without unpickling.

A checkpoint is a folder `step-00000123` with `run.json`, `dense.safetensors` and, for each rank
that wrote it, its shard as `rows-<table>-<rank>-<part>.safetensors` (keys, and rows with
their state). Any number of ranks can load it: each keeps the keys that it owns.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nestpipe.comm.communicator import Communicator
from nestpipe.comm.mesh import Mesh
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.embedding.table_groups import TableGroup
from nestpipe.errors import CheckpointError
from nestpipe.models import HstuRanker

FORMAT = 1
PART_ROWS = 1 << 20
"""Rows of one file at most, so that loading needs little memory."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands, besides its weights."""

    step: int
    """Batches trained."""
    epoch: int
    position: int
    """Global batches of the epoch already trained."""
    optimizer: str
    """The row optimizer, whose state the rows carry."""


def save_checkpoint(
    folder: Path,
    state: RunState,
    model: nn.Module,
    dense_optimizer: torch.optim.Optimizer,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    mesh: Mesh,
) -> Path:
    """Write a checkpoint; it has its name only once every rank has written all of it."""
    comm = mesh.world
    target = folder / f"step-{state.step:08d}"
    partial = folder / f".{target.name}.partial"
    try:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        comm.barrier()
        if mesh.group == 0:  # the others have the same
            _save_rows(partial, groups, stores, mesh.shards.rank)
        if comm.rank == 0:
            save_file(_dense_tensors(model, dense_optimizer), partial / "dense.safetensors")
            about = {
                "format": FORMAT,
                "tables": _about_tables(groups),
                **asdict(state),
                **_about_model(model),
                "first_rows": _about_first_rows(groups, stores),
            }
            (partial / "run.json").write_text(json.dumps(about, indent=1))
        comm.barrier()
        if comm.rank == 0:
            _publish(partial, target)
        comm.barrier()
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {str(target)!r}: {error.strerror}; free space or choose "
            "another folder"
        ) from None
    return target


def _publish(partial: Path, target: Path) -> None:
    for file in partial.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def _about_tables(groups: Sequence[TableGroup]) -> list[dict[str, object]]:
    return [
        {"name": table.name, "dim": table.dim, "dtype": table.dtype}
        for group in groups
        for table in group.tables
    ]


def _about_model(model: nn.Module) -> dict[str, object]:
    """What serving needs to know to make the model; training has it from its config."""
    if not isinstance(model, HstuRanker):
        return {}
    return {"model": {"kind": "ranker", "config": asdict(model.config)}}


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
    folder: Path, groups: Sequence[TableGroup], stores: Sequence[RowStore], rank: int
) -> None:
    for group, store in zip(groups, stores, strict=True):
        for part, (number, keys, rows) in enumerate(store.export(PART_ROWS)):
            name = group.tables[number].name
            file = folder / f"rows-{name}-{rank:05d}-{part:05d}.safetensors"
            save_file({"keys": keys.contiguous(), "rows": rows.contiguous()}, file)


def _dense_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(value)
            tensors[f"optimizer.{index}.{name}"] = tensor.detach().cpu().contiguous().clone()
    return tensors


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder."""
    found = sorted(folder.glob("step-*")) if folder.is_dir() else []
    return found[-1] if found else None


def load_checkpoint(
    checkpoint: Path,
    model: nn.Module,
    dense_optimizer: torch.optim.Optimizer | None,
    groups: Sequence[TableGroup],
    stores: Sequence[RowStore],
    comm: Communicator,
    optimizer_name: str,
) -> RunState:
    """Fill model and stores from a checkpoint that any number of ranks wrote."""
    about = _read_about(checkpoint)
    _refuse_misfits(checkpoint, about, groups, optimizer_name)
    try:
        tensors = load_file(checkpoint / "dense.safetensors")
        _load_dense(checkpoint, tensors, model, dense_optimizer)
        for group, store in zip(groups, stores, strict=True):
            _load_rows(checkpoint, group, store, comm)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{str(checkpoint)!r} cannot be read ({error}); use another checkpoint"
        ) from None
    return RunState(
        step=int(about["step"]),
        epoch=int(about["epoch"]),
        position=int(about["position"]),
        optimizer=str(about["optimizer"]),
    )


def _read_about(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / "run.json"
    try:
        about = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{str(checkpoint)!r} is not a checkpoint: it has no run.json; name a folder `step-...`"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read ({error}); use another") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(checkpoint)!r} is not a checkpoint of format {FORMAT}; use the program that "
            "wrote it"
        )
    return about


def _refuse_misfits(
    checkpoint: Path, about: Mapping[str, Any], groups: Sequence[TableGroup], optimizer: str
) -> None:
    if about["tables"] != _about_tables(groups):
        raise CheckpointError(
            f"the tables of {str(checkpoint)!r} are {about['tables']}; declare the same ones"
        )
    if about["optimizer"] != optimizer:
        raise CheckpointError(
            f"the rows of {str(checkpoint)!r} carry the state of {about['optimizer']!r}, not of "
            f"{optimizer!r}; use that row optimizer"
        )


def _load_dense(
    checkpoint: Path,
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the model of {str(checkpoint)!r} does not fit ({reason}); use the same model settings"
        ) from None
    if optimizer is None:
        return
    state = optimizer.state_dict()
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            entries.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def _load_rows(checkpoint: Path, group: TableGroup, store: RowStore, comm: Communicator) -> None:
    for number, table in enumerate(group.tables):
        for file in sorted(checkpoint.glob(f"rows-{table.name}-*.safetensors")):
            part = load_file(file)
            keys, rows = part["keys"], part["rows"]
            mine = owner_of(keys, number, comm.size, group.table_owners[number]) == comm.rank
            counts = [0] * len(group.tables)
            counts[number] = int(mine.sum())
            store.scatter(keys[mine].contiguous(), counts, rows[mine].contiguous())
