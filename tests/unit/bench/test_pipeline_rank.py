"""One rank of `nestpipe bench pipeline`: what of a case reaches the trainer."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from nestpipe.batch import Batch
from nestpipe.bench.pipeline_cases import CASES, Variant
from nestpipe.bench.pipeline_rank import Blocks, Rounds, make_model
from nestpipe.comm import LocalCommunicator
from nestpipe.runtime import InlineLanes

TINY = replace(
    CASES["network"], ranks=1, batch=4, keys=3, rows=100, dim=4, width=4, micro_batches=2
)


@pytest.mark.parametrize(
    ("wire", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_rows_travel_as_the_case_says(wire, dtype):
    rounds = Rounds(replace(TINY, comm_dtype=wire), LocalCommunicator())
    with closing(rounds.trainer):
        rounds.run(Variant("nested", "whole", 2))
        assert rounds.trainer.make_tables(rounds.trainer.plan).comm_dtype == dtype


@pytest.mark.parametrize("early", [True, False])
def test_rows_are_sent_early_where_the_variant_says_so(early):
    rounds = Rounds(replace(TINY, speculative_rows=True), LocalCommunicator())
    with closing(rounds.trainer):
        trace = rounds.run(Variant("nested", "whole", 2, speculative_rows=early))
    assert {"stale_mask", "patch"} & {span.kind for span in trace.spans} == (
        {"stale_mask", "patch"} if early else set()
    )


def test_what_is_computed_again_has_the_same_gradients():
    """Bit for bit: the curve's most compute would not fit otherwise."""
    found = []
    for recompute in (False, True):
        model = make_model(replace(TINY, passes=3, recompute=recompute))
        assert isinstance(model, Blocks)
        rows_TD = torch.linspace(-1, 1, 4 * 3 * 4).view(-1, 4).requires_grad_()
        batch = Batch(4, {"label": torch.tensor([0.0, 1.0, 1.0, 0.0])}, {})
        model.dense({"history": rows_TD}, batch).total.backward()
        found.append([rows_TD.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(kept, made) for kept, made in zip(*found, strict=True))


def test_each_baseline_has_lanes_of_its_own(monkeypatch):
    """The async loop must not get lanes that wait for the device."""
    waiting = object()
    monkeypatch.setattr("nestpipe.bench.pipeline_rank.lanes_for", lambda *_: waiting)
    rounds = Rounds(TINY, LocalCommunicator())
    with closing(rounds.trainer):
        found = {
            variant.name: rounds._lanes_of(variant, variant.make_plan().shape)
            for variant in (
                Variant("serial", "whole", 2),
                Variant("serial", "whole", 2, loop="async"),
                Variant("nested", "whole", 2),
            )
        }
    assert found["serial-strict-whole-2"] is found["nested-whole-2"] is waiting
    assert isinstance(found["serial-async-whole-2"], InlineLanes)
