"""Joining a group, as far as one process can see it."""

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.comm import LocalCommunicator, connect
from nestpipe.comm.process_group import exchange_at_once
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


@pytest.mark.parametrize(
    ("received_splits", "sent_splits", "posted_first"),
    [
        ([1, 2], [1, 3], ["receive from 1", "send to 1"]),
        ([2, 0], [2, 1], ["send to 1"]),
        (
            [1, 2, 3],
            [1, 4, 5],
            ["receive from 2", "receive from 1", "send to 1", "send to 2"],
        ),
    ],
)
def test_a_rank_says_that_it_waits_before_it_sends(
    monkeypatch: pytest.MonkeyPatch,
    received_splits: list[int],
    sent_splits: list[int],
    posted_first: list[str],
):
    """Behind a message of its own, the other directions would wait for the end of that message."""
    posted: list[str] = []

    class Posted:
        def __init__(self, what: str) -> None:
            posted.append(what)

        def wait(self) -> None:
            posted.append("wait")

    def isend(part: Tensor, *, group: object, group_dst: int) -> Posted:
        assert part.tolist() == [10 + group_dst] * sent_splits[group_dst]
        return Posted(f"send to {group_dst}")

    def irecv(part: Tensor, *, group: object, group_src: int) -> Posted:
        part.fill_(20 + group_src)
        return Posted(f"receive from {group_src}")

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)  # pyright: ignore
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(sent_splits))  # pyright: ignore
    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    received = torch.zeros(sum(received_splits), dtype=torch.uint8)
    sent = torch.cat([torch.full((n,), 10 + to) for to, n in enumerate(sent_splits)]).byte()
    exchange_at_once(received, sent, received_splits, sent_splits, group=None)
    own, others = received_splits[0], enumerate(received_splits[1:], start=1)
    expected = [10] * own + [20 + peer for peer, n in others for _ in range(n)]
    assert received.tolist() == expected
    assert posted == [*posted_first, *["wait"] * len(posted_first)]
