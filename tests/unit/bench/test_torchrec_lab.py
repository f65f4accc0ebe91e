"""The comparison with TorchRec: the same work, the same clock."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

import pytest
import torch
from torch import nn

from nestpipe.bench.pipeline_cases import CASES, SerialLoop, case_of
from nestpipe.bench.pipeline_rank import make_batches, make_model
from nestpipe.bench.torchrec_lab import (
    NESTPIPE,
    TORCHREC,
    Comparison,
    LabReading,
    PeerTask,
    joined_parts,
    lab_case,
    lab_variants,
    plan_table,
    read_readings,
    table_variants,
    time_nestpipe,
    timed_step,
)
from nestpipe.errors import ConfigError
from nestpipe.trace import Span, Trace


def reading(system: str, pipeline: str, *ms: float) -> LabReading:
    return LabReading(system, pipeline, median(ms), tuple(ms), {})


LAB = [name for name in CASES if name.startswith("lab_")]


def their_keys(count: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """As the script that times TorchRec draws them."""
    u = torch.rand(count, generator=generator)
    hot = torch.exp(u * torch.log(torch.tensor(float(rows)))).long() - 1
    mask = torch.rand(count, generator=generator) < 0.5
    uniform = torch.randint(0, rows, (count,), generator=generator)
    return torch.where(mask, uniform, hot).clamp_(0, rows - 1)


@pytest.mark.parametrize("name", LAB)
def test_both_systems_train_on_the_same_batches(name):
    case = replace(case_of(name), distinct=2, batch=8)
    for rank in range(2):
        generator = torch.Generator().manual_seed(rank)
        for batch in make_batches(case, rank):
            theirs = their_keys(8 * 512, case.rows, generator)
            assert torch.equal(batch.sparse["history"].values, theirs)
            label = torch.randint(0, 2, (8,), generator=generator).float()
            assert torch.equal(batch.dense["label"], label)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("lab_a", (2, 512, 20_000_000, 4, 512)),
        ("lab_b", (2, 512, 40_000_000, 1, 256)),
        ("lab_c", (4, 256, 40_000_000, 1, 512)),
        ("lab_d", (4, 256, 40_000_000, 4, 512)),
    ],
)
def test_the_lab_cases_have_the_sizes_of_the_table(name, sizes):
    case = case_of(name)
    assert (case.ranks, case.batch, case.rows, case.blocks, case.width) == sizes
    assert (case.keys, case.dim, case.full, case.passes) == (512, 128, True, 1)
    assert (case.steps, case.distinct) == (20, 20)
    assert case.plans == "serial,nested"


def test_the_dense_half_has_their_layers():
    case = case_of("lab_b")
    width = case.width
    assert [p.shape for p in make_model(case).parameters()] == [
        *(p.shape for p in nn.Linear(case.dim, width).parameters()),
        *(p.shape for p in nn.LayerNorm(width).parameters()),
        *(p.shape for p in nn.Linear(width, 4 * width).parameters()),
        *(p.shape for p in nn.Linear(4 * width, width).parameters()),
        *(p.shape for p in nn.Linear(width, 1).parameters()),
    ]


def test_the_clock_runs_from_update_to_update_of_the_last_rank():
    def update(batch: int, rank: int, end: float) -> Span:
        return Span("update", "compute", batch, None, rank, end - 1, end)

    ends = (5.0, 20.0, 31.0, 40.0, 52.0)
    spans = [update(batch, 0, end) for batch, end in enumerate(ends)]
    late = [update(batch, 1, end + 2 * batch) for batch, end in enumerate(ends)]
    assert timed_step(Trace((*spans, *late)), warm=2, timed=2) == ((40 + 6) - (20 + 2)) / 2


def test_the_best_of_each_is_compared_and_serial_is_no_contender():
    theirs = [reading(TORCHREC, "Base", 30, 25, 20), reading(TORCHREC, "Prefetch", 26, 22, 24)]
    ours = [reading(NESTPIPE, "serial strict", 1), reading(NESTPIPE, "nested", 16)]
    result = Comparison("A", case_of("lab_a"), (*theirs, *ours))
    assert result.ratio == pytest.approx(1.5)
    assert result.best(TORCHREC) == theirs[1]
    assert result.as_json()["ratio"] == pytest.approx(1.5)
    assert Comparison("A", case_of("lab_a"), tuple(ours)).ratio is None


def test_our_best_plan_is_compared_with_both_baselines():
    steps = {"serial strict": 40.0, "serial async": 24.0, "serial async new": 26.0, "nested": 16.0}
    ours = [reading(NESTPIPE, name, ms - 1, ms, ms + 3) for name, ms in steps.items()]
    result = Comparison("A", case_of("lab_a"), tuple(ours))
    assert result.over_serial(SerialLoop.STRICT) == pytest.approx(2.5)
    assert result.over_serial(SerialLoop.ASYNC) == pytest.approx(1.5)
    said = result.as_json()
    assert (said["over_strict_serial"], said["over_async_serial"]) == (2.5, 1.5)
    assert result.readings[0].range_ms == (39.0, 43.0)
    without = Comparison("A", case_of("lab_a"), tuple(ours[1:]))
    assert without.over_serial(SerialLoop.STRICT) is None


def test_on_a_gpu_both_baselines_are_timed():
    names = [v.name for v in lab_variants(case_of("lab_c"), ["nested", "serial"], ["new"], [2])]
    assert names == ["serial-strict-new-2", "serial-async-new-2", "nested-new-2"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: lab_case("E"), "unknown configuration 'E'; use A, B, C, D, paper"),
        (lambda: lab_case("A", 0), "steps is 0"),
        (lambda: lab_variants(case_of("lab_a"), ["nestd"], ["new"], [8]), "unknown plan 'nestd'"),
        (
            lambda: lab_variants(case_of("lab_a"), ["nested"], ["new"], [513]),
            "micro_batches is 513",
        ),
    ],
)
def test_what_the_lab_does_not_know_is_named(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()


def test_more_steps_need_more_batches():
    case = lab_case("B", 36)
    assert (case.steps, case.distinct) == (44, 44)


def test_every_variant_is_timed_on_the_way(capfd):
    """A tiny case on the CPU: only the shape of the answer counts."""
    tiny = {"device": "cpu", "ranks": 1, "batch": 4, "keys": 3, "rows": 100, "dim": 4, "width": 4}
    case = replace(lab_case("A", 3), **tiny, micro_batches=2, rounds=2)
    variants = lab_variants(case, ["nested", "serial"], ["new"], [1, 2])
    readings = time_nestpipe(case, variants)
    assert [r.pipeline for r in readings] == [
        "serial strict new, 1 micro-batches",
        "serial strict new, 2 micro-batches",
        "nested new, 1 micro-batches, rows early",
        "nested new, 2 micro-batches, rows early",
    ]
    for reading in readings:
        assert len(reading.readings_ms) == 2
        assert 0 < reading.parts_ms["compute"] <= reading.step_ms
    assert "storing 100 rows" in capfd.readouterr().err


def test_the_plan_table_takes_the_fastest_form_by_the_median():
    ours = [
        reading(NESTPIPE, "serial strict new, 1 micro-batches", 40, 42, 41),
        reading(NESTPIPE, "serial async new, 1 micro-batches", 30, 31, 32),
        reading(NESTPIPE, "nested new, 3 micro-batches", 1, 18, 19),
        reading(NESTPIPE, "nested whole, 3 micro-batches", 16, 17, 90),
    ]
    theirs = [
        reading(TORCHREC, "SparseDist, cache 2 %", 26, 27, 28),
        reading(TORCHREC, "SparseDist, cache 10 %", 25, 25, 25),
    ]
    # Two calls, each with a part: what one configuration has is put together.
    parts = [
        Comparison("A", case_of("lab_a"), tuple(ours)),
        Comparison("C", case_of("lab_c"), tuple(ours[:1])),
        Comparison("A", case_of("lab_a"), tuple(theirs)),
    ]
    read_back = [Comparison.from_json(json.loads(json.dumps(part.as_json()))) for part in parts]
    assert read_back == parts
    rows = {row.name: row for row in plan_table(joined_parts(parts))}
    assert list(rows) == [
        *("strict serial", "async serial", "sparse_dist", "dual_buffer", "frozen_window"),
        *("nested", "TorchRec"),
    ]
    assert rows["nested"].readings["A"] == ours[3]
    assert rows["TorchRec"].readings["A"] == theirs[1]
    assert rows["strict serial"].readings["C"] == ours[0]
    assert not rows["dual_buffer"].readings
    said = rows["nested"].as_json()["workloads"]
    assert isinstance(said, dict)
    assert said["A"]["range_ms"] == [16, 90]


def test_the_plan_table_runs_both_baselines_in_both_forms_without_micro_batches():
    names = [variant.name for variant in table_variants(lab_case("paper"), ["new"])]
    assert names == [
        *("serial-strict-whole-1", "serial-strict-new-1"),
        *("serial-async-whole-1", "serial-async-new-1"),
        *("sparse_dist-new-4", "dual_buffer-new-4", "frozen_window-new-4", "nested-new-4-third"),
    ]


@pytest.mark.skipif(not find_spec("torchrec"), reason="TorchRec is not installed: make bench-deps")
def test_the_peer_times_every_pipeline_with_every_share(tmp_path):
    """Two CPU ranks: only the shape of the answer counts."""
    sizes = {
        "ranks": 2,
        "batch": 4,
        "keys": 3,
        "rows": 100,
        "dim": 4,
        "width": 4,
        "micro_batches": 2,
    }
    case = replace(case_of("lab_c"), device="cpu", **sizes)
    PeerTask(case, (0.1, 0.2), rounds=2, steps=3).write(tmp_path)
    command = [sys.executable, "-m", "nestpipe.bench.torchrec_lab", str(tmp_path)]
    subprocess.run(command, check=True, env=dict(os.environ))
    found = read_readings(tmp_path)
    assert [(seen.pipeline, seen.share, len(seen.rounds_ms)) for seen in found] == [
        ("TrainPipelineBase", 0.1, 2),
        ("TrainPipelineSparseDist", 0.1, 2),
        ("TrainPipelineBase", 0.2, 2),
        ("TrainPipelineSparseDist", 0.2, 2),
    ]
