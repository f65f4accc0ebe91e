"""Pictures: what is drawn, and that it can be."""

import pytest

from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import (
    FormulaService,
    VirtualTime,
    check_plot,
    drive,
    full_length_curve,
    p99_curve,
    plot_latencies,
    plot_search,
    report,
)
from nestpipe.loadtest.run import SearchStep
from nestpipe.loadtest.settings import WorkloadSettings
from nestpipe.loadtest.workload import legs, visits

SETTINGS = WorkloadSettings(rate=20, seconds=2, length=128, delay_jitter=0)


def run(ms: float, **more):
    service = FormulaService(time=VirtualTime(), full_ms=lambda length: ms, **more)
    return drive(service, list(legs(SETTINGS, visits(SETTINGS))), service.time)


def told(ms: float):
    return report("", run(ms), target_ms=50, seconds=2, warmup_s=0)


def test_a_curve_ends_at_the_share_of_full_answers():
    times_ms, shares = full_length_curve(run(1))
    assert times_ms == sorted(times_ms)
    assert shares[-1] == 1
    assert full_length_curve(run(1, cut_length=64)) == ([], [])
    shed = full_length_curve(run(200, queue=1))[1]
    assert 0 < shed[-1] < 1


def test_p99_over_what_was_tried_is_in_order():
    steps = [SearchStep(40, (told(10),), True), SearchStep(20, (told(5),), True)]
    values, p99_ms = p99_curve(steps)
    assert values == [20, 40]
    assert p99_ms[0] < p99_ms[1]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures_are_written(tmp_path, kind):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    path = tmp_path / "new" / f"a.{kind}"
    check_plot(path)
    plot_latencies(path, {"A": run(1), "B": run(1, cut_length=64)}, 50.0)
    assert path.stat().st_size > 1000
    path.unlink()
    plot_search(path, {"A": [SearchStep(20, (told(5),), True)]}, 50.0, "requests per second")
    assert path.stat().st_size > 1000


def test_a_picture_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="end its name in"):
        check_plot(tmp_path / "a.txt")
