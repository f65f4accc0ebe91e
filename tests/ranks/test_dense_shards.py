"""A dense half that torch's FSDP shards: the replicated form but for rounding, exact otherwise."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("shards_program.py")
BOUND = 5e-7
"""Most that a weight, a row or a state differs from the replicated form after six batches: torch
sums in another order where there are three ranks, and the squares of shards round otherwise."""
Run = Callable[..., Any]


@pytest.fixture
def found(outcomes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What each rank of a scenario found."""
    paths = [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    def run(scenario: str, ranks: int = 2) -> list[dict[str, Any]]:
        ended = outcomes(PROGRAM, f"{scenario} {tmp_path}", ranks=ranks, first=ranks)
        assert [rank.status for rank in ended] == [0] * ranks, ended
        return [json.loads(rank.out) for rank in ended]

    return run


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_the_replicated_form_but_for_rounding(found: Run, ranks: int):
    for of_rank in found("close", ranks):
        for recipe, both in of_rank.items():
            assert both["largest"] <= BOUND, recipe
            assert both["moved"] > 100 * BOUND, "or training does nothing"
            assert both["losses"][0] == pytest.approx(both["losses"][1], rel=1e-6)
            if recipe.startswith("clipped"):
                assert both["norms"][0] == pytest.approx(both["norms"][1], rel=1e-6)
                assert min(both["norms"][0]) > 0.05, "or nothing is clipped"
        _assert_bytes_fall(of_rank, ranks)


def _assert_bytes_fall(of_rank: dict[str, Any], ranks: int) -> None:
    """Parameters and optimizer state: shards have whole rows, so not all are of one size."""
    for recipe in ("sgd", "adagrad", "adamw"):
        whole, held = of_rank[recipe]["bytes"]
        assert held == pytest.approx(whole / ranks, rel=0.1), recipe
        assert of_rank[recipe]["sent"][1] > of_rank[recipe]["sent"][0] > 0


def test_a_run_goes_on_bit_for_bit_and_any_form_or_number_of_ranks_reads_it(found: Run):
    for of_rank in found("resume"):
        one, two = of_rank.pop("held out")
        assert one == two
        assert of_rank.pop("sharded goes on")
        assert all(of_rank.values()), of_rank
    for of_rank in found("load", ranks=3):
        assert of_rank == {"same": True, "step": 3}


def test_all_ranks_hear_of_a_gradient_that_is_no_number(found: Run):
    for of_rank in found("faults"):
        for policy in ("skip", "clip", "stop"):
            assert of_rank[f"sharded {policy}"] == of_rank[f"replicated {policy}"], policy
        assert of_rank["sharded skip"][:2] == [[0, 0, 1, 0, 0, 0], True]
        assert "step 3 is nan" in of_rank["sharded stop"]


def test_blocks_are_gathered_one_by_one_and_evaluated(found: Run):
    for of_rank in found("sequences"):
        for again in (False, True):
            assert of_rank[f"verified {again}"]["identical"], of_rank[f"verified {again}"]
        assert of_rank["sharded"] == of_rank["replicated"]
