"""A trace as text for a terminal: a line per lane, time to the right, a labelled block per op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.errors import ConfigError
from nestpipe.trace.cells import Block, Cells, lay_out
from nestpipe.trace.layout import (
    codes_for,
    is_nominal,
    lane_order,
    plain,
    round_step,
    short_label,
    ticks,
)
from nestpipe.trace.span import Trace

LEAST_WIDTH = 32
LONGEST_LANE = 12

_BACKGROUNDS = (117, 222, 151, 218, 159, 183)
"""Light colours of the 256-colour terminal palette, one per batch in turn, under black text."""

_BAR, _BAR_AGAIN, _BAR_MARKED, _IDLE, _POINTER = "|", ">", "!", ".", "^"


def grid(
    trace: Trace,
    *,
    width: int = 100,
    rank: int = 0,
    marks: Collection[str] = (),
    max_bands: int | None = None,
    color: bool = False,
) -> str:
    """Draw one rank of the trace, never wider than `width`, in as many bands as its labels need.

    Ops whose name is in `marks` begin with `!` and have `^` below them. Without `max_bands`, a
    nominal trace gets a label on every op and any other trace at most eight bands.
    """
    if width < LEAST_WIDTH:
        raise ConfigError(f"a grid cannot be {width} columns wide; use at least {LEAST_WIDTH}")
    if max_bands is not None and max_bands < 1:
        raise ConfigError(f"a grid cannot have {max_bands} bands; use at least 1")
    spans = trace.of_rank(rank)
    if not spans:
        return _nothing(trace, rank)[:width]
    pen = _Pen(codes_for({span.kind for span in spans}), frozenset(marks), color)
    gutter = min(LONGEST_LANE, max(len("time"), *(len(span.lane) for span in spans))) + 1
    cells = lay_out(spans, pen.codes, width - gutter, max_bands)
    unit = "time" if is_nominal(spans) else "ms"
    lanes = {lane: _on_lane(cells, lane) for lane in lane_order(span.lane for span in spans)}
    drawn: list[str] = []
    for low, high in cells.bands:
        drawn.append(unit.ljust(gutter) + _axis(cells, low, high))
        for lane, blocks in lanes.items():
            drawn += _lane(plain(lane)[: gutter - 1].ljust(gutter), blocks, low, high, pen)
        drawn.append("")
    drawn += _notes(cells, pen, width)
    if len(trace.ranks) > 1:
        drawn.append(f"rank {rank}, one of {len(trace.ranks)} ranks")
    return "\n".join(line.rstrip() for line in drawn)


@dataclass(frozen=True, slots=True)
class _Pen:
    """How ops are written: their codes, which are marked, and whether batches have colours."""

    codes: Mapping[str, str]
    marks: frozenset[str]
    color: bool

    def marked(self, block: Block) -> bool:
        return block.span.name in self.marks

    def text(self, block: Block, room: int, continued: bool) -> str:
        """A bar and the longest label that fits; a full name keeps a free cell at its end."""
        span = block.span
        bar = _BAR_MARKED if self.marked(block) else _BAR_AGAIN if continued else _BAR
        labels = (f"{plain(span.name)} ", short_label(span, self.codes), self.codes[span.kind], "")
        return (bar + next(label for label in labels if 1 + len(label) <= room)).ljust(room)


def _on_lane(cells: Cells, lane: str) -> list[Block]:
    return [block for block in cells.blocks if block.span.lane == lane]


def _lane(name: str, blocks: Iterable[Block], low: int, high: int, pen: _Pen) -> list[str]:
    """The lane's line, further lines for ops that overlap, and pointers below marked ops."""
    here = [block for block in blocks if block.first < high and block.end > low]
    drawn: list[str] = []
    for line in sorted({0, *(block.line for block in here)}):
        mine = [block for block in here if block.line == line]
        drawn.append((name if line == 0 else " " * len(name)) + _ops(mine, low, high, pen))
        marked = [block for block in mine if pen.marked(block)]
        if marked:
            drawn.append(" " * len(name) + _pointers(marked, low, high))
    return drawn


def _ops(blocks: Iterable[Block], low: int, high: int, pen: _Pen) -> str:
    texts = [_IDLE] * (high - low)
    batches: list[int | None] = [None] * len(texts)
    # Tiny ops first: a block that starts in the same cell shows one bar for both.
    for block in sorted(blocks, key=lambda b: b.last > b.first):
        first, last = max(block.first, low), min(block.end, high)
        place = slice(first - low, last - low)
        texts[place] = pen.text(block, last - first, continued=block.first < low)
        batches[place] = [block.span.batch] * (last - first)
    return _painted(texts, batches) if pen.color else "".join(texts)


def _pointers(blocks: Iterable[Block], low: int, high: int) -> str:
    texts = [" "] * (high - low)
    for block in blocks:
        first, last = max(block.first, low), min(block.end, high)
        texts[first - low : last - low] = _POINTER * (last - first)
    return "".join(texts)


def _painted(texts: Sequence[str], batches: Sequence[int | None]) -> str:
    """The line with a background colour per batch; idle cells stay plain."""
    drawn: list[str] = []
    before: int | None = None
    for text, batch in zip(texts, batches, strict=True):
        if batch != before:
            drawn.append("" if before is None else "\x1b[0m")
        if batch != before and batch is not None:
            drawn.append(f"\x1b[30;48;5;{_BACKGROUNDS[batch % len(_BACKGROUNDS)]}m")
        drawn.append(text)
        before = batch
    return "".join(drawn) + ("" if before is None else "\x1b[0m")


def _axis(cells: Cells, low: int, high: int) -> str:
    """Round times, each written from the cell where it falls."""
    start, end = (cells.start + cell / cells.scale for cell in (low, high))
    axis = [" "] * (high - low)
    free = 0
    for tick in ticks(start, end, round_step(8 / cells.scale)):
        place = max(0, round((tick.time - cells.start) * cells.scale) - low)
        beyond = place + len(tick.text)
        if free <= place and beyond <= len(axis):
            axis[place:beyond] = tick.text
            free = beyond + 1
    return "".join(axis)


def _notes(cells: Cells, pen: _Pen, width: int) -> list[str]:
    """The codes, then whatever the drawing alone does not show."""
    short = Counter(plain(b.span.kind) for b in cells.blocks if not cells.labelled(b))
    names = {block.span.name for block in cells.blocks}
    notes = {
        "": [f"{code} {plain(kind)}" for kind, code in pen.codes.items()],
        f"{short.total()} ops too short to label:": [f"{n} {kind}" for kind, n in short.items()],
        "marked:": [plain(name) for name in sorted(pen.marks & names)],
        "to be marked but not drawn:": [plain(name) for name in sorted(pen.marks - names)],
    }
    lines: list[str] = []
    for title, items in notes.items():
        if items:
            lines += _wrapped([title, *items] if title else items, width)
    return lines


def _wrapped(items: Sequence[str], width: int) -> list[str]:
    """The items two spaces apart; none is torn unless it is wider than the whole line."""
    lines = [items[0]]
    for item in items[1:]:
        if len(lines[-1]) + 2 + len(item) > width:
            lines.append(item)
        else:
            lines[-1] += f"  {item}"
    return [line[:width] for line in lines]


def _nothing(trace: Trace, rank: int) -> str:
    if not trace.spans:
        return "(no ops)"
    return f"(no ops on rank {rank}; the trace has ranks {trace.ranks[0]} to {trace.ranks[-1]})"
