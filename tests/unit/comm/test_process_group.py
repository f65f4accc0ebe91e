"""Joining a group, as far as one process can see it."""

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.comm import LocalCommunicator, connect
from nestpipe.comm.process_group import exchange_of_two
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


@pytest.mark.parametrize(("received_splits", "sent_splits"), [([1, 2], [1, 3]), ([2, 0], [2, 1])])
def test_of_two_ranks_each_says_that_it_waits_before_it_sends(
    monkeypatch: pytest.MonkeyPatch, received_splits: list[int], sent_splits: list[int]
):
    """Behind a message of its own, the other direction would wait for the end of that message."""
    posted: list[str] = []

    class Posted:
        def __init__(self, what: str) -> None:
            posted.append(what)

        def wait(self) -> None:
            posted.append("wait")

    def isend(part: Tensor, *, group: object, group_dst: int) -> Posted:
        assert part.tolist() == [7] * sent_splits[1]
        return Posted(f"send to {group_dst}")

    def irecv(part: Tensor, *, group: object, group_src: int) -> Posted:
        part.fill_(9)
        return Posted(f"receive from {group_src}")

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)  # pyright: ignore
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    received = torch.zeros(sum(received_splits), dtype=torch.uint8)
    sent = torch.tensor([5] * sent_splits[0] + [7] * sent_splits[1], dtype=torch.uint8)
    exchange_of_two(received, sent, received_splits, sent_splits, group=None)
    assert received.tolist() == [5] * received_splits[0] + [9] * received_splits[1]
    waits = ["receive from 1"] if received_splits[1] else []
    assert posted == [*waits, "send to 1", *["wait"] * (len(waits) + 1)]
