"""Every table of figures fits 100 columns, the width of a log: nothing in it is cut short.

The figures are as wide as real ones get: five digits before the point, the longest names.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from nestpipe.bench.clustering import ClusteringReading
from nestpipe.bench.dlrm import TORCHREC, DispatchReading, HostTime, SideBySide, SideReading
from nestpipe.bench.groups import GroupReading, group_variants
from nestpipe.bench.pipeline_cases import (
    EXACT_PLANS,
    PointReport,
    VariantReport,
    case_of,
    variants_of,
)
from nestpipe.bench.relay_run import ARMS as RELAY_ARMS
from nestpipe.bench.relay_run import RelayCase
from nestpipe.bench.relay_service import Compared, Kill, RelayReading
from nestpipe.cli import bench, bench_runs, serve
from nestpipe.cli import simulate as simulation
from nestpipe.cli.options import summary_table
from nestpipe.loadtest.advise import Memory
from nestpipe.loadtest.driver import Latency, Lengths, Report
from nestpipe.loadtest.run import Found, SearchStep
from nestpipe.loadtest.settings import ARMS, LoadSettings
from nestpipe.schedule import Kind, PlanOptions, plan
from nestpipe.serve.types import RankPath
from nestpipe.sim import Scale, choose_groups, paper_cluster, paper_rows, scaling_curve
from nestpipe.train.loggers import KindTime, Summary

WIDTH = 100
LATE = Latency(20_000, 12_245.7, 12_245.7, 31_456.7, 61_456.7)


def told(name: str) -> Report:
    return Report(
        name=name,
        target_ms=50.0,
        seconds=20.0,
        requests=20_000,
        latency=LATE,
        paths={str(path): LATE for path in RankPath},
        outcomes={"admitted": 20_000},
        cuts=20_000,
        sheds=20_000,
        errors=20_000,
        unanswered=0,
        wasted=20_000,
        reused=1.0,
        host_hits=1.0,
        asked=Lengths(12_288.0, 12_288.0),
        used=Lengths(12_288.0, 12_288.0),
        compliant=20_000,
        late_p99_ms=12_245.7,
        late_max_ms=12_245.7,
        counted={"reloads": 20_000},
    )


REPORTS = [told(f"{arm.letter} {arm.name}") for arm in ARMS.values()]
SETTINGS = LoadSettings()


def load_tables() -> list[Table]:
    found = {
        one.name: Found(12_288.0, True, (SearchStep(12_288.0, (one,), kept=True),))
        for one in REPORTS
    }
    memory = [Memory(86_400.0, 1.0, 1.0, dict.fromkeys(("50 %", "80 %", "95 %"), 123_456.7))]
    return [
        serve.results_table(REPORTS, SETTINGS, 0.999),
        serve.paths_table(REPORTS),
        serve.found_table("length", found, SETTINGS),
        serve.memory_table(memory),
    ]


def relay_tables() -> list[Table]:
    kill = Kill("instance-1", 3, 3, back=True)
    readings = [
        RelayReading(front, told(name), Compared(20_000, 20_000, 1.0), kill)
        for front in ("builtin", "nginx")
        for name in (*(arm.name for arm in RELAY_ARMS), "relay + host, killed")
    ]
    case = RelayCase(
        checkpoint=Path("x"), settings=SETTINGS, cap=512, rounds=5, fronts=("builtin", "nginx")
    )
    return [bench_runs.times_table(case, readings), bench_runs.answers_table(readings)]


def pipeline_tables() -> list[Table]:
    case = replace(case_of("paper"), micro_batches=16, speculative_rows=True)
    variants = variants_of(case, EXACT_PLANS, ("whole", "new"), ("micro", "window"))
    seen = tuple(
        VariantReport(
            variant=variant,
            rounds_ms=(11_860.0, 12_345.0, 12_905.0),
            samples_per_s=123_456.0,
            compute_ms=12_345.0,
            lookup_ms=12_345.0,
            exchange_ms=12_345.0,
            idle_ms=12_345.0,
            busy_ms={"compute": 12_345.0},
            ratio=12.34,
            over_strict=12.34,
            over_async=12.34,
            predicted_ms=12_345.0,
        )
        for variant in variants
    )
    points = [PointReport(passes, seen) for passes in range(9)]
    return [
        bench_runs.steps_table(case, points[0]),
        bench_runs.lanes_table(points[0]),
        bench_runs.curve_table("strict", points, lambda seen: seen.over_strict),
    ]


def bench_tables() -> list[Table]:
    systems = ("nestpipe", "torchrec", "torchrec_dedup")
    trained = {f"{name}_samples_per_s": 123_456.0 for name in systems}
    ranges = {f"{name}_samples_per_s_range": [123_456.0, 123_456.0] for name in systems}
    result = {"config": "sequence", **trained, **ranges, "ratio": 12.34, "ratio_dedup": 12.34}
    groups = [GroupReading(v, 12_345.0, (12_345.0,) * 3, 1234.5) for v in group_variants(64, [16])]
    cut = ClusteringReading(
        data="generated users",
        parts=32,
        how="contiguous",
        ratio=12.34,
        fewer_percent=12.3,
        fewer_percent_worst=12.3,
        excess_removed_percent=100.0,
        tokens_over=9.99,
        tokens_under=9.99,
        ms=12_345.6,
        cpu_ms=12_345.6,
    )
    sides = SideBySide(
        (
            SideReading("10 keys", TORCHREC, "TrainPipelineSparseDist", 16_384, (12_345.0,) * 3),
            SideReading("10 keys", "NestPipe", "frozen_window pooled, N = 16", 1, (12_345.0,) * 3),
            SideReading("cache, rowwise_adagrad", "FBGEMM", "TBE managed_caching 10 %", 1, (1.2,)),
            SideReading("cache, rowwise_adagrad", "NestPipe", "frozen_window pooled", 1, (1.2,)),
        )
    )
    spent = HostTime(dict.fromkeys(Kind, 12.345), 12.345, {"lane compute": 12.345}, 12.345)
    return [
        bench.sides_table("26 tables of 1,000,000 rows, 16,384 samples x 4", sides),
        bench.dispatch_table("host time", DispatchReading(spent, spent)),
        bench.train_table([result]),
        bench.groups_table("4 ranks of 256 samples", groups),
        bench.clustering_table([cut], "512 users, 200 items, 5 draws"),
    ]


def simulate_tables() -> list[Table]:
    cluster, options = paper_cluster(), PlanOptions(micro_batches=8, merge_every=1)
    serial = plan("serial", PlanOptions())
    points = scaling_curve(serial, cluster, [Scale(1), Scale(4096)], batches=12)
    choice = choose_groups("nested", options, cluster, 4096, [1, 64], batches=12)
    return [
        simulation.curve_table(points, serial),
        simulation.groups_table(choice, "nested", options),
        simulation.paper_table(paper_rows((1536, 4096))),
    ]


def train_tables() -> list[Table]:
    spent = KindTime(12_345.67, 12_345.67, 12_345.67)
    kinds = {str(kind): spent for kind in Kind}
    figures = Summary(
        batches=9,
        step_ms=12_345.67,
        kinds=kinds,
        idle_ms=12_345.67,
        busiest_lane="compute",
        busiest_ms=12_345.67,
        efficiency=0.9,
        shared_keys=0.5,
        rows_read=1.0,
        rows_refreshed=1.0,
        rows_written=1.0,
        keys_asked=1.0,
        bytes_sent=1.0,
    )
    return [summary_table(figures, "frozen_window")]


@pytest.mark.parametrize(
    "make",
    [load_tables, relay_tables, pipeline_tables, bench_tables, simulate_tables, train_tables],
)
def test_no_heading_and_no_figure_is_cut(make):
    for table in make():
        terminal = Console(width=WIDTH, highlight=False)
        with terminal.capture() as shown:
            terminal.print(table)
        lines = shown.get().splitlines()
        assert not [line for line in lines if "…" in line or "..." in line], table.title
        assert max(map(len, lines)) <= WIDTH
        headings = [str(column.header) for column in table.columns]
        row = next(line for line in lines if all(heading in line for heading in headings))
        assert row, "all headings stand in one line"
