"""A rank is lost in the middle of a window, while every lane of the others has its own thread."""

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("train_program.py")
LATE = r", after at most 4 s: no sign of rank 2"
LOST = re.compile(
    r"rank (\d) lost its peers in `(\w+) (\d+)(?:\.\d)?` "
    r"\((?:all_to_all|all_reduce|all_gather|reduce_scatter)\)" + LATE
)
OF_SHARDS = re.compile(r"rank (\d) lost its peers in `(?:all_gather|reduce_scatter)`" + LATE)
"""FSDP gathers some parameters outside of any op."""


@pytest.mark.parametrize("how", ["killed", "silent", "killed sharded"])
def test_every_survivor_exits_and_names_op_batch_and_peer(outcomes, how: str):
    for number, rank in enumerate(outcomes(PROGRAM, how, ranks=3, first=2)):
        assert rank.status == 3
        if how == "killed sharded" and (outside := OF_SHARDS.search(rank.said)):
            assert int(outside[1]) == number
            continue
        found = LOST.search(rank.said)
        assert found, "a survivor names the op, its batch and the rank that it waited for"
        assert int(found[1]) == number
        assert int(found[3]) >= 3, "batches before that window had ended"
