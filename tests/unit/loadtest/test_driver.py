"""The driver and its report, against a service whose times are a formula in made time."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import (
    FormulaService,
    Latency,
    RealPace,
    Report,
    VirtualTime,
    by_threads,
    check_plot,
    drive,
    full_length_curve,
    p99_curve,
    percentile,
    plot_latencies,
    plot_search,
    report,
)
from nestpipe.loadtest.run import SearchStep
from nestpipe.loadtest.settings import ARMS, WorkloadSettings, arms_of
from nestpipe.loadtest.workload import Visit, legs, visits
from nestpipe.serve.types import AdmissionOutcome, Answer, RankPath, RealClock

SETTINGS = WorkloadSettings(rate=50, seconds=4, length=128, short=16, delay_jitter=0, new_events=0)


def regular(count: int, gap_s: float, settings=SETTINGS) -> list[Visit]:
    """Visits of different users at equal distances."""
    long = settings.length - settings.short
    return [
        Visit(number, number * gap_s, number * gap_s + 0.1, number, long, settings.short, 8)
        for number in range(count)
    ]


def run(service, made, *, settings=SETTINGS, target_ms=50.0, cap=None, warmup_s=0.0, pace=None):
    driven = drive(service, list(legs(settings, made, cap)), pace or service.time)
    return report("", driven, target_ms=target_ms, seconds=4.0, warmup_s=warmup_s)


def latency(figures: Report) -> Latency:
    assert figures.latency is not None, "nothing was answered"
    return figures.latency


def inline(ms: float, **more) -> FormulaService:
    return FormulaService(time=VirtualTime(), full_ms=lambda length: ms, **more)


def test_an_idle_server_answers_in_its_service_time():
    figures = run(inline(10), regular(100, 0.02))
    assert latency(figures).p50_ms == pytest.approx(10)
    assert latency(figures).p99_ms == pytest.approx(10)
    assert figures.compliant == figures.requests == 100
    assert figures.compliant_per_s == 25
    assert figures.valid
    assert figures.keeps_target


def test_a_queue_grows_by_what_does_not_fit():
    # Every 20 ms 30 ms of work: request i waits 10 i ms.
    figures = run(inline(30), regular(100, 0.02), target_ms=55)
    assert latency(figures).p50_ms == pytest.approx(30 + 10 * 49)
    assert latency(figures).p99_ms == pytest.approx(30 + 10 * 98)
    assert latency(figures).max_ms == pytest.approx(30 + 10 * 99)
    assert figures.compliant == 3  # 30, 40 and 50 ms
    assert not figures.keeps_target


def test_nobody_waits_for_an_answer_before_asking_again():
    # All come at once: a closed loop would see 10 ms for each.
    figures = run(inline(10), regular(20, 0.0))
    assert latency(figures).max_ms == pytest.approx(200)


def test_a_ready_prefix_makes_the_ranking_short():
    service = inline(200, rank_ms=lambda length: 5, prefix_ms=lambda length: 8)
    figures = run(service, regular(50, 0.02))
    assert set(figures.paths) == {"hbm_hit"}
    assert figures.outcomes == {"admitted": 50}
    # The signal of another request may be under way when a ranking comes, each 8 ms.
    assert latency(figures).p99_ms <= 5 + 8 + 1e-6
    assert figures.keeps_target


def test_a_prefix_that_is_not_ready_is_a_late_hit():
    figures = run(
        inline(200, rank_ms=lambda length: 5, prefix_ms=lambda length: 130), regular(1, 0.02)
    )
    assert figures.paths["late_hit"].p50_ms == pytest.approx(30 + 5)


def test_returning_users_are_found():
    service = inline(200, rank_ms=lambda length: 5)
    twice = [*regular(10, 0.02), *(replace(v, number=v.number + 10) for v in regular(10, 0.02))]
    twice = [replace(v, signal_s=v.signal_s + v.number, rank_s=v.rank_s + v.number) for v in twice]
    figures = run(service, twice)
    assert figures.outcomes == {"admitted": 10, "already_cached": 10}
    assert figures.reused == 0.5
    assert figures.wasted == 0


def test_cut_answers_do_not_count_as_compliant():
    figures = run(inline(5, cut_length=64), regular(100, 0.02))
    assert latency(figures).p99_ms == pytest.approx(5)
    assert figures.cuts == 100
    assert figures.used.mean == figures.used.p50 == 64
    assert figures.asked.mean == figures.asked.p50 == 128
    assert figures.compliant_per_s == 0
    assert not figures.keeps_target


def test_a_capped_client_does_not_count_either():
    figures = run(inline(5), regular(100, 0.02), cap=64)
    assert set(figures.paths) == {"miss_full"}  # all that the service was given
    assert figures.cuts == 100
    assert figures.compliant == 0


def test_requests_without_room_are_shed_and_counted():
    figures = run(inline(100, queue=2), regular(100, 0.02))
    assert figures.sheds > 50
    assert latency(figures).count + figures.sheds == 100
    assert figures.errors == 0
    assert figures.spoilt == figures.sheds / 100
    assert not figures.keeps_target


def test_errors_and_lost_signals_are_counted():
    class Broken(FormulaService):
        def prefetch(self, signal):
            raise OSError("down")

        def rank(self, request):
            failed = Future()
            failed.set_exception(ValueError("bad"))
            return failed

    figures = run(Broken(time=VirtualTime(), full_ms=lambda length: 1), regular(10, 0.02))
    assert figures.errors == 10
    assert figures.sheds == 0
    assert figures.latency is None
    assert figures.outcomes == {"lost": 10}
    assert not figures.keeps_target


def test_what_is_never_answered_is_counted():
    class Silent(FormulaService):
        def rank(self, request):
            return Future()

    figures = run(Silent(time=VirtualTime(), full_ms=lambda length: 1), regular(10, 0.02))
    assert figures.unanswered == 10
    assert figures.spoilt == 1


def test_a_prefix_that_its_ranking_did_not_use_is_wasted():
    class Forgetful(FormulaService):
        def prefetch(self, signal):
            return AdmissionOutcome.ADMITTED

    figures = run(Forgetful(time=VirtualTime(), full_ms=lambda length: 1), regular(10, 0.02))
    assert figures.wasted == 10


class LatePace(VirtualTime):
    """A driver that wakes up late."""

    def wait_until(self, moment: float) -> None:
        super().wait_until(moment + 0.02)


def test_a_late_driver_is_reported_and_its_run_is_not_valid():
    time = LatePace()
    figures = run(FormulaService(time=time, full_ms=lambda length: 1), regular(10, 0.1), pace=time)
    assert figures.late_p99_ms == pytest.approx(20)
    assert not figures.valid
    assert not figures.keeps_target
    # Latency counts from when the request was due, so lateness cannot hide in it.
    assert latency(figures).p50_ms >= 21 - 1e-6


def test_the_warm_up_is_not_measured():
    figures = run(inline(10), regular(100, 0.02), warmup_s=1.0)
    assert figures.requests == 50
    assert figures.seconds == 3.0


def test_what_the_service_counts_is_what_it_went_up_by():
    service = inline(1)
    run(service, regular(10, 0.02))
    driven = drive(service, list(legs(SETTINGS, regular(5, 0.02))), service.time)
    assert driven.counted == {"rankings": 5, "signals": 5}


def test_real_time_and_threads_for_signals():
    class Now(FormulaService):
        """Answers at once."""

        def rank(self, request):
            answer = super().rank(request)
            self.time.wait_until(self.time.now() + 1)
            return answer

    service = Now(time=VirtualTime(), full_ms=lambda length: 0, rank_ms=lambda length: 0)
    with ThreadPoolExecutor(4) as pool:
        driven = drive(
            service,
            list(legs(SETTINGS, regular(5, 0.001))),
            RealPace(RealClock()),
            send=by_threads(service, pool),
        )
    assert [record.outcome for record in driven.records] == [AdmissionOutcome.ADMITTED] * 5
    assert all(record.full for record in driven.records)
    assert all((record.latency_ms or 0) > 0 for record in driven.records)


def test_an_answer_that_is_noted_late_is_not_lost():
    class Slow(FormulaService):
        """Others hear of its answers before the driver does."""

        def rank(self, request):
            answer = Future()
            answer.add_done_callback(lambda _: threading.Event().wait(0.05))
            value = Answer(np.zeros(8, np.float32), RankPath.HBM_HIT, 128, "v")
            threading.Timer(0.02, answer.set_result, [value]).start()
            return answer

    service = Slow(time=VirtualTime(), full_ms=lambda length: 0)
    driven = drive(service, list(legs(SETTINGS, regular(1, 0.0))), RealPace(RealClock()))
    assert driven.records[0].full


def test_percentiles_are_values_that_occurred():
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile(range(1, 102), 0.99) == 100
    assert percentile([7], 0.99) == 7


def test_every_arm_meets_the_same_requests():
    made = visits(SETTINGS)
    whole = list(legs(SETTINGS, made))
    again = list(legs(SETTINGS, made))
    assert [leg.visit for leg in whole] == [leg.visit for leg in again]
    assert [leg.due_s for leg in whole] == [leg.due_s for leg in legs(SETTINGS, made, cap=32)]
    assert [arm.letter for arm in arms_of("a, B,D")] == ["A", "B", "D"]
    assert list(ARMS) == list("ABCDEFGHI")


PLOT_SETTINGS = WorkloadSettings(rate=20, seconds=2, length=128, delay_jitter=0)


def plot_run(ms: float, **more):
    service = FormulaService(time=VirtualTime(), full_ms=lambda length: ms, **more)
    return drive(service, list(legs(PLOT_SETTINGS, visits(PLOT_SETTINGS))), service.time)


def figures(ms: float):
    return report("", plot_run(ms), target_ms=50, seconds=2, warmup_s=0)


def test_a_curve_ends_at_the_share_of_full_answers():
    times_ms, shares = full_length_curve(plot_run(1))
    assert times_ms == sorted(times_ms)
    assert shares[-1] == 1
    assert full_length_curve(plot_run(1, cut_length=64)) == ([], [])
    shed = full_length_curve(plot_run(200, queue=1))[1]
    assert 0 < shed[-1] < 1


def test_p99_over_what_was_tried_is_in_order():
    steps = [SearchStep(40, (figures(10),), True), SearchStep(20, (figures(5),), True)]
    values, p99_ms = p99_curve(steps)
    assert values == [20, 40]
    assert p99_ms[0] < p99_ms[1]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures_are_written(tmp_path, kind):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    path = tmp_path / "new" / f"a.{kind}"
    check_plot(path)
    plot_latencies(path, {"A": plot_run(1), "B": plot_run(1, cut_length=64)}, 50.0)
    assert path.stat().st_size > 1000
    path.unlink()
    plot_search(path, {"A": [SearchStep(20, (figures(5),), True)]}, 50.0, "requests per second")
    assert path.stat().st_size > 1000


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="end its name in"):
        check_plot(tmp_path / "a.txt")
