"""`Join`: two jagged tensors as one, each sample's rows of the first before those of the second."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: B samples, T rows of the first and the second together


@dataclass(frozen=True, slots=True)
class Join:
    """Where the rows of both sides go."""

    lengths_B: Tensor
    """Rows of each sample, both sides together."""
    places_T: Tensor
    """Where each row goes: those of the first side, then those of the second."""
    num_first: int

    @classmethod
    def of(cls, first_B: Tensor, num_first: int, second_B: Tensor, num_second: int) -> Join:
        """From the lengths of both sides, and how many rows each has in all."""
        lengths_B = first_B + second_B
        starts_B = torch.cumsum(lengths_B, 0) - lengths_B
        places = [
            _spread(starts_B, first_B, num_first),
            _spread(starts_B + first_B, second_B, num_second),
        ]
        return cls(lengths_B, torch.cat(places), num_first)

    @property
    def second_places(self) -> Tensor:
        """Where the rows of the second side went."""
        return self.places_T[self.num_first :]

    def rows(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat([first, second])
        return torch.empty_like(both).index_copy_(0, self.places_T, both)


def offsets_of(lengths_B: Tensor) -> Tensor:
    """(B + 1,) where each sample starts, and where the last one ends."""
    return torch.cat([lengths_B.new_zeros(1), torch.cumsum(lengths_B, 0)])


def rows_within(lengths_B: Tensor, total: int) -> Tensor:
    """(T,) 0, 1, 2, ... within each sample."""
    return _spread(torch.zeros_like(lengths_B), lengths_B, total)


def _spread(starts_B: Tensor, lengths_B: Tensor, total: int) -> Tensor:
    """(T,) start, start + 1, ... for each sample."""
    shift_B = starts_B - (torch.cumsum(lengths_B, 0) - lengths_B)
    shift_T = torch.repeat_interleave(shift_B, lengths_B, output_size=total)
    return torch.arange(total, device=lengths_B.device) + shift_T
