"""The text form of a schedule, which parses back to an equal value.

    schedule nested
    batches 2
    micro_batches 1
    ...
    prefetch 0
    copy 0 after prefetch 0

A step names the ops that it starts `after`, the one that it runs `alongside`, and those that it
issues its collectives `behind`. Blank lines and whatever follows a `#` are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import StrEnum
from typing import Any

from nestpipe.deprecated import WORDS, current_word
from nestpipe.errors import ParseError
from nestpipe.schedule.schedule import DRAINING, How, Kind, Lane, Op, Schedule, Shape, Step
from nestpipe.trace import Span, Trace

_TOLD_FIRST = [
    "micro_batches",
    "retrieval",
    "lookahead",
    "slots",
    "buffers",
    "receive",
    "merge_every",
]
_ALWAYS_TOLD = frozenset((*_TOLD_FIRST, "stale"))
"""Facts that a reader looks for; the others are told where they are not as usual."""
_KNOWN = {known.name: known for known in fields(Shape) if known.name != "plan"}
FACTS = (*_TOLD_FIRST, *(name for name in _KNOWN if name not in _TOLD_FIRST))
"""The fields of the shape, in the order of the text."""
_EXAMPLES = {
    "schedule": "nested",
    "batches": "3",
    "micro_batches": "2",
    "lookahead": "5",
    "slots": "5",
    "receive": "2",
    "merge": "exact",
    "exchange": "window",
}
"""Values for facts that have no usual one, or one that would teach little."""
_WORDS = {"schedule", "batches", *FACTS}
OLD_FACTS = frozenset(old for old, new in WORDS.items() if new in _WORDS)


def to_text(schedule: Schedule) -> str:
    """The schedule as text: a line per fact, then a line per step in issue order."""
    shape = schedule.shape
    head = [f"schedule {shape.plan}", f"batches {schedule.batches}"]
    for name in FACTS:
        value = getattr(shape, name)
        if name in _ALWAYS_TOLD or value != _KNOWN[name].default:
            head.append(f"{name} {_word(value)}")
    return "\n".join([*head, "", *map(str, schedule), ""])


def _word(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def from_text(text: str) -> Schedule:
    """Read what `to_text` wrote; says which line is wrong and what belongs there."""
    facts: dict[str, str] = {}
    steps: list[Step] = []
    lines = _meaningful_lines(text)
    for number, line in lines:
        word, _, rest = line.partition(" ")
        word = current_word(word) if word in OLD_FACTS else word
        if word in _WORDS:
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


_TIES = re.compile(r" (after|alongside|behind) ")


def _step(number: int, line: str) -> Step:
    op_text, *rest = _TIES.split(line)
    try:
        ties: dict[str, tuple[Op, ...]] = {}
        for how, befores in zip(rest[::2], rest[1::2], strict=True):
            if how in ties:
                raise ParseError(f"`{how}` is there twice; name all its ops behind one of them")
            ties[how] = tuple(Op.parse(part) for part in befores.split(","))
        first, *more = ties.get(How.ALONGSIDE, (None,))
        if more:
            raise ParseError("an op runs alongside one other; keep one of them")
        after, behind = ties.get(How.AFTER, ()), ties.get(How.BEHIND, ())
        return Step(Op.parse(op_text), after, first, behind)
    except ParseError as error:
        raise ParseError(f"line {number}: {error}") from None


def _schedule(facts: dict[str, str], steps: list[Step]) -> Schedule:
    if not steps:
        raise ParseError("the schedule has no op; add lines like `prefetch 0`")
    told = [name for name in FACTS if name in facts or name in _ALWAYS_TOLD]
    values = {name: _read(facts, name) for name in told}
    shape = Shape(plan=_read(facts, "schedule"), **values)
    batches = _read(facts, "batches")
    for name, count in (("batches", batches), ("micro_batches", shape.micro_batches)):
        if count > len(steps):
            raise ParseError(f"{count} {name} cannot fit into {len(steps)} ops; mend that line")
    return Schedule(shape, batches, tuple(steps))


def _read(facts: dict[str, str], name: str) -> Any:
    """The value of a fact, of the type that the field has."""
    usual = _KNOWN[name].default if name in _KNOWN else MISSING
    example = f"{name} {_EXAMPLES.get(name, _word(usual))}"
    if name not in facts:
        raise ParseError(f"the schedule does not say its {name!r}; add a line like `{example}`")
    try:
        return _value(name, facts[name], usual)
    except ValueError:
        raise ParseError(f"{name!r} cannot be {facts[name]!r}; write it like `{example}`") from None


def _value(name: str, text: str, usual: object) -> object:
    if name == "schedule":
        if not text.isidentifier():
            raise ValueError
        return text
    if isinstance(usual, StrEnum):
        return type(usual)(text)
    if isinstance(usual, bool):
        if text not in ("yes", "no"):
            raise ValueError
        return text == "yes"
    least = 0 if usual == 0 else 1
    if int(text) < least:
        raise ValueError
    return int(text)


# A schedule laid out in time with nominal durations, so that it can be drawn.


TICKS_OF = {Kind.PREFETCH: 3, Kind.RETRIEVE: 3, Kind.DENSE: 2}
"""Nominal durations in ticks where they are not 1; they only make a drawing look like a run."""


def nominal_trace(schedule: Schedule) -> Trace:
    """Each op as early as its lane and its ties allow; ties to ops issued later are ignored.

    Where nothing overlaps, no op starts before the one that is issued before it has ended.
    """
    free_at = dict.fromkeys(Lane, 0)
    start_of: dict[Op, int] = {}
    end_of: dict[Op, int] = {}
    spans: list[Span] = []
    for step in schedule:
        op = step.op
        lane = schedule.shape.lane(op.kind)
        starts = [start_of.get(tie.before, 0) for tie in step.ties if tie.how is not How.AFTER]
        start = max(free_at[lane], *starts, *(end_of.get(before, 0) for before in step.after), 0)
        if not schedule.shape.overlaps:
            start = max(start, max(free_at.values()))
        end = start + TICKS_OF.get(op.kind, 1)
        if step.alongside is not None and op.kind in DRAINING:
            end = max(end, end_of.get(step.alongside, 0) + 1)
        start_of[op], free_at[lane], end_of[op] = start, end, end
        spans.append(Span(op.kind, lane, op.batch, op.micro, 0, float(start), float(end)))
    shape = schedule.shape
    facts = {
        "plan": shape.plan,
        "micro_batches": shape.micro_batches,
        "retrieval": str(shape.retrieval),
    }
    return Trace(tuple(spans), facts)
