"""A communicator that is timed does all that the one inside does."""

import torch

from nestpipe.bench.timed_network import TimedNetwork
from nestpipe.comm import run_ranks


def test_it_is_as_the_one_inside():
    def talk(comm):
        timed = TimedNetwork(comm)
        timed.begin()
        received = torch.empty(2, dtype=torch.int64)
        timed.all_to_all(received, torch.tensor([10, 11]) + timed.rank, [1, 1], [1, 1])
        total = torch.tensor([1.0])
        timed.all_reduce(total)
        timed.sum_apart(total)
        timed.barrier()
        assert timed.bytes_sent == comm.bytes_sent
        assert timed.hosts_apart == comm.hosts_apart
        assert timed.subgroup([[0], [1]]).size == 1
        with timed.doing("rows 3.1"):
            values = timed.all_gather_values(timed.rank)
        return received.tolist(), total.item(), values, timed.size, timed.exchange_ms()

    for rank, (received, *rest) in enumerate(run_ranks(2, talk)):
        assert received == [10 + rank, 11 + rank]
        assert rest == [4.0, [0, 1], 2, 0]
