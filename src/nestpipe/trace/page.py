"""The page that an SVG is drawn on: where time falls, the frame, the legend, text that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from nestpipe.trace import palette
from nestpipe.trace.layout import SHORTEST, codes_for, is_nominal, plain, short_number
from nestpipe.trace.span import Span

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
.np-trace text{{font:12px {_SANS};fill:{palette.FAINT_INK};white-space:pre}}
.np-trace .np-title{{font-size:18px;font-weight:600;fill:{palette.INK}}}
.np-trace .np-rank{{font-weight:600;fill:{palette.INK}}}
.np-trace .np-lane{{font-weight:600}}
.np-trace .np-tick{{font-size:11px;text-anchor:middle}}
.np-trace .np-codes{{font:{LABEL:g}px {_MONO}}}
.np-trace .np-label{{font:{LABEL:g}px {_MONO};text-anchor:middle;pointer-events:none}}
.np-trace .np-small{{font-size:{SMALL_LABEL:g}px}}
.np-trace .np-dark{{fill:{palette.INK}}}
.np-trace .np-light{{fill:#ffffff}}
.np-strip{{fill:{palette.STRIP}}}
.np-rule{{stroke:{palette.RULE};fill:none}}
.np-op:hover{{stroke:{palette.INK};stroke-width:2}}
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
    used = {palette.paint_of(span.kind, span.batch) for span in spans}
    in_legend = {(family, palette.NEUTRAL) for family, _ in used}
    return [
        '<svg xmlns="http://www.w3.org/2000/svg" class="np-trace" role="img"'
        f' viewBox="0 0 {page.width} {height:g}" width="{page.width}" height="{height:g}">',
        f"<style>{_STYLE}</style>",
        "<defs>" + "".join(palette.patterns(used | in_legend)) + "</defs>",
        f'<rect x="0.5" y="0.5" width="{page.width - 1}" height="{height - 1:g}" rx="12"'
        f' fill="{palette.PAPER}" stroke="{palette.RULE}"/>',
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
            f' fill="{palette.fill(paint)}" stroke="{palette.edge(paint)}"/>'
        )
        parts.append(text(x + 22, y + 11.5, name, "note"))
        x += length
    y += 36
    for line in _code_lines(page):
        parts.append(text(MARGIN, y, line, "codes"))
        y += 18
    return parts, y


def _swatches(spans: Sequence[Span]) -> Iterator[tuple[palette.Paint, str]]:
    batches = sorted({span.batch for span in spans})
    shown = batches[: len(palette.HUES)]
    for batch in shown:
        again = ", then again" if batch == shown[-1] and len(batches) > len(shown) else ""
        yield palette.paint_of("dense", batch), f"batch {batch}{again}"
    families = {palette.paint_of(span.kind, span.batch)[0] for span in spans}
    for family in (*palette.FAMILIES, palette.OTHER):
        if family in families:
            yield (family, palette.NEUTRAL), family


def _code_lines(page: Page) -> Iterator[str]:
    line = ""
    for kind, code in page.codes.items():
        item = f"{clipped(code, 12)} {clipped(kind, 24)}"
        if line and label_width(len(line) + 3 + len(item), LABEL) > page.right - MARGIN:
            yield line
            line = ""
        line = f"{line}   {item}" if line else item
    yield line
