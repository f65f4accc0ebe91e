"""A group of one rank: the same calls, nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nestpipe.comm.doing import Doing
from nestpipe.comm.parts import own_part
from nestpipe.comm.payload import check_exchange, decode, encode


class LocalCommunicator:
    """Collectives of a rank that is alone."""

    rank = 0
    size = 1
    bytes_sent = 0
    hosts_apart = True

    def __init__(self, doing: Doing | None = None) -> None:
        """As a part of a larger group it shares that group's `doing`."""
        self.doing = doing or Doing()

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        """A copy."""
        check_exchange(received, sent, received_splits, sent_splits, self.size)
        assert list(received_splits) == list(sent_splits), (
            f"{sent_splits[0]} rows sent, {received_splits[0]} expected"
        )
        received.detach().copy_(sent.detach())

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over one rank: nothing changes."""

    def sum_apart(self, tensor: Tensor) -> None:
        """The same."""

    def all_gather_values(self, value: object) -> list[object]:
        return [decode(encode(value))]

    def barrier(self) -> None:
        """Everyone is here."""

    def subgroup(self, parts: Sequence[Sequence[int]]) -> LocalCommunicator:
        own_part(parts, self.rank, self.size)
        return LocalCommunicator(self.doing)

    def close(self) -> None:
        """Nothing to leave."""
