"""A trainer whose settings change between batches ends where serial with those settings does."""

from dataclasses import replace

import pytest
import torch

from nestpipe import DataConfig, SyntheticConfig, open_source
from nestpipe.errors import ConfigError
from nestpipe.models import LogisticRegression
from nestpipe.schedule import Retrieval
from nestpipe.train import PipelineSettings, Trainer, TrainSettings
from nestpipe.train.verify import Trained, compare, serial_twin

WORLD = DataConfig(synthetic=SyntheticConfig(samples=1_000, num_tables=2, num_keys=300))
SEQUENCE = ((3, 1, 1.0), (3, 4, 0.5), (2, 2, 1.0), (4, 3, 0.3))
"""Batches, micro-batches, and the size of the first one."""


def trained(pipeline: PipelineSettings, name: str, *, memory: bool = False) -> Trained:
    torch.manual_seed(0)
    model = LogisticRegression(("c0", "c1"), 13)
    trainer = Trainer(model, model.tables(), TrainSettings(batch=64, pipeline=pipeline))
    losses: list[float] = []
    for number, (steps, count, first) in enumerate(SEQUENCE):
        size = f"{200 + 50 * number}KB" if memory else None
        changed = replace(trainer.settings.pipeline, micro_batches=count, first=first)
        trainer.change_pipeline(changed, device_memory=size)
        trainer.fit(
            open_source(WORLD), steps=steps, epochs=2, on_step=lambda r: losses.append(r.loss)
        )
    return Trained(name, trainer, losses, [])


@pytest.mark.parametrize("retrieval", ["new", "pooled"])
def test_changes_between_batches_are_exact(retrieval: str):
    asked = PipelineSettings(plan="nested", retrieval=Retrieval(retrieval), owner_sums="off")
    other = trained(asked, "nested", memory=retrieval == "pooled")
    serial = trained(serial_twin(asked), "serial")
    found = compare(serial, other)
    assert (found.rows_different, found.tensors_different) == (0, 0), found
    assert found.rows_compared > 100
    assert len(serial.losses) == sum(steps for steps, _, _ in SEQUENCE)


def test_the_number_of_micro_batches_does_change_the_order_of_sums():
    """Else the test above could not fail."""
    asked = PipelineSettings(plan="serial")
    one = trained(asked, "serial")
    torch.manual_seed(0)
    model = LogisticRegression(("c0", "c1"), 13)
    trainer = Trainer(model, model.tables(), TrainSettings(batch=64, pipeline=asked))
    losses: list[float] = []
    trainer.fit(open_source(WORLD), steps=12, epochs=2, on_step=lambda r: losses.append(r.loss))
    assert compare(one, Trained("plain", trainer, losses, [])).tensors_different > 0


def test_what_is_settled_when_a_trainer_is_made_cannot_change():
    model = LogisticRegression(("c0", "c1"), 13)
    trainer = Trainer(model, model.tables(), TrainSettings(batch=64))
    with pytest.raises(ConfigError, match="retrieval cannot change to 'pooled' during a run"):
        trainer.change_pipeline(PipelineSettings(plan="nested", retrieval=Retrieval.POOLED))
