"""The DLRM benchmark: the same work for both systems, each in processes of its own."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from nestpipe.bench import dlrm, machines
from nestpipe.bench.dlrm import (
    NESTPIPE,
    TORCHREC,
    BenchDlrm,
    DlrmCase,
    HostTimes,
    SideBySide,
    SideReading,
    StepClock,
    compare_dlrm,
    find_packages,
    make_batches,
    make_trainer,
    readings_of,
)
from nestpipe.bench.machines import Job, run_jobs
from nestpipe.bench.pipeline_cases import Variant
from nestpipe.bench.pipeline_rank import Repeated
from nestpipe.comm import LocalCommunicator
from nestpipe.errors import ConfigError
from nestpipe.runtime import InlineLanes, StopSignal
from nestpipe.runtime import run as execute
from nestpipe.runtime.executor import HostSpans
from nestpipe.schedule import Kind, PlanOptions, plan

TINY = DlrmCase(
    device="cpu",
    batch=8,
    keys=2,
    features=3,
    rows=50,
    dim=4,
    bottom=(8,),
    top=(8,),
    distinct=2,
    warm=3,
    steps=2,
    rounds=2,
)


def test_the_case_has_the_sizes_of_the_facts():
    case = DlrmCase()
    assert (case.features, case.rows, case.dim, case.batch) == (26, 1_000_000, 64, 16_384)
    widths = [tuple(p.shape) for p in BenchDlrm(case).parameters() if p.ndim == 2]
    assert widths == [(512, 13), (256, 512), (64, 256), (1024, 415), (512, 1024), (1, 512)]


def test_every_rank_has_batches_of_its_own_and_the_same_every_time():
    (first, *_), (again, *_), (other, *_) = (make_batches(TINY, rank) for rank in (0, 0, 1))
    assert torch.equal(first.sparse["c0"].values, again.sparse["c0"].values)
    assert not torch.equal(first.sparse["c0"].values, other.sparse["c0"].values)
    assert first.sparse["c2"].lengths.tolist() == [2] * 8


def test_plans_train_to_the_same_rows():
    """What is timed is training: every variant ends with the same bits."""
    found = []
    for variant in (Variant("serial", "whole", 1), Variant("nested", "new", 1)):
        trainer = make_trainer(TINY, variant, LocalCommunicator())
        trainer.fit(Repeated(make_batches(TINY, 0), 5), steps=5)  # type: ignore[arg-type]
        found.append(trainer.rows_of("c1", torch.arange(50)))
        trainer.close()
    assert torch.equal(*found)


def test_rounds_follow_each_other_after_the_warm_up():
    clock = StepClock()
    clock.times_s = [0.0, 1.0, 2.0, 2.5, 3.0, 5.0, 7.0, 99.0]
    assert clock.rounds_ms(warm=3, steps=2, rounds=2) == [500.0, 2000.0]


def test_speeds_are_compared_with_the_fastest_form_of_the_peer():
    readings = (
        SideReading("1 key", TORCHREC, "Base", 10, (4.0, 5.0, 6.0)),
        SideReading("1 key", TORCHREC, "SparseDist", 10, (3.0, 4.0, 9.0)),
        SideReading("10 keys", TORCHREC, "Base", 10, (1.0,)),
        SideReading("1 key", NESTPIPE, "nested pooled", 10, (2.0,)),
        SideReading("10 keys", NESTPIPE, "nested pooled", 10, failed="no room"),
    )
    found = SideBySide(readings)
    assert [seen["over_peer"] for seen in found.as_json()] == [None, None, None, 2.0, None]
    assert found.as_json()[1]["range_ms"] == [3.0, 9.0]
    assert found.as_json()[3]["samples_per_s"] == 5000
    assert found.failed == ["NestPipe nested pooled on 10 keys"]


JOBS = """
import os, sys
from pathlib import Path
from nestpipe.bench.machines import do_jobs
from nestpipe.errors import ConfigError

def do(job):
    if job["how"] == "die":
        os._exit(9)
    if job["how"] == "refuse":
        raise ConfigError("no room")
    return [{"form": job["how"], "rounds_ms": [1.0]}]

do_jobs(Path(sys.argv[1]), do)
"""


def test_a_job_that_ends_its_process_costs_only_its_own_figures(tmp_path: Path):
    (tmp_path / "some_jobs.py").write_text(JOBS)
    hows = ("a", "die", "refuse", "b")
    results = run_jobs("some_jobs", [{"how": how} for how in hows], packages=tmp_path)
    works = [SideReading(how, NESTPIPE, "", 1) for how in hows]
    found = readings_of(results, works)
    assert [(seen.work, seen.failed, seen.rounds_ms) for seen in found] == [
        ("a", "", (1.0,)),
        ("die", "its process ended with status 9; see above", ()),
        ("refuse", "no room", ()),
        ("b", "", (1.0,)),
    ]


STUCK = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as if it were in a call that never returns
Path(sys.argv[0]).with_name("began").touch()
time.sleep(8)
Path(sys.argv[0]).with_name("ended").touch()
"""


def test_a_process_that_does_not_end_when_it_is_asked_is_killed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(machines, "STOP_S", 0.1)
    (tmp_path / "stuck_jobs.py").write_text(STUCK)
    (result,) = run_jobs("stuck_jobs", [{}], packages=tmp_path, limit_s=1.5)
    assert result == {"readings": [], "failed": "its process took more than 2 s"}
    assert (tmp_path / "began").exists()
    assert not (tmp_path / "ended").exists(), "nobody waited for it"


def test_what_the_peer_took_is_told_before_ours_is_timed(tmp_path: Path, monkeypatch):
    """So that a call which is stopped has written it."""
    told: list[list[str]] = []

    def timed(module: str, jobs: Sequence[Job], **_: object) -> list[dict[str, Any]]:
        return [{"readings": [{"form": "a", "rounds_ms": [1.0]}], "failed": ""} for _ in jobs]

    def hear(found: SideBySide) -> None:
        told.append([reading.system for reading in found.readings])

    monkeypatch.setattr(dlrm, "run_jobs", timed)
    case = DlrmCase(device="cpu", rows=100, batch=16)
    variants = [Variant("nested", "pooled", 1)]
    found = compare_dlrm([case], variants, tmp_path, limit_s=1.0, so_far=hear)
    assert told == [["TorchRec"] * 2]
    assert [reading.system for reading in found.readings] == ["TorchRec", "TorchRec", "NestPipe"]


def test_packages_are_found_where_they_were_unpacked(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NESTPIPE_LAB", str(tmp_path))
    assert find_packages(None, "no_such_peer") is None
    (tmp_path / "site/no_such_peer").mkdir(parents=True)
    assert find_packages(None, "no_such_peer") == tmp_path / "site"
    assert find_packages(tmp_path / "site", "no_such_peer") == tmp_path / "site"
    with pytest.raises(ConfigError, match="holds no torchrec"):
        find_packages(tmp_path, "torchrec")


def test_host_time_is_that_of_the_batches_between_two_write_backs():
    """Acts of batches 2 to 4 count: those that wait take no processor time."""
    burnt = {3: 0.03}
    work = dict.fromkeys(Kind, lambda op: None)
    work[Kind.DENSE] = lambda op: burn(burnt.get(op.batch, 0.0))
    clock = HostTimes(HostSpans(), first=1, last=4)
    serial = plan("serial", PlanOptions())
    execute(serial, work, InlineLanes(), batches=StopSignal(6), spans=clock)
    seen = clock.reading()
    assert seen.acts_ms["dense"] >= 10  # 30 ms in three batches
    assert seen.lanes_ms == {}
    assert seen.issuing_ms == seen.threads_ms >= sum(seen.acts_ms.values())


def burn(seconds: float) -> None:
    from time import thread_time

    until = thread_time() + seconds
    while thread_time() < until:
        pass


@pytest.mark.skipif(not find_spec("torchrec"), reason="TorchRec is not installed: make bench-deps")
def test_the_peer_trains_on_the_same_cases():
    found = compare_dlrm([TINY], [Variant("nested", "new", 1)], Path(sys.prefix), limit_s=120)
    assert [(seen.system, len(seen.rounds_ms)) for seen in found.readings] == [
        (TORCHREC, 2),
        (TORCHREC, 2),
        (NESTPIPE, 2),
    ]
