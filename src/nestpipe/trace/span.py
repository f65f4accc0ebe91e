"""What ran when: one `Span` per op and rank, collected in a `Trace`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LANES = ("loader", "copy", "keys", "route", "host", "write", "net", "compute", "dense_net")
"""Every lane, in the order in which a batch meets them and in which they are drawn."""

Fact = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """One op as it ran, e.g. `dense 7.1` on rank 3 from 12.5 ms to 40.0 ms."""

    kind: str
    lane: str
    batch: int
    micro: int | None
    rank: int
    start: float
    """Milliseconds since the start of the run."""
    end: float
    """Milliseconds since the start of the run."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch}" + ("" if self.micro is None else f".{self.micro}")

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one run, measured, simulated or nominal, with facts about the run."""

    spans: tuple[Span, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    """What produced the trace: `plan`, `workers`, `micro_batches`, `samples_per_worker` and
    `retrieval`."""

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def duration(self) -> float:
        """From the first start to the last end, in milliseconds."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)
