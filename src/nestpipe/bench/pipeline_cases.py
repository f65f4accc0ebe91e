"""The workloads of `nestpipe bench pipeline`, and the runs that are compared; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal

from nestpipe.config import fraction, not_negative, positive
from nestpipe.deprecated import renamed_fields
from nestpipe.errors import ConfigError
from nestpipe.schedule import (
    PLANS,
    Exchange,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    with_separate_dense_group,
    with_separate_key_group,
)

EXACT_PLANS = ("serial", "sparse_dist", "dual_buffer", "frozen_window", "nested")
"""Compared by default: every plan that never reads stale rows."""
CURVE = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""(lookup + communication) / compute of the serial step, point by point."""


@renamed_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCase:
    """One workload: how much is looked up, sent and computed."""

    name: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 4
    rate: str = ""
    """Speed of each host's link, where ranks are hosts."""
    batch: int = 256
    """Samples per rank."""
    keys: int = 64
    """Keys of a sample."""
    rows: int = 1_000_000
    """Rows of the table."""
    hot: float = 0.5
    """Share of the keys that are log-uniform; the others are uniform over the table."""
    dim: int = 64
    """Width of a row."""
    optimizer: str = "rowwise_adagrad"
    """Of rows; its state travels with them between host and device."""
    full: bool = False
    """Store every row before the first batch, as in a table that has been trained for long."""
    model: Literal["blocks", "hstu"] = "blocks"
    """`blocks`: residual layers at every key; `hstu`: the sequence model that is shipped."""
    width: int = 64
    """blocks: width of the dense layers."""
    blocks: int = 1
    """Residual blocks, or blocks of HSTU."""
    passes: int = 1
    """blocks: how often a batch goes through the blocks: more compute, the same weights."""
    recompute: bool = False
    """blocks: keep what goes in alone and compute the rest again; many passes need the memory."""
    heads: int = 4
    """hstu: attention heads, each `dim` / `heads` wide."""
    micro_batches: int = 8
    """Micro-batches of a batch."""
    first: float = 1.0
    last: float = 1.0
    """Sizes of the first and the last micro-batch over that of those in the middle."""
    speculative_rows: bool = False
    """Send the rows of the first micro-batch early, in `nested`."""
    buffers: int = 2
    """Of rows on the device, in `nested` with new rows; else two."""
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of rows and row gradients between ranks."""
    distinct: int = 8
    """Different batches, drawn before the clock starts and then repeated."""
    steps: int = 24
    """Batches in a round."""
    rounds: int = 3
    """Timed rounds of each plan."""
    curve: bool = False
    """Scale the compute so that the serial step runs through the ratios of `CURVE`."""
    plans: str = ",".join(EXACT_PLANS)
    """Plans compared by default, separated by commas."""

    def __post_init__(self) -> None:
        for field in (
            *("ranks", "batch", "keys", "rows", "dim", "width", "blocks", "passes", "heads"),
            *("micro_batches", "distinct", "rounds"),
        ):
            positive(field, getattr(self, field))
        fraction("hot", self.hot)
        positive("first", self.first)
        positive("last", self.last)
        not_negative("steps", self.steps)
        if self.steps < 8:
            raise ConfigError(f"steps is {self.steps}; give at least 8, for a steady state")
        if self.buffers not in (2, 3):
            raise ConfigError(f"buffers is {self.buffers}; use 2 or 3")
        if self.micro_batches > self.batch:
            raise ConfigError(
                f"micro_batches is {self.micro_batches} and batch {self.batch}; "
                "give at most one per sample"
            )
        if self.model == "hstu" and self.dim % self.heads:
            raise ConfigError(f"dim is {self.dim}; make it a multiple of heads, {self.heads}")


WARM_STEPS, TIMED_STEPS = 6, 12
"""Batches that warm up, and batches on the clock, for TorchRec as for NestPipe."""
LAST_STEPS = 2
"""Batches that follow, so that the clock stops in the middle of the run."""


def lab(
    name: str,
    *,
    ranks: int,
    rows: int,
    blocks: int,
    width: int,
    micro_batches: int,
    first: float = 1.0,
    last: float = 1.0,
    speculative_rows: bool = False,
) -> PipelineCase:
    """A configuration that TorchRec is timed on too, with the same batches and the same layers."""
    return PipelineCase(
        name=name,
        device="cuda",
        ranks=ranks,
        batch=1024 // ranks,
        keys=512,
        rows=rows,
        dim=128,
        full=True,
        width=width,
        blocks=blocks,
        micro_batches=micro_batches,
        first=first,
        last=last,
        speculative_rows=speculative_rows,
        distinct=WARM_STEPS + TIMED_STEPS + LAST_STEPS,  # as many as that script draws
        steps=WARM_STEPS + TIMED_STEPS + LAST_STEPS,
        plans="serial,nested",
    )


deep_lab = partial(lab, blocks=4, width=512, micro_batches=3, first=0.3, speculative_rows=True)
"""Where compute is the floor."""

CASES = {
    case.name: case
    for case in (
        PipelineCase(
            name="network",
            rate="100mbit",
            batch=256,
            keys=32,
            dim=256,
            passes=12,
            micro_batches=16,
            steps=10,
            rounds=3,
        ),
        PipelineCase(
            name="paper",
            device="cuda",
            batch=768,
            keys=512,
            dim=64,
            rows=40_000_000,
            optimizer="adam",
            full=True,
            width=352,
            micro_batches=4,
            first=0.4,
            last=0.4,
            comm_dtype="bfloat16",
            buffers=3,
            steps=14,
        ),
        PipelineCase(
            name="host",
            device="cuda",
            ranks=1,
            batch=256,
            keys=512,
            dim=128,
            rows=80_000_000,
            full=True,
            model="hstu",
            blocks=4,
            micro_batches=4,
            steps=10,
            rounds=2,
            plans="serial,dual_buffer,nested",
        ),
        PipelineCase(
            name="curve",
            device="cuda",
            batch=256,
            keys=512,
            dim=64,
            rows=40_000_000,
            optimizer="adagrad",
            full=True,
            width=256,
            micro_batches=2,
            first=0.5,
            last=0.5,
            curve=True,
            recompute=True,
            steps=16,
            rounds=2,
        ),
        deep_lab("lab_a", ranks=2, rows=20_000_000, last=0.3),
        lab("lab_b", ranks=2, rows=40_000_000, blocks=1, width=256, micro_batches=2),
        lab("lab_c", ranks=4, rows=40_000_000, blocks=1, width=512, micro_batches=2),
        deep_lab("lab_d", ranks=4, rows=40_000_000, last=0.6),
    )
}


class SerialLoop(StrEnum):
    """The two baselines of plan `serial`; on a CPU they are the same loop."""

    STRICT = "strict"
    """Nothing overlaps: the host waits for the device before every op of its own."""
    ASYNC = "async"
    """The loop that a user would write: the host issues work without such waits."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the workload."""

    plan: str
    retrieval: str
    micro_batches: int
    exchange: str = "micro"
    speculative_rows: bool = False
    """Whether the rows of the first micro-batch are sent early."""
    buffers: int = 2
    """Buffers of rows on the device, of a plan that looks up ahead."""
    loop: str = SerialLoop.STRICT
    """Which baseline it is, of plan `serial`; overlapping plans have lanes instead."""

    @property
    def serial(self) -> bool:
        """Whether it is a baseline, with no lanes to overlap."""
        return not plan(self.plan).shape.overlaps

    @property
    def words(self) -> tuple[str, ...]:
        """What tells it apart; the exchange only where it is not the usual one."""
        usual = self.exchange == Exchange.MICRO
        return (
            *((self.plan, str(self.loop)) if self.serial else (self.plan,)),
            *(self.retrieval, str(self.micro_batches)),
            *(() if usual else (self.exchange,)),
            *(("early",) if self.speculative_rows else ()),
            *(("third",) if self.buffers == 3 else ()),
        )

    @property
    def name(self) -> str:
        return "-".join(self.words)

    def make_plan(self, device: str = "cpu") -> Plan:
        """Its plan, as `Trainer.placed` has it on that device."""
        options = PlanOptions(
            micro_batches=self.micro_batches,
            retrieval=Retrieval(self.retrieval),
            exchange=Exchange(self.exchange),
            speculative_rows=self.speculative_rows,
            buffers=self.buffers,
        )
        made = plan(self.plan, options)
        return (
            with_separate_dense_group(with_separate_key_group(made)) if device == "cuda" else made
        )


BASELINE_FORMS = (Retrieval.WHOLE, Retrieval.NEW)
"""Forms of retrieval that `serial` always runs in; a pool only where it is asked for."""


def case_of(name: str) -> PipelineCase:
    """The workload of that name."""
    if name not in CASES:
        raise ConfigError(f"unknown case {name!r}; use {', '.join(CASES)}")
    return CASES[name]


def check_names(
    plans: Iterable[str], forms: Iterable[str], exchanges: Iterable[str] = ("micro",)
) -> None:
    """Refuse plans and forms of retrieval and exchange that do not exist."""
    for name in plans:
        if name not in PLANS:
            raise ConfigError(f"unknown plan {name!r}; the plans are {', '.join(PLANS)}")
    for form in forms:
        if form not in list(Retrieval):
            raise ConfigError(f"unknown retrieval {form!r}; use whole, new or pooled")
    for exchange in exchanges:
        if exchange not in list(Exchange):
            raise ConfigError(f"unknown exchange {exchange!r}; use {' or '.join(Exchange)}")


def variant_of(case: PipelineCase, name: str, form: str, exchange: str = "micro") -> Variant:
    """A plan as the case wants it: what only nested pipelines can have, others do without."""
    stale = plan(name).shape.stale  # it has one form only
    shape = plan(name, PlanOptions(retrieval=Retrieval.WHOLE if stale else Retrieval(form))).shape
    nested = shape.refreshes_ahead and shape.window_overlaps
    buffers = case.buffers if nested and form == Retrieval.NEW else 2
    return Variant(
        name, form, case.micro_batches, exchange, case.speculative_rows and nested, buffers
    )


def variants_of(
    case: PipelineCase,
    plans: tuple[str, ...],
    forms: tuple[str, ...],
    exchanges: tuple[str, ...] = ("micro",),
) -> list[Variant]:
    """The runs to compare: each plan in each form of retrieval and of exchange.

    `serial` is always among them, in every form of retrieval that moves copies of rows, in those
    asked for, and with every exchange: it is what the others are measured against, and what their
    steps are predicted from. It also runs without
    micro-batches, which it has no use for, so that the comparison is with the best of it. On a GPU
    all of these run twice, as strict and as async loop.
    """
    check_names(plans, forms, exchanges)
    if case.micro_batches == 1 and Exchange.WINDOW in exchanges:
        raise ConfigError(
            "exchange is 'window' and micro_batches 1: one micro-batch shares rows with none; "
            "set more micro_batches or use micro"
        )
    ways = list(dict.fromkeys(exchanges))
    others = [
        variant_of(case, name, form, exchange)
        for name in dict.fromkeys(plans)
        if plan(name).shape.overlaps
        for form in dict.fromkeys(forms)
        if form == "whole" or not plan(name).shape.stale
        for exchange in ways
    ]
    bases = dict.fromkeys((*BASELINE_FORMS, *map(Retrieval, forms)))
    serial = [Variant("serial", form, case.micro_batches, way) for way in ways for form in bases]
    unsplit = [Variant("serial", form, 1) for form in bases] if case.micro_batches > 1 else []
    return [*serial_loops(case, [*unsplit, *serial]), *others]


def serial_loops(case: PipelineCase, strict: Sequence[Variant]) -> list[Variant]:
    """The baselines, first those that are strict; on a CPU no loop is asynchronous."""
    loops = SerialLoop if case.device == "cuda" else (SerialLoop.STRICT,)
    return [replace(variant, loop=str(loop)) for loop in loops for variant in strict]
