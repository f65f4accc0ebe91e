"""Collectives of torch.distributed: Gloo among CPUs, NCCL among GPUs.

Gloo's all_reduce sums each part of the tensor on one rank and hands the result around, so every
rank gets the same bits; with three ranks or more the terms are not in the order of the ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nestpipe.comm.doing import Doing
from nestpipe.comm.loss import LostPeers, explain_sigterm
from nestpipe.comm.payload import (
    as_bytes,
    bytes_of_sum,
    bytes_to_others,
    check_exchange,
    decode,
    encode,
    row_bytes,
)
from nestpipe.errors import RunError

DEFAULT_TIMEOUT_S = 300.0
"""Longer than a peer may be busy between two collectives, a checkpoint included."""
CULPRIT_FIRST_S = 1.0
"""A survivor ends this much later, so that the launcher sees and reports who failed first."""
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def connect(
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    meet_s: float = DEFAULT_TIMEOUT_S,
) -> DistributedCommunicator:
    """Join the group that torchrun's environment describes.

    Ranks may start up to `meet_s` apart; afterwards each collective has `timeout_s`. Without a
    backend it is NCCL where there is a GPU and Gloo elsewhere. SIGTERM, which the launcher sends to
    all ranks once one has died, ends the process with a line that says where it was, unless the
    program handles that signal itself.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise RunError(
            f"{', '.join(missing)} not set in the environment; start the ranks with torchrun or "
            "with --ranks"
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(backend)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=meet_s)))
        _meet(PrefixStore("here", store), rank, size, timedelta(seconds=meet_s))
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not meet its peers at "
            f"{place} within {meet_s:g} s: {error}"
        ) from error
    host_group = _group("gloo") if device.type == "cuda" else None
    sums_group = _group("nccl") if device.type == "cuda" else None
    lost = LostPeers(PrefixStore("lost", store), rank, size, timeout_s)
    comm = DistributedCommunicator(rank, size, device, lost, host_group, sums_group)
    explain_sigterm(comm.whereabouts)
    return comm


def _group(backend: str) -> dist.ProcessGroup:
    """Another group of all ranks, whose collectives run beside those of the first."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _meet(store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait for ranks that start late, here rather than inside a collective."""
    store.set(str(rank), "")
    store.wait([str(r) for r in range(size)], timeout)


def _device(backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class DistributedCommunicator:
    """One rank of a process group; made by `connect`.

    With NCCL a collective returns before it has run, and a peer that is lost then is noticed by
    NCCL's own watchdog, which ends the process after the timeout.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        lost: LostPeers,
        host_group: dist.ProcessGroup | None = None,
        sums_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Among GPUs, a group for tensors in host memory, and one for sums that run apart."""
        self.rank = rank
        self.size = size
        self.device = device
        self.doing = Doing()
        self._lost = lost
        self.hosts_apart = host_group is not None
        self._groups = {"devices": None, "hosts": host_group, "sums": sums_group}
        self._sent = dict.fromkeys(self._groups, 0)
        self._inside: dict[str, str] = {}
        """The collective that this rank is in, by network: each may have a thread."""
        self._last = "any collective"
        self._broken: str | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that went to other ranks so far."""
        return sum(self._sent.values())

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        check_exchange(received, sent, received_splits, sent_splits, self.size)
        network = self._network(sent)
        self._sent[network] += bytes_to_others(sent, sent_splits, self.rank)
        row = row_bytes(sent)
        with self._collective("all_to_all", network):
            dist.all_to_all_single(
                as_bytes(received),
                as_bytes(sent.contiguous()),
                [rows * row for rows in received_splits],
                [rows * row for rows in sent_splits],
                group=self._groups[network],
            )

    def all_reduce(self, tensor: Tensor) -> None:
        self._sum(tensor, self._network(tensor))

    def sum_apart(self, tensor: Tensor) -> None:
        self._sum(tensor, "sums" if self.hosts_apart else "devices")

    def _sum(self, tensor: Tensor, network: str) -> None:
        assert tensor.is_contiguous(), "sums work in place on contiguous memory"
        self._sent[network] += bytes_of_sum(tensor, self.size)
        with self._collective("all_reduce", network):
            dist.all_reduce(tensor.detach(), group=self._groups[network])

    def all_gather_values(self, value: object) -> list[object]:
        data = encode(value)
        with self._collective("all_gather_values", "devices"):
            sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
            padded = data.ljust(max(sizes))
            parts = self._gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        texts = [bytes(part.tolist()) for part in parts]
        return [decode(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def barrier(self) -> None:
        with self._collective("barrier", "hosts"):
            dist.barrier(group=self._groups["hosts"])

    def close(self) -> None:
        """Leave the group, also after a failure: an open group can abort the process at its end."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def whereabouts(self) -> str:
        """Which collective this rank is in, was in last, or failed in."""
        if self._broken is not None:
            return self._broken
        inside = " and ".join(self._inside.values())
        where = f"was in {inside}" if inside else f"had left {self._last}"
        return f"rank {self.rank} {where}"

    def _network(self, tensor: Tensor) -> str:
        return "hosts" if self.hosts_apart and tensor.device.type == "cpu" else "devices"

    def _gather(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, of equal size, on the host."""
        part = part.to(self.device)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return [part.cpu() for part in parts]

    @contextmanager
    def _collective(self, collective: str, network: str) -> Iterator[None]:
        """Turn what the backend says about lost peers and timeouts into one sentence."""
        call = self.doing.name(collective)
        if self._broken is not None:
            raise RunError(f"rank {self.rank} cannot start {call} after it failed: {self._broken}")
        self._inside[network] = self._last = call
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._broken = self._lost.explain(call, error)
            time.sleep(CULPRIT_FIRST_S)
            raise RunError(self._broken) from error
        finally:
            self._inside.pop(network, None)
