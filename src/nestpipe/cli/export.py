"""`nestpipe export` and `nestpipe import`: weights for other programs, and from them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nestpipe.cli.checkpoint import CheckpointPath, newest_in
from nestpipe.cli.options import Settings, console, quieten, read_job
from nestpipe.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from nestpipe.train.trainer import Trainer


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
    """Make a checkpoint of weights from elsewhere, to train on, evaluate or serve.

    Tables that the folder does not have begin empty. Rows without optimizer state begin with a
    fresh one.

    Example: nestpipe import weights runs/warm config.toml
    """
    from nestpipe.checkpoint.export import exported_tables

    found = exported_tables(folder)
    job_config = read_job(config, settings, checkpoint=None if onto is None else str(onto))
    quieten()
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

    weights = exported_dense(folder)
    if weights is None:
        return
    try:
        trainer.model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the dense weights of '{folder}' do not fit the model ({reason}); use the config that "
            "they were trained with, or --no-dense"
        ) from None
