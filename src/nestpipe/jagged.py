"""`Jagged`: the keys of one feature for a batch of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestpipe.errors import DataError

# Shapes: B samples, T keys of all samples together


@dataclass(frozen=True, slots=True)
class Jagged:
    """A list per sample: all values one after the other, and how many each sample has."""

    values: Tensor
    """(T,) the lists, joined."""
    lengths: Tensor
    """(B,) int64, how many values each sample has."""
    known_offsets: Tensor | None = field(default=None, compare=False, repr=False)
    """`offsets`, where whoever made it had them."""
    host_lengths: Tensor | None = field(default=None, compare=False, repr=False)
    """`lengths` in the host's memory, where `lengths` came from there to a device."""

    def __post_init__(self) -> None:
        for name, tensor in (("values", self.values), ("lengths", self.lengths)):
            if not isinstance(tensor, Tensor) or tensor.ndim != 1:
                shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DataError(f"the {name} of a Jagged are {shape}; give a flat tensor")

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Jagged:
        values = [value for row in lists for value in row]
        lengths = [len(row) for row in lists]
        return cls(
            torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
        )

    @classmethod
    def one_each(cls, values_B: Tensor) -> Jagged:
        """Exactly one value per sample."""
        return cls(values_B, torch.ones_like(values_B, dtype=torch.int64))

    @property
    def num_samples(self) -> int:
        return self.lengths.shape[0]

    @property
    def offsets(self) -> Tensor:
        """(B + 1,) where each sample's values start, and where the last one's end."""
        if self.known_offsets is not None:
            return self.known_offsets
        ends_B = torch.cumsum(self.lengths, 0)
        return torch.cat([ends_B.new_zeros(1), ends_B])

    @property
    def known_lengths(self) -> Tensor:
        """`lengths` where the host can read them: it need not wait for a device."""
        return self.lengths if self.host_lengths is None else self.host_lengths

    def to_lists(self) -> list[list[int]]:
        parts = torch.split(self.values, self.lengths.tolist())
        return [part.tolist() for part in parts]

    def select(self, samples: Tensor) -> Jagged:
        """The lists of some samples, in the order asked for."""
        lengths_S = self.lengths[samples]
        starts_S = self.offsets[:-1][samples]
        shift_S = starts_S - (torch.cumsum(lengths_S, 0) - lengths_S)
        total = int(lengths_S.sum())
        positions_T = torch.arange(total, device=self.values.device)
        positions_T = positions_T + torch.repeat_interleave(shift_S, lengths_S, output_size=total)
        return Jagged(self.values[positions_T], lengths_S)

    def slice(self, start: int, stop: int) -> Jagged:
        """The lists of neighbouring samples, without a copy."""
        offsets = self.offsets
        first, last = int(offsets[start]), int(offsets[stop])
        known = offsets[: stop + 1] if start == 0 and self.known_offsets is not None else None
        return Jagged(self.values[first:last], self.lengths[start:stop], known)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Jagged:
        return self.moved(
            self.values.to(device, non_blocking=non_blocking),
            self.lengths.to(device, non_blocking=non_blocking),
        )

    def moved(self, values: Tensor, lengths: Tensor) -> Jagged:
        """The same lists in other memory."""
        known = self.known_lengths
        return Jagged(values, lengths, host_lengths=known if known.device.type == "cpu" else None)

    def pin_memory(self) -> Jagged:
        return Jagged(self.values.pin_memory(), self.lengths.pin_memory())


def longest_of(*lists: Jagged) -> int:
    """Values of the longest sample, all lists together; a device is asked where nobody knows."""
    known = [keys.known_lengths for keys in lists]
    if len({lengths_B.device for lengths_B in known}) > 1:
        known = [keys.lengths for keys in lists]
    lengths_B = sum(known[1:], start=known[0])
    return int(lengths_B.max()) if len(lengths_B) else 0


def pool_rows(
    rows_TD: Tensor, lengths_B: Tensor, weights_T: Tensor | None = None, *, mean: bool = False
) -> Tensor:
    """(B, D) each sample's rows summed, times their weights, or averaged by them.

    For a model whose keys have weights of their own: its table has pooling `none`, and `dense`
    calls this. Sums have a fixed order on every device, and no keys give zeros.
    """
    weighted_TD = rows_TD if weights_T is None else rows_TD * weights_T.to(rows_TD)[:, None]
    sums_BD = torch.segment_reduce(weighted_TD, "sum", lengths=lengths_B, axis=0, initial=0.0)
    if not mean:
        return sums_BD
    if weights_T is None:
        return sums_BD / lengths_B.clamp(min=1).to(sums_BD)[:, None]
    total_B = torch.segment_reduce(weights_T.to(rows_TD), "sum", lengths=lengths_B, initial=0.0)
    return sums_BD / torch.where(total_B == 0, 1.0, total_B)[:, None]


# `Join`: two jagged tensors as one, each sample's rows of the first before those of the second.


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
