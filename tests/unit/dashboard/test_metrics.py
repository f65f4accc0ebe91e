"""Metrics of training for Prometheus, and that Grafana's dashboard asks only for those."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nestpipe.dashboard.server import METRICS, exposition
from nestpipe.dashboard.view import RunFolder
from support.recorded_runs import COMPUTE_MS, STEP_MS, written_run

GRAFANA = Path(__file__).resolve().parents[3] / "configs/grafana/nestpipe-training.json"
NAME = re.compile(r"nestpipe_\w+")


def samples(folder: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = exposition(RunFolder(folder).read()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_the_totals_of_every_rank(tmp_path: Path):
    found = samples(written_run(tmp_path, 50, ranks=2))
    for rank in ("0", "1"):
        assert found["nestpipe_train_steps_total", (("rank", rank),)] == 50
        assert found["nestpipe_train_bytes_sent_total", (("rank", rank),)] == 250_000
        seconds = found["nestpipe_train_compute_seconds_total", (("rank", rank),)]
        assert seconds == pytest.approx(50 * COMPUTE_MS / 1e3)
    op = (("op", "rows"), ("rank", "0"))
    assert found["nestpipe_train_exposed_seconds_total", op] == pytest.approx(0.075)
    assert found["nestpipe_train_timed_seconds_total", (("rank", "0"),)] == pytest.approx(
        50 * STEP_MS / 1e3
    )
    assert found["nestpipe_train_table_rows", (("rank", "1"), ("table", "items"))] == 500
    assert found["nestpipe_train_state", (("state", "finished"),)] == 1
    assert found["nestpipe_train_state", (("state", "running"),)] == 0
    evaluated = (("metric", "auc"), ("split", "validation"))
    assert found["nestpipe_train_evaluation", evaluated] == pytest.approx(0.796)


def test_a_run_without_steps_has_a_state_alone(tmp_path: Path):
    names = {name for name, _ in samples(written_run(tmp_path, 0, end=None))}
    assert names == {"nestpipe_train_state", "nestpipe_train_last_sign_seconds"}


def test_every_metric_that_grafana_asks_for_exists():
    board = json.loads(GRAFANA.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in NAME.findall(target["expr"])
    }
    asked |= {name for of in board["templating"]["list"] for name in NAME.findall(of["query"])}
    known = {metric.full_name for metric in METRICS.values()}
    assert asked <= known, f"unknown: {sorted(asked - known)}"
    shown_elsewhere = {"nestpipe_train_steps_total", "nestpipe_train_seconds_total"}
    assert known - asked <= shown_elsewhere, "a metric that no panel shows"


def test_labels_that_grafana_selects_or_groups_by_exist():
    labels = {metric.full_name: metric.labels for metric in METRICS.values()}
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel["targets"]:
            for name, selected in re.findall(r"(nestpipe_\w+)\{([^}]*)\}", target["expr"]):
                for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected):
                    assert label in (*labels[name], "job"), f"{name} has no label {label}"
            grouped = re.findall(r"sum by \((\w+)\) \((?:rate\()?(nestpipe_\w+)", target["expr"])
            for label, name in grouped:
                assert label in labels[name], f"{name} has no label {label}"


def test_panels_do_not_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
