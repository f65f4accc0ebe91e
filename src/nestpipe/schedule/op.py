"""The nouns of a schedule: a `Kind` of work, one `Op` of it, and the lanes that ops run on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from nestpipe.deprecated import current_word
from nestpipe.errors import ParseError


class Lane(StrEnum):
    """A resource that does one thing at a time, in the order of the schedule."""

    LOADER = "loader"
    COPY = "copy"
    HOST = "host"
    WRITE = "write"
    """Where rows are written back while others are read; else `host` does both."""
    NET = "net"
    KEYS = "keys"
    """Where hosts exchange keys in a network of their own; else `net` does."""
    ROUTE = "route"
    COMPUTE = "compute"
    DENSE_NET = "dense_net"
    """Where dense gradients are summed in a network of their own; else `net` does."""


class Kind(StrEnum):
    """What an op does; the order is that of one batch's life."""

    PREFETCH = "prefetch"
    """Read, decode, cluster into micro-batches, pin."""
    COPY = "copy"
    """The batch to the device."""
    DEDUP = "dedup"
    """The requester's unique keys, bucketed by owner."""
    COUNTS = "counts"
    """All2All of how many keys each owner will get; agrees on the end of the data."""
    KEYS = "keys"
    """All2All of the keys."""
    UNION = "union"
    """The owner's working set of the batch, and what it shares with the batch before."""
    REPLICA_KEYS = "replica_keys"
    """Replicas of a shard tell each other which keys they touched since they were last merged; only
    in batches that merge them (2D parallelism)."""
    REPLICA_UNION = "replica_union"
    """The working set widens to all of these keys; only in batches that merge replicas."""
    STALE_MASK = "stale_mask"
    """All2All of which rows of the first micro-batch the batch before has too; only where rows are
    sent early."""
    RETRIEVE = "retrieve"
    """Rows with their optimizer state from host memory into the idle device buffer."""
    SYNC = "sync"
    """Shared rows, state too, from the active to the idle buffer; then the buffers swap."""
    SWAP = "swap"
    """The buffers swap and nothing is refreshed: only a stale plan has it."""
    PATCH = "patch"
    """Those rows of the first micro-batch again, after their refresh; only where rows are sent
    early."""
    ROWS = "rows"
    """The owner sends a micro-batch's rows to the workers that asked."""
    DENSE = "dense"
    """Forward and backward of one micro-batch."""
    GRADS = "grads"
    """Row gradients back to the owner, accumulated."""
    TOTALS = "totals"
    """Loss and weight of the batch summed over all ranks; only where dense gradients have a network
    of their own, else `reduce` sums them too."""
    REDUCE = "reduce"
    """Dense gradients summed over all ranks, bucket by bucket where they have their own network."""
    NORM = "norm"
    """The norm of all gradients of the batch, summed over all ranks; only where gradients of rows
    are clipped by it."""
    APPLY = "apply"
    """One optimizer application per dense parameter; only where dense gradients have a network of
    their own, else `update` does it."""
    UPDATE = "update"
    """One optimizer application per row, and per dense parameter where there is no `apply`."""
    REPLICA_SYNC = "replica_sync"
    """Replicas of a row in other groups of ranks are merged: rows after `update`, or gradients
    before it (2D parallelism)."""
    WRITEBACK = "writeback"
    """Updated rows that leave device memory go to host memory."""


ROUTING_COLLECTIVES = frozenset({Kind.COUNTS, Kind.KEYS, Kind.REPLICA_KEYS, Kind.STALE_MASK})
"""Collectives that only hosts need to take part in: their data is in host memory."""
COLLECTIVES = ROUTING_COLLECTIVES | {
    *(Kind.PATCH, Kind.ROWS, Kind.GRADS, Kind.TOTALS, Kind.REDUCE, Kind.NORM, Kind.REPLICA_SYNC)
}
"""Kinds that every rank of a group takes part in, on whatever lane a plan puts them."""
SPECULATIVE_KINDS = frozenset({Kind.STALE_MASK, Kind.PATCH})
"""Kinds that there are only where rows of the first micro-batch are sent early."""
REPLICA_KINDS = frozenset({Kind.REPLICA_KEYS, Kind.REPLICA_UNION, Kind.REPLICA_SYNC})
"""Kinds that there are only in batches that merge replicas."""
DENSE_GROUP_KINDS = frozenset({Kind.TOTALS, Kind.APPLY})
"""Kinds that there are only where dense gradients are summed in a network of their own."""
MICRO_KINDS = frozenset({Kind.ROWS, Kind.DENSE, Kind.GRADS})
"""Kinds that come once per micro-batch; every other comes once per batch."""

_WORDS = frozenset(kind.value for kind in Kind)
_OP_TEXT = re.compile(r"([a-z_]+) (\d{1,18})(?:\.(\d{1,18}))?")


def parse_kind(word: str) -> Kind | None:
    """The kind of that word; one of an earlier release works too, with a warning."""
    word = current_word(word)
    return Kind(word) if word in _WORDS else None


@dataclass(frozen=True, slots=True)
class Op:
    """One unit of work, e.g. `dense 7.1`: batch 7, micro-batch 1. Its lane: `Shape.lane`."""

    kind: Kind
    batch: int
    micro: int | None = None

    @property
    def collective(self) -> bool:
        """Whether every rank of a group takes part."""
        return self.kind in COLLECTIVES

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}" + ("" if self.micro is None else f".{self.micro}")

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read what `str(op)` wrote."""
        match = _OP_TEXT.fullmatch(text.strip())
        if match is None:
            raise ParseError(
                f"{text.strip()!r} is not an op; write it like `update 3` or `rows 3.0`"
            )
        word, batch, micro = match.groups()
        kind = parse_kind(word)
        if kind is None:
            known = ", ".join(Kind)
            raise ParseError(
                f"unknown kind of op {word!r} in {text.strip()!r}; the kinds are {known}"
            )
        if (micro is not None) != (kind in MICRO_KINDS):
            want = f"{kind} 3.0" if kind in MICRO_KINDS else f"{kind} 3"
            raise ParseError(f"{text.strip()!r} does not fit its kind; write it like `{want}`")
        return cls(kind, int(batch), None if micro is None else int(micro))
