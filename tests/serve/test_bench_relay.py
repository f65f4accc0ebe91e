"""The comparison of `nestpipe bench relay` on real services of a tiny model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.bench import relay_run as relay
from nestpipe.bench import relay_service as relay_kill
from nestpipe.bench.relay_service import Reference, write_random
from nestpipe.loadtest.run import RandomModel
from nestpipe.loadtest.settings import LoadSettings, WorkloadSettings
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import RealClock, ServeSettings

SERVE = ServeSettings(target_ms=500.0, admission=False, max_events=256, device_mb=16, host_mb=16)
WORKLOAD = WorkloadSettings(
    rate=30, seconds=0.5, length=128, items=50, candidates=8, retrieval_ms=40, preprocess_ms=20
)


@pytest.fixture
def few_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """One start instead of three: arms differ in what they send. Nobody waits for a restart."""
    name = "relay + host"
    arms = [replace(arm, service=name) for arm in relay.ARMS if arm.name != "relay"]
    monkeypatch.setattr(relay, "SERVICES", {name: {}})
    monkeypatch.setattr(relay, "ARMS", tuple(arms))
    monkeypatch.setattr(relay, "WARM", 1)
    monkeypatch.setattr(relay_kill, "BACK_S", 0.0)


@pytest.mark.parametrize(
    "front", ["builtin", pytest.param("nginx", marks=pytest.mark.needs("nginx"))]
)
@pytest.mark.usefixtures("few_services")
def test_every_arm_is_measured_an_instance_is_killed_and_all_scores_are_right(
    tmp_path: Path, front: relay.Front
):
    sizes = RandomModel(layers=2, dim=8, heads=2, items=50, max_len=256)
    checkpoint = write_random(tmp_path, sizes)
    case = relay.RelayCase(
        checkpoint=checkpoint,
        settings=LoadSettings(serve=SERVE, workload=WORKLOAD),
        cap=64,
        rounds=1,
        fronts=(front,),
    )
    reference = Reference(HstuRankModel.from_checkpoint(checkpoint, "cpu"))
    readings = relay.compare(case, reference, RealClock(), lambda *_: nullcontext(lambda: None))
    names = [arm.name for arm in (*relay.ARMS, relay.KILLED)]
    results = {(one["front"], one["arm"]): one for one in (it.as_json() for it in readings)}
    assert list(results) == [(front, name) for name in names]
    for one in results.values():
        assert (one["lost"], one["faults"], one["wrong"]) == (0, [], 0), one
        assert one["compared"] == one["requests"] == sum(one["hits"].values()) > 5
        assert one["worst_deviation"] <= 1e-5
        assert one["p99_ms"] >= one["p50_ms"] > 0
    inline, capped, relayed, killed = (results[front, name] for name in names)
    assert inline["hits"]["miss_full"] == inline["requests"]
    assert inline["signals"] == capped["signals"] == {}
    assert (inline["cuts"], inline["length_used"]) == (0, inline["length_asked"])
    assert (capped["cuts"], capped["length_used"]) == (capped["requests"], 64)
    assert capped["within_target"] == 0
    assert relayed["signals"]["admitted"] > 0
    assert relayed["hits"]["hbm_hit"] + relayed["hits"]["late_hit"] > 0
    assert killed["killed"]["instance"] == "instance-0"
    assert (killed["killed"]["retries"] is None) == (front == "nginx")
