"""Two groups of two real processes: exchanges in both directions, and the loss of one rank."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mesh_program.py")


def test_sums_and_exchanges_in_both_directions(outcomes):
    first, *others = outcomes(PROGRAM, "both_ways", ranks=4, first=4)
    assert first == (0, "rank 0 has seen all\n", "")
    assert others == [(0, "", "")] * 3


@pytest.mark.parametrize("scenario", ["one_is_killed", "one_stays_away"])
def test_every_survivor_names_the_lost_rank_of_the_world(outcomes, scenario: str):
    """Also the one that shares no subgroup with it, and waited for one that did."""
    ended = outcomes(PROGRAM, scenario, ranks=4, first=3)
    assert [rank.status for rank in ended] == [3] * 3
    for rank, op in enumerate(["mirror 3", "rows 3.1", "mirror 3"]):
        said = ended[rank].said
        assert f"rank {rank} lost its peers in `{op}` (all_reduce)" in said
        assert "no sign of rank 3;" in said
    assert "rank 1 failed in `rows 3.1` (all_reduce)" in ended[0].said
