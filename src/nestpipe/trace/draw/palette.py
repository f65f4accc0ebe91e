"""The colours of a drawn trace: a hue per batch, a shade or pattern per family of kinds."""

from __future__ import annotations

from collections.abc import Iterable

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
    "exchange": ("rows", "patch", "grads", "totals", "reduce", "replica_sync"),
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
