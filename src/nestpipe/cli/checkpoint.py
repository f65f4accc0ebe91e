"""`nestpipe checkpoint`, `export` and `import`: checkpoints shown, kept, compared, converted."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nestpipe.cli.options import (
    STDOUT,
    JsonFile,
    Settings,
    console,
    figures_table,
    ignore_torch_warnings,
    read_job,
    write_json,
)
from nestpipe.errors import CheckpointError, ConfigError, UnjudgedError

if TYPE_CHECKING:
    from nestpipe.checkpoint.folder import Checkpoint
    from nestpipe.train.trainer import Trainer

checkpoint_app = typer.Typer(
    help="Look at checkpoints, verify, prune, compare and export them.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

FolderPath = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.")]
CheckpointPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder: its newest good one.")
]


@checkpoint_app.command("ls")
def list_checkpoints(folder: FolderPath, json: JsonFile = None) -> None:
    """List the checkpoints of a folder; files are compared by size, not read.

    Example: nestpipe checkpoint ls runs/today
    """
    from nestpipe.checkpoint.folder import candidates, open_checkpoint

    found: list[dict[str, Any]] = []
    for path in _some(candidates(folder)[::-1], folder):
        try:
            found.append(_facts(open_checkpoint(path)))
        except CheckpointError as error:
            kind = "unknown" if isinstance(error, UnjudgedError) else "damaged"
            found.append({"name": path.name, "kind": kind, "damage": str(error)})
    if json is not None:
        write_json(json, found)
    if json == STDOUT:
        return
    columns = ("kind", "epoch", "rows", "MB", "ranks", "written")
    table = figures_table(str(folder), "", "checkpoint", columns)
    for facts in found:
        cells = [facts["kind"], *[""] * 5] if "damage" in facts else _cells(facts)
        table.add_row(facts["name"], *cells)
    console().print(table)
    for facts in found:
        if "damage" in facts:
            console().print(facts["damage"], markup=False, soft_wrap=True)


@checkpoint_app.command()
def show(path: CheckpointPath, json: JsonFile = None) -> None:
    """Show what a checkpoint says of itself: progress, tables, metrics and config.

    Example: nestpipe checkpoint show runs/today/step-00001000
    """
    from nestpipe.checkpoint.folder import flat

    checkpoint = newest_in(path)
    facts = _facts(checkpoint)
    if json is not None:
        write_json(json, {**facts, "config": checkpoint.manifest.config})
    if json == STDOUT:
        return
    facts["created"] = datetime.fromtimestamp(facts["created"]).isoformat(" ", "seconds")
    named = {str(table.pop("name")): table for table in map(dict, facts.pop("tables"))}
    shown = {**facts, **flat({"tables": named, "metrics": facts.pop("metrics")})}
    for name, value in {**shown, **flat(checkpoint.manifest.config)}.items():
        console().print(f"{name} = {value}", markup=False, soft_wrap=True)


@checkpoint_app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a folder: all of them.")],
    json: JsonFile = None,
) -> None:
    """Read every file and compare it with its hash; exit status 1 where one is damaged.

    Example: nestpipe checkpoint verify runs/today
    """
    from nestpipe.checkpoint.folder import candidates, verified

    found: dict[str, str | None] = {}
    began, num_bytes = time.monotonic(), 0
    for each in _some(candidates(path), path):
        try:
            num_bytes += verified(each).manifest.num_bytes
            found[each.name] = None
        except CheckpointError as error:
            found[each.name] = str(error)
    if json is not None:
        write_json(json, found)
    if json != STDOUT:
        for name, damage in sorted(found.items()):
            console().print(f"{name}: {damage or 'good'}", markup=False, soft_wrap=True)
        seconds = time.monotonic() - began
        console().print(f"{num_bytes / 1e6:,.0f} MB good, read in {seconds:.1f} s", markup=False)
    if any(found.values()):
        raise typer.Exit(1)


@checkpoint_app.command()
def prune(
    folder: FolderPath,
    keep_last: Annotated[int, typer.Option(min=0, help="Keep the newest N.")] = 0,
    keep_hours: Annotated[float, typer.Option(min=0, help="Keep those not older.")] = 0.0,
    keep_best: Annotated[str, typer.Option(help="Keep the best by this metric.")] = "",
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Remove those that do not verify, and only those.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
) -> None:
    """Remove checkpoints that no rule keeps; the newest good one and parents always stay.

    Example: nestpipe checkpoint prune runs/today --keep-last 3 --keep-best auc
    """
    from nestpipe.checkpoint import disk
    from nestpipe.checkpoint.folder import Retention, is_checkpoint, outdated, paths_in, verified

    rules = Retention(last=keep_last, hours=keep_hours, best=keep_best)
    rule = damaged or keep_last or keep_hours
    if is_checkpoint(folder):
        raise CheckpointError(f"'{folder}' is a checkpoint; name the folder that it is in")
    _some(paths_in(folder), folder)
    _refuse_metric(keep_best, folder)
    with disk.locked(folder), disk.explained(f"to {str(folder)!r}"):
        gone: list[Path] = []
        if damaged:
            gone = [path for path in paths_in(folder) if _is_damaged(path, verified)]
        elif rule:
            # A damaged checkpoint must not cause good ones to be removed.
            last = newest_in(folder).manifest.step
            gone = outdated(folder, rules, time.time(), last=last)
        for path in gone if not dry_run else ():
            disk.remove_folder(path)
    for path in gone:
        verb = "would remove" if dry_run else "removed"
        console().print(f"{verb} {path.name}", markup=False)
    left = len(paths_in(folder))
    verb = "would be removed" if dry_run else "removed"
    line = f"{len(gone)} {verb}, {left} in the folder"
    console().print(line if rule else f"{line}: without --keep-last or --keep-hours all stay")


@checkpoint_app.command()
def diff(one: CheckpointPath, other: CheckpointPath, json: JsonFile = None) -> None:
    """Compare settings, dense tensors and rows; exit status 1 where a number differs.

    Example: nestpipe checkpoint diff runs/a runs/b
    """
    from nestpipe.checkpoint.merging import difference

    found = difference(newest_in(one), newest_in(other))
    if json is not None:
        write_json(json, {**asdict(found), "same_state": found.same_state})
    if json != STDOUT:
        for name, (ours, theirs) in found.settings.items():
            console().print(f"{name}: {ours} and {theirs}", markup=False, soft_wrap=True)
        for name, most in found.tensors.items():
            line = most if isinstance(most, str) else f"differs by at most {most:.3g}"
            console().print(f"{name}: {line}", markup=False)
        for name, of in found.rows.items():
            console().print(
                f"{name}: {of.changed:,} of {of.common:,} common rows differ; "
                f"{of.only_first:,} and {of.only_second:,} are in one only"
                + (f"; {of.other_uses:,} keys have other uses" if of.other_uses else ""),
                markup=False,
                soft_wrap=True,
            )
        console().print("the same bits" if found.same_state else "different", markup=False)
    if not found.same_state:
        raise typer.Exit(1)


@checkpoint_app.command("export")
def export_plain(
    path: CheckpointPath,
    folder: Annotated[Path, typer.Argument(help="A new folder for the files.")],
) -> None:
    """Write weights as plain safetensors: the same as `nestpipe export`.

    Example: nestpipe checkpoint export runs/today weights
    """
    from nestpipe.checkpoint.export import export as write

    for file in write(newest_in(path), folder):
        console().print(str(file), markup=False, soft_wrap=True)


@checkpoint_app.command()
def compact(path: CheckpointPath) -> None:
    """Rewrite an increment as a full checkpoint, in its place; its parents may be deleted then.

    Example: nestpipe checkpoint compact runs/today/step-00001000
    """
    from nestpipe.checkpoint import merging as checkpoints

    checkpoint = newest_in(path)
    checkpoints.compact(checkpoint.path)
    console().print(f"{checkpoint.name} is full", markup=False)


def newest_in(path: Path) -> Checkpoint:
    """A checkpoint, or the newest of a folder that verifies."""
    from nestpipe.checkpoint.folder import newest

    found = newest(path)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in '{path}'; check its name")
    return found


def _some(paths: list[Path], folder: Path) -> list[Path]:
    if not paths:
        raise CheckpointError(f"there is no checkpoint in '{folder}'; check its name")
    return paths


def _refuse_metric(metric: str, folder: Path) -> None:
    """A misspelt metric would keep nothing."""
    from nestpipe.checkpoint.folder import readable

    known = {name for one in readable(folder) for name in one.manifest.metrics}
    if metric and metric not in known:
        known_ones = f"they have {', '.join(sorted(known))}" if known else "none was evaluated"
        raise ConfigError(f"no checkpoint of '{folder}' has the metric {metric!r}; {known_ones}")


def _is_damaged(path: Path, verified: Any) -> bool:
    try:
        verified(path)
    except UnjudgedError as error:
        console().print(f"kept {path.name}: {error}", markup=False, soft_wrap=True)
    except CheckpointError:
        return True
    return False


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "name": checkpoint.name,
        "kind": "increment" if checkpoint.parents else "full",
        "parents": [one.name for one in checkpoint.parents],
        "step": manifest.step,
        "epoch": manifest.epoch,
        "samples": manifest.samples,
        "cursor": manifest.cursor,
        "rows": manifest.num_rows,
        "erased": _keys_of(checkpoint, "gone"),
        "waiting": _keys_of(checkpoint, "waiting"),
        "bytes": manifest.num_bytes,
        "ranks": manifest.ranks,
        "optimizer": manifest.optimizer,
        "dense_optimizer": manifest.dense_optimizer,
        "tables": list(manifest.tables),
        "metrics": manifest.metrics,
        "lifecycle": manifest.lifecycle,
        "created": manifest.created,
    }


def _keys_of(checkpoint: Checkpoint, kind: str) -> int:
    """Keys in files of that kind: erased since the parent, or waiting for a row."""
    from nestpipe.checkpoint.folder import kind_of

    files = checkpoint.manifest.files
    return sum(entry.rows for name, entry in files.items() if kind_of(name) == kind)


def _cells(facts: dict[str, Any]) -> list[str]:
    written = datetime.fromtimestamp(facts["created"]).strftime("%Y-%m-%d %H:%M:%S")
    size = f"{facts['bytes'] / 1e6:,.1f}"
    return [
        facts["kind"],
        str(facts["epoch"]),
        f"{facts['rows']:,}",
        size,
        str(facts["ranks"]),
        written,
    ]


def export(
    path: CheckpointPath,
    folder: Annotated[Path, typer.Argument(help="A new folder for the files.")],
    form: Annotated[
        Literal["safetensors", "npy", "parquet"],
        typer.Option("--format", help="Files of rows; dense weights are always safetensors."),
    ] = "safetensors",
    table: Annotated[
        list[str] | None, typer.Option(help="A table; may be repeated. Left out: all.")
    ] = None,
    state: Annotated[
        bool, typer.Option("--state", help="Write the optimizer state of rows, too.")
    ] = False,
    dense: Annotated[bool, typer.Option(help="Write dense weights.")] = True,
) -> None:
    """Write weights for other programs: keys and rows of each table, and dense weights.

    Keys ascend. Rows are moved part by part, so a table may be larger than memory.

    Example: nestpipe export runs/today weights

    Example: nestpipe export runs/today vectors --format npy --table items --no-dense
    """
    from nestpipe.checkpoint.export import export as write

    files = write(newest_in(path), folder, form, tables=table or (), state=state, dense=dense)
    for file in files:
        console().print(str(file), markup=False, soft_wrap=True)


def import_weights(
    folder: Annotated[Path, typer.Argument(help="A folder of `nestpipe export`, or like one.")],
    runs: Annotated[Path, typer.Argument(help="Where to write a checkpoint to go on from.")],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="TOML file of the job that will go on."),
    ] = None,
    settings: Settings = None,
    onto: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A checkpoint whose other rows and weights stay."),
    ] = None,
    dense: Annotated[bool, typer.Option(help="Read dense weights, where there are some.")] = True,
) -> None:
    """Make a checkpoint from weights of another program, to train on, evaluate or serve.

    Tables that the folder does not have begin empty. Rows without optimizer state begin with a
    fresh one.

    Example: nestpipe import weights runs/warm config.toml
    """
    from nestpipe.checkpoint.export import exported_tables

    found = exported_tables(folder)
    job_config = read_job(config, settings, checkpoint=None if onto is None else str(onto))
    ignore_torch_warnings()
    from nestpipe.comm import LocalCommunicator
    from nestpipe.train.job import prepare

    if any(runs.glob("step-*")):
        raise CheckpointError(f"'{runs}' already holds checkpoints; name another folder")
    at = None if onto is None else str(onto)
    job = prepare(job_config, LocalCommunicator(), at, exact=False)
    if odd := sorted(set(found) - set(job.trainer.table_names)):
        raise ConfigError(
            f"the model has no table {odd[0]!r}, which '{folder}' has; its tables are "
            f"{', '.join(job.trainer.table_names)}"
        )
    if dense:
        _load_dense(job.trainer, folder)
    for table, count in _put_rows(job.trainer, folder).items():
        console().print(f"{table}: {count:,} rows", markup=False)
    written = job.trainer.save(runs, config=asdict(job.config))
    console().print(f"checkpoint: {written}", markup=False, soft_wrap=True)
    job.trainer.close()


def _put_rows(trainer: Trainer, folder: Path) -> dict[str, int]:
    from nestpipe.checkpoint.export import exported_rows, exported_tables

    counts: dict[str, int] = {}
    for table, form in exported_tables(folder).items():
        counts[table] = 0
        for part in exported_rows(folder, table, form):
            trainer.put_rows(table, part.keys_N, part.weights_ND, part.state_NS)
            counts[table] += len(part.keys_N)
    return counts


def _load_dense(trainer: Trainer, folder: Path) -> None:
    from nestpipe.checkpoint.export import exported_dense
    from nestpipe.train.checkpoint import state_misfit

    weights = exported_dense(folder)
    if weights is None:
        return
    try:
        trainer.model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(
            f"the dense weights of '{folder}' do not fit the model ({state_misfit(error)}); use "
            "the config that they were trained with, or --no-dense"
        ) from None
