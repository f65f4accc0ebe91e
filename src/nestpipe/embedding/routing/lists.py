"""What goes into routing and what comes out, for native code and its plain twin alike.

Lists by owner or requester have the peers in rank order first and the rank itself last, so that all
that travels lies in one piece. Sums are taken in the order of the ranks all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.rows.segments import Segments

# Shapes: A keys that travel, L sums, Q rows that are not sums, P all rows, n some of them,
# K unique keys of an owner, R ranks, M micro-batches, C tables


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The unique keys of an earlier batch, table by table."""

    keys_K: Tensor
    table_counts: list[int]
    index: Tensor
    """A small hash index, see `index_of`; empty where the form needs none."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Which keys of a batch earlier ones have too."""

    shared_K: Tensor
    """Positions of those that the batch before has ..."""
    shared_before: Tensor
    """... and where they stand there."""
    carried_K: Tensor
    """Positions of those that the batch before has not, and the one before it has ..."""
    carried_older: Tensor
    """... and where they stand there."""


@dataclass(frozen=True, slots=True)
class WantedKeys:
    """What a micro-batch needs, table by table."""

    keys: list[Tensor]
    """[table] every key, repeats included"""
    lengths: list[Tensor]
    """[table] how many keys make each row that the model sees"""
    pooled: list[bool]
    """[table] whether the owner may add rows up"""
    table_owners: tuple[int, ...]
    """[table] the owner of the whole table, modulo the number of ranks; -1: sharded by row"""
    row_bytes: int
    """Of a row on its way, and of its gradient."""
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class RoutedKeys:
    """What a requester sends, and what it does with the rows that come; see `Request`."""

    keys_A: Tensor
    lengths_L: Tensor
    key_counts_RC: Tensor
    row_counts_RC: Tensor
    seen: Segments
    back: Segments
    straight: list[int]
    """[table] where the rows of its outputs begin, one for each, in order; -1: not known to be"""


@dataclass(frozen=True, slots=True)
class WindowSlice:
    """One micro-batch of a routed batch; its rows are numbered over the whole window."""

    keys_A: Tensor
    """Of the rows that no earlier micro-batch has."""
    lengths_L: Tensor
    lasts_Q: Tensor
    """Of each new row that is not a sum: the last micro-batch that uses it"""
    key_counts_RC: Tensor
    row_counts_RC: Tensor
    seen: Segments
    back: Segments
    reused: Segments
    reused_n: Tensor
    """Rows of earlier micro-batches that are used again, whose gradients `reused` makes"""
    leaving_n: Tensor
    """Rows whose last use this is, by owner, then by number"""
    leaving_counts: list[int]
    """... and how many there are of each owner, in rank order"""


@dataclass(frozen=True, slots=True)
class OwnerRequests:
    """What an owner was asked for, by requester, micro-batch and table."""

    keys_A: Tensor
    lengths_L: Tensor
    key_counts_RMC: Tensor
    row_counts_RMC: Tensor
    rank: int
    lasts_Q: Tensor | None = None
    """In a window: of each row that is not a sum, the micro-batch with which its gradient comes"""

    def gradient_micros(self) -> Tensor:
        """(P,) the micro-batch with which the gradient of each row comes."""
        ranks, micros, tables = self.row_counts_RMC.shape
        order = peers_then_self(self.rank, ranks)
        rows = self.row_counts_RMC[order].reshape(-1)
        sums = (self.row_counts_RMC < self.key_counts_RMC)[order].reshape(-1)
        own = torch.arange(micros)[None, :, None].expand(ranks, micros, tables).reshape(-1)
        micro_P = torch.repeat_interleave(own, rows)
        if self.lasts_Q is not None:
            micro_P[~torch.repeat_interleave(sums, rows)] = self.lasts_Q
        return micro_P

    def gradient_counts(self) -> list[list[int]]:
        """For each micro-batch, how many gradients come from each requester, in rank order."""
        ranks, micros, _ = self.row_counts_RMC.shape
        order = peers_then_self(self.rank, ranks)
        rank_P = torch.repeat_interleave(
            torch.tensor(order), self.row_counts_RMC.sum((1, 2))[order]
        )
        cells = torch.bincount(self.gradient_micros() * ranks + rank_P, minlength=micros * ranks)
        return cells.view(micros, ranks).tolist()


@dataclass(frozen=True, slots=True)
class KeyUnion:
    """The owner's unique keys by table, and for each micro-batch the way there and back."""

    keys_K: Tensor
    table_counts: list[int]
    serve: list[Segments]
    """[micro] rows to send, sums of the owner's rows"""
    gather_back: list[Segments]
    """[micro] the gradient of each of the owner's rows, from those of the rows sent"""


def peers_then_self(rank: int, ranks: int) -> list[int]:
    """All ranks: the peers in order, this one last."""
    return [*(r for r in range(ranks) if r != rank), rank]


def owner_of(keys_U: Tensor, table: int, ranks: int, table_owner: int = -1) -> Tensor:
    """The rank that owns each key: that of the whole table, or one chosen by a mixed hash."""
    if table_owner >= 0:
        return torch.full_like(keys_U, table_owner % ranks)
    return mixed(keys_U, table) % ranks


def mixed(keys_U: Tensor, table: int) -> Tensor:
    """A hash of (table, key): 63 bits."""
    mixed = keys_U + _signed((table + 1) * 0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shifted(mixed, 31)
    return mixed & 0x7FFF_FFFF_FFFF_FFFF


def unique_at_least(mixed_T: Tensor) -> int:
    """A lower bound on the unique keys: different bits that their hashes set in a bitmap."""
    places = 1
    while places < 4 * len(mixed_T):
        places *= 2
    return len(torch.unique((mixed_T >> 20) & (places - 1)))


def sums_pay(sums: int, keys: int, unique: int, row_bytes: int) -> bool:
    """Whether rows added up by their owners are fewer bytes, there and back, than unique rows."""
    row = 2 * row_bytes + 8
    return unique > (sums * row + 8 * keys) // row


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
