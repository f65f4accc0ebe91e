"""The numbers of several instances as those of one service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LARGEST = frozenset({"largest_batch"})
"""Numbers that are the most that was seen: of several instances the largest counts."""


def totals(of_each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Every number added up, or the largest where a sum would say nothing."""
    found: dict[str, float] = {}
    for numbers in of_each:
        for name, number in numbers.items():
            so_far = found.get(name, 0.0)
            found[name] = max(so_far, number) if name in LARGEST else so_far + number
    return found
