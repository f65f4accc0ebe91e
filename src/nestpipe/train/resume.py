"""Going on from a checkpoint: exactly, or not at all.

A checkpoint holds the config of its run. A setting that changes results must be the same, unless
the user overrides it; what changes only speed, or only the order of sums, may change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from nestpipe.checkpoint.contents import flat
from nestpipe.checkpoint.folder import candidates, first_good, open_checkpoint, open_noted
from nestpipe.checkpoint.manifest import Manifest
from nestpipe.comm import Communicator
from nestpipe.config import build
from nestpipe.errors import CheckpointError, ConfigError, NestpipeError
from nestpipe.train.checkpoint import gathered_from_first, raise_everywhere
from nestpipe.train.job import Job, JobConfig, make_job

log = logging.getLogger("nestpipe.train")

AUTO = "auto"
"""For `--resume`: go on from the run's own folder where it has a checkpoint, else begin."""
Effect = Literal["none", "sums", "results"]

_RESULTS: Mapping[str, frozenset[str]] = {
    "run": frozenset({"batch", "seed"}),
    "pipeline": frozenset({"comm_dtype"}),
    "parallel": frozenset({"merge", "merge_every"}),
}
"""Keys that change results, of sections whose other keys do not; of other sections all do."""
_SUMS: Mapping[str, frozenset[str]] = {
    "run": frozenset({"device"}),
    "pipeline": frozenset({"micro_batches", "micro_batching", "first", "last", "exchange"}),
    "parallel": frozenset({"groups"}),
}
"""Keys that change only the order of sums."""
_HELD_OUT = frozenset({"data.validation_path", "data.test_path"})
"""Keys of what is evaluated, not trained on."""


def effect_of(key: str) -> Effect:
    """What a changed setting changes."""
    section, _, name = key.partition(".")
    if key in _HELD_OUT:
        return "none"
    if section not in _RESULTS or name in _RESULTS[section]:
        return "results"
    return "sums" if name in _SUMS[section] else "none"


def saved_config(manifest: Manifest, where: Path) -> JobConfig | None:
    """The config that a checkpoint was trained with; None where it has none."""
    if not manifest.config:
        return None
    try:
        return build(JobConfig, manifest.config)
    except ConfigError as error:
        raise CheckpointError(
            f"the config in {str(where)!r} does not fit this program ({error}); use the one that "
            "wrote it"
        ) from None


def config_in(path: str) -> Mapping[str, Any]:
    """The config of the newest checkpoint of a path that opens; empty where there is none."""

    def read(found: Path) -> Mapping[str, Any]:
        return open_checkpoint(found).manifest.config

    return first_good(candidates(Path(path)), read, tell=False) or {}


def changes(config: JobConfig, saved: JobConfig) -> dict[str, tuple[object, object]]:
    """Settings that differ, by their full name: what they were, what they are."""
    now, then = flat(asdict(config)), flat(asdict(saved))
    return {key: (then[key], now[key]) for key in now if now[key] != then[key]}


def refuse_changes(config: JobConfig, manifest: Manifest, where: Path, *, override: bool) -> None:
    """Refuse settings that would change results, or say which do where they are overridden."""
    saved = saved_config(manifest, where)
    if saved is None:
        return
    found = changes(config, saved)
    results = {key: both for key, both in found.items() if effect_of(key) == "results"}
    if results and not override:
        told = ", ".join(
            f"{key} is {now!r} and was {then!r}" for key, (then, now) in results.items()
        )
        raise ConfigError(
            f"{told} in {where.name}; results would differ, so set what it was, or add --override"
        )
    for key, (then, now) in found.items():
        if effect_of(key) != "none":
            changed = "results" if key in results else "only the order of sums"
            log.warning("%s is %r instead of %r, which changes %s", key, now, then, changed)


def prepare(
    config: JobConfig,
    comm: Communicator,
    checkpoint: str | None = None,
    *,
    exact: bool = True,
    override: bool = False,
) -> Job:
    """The job of a config, on from a checkpoint or the newest good one of a folder, if given.

    `auto` means the run's own folder, and a fresh start where it has no checkpoint. `exact`
    refuses settings that would change results, unless they are overridden; to evaluate, any do.
    """
    if checkpoint == AUTO and not config.run.checkpoint:
        raise ConfigError(
            "--resume is 'auto' but run.checkpoint is empty; name the folder of the run there"
        )
    if checkpoint is None:
        return make_job(config, comm)
    folder = Path(config.run.checkpoint if checkpoint == AUTO else checkpoint)

    def load(found: Path) -> Job:
        def check() -> None:
            manifest = open_noted(found, tell=comm.rank == 0).manifest
            if exact and comm.rank == 0:
                refuse_changes(config, manifest, found, override=override)

        raise_everywhere(comm, check)
        # A load that fails halfway leaves rows behind: each attempt has a trainer of its own.
        job = make_job(config, comm)
        try:
            job.trainer.load(found)
        except NestpipeError:
            job.trainer.close()
            raise
        return job

    # All ranks try the same ones in the same order, also where one sees a folder late.
    paths = gathered_from_first(comm, [str(path) for path in candidates(folder)])
    job = first_good([Path(path) for path in paths], load, tell=comm.rank == 0)
    if job is None and checkpoint == AUTO:
        return make_job(config, comm)
    if job is None:
        raise CheckpointError(
            f"there is no checkpoint in {checkpoint!r}; check its name, or begin without --resume"
        )
    return job
