"""The figures beside TorchRec, as the table of the README and as a chart.

Reads `docs/figures/beside_torchrec.toml`: the one place to change after a new measurement.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median

FILE = Path(__file__).resolve().parent.parent / "docs/figures/beside_torchrec.toml"
WIDTH, ROW, TOP, LABELS, RIGHT = 960, 34, 84, 400, 120
LEAST, MOST = 1 / 2, 4.0
"""Ends of the axis of ratios, which is logarithmic."""
INK, FAINT, RULE, PAPER = "#1d2733", "#64707d", "#dde3ea", "#fcfdfe"
FASTER, SLOWER = "#228833", "#cc6677"
_STYLE = f"""
.np text{{font:12px ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:{FAINT}}}
.np .t{{font-size:18px;font-weight:600;fill:{INK}}}
.np .l{{text-anchor:end;fill:{INK}}}
.np .m{{text-anchor:middle}}
.np .v{{font-weight:600;fill:{INK}}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFigures:
    """One piece of work, done by both."""

    name: str
    where: str
    nestpipe: tuple[float, ...] = ()
    """Milliseconds per step of each run."""
    torchrec: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    """How many times as fast NestPipe is, one for each run; without steps, the ends of a range."""

    @property
    def median_ratio(self) -> float:
        return median(self.ratios)

    @property
    def ratio(self) -> str:
        """The median with the range of runs, or the range alone where that is all there is."""
        ends = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        if len(self.ratios) == 1:
            return _times(self.ratios[0])
        return f"{_times(self.median_ratio)} ({ends})" if self.nestpipe else f"{ends}x"


def read_figures() -> list[PeerFigures]:
    """The file's entries; where it has steps, ratios follow from them."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))["work"]
    return [_entry(entry) for entry in entries]


def _entry(entry: dict[str, list[float]]) -> PeerFigures:
    figures = PeerFigures(**{key: _frozen(value) for key, value in entry.items()})  # type: ignore[arg-type]
    if figures.ratios:
        return figures
    pairs = zip(figures.nestpipe, figures.torchrec, strict=True)
    return PeerFigures(
        name=figures.name,
        where=figures.where,
        nestpipe=figures.nestpipe,
        torchrec=figures.torchrec,
        ratios=tuple(theirs / ours for ours, theirs in pairs),
    )


def _frozen(value: list[float] | str) -> tuple[float, ...] | str:
    return value if isinstance(value, str) else tuple(value)


def table(entries: list[PeerFigures]) -> str:
    """The table in Markdown."""
    lines = ["| work | where | NestPipe, ms | TorchRec, ms | times as fast | runs |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for entry in entries:
        steps = f"{_range(entry.nestpipe)} | {_range(entry.torchrec)}"
        runs = len(entry.ratios) if entry.nestpipe else ""
        lines.append(f"| {entry.name} | {entry.where} | {steps} | {entry.ratio} | {runs} |")
    return "\n".join(lines)


def _range(steps: tuple[float, ...]) -> str:
    if not steps:
        return ""
    low, high = f"{min(steps):.4g}", f"{max(steps):.4g}"
    return low if low == high else f"{low} to {high}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.3f}x"


def chart(entries: list[PeerFigures]) -> str:
    """A bar per piece of work, from 1x to the median, with the range of runs."""
    height = TOP + ROW * len(entries) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="np" role="img" width="{WIDTH}"'
        f' height="{height}" viewBox="0 0 {WIDTH} {height}"><style>{_STYLE}</style>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="12" fill="{PAPER}"'
        f' stroke="{RULE}"/>',
        '<text class="t" x="24" y="34">NestPipe beside TorchRec: times as fast, measured</text>',
        '<text x="24" y="54">Bars: median or middle of a range. Lines: ranges. Logarithmic.</text>',
    ]
    for tick in (0.5, 0.7, 1.0, 1.5, 2.0, 3.0):
        x = _x(tick)
        parts += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 34}" stroke="{RULE}"/>',
            f'<text class="m" x="{x:.1f}" y="{height - 16}">{tick:g}x</text>',
        ]
    for number, entry in enumerate(entries):
        parts += _bar(entry, TOP + ROW * number)
    return "\n".join([*parts, "</svg>", ""])


def _bar(entry: PeerFigures, y: float) -> list[str]:
    start, end = sorted((_x(1.0), _x(entry.median_ratio)))
    low, high = _x(min(entry.ratios)), _x(max(entry.ratios))
    color = FASTER if entry.median_ratio >= 1 else SLOWER
    label = escape(f"{entry.name.replace('`', '')}; {entry.where}")
    middle = y + ROW / 2 - 4
    return [
        f'<text class="l" x="{LABELS}" y="{middle + 4:.1f}">{label}</text>',
        f'<rect x="{start:.1f}" y="{middle - 7:.1f}" width="{max(end - start, 1):.1f}" height="14"'
        f' fill="{color}"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"'
        f' stroke="{INK}" stroke-width="2"/>',
        f'<text class="v" x="{max(end, high) + 8:.1f}" y="{middle + 4:.1f}">'
        f"{entry.ratio.partition(' (')[0]}</text>",
    ]


def _x(ratio: float) -> float:
    share = math.log(ratio / LEAST) / math.log(MOST / LEAST)
    return LABELS + 16 + share * (WIDTH - LABELS - 16 - RIGHT)
