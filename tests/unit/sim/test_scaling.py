"""Scaling curves, their chart, and hardware files."""

import xml.etree.ElementTree as ET

import pytest

from nestpipe.config import build, load
from nestpipe.errors import ConfigError
from nestpipe.schedule import PlanOptions, plan
from nestpipe.sim import Cluster, Scale, chart, curve_as_json, paper_cluster, scaling_curve, to_toml
from nestpipe.sim.costs import shards_of

NESTED = plan("nested", PlanOptions(micro_batches=8))


def curve(*workers: int, groups: int = 1):
    return scaling_curve(NESTED, paper_cluster(), [Scale(w, groups) for w in workers])


def test_efficiency_is_relative_to_the_first_point():
    points = curve(128, 1536)
    assert points[0].scaling_efficiency == 100
    steps = [point.figures.step_ms for point in points]
    assert points[1].scaling_efficiency == pytest.approx(100 * steps[0] / steps[1])


def test_parts_of_every_step_add_up():
    for point in curve(1, 8, 64, 4096):
        run = point.figures
        parts = run.compute_ms + run.lookup_ms + run.exposed_comm_ms + run.idle_ms
        assert run.step_ms == pytest.approx(parts)
        assert run.samples_per_s == pytest.approx(512e3 * run.workers / run.step_ms)


def test_groups_move_the_limit_from_the_network_to_the_host():
    alone, grouped = (curve(4096, groups=groups)[0].figures for groups in (1, 8))
    assert alone.busiest_lane == "net"
    assert grouped.busiest_lane == "host"
    assert grouped.exposed_comm_ms < 0.1 * alone.exposed_comm_ms


def test_the_chart_is_a_picture_with_a_bar_per_scale():
    points = curve(1, 64, 1536)
    root = ET.fromstring(chart(points, "a <title> & more"))
    text = "".join(root.itertext())
    assert "a <title> & more" in text
    for label in ("1", "64", "1,536", "workers", "scaling efficiency"):
        assert label in text


def test_the_curve_is_plain_values():
    (value,) = curve_as_json(curve(64))
    for name in ("step_ms", "samples_per_s", "scaling_efficiency", "utilisation", "exposed_ms"):
        assert name in value


def test_a_hardware_file_reads_back(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(paper_cluster()))
    assert load(Cluster, file) == paper_cluster()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("network", "gb_per_s", 0.0),
        ("network", "workers_per_node", 0),
        ("network", "group_relief", 1.5),
        ("compute", "tflops", -1.0),
        ("host", "gather_gb_per_s", 0.0),
        ("stragglers", "jitter", -0.1),
        ("stragglers", "slow_share", 2.0),
        ("workload", "samples", 0),
        ("workload", "unique_share", 7.0),
    ],
)
def test_a_broken_hardware_file_is_one_sentence(section, key, value):
    with pytest.raises(ConfigError, match=key) as error:
        build(Cluster, {section: {key: value}})
    assert "\n" not in str(error.value)
    assert str(value) in str(error.value)


def test_groups_must_divide_the_workers():
    assert shards_of(12, 3) == 4
    with pytest.raises(ConfigError, match="10 workers cannot form 3 equal groups"):
        shards_of(10, 3)
