"""What the rest of NestPipe asks of a network, whoever provides it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Doing(Protocol):
    """Names the collectives inside: `with comm.doing("rows 3.1"): ...`."""

    def __call__(self, what: str) -> AbstractContextManager[None]: ...


class Communicator(Protocol):
    """Collectives among ranks; every rank calls the same ones in the same order.

    Tensors may be on the device or in host memory, whatever connects the devices.

    They are called from one thread at a time; with `hosts_apart`, one for each network; a
    `subgroup` has networks of its own. When a peer is lost, or does not come within the timeout, a
    collective raises `RunError` with the name that `doing` gave it; none may follow, in subgroups
    neither.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def doing(self) -> Doing: ...

    @property
    def bytes_sent(self) -> int:
        """Bytes of rows, keys and gradients that went from this rank to others, so far.

        A sum over all ranks counts as two rounds of a ring. What subgroups sent is included.
        """
        ...

    @property
    def hosts_apart(self) -> bool:
        """Whether tensors in host memory have a network of their own, and may have a thread.

        Then `sum_apart` has one too, except in a subgroup.
        """
        ...

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        """Exchange rows (first dimension): `sent_splits[r]` rows go to rank r, in rank order.

        `received` is filled in rank order. On a GPU it is ready for the current stream, not for
        the host.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, the same bits on every rank."""
        ...

    def sum_apart(self, tensor: Tensor) -> None:
        """`all_reduce` that runs beside all others, where `hosts_apart` says so.

        In a subgroup it is `all_reduce` and no more.
        """
        ...

    def all_gather_values(self, value: object) -> list[object]:
        """Small plain values (numbers, strings, lists, dicts) of every rank, in rank order.

        They travel as JSON: tuples come back as lists, the keys of dicts as strings.
        """
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of the part that this rank is in; a part of one costs no network.

        Every rank calls this with the same `parts`, each rank in exactly one of them, in the order
        that ranks are to have there. Each call makes new networks, so two subgroups of the same
        ranks may be used from two threads. They share `doing`, and messages name ranks of the
        whole. Subgroups have no subgroups.
        """
        ...

    def close(self) -> None:
        """Leave the group; no collective may follow."""
        ...
