"""The figures of `nestpipe bench pipeline`, from traces whose figures are known."""

from dataclasses import replace
from statistics import median

import pytest

from nestpipe.bench.pipeline_cases import (
    EXACT_PLANS,
    PipelineCase,
    PointReport,
    Variant,
    VariantReport,
    case_of,
    collective_draw,
    network_in_use,
    report,
    step_times,
    variants_of,
    without_waiting,
)
from nestpipe.bench.pipeline_rank import (
    joined,
    read_rounds,
    read_task,
    sharing_of,
    trace_file,
    write_task,
)
from nestpipe.cli.app import main
from nestpipe.errors import ConfigError
from nestpipe.schedule import Kind, Lane, Op
from nestpipe.sim.replay import Sharing, replay_shared
from nestpipe.trace import Span, Trace, write_chrome

CASE = PipelineCase(name="tiny", ranks=2, batch=8, micro_batches=4, rounds=1, steps=16)
OWN = Sharing((0, 1), frozenset())
COSTS = {Kind.RETRIEVE: 20.0, Kind.ROWS: 5.0, Kind.DENSE: 10.0, Kind.GRADS: 5.0, Kind.SYNC: 1.0}


def cost_of(op: Op, rank: int) -> float:
    return COSTS.get(op.kind, 0.0)


def measured(variants: list[Variant]) -> dict[Variant, list[Trace]]:
    return {v: [replay_shared(v.make_plan(), cost_of, OWN, batches=16)] for v in variants}


def test_a_step_its_gain_and_its_prediction():
    variants = variants_of(CASE, ("nested",), ("whole",))
    point = report(CASE, 1, OWN, measured(variants))
    serial = point.serial()
    assert serial.step_ms == pytest.approx(20 + 4 * 20, rel=1e-3)
    assert point.shares == pytest.approx({"lookup": 0.2, "exchange": 0.4, "compute": 0.4}, rel=1e-3)
    assert point.moved_over_compute == pytest.approx(1.5, rel=1e-3)
    nested = next(seen for seen in point.variants if seen.variant.plan == "nested")
    # Hidden but for a refresh, the first rows and the last gradients.
    assert nested.step_ms == pytest.approx(1 + 5 + 40 + 5, rel=1e-3)
    assert nested.ratio == pytest.approx(100 / 51, rel=1e-3)
    assert nested.busiest_lane == "compute"
    assert nested.efficiency == pytest.approx(41 / 51, rel=1e-3)
    assert nested.samples_per_s == pytest.approx(1000 * 16 / 51, rel=1e-3)
    assert nested.error == pytest.approx(0.0, abs=1e-3)


def test_the_best_serial_has_no_use_for_micro_batches():
    def dear_messages(op: Op, rank: int) -> float:
        return 3.0 if op.kind in (Kind.ROWS, Kind.GRADS) else cost_of(op, rank)

    variants = variants_of(CASE, ("nested",), ("whole",))
    traces = {v: [replay_shared(v.make_plan(), dear_messages, OWN, batches=16)] for v in variants}
    nested = report(CASE, 1, OWN, traces).variants[-1]
    assert nested.over_strict < nested.ratio


GPU_CASE = replace(CASE, device="cuda")


def test_on_a_gpu_both_baselines_run_and_on_a_cpu_they_are_one():
    on_gpu = [v.name for v in variants_of(GPU_CASE, ("nested",), ("whole",)) if v.serial]
    assert on_gpu == [
        *("serial-strict-whole-1", "serial-strict-new-1"),
        *("serial-strict-whole-4", "serial-strict-new-4"),
        *("serial-async-whole-1", "serial-async-new-1"),
        *("serial-async-whole-4", "serial-async-new-4"),
    ]
    assert {v.loop for v in variants_of(CASE, ("nested",), ("whole",))} == {"strict"}
    nested = report(CASE, 1, OWN, measured(variants_of(CASE, ("nested",), ("whole",)))).variants[-1]
    assert nested.over_async == nested.over_strict


def test_a_gain_is_over_the_fastest_run_of_each_baseline():
    """The host of the async loop hides half of the lookup: the gain over it is smaller."""

    def traces(variant: Variant) -> list[Trace]:
        lookup = 10.0 if variant.loop == "async" else 20.0
        costs = {**COSTS, Kind.RETRIEVE: lookup}
        made = variant.make_plan("cuda")
        return [replay_shared(made, lambda op, rank: costs.get(op.kind, 0.0), OWN, batches=16)]

    variants = variants_of(GPU_CASE, ("nested",), ("whole",))
    point = report(GPU_CASE, 1, OWN, {v: traces(v) for v in variants})
    steps: dict[str, list[float]] = {}
    for seen_ in point.variants:
        if seen_.variant.serial:
            steps.setdefault(seen_.variant.loop, []).append(seen_.step_ms)
            assert (seen_.predicted_ms is not None) == (
                seen_.variant.loop == "strict" and seen_.variant.micro_batches == 4
            )
    nested = point.variants[-1]
    assert nested.over_strict == pytest.approx(min(steps["strict"]) / nested.step_ms)
    assert nested.over_async == pytest.approx(min(steps["async"]) / nested.step_ms)
    assert nested.over_async < nested.over_strict
    said = nested.as_json()
    assert said["over_strict_serial"] == said["ratio_best"] == nested.over_strict
    assert said["over_async_serial"] == nested.over_async


def test_a_step_is_the_median_over_rounds_beside_its_range():
    """One slow round moves neither the median nor the fastest: it shows in the range."""

    def rounds(variant: Variant) -> list[Trace]:
        made = variant.make_plan()

        def traced(slower: float) -> Trace:
            return replay_shared(made, lambda op, _: slower * cost_of(op, 0), OWN, batches=16)

        return [traced(slower) for slower in (1.0, 3.0, 1.1)]

    variants = variants_of(CASE, ("nested",), ("whole",))
    serial = report(CASE, 1, OWN, {v: rounds(v) for v in variants}).serial()
    assert serial.step_ms == pytest.approx(110, rel=1e-3)
    assert serial.as_json()["step_ms_range"] == pytest.approx([100, 300], rel=1e-3)
    assert serial.as_json()["rounds_ms"] == pytest.approx([100, 300, 110], rel=1e-3)


def test_a_window_is_measured_against_serial_with_a_window():
    """Rows cost half in a window: what is predicted and compared must be of the same exchange."""

    def traces(variant: Variant) -> list[Trace]:
        cheap = 0.5 if variant.exchange == "window" else 1.0

        def cost(op: Op, rank: int) -> float:
            return cost_of(op, rank) * (cheap if op.kind in (Kind.ROWS, Kind.GRADS) else 1.0)

        return [replay_shared(variant.make_plan(), cost, OWN, batches=16)]

    variants = variants_of(CASE, ("nested",), ("whole",), ("micro", "window"))
    point = report(CASE, 1, OWN, {variant: traces(variant) for variant in variants})
    assert point.serial().variant.exchange == "micro"
    seen = {v.variant.exchange: v for v in point.variants if v.variant.plan == "nested"}
    assert seen["window"].step_ms == pytest.approx(1 + 2.5 + 40 + 2.5, rel=1e-3)
    assert seen["window"].ratio == pytest.approx((20 + 4 * 15) / 46, rel=1e-3)
    for one in seen.values():
        assert one.error == pytest.approx(0.0, abs=1e-3)
        assert one.as_json()["exchange"] == one.variant.exchange


def test_on_a_gpu_predictions_are_of_the_plan_that_runs_there():
    """A long key exchange has a lane of its own there: it delays no rows, and no prediction."""
    gpu = PipelineCase(
        name="tiny", device="cuda", ranks=2, batch=8, micro_batches=4, rounds=1, steps=16
    )
    dear = {**COSTS, Kind.KEYS: 45.0}

    def cost(op: Op, rank: int) -> float:
        return dear.get(op.kind, 0.0)

    variants = variants_of(gpu, ("nested",), ("whole",))
    made = {v: [replay_shared(v.make_plan("cuda"), cost, OWN, batches=16)] for v in variants}
    nested = report(gpu, 1, OWN, made).variants[-1]
    on_one_network = replay_shared(variants[-1].make_plan(), cost, OWN, batches=16)
    assert nested.error == pytest.approx(0.0, abs=1e-3)
    assert nested.step_ms < 0.9 * median(step_times(on_one_network))


EARLY_CASE = replace(CASE, speculative_rows=True)


def test_only_nested_sends_rows_early_and_is_named_so():
    variants = variants_of(EARLY_CASE, EXACT_PLANS, ("whole", "new"), ("micro", "window"))
    early = [variant.name for variant in variants if variant.speculative_rows]
    assert early == [
        "nested-whole-4-early",
        "nested-whole-4-window-early",
        "nested-new-4-early",
        "nested-new-4-window-early",
    ]
    for variant in variants:
        for device in ("cpu", "cuda"):
            assert variant.make_plan(device).shape.speculative_rows == variant.name.endswith(
                "early"
            )


def test_rows_that_are_sent_early_are_measured_against_the_same_serial():
    """Neighbouring batches share a fifth of their rows: `new` reads the other four."""

    def traces(variant: Variant) -> list[Trace]:
        costs = {**COSTS, Kind.PATCH: 1.0}
        if variant.retrieval == "new":
            costs[Kind.RETRIEVE] = 16.0
        made = variant.make_plan()
        return [replay_shared(made, lambda op, rank: costs.get(op.kind, 0.0), OWN, batches=16)]

    variants = variants_of(EARLY_CASE, ("nested",), ("whole",))
    *_, nested = report(EARLY_CASE, 1, OWN, {v: traces(v) for v in variants}).variants
    assert nested.variant.speculative_rows
    # Hidden but for a refresh, the rows that come again and the last gradients.
    assert nested.step_ms == pytest.approx(1 + 1 + 40 + 5, rel=1e-3)
    assert nested.ratio == pytest.approx(100 / 47, rel=1e-3)
    assert nested.error == pytest.approx(0.0, abs=1e-3)


def seen(variant: Variant) -> VariantReport:
    return VariantReport(
        variant=variant,
        rounds_ms=(49.0, 50.0, 53.0),
        samples_per_s=1.0,
        compute_ms=40.0,
        lookup_ms=1.0,
        exchange_ms=5.0,
        idle_ms=0.0,
        busy_ms={"compute": 40.0},
        ratio=2.0,
        over_strict=1.5,
        over_async=1.2,
        predicted_ms=None,
    )


def test_the_table_names_what_sends_rows_early(monkeypatch, capsys):
    def run_pipeline(case, variants, folder, *, hosts):
        return [PointReport(case.passes, tuple(seen(variant) for variant in variants))]

    monkeypatch.setattr("nestpipe.bench.pipeline_rank.run_pipeline", run_pipeline)
    for early, row in ((True, "nested whole 4 early"), (False, "nested whole 4")):
        sizes = ("--set", "micro_batches=4", "--set", f"speculative_rows={str(early).lower()}")
        with pytest.raises(SystemExit) as stop:
            main(["bench", "pipeline", "--plans", "nested", "--retrieval", "whole", *sizes])
        assert stop.value.code == 0
        rows = [line.strip().split("  ")[0] for line in capsys.readouterr().out.splitlines()]
        assert row in rows


def test_waiting_for_a_peer_is_not_work_of_the_network():
    early = Span("rows", "net", 3, 0, 0, 10.0, 50.0)
    late = Span("rows", "net", 3, 0, 1, 45.0, 50.0)
    dense = Span("dense", "compute", 3, 0, 0, 50.0, 60.0)
    fair = without_waiting(Trace((early, late, dense)))
    assert [span.start for span in fair.spans] == [45.0, 45.0, 50.0]


def test_waiting_for_a_peer_is_no_work_on_other_lanes_either():
    early = Span("keys", "route", 3, None, 0, 10.0, 50.0)
    late = Span("keys", "route", 3, None, 1, 45.0, 58.0)
    both = Trace((early, late))
    for fair in (without_waiting(both), network_in_use(both)):
        assert [(span.start, span.end) for span in fair.spans] == [(45.0, 50.0), (45.0, 58.0)]


def test_a_lane_of_the_network_is_in_use_until_its_last_member_is_done():
    early = Span("rows", "net", 3, 0, 0, 10.0, 50.0)
    late = Span("rows", "net", 3, 0, 1, 45.0, 58.0)
    used = network_in_use(Trace((early, late)))
    assert [(span.start, span.end) for span in used.spans] == [(45.0, 58.0)] * 2


def test_what_collectives_take_of_a_core():
    spans = (
        Span("rows", "net", 3, 0, 0, 10.0, 50.0),
        Span("rows", "net", 3, 0, 1, 30.0, 50.0),
    )
    assert collective_draw([Trace(spans, {"net_cpu_ms": 5.0})]) == pytest.approx(0.25)


def test_traces_travel_through_the_folder(tmp_path):
    variant = Variant("serial", "whole", 4)
    write_task(tmp_path, CASE, [variant])
    assert read_task(tmp_path) == (CASE, [variant])
    for rank in range(2):
        span = Span("update", "compute", 0, None, rank, 1000.0 + rank, 1002.0 + rank)
        write_chrome(Trace((span,), {"plan": "serial"}), trace_file(tmp_path, 0, variant, 1, rank))
    (found,) = read_rounds(tmp_path, CASE, 0, variant)
    assert found.ranks == (0, 1)
    assert [round(span.start) for span in found.spans] == [0, 1], "on one clock, from zero"
    assert found.facts["plan"] == "serial"


def test_joined_ranks_keep_their_distance():
    first = Trace((Span("update", "compute", 0, None, 0, 7.0, 9.0),))
    second = Trace((Span("update", "compute", 0, None, 1, 8.0, 11.0),))
    spans = joined([first, second]).spans
    assert [(s.rank, s.start, s.end) for s in spans] == [(0, 0.0, 2.0), (1, 1.0, 4.0)]


def test_serial_runs_in_both_forms_and_without_micro_batches():
    names = [variant.name for variant in variants_of(CASE, ("nested", "serial"), ("whole",))]
    assert names == [
        "serial-strict-whole-1",
        "serial-strict-new-1",
        "serial-strict-whole-4",
        "serial-strict-new-4",
        "nested-whole-4",
    ]
    window = variants_of(CASE, ("nested",), ("new",), ("micro", "window"))
    assert [variant.name for variant in window[2:]] == [
        "serial-strict-whole-4",
        "serial-strict-new-4",
        "serial-strict-whole-4-window",
        "serial-strict-new-4-window",
        "nested-new-4",
        "nested-new-4-window",
    ]
    every = variants_of(CASE, EXACT_PLANS, ("whole", "new"))
    assert len(every) == len(set(every)) == 4 + 2 * 4


@pytest.mark.parametrize(
    ("plans", "forms", "sentence"),
    [
        (("nestd",), ("whole",), "unknown plan 'nestd'"),
        (("nested",), ("some",), "unknown retrieval 'some'; use whole, new or pooled"),
    ],
)
def test_what_cannot_be_run_is_named(plans, forms, sentence):
    with pytest.raises(ConfigError, match=sentence):
        variants_of(CASE, plans, forms)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"steps": 4}, "steps is 4; give at least 8"),
        ({"buffers": 4}, "buffers is 4; use 2 or 3"),
        ({"micro_batches": 512, "batch": 256}, "micro_batches is 512 and batch 256"),
        ({"model": "hstu", "dim": 30}, "dim is 30; make it a multiple of heads, 4"),
        ({"ranks": 0}, "ranks is 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PipelineCase(**sizes)


def test_an_unknown_case_is_refused():
    with pytest.raises(ConfigError, match="unknown case 'lan'; use network"):
        case_of("lan")


def test_what_ranks_share_depends_on_where_they_run():
    on_gpu = sharing_of(case_of("paper"), hosts=False)
    assert on_gpu.pools == (0, 0, 0, 0)
    assert Lane.HOST not in on_gpu.lanes
    on_hosts = sharing_of(case_of("network"), hosts=True)
    assert Lane.HOST in on_hosts.lanes
    assert Lane.NET not in on_hosts.lanes
