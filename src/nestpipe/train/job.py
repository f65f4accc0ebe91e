"""A job: what a config file says, and the source, model and trainer made from it.

It begins afresh, or goes on from a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from nestpipe.checkpoint.folder import (
    Manifest,
    appearing,
    first_good,
    flat,
    open_checkpoint,
    open_noted,
)
from nestpipe.comm import Communicator
from nestpipe.config import Table, build
from nestpipe.data import (
    HISTORY,
    TIMESTAMPS,
    Catalogue,
    DataConfig,
    Ranking,
    RankingOptions,
    Source,
    Split,
    StreamingSource,
    data_digest,
    open_source,
)
from nestpipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingSplitError,
    NestpipeError,
)
from nestpipe.models import (
    Dlrm,
    DlrmConfig,
    EncoderOptions,
    HstuConfig,
    HstuRanker,
    HstuRetriever,
    LogisticRegression,
    SampledSoftmaxConfig,
    TargetRank,
)
from nestpipe.models.protocol import is_own, make_own
from nestpipe.train.checkpoint import describe_model, gathered_from_first, raise_everywhere
from nestpipe.train.config import JobConfig, ModelConfig, RunConfig
from nestpipe.train.trainer import Trainer

log = logging.getLogger("nestpipe.train")


@dataclass(frozen=True)
class Job:
    """A config, with the source and the trainer made from it on one rank."""

    config: JobConfig
    train: Source
    trainer: Trainer

    @cached_property
    def eval_split(self) -> Split | None:
        """The split to evaluate on; None: the data has none, and the config names none."""
        wanted = self.config.run.eval_split
        if wanted != "auto":
            open_split(self.config, wanted)
            return wanted
        for split in _HELD_OUT_SPLITS:
            try:
                open_split(self.config, split)
            except MissingSplitError:
                continue
            return split
        if self.config.run.early_stop or self.config.run.keep_best:
            open_split(self.config, "validation")
        return None

    def held_out(self) -> Source:
        """What to evaluate on."""
        return open_split(self.config, self.eval_split or "validation")


_HELD_OUT_SPLITS: tuple[Split, ...] = ("validation", "test")


def open_split(config: JobConfig, split: Split) -> Source:
    """The samples of a split, as the config's model wants them."""
    source = open_source(config.data, split)
    if config.model.kind != "ranker":
        return source
    if [column.name for column in source.columns if column.kind == "keys"] != [HISTORY]:
        raise ConfigError(
            "model.kind is 'ranker' but the data has no sequences; use data of sequences, or "
            f"'dlrm'{_or_name(config)}"
        )
    wanted = config.model
    options = RankingOptions(
        catalogue=_catalogue(config, source),
        positives=wanted.positives,
        negatives=max(1, wanted.negatives // wanted.positives),
        seed=config.run.seed,
    )
    ranking = Ranking(source, options)
    return source.ranked(ranking) if isinstance(source, StreamingSource) else ranking


def make_job(config: JobConfig, comm: Communicator) -> Job:
    """Open the data, make the model that fits it, and a trainer for both."""
    source = open_split(config, "train")
    torch.manual_seed(config.run.seed)
    model, tables = make_model(config, source)
    for key in ("early_stop", "keep_best"):
        _refuse_metric(key, getattr(config.run, key), model)
    trainer = Trainer(model, config.lifecycle.applied(tables), config.settings(), comm)
    trainer.about_model = about_model(config, model, source)
    trainer.about_data = data_digest(config.data) if comm.rank == 0 else ""
    return Job(config, source, trainer)


def _refuse_metric(key: str, metric: str, model: nn.Module) -> None:
    """Refuse a misspelt metric before an epoch has been trained for it."""
    retrieves = isinstance(model, HstuRetriever)
    known = [*TargetRank().add(torch.ones(1)).values] if retrieves else [*CLICK_METRICS]
    if metric and metric.rpartition("/")[2] not in known:
        near = get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(known)}"
        raise ConfigError(f"run.{key} is {metric!r}, which no evaluation of the model has; {hint}")


CLICK_METRICS = (
    *("auc", "loss", "log_loss", "normalised_entropy"),
    *("train_auc", "train_normalised_entropy"),
)
"""What an evaluation of predictions has; each task of several has its own, such as `buy/auc`."""


def idle_settings(config: JobConfig, ranks: int, model: nn.Module | None = None) -> list[str]:
    """Settings that do nothing as they stand, each a sentence: often another one is missing.

    The model that was made tells what `model.kind = "auto"` stands for.
    """
    found = [*_kept_nowhere(config.run), *_read_by_nobody(config, model)]
    for name, rates in (("rows", config.rows), ("dense", config.dense)):
        if rates.schedule == "constant" and rates.decay_steps:
            found.append(f"{name}.decay_steps does nothing, since {name}.schedule is 'constant'")
    share, micros = -(-config.run.batch // ranks), config.pipeline.micro_batches
    if micros > share:
        found.append(
            f"pipeline.micro_batches is {micros}, more than the {share} samples that a rank has of "
            "a batch, so some are empty"
        )
    if config.data.kind == "stream" and config.run.epochs > 1:
        found.append("run.epochs does nothing: every sample of a stream is trained once")
    return found


_OF_ENCODERS = frozenset(
    [
        "dim",
        "init_std",
        "blocks",
        "heads",
        "attention_dim",
        "max_len",
        "num_items",
        "negatives",
        "encoder",
    ]
)
_READ: Mapping[str, frozenset[str]] = {
    "dlrm": frozenset({"dim", "init_std", "bottom", "top"}),
    "logistic": frozenset(),
    "hstu": _OF_ENCODERS | {"negative_pool", "temperature"},
    "ranker": _OF_ENCODERS | {"positives"},
}
"""Keys of `[model]` that a shipped model reads, beside those of every model."""


def _read_by_nobody(config: JobConfig, model: nn.Module | None) -> list[str]:
    """Keys of `[model]` of another model, and sections of `[data]` of other data."""
    found: list[str] = []
    kind, data, usual = config.model.kind, config.data, ModelConfig()
    if kind == "auto" and model is not None:
        kind = str(describe_model(model).get("kind", "hstu"))
    if is_own(kind) or kind in _READ:
        read = _READ.get(kind, frozenset()) | {"kind", "config", "compile"}
        why = f"{kind} reads [model.config] alone" if is_own(kind) else f"{kind} does not read it"
        found += [
            f"model.{known.name} does nothing: {why}"
            for known in fields(ModelConfig)
            if known.name not in read
            and getattr(config.model, known.name) != getattr(usual, known.name)
        ]
    mine = {"stream": ("stream", "parquet")}.get(data.kind, (data.kind,))
    found += [
        f"data.{name} does nothing: data.kind is {data.kind!r}"
        for name in ("synthetic", "parquet", "movielens", "kuairand", "criteo", "stream")
        if name not in mine and getattr(data, name) != getattr(DataConfig(), name)
    ]
    return found + _cut_before(config, kind)


def _cut_before(config: JobConfig, kind: str) -> list[str]:
    """Histories that the data cuts shorter than the model is made for."""
    data, longest = config.data, config.model.max_len
    section = {"parquet": data.parquet, "stream": data.parquet, "movielens": data.movielens}
    of = section.get(data.kind)
    if of is None or kind not in ("hstu", "ranker") or longest <= of.max_len:
        return []
    name = "movielens" if data.kind == "movielens" else "parquet"
    return [
        f"model.max_len is {longest}, but of each history the latest {of.max_len} items are kept; "
        f"set data.{name}.max_len, too"
    ]


def _kept_nowhere(run: RunConfig) -> list[str]:
    """How to save and to log, without a place for it."""
    found: list[str] = []
    for key in ("checkpoint_every", "incremental", "keep_last", "keep_hours", "keep_best"):
        if not run.checkpoint and getattr(run, key):
            found.append(f"run.{key} does nothing: run.checkpoint is empty, so nothing is saved")
    if run.checkpoint and run.keep_best and not (run.keep_last or run.keep_hours):
        found.append("run.keep_best does nothing without keep_last or keep_hours: all are kept")
    if not run.log and run.loggers != RunConfig().loggers:
        found.append("run.loggers does nothing: run.log is empty, so nothing is logged")
    return found


def about_model(config: JobConfig, model: nn.Module, source: Source) -> dict[str, Any]:
    """What a checkpoint says of a model, so that it can be made again without the data."""
    # How to read all items is no part of what a column is.
    columns = [asdict(replace(column, items=None)) for column in source.columns]
    if is_own(config.model.kind):
        own = {"kind": config.model.kind, "config": dict(config.model.config)}
        return {**own, "columns": columns}
    return {**describe_model(model), "columns": columns} if describe_model(model) else {}


def make_model(config: JobConfig, source: Source) -> tuple[nn.Module, list[Table]]:
    """The model that the config asks for, sized for the data."""
    wanted = config.model
    keys = [column.name for column in source.columns if column.kind == "keys"]
    kind = wanted.kind
    if is_own(kind):
        return make_own(kind, wanted.config, source.columns)
    if kind == "auto":
        kind = "hstu" if keys == [HISTORY] else "dlrm"
    if kind == "hstu":
        if HISTORY not in keys:
            raise ConfigError(
                f"model.kind is 'hstu' but the data has no histories; use 'dlrm'{_or_name(config)}"
            )
        _check_times(wanted.encoder, source)
        return _hstu(config, source)
    if kind == "ranker":
        _check_times(wanted.encoder, source)
        return _ranker(config)
    _refuse_labels(kind, [column.name for column in source.columns if column.kind == "label"])
    fields = next((c.fields for c in source.columns if c.kind == "features"), ())
    weights = {column.of: column.name for column in source.columns if column.kind == "weights"}
    if kind == "logistic":
        baseline = LogisticRegression(tuple(keys), len(fields), weights)
        return baseline, baseline.tables()
    return _dlrm(wanted, keys, fields, weights)


def _or_name(config: JobConfig) -> str:
    """The other remedy where columns of files have names of their own."""
    files = config.data.kind in ("parquet", "stream")
    return ", or name the column of items in data.parquet.history" if files else ""


def _refuse_labels(kind: str, labels: list[str]) -> None:
    """A model of clicks learns one label: none would be missed late, others never be used."""
    if not labels:
        raise ConfigError(
            f"model.kind is {kind!r} but the data has no label; name its column in "
            "data.parquet.labels (of sequences, that of items in data.parquet.history)"
        )
    if len(labels) > 1:
        raise ConfigError(
            f"the data has the labels {', '.join(labels)}, and {kind!r} learns one; name one in "
            "data.parquet.labels"
        )


def _dlrm(
    wanted: ModelConfig, keys: list[str], fields: tuple[str, ...], weights: Mapping[str, str]
) -> tuple[nn.Module, list[Table]]:
    model = Dlrm(
        DlrmConfig(
            features=tuple(keys),
            dense_features=len(fields),
            dim=wanted.dim,
            bottom=wanted.bottom,
            top=wanted.top,
            weights=weights,
        )
    )
    return model, [replace(table, init_std=wanted.init_std) for table in model.tables()]


def _ranker(config: JobConfig) -> tuple[nn.Module, list[Table]]:
    wanted = config.model
    features = ("history", "candidates")
    table = Table(name="items", dim=wanted.dim, features=features, init_std=wanted.init_std)
    return HstuRanker(_encoder(wanted), config.run.seed), [table]


def _hstu(config: JobConfig, source: Source) -> tuple[nn.Module, list[Table]]:
    wanted = config.model
    items = _catalogue(config, source)
    model = HstuRetriever(
        _encoder(wanted),
        SampledSoftmaxConfig(
            num_items=items.num_items,
            negatives=wanted.negatives,
            pool=wanted.negative_pool,
            temperature=wanted.temperature,
            seed=config.run.seed,
        ),
        None if items.ids is None else torch.from_numpy(items.ids.copy()),
    )
    features = ("history", "negatives")
    return model, [Table(name="items", dim=wanted.dim, features=features, init_std=wanted.init_std)]


def _encoder(wanted: ModelConfig) -> HstuConfig:
    return HstuConfig(
        blocks=wanted.blocks,
        heads=wanted.heads,
        dim=wanted.dim,
        attention_dim=wanted.attention_dim,
        value_dim=wanted.attention_dim,
        max_len=wanted.max_len,
        **{known.name: getattr(wanted.encoder, known.name) for known in fields(EncoderOptions)},
    )


def _check_times(encoder: EncoderOptions, source: Source) -> None:
    if encoder.time_buckets and TIMESTAMPS not in [column.name for column in source.columns]:
        raise ConfigError(
            f"model.encoder.time_buckets is {encoder.time_buckets} but the data has no timestamps; "
            "use data that has, or set 0"
        )


def _catalogue(config: JobConfig, source: Source) -> Catalogue:
    """The items: keys from 1 to `num_items` where that is known, else those that the data has."""
    column = next((c for c in source.columns if c.name == HISTORY), None)
    known = config.model.num_items or (column.max_key if column else None)
    if known:
        return Catalogue(known)
    if column is None or column.items is None:
        raise ConfigError("model.num_items is 0; say how many items there are, keys from 1")
    items = column.items()
    if not len(items):
        raise DataError("no history of the data has an item; check data.parquet.history")
    return Catalogue.of(items)


# Going on from a checkpoint: exactly, or not at all. A setting that changes results must be the
# same, unless the user overrides it; what changes only speed, or the order of sums, may change.

AUTO = "auto"
"""For `--resume`: go on from the run's own folder where it has a checkpoint, else begin."""
Effect = Literal["none", "sums", "results"]

_RESULTS: Mapping[str, frozenset[str]] = {
    "run": frozenset({"batch", "seed", "precision", "lifecycle_every", "clip_norm", "clip_rows"}),
    "pipeline": frozenset({"comm_dtype"}),
    "parallel": frozenset({"merge", "merge_every"}),
}
"""Keys that change results, of sections whose other keys do not; of other sections all do."""
_SUMS: Mapping[str, frozenset[str]] = {
    "run": frozenset({"device", "adaptive"}),
    "pipeline": frozenset(
        {"micro_batches", "micro_batching", "balance", "first", "last", "exchange", "owner_sums"}
    ),
    "parallel": frozenset({"groups", "dense"}),
}
"""Keys that change only the order of sums."""
_HARMLESS = frozenset(
    {"data.validation_path", "data.test_path", "data.threads"}
    | {f"data.stream.{name}" for name in ("idle_s", "on_idle", "poll_s", "timeout_s")}
)
"""Keys of what is evaluated, not trained on, and of how fast data is read."""
_FORMS: Mapping[str, Effect] = {
    "model.encoder.attention": "sums",
    "model.encoder.pointwise": "sums",
    "model.encoder.checkpoint_activations": "none",
    "model.compile": "sums",
}
"""Keys of a model that change how it is computed, not what."""
_MERGING_STOPS = frozenset({"run.checkpoint_every", "run.eval_every"})
"""When replicas are merged between two merges, where that makes a difference."""


def effect_of(key: str) -> Effect:
    """What a changed setting changes."""
    section, _, name = key.partition(".")
    if key in _HARMLESS or key.startswith("data.stream.options"):
        return "none"
    if key in _FORMS:
        return _FORMS[key]
    if section not in _RESULTS or name in _RESULTS[section]:
        return "results"
    return "sums" if name in _SUMS[section] else "none"


def saved_config(manifest: Manifest, where: Path) -> JobConfig | None:
    """The config that a checkpoint was trained with; None where it has none."""
    if not manifest.config:
        return None
    try:
        return build(JobConfig, with_old_order(manifest.config))
    except ConfigError as error:
        raise CheckpointError(
            f"the config in {str(where)!r} does not fit this program ({error}); use the one that "
            "wrote it"
        ) from None


def with_old_order(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved config; one from before there were shards had the order of one."""
    data = config.get("data", {})
    return config if not config or "shards" in data else {**config, "data": {**data, "shards": 1}}


def config_in(path: str) -> Mapping[str, Any]:
    """The config of the newest checkpoint of a path that opens; empty where there is none."""

    def read(found: Path) -> Mapping[str, Any]:
        return with_old_order(open_checkpoint(found).manifest.config)

    return first_good(appearing(Path(path)), read, tell=False) or {}


def changes(config: JobConfig, saved: JobConfig) -> dict[str, tuple[object, object]]:
    """Settings that differ, by their full name: what they were, what they are."""
    now, then = flat(asdict(config)), flat(asdict(saved))
    # A model of the user's own may have other keys now.
    keys = [*now, *(key for key in then if key not in now)]
    return {key: (then.get(key), now.get(key)) for key in keys if now.get(key) != then.get(key)}


def _plain(value: object) -> object:
    """A choice as a user writes it."""
    return value.value if isinstance(value, Enum) else value


def refuse_changes(config: JobConfig, manifest: Manifest, where: Path, *, override: bool) -> None:
    """Refuse settings that would change results, or say which do where they are overridden."""
    saved = saved_config(manifest, where)
    if saved is None:
        return
    found = changes(config, saved)
    if manifest.data and manifest.data == data_digest(config.data):
        found.pop("data.path", None)  # the same files in another place
    if config.data.kind == "stream":
        found.pop("data.max_broken", None)  # no order depends on it, and none was met until now
    matter = _MERGING_STOPS if _merges_seldom(saved) else frozenset[str]()
    results = {k: both for k, both in found.items() if effect_of(k) == "results" or k in matter}
    if results and not override:
        told = ", ".join(
            f"{key} is {_plain(now)!r} and was {_plain(then)!r}"
            for key, (then, now) in results.items()
        )
        raise ConfigError(
            f"{told} in {where.name}; results would differ, so set what it was, or add --override"
        )
    if "data.path" not in found:
        _refuse_other_data(config, manifest, where, override=override)
    resummed = config.pipeline.owners_add_up != saved.pipeline.owners_add_up
    for key, (then, now) in found.items():
        if effect_of(key) != "none" or (resummed and key == "pipeline.retrieval"):
            changed = "results" if key in results else "only the order of sums"
            both = key, _plain(now), _plain(then), changed
            log.warning("%s is %r instead of %r, which changes %s", *both)


def _merges_seldom(config: JobConfig) -> bool:
    """Whether replicas differ between merges, so that one more changes what comes out."""
    parallel = config.parallel
    return parallel.groups > 1 and parallel.merge == "averaged" and parallel.merge_every != 1


def _refuse_other_data(
    config: JobConfig, manifest: Manifest, where: Path, *, override: bool
) -> None:
    """Refuse files that were added, taken away or written again since the checkpoint."""
    if not manifest.data or manifest.data == data_digest(config.data):
        return
    told = f"the files of data.path {config.data.path!r} are not those that {where.name} trained on"
    if not override:
        raise ConfigError(
            f"{told}; samples would come in another order, so put them back, or add --override"
        )
    log.warning("%s, which changes results", told)


_OF_A_NODE = frozenset(
    {"data.path", "data.validation_path", "data.test_path", "data.threads"}
    | {f"run.{name}" for name in ("checkpoint", "log", "record", "evicted", "store_path")}
    | {f"run.{name}" for name in ("threads", "store_threads", "host_memory", "device_memory")}
)
"""Keys that may differ between nodes: where things are, and how much a machine has."""


def refuse_other_configs(config: JobConfig, comm: Communicator) -> None:
    """Refuse a rank whose config is not that of rank 0; all ranks call it, and all refuse."""
    known = flat(asdict(config)).items()
    mine = {key: json.dumps(value, default=str) for key, value in known if key not in _OF_A_NODE}
    first = cast("dict[str, str]", gathered_from_first(comm, mine if comm.rank == 0 else {}))

    def check() -> None:
        for key in sorted({*mine, *first}):
            if mine.get(key) != first.get(key):
                raise ConfigError(
                    f"{key} is {mine.get(key, 'not set')} on rank {comm.rank} and "
                    f"{first.get(key, 'not set')} on rank 0; start all ranks with the same config"
                )

    raise_everywhere(comm, check)


def _of_first(comm: Communicator, paths: Iterator[Path]) -> Iterator[Path]:
    """All ranks try the paths of rank 0 in the same order, also where one sees a folder late."""
    while True:
        mine = next(paths, None) if comm.rank == 0 else None
        if (path := gathered_from_first(comm, None if mine is None else str(mine))) is None:
            return
        yield Path(path)


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
    if comm.size > 1:
        refuse_other_configs(config, comm)
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

    job = first_good(_of_first(comm, appearing(folder)), load, tell=comm.rank == 0)
    if job is None and checkpoint == AUTO:
        return make_job(config, comm)
    if job is None:
        instead = ", or begin without --resume" if exact else ""
        raise CheckpointError(f"there is no checkpoint in {checkpoint!r}; check its name{instead}")
    return job
