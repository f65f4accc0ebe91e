"""Process groups of torch.distributed: ranks are started, joined, and talk by Gloo or NCCL.

Ranks are started on this machine as `torchrun` would: the same launcher, the same environment in
every rank, only the settings chosen for one machine. Gloo's all_reduce sums each part of the tensor
on one rank and hands the result around, so every rank gets the same bits; with three ranks or more
the terms are not in the order of the ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nestpipe.comm.communicator import (
    LocalCommunicator,
    as_bytes,
    bytes_of_sum,
    bytes_to_others,
    check_agreement,
    check_exchange,
    decode,
    encode,
    own_subset,
    row_bytes,
)
from nestpipe.comm.peer_failure import (
    LAUNCHER,
    MARKERS,
    CollectiveState,
    LostPeers,
    claim_kind,
    end_with_launcher,
    explain_sigterm,
)
from nestpipe.deprecated import warn
from nestpipe.errors import ConfigError, NestpipeError, RunError, speaker

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


Command = Sequence[str] | Callable[[], object]


def launch(command: Command | int, ranks: int | Command = 1) -> int:
    """Run `command` once per rank on this machine, and return the exit status of the run.

    The command is a program with its arguments, or a function that a new process can import: one
    of a module, not of another function, and called only under `if __name__ == "__main__"`. It
    finds RANK, WORLD_SIZE, MASTER_ADDR and so on in its environment. Standard output is shown for
    rank 0, standard error for all. When a rank fails the others are told to stop, and the status is
    that of the first to fail (128 and the signal's number, where a signal ended it). A signal to
    this process goes to the ranks; where all of them have saved and ended well, the status is 0.
    """
    if isinstance(command, int):
        warn("launch(ranks, command)", "launch(command, ranks)")
        command, ranks = ranks, command
    assert isinstance(ranks, int), "ranks are counted"
    assert not isinstance(command, int), "a command is a program or a function"
    _check(command, ranks)
    # Late: the launcher alone takes a second to import.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    entry, arguments = (_main, [command]) if callable(command) else (command[0], list(command[1:]))
    with (
        tempfile.TemporaryDirectory(prefix="nestpipe-") as folder,
        _environment(_for_ranks(ranks), {MARKERS: folder, LAUNCHER: str(os.getpid())}),
        _quiet_launcher(),
    ):
        try:
            elastic_launch(_config(ranks, folder), entry)(*arguments)
        except ChildFailedError as failed:
            _, first = failed.get_first_failure()
            return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        except SignalException as stopped:
            saved = list(Path(folder).glob("stopped-*"))
            return 0 if len(saved) == ranks else 128 + stopped.sigval
    return 0


def _check(command: Command, ranks: int) -> None:
    """Refuse what no process could be started with."""
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; start at least 1")
    named = getattr(command, "func", command)  # of a functools.partial
    if callable(named) and "<" in getattr(named, "__qualname__", ""):
        raise ConfigError(
            f"{named.__qualname__} is inside another function, so a new process cannot import it; "
            "define it at the top of a module"
        )


def _config(ranks: int, folder: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(
            log_dir=folder, redirects=dict.fromkeys(range(1, ranks), Std.OUT)
        ),
    )


def _for_ranks(ranks: int) -> dict[str, str]:
    """What every rank finds in its environment, unless the user has set it."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": LOOPBACK}


def _main(function: Callable[[], object]) -> None:
    """A rank that is a function: its failure is shown once, here, and becomes an exit status."""
    try:
        function()
    except NestpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except Exception:  # noqa: BLE001  it ends the process
        traceback.print_exc()
        sys.exit(1)


@contextmanager
def _environment(defaults: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set, and what is for these ranks alone; the ranks inherit it."""
    added = {name: value for name, value in defaults.items() if name not in os.environ} | {**ours}
    before = {name: os.environ[name] for name in added if name in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Ranks print why they failed; the launcher's own summary would hide it."""
    loud = ("torch.distributed", "torch.multiprocessing")
    names = [name for name in logging.root.manager.loggerDict if name.startswith(loud)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


DEFAULT_TIMEOUT_S = 300.0
"""Longer than a peer may be busy between two collectives, a checkpoint included."""
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NETWORKS: tuple[str, ...] = ("devices", "hosts", "sums")
FEW_RANKS = 16
"""Up to this many ranks exchange by point-to-point messages; with more, the calls take too long."""

# The names of torch 2.13, and those of 2.11 and 2.12.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_Groups = dict[str, dist.ProcessGroup | None]
"""The group of each network; None is torch's default, of all ranks."""


def connect(
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    meet_s: float = DEFAULT_TIMEOUT_S,
) -> DistributedCommunicator:
    """Join the group that torchrun's environment describes.

    Ranks may start up to `meet_s` apart; afterwards each collective has `timeout_s`. Without a
    backend it is NCCL where there is a GPU and Gloo elsewhere. SIGTERM, which the launcher sends to
    all ranks once one has died, ends the process with a line that says where it was, unless the
    program handles that signal itself. It also comes when the launcher itself is gone.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise RunError(
            f"{', '.join(missing)} not set in the environment; start the ranks with torchrun or "
            "with --ranks"
        )
    end_with_launcher()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(backend)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=meet_s)))
        # A store that the agent of torchrun keeps has the keys of the attempt before.
        store = PrefixStore(f"{_attempt()} of {size}", store)
        _await_ranks(PrefixStore("here", store), rank, size, timedelta(seconds=meet_s))
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
    let_callers_finish()
    lost = LostPeers(PrefixStore("lost", store), rank, size, timeout_s)
    state = CollectiveState(rank, lost)
    explain_sigterm(state.sentence)
    speaker.ranks_met(partial(claim_kind, PrefixStore("said", store)))
    everyone = list(range(size))
    groups: _Groups = dict.fromkeys(NETWORKS)
    if device.type == "cuda":
        groups["hosts"] = _group(everyone, "gloo", timeout_s)
        groups["sums"] = _group(everyone, "nccl", timeout_s)
    return DistributedCommunicator(everyone, device, timeout_s, groups, state)


def _attempt() -> str:
    """Which start of the ranks this is, by the launcher's count.

    Every node counts for itself: one that came back begins at 0 again. A store that rank 0 makes is
    new with every start, and needs no count.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "attempt 0"
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _group(ranks: Sequence[int], backend: str, timeout_s: float) -> dist.ProcessGroup | None:
    """Another group, whose collectives run beside those of the first; None in ranks outside it.

    Every rank of the world makes every group, in the same order.
    """
    as_given: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, **as_given)
    let_callers_finish()
    return group if isinstance(group, dist.ProcessGroup) else None


GLOO_THREAD = "gloo_tcp_loop"
"""Gloo's thread that waits for sockets; each group has one."""


def let_callers_finish() -> None:
    """Let Gloo's threads wake without preempting the thread that they wake beside.

    A call that posts a message holds a lock, and its answer may come before it lets go. Gloo's
    thread then takes the core, cannot have the lock, and asks again until its time is over: 2 ms
    of the processor for an exchange of 0.1 ms. As a batch task it waits for the call to end.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "SCHED_BATCH") or not tasks.exists():
        return
    for task in tasks.iterdir():
        with suppress(OSError):  # a thread that has ended, or a system that forbids it
            if (task / "comm").read_text().strip() == GLOO_THREAD:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _await_ranks(store: Store, rank: int, size: int, timeout: timedelta) -> None:
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
    """One rank of a process group; made by `connect`, or by `subgroup` for a part of the ranks.

    With NCCL a collective returns before it has run, and a peer that is lost then is noticed by
    NCCL's own watchdog, which ends the process after the timeout.
    """

    def __init__(
        self,
        members: Sequence[int],
        device: torch.device,
        timeout_s: float,
        groups: _Groups,
        state: CollectiveState,
        *,
        is_subgroup: bool = False,
    ) -> None:
        """`members` are ranks of the world; `state` is shared with the world's."""
        self.rank = list(members).index(state.rank)
        self.size = len(members)
        self.device = device
        self.separate_groups = device.type == "cuda"
        self.op_label = state.op_label
        self._members = members
        self._timeout_s = timeout_s
        self._groups = groups
        self._state = state
        self._is_subgroup = is_subgroup
        self._subgroups: list[DistributedCommunicator] = []
        self._dense_mesh: DeviceMesh | None = None
        self._sent = dict.fromkeys(NETWORKS, 0)
        """By network: each may have a thread."""
        state.on_failure(self._hang_up)

    def where(self) -> str:
        """The collective that this rank is in, for messages."""
        return self._state.sentence()

    @property
    def bytes_sent(self) -> int:
        """Bytes that went to other ranks so far, through subgroups too."""
        return sum(self._sent.values()) + sum(part.bytes_sent for part in self._subgroups)

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
        few = sent.device.type == "cpu" and self.size <= FEW_RANKS
        exchange = exchange_at_once if few else dist.all_to_all_single
        with self._state.inside("all_to_all", self._members):
            exchange(
                as_bytes(received),
                as_bytes(sent.contiguous()),
                [rows * row for rows in received_splits],
                [rows * row for rows in sent_splits],
                group=self._groups[network],
            )

    def all_reduce(self, tensor: Tensor) -> None:
        self._sum(tensor, self._network(tensor))

    def all_reduce_dense(self, tensor: Tensor) -> None:
        self._sum(tensor, "sums" if self.separate_groups else "devices")

    def _sum(self, tensor: Tensor, network: str) -> None:
        assert tensor.is_contiguous(), "sums work in place on contiguous memory"
        self._sent[network] += bytes_of_sum(tensor, self.size)
        with self._state.inside("all_reduce", self._members):
            dist.all_reduce(tensor.detach(), group=self._groups[network])

    def dense_mesh(self) -> DeviceMesh:
        """All ranks, as torch's own sharding wants them: a group beside the others; made once."""
        if self._dense_mesh is None:
            assert not self._is_subgroup, "a dense half is sharded over all ranks"
            everyone, timeout_s = list(range(self.size)), self._timeout_s
            # Among GPUs nothing else uses that of the sums then.
            group = self._groups["sums"] or _group(everyone, "gloo", timeout_s)
            assert group is not None
            self._dense_mesh = DeviceMesh.from_group(group, self.device.type)
        return self._dense_mesh

    def all_gather_dense(self, gathered: Tensor, mine: Tensor, async_op: bool) -> dist.Work | None:
        """The parts of all ranks, one behind the other, in the group of `dense_mesh`."""
        self._sent["sums"] += (self.size - 1) * mine.numel() * mine.element_size()
        with self._state.inside("all_gather", self._members):
            group = self.dense_mesh().get_group()
            return _ALL_GATHER(gathered, mine, group=group, async_op=async_op)

    def reduce_scatter_dense(self, mine: Tensor, terms: Tensor, async_op: bool) -> dist.Work | None:
        """This rank's part of a sum over all ranks, in the same group."""
        self._sent["sums"] += (self.size - 1) * mine.numel() * mine.element_size()
        with self._state.inside("reduce_scatter", self._members):
            group = self.dense_mesh().get_group()
            return _REDUCE_SCATTER(mine, terms, group=group, async_op=async_op)

    def all_gather_values(self, value: object) -> list[object]:
        data = encode(value)
        with self._state.inside("all_gather_values", self._members):
            sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
            padded = data.ljust(max(sizes))
            gathered = self._gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        texts = [bytes(of_rank.tolist()) for of_rank in gathered]
        return [decode(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def barrier(self) -> None:
        with self._state.inside("barrier", self._members):
            dist.barrier(group=self._groups["hosts"])

    def subgroup(
        self, partition: Sequence[Sequence[int]]
    ) -> DistributedCommunicator | LocalCommunicator:
        assert not self._is_subgroup, "only the communicator of all ranks has subgroups"
        own = own_subset(partition, self.rank, self.size)
        if all(len(subset) == 1 for subset in partition):
            return LocalCommunicator(self.op_label)
        check_agreement(self.all_gather_values([list(subset) for subset in partition]))
        with self._state.inside("subgroup", self._members):
            made = [(subset, self._groups_of(subset)) for subset in partition if len(subset) > 1]
        if len(own) == 1:
            return LocalCommunicator(self.op_label)
        groups = next(groups for subset, groups in made if self.rank in subset)
        subgroup = DistributedCommunicator(
            own, self.device, self._timeout_s, groups, self._state, is_subgroup=True
        )
        self._subgroups.append(subgroup)
        return subgroup

    def _groups_of(self, ranks: Sequence[int]) -> _Groups:
        """New networks of some ranks; sums share that of the devices, for NCCL's are not cheap."""
        hosts = _group(ranks, "gloo", self._timeout_s)
        devices = _group(ranks, "nccl", self._timeout_s) if self.separate_groups else hosts
        return {"devices": devices, "hosts": hosts, "sums": devices}

    def close(self) -> None:
        """Leave the group, also after a failure: an open group can abort the process at its end."""
        if self._is_subgroup:
            for group in set(self._groups.values()):
                dist.destroy_process_group(group)
            self._groups = {}
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        for subgroup in self._subgroups:
            subgroup._groups = {}

    def _hang_up(self) -> None:
        """Close this rank's connections of Gloo; NCCL ends the process by itself."""
        groups = [self._groups["hosts"]] if self._groups else []
        if self._dense_mesh is not None and not self.separate_groups:
            groups.append(self._dense_mesh.get_group())
        for group in groups:
            close_connections(group)

    def _network(self, tensor: Tensor) -> str:
        return "hosts" if self.separate_groups and tensor.device.type == "cpu" else "devices"

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of equal size, on the host."""
        tensor = tensor.to(self.device)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self._groups["devices"])
        return [of_rank.cpu() for of_rank in gathered]


def exchange_at_once(
    received: Tensor,
    sent: Tensor,
    received_splits: list[int],
    sent_splits: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """An all-to-all by Gloo, in which all messages use the links at once.

    A rank may send once its peer has said that it waits for the message. Gloo's all-to-all says so
    to one peer after another, between its own messages, and the notices queue behind those. Where
    a link is the bound, two ranks took up to twice as long, and four a sixth longer.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received_parts, sent_parts = received.split(received_splits), sent.split(sent_splits)
    works: list[dist.Work | None] = []
    for peer in (peer % size for peer in range(rank - 1, rank - size, -1)):
        if received_splits[peer]:
            works.append(dist.irecv(received_parts[peer], group=group, group_src=peer))
    for peer in (peer % size for peer in range(rank + 1, rank + size)):
        if sent_splits[peer]:
            works.append(dist.isend(sent_parts[peer], group=group, group_dst=peer))
    received_parts[rank].copy_(sent_parts[rank])
    for work in works:
        assert work is not None, "all ranks are in the group"
        work.wait()


HANG_UP_TAG = 0x4E50
"""No message has this tag, so no message is mistaken for the one that never comes."""


def close_connections(group: dist.ProcessGroup | None) -> None:
    """Close this rank's connections to all peers of a group of Gloo.

    Messages are waited for one by one, so a peer that waits for this rank's would not see that
    another rank is lost. Gloo closes all connections of a group where a message does not come in
    time.
    """
    for peer in range(dist.get_world_size(group)):
        if peer != dist.get_rank(group):
            with suppress(RuntimeError):  # as it must: nothing comes
                never = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=HANG_UP_TAG)
                if never is not None:
                    never.wait(timedelta(milliseconds=1))
