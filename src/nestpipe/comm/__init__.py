"""The network: one contract, `Communicator`, for one rank, for threads and for processes."""

from nestpipe.comm.communicator import Communicator, LocalCommunicator, Mesh, make_mesh, members
from nestpipe.comm.process_group import DEFAULT_TIMEOUT_S, DistributedCommunicator, connect, launch

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
