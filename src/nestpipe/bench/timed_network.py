"""A communicator that knows how long rows of a device were on the network.

What is left of the op around it is work of the device itself: gathering, rounding, summing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm import Communicator
from nestpipe.comm.communicator import Doing

_Timed = tuple[torch.cuda.Event, torch.cuda.Event]


class TimedNetwork:
    """Another communicator, with events of the device around every exchange of its tensors."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._timed: list[_Timed] = []

    def begin(self) -> None:
        """Forget all exchanges."""
        self._timed = []

    def exchange_ms(self) -> float:
        """How long exchanges took since; waits for the device."""
        for _, end in self._timed:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._timed)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        if not sent.is_cuda:
            self._comm.all_to_all(received, sent, received_splits, sent_splits)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._comm.all_to_all(received, sent, received_splits, sent_splits)
        end.record()
        self._timed.append((start, end))

    # All else is as it was.

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    @property
    def doing(self) -> Doing:
        return self._comm.doing

    @property
    def bytes_sent(self) -> int:
        return self._comm.bytes_sent

    @property
    def hosts_apart(self) -> bool:
        return self._comm.hosts_apart

    def all_reduce(self, tensor: Tensor) -> None:
        self._comm.all_reduce(tensor)

    def sum_apart(self, tensor: Tensor) -> None:
        self._comm.sum_apart(tensor)

    def all_gather_values(self, value: object) -> list[object]:
        return self._comm.all_gather_values(value)

    def barrier(self) -> None:
        self._comm.barrier()

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Communicator:
        return self._comm.subgroup(parts)

    def close(self) -> None:
        self._comm.close()
