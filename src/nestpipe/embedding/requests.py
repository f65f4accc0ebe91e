"""The requester's side of routing: which rows a micro-batch wants, and from whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.groups import TableGroup
from nestpipe.jagged import Jagged
from nestpipe.kernels.rows import Bags, bags_of_targets, offsets_of

# Shapes: T keys of all features together, U unique keys, R ranks, C tables of the group,
# O rows that the model sees: one per key, or one per sample where a feature is pooled


@dataclass(frozen=True, slots=True)
class Request:
    """The unique keys of one micro-batch, ordered by owner, then table, then key."""

    keys_U: Tensor
    counts_RC: Tensor
    """How many keys of each table go to each owner, on the host."""
    seen: Bags | None
    """What the model sees, from unique rows; None where every bag is a single row ..."""
    picked_T: Tensor
    """... and then for each key the position of its row."""
    back: Bags
    """The gradient of each unique row, from those of what the model sees."""
    sizes: Mapping[str, int]
    """Rows that the model sees of each feature, in order."""

    @property
    def per_owner(self) -> list[int]:
        return self.counts_RC.sum(1).tolist()


def make_request(keys: Mapping[str, Jagged], group: TableGroup, ranks: int) -> Request:
    """Find the unique keys of a micro-batch and put them in the order in which they travel."""
    values = [
        [keys[f.name].values for f in group.features if f.table == number]
        for number in range(len(group.tables))
    ]
    unique, inverse_T = unique_by_table([v[0] if len(v) == 1 else torch.cat(v) for v in values])
    keys_U = torch.cat(unique)
    sizes = torch.tensor([len(u) for u in unique])
    table_U = torch.repeat_interleave(sizes).to(keys_U.device)
    owner_U = owner_of(keys_U, table_U, ranks)
    order_U = torch.argsort(owner_U, stable=True)
    place_U = torch.empty_like(order_U)
    place_U[order_U] = torch.arange(len(order_U), device=order_U.device)
    tables = len(group.tables)
    counts = torch.bincount(owner_U * tables + table_U, minlength=ranks * tables)
    picked_T = place_U[inverse_T]
    seen, output_T = _what_is_seen(keys, group, picked_T)
    return Request(
        keys_U=keys_U[order_U],
        counts_RC=counts.reshape(ranks, tables).cpu(),
        seen=seen,
        picked_T=picked_T,
        back=bags_of_targets(picked_T, len(keys_U), output_T),
        sizes={
            f.name: keys[f.name].num_samples if f.pooled else len(keys[f.name].values)
            for f in group.features
        },
    )


def _what_is_seen(
    keys: Mapping[str, Jagged], group: TableGroup, picked_T: Tensor
) -> tuple[Bags | None, Tensor | None]:
    """The rows of each row that the model sees, and for each key which one it belongs to."""
    if not any(f.pooled for f in group.features):
        return None, None
    lengths_O = torch.cat(
        [
            keys[f.name].lengths if f.pooled else torch.ones_like(keys[f.name].values)
            for f in group.features
        ]
    )
    if len(lengths_O) == len(picked_T) and bool((lengths_O == 1).all()):
        return None, None
    output_T = torch.repeat_interleave(lengths_O, output_size=len(picked_T))
    return Bags(picked_T, offsets_of(lengths_O)), output_T


def unique_by_table(values: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The sorted keys of each table, and where each value stands among all of them."""
    unique: list[Tensor] = []
    inverses: list[Tensor] = []
    start = 0
    for of_table in values:
        keys, inverse = torch.unique(of_table, return_inverse=True)
        unique.append(keys)
        inverses.append(inverse.add_(start))
        start += len(keys)
    return unique, torch.cat(inverses)


def owner_of(keys_U: Tensor, table: int | Tensor, ranks: int) -> Tensor:
    """The rank that keeps each key: a mixed hash of (table, key), so that no pattern piles up."""
    table_U = torch.as_tensor(table, device=keys_U.device)
    mixed = keys_U + (table_U + 1) * _signed(0x9E3779B97F4A7C15)
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
