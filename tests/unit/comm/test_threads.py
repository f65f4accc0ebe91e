"""Ranks as threads: the collectives are right, and no mistake of one rank hangs the others."""

import threading
import time

import pytest
import torch

from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.errors import RunError
from support.thread_ranks import run_ranks, thread_communicators


def exchange(comm: Communicator) -> list[int]:
    """Rank r sends q rows of value r to rank q."""
    sent_splits = list(range(comm.size))
    received = torch.empty(comm.rank * comm.size, 1, dtype=torch.int64)
    sent = torch.full((sum(sent_splits), 1), comm.rank)
    comm.all_to_all(received, sent, [comm.rank] * comm.size, sent_splits)
    return received.flatten().tolist()


def test_rows_come_home_on_three_ranks():
    assert run_ranks(3, exchange) == [[], [0, 1, 2], [0, 0, 1, 1, 2, 2]]


def test_one_rank_takes_the_same_path_as_many():
    alone = LocalCommunicator()
    assert exchange(alone) == run_ranks(1, exchange)[0]
    assert alone.all_gather_values((1, {2: 3})) == [[1, {"2": 3}]]
    assert run_ranks(1, lambda comm: comm.all_gather_values((1, {2: 3})))[0] == [[1, {"2": 3}]]


def test_only_what_goes_to_others_counts_as_sent():
    def sent(comm: Communicator) -> list[int]:
        exchange(comm)
        after_exchange = comm.bytes_sent
        comm.all_reduce(torch.zeros(6, dtype=torch.float64))
        comm.barrier()
        return [after_exchange, comm.bytes_sent - after_exchange]

    # Rank r sends q rows of 8 bytes to each rank q but itself; a ring of 3 sends 2 * 2/3 of 48.
    assert run_ranks(3, sent) == [[24, 64], [16, 64], [8, 64]]
    assert sent(LocalCommunicator()) == [0, 0]


def test_sums_are_made_in_the_order_of_the_ranks():
    terms = [1e8, 1.0, -1e8, 1.0]

    def total(comm: Communicator) -> float:
        tensor = torch.tensor([terms[comm.rank]], dtype=torch.float32)
        comm.all_reduce(tensor)
        return tensor.item()

    in_order = torch.tensor(0.0)
    for term in terms:
        in_order += term
    assert run_ranks(4, total) == [in_order.item()] * 4


def test_what_is_sent_may_be_overwritten_at_once():
    def reuse(comm: Communicator) -> list[float]:
        sent = torch.full((2,), float(comm.rank))
        received = torch.empty(2)
        for _ in range(100):
            comm.all_to_all(received, sent, [1, 1], [1, 1])
            assert received.tolist() == [0, 1]
            sent.fill_(-1)
            sent.fill_(comm.rank)
        return received.tolist()

    assert run_ranks(2, reuse) == [[0, 1]] * 2


def test_values_come_in_rank_order_and_ranks_meet_again_and_again():
    def talk(comm: Communicator) -> list[object]:
        for _ in range(50):
            comm.barrier()
        return comm.all_gather_values({"rank": comm.rank})

    assert run_ranks(3, talk) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_ranks_in_different_collectives_are_told_of_each_other():
    def part(comm: Communicator) -> None:
        with comm.op_label(f"rows 3.{comm.rank}"):
            comm.barrier()

    with pytest.raises(RunError, match=r"rank 0 is in `rows 3\.0` .* rank 1 is in `rows 3\.1`"):
        run_ranks(2, part)


def test_a_failing_rank_ends_the_others_and_is_the_one_reported():
    seen = []

    def fail(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ValueError("rank's own mistake")
        try:
            comm.barrier()
        except RunError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="own mistake") as failure:
        run_ranks(3, fail)
    assert failure.value.__notes__ == ["on rank 1 of 3"]
    assert failure.traceback[-1].name == "fail"
    assert seen == [
        f"rank {rank} cannot finish `barrier`: rank 1 failed with ValueError"
        for rank in (int(text[5]) for text in seen)
    ]
    assert len(seen) == 2


@pytest.mark.parametrize("how", ["returns", "closes"])
def test_nobody_waits_for_a_rank_that_has_left(how: str):
    def leave(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            comm.barrier()
        elif how == "closes":
            comm.close()

    with pytest.raises(RunError, match="rank 0 cannot finish `barrier`: rank 1 has"):
        run_ranks(2, leave)


def test_a_rank_that_never_comes_is_named_after_the_timeout():
    first, second = thread_communicators(2, timeout_s=0.05)
    with pytest.raises(RunError, match=r"rank 0 waited 0\.05 s in `barrier` for rank 1"):
        first.barrier()
    assert second.rank == 1


def test_wrong_splits_are_found_before_anyone_hangs():
    rows = torch.ones(2, 1)
    with pytest.raises(AssertionError, match="splits ask for 3 rows"):
        LocalCommunicator().all_to_all(rows, rows.clone(), [3], [2])
    with pytest.raises(AssertionError, match="cannot arrive as"):
        LocalCommunicator().all_to_all(rows, rows.clone().long(), [2], [2])

    def expect_too_much(comm: Communicator) -> None:
        comm.all_to_all(torch.empty(4, 1), rows, [2, 2], [1, 1])

    with pytest.raises(AssertionError, match=r"expected \[2, 2\] rows .* sent \[1, 1\]"):
        run_ranks(2, expect_too_much)


def test_no_thread_is_left_behind():
    before = threading.active_count()
    run_ranks(3, lambda comm: comm.barrier())
    time.sleep(0)
    assert threading.active_count() == before
