"""A trace as text for a terminal: a line per lane, time to the right, a labelled block per op."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.errors import ConfigError
from nestpipe.trace.draw_style import (
    SHORTEST,
    codes_for,
    is_nominal,
    lane_order,
    plain,
    round_step,
    short_label,
    sublines,
    ticks,
)
from nestpipe.trace.span import Span, Trace

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


# Where each op of a text grid goes: time cut into character cells, cells cut into bands.


MEASURED_BANDS = 8
"""Bands for a trace with very unequal durations, where no width would make every op legible."""

NOMINAL_CELLS = 100_000
"""The longest grid that is drawn for the sake of labelling every op of a nominal trace."""


@dataclass(frozen=True, slots=True)
class Block:
    """One op on the grid: cells [first, last) of one line of its lane; tiny ops have no cell."""

    span: Span
    line: int
    first: int
    last: int
    need: int
    """Cells for the bar at its left and its short label."""

    @property
    def end(self) -> int:
        """Where the drawing of the block ends: a tiny op is drawn as one cell."""
        return max(self.last, self.first + 1)


@dataclass(frozen=True, slots=True)
class Cells:
    """A laid-out trace: its blocks, the bands they are cut into and the scale."""

    blocks: tuple[Block, ...]
    bands: tuple[tuple[int, int], ...]
    start: float
    scale: float
    """Cells per millisecond."""

    def labelled(self, block: Block) -> bool:
        """Whether some band has room for the block's short label."""
        pieces = (min(block.last, high) - max(block.first, low) for low, high in self.bands)
        return any(piece >= block.need for piece in pieces)


def lay_out(
    spans: Sequence[Span], codes: Mapping[str, str], columns: int, max_bands: int | None
) -> Cells:
    """The shortest grid that labels every op, or the longest allowed one."""
    *shorter, longest = _scales(spans, codes, columns, max_bands)
    for scale in shorter:
        cells = _at_scale(spans, codes, columns, scale)
        if all(map(cells.labelled, cells.blocks)):
            return cells
    return _at_scale(spans, codes, columns, longest)


def _needs(span: Span, codes: Mapping[str, str]) -> int:
    return 1 + len(short_label(span, codes))


def _scales(
    spans: Sequence[Span], codes: Mapping[str, str], columns: int, max_bands: int | None
) -> list[float]:
    """Cells per millisecond to try, from the smallest."""
    start = min(span.start for span in spans)
    total = max(span.end for span in spans) - start
    timed = [(span, _needs(span, codes)) for span in spans if span.duration > 0]
    if total < SHORTEST:
        return [1.0]
    nominal = is_nominal(spans)
    least = max((need / span.duration for span, need in timed), default=0.0)
    wanted = [least]
    if nominal:
        # Whole cells per unit of time keep equal ops equally wide. Where a break between bands
        # could still cut a label, a unit that holds the longest label always works.
        offsets = (int(t - start) for span in spans for t in (span.start, span.end))
        longest = max(need for _, need in timed)
        wanted = [math.ceil(least), math.ceil(longest / max(1, math.gcd(*offsets)))]
    # A tiny op at the very end is drawn in a cell after the last moment.
    spare = 0 if nominal and len(timed) == len(spans) else 1
    fits_one_line = (columns - spare) / total
    if nominal and fits_one_line >= 1:
        fits_one_line = math.floor(fits_one_line)
    most = _most_cells(nominal, columns, max_bands) / total
    return [min(most, max(scale, fits_one_line)) for scale in wanted]


def _most_cells(nominal: bool, columns: int, max_bands: int | None) -> int:
    if max_bands is None and nominal:
        return max(NOMINAL_CELLS, columns)
    bands = MEASURED_BANDS if max_bands is None else max_bands
    # Every band but the last may end early, to spare a label.
    return columns + (bands - 1) * (columns - columns // 3)


def _at_scale(spans: Sequence[Span], codes: Mapping[str, str], columns: int, scale: float) -> Cells:
    start = min(span.start for span in spans)
    # Two ops that overlap by less than half a cell are neighbours with jitter.
    lines = sublines(spans, slack=0.5 / scale)
    blocks: list[Block] = []
    filled: dict[tuple[str, int], int] = {}
    for span, line in sorted(zip(spans, lines, strict=True), key=lambda pair: pair[0].start):
        first, last = (math.floor((t - start) * scale + 0.5) for t in (span.start, span.end))
        first = max(first, min(last, filled.get((span.lane, line), 0)))
        filled[span.lane, line] = max(last, filled.get((span.lane, line), 0))
        blocks.append(Block(span, line, first, last, _needs(span, codes)))
    return Cells(tuple(blocks), tuple(_bands(blocks, columns)), start, scale)


def _bands(blocks: Sequence[Block], columns: int) -> Iterator[tuple[int, int]]:
    total = max(block.end for block in blocks)
    low = 0
    while total - low > columns:
        high = _best_break(blocks, low + columns - columns // 3, low + columns)
        yield low, high
        low = high
    yield low, total


def _best_break(blocks: Sequence[Block], least: int, most: int) -> int:
    """The cell where a new band costs the fewest labels, then few cuts and little empty width."""
    near = [block for block in blocks if block.first < most and block.last > least]

    def cost(cell: int) -> int:
        cuts = [block for block in near if block.first < cell < block.last]
        lost = [b for b in cuts if max(cell - b.first, b.last - cell) < b.need <= b.last - b.first]
        return 1000 * len(lost) + 4 * len(cuts) + (most - cell)

    return min(range(most, least - 1, -1), key=cost)
