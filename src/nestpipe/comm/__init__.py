"""The network: one contract, `Communicator`, for one rank, for threads and for processes."""

from nestpipe.comm.communicator import Communicator
from nestpipe.comm.distributed import DEFAULT_TIMEOUT_S, DistributedCommunicator, connect
from nestpipe.comm.launch import launch
from nestpipe.comm.local import LocalCommunicator
from nestpipe.comm.mesh import Mesh, make_mesh, members
from nestpipe.comm.threads import run_ranks, thread_communicators

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Communicator",
    "DistributedCommunicator",
    "LocalCommunicator",
    "Mesh",
    "connect",
    "launch",
    "make_mesh",
    "members",
    "run_ranks",
    "thread_communicators",
]
