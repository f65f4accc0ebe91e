"""The requester's side of routing: which rows a micro-batch wants, and from whom.

Of a feature that is not pooled, each unique key is asked for once. Of a pooled one, the owners may
add up the rows of each sample themselves where that is fewer bytes on the network. Either way the
answer is a list of rows, and what the model sees are sums of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nestpipe.embedding import native_routing, plain_routing
from nestpipe.embedding.groups import TableGroup
from nestpipe.embedding.routing import Wanted
from nestpipe.jagged import Jagged
from nestpipe.kernels.native import native_wanted
from nestpipe.kernels.rows import Bags, bags_on

# Shapes: A keys that are sent, L sums among the rows that come back, R ranks, C tables of the group


@dataclass(frozen=True, slots=True)
class Request:
    """The keys of one micro-batch as they travel: the other ranks in order, this rank itself last.

    For each owner they come by table.
    """

    keys_A: Tensor
    lengths_L: Tensor
    """Keys of each sum that an owner takes, where it sends fewer rows than it gets keys."""
    key_counts_RC: Tensor
    """How many keys of each table go to each owner, on the host ..."""
    row_counts_RC: Tensor
    """... and how many rows come back."""
    seen: Bags
    """What the model sees, from the rows that came."""
    back: Bags
    """The gradient of each row that came, from those of what the model sees."""
    sizes: Mapping[str, int]
    """Rows that the model sees of each feature, in order."""
    straight: list[int] | None
    """Where each feature's rows begin among those that came, if all come just as they are seen."""

    @property
    def rows_per_owner(self) -> list[int]:
        return self.row_counts_RC.sum(1).tolist()


def make_request(keys: Mapping[str, Jagged], group: TableGroup, rank: int, ranks: int) -> Request:
    """Find what a micro-batch needs and put it in the order in which it travels."""
    wanted = _wanted(keys, group, rank, ranks)
    routed = (native_routing if native_wanted() else plain_routing).request(wanted)
    sizes = {
        f.name: keys[f.name].num_samples if f.pooled else len(keys[f.name].values)
        for f in group.features
    }
    return Request(
        routed.keys_A,
        routed.lengths_L,
        routed.key_counts_RC,
        routed.row_counts_RC,
        routed.seen,
        routed.back,
        sizes,
        _straight(routed.straight, group, sizes),
    )


def requests_on(device: torch.device, requests: Sequence[Request]) -> list[Request]:
    """The same requests for rows that will come to a device; keys and counts stay on the host."""
    moved = bags_on(device, [bags for r in requests for bags in (r.seen, r.back)])
    return [
        replace(r, seen=seen, back=back)
        for r, seen, back in zip(requests, moved[::2], moved[1::2], strict=True)
    ]


def _straight(
    of_tables: list[int], group: TableGroup, sizes: Mapping[str, int]
) -> list[int] | None:
    if min(of_tables) < 0:
        return None
    next_row = dict(enumerate(of_tables))
    starts: list[int] = []
    for feature in group.features:
        starts.append(next_row[feature.table])
        next_row[feature.table] += sizes[feature.name]
    return starts


def _wanted(keys: Mapping[str, Jagged], group: TableGroup, rank: int, ranks: int) -> Wanted:
    tables = range(len(group.tables))
    of_table = [[f for f in group.features if f.table == number] for number in tables]
    values = [[keys[f.name].values for f in features] for features in of_table]
    lengths = [
        [
            keys[f.name].lengths if f.pooled else torch.ones_like(keys[f.name].values)
            for f in features
        ]
        for features in of_table
    ]
    return Wanted(
        keys=[_joined(v) for v in values],
        lengths=[_joined(v) for v in lengths],
        pooled=[any(f.pooled for f in features) for features in of_table],
        homes=group.homes,
        dim=group.dim,
        rank=rank,
        ranks=ranks,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
