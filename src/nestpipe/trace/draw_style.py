"""What every drawing of a trace shares: short codes, lane order, round ticks, colours."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.trace.span import LANES, Span

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
