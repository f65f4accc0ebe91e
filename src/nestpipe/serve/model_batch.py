"""From single users to a batch for the model, and from its prefix back to single users."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from nestpipe.errors import DataError
from nestpipe.jagged import Jagged
from nestpipe.models.hstu import Prefix, PrefixParts
from nestpipe.serve.types import KV, History, Ids

# Shapes: B users, T events of all users together, N events of one, L layers, H heads, A width of
# keys, V width of values


def joined(lists: Sequence[Ids]) -> Ids:
    """The lists, one after the other."""
    return np.concatenate([np.zeros(0, np.int64), *lists]).astype(np.int64, copy=False)


def jagged(lists: Sequence[Ids], device: torch.device) -> Jagged:
    """A list per user."""
    lengths_B = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    return Jagged(torch.from_numpy(joined(lists)), lengths_B).to(device)


def times_of(histories: Sequence[History], device: torch.device) -> Jagged:
    """The events' own times, for a model that reads them."""
    return jagged([_own_times(history) for history in histories], device)


def _own_times(history: History) -> Ids:
    times_N = np.zeros(0, np.int64) if history.times_N is None else history.times_N
    if len(times_N) != len(history):
        raise DataError(
            f"a history of {len(history)} events has {len(times_N)} times, and the model reads "
            "them; give the time of each event"
        )
    return times_N


def past_of(pasts: Sequence[KV | None]) -> PrefixParts | None:
    """What was computed before for each user, read where it lies; None where that is nothing.

    Layers that are still on their way to the device are waited for before they are read.
    """
    kept = [past for past in pasts if past is not None]
    if not kept:
        return None
    nothing = KV(kept[0].keys_LNHA[:, :0], kept[0].values_LNHV[:, :0], _first(kept[0].times_N, 0))
    all_B = [past or nothing for past in pasts]
    times = [past.times_N for past in all_B if past.times_N is not None]
    assert len(times) in (0, len(all_B)), "some prefixes were made without times"
    arrivals = [past.arrival for past in kept if past.arrival is not None]

    def wait_for(layer: int) -> None:
        for arrival in arrivals:
            arrival.wait_for(layer)

    keys, values = [past.keys_LNHA for past in all_B], [past.values_LNHV for past in all_B]
    return PrefixParts(keys, values, times or None, wait_for)


def grown(pasts: Sequence[KV | None], new: Prefix, lengths: Sequence[int]) -> list[KV]:
    """Each user's past and new rows, in memory of its own."""
    bounds = pairwise(accumulate(lengths, initial=0))
    return [
        _grown(past, new, slice(begin, end))
        for past, (begin, end) in zip(pasts, bounds, strict=True)
    ]


def _grown(past: KV | None, new: Prefix, own: slice) -> KV:
    keys_LNHA = torch.stack([keys_THA[own] for keys_THA in new.keys])
    values_LNHV = torch.stack([values_THV[own] for values_THV in new.values])
    times_N = None if new.times_T is None else new.times_T[own].clone()
    if past is None:
        return KV(keys_LNHA, values_LNHV, times_N)
    if times_N is not None and past.times_N is not None:
        times_N = torch.cat([past.times_N, times_N])
    return KV(
        torch.cat([past.keys_LNHA, keys_LNHA], 1),
        torch.cat([past.values_LNHV, values_LNHV], 1),
        times_N,
    )


def _first(times_N: Tensor | None, count: int) -> Tensor | None:
    return None if times_N is None else times_N[:count]
