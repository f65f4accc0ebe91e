"""The options of a plan: each has its name, type, default, help and bounds here, and only here.

The config sections `[pipeline]` and `[parallel]` inherit them, `Shape` does, the command line makes
its flags from them, and the text form of a schedule writes them by these names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from nestpipe.deprecated import renamed_fields
from nestpipe.errors import PlanError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LOOKUP_STAGES = 4
"""Stages before forward and backward: prefetch, copy, route, retrieve."""
MOST_MICRO_BATCHES = 1024
"""More than any batch could be split into with profit."""

T = TypeVar("T")


class Retrieval(StrEnum):
    """Which rows `retrieve` reads and `writeback` writes."""

    WHOLE = "whole"
    """The batch's whole working set, as in the paper."""
    NEW = "new"
    """Only rows that the active buffer does not hold are read, only rows that leave are written."""
    POOLED = "pooled"
    """Rows stay in one pool of device memory, where all batches use them in place: only rows that
    are not there are read, only rows that make room for others are written."""


class Exchange(StrEnum):
    """What the micro-batches of a window ask other ranks for, and what they send back."""

    MICRO = "micro"
    """Each its own rows and gradients, as in the paper."""
    WINDOW = "window"
    """Each only rows that no earlier one has, and gradients after the last use of their row."""


class Merge(StrEnum):
    """How replicas of a row in other groups of workers are kept together (2D parallelism)."""

    AVERAGED = "averaged"
    """Weights and state of all rows that changed since the last time, after `update`."""
    EXACT = "exact"
    """The gradients of every batch, before `update`: replicas never differ."""


def option(default: T, help: str, *, least: int | None = None, most: int | None = None) -> T:  # noqa: A002
    """A field that a user may choose: what it does unless told, in words, and its bounds."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


def with_default(cls: type[DataclassInstance], name: str, default: T) -> T:
    """The option `name` of `cls` once more, with another default."""
    known = next(known for known in fields(cls) if known.name == name)
    return field(default=default, metadata=known.metadata)


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """A dataclass of options that takes words for their enums and refuses what is out of bounds."""

    def __post_init__(self) -> None:
        for known in fields(self):
            value = getattr(self, known.name)
            if isinstance(known.default, StrEnum):
                value = _choice(known.name, type(known.default), value)
                object.__setattr__(self, known.name, value)
            least, most = known.metadata.get("least"), known.metadata.get("most")
            if least is not None and not least <= value <= (most or value):
                raise PlanError(f"{known.name} is {value}; use {least} {_bound(least, most)}")


def _choice(name: str, kind: type[StrEnum], value: object) -> StrEnum:
    if value not in list(kind):
        raise PlanError(f"{name} is {value!r}; use one of {', '.join(kind)}")
    return kind(value)


def _bound(least: int, most: int | None) -> str:
    if most is None:
        return "or more"
    return f"or {most}" if most == least + 1 else f"to {most}"


@renamed_fields
@dataclass(frozen=True, kw_only=True)
class PipelineOptions(_Checked):
    """How one group of workers overlaps its batches and micro-batches."""

    micro_batches: int = option(
        1,
        "Micro-batches per batch; 1 turns the inner pipeline off.",
        least=1,
        most=MOST_MICRO_BATCHES,
    )
    retrieval: Retrieval = option(
        Retrieval.WHOLE,
        "Rows read per batch: the whole working set, only new rows, which no buffer holds, or "
        "those that a pool in device memory lacks (pooled).",
    )
    exchange: Exchange = option(
        Exchange.MICRO, "Deduplicate row requests per micro-batch or per batch (window)."
    )
    stages: int = option(
        LOOKUP_STAGES,
        "Batches over which the lookup of one is spread; 1 looks up a single batch ahead.",
        least=1,
        most=LOOKUP_STAGES,
    )
    speculative_rows: bool = option(
        False, "nested: prefetch the first micro-batch's rows during the previous batch."
    )
    buffers: int = option(
        2,
        "Row buffers on the device; with 3, write-back of old rows overlaps reading new ones.",
        least=2,
        most=3,
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(_Checked):
    """How groups of workers with a copy of the tables each keep together (2D parallelism)."""

    merge: Merge = option(
        Merge.AVERAGED, "Merge replicas by averaging changed rows, or by summing every gradient."
    )
    merge_every: int = option(0, "Merge replicas every N batches; 0 turns it off.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge is Merge.EXACT and self.merge_every > 1:
            raise PlanError(
                f"merge_every is {self.merge_every} and merge 'exact', which merges every batch; "
                "use merge_every 1, or merge 'averaged'"
            )


@renamed_fields
@dataclass(frozen=True, kw_only=True)
class PlanOptions(ReplicaOptions, PipelineOptions):
    """Everything that a caller may choose about any plan."""


def plan_options_of(*sources: DataclassInstance) -> Iterator[tuple[str, Any]]:
    """The plan options among the fields of several dataclasses, by name."""
    wanted = {known.name for known in fields(PlanOptions)}
    for source in sources:
        for name in wanted & {known.name for known in fields(source)}:
            yield name, getattr(source, name)
