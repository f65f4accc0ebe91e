"""Who is named when a collective fails: reports of survivors, without a network."""

from functools import partial

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import Store

from nestpipe.cli.app import main
from nestpipe.comm import peer_failure as loss
from nestpipe.comm.peer_failure import LostPeers, claim_kind
from nestpipe.errors import ConfigError, DataError, RunError, Speaker, speaker

CLOSED = RuntimeError("Connection closed by peer")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "GRACE_S", 0.05)


def peers(ranks: int) -> list[LostPeers]:
    store = HashStore()
    return [LostPeers(store, rank, ranks, timeout_s=4) for rank in range(ranks)]


def test_of_all_ranks_who_does_not_report_is_lost():
    first, second, _ = peers(3)
    second.explain("`rows 1`", CLOSED, range(3))
    assert first.explain("`rows 1`", CLOSED, range(3)) == (
        "rank 0 lost its peers in `rows 1`, after at most 4 s: no sign of rank 2; "
        "the network said: Connection closed by peer"
    )


def test_ranks_outside_a_part_are_not_missed():
    first, *_ = peers(8)
    assert ": no sign of rank 2;" in first.explain("`rows 1`", CLOSED, [0, 2])


def test_the_lost_rank_is_found_through_one_that_waited_for_it():
    ranks = peers(8)
    ranks[5].explain("`rows 1`", CLOSED, [5, 7])
    ranks[1].explain("`mirror 1`", CLOSED, [1, 5])
    said = ranks[0].explain("`rows 1`", CLOSED, [0, 1])
    assert ": no sign of rank 7; rank 1 failed in `mirror 1`; the network" in said


def test_what_failed_first_is_what_others_are_told():
    ranks = peers(4)
    ranks[1].explain("`rows 1`", CLOSED, [1, 3])
    ranks[1].explain("`union 2`", CLOSED, [0, 1])
    said = ranks[0].explain("`union 2`", CLOSED, [0, 1])
    assert ": no sign of rank 3; rank 1 failed in `rows 1`; the network" in said


def test_nobody_is_missing_when_all_report():
    first, second = peers(2)
    second.explain("`rows 1`", CLOSED, range(2))
    assert "every peer reports a failure too" in first.explain("`rows 1`", CLOSED, range(2))


# Who tells people of an error that several ranks may have


def test_before_ranks_meet_the_first_rank_tells(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not Speaker().may_say(ConfigError("wrong on every rank"))
    assert Speaker().may_say(RunError("failed here"))
    monkeypatch.setenv("RANK", "0")
    assert Speaker().may_say(ConfigError("wrong on every rank"))


def test_of_ranks_that_met_the_first_to_have_an_error_tells(monkeypatch):
    store, speakers = HashStore(), [Speaker(), Speaker()]
    for one in speakers:
        one.ranks_met(partial(claim_kind, store))
    monkeypatch.setenv("RANK", "1")
    assert speakers[1].may_say(DataError("of one rank alone"))
    assert not speakers[0].may_say(DataError("found by another rank too"))
    assert speakers[0].may_say(ConfigError("another thing"))
    assert all(one.may_say(RunError("its own part")) for one in speakers)


def test_where_the_store_is_gone_its_rank_has_told():
    class Gone(Store):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    alone = Speaker()
    alone.ranks_met(partial(claim_kind, Gone()))
    assert not alone.may_say(ConfigError("wrong"))


def test_a_second_command_in_the_same_process_tells_its_errors(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    speaker.ranks_met(lambda kind: False)  # as an earlier command left it
    with pytest.raises(SystemExit, match="2"):
        main(["draw", "nestd"])
    assert "nestd" in capsys.readouterr().err
