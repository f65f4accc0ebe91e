"""HSTU: a sequence encoder of pointwise attention, which both of its models use.

Five rules make it exact to encode the older part of a history early, keep its keys and values,
and go on from there. They hold by construction:

1. Sums are divided by `max_len`, a constant of the config, never by a length of the batch.
2. No row looks right: `Mask` shows a row only earlier positions and itself. Candidates see no other
   candidate, and `prefix` refuses them, so their keys and values never get into a cache.
3. Positions count from the oldest row; appending to a history moves none.
4. No row's input depends on when it is asked for: the only use of time is the difference between
   two rows' own times. A candidate's own time may be that of the request; no cached row sees it.
5. A history grows at its newer end only: nothing here drops old rows. Whoever cuts histories to a
   window must keep where the window starts in the key of a prefix: a `Prefix` cannot know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.config import not_negative, positive
from nestpipe.jagged import Join, offsets_of, rows_within
from nestpipe.kernels.attention.inference import attend, attend_with_past, prefix_pointers
from nestpipe.kernels.attention.reference import (
    Mask,
    RelativeBias,
    hstu_attention,
    norm_gate,
    pick_columns,
)

# Shapes: B samples, T rows of all samples together, D model width, H heads, A width of queries and
# keys, V width of values, P and Q buckets of the biases, N positions


@dataclass(frozen=True, kw_only=True, slots=True)
class HstuConfig:
    """The shape of an HSTU encoder. There is no dropout: a result depends on the sample alone."""

    blocks: int = 2
    """Blocks, one after the other."""
    heads: int = 2
    """Attention heads of a block."""
    dim: int = 32
    """Width of a row, and between blocks."""
    attention_dim: int = 16
    """Width of a head's queries and keys."""
    value_dim: int = 16
    """Width of a head's values and gate."""
    max_len: int = 200
    """Longest history that is expected: positions learnt, and what attention is divided by.

    A longer history works; its positions from here on share one embedding.
    """
    position_buckets: int = 64
    """Distances that the position bias tells apart; all longer ones share the last bucket."""
    time_buckets: int = 0
    """Powers of two of time that the time bias tells apart; 0: times are not read."""

    def __post_init__(self) -> None:
        for name in ("blocks", "heads", "dim", "attention_dim", "value_dim", "max_len"):
            positive(name, getattr(self, name))
        positive("position_buckets", self.position_buckets)
        not_negative("time_buckets", self.time_buckets)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the rows to encode, apart from the rows."""

    lengths_B: Tensor
    """Rows of each sample, its candidates included; those in a prefix are not counted."""
    num_targets_B: Tensor | None = None
    """Candidates, the last rows of each sample."""
    times_T: Tensor | None = None
    """Own time of each row, whole numbers; read where the config has time buckets."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was computed for the older part of each history: enough to go on after it."""

    lengths_B: Tensor
    keys: tuple[Tensor, ...]
    """(T, H, A) for each block."""
    values: tuple[Tensor, ...]
    """(T, H, V) for each block."""
    times_T: Tensor | None = None


def all_there(block: int) -> None:
    """Nothing is on its way."""


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """A prefix in parts, one for each sample, which are read where they lie; without gradients."""

    keys: Sequence[Tensor]
    """(blocks, N, H, A) of each sample's N rows; those of a block lie side by side."""
    values: Sequence[Tensor]
    """(blocks, N, H, V)"""
    times: Sequence[Tensor] | None = None
    """(N,)"""
    wait_for: Callable[[int], None] = all_there
    """Called before keys and values of a block are read, with its number: they may be on their way.

    Times are there from the start.
    """


class Hstu(nn.Module):
    """Rows of jagged sequences, each with what it saw before it."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.config = config
        self.position_DN = nn.Parameter(torch.randn(config.dim, config.max_len + 1) * 0.02)
        self.blocks = nn.ModuleList(HstuBlock(config) for _ in range(config.blocks))

    def forward(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | PrefixParts | None = None
    ) -> Tensor:
        """(T, D) the encoded rows; with a prefix, `rows_TD` are those that come after it."""
        view, x_TD = self._begin(rows_TD, tokens, prefix)
        for block, past in zip(self.blocks, _pasts(prefix, len(self.blocks)), strict=True):
            x_TD, _, _ = block(x_TD, view, past)
        return x_TD

    def prefix(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | PrefixParts | None = None
    ) -> Prefix:
        """Keys and values of these rows, and of the prefix they follow, for later calls.

        After `PrefixParts`, of these rows alone: whoever has the parts knows where to add to them.
        What the last block makes of the rows is not computed: only its keys and values are kept.
        """
        assert tokens.num_targets_B is None, "a candidate's keys and values must not be kept"
        view, x_TD = self._begin(rows_TD, tokens, prefix)
        kept: list[tuple[Tensor, Tensor]] = []
        pasts = list(_pasts(prefix, len(self.blocks)))
        for block, past in zip(self.blocks[:-1], pasts[:-1], strict=True):
            x_TD, k_THA, v_THV = block(x_TD, view, past)
            kept.append((k_THA, v_THV))
        last = self.blocks[-1]
        assert isinstance(last, HstuBlock)
        kept.append(last.keys_and_values(x_TD, view, pasts[-1]))
        keys, values = zip(*kept, strict=True)
        if isinstance(prefix, PrefixParts):
            return Prefix(tokens.lengths_B, keys, values, tokens.times_T)
        return Prefix(view.lengths_B, keys, values, view.times_T)

    def _begin(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | PrefixParts | None
    ) -> tuple[_View, Tensor]:
        """What the first block gets."""
        view = _View.of(tokens, rows_TD.shape[0], prefix)
        positions_T = view.positions_T.clamp(max=self.config.max_len)
        x_TD = rows_TD * math.sqrt(self.config.dim) + pick_columns(self.position_DN, positions_T).T
        return view, x_TD


class HstuBlock(nn.Module):
    """Attention, gate, and the sum with what came in; there is no feed-forward part."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.heads
        self.norm = nn.LayerNorm(config.dim)
        self.uvqk = nn.Linear(config.dim, 2 * heads * (config.value_dim + config.attention_dim))
        self.out = nn.Linear(heads * config.value_dim, config.dim)
        self.position_HP = nn.Parameter(torch.randn(heads, config.position_buckets) * 0.02)
        self.time_HQ = None
        if config.time_buckets:
            self.time_HQ = nn.Parameter(torch.randn(heads, config.time_buckets) * 0.02)

    def forward(
        self, x_TD: Tensor, view: _View, past: tuple[Tensor, Tensor] | _PastParts | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's output, and the keys and values of all rows; parts of a past stay apart."""
        u_THV, v_THV, q_THA, k_THA = self._project(x_TD)
        k_THA, v_THV = _joined(k_THA, v_THV, view, past)
        attended_THV = self._attend(q_THA, k_THA, v_THV, view, past)
        gated_TD = self.out(norm_gate(attended_THV, u_THV).flatten(1))
        return x_TD + gated_TD, k_THA, v_THV

    def keys_and_values(
        self, x_TD: Tensor, view: _View, past: tuple[Tensor, Tensor] | _PastParts | None
    ) -> tuple[Tensor, Tensor]:
        """What `forward` gives of them, bit for bit, without its output.

        All four projections are computed, as there: products of another shape round otherwise.
        """
        _, v_THV, _, k_THA = self._project(x_TD)
        return _joined(k_THA, v_THV, view, past)

    def _attend(
        self,
        q_THA: Tensor,
        k_THA: Tensor,
        v_THV: Tensor,
        view: _View,
        past: tuple[Tensor, Tensor] | _PastParts | None,
    ) -> Tensor:
        rule: dict[str, Any] = {
            "norm": self.config.max_len,
            "scale": self.config.attention_dim**-0.5,
            "mask": view.mask,
            "bias": RelativeBias(self.position_HP, self.time_HQ, view.times_T),
            "longest": view.longest,
        }
        if isinstance(past, _PastParts):
            assert view.query_offsets_B is not None
            rows = q_THA, k_THA, v_THV, past.keys, past.values
            return attend_with_past(
                *rows, view.query_offsets_B, pointers_3B=past.pointers_3B, **rule
            )
        attention = hstu_attention if torch.is_grad_enabled() else attend
        offsets_B = offsets_of(view.lengths_B)
        return attention(
            q_THA, k_THA, v_THV, offsets_B, query_offsets_B=view.query_offsets_B, **rule
        )

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Gate, values, queries and keys of every row."""
        config = self.config
        mixed = functional.silu(self.uvqk(self.norm(x_TD)))
        widths = [config.value_dim, config.value_dim, config.attention_dim, config.attention_dim]
        parts = mixed.split([config.heads * width for width in widths], dim=1)
        return tuple(part.unflatten(1, (config.heads, -1)) for part in parts)


@dataclass(frozen=True, slots=True)
class _PastParts:
    """Of one block: the past of each sample, where it lies."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    pointers_3B: Tensor | None


def _joined(
    k_THA: Tensor, v_THV: Tensor, view: _View, past: tuple[Tensor, Tensor] | _PastParts | None
) -> tuple[Tensor, Tensor]:
    """Keys and values after those of a past; parts of a past stay apart."""
    if not isinstance(past, tuple):
        return k_THA, v_THV
    assert view.join is not None
    return view.join.rows(past[0], k_THA), view.join.rows(past[1], v_THV)


def _pasts(
    prefix: Prefix | PrefixParts | None, blocks: int
) -> Iterator[tuple[Tensor, Tensor] | _PastParts | None]:
    """What each block goes on from; parts of a past are given out once they are there."""
    if prefix is None:
        yield from [None] * blocks
    elif isinstance(prefix, Prefix):
        yield from zip(prefix.keys, prefix.values, strict=True)
    else:
        yield from _parts_of_blocks(prefix, blocks)


def _parts_of_blocks(prefix: PrefixParts, blocks: int) -> Iterator[_PastParts]:
    assert not torch.is_grad_enabled(), "parts of a prefix are for inference, without gradients"
    pointers = prefix_pointers(prefix.keys, prefix.values)
    for number in range(blocks):
        prefix.wait_for(number)
        yield _PastParts(
            [part[number] for part in prefix.keys],
            [part[number] for part in prefix.values],
            None if pointers is None else pointers[number],
        )


@dataclass(frozen=True, slots=True)
class _View:
    """What attention needs to know of the rows, the same for every block."""

    positions_T: Tensor
    """Of the new rows."""
    lengths_B: Tensor
    """Keys and values of each sample, a prefix's included."""
    longest: int
    """The largest of them (after parts of a prefix, of the new rows), asked of the device once."""
    query_offsets_B: Tensor | None
    """(B + 1,) of the new rows, where they follow a prefix."""
    mask: Mask
    times_T: Tensor | None
    """Of keys and values, a prefix's included."""
    join: Join | None
    """Puts the new rows after those of the prefix."""

    @classmethod
    def of(cls, tokens: Tokens, total: int, prefix: Prefix | PrefixParts | None) -> _View:
        new_B, times_T = tokens.lengths_B, tokens.times_T
        positions_T = rows_within(new_B, total)
        history_B, mask = new_B, Mask(tokens.num_targets_B)
        if tokens.num_targets_B is not None:
            history_B = new_B - tokens.num_targets_B
        sample_T = torch.repeat_interleave(new_B, output_size=total)
        positions_T = torch.minimum(positions_T, history_B[sample_T])
        if prefix is None:
            longest = _largest(new_B)
            return cls(positions_T, new_B, longest, None, mask, times_T, None)
        past_B, num_past, past_times_T = _rows_of(prefix)
        join = Join.of(past_B, num_past, new_B, total)
        if times_T is not None:
            assert past_times_T is not None, "the prefix was made without times"
            times_T = join.rows(past_times_T, times_T)
        positions_T = positions_T + past_B[sample_T]
        longest = _largest(new_B if isinstance(prefix, PrefixParts) else join.lengths_B)
        return cls(positions_T, join.lengths_B, longest, offsets_of(new_B), mask, times_T, join)


def _rows_of(prefix: Prefix | PrefixParts) -> tuple[Tensor, int, Tensor | None]:
    """How many rows of each sample it has, how many in all, and their times."""
    if isinstance(prefix, Prefix):
        return prefix.lengths_B, prefix.keys[0].shape[0], prefix.times_T
    lengths = [part.shape[1] for part in prefix.keys]
    times_T = None if prefix.times is None else torch.cat(list(prefix.times))
    return torch.tensor(lengths, device=prefix.keys[0].device), sum(lengths), times_T


def _largest(lengths_B: Tensor) -> int:
    return int(lengths_B.max()) if len(lengths_B) else 0
