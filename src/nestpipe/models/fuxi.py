"""FuXi-alpha's block: products, positions and times mix rows in channels of their own.

    u, v, q, k = split(SiLU(W x_hat)),  x_hat = RMSNorm(x)
    channels   = [A_position v | A_time v | SiLU(scale q k) / max_len v], side by side in each head
    y          = W0 (RMSNorm(channels) * u) + x
    out        = W2 (SiLU(W1 y_hat) * W3 y_hat) + y,  y_hat = RMSNorm(y)

Weights by position and by time are entries of a table, shared by all heads, without activation. The
five rules of `models/hstu.py` hold here too: the mask, the divisor and the times are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.kernels.attention.reference import NO_BIAS, bias_mixing
from nestpipe.kernels.block import fused
from nestpipe.kernels.block.fused import Norm
from nestpipe.models.sequence import (
    HstuConfig,
    Past,
    PastParts,
    Pending,
    View,
    attend_rows,
    join_past,
    pointwise_by_kernels,
)

# Shapes: B samples, T rows of all samples together, D model width, H heads, A width of queries and
# keys, V width of values, C channels, P and Q buckets of the tables

EPS = 1e-6
RMS = Norm(EPS, centred=False)


class FuxiBlock(nn.Module):
    """Three channels of attention, a gate, and a feed-forward part; norms learn nothing."""

    def __init__(self, config: HstuConfig, number: int = 0) -> None:
        super().__init__()
        self.config = config
        self.site = 1 + 2 * number
        self.channels = 3 if config.time_buckets else 2
        values, products = config.heads * config.value_dim, config.heads * config.attention_dim
        self.widths = [self.channels * values, values, products, products]
        self.uvqk = nn.Linear(config.dim, sum(self.widths), bias=False)
        nn.init.normal_(self.uvqk.weight, std=config.weight_std or 0.02)
        self.out = nn.Linear(self.channels * values, config.dim)
        self.position_1P = nn.Parameter(torch.randn(1, config.position_buckets) * 0.02)
        self.time_1Q = None
        if config.time_buckets:
            self.time_1Q = nn.Parameter(torch.randn(1, config.time_buckets) * 0.02)
        self.wide = self.narrow = None
        if config.feed_forward:
            inner = config.feed_forward * config.dim
            self.wide = nn.Linear(config.dim, 2 * inner, bias=False)
            self.narrow = nn.Linear(inner, config.dim, bias=False)
            for half in self.wide.weight.data.chunk(2):
                nn.init.xavier_uniform_(half)
            nn.init.xavier_uniform_(self.narrow.weight)

    def forward(
        self, rows: Tensor | Pending, view: View, past: Past, *, keeps: bool = False
    ) -> tuple[Tensor | Pending, Tensor, Tensor]:
        """The block's output, and the keys and values of all rows, whether or not they are kept."""
        assert not isinstance(past, PastParts), "FuXi is refused where a model is served"
        given = rows if isinstance(rows, Pending) else Pending(rows)
        if pointwise_by_kernels(self.config, given.x_TD, past):
            return self._by_kernels(given, view)
        x_TD = given.total()
        u_TX, v_THV, q_THA, k_THA = self._project(x_TD)
        k_THA, v_THV = join_past(k_THA, v_THV, view, past)
        channels_TX = self._channels(q_THA, k_THA, v_THV, view, past)
        gated_TX = _rms_norm(channels_TX) * u_TX
        y_TD = self.out(view.dropped(gated_TX, self.config.dropout, self.site)) + x_TD
        return self._feed_forward(y_TD, view), k_THA, v_THV

    def _by_kernels(self, rows: Pending, view: View) -> tuple[Pending, Tensor, Tensor]:
        """The same with a kernel for each step between products; the sum is left to the next."""
        config = self.config
        x_TD, x_hat_TD = fused.add_norm(*rows, None, None, RMS)
        u_TX, *parts = fused.silu_parts(self.uvqk(x_hat_TD), None, *self.widths[:2])
        v_THV, q_THA, k_THA = (part.unflatten(1, (config.heads, -1)) for part in parts)
        channels_TX = self._channels(q_THA, k_THA, v_THV, view, None)
        dropout = view.dropout(config.dropout, self.site)
        gated_TX = fused.norm_gate(channels_TX, u_TX, None, RMS, dropout)
        made = Pending(x_TD, self.out(gated_TX))
        if self.wide is not None and self.narrow is not None:
            dropout = view.dropout(config.dropout, self.site + 1)
            y_TD, z_TD = fused.add_norm(*made, None, None, RMS, dropout)
            made = Pending(y_TD, self.narrow(fused.gated_silu(self.wide(z_TD))))
        return made, k_THA, v_THV

    def _channels(
        self, q_THA: Tensor, k_THA: Tensor, v_THV: Tensor, view: View, past: Past
    ) -> Tensor:
        """(T, C * H * V) what each row gathers by position, by time and by products."""
        assert view.offsets_B is not None
        mixed = bias_mixing(
            len(q_THA),
            v_THV,
            view.offsets_B,
            mask=view.mask,
            bias=view.bias(self.position_1P, self.time_1Q),
            query_offsets_B=view.query_offsets_B,
            max_attention=self.config.max_attention or None,
            longest=view.longest,
        )
        products_THV = attend_rows(self.config, q_THA, k_THA, v_THV, view, past, NO_BIAS)
        return torch.cat([*mixed, products_THV], dim=2).flatten(1)

    def keys_and_values(self, x_TD: Tensor, view: View, past: Past) -> tuple[Tensor, Tensor]:
        """What `forward` gives of them, bit for bit, without its output."""
        _, v_THV, _, k_THA = self._project(x_TD)
        return join_past(k_THA, v_THV, view, past)

    def flops(self, rows_B: Tensor, pairs_B: Tensor) -> Tensor:
        """(B,) of the products of a forward pass, from the rows and the visible pairs."""
        weights = self.uvqk.weight.numel() + self.out.weight.numel()
        for linear in (self.wide, self.narrow):
            weights += 0 if linear is None else linear.weight.numel()
        config = self.config
        widths = config.heads * (config.attention_dim + self.channels * config.value_dim)
        return 2.0 * (weights * rows_B + widths * pairs_B)

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gate of all channels, values, queries and keys of every row."""
        mixed = functional.silu(self.uvqk(_rms_norm(x_TD)))
        u_TX, *parts = mixed.split(self.widths, dim=1)
        v_THV, q_THA, k_THA = (part.unflatten(1, (self.config.heads, -1)) for part in parts)
        return u_TX, v_THV, q_THA, k_THA

    def _feed_forward(self, y_TD: Tensor, view: View) -> Tensor:
        if self.wide is None or self.narrow is None:
            return y_TD
        z_TD = view.dropped(_rms_norm(y_TD), self.config.dropout, self.site + 1)
        gate_TX, straight_TX = self.wide(z_TD).chunk(2, dim=1)
        return self.narrow(functional.silu(gate_TX) * straight_TX) + y_TD


def _rms_norm(x_TD: Tensor) -> Tensor:
    """Each row divided by the root of its mean square."""
    return functional.rms_norm(x_TD, x_TD.shape[1:], eps=EPS)
