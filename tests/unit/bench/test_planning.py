"""What `bench plan` makes of the steps that it measured."""

from nestpipe.bench.planning import AdaptiveReading, GridReading, small_grid
from nestpipe.planner import Candidate, Choice


def test_ratios_are_of_the_grids_best_and_of_what_was_chosen():
    grid = small_grid()
    measured = {one: 100.0 + n for n, one in enumerate(grid)}
    outside = Candidate(plan="nested", retrieval="new", micro_batches=6)
    inside = Candidate(plan="nested", retrieval="new", micro_batches=4)
    measured |= {outside: 80.0, inside: 125.0}
    seen = GridReading("1gbit", outside, inside, 90.0, measured)
    assert seen.best == grid[0]
    assert (seen.ratio, seen.unchecked_ratio) == (100 / 80, 100 / 125)
    assert seen.as_json()["best_over_unchecked"] == 0.8


def test_an_adaptive_run_is_compared_with_even_micro_batches_of_the_grid():
    plain = Candidate(plan="nested", retrieval="new")
    two, four, three, uneven = (
        Candidate(plan="nested", retrieval="new", micro_batches=n, first=first)
        for n, first in ((2, 1.0), (4, 1.0), (3, 1.0), (2, 0.5))
    )
    measured = {plain: 50.0, two: 40.0, four: 44.0, three: 30.0, uneven: 35.0}
    choices = (Choice(), Choice(step=12, micro_batches=2, first=0.5))
    seen = AdaptiveReading("1gbit", choices, 24, True, uneven, measured, "")
    assert seen.best == two
    assert seen.ratio == 40 / 35
    assert seen.as_json()["replay_identical"]


def test_the_grid_has_every_exact_plan_once():
    grid = small_grid()
    assert len(set(grid)) == len(grid) == 15
    assert {one.plan for one in grid} == {
        *("serial", "sparse_dist", "dual_buffer", "frozen_window", "nested")
    }
