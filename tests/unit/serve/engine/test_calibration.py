"""What an instance of the service finds out before it is ready, and again after a reload."""

from __future__ import annotations

import threading

import numpy as np

from nestpipe.models import HstuConfig
from nestpipe.serve.engine.admission import Costs
from nestpipe.serve.engine.calibration import Calibration, Run
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import History, RankModel, RankRequest, ServeSettings

PATIENCE_S = 60.0
SETTINGS = ServeSettings(target_ms=0.2, chunk=32, max_events=256, max_candidates=8)


def make_model(blocks: int) -> HstuRankModel:
    config = HstuConfig(blocks=blocks, dim=16, attention_dim=8, value_dim=8)
    return HstuRankModel.random(config, num_items=300, device="cpu")


def test_a_checkpoint_that_takes_over_brings_its_own_costs():
    model, ended = make_model(1), threading.Event()
    measured = Calibration(model, SETTINGS, model.kv_bytes)
    before = measured.admission.costs
    assert before.inline_ms(256, 8) > 0

    def again(model: RankModel, run: Run) -> None:
        measured.again(model, run)
        ended.set()

    events = np.arange(100)
    request = RankRequest("ann", History(events), History(events[:3]), np.arange(8))
    with Instance(model, SETTINGS, measured.admission, recalibrate=again) as instance:
        instance.swap_model(make_model(2))
        futures = [instance.rank(request) for _ in range(5)]
        assert {future.result(PATIENCE_S).version for future in futures} == {instance.version}
        assert ended.wait(PATIENCE_S)
    after = measured.admission.costs
    assert isinstance(after, Costs)
    assert after is not before
    assert after.fits != before.fits
    assert min(after.inline_ms(256, 8), after.cached_ms(256, 8), after.prefix_ms(256)) > 0
