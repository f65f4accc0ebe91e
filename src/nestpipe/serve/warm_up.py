"""Every kernel of a GPU model once, before requests come: each is compiled at its first use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nestpipe.serve.model import HstuRankModel
from nestpipe.serve.types import KV, History, PrefixItem, RankItem

FEW, MANY, LONG = 1, 1100, 2200
"""Events on either side of the sizes at which the attention changes its kernel: how many are new,
and how many came before them (kernels/hstu_forward.py)."""


def warm_up(model: HstuRankModel) -> None:
    """Compute prefixes and rankings of few and many events, without a past, a short and a long one.

    Takes half a minute where nothing has been compiled on this machine before. A CPU needs none.
    """
    if model.device.type != "cuda":
        return
    for past in (None, _prefix(model, FEW), _prefix(model, LONG)):
        for item in _rankings(past):
            model.rank([item])
        for events in (FEW, MANY):
            model.prefix([PrefixItem(_history(events), past)])


def _rankings(past: KV | None) -> Iterator[RankItem]:
    for events in (FEW, MANY):
        yield RankItem(_history(events), np.ones(FEW, np.int64), past, LONG)


def _prefix(model: HstuRankModel, events: int) -> KV:
    return model.prefix([PrefixItem(_history(events))])[0]


def _history(events: int) -> History:
    return History(np.ones(events, np.int64), np.arange(events))
