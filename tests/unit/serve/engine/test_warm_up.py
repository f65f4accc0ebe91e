"""Before requests come a GPU model computes with every kernel; a CPU model has none to compile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import torch

from nestpipe.models import HstuConfig
from nestpipe.serve.engine.calibration import FEW, LONG, MANY, warm_up
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import KV, PrefixItem, RankItem, Scores

SMALL = HstuConfig(blocks=1, heads=1, dim=4, attention_dim=4, value_dim=4, max_len=16)


class Recorded(HstuRankModel):
    """Computes nothing, and keeps what it was asked for: the kind, the past, the new events."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.called: list[tuple[str, int | None, int]] = []

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        return [self._note("prefix", item) for item in items]

    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        for item in items:
            self._note("rank", item)
        return [np.zeros(len(item.candidates_C), np.float32) for item in items]

    def _note(self, kind: str, item: PrefixItem | RankItem) -> KV:
        past = None if item.past is None else len(item.past)
        self.called.append((kind, past, len(item.history)))
        length = (past or 0) + len(item.history)
        return KV(torch.zeros(1, length, 1, 0), torch.zeros(1, length, 1, 0))


def test_every_kernel_is_called():
    model = Recorded("cuda")
    warm_up(model)
    assert FEW < MANY < LONG
    assert set(product(("prefix", "rank"), (None, FEW, LONG), (FEW, MANY))) <= set(model.called)


def test_the_sizes_lie_on_either_side_of_where_kernels_change():
    found = find_spec("nestpipe.kernels.attention.triton_forward")  # not imported: it needs triton
    assert found is not None
    assert found.origin is not None
    sizes = {
        str(name): int(value)
        for name, value in re.findall(r"^(\w+) = (\d+)$", Path(found.origin).read_text(), re.M)
    }
    assert FEW < sizes["_MANY_QUERIES"] <= MANY
    assert FEW <= sizes["SPLIT_KEYS"] < LONG


def test_a_model_on_the_cpu_is_not_touched():
    model = Recorded("cpu")
    warm_up(model)
    assert model.called == []


def test_a_real_model_takes_these_items():
    """The same calls, on the CPU: they are well formed, and long enough for the small model."""
    model = HstuRankModel.random(SMALL, 8, device="cpu")

    class OnGpu(Recorded):
        def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
            super().prefix(items)
            return model.prefix(items)

        def rank(self, items: Sequence[RankItem]) -> list[Scores]:
            super().rank(items)
            return model.rank(items)

    warm_up(OnGpu("cuda"))
