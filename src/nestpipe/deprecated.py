"""Names that changed: each old one works for one release and warns with the new one.

This module holds every renamed config key, command-line flag, Python name, metric and word of a
schedule file. A rename is one line in a table below; nothing else mentions the old name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

FIELDS: dict[str, dict[str, str]] = {
    "PipelineSettings": {
        "wire": "comm_dtype",
        "cut": "micro_batching",
        "early": "speculative_rows",
    },
    "PlanOptions": {
        "micros": "micro_batches",
        "mirror_every": "merge_every",
        "early": "speculative_rows",
    },
    "PipelineCase": {
        "micros": "micro_batches",
        "wire": "comm_dtype",
        "early": "speculative_rows",
    },
    "ServeSettings": {
        "trigger": "admission",
        "most_events": "max_events",
        "most_candidates": "max_candidates",
    },
}
"""Fields of config classes, by class: keys of its TOML section, and arguments in Python."""
FLAGS: dict[str, str] = {
    "--micros": "--micro-batches",
    "--mirror-every": "--merge-every",
    "--early": "--speculative-rows",
}
"""Flags of the command line."""
NAMES: dict[str, str] = {
    "nestpipe.train.Outcome": "nestpipe.train.TrainResult",
    "nestpipe.serve.types.Outcome": "nestpipe.serve.types.AdmissionOutcome",
    "nestpipe.serve.types.Path": "nestpipe.serve.types.RankPath",
    "nestpipe.runtime.End": "nestpipe.runtime.StopSignal",
    "nestpipe.schedule.with_keys_apart": "nestpipe.schedule.with_separate_key_group",
    "nestpipe.schedule.with_sums_apart": "nestpipe.schedule.with_separate_dense_group",
}
"""Public Python names, with the modules that they are imported from."""
METRICS: dict[str, str] = {
    "copies": "offloads",
    "failed_copies": "failed_offloads",
    "queue_copies": "queue_offloads",
}
"""Metrics that a service exports; each old one is exported beside the new one."""
WORDS: dict[str, str] = {
    "micros": "micro_batches",
    "mirror_every": "merge_every",
    "early": "speculative_rows",
    "marks": "stale_mask",
    "fresh": "patch",
    "mirror": "replica_sync",
    "keys_apart": "separate_key_group",
    "sums_apart": "separate_dense_group",
}
"""Words of a schedule or trace file: facts about it and kinds of ops."""

T = TypeVar("T")


class RenamedWarning(FutureWarning):
    """An old name was used; the next release does not know it."""


def warn(old: str, new: str, stacklevel: int = 2) -> None:
    """Say that `old` is now called `new`; `stacklevel` counts from the caller of this function."""
    message = f"{old} is now called {new}; the next release drops the old name"
    warnings.warn(message, RenamedWarning, stacklevel=stacklevel + 1)


def renamed_in(cls: type) -> dict[str, str]:
    """The old fields of a class and of those that it inherits from, with their new names."""
    return {
        old: new
        for base in reversed(cls.__mro__)
        for old, new in FIELDS.get(base.__name__, {}).items()
    }


def renamed_fields(cls: type[T]) -> type[T]:
    """Let a dataclass take and show its old fields, too; goes above `@dataclass`."""
    renamed, init = renamed_in(cls), cls.__init__

    @functools.wraps(init)
    def take_old(self: T, *args: Any, **given: Any) -> None:
        for old in renamed.keys() & given.keys():
            warn(f"{cls.__name__}.{old}", renamed[old])
            given[renamed[old]] = given.pop(old)  # over the new one, which `replace` also gives
        init(self, *args, **given)

    def show_old(self: T, name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
        warn(f"{cls.__name__}.{name}", renamed[name])
        return getattr(self, renamed[name])

    cls.__init__ = take_old
    cls.__getattr__ = show_old  # type: ignore[attr-defined]
    return cls


def current_flags(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with old flags under their new names."""
    current: list[str] = []
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if argument == "--":
            return [*current, *arguments[position:]]
        if flag in FLAGS:
            warn(flag, FLAGS[flag])
        current.append(FLAGS.get(flag, flag) + equals + value)
    return current


def old_names(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for the module, which finds what it used to call otherwise."""

    def find(name: str) -> Any:
        old = f"{module}.{name}"
        if old not in NAMES:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(old, NAMES[old])
        home, _, now = NAMES[old].rpartition(".")
        return getattr(import_module(home), now)

    return find


def old_metrics(name: str) -> tuple[str, ...]:
    """What a metric used to be called."""
    return tuple(old for old, new in METRICS.items() if new == name)


def current_word(word: str) -> str:
    """A word of a schedule or trace file, under its new name."""
    if word in WORDS:
        warn(repr(word), repr(WORDS[word]))
    return WORDS.get(word, word)
