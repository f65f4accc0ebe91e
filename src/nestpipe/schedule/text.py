"""The text form of a schedule, which parses back to an equal value.

    schedule nested
    batches 2
    micro_batches 1
    ...
    prefetch 0
    copy 0 after prefetch 0

Blank lines and whatever follows a `#` are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from nestpipe.deprecated import WORDS, current_word
from nestpipe.errors import ParseError
from nestpipe.schedule.op import Kind, Lane, Op
from nestpipe.schedule.schedule import Exchange, Merge, Retrieval, Schedule, Shape, Step
from nestpipe.trace import Span, Trace

_T = TypeVar("_T")
_EXAMPLE_OF = {
    "schedule": "nested",
    "batches": "3",
    "micro_batches": "2",
    "retrieval": "whole",
    "lookahead": "5",
    "slots": "5",
    "buffers": "2",
    "receive": "2",
    "merge_every": "0",
    "merge": "exact",
    "exchange": "window",
    "overlaps": "yes",
    "window_overlaps": "no",
    "retrieves_ahead": "no",
    "stale": "no",
    "separate_key_group": "no",
    "separate_dense_group": "no",
    "speculative_rows": "no",
}
"""Every fact at the head of a schedule, with a value it may have."""
_USUAL = {
    "merge": "averaged",
    "exchange": "micro",
    "overlaps": "yes",
    "window_overlaps": "no",
    "retrieves_ahead": "no",
    "separate_key_group": "no",
    "separate_dense_group": "no",
    "speculative_rows": "no",
}
"""Facts that are only told where they are otherwise."""


OLD_FACTS = frozenset(old for old, new in WORDS.items() if new in _EXAMPLE_OF)


def to_text(schedule: Schedule) -> str:
    """The schedule as text: a line per fact, then a line per step in issue order."""
    shape = schedule.shape
    facts = {
        "schedule": shape.plan,
        "batches": schedule.batches,
        "micro_batches": shape.micro_batches,
        "retrieval": shape.retrieval,
        "lookahead": shape.lookahead,
        "slots": shape.slots,
        "buffers": shape.buffers,
        "receive": shape.receive,
        "merge_every": shape.merge_every,
        "merge": shape.merge,
        "exchange": shape.exchange,
        "overlaps": "yes" if shape.overlaps else "no",
        "window_overlaps": "yes" if shape.window_overlaps else "no",
        "retrieves_ahead": "yes" if shape.retrieves_ahead else "no",
        "stale": "yes" if shape.stale else "no",
        "separate_key_group": "yes" if shape.separate_key_group else "no",
        "separate_dense_group": "yes" if shape.separate_dense_group else "no",
        "speculative_rows": "yes" if shape.speculative_rows else "no",
    }
    head = [f"{name} {value}" for name, value in facts.items() if _USUAL.get(name) != value]
    return "\n".join([*head, "", *map(str, schedule), ""])


def from_text(text: str) -> Schedule:
    """Read what `to_text` wrote; says which line is wrong and what belongs there."""
    facts: dict[str, str] = {}
    steps: list[Step] = []
    lines = _meaningful_lines(text)
    for number, line in lines:
        word, _, rest = line.partition(" ")
        word = current_word(word) if word in OLD_FACTS else word
        if word in _EXAMPLE_OF:
            if steps:
                raise ParseError(f"line {number}: {line!r} is a fact; put it above the first op")
            if word in facts:
                raise ParseError(f"line {number}: {word!r} is given twice; keep one of them")
            facts[word] = rest.strip()
        else:
            steps.append(_step(number, line))
    return _schedule(facts, steps)


def _meaningful_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if line:
            yield number, line


def _step(number: int, line: str) -> Step:
    op_text, _, after_text = line.partition(" after ")
    try:
        after = tuple(Op.parse(part) for part in after_text.split(",")) if after_text else ()
        return Step(Op.parse(op_text), after)
    except ParseError as error:
        raise ParseError(f"line {number}: {error}") from None


def _schedule(facts: dict[str, str], steps: list[Step]) -> Schedule:
    facts = {**_USUAL, **facts}
    if not steps:
        raise ParseError("the schedule has no op; add lines like `prefetch 0`")
    shape = Shape(
        plan=_read(facts, "schedule", _name),
        micro_batches=_read(facts, "micro_batches", _at_least(1)),
        retrieval=_read(facts, "retrieval", Retrieval),
        lookahead=_read(facts, "lookahead", _at_least(1)),
        slots=_read(facts, "slots", _at_least(1)),
        buffers=_read(facts, "buffers", _at_least(1)),
        receive=_read(facts, "receive", _at_least(1)),
        merge_every=_read(facts, "merge_every", _at_least(0)),
        merge=_read(facts, "merge", Merge),
        exchange=_read(facts, "exchange", Exchange),
        overlaps=_read(facts, "overlaps", _yes),
        window_overlaps=_read(facts, "window_overlaps", _yes),
        retrieves_ahead=_read(facts, "retrieves_ahead", _yes),
        stale=_read(facts, "stale", _yes),
        separate_key_group=_read(facts, "separate_key_group", _yes),
        separate_dense_group=_read(facts, "separate_dense_group", _yes),
        speculative_rows=_read(facts, "speculative_rows", _yes),
    )
    batches = _read(facts, "batches", _at_least(1))
    for name, count in (("batches", batches), ("micro_batches", shape.micro_batches)):
        if count > len(steps):
            raise ParseError(f"{count} {name} cannot fit into {len(steps)} ops; mend that line")
    return Schedule(shape, batches, tuple(steps))


def _read(facts: dict[str, str], name: str, read: Callable[[str], _T]) -> _T:
    example = f"{name} {_EXAMPLE_OF[name]}"
    if name not in facts:
        raise ParseError(f"the schedule does not say its {name!r}; add a line like `{example}`")
    try:
        return read(facts[name])
    except ValueError:
        raise ParseError(f"{name!r} cannot be {facts[name]!r}; write it like `{example}`") from None


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    return read


def _name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError
    return text


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError
    return text == "yes"


# A schedule laid out in time with nominal durations, so that it can be drawn.


TICKS_OF = {Kind.PREFETCH: 3, Kind.RETRIEVE: 3, Kind.DENSE: 2}
"""Nominal durations in ticks where they are not 1; they only make a drawing look like a run."""


def nominal_trace(schedule: Schedule) -> Trace:
    """Each op as early as its lane and its edges allow; edges to ops issued later are ignored."""
    free_at = dict.fromkeys(Lane, 0)
    end_of: dict[Op, int] = {}
    spans: list[Span] = []
    for step in schedule:
        op = step.op
        ready = max((end_of.get(before, 0) for before in step.after), default=0)
        lane = schedule.shape.lane(op.kind)
        start = max(free_at[lane], ready)
        end = start + TICKS_OF.get(op.kind, 1)
        free_at[lane] = end_of[op] = end
        spans.append(Span(op.kind, lane, op.batch, op.micro, 0, float(start), float(end)))
    shape = schedule.shape
    facts = {
        "plan": shape.plan,
        "micro_batches": shape.micro_batches,
        "retrieval": str(shape.retrieval),
    }
    return Trace(tuple(spans), facts)
