"""What ops cost, batch by batch, read from traces of `serial`; and other plans predicted from it.

Costs that are typical for a kind, as `fit` reads them, leave out that batches and ranks differ, and
everybody waits for the slowest. Here a replay meets the very costs that were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nestpipe.errors import ParseError
from nestpipe.schedule.op import Kind, Lane, Op
from nestpipe.schedule.plans import Plan
from nestpipe.schedule.schedule import Retrieval
from nestpipe.sim.sharing import Sharing, replay_shared
from nestpipe.trace import Span, Trace

WARM_UP = 2
"""Batches at the start of a trace that are left out."""
REFRESH_KINDS = frozenset({Kind.UNION, Kind.SYNC})
"""What plans with two buffers do for the rows that neighbours share, whatever they retrieve; of the
serial runs only the one that retrieves new rows does it."""


@dataclass(frozen=True, slots=True)
class SerialRuns:
    """Traces of `serial` in both forms of retrieval, and what the ranks shared."""

    whole: Sequence[Trace]
    new: Sequence[Trace]
    sharing: Sharing

    def predict(self, plan: Plan, *, batches: int) -> Trace:
        """The trace that another plan of as many micro-batches would have."""
        whole, new = (SerialCosts(runs, self.sharing) for runs in (self.whole, self.new))
        shape = plan.shape

        def cost_of(op: Op, rank: int) -> float:
            refreshes = shape.buffers > 1 and op.kind in REFRESH_KINDS
            return (new if shape.retrieval is Retrieval.NEW or refreshes else whole)(op, rank)

        return replay_shared(plan, cost_of, self.sharing, batches=batches)


class SerialCosts:
    """What every op took out of its pool, batch by batch, in traces of `serial`.

    In a serial run nothing overlaps on a rank, so an op has had all the time since the op before it
    ended. A collective counts from when its last member came.
    """

    def __init__(self, traces: Sequence[Trace], sharing: Sharing) -> None:
        self._batches: list[dict[tuple[Kind, int | None, int], float]] = []
        for trace in traces:
            costs = _costs_of(trace, sharing)
            batches = sorted({batch for _, batch, _, _ in costs})
            # The last batch may end unlike the others: nothing follows it.
            for batch in batches[WARM_UP:-1]:
                self._batches.append(
                    {(k, m, r): ms for (k, b, m, r), ms in costs.items() if b == batch}
                )
        if not self._batches:
            raise ParseError(
                f"a trace needs more than {WARM_UP + 1} batches to tell costs; trace more"
            )

    def __call__(self, op: Op, rank: int) -> float:
        """Batches take turns, as often as needed; a kind that was not seen costs nothing."""
        batch = self._batches[op.batch % len(self._batches)]
        return batch.get((op.kind, op.micro, rank), 0.0)


_Key = tuple[Kind, int, int | None, int]


def _costs_of(trace: Trace, sharing: Sharing) -> dict[_Key, float]:
    """What each op of each rank took: (kind, batch, micro, rank) to milliseconds."""
    turns = [turn for rank in trace.ranks for turn in _turns(trace.of_rank(rank))]
    last_arrival: dict[str, float] = defaultdict(float)
    for span, begin in turns:
        last_arrival[span.name] = max(last_arrival[span.name], begin)
    shared = {lane.value for lane in sharing.lanes}
    pools: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span, begin in turns:
        if span.lane in shared:
            pools[sharing.pools[span.rank]].append((begin, span.end))
    drawn = {pool: _Drawn(intervals, sharing) for pool, intervals in pools.items()}
    costs: dict[_Key, float] = {}
    for span, begin in turns:
        key = (Kind(span.kind), span.batch, span.micro, span.rank)
        if span.lane == Lane.NET:
            costs[key] = max(0.0, span.end - last_arrival[span.name])
        elif span.lane in shared:
            costs[key] = drawn[sharing.pools[span.rank]].between(begin, span.end)
        else:
            costs[key] = span.end - begin
    return costs


def _turns(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """Each op of a rank, and when its turn came: when the one before it ended."""
    ordered = sorted(spans, key=lambda span: (span.end, span.start))
    begins = [ordered[0].start, *(span.end for span in ordered[:-1])]
    return [(span, min(begin, span.start)) for span, begin in zip(ordered, begins, strict=True)]


class _Drawn:
    """How much one op can draw from a pool up to any moment, given all that ran in it."""

    def __init__(self, intervals: Sequence[tuple[float, float]], sharing: Sharing) -> None:
        changes: dict[float, int] = defaultdict(int)
        for begin, end in intervals:
            changes[begin] += 1
            changes[end] -= 1
        self._times = sorted(changes)
        self._drawn = [0.0]
        self._speeds: list[float] = []
        num_running = 0
        for time, following in zip(self._times, self._times[1:], strict=False):
            num_running += changes[time]
            self._speeds.append(sharing.speed(max(1, num_running)))
            self._drawn.append(self._drawn[-1] + (following - time) * self._speeds[-1])

    def between(self, begin: float, end: float) -> float:
        return self._up_to(end) - self._up_to(begin)

    def _up_to(self, time: float) -> float:
        place = bisect_left(self._times, time)
        assert place < len(self._times), f"{time} is not a moment of this pool"
        return self._drawn[place]
