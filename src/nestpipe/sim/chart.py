"""A scaling curve as an SVG: where a step's time goes, and what that leaves of the speed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nestpipe.sim.scaling import Point

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 72, 104, 64
INK, FAINT, RULE, PAPER = "#1d2733", "#64707d", "#dde3ea", "#fcfdfe"
PARTS = (
    ("compute", "compute_ms", "#4477aa"),
    ("exposed exchange", "exposed_comm_ms", "#ee7733"),
    ("exposed lookup", "lookup_ms", "#ccaa22"),
    ("waiting", "idle_ms", "#c3cad2"),
)
"""The parts of a step that add up to it, from the bottom of a bar to its top."""
LINE = "#228833"
_STYLE = f"""
.nc text{{font:12px ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:{FAINT}}}
.nc .t{{font-size:18px;font-weight:600;fill:{INK}}}
.nc .m{{text-anchor:middle}}
.nc .e{{text-anchor:end}}
.nc .v{{text-anchor:middle;font-weight:600;fill:{LINE};paint-order:stroke;stroke:{PAPER};
stroke-width:4px}}
"""


def chart(points: Sequence[Point], title: str) -> str:
    """A bar per scale, split into compute and what is exposed, under the efficiency line."""
    top_ms = _round_up(max(point.figures.step_ms for point in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="nc" role="img" width="{WIDTH}"'
        f' height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{_STYLE}</style>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12" fill="{PAPER}"'
        f' stroke="{RULE}"/>',
        f'<text class="t" x="{LEFT - 48}" y="34">{escape(title)}</text>',
        *_legend(),
        *_axes(top_ms),
    ]
    for i, point in enumerate(points):
        parts += _bar(point, _x(i, len(points)), top_ms, 0.5 * _pitch(len(points)))
    parts += _efficiency_line(points)
    return "\n".join([*parts, "</svg>", ""])


def _pitch(count: int) -> float:
    return min(140.0, (WIDTH - LEFT - RIGHT) / count)


def _x(i: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) / count * (i + 0.5)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _round_up(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten that leaves some air above the value."""
    unit = 1.0
    while unit * 10 <= value:
        unit *= 10
    while unit > value:
        unit /= 10
    return next(unit * m for m in (1, 2, 2.5, 5, 10, 20) if unit * m >= 1.08 * value)


def _axes(top_ms: float) -> list[str]:
    parts: list[str] = []
    for quarter in range(5):
        y = _y(quarter / 4)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{RULE}"/>')
        parts.append(
            f'<text class="e" x="{LEFT - 8}" y="{y + 4:.1f}">{top_ms * quarter / 4:g}</text>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}" fill="{LINE}">{25 * quarter} %</text>'
        )
    middle, bottom = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16
    parts.append(f'<text class="m" x="{middle}" y="{bottom}">workers</text>')
    parts.append(f'<text x="{LEFT - 48}" y="{TOP - 20}">step, ms</text>')
    parts.append(f'<text class="e" x="{WIDTH - 24}" y="{TOP - 20}">scaling efficiency</text>')
    return parts


def _legend() -> list[str]:
    parts: list[str] = []
    x = float(LEFT - 48)
    for name, _, color in (*PARTS, ("scaling efficiency", "", LINE)):
        parts.append(f'<rect x="{x:.1f}" y="46" width="14" height="12" rx="3" fill="{color}"/>')
        parts.append(f'<text x="{x + 20:.1f}" y="56">{name}</text>')
        x += 36 + 6.6 * len(name)
    return parts


def _bar(point: Point, x: float, top_ms: float, width: float) -> list[str]:
    figures = point.figures
    parts: list[str] = []
    low = 0.0
    for name, field, color in PARTS:
        ms = float(getattr(figures, field))
        y, height = _y((low + ms) / top_ms), _y(low / top_ms) - _y((low + ms) / top_ms)
        parts.append(
            f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            f' fill="{color}"><title>{name}: {ms:.1f} ms of {figures.step_ms:.1f} ms</title></rect>'
        )
        low += ms
    label = f"{figures.workers:,}"
    parts.append(f'<text class="m" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}">{label}</text>')
    return parts


def _efficiency_line(points: Sequence[Point]) -> list[str]:
    spots = [
        (_x(i, len(points)), _y(min(point.scaling_efficiency, 110) / 100), point)
        for i, point in enumerate(points)
    ]
    path = " ".join(f"{'ML'[i > 0]}{x:.1f} {y:.1f}" for i, (x, y, _) in enumerate(spots))
    parts = [f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="2.5"/>']
    for x, y, point in spots:
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{PAPER}" stroke="{LINE}"'
            ' stroke-width="2.5"/>'
        )
        text = f"{point.scaling_efficiency:.1f} %"
        parts.append(f'<text class="v" x="{x:.1f}" y="{y - 10:.1f}">{text}</text>')
    return parts
