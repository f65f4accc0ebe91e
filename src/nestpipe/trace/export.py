"""Traces for a browser: as Chrome trace events, and as one self-contained SVG.

ui.perfetto.dev and chrome://tracing open the events. The SVG has a row per lane, and a block per op
with its times on hover.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import cast

from nestpipe.deprecated import current_word
from nestpipe.errors import ConfigError, ParseError
from nestpipe.trace import draw
from nestpipe.trace.draw import (
    SHORTEST,
    codes_for,
    is_nominal,
    lane_order,
    number,
    plain,
    round_step,
    short_label,
    short_number,
    sublines,
    ticks,
)
from nestpipe.trace.span import Fact, Span, Trace

Event = dict[str, object]
Thread = tuple[str, int]

_LARGEST = sys.float_info.max


def to_chrome(trace: Trace) -> dict[str, object]:
    """One process per rank and one thread per lane; the args hold the exact milliseconds."""
    names: list[Event] = []
    tids: dict[int, dict[Thread, int]] = {}
    threads: list[Thread] = [("", 0)] * len(trace.spans)
    for rank in trace.ranks:
        places = [i for i, span in enumerate(trace.spans) if span.rank == rank]
        lines = sublines([trace.spans[i] for i in places])
        for place, line in zip(places, lines, strict=True):
            threads[place] = (trace.spans[place].lane, line)
        tids[rank] = _thread_ids({threads[i] for i in places})
        names += _names(rank, tids[rank])
    ops = [
        _event(span, tids[span.rank][thread])
        for span, thread in zip(trace.spans, threads, strict=True)
    ]
    return {
        "traceEvents": names + ops,
        "displayTimeUnit": "ms",
        "otherData": dict(trace.facts),
    }


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace as a JSON file."""
    try:
        Path(path).write_text(json.dumps(to_chrome(trace)) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the trace to '{path}': {error.strerror};"
            " name a file in an existing folder"
        ) from error


def read_chrome(path: str | os.PathLike[str]) -> Trace:
    """The trace that `write_chrome` wrote; events of other tools in the file are passed over."""
    document = _load(path)
    facts: dict[str, Fact] = {}
    if isinstance(document, dict):
        table = cast("dict[str, object]", document)
        facts = _facts(table.get("otherData"))
        document = table.get("traceEvents")
    if not isinstance(document, list):
        raise ParseError(
            f"'{path}' is JSON but holds no list of trace events; give a file that"
            " `write_chrome` wrote"
        )
    events = cast("list[object]", document)
    spans = [_span(event, f"event {n} of '{path}'") for n, event in enumerate(events)]
    found = tuple(span for span in spans if span is not None)
    if not found:
        raise ParseError(
            f"none of the {len(events)} events of '{path}' is a nestpipe op; give a trace that"
            " nestpipe wrote"
        )
    return Trace(found, facts)


def _thread_ids(threads: set[Thread]) -> dict[Thread, int]:
    # A viewer misdraws ops that overlap within one thread, so each sub-line gets its own.
    place = {lane: n for n, lane in enumerate(lane_order(lane for lane, _ in threads))}
    ordered = sorted(threads, key=lambda thread: (place[thread[0]], thread[1]))
    return {thread: n for n, thread in enumerate(ordered, start=1)}


def _names(rank: int, tids: Mapping[Thread, int]) -> list[Event]:
    def named(what: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}

    events = [
        named("process_name", 0, name=f"rank {rank}"),
        named("process_sort_index", 0, sort_index=rank),
    ]
    for (lane, line), tid in tids.items():
        name = lane if line == 0 else f"{lane} ({line + 1})"
        events.append(named("thread_name", tid, name=name))
        events.append(named("thread_sort_index", tid, sort_index=tid))
    return events


def _event(span: Span, tid: int) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": tid,
        "ts": span.start * 1000,
        "dur": span.duration * 1000,
        "args": {
            "kind": span.kind,
            "lane": span.lane,
            "batch": span.batch,
            "micro": span.micro,
            # Microseconds would round: these two are read back instead of ts and dur.
            "start_ms": span.start,
            "end_ms": span.end,
        },
    }


def _load(path: str | os.PathLike[str]) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ParseError(
            f"cannot read the trace '{path}': {error.strerror}; give the path of a trace file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ParseError(
            f"'{path}' is not JSON ({error}); give a file that `write_chrome` wrote"
        ) from error


def _facts(stored: object) -> dict[str, Fact]:
    if not isinstance(stored, dict):
        return {}
    table = cast("dict[str, object]", stored)
    known = {name: value for name, value in table.items() if isinstance(value, str | int | float)}
    return {current_word(name): value for name, value in known.items()}


def _span(event: object, where: str) -> Span | None:
    """The event as a span, or None where another tool wrote it."""
    if not isinstance(event, dict):
        raise ParseError(f"{where} is {event!r:.40}, not an object; remove it or write it anew")
    fields = cast("dict[str, object]", event)
    stored = fields.get("args")
    args = cast("dict[str, object]", stored) if isinstance(stored, dict) else {}
    kind, lane = args.get("kind"), args.get("lane")
    if fields.get("ph") != "X" or not isinstance(kind, str) or not isinstance(lane, str):
        return None
    start, end = _times(fields, args, where)
    micro = args.get("micro")
    return Span(
        kind=kind,
        lane=lane,
        batch=_whole(args.get("batch"), "batch", where),
        micro=None if micro is None else _whole(micro, "micro", where),
        rank=_whole(fields.get("pid"), "pid", where),
        start=start,
        end=end,
    )


def _times(fields: Event, args: Event, where: str) -> tuple[float, float]:
    if "start_ms" in args or "end_ms" in args:
        start = _finite(args.get("start_ms"), "start_ms", where)
        end = _finite(args.get("end_ms"), "end_ms", where)
    else:
        start = _finite(fields.get("ts"), "ts", where) / 1000
        end = start + _finite(fields.get("dur"), "dur", where) / 1000
    if end < start:
        raise ParseError(f"{where} ends at {end} ms before it starts at {start} ms; trace it anew")
    return start, end


def _finite(value: object, name: str, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return value
    raise ParseError(f"{where} has {name} {value!r:.40}; it must be a finite number")


def _whole(value: object, name: str, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ParseError(f"{where} has {name} {value!r:.40}; it must be a whole number")


MOST_RANKS = 8
"""More than this many stacked ranks no longer fit a screen."""

LEAST_WIDTH = 360

_LINE = 32.0
_BLOCK = 26.0
_GAP = 6.0
_RANK_NAME = 26.0


def svg(
    trace: Trace,
    *,
    title: str = "",
    rank: int | None = 0,
    width: int = 1200,
    marks: Collection[str] = (),
) -> str:
    """Draw one rank, or with rank None the first eight stacked; equal traces give equal text.

    Ops whose name is in `marks` get a red outline and a pointer above them.
    """
    if width < LEAST_WIDTH:
        raise ConfigError(f"an SVG cannot be {width} pixels wide; use at least {LEAST_WIDTH}")
    ranks = trace.ranks[:MOST_RANKS] if rank is None else (rank,)
    drawn = [span for span in trace.spans if span.rank in ranks]
    page = Page.around(drawn, width, frozenset(marks))
    head, top = _head(page, trace, drawn, title)
    rows = list(_rows(page, drawn, top))
    bottom = max((row.y + row.height for row in rows), default=top - 16)
    foot, height = legend(page, drawn, bottom + 18)
    parts = [*frame(page, height, drawn), *head]
    for row in rows:
        parts += _strip(page, row)
    parts += _axis(page, top, bottom) if rows else []
    for row in rows:
        parts += _ops(page, row)
    return "\n".join([*parts, *foot, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class _Row:
    """One lane of one rank: its spans, the line of each, and where the row lies."""

    lane: str
    rank_name: str
    """Written above the first row of a rank where there are several."""
    spans: tuple[Span, ...]
    lines: tuple[int, ...]
    y: float

    @property
    def height(self) -> float:
        return _LINE * (1 + max(self.lines))


def _rows(page: Page, spans: Sequence[Span], y: float) -> Iterator[_Row]:
    ranks = sorted({span.rank for span in spans})
    for rank in ranks:
        name = f"rank {rank}" if len(ranks) > 1 else ""
        for lane in lane_order(span.lane for span in spans if span.rank == rank):
            y += _RANK_NAME if name else 0
            found = (span for span in spans if span.rank == rank and span.lane == lane)
            mine = tuple(sorted(found, key=lambda span: (span.start, span.end, span.name)))
            # Overlaps too small to see are neighbours with jitter.
            lines = tuple(sublines(mine, slack=0.5 / page.scale))
            row = _Row(lane, name, mine, lines, y)
            yield row
            y += row.height + _GAP
            name = ""


def _strip(page: Page, row: _Row) -> Iterator[str]:
    if row.rank_name:
        yield text(MARGIN, row.y - 8, row.rank_name, "rank")
    yield (
        f'<rect class="np-strip" x="{MARGIN - 8:g}" y="{row.y:g}"'
        f' width="{page.right - MARGIN + 16:g}" height="{row.height:g}" rx="6"/>'
    )
    yield text(MARGIN, row.y + _LINE / 2 + 4, clipped(row.lane, 10), "lane")


def _ops(page: Page, row: _Row) -> Iterator[str]:
    for span, line in zip(row.spans, row.lines, strict=True):
        yield from _op(page, span, row.y + line * _LINE + (_LINE - _BLOCK) / 2)


def _op(page: Page, span: Span, y: float) -> Iterator[str]:
    """One rectangle with its tooltip, a label if it has room, a pointer if it is marked."""
    x = page.x(span.start) + 0.5
    # A hair of paper between neighbours; ops too short to see still get a visible sliver.
    room = max(page.x(span.end) - x - 0.5, 0.8)
    paint = draw.paint_of(span.kind, span.batch)
    marked = span.name in page.marks
    yield (
        f'<rect class="np-op{" np-marked" if marked else ""}" x="{x:.2f}" y="{y:.2f}"'
        f' width="{room:.2f}" height="{_BLOCK:g}" rx="{min(4.0, room / 4):.2f}"'
        f' fill="{draw.fill(paint)}"'
        f' stroke="{draw.MARK if marked else draw.edge(paint)}">'
        f"<title>{escape(_tooltip(page, span))}</title></rect>"
    )
    yield from _label(page, span, x + room / 2, y, room)
    if marked:
        tip = f"M{x + room / 2 - 5:.2f} {y - 9:.2f} h10 l-5 7 z"
        yield f'<path class="np-pointer" d="{tip}" fill="{draw.MARK}"/>'


def _label(page: Page, span: Span, middle: float, y: float, room: float) -> Iterator[str]:
    """The longest form of the op's name that stays inside its block, or nothing."""
    style = "light" if draw.is_dark(draw.paint_of(span.kind, span.batch)) else "dark"
    for label in (span.name, short_label(span, page.codes)):
        if label_width(len(label), LABEL) + 5 <= room:
            yield text(middle, y + _BLOCK / 2 + 4, label, f"label np-{style}")
            return
    code, digits = page.codes[span.kind], number(span)
    if label_width(max(len(code), len(digits)), SMALL_LABEL) + 0.5 <= room:
        yield text(middle, y + 11, code, f"label np-small np-{style}")
        yield text(middle, y + 21, digits, f"label np-small np-{style}")


def _tooltip(page: Page, span: Span) -> str:
    return (
        f"{plain(span.name)} on {plain(span.lane)}, rank {span.rank}: {page.written(span.start)}"
        f" to {page.written(span.end)}, {page.written(span.duration)} long"
    )


def _axis(page: Page, top: float, bottom: float) -> Iterator[str]:
    yield text(MARGIN, top - 10, page.unit.strip() or "time", "lane")
    for tick in ticks(page.start, page.end, round_step(80 / page.scale)):
        x = page.x(tick.time)
        yield f'<path class="np-rule" d="M{x:.2f} {top - 5:g} V{bottom + 3:g}"/>'
        yield text(x, top - 10, tick.text, "tick")


def _head(page: Page, trace: Trace, drawn: Sequence[Span], title: str) -> tuple[list[str], float]:
    """The title, what is drawn and what is not; and where the first row begins."""
    parts = [text(MARGIN, 38, title, "title")] if title else []
    y = 60.0 if title else 34.0
    ranks = sorted({span.rank for span in drawn})
    facts = ["no ops"]
    if drawn:
        facts = [f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"]
        facts.append(f"{len({span.batch for span in drawn})} batches")
        facts.append(f"{len(drawn)} ops")
        length = max(s.end for s in drawn) - min(s.start for s in drawn)
        facts.append(f"length {short_number(round(length, 1))}{page.unit}")
    if len(ranks) < len(trace.ranks):
        facts.append(f"{len(trace.ranks) - len(ranks)} of {len(trace.ranks)} ranks not drawn")
    return [*parts, text(MARGIN, y, ", ".join(facts), "note")], y + 44


# The page that an SVG is drawn on: where time falls, the frame, the legend, text that fits.


MARGIN = 24.0
NAMES = 76.0
"""The column of lane names."""
LABEL = 11.0
SMALL_LABEL = 8.5
"""Font sizes of a block's label: on one line, and as code above number."""

_SANS = "ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif"
_MONO = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"

# Every class has a prefix, because a page that inlines the drawing shares its style with it.
_STYLE = f"""
.np-trace text{{font:12px {_SANS};fill:{draw.FAINT_INK};white-space:pre}}
.np-trace .np-title{{font-size:18px;font-weight:600;fill:{draw.INK}}}
.np-trace .np-rank{{font-weight:600;fill:{draw.INK}}}
.np-trace .np-lane{{font-weight:600}}
.np-trace .np-tick{{font-size:11px;text-anchor:middle}}
.np-trace .np-codes{{font:{LABEL:g}px {_MONO}}}
.np-trace .np-label{{font:{LABEL:g}px {_MONO};text-anchor:middle;pointer-events:none}}
.np-trace .np-small{{font-size:{SMALL_LABEL:g}px}}
.np-trace .np-dark{{fill:{draw.INK}}}
.np-trace .np-light{{fill:#ffffff}}
.np-strip{{fill:{draw.STRIP}}}
.np-rule{{stroke:{draw.RULE};fill:none}}
.np-op:hover{{stroke:{draw.INK};stroke-width:2}}
.np-marked{{stroke-width:2.5}}
"""


@dataclass(frozen=True, slots=True)
class Page:
    """Where time falls, and how ops and times are written."""

    width: int
    start: float
    scale: float
    """Pixels per millisecond."""
    unit: str
    """What follows a number: nothing where the times are units of a drawn schedule."""
    codes: Mapping[str, str]
    marks: frozenset[str]

    @classmethod
    def around(cls, spans: Sequence[Span], width: int, marks: frozenset[str]) -> Page:
        start = min((span.start for span in spans), default=0.0)
        length = max((span.end for span in spans), default=0.0) - start
        scale = (width - 2 * MARGIN - NAMES) / length if length >= SHORTEST else 1.0
        unit = "" if is_nominal(spans) else " ms"
        return cls(width, start, scale, unit, codes_for({s.kind for s in spans}), marks)

    @property
    def right(self) -> float:
        return self.width - MARGIN

    @property
    def end(self) -> float:
        """The time at the right margin."""
        return self.start + (self.right - MARGIN - NAMES) / self.scale

    def x(self, time: float) -> float:
        return MARGIN + NAMES + (time - self.start) * self.scale

    def written(self, time: float) -> str:
        return short_number(time) + self.unit


def label_width(letters: int, size: float) -> float:
    """The width of a label, from a wide fixed-width font: what fits here fits with any."""
    return 0.61 * size * letters


def text(x: float, y: float, content: str, style: str) -> str:
    """A text element; the content may hold anything."""
    return f'<text class="np-{style}" x="{x:.2f}" y="{y:.2f}">{escape(plain(content))}</text>'


def clipped(content: str, most: int) -> str:
    """The content in at most this many characters."""
    return content if len(content) <= most else content[: most - 1] + "~"


def frame(page: Page, height: float, spans: Sequence[Span]) -> list[str]:
    """The opening of the file: size, style, patterns, and paper that also reads on a dark page."""
    used = {draw.paint_of(span.kind, span.batch) for span in spans}
    in_legend = {(family, draw.NEUTRAL) for family, _ in used}
    return [
        '<svg xmlns="http://www.w3.org/2000/svg" class="np-trace" role="img"'
        f' viewBox="0 0 {page.width} {height:g}" width="{page.width}" height="{height:g}">',
        f"<style>{_STYLE}</style>",
        "<defs>" + "".join(draw.patterns(used | in_legend)) + "</defs>",
        f'<rect x="0.5" y="0.5" width="{page.width - 1}" height="{height - 1:g}" rx="12"'
        f' fill="{draw.PAPER}" stroke="{draw.RULE}"/>',
    ]


def legend(page: Page, spans: Sequence[Span], y: float) -> tuple[list[str], float]:
    """Hues of batches, patterns of families, codes of kinds; and where the page ends."""
    if not spans:
        return [], y
    parts: list[str] = []
    x = MARGIN
    for paint, name in _swatches(spans):
        length = 22 + 7.2 * len(name) + 16
        if x + length > page.right:
            x, y = MARGIN, y + 22
        parts.append(
            f'<rect class="np-swatch" x="{x:.2f}" y="{y:g}" width="16" height="14" rx="3"'
            f' fill="{draw.fill(paint)}" stroke="{draw.edge(paint)}"/>'
        )
        parts.append(text(x + 22, y + 11.5, name, "note"))
        x += length
    y += 36
    for line in _code_lines(page):
        parts.append(text(MARGIN, y, line, "codes"))
        y += 18
    return parts, y


def _swatches(spans: Sequence[Span]) -> Iterator[tuple[draw.Paint, str]]:
    batches = sorted({span.batch for span in spans})
    shown = batches[: len(draw.HUES)]
    for batch in shown:
        again = ", then again" if batch == shown[-1] and len(batches) > len(shown) else ""
        yield draw.paint_of("dense", batch), f"batch {batch}{again}"
    families = {draw.paint_of(span.kind, span.batch)[0] for span in spans}
    for family in (*draw.FAMILIES, draw.OTHER):
        if family in families:
            yield (family, draw.NEUTRAL), family


def _code_lines(page: Page) -> Iterator[str]:
    line = ""
    for kind, code in page.codes.items():
        item = f"{clipped(code, 12)} {clipped(kind, 24)}"
        if line and label_width(len(line) + 3 + len(item), LABEL) > page.right - MARGIN:
            yield line
            line = ""
        line = f"{line}   {item}" if line else item
    yield line
