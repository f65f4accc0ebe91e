"""Costs of settings that nobody measured, from serial runs in a few forms."""

import json
from dataclasses import replace

import pytest

from nestpipe.errors import ParseError
from nestpipe.planner.choice import Candidate, ProfilePredictor
from nestpipe.schedule import Kind, Op
from nestpipe.sim import figures
from nestpipe.sim.job_costs import JobCosts, JobProfile, Split, profile_from_json
from support.job_world import true_trace, world_profile

CANDIDATES = [
    Candidate(retrieval="new"),
    Candidate(plan="dual_buffer", retrieval="whole"),
    Candidate(plan="nested", retrieval="new", micro_batches=4),
    Candidate(plan="nested", retrieval="new", micro_batches=3, first=0.5, last=0.5),
    Candidate(plan="frozen_window", retrieval="new", micro_batches=12),
]


@pytest.mark.parametrize("one", CANDIDATES, ids=str)
def test_a_step_that_was_not_measured_is_predicted(one: Candidate):
    profile = world_profile(net=20, dense=30)
    true = true_trace(one, 2, net=20, dense=30, batches=20)
    predicted = ProfilePredictor(profile).figures(one, batches=20)
    assert predicted.step_ms == pytest.approx(figures(true, samples=1).step_ms, rel=0.01)


@pytest.mark.parametrize("one", CANDIDATES, ids=str)
def test_messages_take_the_core_that_computes(one: Candidate):
    """Sixteen small messages need a core for longer than two large ones."""
    world = {"net": 20, "dense": 15, "cpu": 0.3}
    true = figures(true_trace(one, 2, batches=20, **world), samples=1)
    predicted = ProfilePredictor(world_profile(**world)).figures(one, batches=20)
    assert predicted.step_ms == pytest.approx(true.step_ms, rel=0.01)
    free = figures(true_trace(one, 2, net=20, dense=15, batches=20), samples=1)
    if one.micro_batches > 1:
        assert true.step_ms > 1.05 * free.step_ms


def test_messages_take_nothing_of_a_gpu():
    one = CANDIDATES[2]
    told = [replace(world_profile(net=20, dense=15, cpu=cpu), device="cuda") for cpu in (0.3, None)]
    first, second = (ProfilePredictor(of).figures(one).step_ms for of in told)
    assert first == pytest.approx(second, rel=1e-6)


def test_a_large_message_may_cost_more_than_its_part():
    """Between two measured sizes costs lie on a line, also where the larger one is dearer."""
    jammed, smooth = world_profile(net=60), world_profile(net=20)
    profile = replace(smooth, runs=(jammed.plain, *smooth.runs[1:]))
    one = Candidate(plan="nested", retrieval="new", micro_batches=2)
    cost_of = JobCosts(profile).of(one.form, one.split, one.make_plan("cpu", 2).shape)
    eighth = 0.5 + 19.5 / 8
    assert cost_of(Op(Kind.ROWS, 0, 0), 0) == pytest.approx(eighth + (60 - eighth) * 3 / 7)
    assert cost_of(Op(Kind.GRADS, 0, 1), 1) == pytest.approx(eighth + (60 - eighth) * 3 / 7)


def test_in_a_window_rows_come_with_their_first_use_and_gradients_leave_after_their_last():
    split = Split.of(4)
    rows, grads = (split.exchanged(kind, "window", 0.5) for kind in (Kind.ROWS, Kind.GRADS))
    assert rows == pytest.approx(grads[::-1])
    assert list(rows) == sorted(rows, reverse=True)
    assert sum(rows) == pytest.approx(1.0)
    assert split.exchanged(Kind.ROWS, "micro", 0.5) == pytest.approx((0.5,) * 4)


def test_sizes_at_the_ends_follow_first_and_last():
    assert Split.of(4, 0.5, 0.5).shares == pytest.approx((1 / 6, 1 / 3, 1 / 3, 1 / 6))
    assert Split.of(1, 0.5, 0.5).shares == (1.0,)


def test_a_profile_reads_back_what_it_wrote():
    profile = world_profile()
    read = profile_from_json(json.loads(json.dumps(profile.as_json())), "file")
    assert read == profile


def test_a_file_that_is_no_profile_is_refused_in_a_sentence():
    with pytest.raises(ParseError, match=r"'x.json' is no profile of a job .*; give a file of"):
        profile_from_json({"runs": [{}]}, "x.json")


def test_runs_that_are_too_short_are_refused():
    profile = world_profile()
    short = [
        replace(run, traces=tuple(_first_batches(t, 3) for t in run.traces)) for run in profile.runs
    ]
    with pytest.raises(ParseError, match="too short"):
        JobCosts(replace(profile, runs=tuple(short)))


def _first_batches(trace, count):
    return replace(trace, spans=tuple(s for s in trace.spans if s.batch < count))


def test_draws_differ_only_where_batches_did():
    profile: JobProfile = world_profile()
    one = Candidate(plan="nested", retrieval="new", micro_batches=4)
    predictor = ProfilePredictor(profile)
    steps = {round(predictor.figures(one, seed=seed).step_ms, 6) for seed in (None, 1, 2)}
    assert len(steps) == 1
