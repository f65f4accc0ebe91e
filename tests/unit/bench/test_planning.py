"""What `bench plan` makes of the steps that it measured."""

from nestpipe.bench.planning import GridReading, small_grid
from nestpipe.planner import Candidate


def test_ratios_are_of_the_grids_best_and_of_what_was_chosen():
    grid = small_grid()
    measured = {one: 100.0 + n for n, one in enumerate(grid)}
    outside = Candidate(plan="nested", retrieval="new", micro_batches=6)
    chosen = Candidate(plan="nested", retrieval="new", micro_batches=4)
    seen = GridReading("1gbit", (outside, chosen), 90.0, {**measured, outside: 80.0, chosen: 125.0})
    assert seen.best == grid[0]
    assert seen.ratio == 100 / 80
    assert seen.checked == outside
    slow = GridReading("1gbit", (chosen, outside), 90.0, seen.measured)
    assert (slow.ratio, slow.checked_ratio) == (100 / 125, 100 / 80)
    assert slow.as_json()["best_over_chosen"] == 0.8


def test_the_grid_has_every_exact_plan_once():
    grid = small_grid()
    assert len(set(grid)) == len(grid) == 15
    assert {one.plan for one in grid} == {
        *("serial", "sparse_dist", "dual_buffer", "frozen_window", "nested")
    }
