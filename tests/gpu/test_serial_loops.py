"""The two baselines of `bench pipeline` on a GPU: waits change the time of a step, no bit of it."""

from contextlib import closing
from dataclasses import replace

import torch

from nestpipe.bench.pipeline_cases import CASES, SerialLoop, Variant
from nestpipe.bench.pipeline_rank import Rounds
from nestpipe.comm import LocalCommunicator

SMALL = replace(
    CASES["paper"],
    ranks=1,
    batch=64,
    keys=32,
    rows=5_000,
    dim=16,
    width=32,
    micro_batches=2,
    steps=12,
)


def trained(loop: SerialLoop, retrieval: str) -> list[torch.Tensor]:
    rounds = Rounds(SMALL, LocalCommunicator())
    with closing(rounds.trainer) as trainer:
        rounds.run(Variant("serial", retrieval, SMALL.micro_batches, loop=loop))
        keys_K = torch.arange(SMALL.rows)
        (store,) = trainer.stores
        rows_KW = torch.empty(len(keys_K), store.layout.width)
        store.gather(keys_K, [len(keys_K)], rows_KW)
        return [rows_KW, *(p.detach().cpu() for p in trainer.model.parameters())]


def test_the_async_loop_has_the_bits_of_the_strict_one():
    for retrieval in ("whole", "new"):
        strict, ahead = (trained(loop, retrieval) for loop in SerialLoop)
        for one, other in zip(strict, ahead, strict=True):
            assert torch.equal(one, other), retrieval
