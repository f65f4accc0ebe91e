"""Which settings are chosen, and what is told of them."""

import tomllib

import pytest
import torch

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.planner import (
    Candidate,
    HardwarePredictor,
    ProfilePredictor,
    candidate_of,
    checked,
    choose,
    config_text,
    job_bench,
    profile_job,
    run_off,
    thought,
)
from nestpipe.planner import profile as profile_module
from nestpipe.sim import Cluster
from nestpipe.train.job import JobConfig
from support.job_world import world_profile


def chosen_for(*, net: float = 20.0, dense: float = 20.0):
    predictor = ProfilePredictor(world_profile(net=net, dense=dense))
    return choose(predictor, Candidate(), draws=2)


def test_where_exchange_is_as_long_as_compute_micro_batches_hide_it():
    choice = chosen_for(net=20, dense=40)
    best = choice.chosen
    assert best.candidate.plan == "nested"
    assert best.candidate.micro_batches > 1
    assert best.gain > 1.4
    assert best.low <= best.gain <= best.high * 1.01
    assert "Its busiest lane is net" in choice.reason() or "is compute" in choice.reason()
    assert "that serial waits for" in choice.reason()


def test_one_rank_gets_no_micro_batches():
    choice = choose(ProfilePredictor(world_profile(ranks=1)), Candidate(), draws=1)
    assert {row.candidate.micro_batches for row in choice.rows} == {1}
    assert choice.chosen.candidate.plan == "dual_buffer"


def test_of_settings_that_are_as_good_the_plainest_is_chosen():
    choice = chosen_for(net=0.5, dense=40)
    best = choice.chosen.candidate
    assert (best.exchange, best.micro_batching, best.buffers) == ("micro", "contiguous", 2)
    assert not best.speculative_rows


def test_what_ran_fastest_wins_over_what_was_predicted():
    choice = chosen_for()
    first, second = (row.candidate for row in choice.rows[:2])
    slow = dict.fromkeys((choice.today.candidate, choice.serial.candidate), 40.0)
    after = checked(choice, {first: 30.0, second: 20.0, **slow})
    assert after.chosen.candidate == second
    assert after.chosen.measured_ms == 20.0
    assert "Measured over the config as it is: 2.00x" in after.reason()
    assert "measured" not in choice.note()
    assert "measured 2.00x" in after.note()


def test_a_choice_that_ran_unlike_its_prediction_says_so():
    choice = chosen_for()
    best = choice.chosen
    near, far = best.figures.step_ms * 1.1, best.figures.step_ms * 2
    said = "do not rely on the predicted milliseconds"
    assert said not in checked(choice, {best.candidate: near}).reason()
    assert said in checked(choice, {best.candidate: far}).reason()


def test_no_range_is_told_where_none_was_drawn():
    choice = choose(HardwarePredictor(Cluster(), 8, "cpu"), Candidate(), draws=2)
    assert not choice.chosen.drawn
    assert "4 of 5 draws" not in choice.reason()


def test_the_best_few_run_beside_the_job_as_it_is_and_serial():
    choice = chosen_for()
    finalists = choice.finalists
    assert finalists[:3] == [row.candidate for row in choice.rows[:3]]
    assert {choice.today.candidate, choice.serial.candidate} <= set(finalists)
    assert len(set(finalists)) == len(finalists)


def test_a_job_is_profiled_and_its_finalists_run(monkeypatch):
    config = build(
        JobConfig,
        {
            "data": {"synthetic": {"samples": 400, "num_tables": 2, "num_keys": 50}},
            "model": {"dim": 4, "bottom": [4], "top": [4]},
            "pipeline": {"plan": "dual_buffer", "retrieval": "new"},
            "run": {"batch": 32},
        },
    )
    comm = LocalCommunicator()
    true, ran = profile_module.check_candidates, []

    def watched(bench, candidates, **options):
        ran.extend(candidates)
        # The last one is made to win: what was measured counts, not what was predicted.
        return true(bench, candidates, **options) | {candidates[-1]: 0.001}

    monkeypatch.setattr(profile_module, "check_candidates", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # so that one of the runs has another number
    with job_bench(config, comm) as bench:
        profile = profile_job(bench, steps=6, rounds=1)
        start = candidate_of(config, profile.device, profile.ranks)
        assert (start.plan, start.retrieval) == ("dual_buffer", "new")
        predicted = thought(profile, start, comm, draws=1)
        choice = run_off(bench, predicted, steps=2)
        assert profile.threads == 2
    torch.set_num_threads(before)
    assert predicted is not None
    assert choice is not None
    assert ran == predicted.finalists
    assert start in ran
    assert choice.chosen.candidate == ran[-1]
    assert all(row.measured_ms for row in choice.rows if row.candidate in ran)


def test_bits_are_lost_only_where_that_is_allowed():
    axes = ProfilePredictor(world_profile()).axes()
    assert axes.comm_dtypes == ("float32",)


def test_a_hardware_file_is_enough_for_a_choice():
    predictor = HardwarePredictor(Cluster(), 64, "cpu")
    choice = choose(predictor, Candidate(), draws=1)
    assert choice.chosen.gain > 1
    assert choice.chosen.candidate.first == 1.0


@pytest.mark.parametrize("one", [Candidate(), Candidate(plan="nested", micro_batches=4, groups=2)])
def test_the_config_that_is_written_is_one_that_train_takes(one: Candidate):
    given = "# my job\n[run]\nbatch = 256  # small\n\n[pipeline]\nplan = 'auto'\n"
    text = config_text(given, one, "why", ["model.dim=16", "data.kind=synthetic"])
    config = build(JobConfig, tomllib.loads(text))
    assert config.pipeline.plan == one.plan
    assert config.pipeline.micro_batches == one.micro_batches
    assert config.parallel.groups == one.groups
    assert (config.run.batch, config.model.dim) == (256, 16)
    assert "device_memory" not in text
    assert text.startswith("# why\n")
    assert "# small" in text
