"""Drawings of a trace: what all of them share, and the one as text for a terminal.

Shared are short codes, the order of lanes, round ticks and colours. The text has a line per lane,
time to the right, and a labelled block per op.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.errors import ConfigError
from nestpipe.trace.span import LANES, Span, Trace

CODES: Mapping[str, str] = {
    "prefetch": "p",
    "copy": "c",
    "dedup": "dd",
    "counts": "n",
    "keys": "k",
    "union": "un",
    "replica_keys": "rk",
    "replica_union": "ru",
    "stale_mask": "sm",
    "retrieve": "rt",
    "sync": "s",
    "swap": "sw",
    "patch": "pa",
    "rows": "r",
    "dense": "d",
    "grads": "g",
    "totals": "t",
    "reduce": "rd",
    "norm": "nm",
    "apply": "a",
    "update": "u",
    "replica_sync": "rs",
    "writeback": "w",
}
"""One or two letters per known kind, in the order in which a batch meets them."""


SHORTEST = 1e-9
"""A trace shorter than this, in milliseconds, is drawn as one moment: a scale would overflow."""


def codes_for(kinds: Collection[str]) -> dict[str, str]:
    """A distinct code of letters for each kind, in drawing order; the known kinds keep theirs."""
    chosen = {kind: code for kind, code in CODES.items() if kind in kinds}
    taken = set(CODES.values())
    for kind in sorted(set(kinds) - set(CODES)):
        chosen[kind] = next(code for code in _candidates(kind) if code not in taken)
        taken.add(chosen[kind])
    return chosen


def _candidates(kind: str) -> Iterator[str]:
    # Letters only: a digit at the end of a code would read as part of the batch number.
    letters = "".join(c for c in kind.lower() if c.isascii() and c.isalpha())
    yield from (letters[:n] for n in range(1, len(letters) + 1))
    stem = letters[:1] or "x"
    yield from (stem + "x" * n for n in range(1, 10_000))


def short_label(span: Span, codes: Mapping[str, str]) -> str:
    """The op by its code, e.g. `r1.0` for `rows 1.0`."""
    return codes[span.kind] + number(span)


def number(span: Span) -> str:
    """Batch and micro-batch without the kind, e.g. `1.0`."""
    return f"{span.batch}" + ("" if span.micro is None else f".{span.micro}")


def plain(text: str) -> str:
    """The text with everything that would break a line or an XML file replaced by `?`."""
    return "".join(c if c.isprintable() else "?" for c in text)


def is_nominal(spans: Sequence[Span]) -> bool:
    """Whether the times are small whole numbers: units of a drawn schedule, not milliseconds."""
    durations = [span.duration for span in spans if span.duration > 0]
    whole = all(float(t).is_integer() for span in spans for t in (span.start, span.end))
    return bool(durations) and whole and max(durations) <= 64 * min(durations)


def lane_order(lanes: Iterable[str]) -> list[str]:
    """The known lanes in drawing order, then the unknown ones by name."""
    present = set(lanes)
    return [lane for lane in LANES if lane in present] + sorted(present - set(LANES))


def sublines(spans: Sequence[Span], slack: float = 0.0) -> list[int]:
    """For each span the line of its lane that has room for it; overlaps up to `slack` share one."""
    lines: list[int] = [0] * len(spans)
    busy_until: dict[str, list[float]] = {}
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[index]
        ends = busy_until.setdefault(span.lane, [])
        line = next((n for n, end in enumerate(ends) if span.start >= end - slack), len(ends))
        if line == len(ends):
            ends.append(span.end)
        ends[line] = max(ends[line], span.end)
        lines[index] = line
    return lines


@dataclass(frozen=True, slots=True)
class Tick:
    """A round moment of the time axis and how it is written."""

    time: float
    text: str


def ticks(start: float, end: float, step: float) -> list[Tick]:
    """The multiples of a round step between start and end."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [Tick(n * step, f"{n * step:.{digits}f}") for n in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))


def short_number(value: float) -> str:
    """At most three decimals, and none that are zero."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


# Colours: a hue per batch, a shade or pattern per family of kinds.


HUES = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#3bb0d6", "#ccaa22")
"""One per batch in turn; neighbours differ in lightness too, so they part without colour vision."""

NEUTRAL = "#76828f"
"""The hue of a family in the legend, where no batch is meant."""

INK = "#1d2733"
FAINT_INK = "#64707d"
PAPER = "#fcfdfe"
RULE = "#dde3ea"
STRIP = "#f2f5f8"
MARK = "#d0021b"

FAMILIES = {
    "compute": ("dense", "apply", "update"),
    "exchange": ("rows", "patch", "grads", "totals", "reduce", "norm", "replica_sync"),
    "memory": ("prefetch", "copy", "retrieve", "writeback"),
    "routing": (
        *("dedup", "counts", "keys", "union", "replica_keys", "replica_union"),
        *("stale_mask", "sync", "swap"),
    ),
}
"""The families of kinds, by what they keep busy; any other kind belongs to `other`."""

OTHER = "other"

_FAMILY_OF = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}
_TINT = {"compute": 0.0, "exchange": 0.52, "memory": 0.80, "routing": 0.62, OTHER: 0.94}
_PATTERNS = {
    "exchange": '<path d="M-2 2 L2 -2 M0 8 L8 0 M6 10 L10 6" stroke="{0}" stroke-width="2.4"/>',
    "routing": '<path d="M1 2 h2 M5 6 h2" stroke="{0}" stroke-width="2"/>',
}

Paint = tuple[str, str]
"""A family and the hue of a batch."""


def paint_of(kind: str, batch: int) -> Paint:
    """How an op of this kind and batch is painted."""
    return _FAMILY_OF.get(kind, OTHER), HUES[batch % len(HUES)]


def fill(paint: Paint) -> str:
    """What to write into a `fill` attribute."""
    family, hue = paint
    return f"url(#{_pattern_id(paint)})" if family in _PATTERNS else tint(hue, _TINT[family])


def edge(paint: Paint) -> str:
    """The outline of a block: its hue, darkened where the fill is the hue itself."""
    family, hue = paint
    return shade(hue, 0.25) if family == "compute" else tint(hue, 0.15)


def is_dark(paint: Paint) -> bool:
    """Whether white reads better on the fill than ink."""
    family, hue = paint
    red, green, blue = _parts(tint(hue, _TINT[family]))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def patterns(paints: Iterable[Paint]) -> list[str]:
    """The SVG definitions that `fill` refers to."""
    return [_pattern(paint) for paint in sorted(set(paints)) if paint[0] in _PATTERNS]


def tint(color: str, share: float) -> str:
    """The colour mixed with this share of white."""
    return _mixed(color, 255, share)


def shade(color: str, share: float) -> str:
    """The colour mixed with this share of black."""
    return _mixed(color, 0, share)


def _pattern(paint: Paint) -> str:
    family, hue = paint
    ground = tint(hue, _TINT[family])
    # The figure stays close to its ground: a label is written over it.
    figure = _PATTERNS[family].format(tint(hue, _TINT[family] + 0.16))
    return (
        f'<pattern id="{_pattern_id(paint)}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{ground}"/>{figure}</pattern>'
    )


def _pattern_id(paint: Paint) -> str:
    return f"{paint[0]}-{paint[1][1:]}"


def _mixed(color: str, other: int, share: float) -> str:
    parts = (round(part * (1 - share) + other * share) for part in _parts(color))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _parts(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


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
