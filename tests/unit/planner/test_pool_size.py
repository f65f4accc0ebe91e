"""How large a pool of rows should be, counted from the keys of a profile; real pools agree."""

import json
import tomllib
from dataclasses import replace

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.planner import (
    Candidate,
    ProfilePredictor,
    candidate_of,
    choose,
    config_text,
    job_bench,
    profile_job,
)
from nestpipe.planner.choice import memory_text
from nestpipe.sim.job_costs import PoolSize, RowReuse, profile_from_json, with_trend
from nestpipe.train.job import JobConfig
from support.job_world import world_profile

POOLED = {
    "data": {"synthetic": {"samples": 60_000, "num_tables": 2, "num_keys": 2000}},
    "model": {"dim": 4, "bottom": [4], "top": [4]},
    "pipeline": {"plan": "serial", "retrieval": "pooled"},
    "run": {"batch": 64, "threads": 1},
}
REUSE = RowReuse(
    rows=100,
    seen=12,
    free_bytes=10e6,
    auto_bytes=5e6,
    sizes=(PoolSize(1e6, 2, 60.0), PoolSize(2e6, 4, 20.0), PoolSize(4e6, 8, 0.9)),
)


@pytest.fixture(scope="module")
def counted():
    """The reuse of a small job, and what pools of three sizes really read."""
    config = build(JobConfig, POOLED)
    read: dict[int, list[int]] = {}
    with job_bench(config, LocalCommunicator()) as bench:
        profile = profile_job(bench, steps=8, rounds=2)
        assert profile.reuse is not None
        start = candidate_of(config, profile.device, profile.ranks)
        for size in profile.reuse.sizes:
            if size.batches in (2, 8, 32):
                one = replace(start, device_memory=memory_text(size.num_bytes))
                steps = read.setdefault(size.batches, [])
                bench.run(
                    one, 60, on_step=lambda report, steps=steps: steps.append(report.rows_read)
                )
    return profile, {batches: sum(of[40:]) / len(of[40:]) for batches, of in read.items()}


@pytest.mark.parametrize("batches", [2, 8, 32])
def test_a_real_pool_lacks_what_the_keys_foretell_or_somewhat_less(counted, batches):
    profile, read = counted
    size = next(one for one in profile.reuse.sizes if one.batches == batches)
    # Counted by the last use alone; the pool keeps rows that are used often.
    assert 0.7 * size.missing < read[batches] < 1.05 * size.missing


def test_the_rows_that_neighbours_share_are_those_that_new_does_not_read(counted):
    profile, _ = counted
    new, pooled = profile.plain, next(r for r in profile.runs if r.form.retrieval == "pooled")
    assert new.rows_read < profile.reuse.rows
    assert pooled.rows_read < new.rows_read


def test_the_chosen_pool_is_written_with_its_reason(counted):
    profile, _ = counted
    predictor = ProfilePredictor(profile)
    start = replace(Candidate(), retrieval="pooled", device_memory="30KB")
    choice = choose(predictor, start, draws=1)
    pooled = next(row for row in choice.rows if row.candidate.retrieval == "pooled")
    size = profile.reuse.chosen()
    assert pooled.candidate.device_memory == memory_text(size.num_bytes)
    assert f"the rows of {size.batches} batches" in pooled.pool
    assert "come from host memory, by the trend of" in pooled.pool
    text = config_text("[run]\nbatch = 64\n", pooled.candidate, choice.note())
    config = build(JobConfig, tomllib.loads(text))
    assert config.run.device_memory == pooled.candidate.device_memory
    assert config.run.batch == 64


def test_the_smallest_pool_that_lacks_nearly_nothing_is_chosen():
    assert REUSE.chosen() == REUSE.sizes[2]
    enough = replace(REUSE, sizes=(*REUSE.sizes, PoolSize(6e6, 16, 0.0)))
    assert enough.chosen() == REUSE.sizes[2]


@pytest.mark.parametrize(("free", "batches"), [(6e6, 8), (4e6, 4), (2e6, 2), (1e6, None)])
def test_a_pool_leaves_a_fifth_of_the_free_memory(free, batches):
    size = replace(REUSE, free_bytes=free).chosen()
    assert (size and size.batches) == batches


def test_ranks_of_several_groups_own_as_many_times_the_rows():
    assert REUSE.chosen(groups=2) == REUSE.sizes[2]
    assert REUSE.chosen(groups=4) == REUSE.sizes[1]


def test_what_larger_pools_lack_follows_the_trend_until_it_is_nearly_nothing():
    sizes = (PoolSize(1e6, 2, 40.0), PoolSize(1.06e6, 4, 20.0))
    trend = with_trend(sizes, rows=100)
    assert trend[:2] == sizes
    assert [one.missing for one in trend[2:]] == [10, 5, 2.5, 1.25, 0.625]
    assert [one.batches for one in trend] == [2, 4, 8, 16, 32, 64, 128]
    # A byte more for each row more: 1e3 of them between the two that were counted.
    assert trend[2].num_bytes == pytest.approx(1.06e6 + 1e3 * 4 * 15)
    assert not any(one.counted for one in trend[2:])


def test_a_trend_ends_where_all_rows_fit_and_is_none_where_nothing_is_gained():
    whole = PoolSize(1.1e6, 0, 0.0)
    falling = (PoolSize(1e6, 2, 40.0), PoolSize(1.06e6, 4, 20.0), whole)
    assert with_trend(falling, rows=100) == falling
    flat = (PoolSize(1e6, 2, 40.0), PoolSize(1.1e6, 4, 39.9))
    assert with_trend(flat, rows=100) == flat


def test_costs_follow_the_rows_that_a_pool_lacks():
    profile = with_pool(REUSE)
    small, large = (
        ProfilePredictor(profile).figures(Candidate(retrieval="pooled", device_memory=memory))
        for memory in ("1MB", "4MB")
    )
    # A batch of `new` reads 70 rows in 6 ms and writes them in 4.
    assert small.step_ms - large.step_ms == pytest.approx((60 - 0.9) / 70 * 10, rel=0.01)


def with_pool(reuse: RowReuse):
    """A profile with a run of a pool, which lacked 60 rows of a batch."""
    known = world_profile()
    plain = replace(known.plain, rows_read=70.0)
    form = replace(plain.form, retrieval="pooled")
    pooled = replace(plain, form=form, rows_read=60.0)
    return replace(known, runs=(plain, *known.runs[1:], pooled), reuse=reuse)


def test_pools_that_cannot_hold_two_batches_are_no_choice():
    full = ProfilePredictor(with_pool(replace(REUSE, free_bytes=1e6)))
    assert "pooled" not in full.axes().retrievals
    start = Candidate(retrieval="pooled", device_memory="900KB")
    assert "may not hold two batches" in full.about_pool(start)
    choice = choose(full, start, draws=1)
    assert choice.chosen.candidate.retrieval != "pooled"


def test_a_profile_keeps_what_its_keys_told():
    profile = with_pool(REUSE)
    assert profile_from_json(json.loads(json.dumps(profile.as_json())), "file") == profile
    old = profile.as_json()
    del old["reuse"]
    assert profile_from_json(old, "file").reuse is None


def test_without_keys_the_size_stays_and_that_is_said():
    silent = ProfilePredictor(replace(with_pool(REUSE), reuse=None))
    assert silent.axes().pools == {}
    assert "stays as it is" in silent.about_pool(Candidate(retrieval="pooled"))
    assert "run" not in Candidate(retrieval="pooled").sections()
