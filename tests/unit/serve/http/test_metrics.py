"""The page of numbers, read by Prometheus' own parser: every number has a type and a sentence."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from nestpipe.errors import RunError, ShedError
from nestpipe.models import HstuConfig
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.http.bodies import RequestLimits
from nestpipe.serve.http.client import read_stats
from nestpipe.serve.http.metrics import COUNTERS, GAUGES, Metrics, described, totals
from nestpipe.serve.http.router import Router, RouterSettings
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    History,
    HttpSettings,
    RankRequest,
    RealClock,
    ServeSettings,
    Signal,
)

SMALL = HstuConfig(blocks=1, heads=1, dim=4, attention_dim=4, value_dim=4, max_len=16)
IDS = np.arange(1, 4)
SIGNAL = Signal("u", History(IDS))
REQUEST = RankRequest("u", History(IDS), History(IDS), IDS)


class Failing:
    """An instance that only has faults."""

    def __init__(self, fault: Exception) -> None:
        self.fault = fault

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        raise self.fault

    def rank(self, request: RankRequest) -> Future[Answer]:
        raise self.fault

    def stats(self) -> dict[str, float]:
        return {}

    def drain(self, timeout_s: float) -> bool:
        return True


def instance_stats() -> dict[str, float]:
    model = HstuRankModel.random(SMALL, 8, device="cpu")
    with Instance(model, ServeSettings(target_ms=1000.0)) as instance:
        instance.prefetch(SIGNAL)
        instance.rank(REQUEST).result()
        return instance.stats()


def router_stats() -> dict[str, float]:
    """Of routers that met every kind of fault."""
    found: dict[str, float] = {}
    for fault in (RunError("dead"), ShedError("full", 1.0)):
        router = Router({"a": Failing(fault), "b": Failing(fault)}, RouterSettings(), RealClock())
        router.prefetch(SIGNAL)
        assert router.rank(REQUEST).exception() is not None
        found |= router.stats()
    return found


def test_every_number_of_instance_router_and_http_service_has_a_type_and_a_help():
    limits = RequestLimits(HttpSettings())
    stats = {**instance_stats(), **router_stats(), **limits.stats(), **limits.stats("router_")}
    assert [name for name in stats if described(name).kind == "unknown"] == []
    assert not COUNTERS.keys() & GAUGES.keys()
    metrics = Metrics(lambda: stats)
    metrics.observe_http("/v1/rank", 200, 0.1)
    metrics.observe_rank("hbm_hit", 0.1)
    page = metrics.text({}).decode()
    families = {one.name: one for one in text_string_to_metric_families(page)}
    assert {one.type for one in families.values()} == {"counter", "gauge", "histogram"}
    assert all(one.documentation for one in families.values())
    assert families["nestpipe_fills"].type == "counter"
    assert families["nestpipe_router_members_alive"].type == "gauge"
    assert families["nestpipe_rank_seconds"].type == "histogram"
    assert "\n# HELP nestpipe_fills_total Prefixes filled\n" in page


def test_what_a_client_reads_has_the_names_and_values_that_the_service_has():
    stats = instance_stats()
    assert stats["outcome_admitted"] == 1
    assert read_stats(Metrics(lambda: stats).text({}).decode()) == stats


def test_a_number_that_nobody_described_is_shown_without_a_type():
    page = Metrics(lambda: {"made_up_total": 2.0}).text({"queue_rankings": 1.0}).decode()
    assert "# TYPE nestpipe_made_up_total untyped" in page
    assert read_stats(page) == {"made_up_total": 2.0, "queue_rankings": 1.0}


def sample_values(page: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(page.decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_a_renamed_metric_keeps_its_old_name_for_one_release():
    found = sample_values(Metrics(lambda: {"offloads": 3.0, "queue_offloads": 2.0}).text({}))
    assert found["nestpipe_offloads_total"] == found["nestpipe_copies_total"] == 3.0
    assert found["nestpipe_queue_offloads"] == found["nestpipe_queue_copies"] == 2.0


def test_a_router_exports_the_old_name_of_its_instances_metric_once():
    of_an_instance = read_stats(Metrics(lambda: {"offloads": 3.0}).text({}).decode())
    page = Metrics().text(totals([of_an_instance, of_an_instance]))
    assert page.count(b"\nnestpipe_copies_total ") == 1
    assert sample_values(page)["nestpipe_copies_total"] == 6.0
