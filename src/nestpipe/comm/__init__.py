"""The network: one contract, `Communicator`, for one rank, for threads and for processes."""

from nestpipe.comm.communicator import Communicator, LocalCommunicator
from nestpipe.comm.launch import launch
from nestpipe.comm.mesh import Mesh, make_mesh, members
from nestpipe.comm.process_group import DEFAULT_TIMEOUT_S, DistributedCommunicator, connect

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
]
