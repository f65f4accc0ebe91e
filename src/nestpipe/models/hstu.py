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
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.config import not_negative, positive
from nestpipe.kernels.attention import (
    Mask,
    RelativeBias,
    hstu_attention,
    norm_gate,
    pick_columns,
)
from nestpipe.models.join import Join, offsets_of, rows_within

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


class Hstu(nn.Module):
    """Rows of jagged sequences, each with what it saw before it."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.config = config
        self.position_DN = nn.Parameter(torch.randn(config.dim, config.max_len + 1) * 0.02)
        self.blocks = nn.ModuleList(HstuBlock(config) for _ in range(config.blocks))

    def forward(self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | None = None) -> Tensor:
        """(T, D) the encoded rows; with a prefix, `rows_TD` are those that come after it."""
        return self._encode(rows_TD, tokens, prefix)[0]

    def prefix(self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | None = None) -> Prefix:
        """Keys and values of these rows, and of the prefix they follow, for later calls."""
        assert tokens.num_targets_B is None, "a candidate's keys and values must not be kept"
        return self._encode(rows_TD, tokens, prefix)[1]

    def _encode(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | None
    ) -> tuple[Tensor, Prefix]:
        view = _View.of(tokens, rows_TD.shape[0], prefix)
        positions_T = view.positions_T.clamp(max=self.config.max_len)
        x_TD = rows_TD * math.sqrt(self.config.dim) + pick_columns(self.position_DN, positions_T).T
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            past = (prefix.keys[number], prefix.values[number]) if prefix else None
            x_TD, k_THA, v_THV = block(x_TD, view, past)
            keys.append(k_THA)
            values.append(v_THV)
        return x_TD, Prefix(view.lengths_B, tuple(keys), tuple(values), view.times_T)


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
        self, x_TD: Tensor, view: _View, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's output, and the keys and values of all rows, those of the past included."""
        u_THV, v_THV, q_THA, k_THA = self._project(x_TD)
        if past is not None:
            assert view.join is not None
            k_THA, v_THV = view.join.rows(past[0], k_THA), view.join.rows(past[1], v_THV)
        attended_THV = hstu_attention(
            q_THA,
            k_THA,
            v_THV,
            offsets_of(view.lengths_B),
            norm=self.config.max_len,
            scale=self.config.attention_dim**-0.5,
            mask=view.mask,
            bias=RelativeBias(self.position_HP, self.time_HQ, view.times_T),
            query_offsets_B=view.query_offsets_B,
            longest=view.longest,
        )
        gated_TD = self.out(norm_gate(attended_THV, u_THV).flatten(1))
        return x_TD + gated_TD, k_THA, v_THV

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Gate, values, queries and keys of every row."""
        config = self.config
        mixed = functional.silu(self.uvqk(self.norm(x_TD)))
        widths = [config.value_dim, config.value_dim, config.attention_dim, config.attention_dim]
        parts = mixed.split([config.heads * width for width in widths], dim=1)
        return tuple(part.unflatten(1, (config.heads, -1)) for part in parts)


@dataclass(frozen=True, slots=True)
class _View:
    """What attention needs to know of the rows, the same for every block."""

    positions_T: Tensor
    """Of the new rows."""
    lengths_B: Tensor
    """Keys and values of each sample, a prefix's included."""
    longest: int
    """The largest of them, asked of the device once for all blocks."""
    query_offsets_B: Tensor | None
    """(B + 1,) of the new rows, where they follow a prefix."""
    mask: Mask
    times_T: Tensor | None
    """Of keys and values, a prefix's included."""
    join: Join | None
    """Puts the new rows after those of the prefix."""

    @classmethod
    def of(cls, tokens: Tokens, total: int, prefix: Prefix | None) -> _View:
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
        join = Join.of(prefix.lengths_B, prefix.keys[0].shape[0], new_B, total)
        if times_T is not None:
            assert prefix.times_T is not None, "the prefix was made without times"
            times_T = join.rows(prefix.times_T, times_T)
        positions_T = positions_T + prefix.lengths_B[sample_T]
        longest, query_offsets_B = _largest(join.lengths_B), offsets_of(new_B)
        return cls(positions_T, join.lengths_B, longest, query_offsets_B, mask, times_T, join)


def _largest(lengths_B: Tensor) -> int:
    return int(lengths_B.max()) if len(lengths_B) else 0
