"""A job's profile, carried over to machines that nobody has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.bench.planning import SitePrediction, worst_first
from nestpipe.cli.app import main
from nestpipe.config import build, read
from nestpipe.errors import ConfigError
from nestpipe.planner import Candidate
from nestpipe.planner.choice import ProfilePredictor
from nestpipe.planner.fleet import (
    Assumptions,
    FleetPredictor,
    Link,
    Machine,
    Offer,
    ProfiledOn,
    Site,
    answer,
    sites,
)
from nestpipe.sim import figures
from support.job_world import true_trace, world_profile

OFFER = Path(__file__).parents[3] / "configs/offer.toml"
GB_PER_S = 1e6 / 20e6
"""The world's rows are 1 MB and take 20 ms: a link of so many GB/s has no more to give."""
ON = ProfiledOn(gb_per_s=GB_PER_S)
NESTED = Candidate(plan="nested", retrieval="new", micro_batches=4)
PLAIN = Assumptions(full_rate=False, slowest=False, contention=False)


def predictor(*, per_worker: bool = False, net: float = 20.0, dense: float = 20.0):
    profile = world_profile(net=net, dense=dense)
    return FleetPredictor(profile, ON, global_batch=512, per_worker=per_worker)


def site(workers: int = 2, gb_per_s: float = GB_PER_S, groups: int = 1, **machine: float) -> Site:
    return Site(
        machine=build(Machine, {"name": "m", "price_per_hour": 2.0, **machine}),
        link=Link(name="l", gb_per_s=gb_per_s, message_us=0.0),
        workers=workers,
        groups=groups,
    )


@pytest.mark.parametrize("one", [Candidate(retrieval="new"), NESTED], ids=str)
def test_on_the_profiles_own_machines_it_says_what_plan_says(one: Candidate):
    here = ProfilePredictor(world_profile()).figures(one)
    assert predictor().figures(site(), one, PLAIN).step_ms == pytest.approx(here.step_ms, rel=0.02)


def test_a_link_twice_as_fast_halves_what_is_on_the_wire():
    serial = Candidate(retrieval="new")
    slow, fast = (predictor().figures(site(gb_per_s=g), serial, PLAIN) for g in (GB_PER_S, 1.0))
    assert slow.step_ms - fast.step_ms == pytest.approx(2 * 20 * (1 - GB_PER_S), rel=0.1)


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_an_empty_message_takes_as_long_on_any_link(micro_batches: int):
    one = Candidate(plan="nested", retrieval="new", micro_batches=micro_batches)
    true = figures(true_trace(one, 2, net=20, dense=10, batches=16, faster=10), samples=1)
    there = site(gb_per_s=10 * GB_PER_S)
    found = predictor(dense=10.0).figures(there, one, PLAIN)
    assert found.step_ms == pytest.approx(true.step_ms, rel=0.02)


def test_messages_may_use_more_of_a_link_than_they_did_in_the_profile():
    serial, half_used = Candidate(retrieval="new"), ProfiledOn(gb_per_s=2 * GB_PER_S)
    seen = FleetPredictor(world_profile(), half_used, global_batch=512, per_worker=False)
    there = site(gb_per_s=2 * GB_PER_S)
    used, full = (seen.figures(there, serial, replace(PLAIN, full_rate=f)) for f in (False, True))
    assert used.step_ms - full.step_ms == pytest.approx(20, rel=0.1)


def test_faster_compute_shortens_compute_alone():
    serial = Candidate(retrieval="new")
    slow, fast = (predictor().figures(site(compute=c), serial, PLAIN) for c in (1.0, 2.0))
    assert slow.compute_ms == pytest.approx(2 * fast.compute_ms, rel=0.01)
    assert slow.lookup_ms == pytest.approx(fast.lookup_ms, rel=0.05)


def test_more_workers_share_a_batch_unless_batches_grow():
    shared, grown = predictor(), predictor(per_worker=True)
    assert shared.samples(8) == 64
    assert grown.samples(8) == 256
    eight = site(8, gb_per_s=1.0)
    few, many = (p.figures(eight, NESTED, PLAIN) for p in (shared, grown))
    assert few.step_ms < many.step_ms
    assert few.samples_per_s < many.samples_per_s


def test_a_range_holds_the_step_and_names_what_decides():
    link = Link(name="l", gb_per_s=GB_PER_S, contention=0.2)
    found = answer(predictor(), replace(site(8), link=link))
    assert found.low_ms < found.figures.step_ms <= found.high_ms
    assert found.decides == "contention"


def test_cost_is_price_over_speed():
    found = answer(predictor(), site(4))
    speed = found.figures.samples_per_s
    assert found.cost(found.figures.step_ms) == pytest.approx(4 * 2.0 / 3600 * 1e9 / speed)


def test_groups_send_to_fewer_and_merge():
    serial = Candidate(retrieval="new")
    one, two = (predictor().figures(site(8, groups=m), serial, PLAIN) for m in (1, 2))
    assert "replica_sync" not in one.exposed_ms
    assert two.exposed_ms["replica_sync"] > 0
    assert two.exposed_ms["rows"] < one.exposed_ms["rows"]
    assert two.groups == 2


def test_a_profile_of_one_rank_cannot_tell_of_a_network():
    with pytest.raises(ConfigError, match="profile 2 ranks or more"):
        FleetPredictor(world_profile(ranks=1), ON, global_batch=256, per_worker=False)


def test_the_example_offers_what_it_says():
    offer = build(Offer, read(OFFER))
    places = sites(offer, (2, 4), (1, 2))
    assert {one.machine.name for one in places} == {"cpu", "cpu, twice as fast"}
    assert all(one.groups == 1 for one in places if one.workers == 2)
    with pytest.raises(ConfigError, match=r"has no networks; add one as \[\[networks\]\]"):
        build(Offer, {"machines": [{"name": "m"}]})


def test_errors_are_listed_the_worst_first():
    near, far = (SitePrediction(2, "1gbit", NESTED, ms, 100.0) for ms in (101.0, 80.0))
    assert worst_first([near, far]) == [far, near]
    assert far.error == pytest.approx(-0.2)


# The command


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return int(stop.value.code or 0), *capsys.readouterr()


@pytest.fixture
def files(tmp_path):
    config, profile = tmp_path / "job.toml", tmp_path / "profile.json"
    config.write_text("[run]\nbatch = 512\n")
    profile.write_text(json.dumps(world_profile().as_json()))
    return ("simulate", "--job", config, "--hardware", OFFER, "--profile", profile)


def test_a_job_is_answered_for_from_its_profile(capsys, files):
    status, out, said = run(capsys, *files, "--workers", "2,8", "--groups", "1,2")
    assert status == 0, said
    head = next(line for line in out.splitlines() if line.startswith("machines"))
    assert head.split()[-3:] == ["range", "plan;", "decides"], "all columns have room"
    assert "nested x" in out
    assert "use of links" in " ".join(out.split())
    assert "…" not in out
    assert "Cheapest: " in out
    assert "a billion samples, bound by" in " ".join(out.split())


def test_answers_are_sorted_by_cost(capsys, files):
    status, out, _ = run(capsys, *files, "--workers", "2,8", "--json", "-")
    found = json.loads(out)["answers"]
    costs = [one["cost_per_billion"] for one in found]
    assert (status, costs) == (0, sorted(costs))
    assert len(found) == 8
    assert all(one["cost_range"][0] <= one["cost_per_billion"] for one in found)


def test_without_numbers_of_workers_those_that_the_batch_goes_round_for_are_taken(capsys, files):
    status, out, said = run(capsys, *files, "--groups", "auto", "--json", "-")
    assert status == 0, said
    found = json.loads(out)["answers"]
    assert {one["workers"] for one in found} == {2, 4, 8, 16, 32, 64}
    assert {one["groups"] for one in found} == {1, 2, 4, 8}


def test_options_that_would_do_nothing_are_refused(capsys, files):
    status, _, said = run(capsys, *files, "--plan", "nested")
    assert (status, "--plan does nothing with --job" in said) == (2, True)
    status, _, said = run(capsys, "simulate", "--batch-per-worker")
    assert (status, "--batch-per-worker is for --job" in said) == (2, True)
    status, _, said = run(capsys, *files[:-2], "--ranks", "1")
    assert (status, "ranks is 1, and one rank sends nothing" in said) == (2, True)


def test_each_kind_of_hardware_file_is_told_from_the_other(capsys, files, tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[network]\ngb_per_s = 5.0\n")
    status, _, said = run(capsys, *files, "--hardware", cluster)
    assert (status, "--job takes an offer of [[machines]]" in said) == (2, True)
    status, _, said = run(capsys, "simulate", "--hardware", OFFER)
    assert (status, "is an offer for simulate --job" in said) == (2, True)


def test_wrong_input_is_told_in_a_sentence(capsys, files):
    status, _, said = run(capsys, *files, "--workers", "256")
    assert (status, "fewer than 4 samples for each" in said) == (2, True)
    status, _, said = run(capsys, *files[:3])
    assert (status, "--job needs --hardware FILE" in said) == (2, True)
    status, _, said = run(capsys, "simulate", *files[-2:])
    assert (status, "--profile is for --job" in said) == (2, True)
    status, _, said = run(capsys, "bench", "simulate", "--others", "2of100")
    assert (status, "write hosts and speed, like 2x200mbit" in said) == (2, True)
