"""A partition of the ranks: every rank is in exactly one part."""

from __future__ import annotations

from collections.abc import Sequence


def own_part(parts: Sequence[Sequence[int]], rank: int, size: int) -> list[int]:
    """The part that a rank is in, of all ranks 0 to `size` - 1."""
    ranks = sorted(r for part in parts for r in part)
    assert ranks == list(range(size)), (
        f"parts {[list(part) for part in parts]} must hold each of {size} ranks once"
    )
    return next(list(part) for part in parts if rank in part)


def check_agreement(asked: Sequence[object]) -> None:
    """Find our own mistake before a rank waits for peers that made another partition."""
    for rank, parts in enumerate(asked):
        assert parts == asked[0], f"rank 0 asked for parts {asked[0]}, rank {rank} for {parts}"
