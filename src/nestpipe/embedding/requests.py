"""The requester's side of routing: which rows a micro-batch wants, and from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.groups import TableGroup
from nestpipe.jagged import Jagged

# Shapes: T keys, U unique keys, R ranks, C tables of the group


@dataclass(frozen=True, slots=True)
class Request:
    """The unique keys of one micro-batch, ordered by owner, then table, then key."""

    keys_U: Tensor
    counts_RC: Tensor
    """How many keys of each table go to each owner, on the host."""
    positions: Mapping[str, Tensor]
    """For each feature, where each of its keys stands among the unique ones."""
    lengths: Mapping[str, Tensor]
    """For each pooled feature, how many keys each sample has."""

    @property
    def per_owner(self) -> list[int]:
        return self.counts_RC.sum(1).tolist()


def make_request(keys: Mapping[str, Jagged], group: TableGroup, ranks: int) -> Request:
    """Find the unique keys of a micro-batch and put them in the order in which they travel."""
    unique: list[Tensor] = []
    owners: list[Tensor] = []
    found: list[tuple[Sequence[str], list[int], Tensor]] = []
    start = 0
    for number, names in _features_by_table(group):
        values = [keys[name].values for name in names]
        unique_U, inverse_T = torch.unique(torch.cat(values), return_inverse=True)
        unique.append(unique_U)
        owners.append(owner_of(unique_U, number, ranks))
        found.append((names, [len(v) for v in values], inverse_T + start))
        start += len(unique_U)
    keys_U, owner_U = torch.cat(unique), torch.cat(owners)
    table_U = torch.repeat_interleave(torch.tensor([len(u) for u in unique])).to(keys_U.device)
    order_U = torch.argsort(owner_U, stable=True)
    place_U = torch.empty_like(order_U)
    place_U[order_U] = torch.arange(len(order_U), device=order_U.device)
    tables = len(group.tables)
    counts = torch.bincount(owner_U * tables + table_U, minlength=ranks * tables)
    return Request(
        keys_U=keys_U[order_U],
        counts_RC=counts.reshape(ranks, tables).cpu(),
        positions={
            name: part
            for names, sizes, inverse_T in found
            for name, part in zip(names, torch.split(place_U[inverse_T], sizes), strict=True)
        },
        lengths={f.name: keys[f.name].lengths for f in group.features if f.pooled},
    )


def _features_by_table(group: TableGroup) -> list[tuple[int, list[str]]]:
    return [
        (number, [f.name for f in group.features if f.table == number])
        for number in range(len(group.tables))
    ]


def owner_of(keys_U: Tensor, table: int, ranks: int) -> Tensor:
    """The rank that keeps each key: a mixed hash of (table, key), so that no pattern piles up."""
    mixed = keys_U + _signed(0x9E3779B97F4A7C15 * (table + 1))
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shifted(mixed, 31)
    return (mixed & 0x7FFF_FFFF_FFFF_FFFF) % ranks


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
