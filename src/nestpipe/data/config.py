"""The section `[data]` of a config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nestpipe.config import fraction, not_negative, positive
from nestpipe.errors import ConfigError

Kind = Literal["synthetic", "parquet", "movielens", "kuairand", "criteo", "stream"]
Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    """`[data.synthetic]`: a made-up world; sample i is a function of (seed, i) alone."""

    flavour: Literal["ctr", "sequence"] = "ctr"
    """`ctr`: features and a click; `sequence`: the items a user chose one after the other."""
    samples: int = 100_000
    """Samples of the train split."""
    test_samples: int = 20_000
    """Samples of the validation split, and of the test split; no sample is in two splits."""
    seed: int = 0
    """Seed of the world; the order of samples has a seed of its own."""
    exponent: float = 1.05
    """Zipf exponent of the keys: the r-th most frequent appears in proportion to r ** -exponent."""
    num_tables: int = 26
    """ctr: categorical features, c0, c1, ..."""
    num_keys: int = 100_000
    """ctr: different keys of each."""
    keys_per_sample: tuple[int, ...] = (1, 1)
    """ctr: fewest and most keys of each feature in one sample."""
    num_dense: int = 13
    """ctr: dense features, d0, d1, ..."""
    signal: float = 2.0
    """ctr: spread of the hidden model's logit; at 0 there is nothing to learn."""
    num_items: int = 10_000
    """sequence: different items, 1, 2, ..."""
    num_communities: int = 50
    """sequence: clusters of items with like tastes."""
    min_len: int = 10
    """sequence: fewest items of a user, the one to predict included."""
    max_len: int = 50
    """sequence: most items of a user, the one to predict included."""
    length_exponent: float = 0.0
    """sequence: Zipf exponent of lengths: the r-th shortest appears in proportion to r **
    -exponent."""
    coherence: float = 0.8
    """sequence: how often an item comes from the user's present community."""
    drift: float = 0.02
    """sequence: how often, per item, a user moves to another community."""

    def __post_init__(self) -> None:
        for name in ("samples", "test_samples", "num_tables", "num_keys"):
            positive(name, getattr(self, name))
        for name in ("seed", "num_dense", "signal", "exponent", "length_exponent"):
            not_negative(name, getattr(self, name))
        positive("num_communities", self.num_communities)
        fraction("coherence", self.coherence)
        fraction("drift", self.drift)
        keys = self.keys_per_sample
        if len(keys) != 2 or not 0 <= keys[0] <= keys[1] or keys[1] < 1:
            raise ConfigError(
                f"keys_per_sample is {list(keys)}; give the fewest and the most, such as [1, 4]"
            )
        if not 2 <= self.min_len <= self.max_len:
            raise ConfigError(
                f"min_len is {self.min_len} and max_len {self.max_len}; "
                "give at least 2, and no more than max_len"
            )
        if self.num_items < self.num_communities:
            raise ConfigError(
                f"num_items is {self.num_items}; give at least one for each of the "
                f"{self.num_communities} communities"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetConfig:
    """`[data.parquet]`: roles of the columns; with neither sparse nor dense, the types decide."""

    sparse: tuple[str, ...] = ()
    """Columns of keys: whole numbers, strings (hashed), or lists of either."""
    dense: tuple[str, ...] = ()
    """Columns of numbers."""
    labels: tuple[str, ...] = ()
    """Columns of labels; by default `label` where there is one."""
    any_labels: bool = False
    """Allow labels outside 0 to 1, for a model of your own whose loss takes them."""
    positive_from: float = 0.0
    """Labels from here on are 1 and others 0, such as 4 for ratings of 1 to 5; 0: as they are."""
    ignore: tuple[str, ...] = ()
    """Columns to leave out, though their types would select them."""
    sample_weight: str = ""
    """The column of sample weights, numbers from 0: factors of each sample's loss, and so of its
    gradient."""
    weights: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """For columns of lists of keys, the column of their weights: a list of numbers per row, one for
    each key, such as `words = "word_weights"`; rows are summed times their weights."""
    history: str = ""
    """sequences: the column of a user's items, a list per row; by default `history` where there
    are no other keys and no label."""
    timestamps: str = ""
    """sequences: the column of the items' times, a list per row of seconds or of Arrow timestamps;
    by default `timestamps` where there is one."""
    target: str = ""
    """sequences: the column of the item after the history; by default `target` where there is one.
    Without any, a sequence's last item is the target of held-out splits."""
    max_len: int = 200
    """sequences: keep this many of the latest items of a row."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name, column in self.weights.items():
            if not isinstance(column, str) or not column:
                raise ConfigError(f"weights.{name} is {column!r}; name the column of its weights")
        weights = (*self.weights.values(), *([self.sample_weight] if self.sample_weight else []))
        for name in (*self.sparse, *self.dense, *self.labels, *weights):
            if name in seen:
                raise ConfigError(f"column {name} is named twice; give it one use")
            seen.add(name)
        if self.max_len < 2:
            raise ConfigError(f"max_len is {self.max_len}; give 2 or more items")


@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensConfig:
    """`[data.movielens]`: ratings as rows to rank, or as each user's sequence."""

    use: Literal["ratings", "sequences"] = "sequences"
    """`ratings`: is this rating high? `sequences`: which film comes next?"""
    max_len: int = 200
    """sequences: keep this many of the latest items of a user."""
    held_out: int = 2
    """sequences: items at the end that training does not see. 2: one to validate, the last for
    test; 1: the last for test, as is published, without a validation split."""
    liked_from: float = 4.0
    """ratings: from here on a rating is a 1."""
    test_fraction: float = 0.1
    """ratings: the latest part is for test, as much before it for validation."""

    def __post_init__(self) -> None:
        if self.max_len < 2:
            raise ConfigError(f"max_len is {self.max_len}; give 2 or more items")
        if self.held_out not in (1, 2):
            raise ConfigError(f"held_out is {self.held_out}; give 2, or 1 to do without validation")
        if not 0 < self.test_fraction < 0.5:
            raise ConfigError(f"test_fraction is {self.test_fraction}; give less than 0.5")


@dataclass(frozen=True, kw_only=True, slots=True)
class KuaiRandConfig:
    """`[data.kuairand]`: watch events joined with the features of user and video."""

    label: Literal["long_view", "is_click", "is_like", "is_follow", "is_comment", "is_forward"] = (
        "long_view"
    )
    """The label to predict."""
    train_days: tuple[int, ...] = (20220425, 20220430)
    """First and last day, yyyymmdd."""
    validation_days: tuple[int, ...] = ()
    """First and last day; by default there is no validation split."""
    test_days: tuple[int, ...] = (20220501, 20220508)
    """First and last day."""
    history_len: int = 0
    """Adds up to this many videos that the user watched before the log began; 0: none."""

    def __post_init__(self) -> None:
        for name in ("train_days", "validation_days", "test_days"):
            days: tuple[int, ...] = getattr(self, name)
            if days and (len(days) != 2 or not 19000101 <= days[0] <= days[1] <= 99991231):
                raise ConfigError(
                    f"{name} is {list(days)}; give the first and last day as yyyymmdd, "
                    "such as [20220501, 20220508]"
                )
        not_negative("history_len", self.history_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriteoConfig:
    """`[data.criteo]`: tab-separated click logs."""

    log_dense: bool = True
    """Take log(1 + x) of the 13 counts, negatives as 0; false: as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """`[data.stream]`: a log that grows, a folder of Parquet files or a Kafka topic."""

    schema: str = ""
    """A Parquet file with the columns of the log, which `[data.parquet]` says the use of; a folder
    does without where it has a file."""
    idle_s: float = 60.0
    """Seconds without enough for a batch after which `on_idle` is done; 0: at once."""
    on_idle: Literal["end", "save"] = "end"
    """`end`: the run ends, with a checkpoint as always; `save`: it saves one and waits on."""
    poll_s: float = 0.5
    """Polling interval in seconds, while there is not enough for a batch."""
    shuffle_window: int = 0
    """Samples that are shuffled together, in the order of the log; a window waits until all of its
    samples are there. `data.shards` parts of it are dealt to ranks. 0: none is shuffled."""
    block: int = 64
    """Batches that are decided at a time, at most; between blocks the pipeline runs empty."""
    format: Literal["json", "arrow"] = "json"
    """kafka: what a message is: a JSON object, or an Arrow IPC stream of `rows_per_message`."""
    rows_per_message: int = 1
    """kafka: samples of each message, the same for all."""
    start: str = "earliest"
    """kafka: where a new run begins: `earliest`, `latest`, or a time in ISO 8601 (UTC unless it
    says otherwise)."""
    timeout_s: float = 30.0
    """kafka: seconds without an answer after which the run ends."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """kafka: more settings of the client, such as `security.protocol`; `env:NAME` takes the value
    of a variable, which passwords must."""

    def __post_init__(self) -> None:
        for name in ("block", "rows_per_message", "timeout_s", "poll_s"):
            positive(name, getattr(self, name))
        for name in ("idle_s", "shuffle_window"):
            not_negative(name, getattr(self, name))
        if self.format == "json" and self.rows_per_message != 1:
            raise ConfigError(
                f"rows_per_message is {self.rows_per_message} and format 'json', which has one "
                "sample a message; set format = 'arrow'"
            )
        for name, value in self.options.items():
            if "password" in name and not str(value).startswith("env:"):
                raise ConfigError(
                    f"options has {name} itself, which checkpoints would keep; name a variable "
                    "that holds it, such as 'env:KAFKA_PASSWORD'"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`[data]`: where samples come from; only the section of the chosen kind is used."""

    kind: Kind = "synthetic"
    """What the files are; `synthetic` needs none."""
    path: str = ""
    """A file or a folder; parquet: also a URI, such as s3://bucket/clicks; stream: a folder to
    which files are added, or kafka://host:9092/topic."""
    validation_path: str = ""
    """parquet, criteo and stream: the files of the validation split."""
    test_path: str = ""
    """parquet, criteo and stream: the files of the test split."""
    test_every: int = 0
    """parquet and criteo, instead of those paths: of every N neighbouring rows of a file the last
    is for test, the one before for validation, the rest for training."""
    shuffle: bool = True
    """Shuffle the train split; other splits keep the order of the files, and so does a stream
    without `data.stream.shuffle_window`."""
    shuffle_window: int = 65_536
    """Size of the shuffle buffer in samples over all ranks, where the data is streamed."""
    shards: int = 0
    """Parts of an epoch that are read side by side and dealt to ranks, part of the order as the
    window is; at least as many as ranks let each rank read only its share. 0: chosen for the data
    and the window."""
    threads: int = 0
    """Threads of each rank that read ahead; 0: up to 4, as many as there are cores for it."""
    max_broken: int = 0
    """Broken rows to skip in one pass before the data is refused."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    parquet: ParquetConfig = field(default_factory=ParquetConfig)
    movielens: MovieLensConfig = field(default_factory=MovieLensConfig)
    kuairand: KuaiRandConfig = field(default_factory=KuaiRandConfig)
    criteo: CriteoConfig = field(default_factory=CriteoConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)

    @property
    def reading(self) -> dict[str, int]:
        """How a stream of this config reads: `shards` and `threads`."""
        cores = (os.cpu_count() or 1) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return {
            "shards": self.shards if self.shuffle else 1,
            "threads": self.threads or max(1, min(4, cores)),
        }

    def __post_init__(self) -> None:
        if self.kind != "synthetic" and not self.path:
            raise ConfigError(f"path is missing; say where the {self.kind} files are")
        if self.kind == "synthetic" and self.path:
            raise ConfigError(f"path is {self.path!r} but kind is 'synthetic'; say what it holds")
        positive("shuffle_window", self.shuffle_window)
        for name in ("max_broken", "shards", "threads"):
            not_negative(name, getattr(self, name))
        if self.test_every and self.test_every < 3:
            raise ConfigError(f"test_every is {self.test_every}; give 3 or more rows, or 0")
        if self.test_every and (self.test_path or self.validation_path):
            raise ConfigError("test_every and test_path both say what to test on; give one")
        if self.kind == "stream" and self.stream.shuffle_window and not self.shuffle:
            raise ConfigError(
                f"shuffle is false and stream.shuffle_window {self.stream.shuffle_window}; leave "
                "one of them out"
            )
        if self.test_every and self.kind == "stream":
            raise ConfigError("test_every is not for a stream; set test_path to Parquet files")
