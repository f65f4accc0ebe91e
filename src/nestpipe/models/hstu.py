"""HSTU: a sequence encoder of pointwise attention, which both of its models use.

Five rules make it exact to encode the older part of a history early, keep its keys and values,
and go on from there. They hold by construction:

1. Sums are divided by `max_len`, a constant of the config, never by a length of the batch.
2. No row looks right: `Mask` shows a row only earlier positions and itself. Candidates see no other
   candidate, and `prefix` refuses them, so their keys and values never get into a cache.
3. Positions count from the oldest row; appending to a history moves none.
4. No row's input depends on when it is asked for: the only use of time is the difference between
   two rows' own times. A candidate's own time may be that of the request; no cached row sees it.
5. A history grows at its newer end only: nothing here drops old rows. Callers that cut histories to
a window must keep where the window starts in the key of a prefix: a `Prefix` cannot know it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nestpipe.kernels.attention.fused import kernels_attend
from nestpipe.kernels.attention.reference import norm_gate, pick_columns
from nestpipe.kernels.block import fused
from nestpipe.kernels.block.fused import BlockRule, Norm, product_dtype
from nestpipe.models.fuxi import FuxiBlock
from nestpipe.models.sequence import (
    HstuConfig,
    Past,
    Pending,
    Prefix,
    PrefixParts,
    Tokens,
    View,
    attend_rows,
    join_past,
    pasts_of_blocks,
    pointwise_by_kernels,
)

# Shapes: B samples, T rows of all samples together, D model width, H heads, A width of queries and
# keys, V width of values, P and Q buckets of the biases, N positions

GATE_EPS = 1e-6
"""Of the norm of what attention gathers."""


class Hstu(nn.Module):
    """Rows of jagged sequences, each with what it saw before it; blocks are HSTU's or FuXi's."""

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.config = config
        self.position_DN = nn.Parameter(torch.randn(config.dim, config.max_len + 1) * 0.02)
        block = HstuBlock if config.kind == "hstu" else FuxiBlock
        self.blocks = nn.ModuleList(block(config, number) for number in range(config.blocks))

    def forward(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | PrefixParts | None = None
    ) -> Tensor:
        """(T, D) the encoded rows; with a prefix, `rows_TD` are those that come after it."""
        view, x_TD = self._begin(rows_TD, tokens, prefix)
        again = self.config.checkpoint_activations and torch.is_grad_enabled() and prefix is None
        rows: Tensor | Pending = x_TD
        for block, past in zip(self.blocks, pasts_of_blocks(prefix, len(self.blocks)), strict=True):
            if again:
                rows = _computed_again(block, _total(rows), view)
            else:
                rows, _, _ = block(rows, view, past)
        return _total(rows)

    def prefix(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | PrefixParts | None = None
    ) -> Prefix:
        """Keys and values of these rows, and of the prefix they follow, for later calls.

        After `PrefixParts`, of these rows alone: the owner of the parts appends to them.
        What the last block makes of the rows is not computed: only its keys and values are kept.
        """
        assert tokens.num_targets_B is None, "a candidate's keys and values must not be kept"
        view, x_TD = self._begin(rows_TD, tokens, prefix)
        kept: list[tuple[Tensor, Tensor]] = []
        pasts = list(pasts_of_blocks(prefix, len(self.blocks)))
        for block, past in zip(self.blocks[:-1], pasts[:-1], strict=True):
            rows, k_THA, v_THV = block(x_TD, view, past, keeps=True)
            x_TD = _total(rows)
            kept.append((k_THA, v_THV))
        last = self.blocks[-1]
        assert isinstance(last, HstuBlock | FuxiBlock)
        kept.append(last.keys_and_values(x_TD, view, pasts[-1]))
        keys, values = zip(*kept, strict=True)
        if isinstance(prefix, PrefixParts):
            return Prefix(tokens.lengths_B, keys, values, tokens.times_T)
        return Prefix(view.lengths_B, keys, values, view.times_T)

    def _begin(
        self, rows_TD: Tensor, tokens: Tokens, prefix: Prefix | PrefixParts | None
    ) -> tuple[View, Tensor]:
        """What the first block gets."""
        view = View.of(tokens, rows_TD.shape[0], prefix)
        positions_T = view.positions_T.clamp(max=self.config.max_len)
        scale = math.sqrt(self.config.dim)
        if prefix is None and pointwise_by_kernels(self.config, rows_TD, None):
            x_TD = fused.add_positions(rows_TD, self.position_DN, positions_T, scale)
        else:
            x_TD = rows_TD * scale + pick_columns(self.position_DN, positions_T).T
        return view, view.dropped(x_TD, self.config.dropout, site=0)

    def flops(self, history_B: Tensor, candidates_B: Tensor) -> Tensor:
        """(B,) of a training step on samples of such lengths: products alone, three times forward.

        A row's products count once for each row that it sees; what is computed again does not.
        """
        history_B, candidates_B = history_B.double(), candidates_B.double()
        rows_B = history_B + candidates_B
        seen_B = history_B.clamp(max=self.config.max_attention or math.inf)
        # The first rows see those before them, all others as many as a row may; each sees itself.
        before_B = 0.5 * seen_B * (seen_B + 1) + (history_B - seen_B) * seen_B - seen_B
        pairs_B = before_B + history_B + candidates_B * (seen_B + 1)
        forward_B = torch.zeros_like(pairs_B)
        for block in self.blocks:
            assert isinstance(block, HstuBlock | FuxiBlock)
            forward_B = forward_B + block.flops(rows_B, pairs_B)
        return 3 * forward_B


def _total(rows: Tensor | Pending) -> Tensor:
    return rows.total() if isinstance(rows, Pending) else rows


def _kernels_serve(config: HstuConfig, x_TD: Tensor, view: View) -> bool:
    """Whether kernels compute what stands between products, and attention as well."""
    if not pointwise_by_kernels(config, x_TD, None):
        return False
    like_q_0HA = x_TD.new_empty(0, config.heads, config.value_dim, dtype=product_dtype(x_TD))
    return kernels_attend(config.attention, like_q_0HA, config.value_dim, view.bias(None, None))


def _computed_again(block: nn.Module, x_TD: Tensor, view: View) -> Tensor:
    """A block's output, of which the backward pass finds the input alone.

    Nothing draws from a generator, so there is no state of one to keep.
    """
    return checkpoint(
        lambda x: _total(block(x, view, None)[0]),
        x_TD,
        use_reentrant=False,
        preserve_rng_state=False,
    )


class HstuBlock(nn.Module):
    """Attention, gate, and the sum with what came in; there is no feed-forward part."""

    def __init__(self, config: HstuConfig, number: int = 0) -> None:
        super().__init__()
        self.config = config
        self.site = 1 + 2 * number
        heads = config.heads
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=config.affine_norm)
        self.uvqk = nn.Linear(config.dim, 2 * heads * (config.value_dim + config.attention_dim))
        self.out = nn.Linear(heads * config.value_dim, config.dim)
        tables = 1 if config.shared_bias else heads
        self.position_HP = self.time_HQ = None
        if config.position_buckets:
            self.position_HP = nn.Parameter(torch.randn(tables, config.position_buckets) * 0.02)
        if config.time_buckets:
            self.time_HQ = nn.Parameter(torch.randn(tables, config.time_buckets) * 0.02)
        if config.weight_std:
            nn.init.normal_(self.uvqk.weight, std=config.weight_std)
            nn.init.zeros_(self.uvqk.bias)
            nn.init.xavier_uniform_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(
        self, rows: Tensor | Pending, view: View, past: Past, *, keeps: bool = False
    ) -> tuple[Tensor | Pending, Tensor | None, Tensor | None]:
        """The block's output, and the keys and values of all rows; parts of a past stay apart.

        Without `keeps` there may be no keys and values.
        """
        given = rows if isinstance(rows, Pending) else Pending(rows)
        if not keeps and past is None and self._is_one_node(given.x_TD, view):
            return self._as_one_node(given, view), None, None
        if pointwise_by_kernels(self.config, given.x_TD, past):
            return self._by_kernels(given, view)
        x_TD = given.total()
        u_THV, v_THV, q_THA, k_THA = self._project(x_TD)
        k_THA, v_THV = join_past(k_THA, v_THV, view, past)
        bias = view.bias(self._table(self.position_HP), self._table(self.time_HQ))
        attended_THV = attend_rows(self.config, q_THA, k_THA, v_THV, view, past, bias)
        gate_TX = norm_gate(attended_THV, u_THV, GATE_EPS).flatten(1)
        gated_TD = self.out(view.dropped(gate_TX, self.config.dropout, self.site))
        return x_TD + gated_TD, k_THA, v_THV

    def _is_one_node(self, x_TD: Tensor, view: View) -> bool:
        """Whether kernels serve for all of the block; asked once for blocks of equal kind."""
        config, weights = self.config, (self.uvqk.weight, self.out.weight)
        grad = torch.is_grad_enabled()
        asked = (id(config), x_TD.dtype, grad, *(of.dtype for of in weights))
        known = view.forms
        if asked not in known:
            equal = config.attention_dim == config.value_dim
            own = all(of.dtype == torch.float32 for of in weights)
            steps = equal and own and config.pointwise != "steps"
            known[asked] = steps and _kernels_serve(config, x_TD, view)
        return known[asked]

    def _as_one_node(self, rows: Pending, view: View) -> Pending:
        """What `_by_kernels` computes, with less for the host to do."""
        uvqk, out, norm = self.uvqk, self.out, self.norm
        weights = (norm.weight, norm.bias, uvqk.weight, uvqk.bias, out.weight, out.bias)
        tables = self._table(self.position_HP), self._table(self.time_HQ)
        dropout = view.dropout(self.config.dropout, self.site)
        rule = self._rule(view)
        return Pending(*fused.hstu_block(*rows, (*weights, *tables), rule, dropout))

    def _rule(self, view: View) -> BlockRule:
        """The same for all blocks of an encoder."""
        config, known = self.config, view.rules
        if id(config) not in known:
            assert view.offsets_B is not None
            window = config.max_attention or None
            known[id(config)] = BlockRule(
                Norm(self.norm.eps),
                Norm(GATE_EPS),
                config.heads,
                config.value_dim,
                view.offsets_B,
                view.mask.num_targets_B,
                view.times_T,
                view.facts,
                (config.max_len, config.scale, window, view.longest),
                config.attention == "hopper",
            )
        return known[id(config)]

    def _by_kernels(self, rows: Pending, view: View) -> tuple[Pending, Tensor, Tensor]:
        """The same with a kernel for each step between products; the sum is left to the next."""
        config, norm, gate_bias = self.config, Norm(self.norm.eps), self.uvqk.bias.detach()
        values = config.heads * config.value_dim
        x_TD, x_hat_TD = fused.add_norm(*rows, self.norm.weight, self.norm.bias, norm)
        # The bias of the projection is added where its SiLU is: so is its gradient.
        mixed_TX = functional.linear(x_hat_TD, self.uvqk.weight)
        u_TX, *parts = fused.silu_parts(mixed_TX, self.uvqk.bias, values, values)
        v_THV, q_THA, k_THA = (part.unflatten(1, (config.heads, -1)) for part in parts)
        bias = view.bias(self._table(self.position_HP), self._table(self.time_HQ))
        attended_THV = attend_rows(config, q_THA, k_THA, v_THV, view, None, bias)
        gate_TX = fused.norm_gate(
            attended_THV.flatten(1),
            u_TX,
            gate_bias[:values],
            Norm(GATE_EPS),
            view.dropout(config.dropout, self.site),
        )
        return Pending(x_TD, self.out(gate_TX)), k_THA, v_THV

    def keys_and_values(self, x_TD: Tensor, view: View, past: Past) -> tuple[Tensor, Tensor]:
        """What `forward` gives of them, bit for bit, without its output.

        All four projections are computed, as there: products of another shape round otherwise.
        """
        _, v_THV, _, k_THA = self._project(x_TD)
        return join_past(k_THA, v_THV, view, past)

    def flops(self, rows_B: Tensor, pairs_B: Tensor) -> Tensor:
        """(B,) of the products of a forward pass, from the rows and the visible pairs."""
        weights = self.uvqk.weight.numel() + self.out.weight.numel()
        widths = self.config.heads * (self.config.attention_dim + self.config.value_dim)
        return 2.0 * (weights * rows_B + widths * pairs_B)

    def _table(self, table_HP: Tensor | None) -> Tensor | None:
        """A table with a line for each head."""
        if table_HP is None or len(table_HP) == self.config.heads:
            return table_HP
        return table_HP.expand(self.config.heads, -1)

    def _project(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Gate, values, queries and keys of every row."""
        config = self.config
        mixed = functional.silu(self.uvqk(self.norm(x_TD)))
        widths = [config.value_dim, config.value_dim, config.attention_dim, config.attention_dim]
        parts = mixed.split([config.heads * width for width in widths], dim=1)
        return tuple(part.unflatten(1, (config.heads, -1)) for part in parts)
