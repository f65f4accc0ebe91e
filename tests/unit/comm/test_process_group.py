"""Joining a group, as far as one process can see it."""

from contextlib import closing

import pytest
import torch

from nestpipe.comm import LocalCommunicator, connect
from nestpipe.errors import RunError


def test_without_an_environment_the_way_to_get_one_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RunError, match=r"RANK.* not set .* torchrun or with --ranks"):
        connect("gloo")


def test_a_group_of_one_process_is_like_no_group(monkeypatch: pytest.MonkeyPatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in {**environment, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    rows = torch.arange(6.0).view(3, 2)
    with closing(connect("gloo", timeout_s=20)) as comm:
        for either in (comm, LocalCommunicator()):
            received = torch.empty_like(rows)
            either.all_to_all(received, rows, [3], [3])
            either.all_reduce(received)
            assert torch.equal(received, rows)
            assert either.all_gather_values({"a": (1, 2)}) == [{"a": [1, 2]}]
            either.barrier()
