"""Where each op of a text grid goes: time cut into character cells, cells cut into bands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.trace.layout import SHORTEST, is_nominal, short_label, sublines
from nestpipe.trace.span import Span

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
