"""HSTU's pointwise attention over jagged sequences, in plain PyTorch.

    attended_i = sum over the j that i sees of SiLU(scale * q_i . k_j + bias_ij) / norm * v_j
    out_i = LayerNorm(attended_i) * u_i

A sample's result is a function of that sample alone: `norm` is a constant of the model (never the
longest of the batch), and padding is out of everyone's sight. Alone or in any batch, results differ
by the order in which floats are added: below 1e-5 of the largest value in float32. The same input
gives the same bits, forwards and backwards: no add here depends on which thread comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Shapes: B samples, T rows of all samples together, L rows of the longest, H heads,
# A width of queries and keys, V width of values, P and Q buckets of the biases, N pairs of rows

_ONE_HOT_VALUES = 1 << 24
"""Size of the pieces in which a GPU adds up a bias' gradient."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Who sees whom: a row sees itself and every row at an earlier position of its sample.

    A history's positions count from its oldest row. Candidates come last and all stand at one
    position, the one after the history: each sees the history and itself, and none another.
    """

    num_targets_B: Tensor | None = None
    """Candidates at the end of each sample; None: there are none, all is history."""


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """What is added to a score by how far apart its two rows are."""

    position_HP: Tensor | None = None
    """By distance in positions; every distance from P - 1 on has the last column."""
    time_HQ: Tensor | None = None
    """By distance in time: column 0 below 1, column c from 2**(c-1) on, the last without end."""
    times_T: Tensor | None = None
    """The own time of each row of keys, whole numbers; needed where `time_HQ` is given."""
    query_times_T: Tensor | None = None
    """What stands for the own time of each query, where all rows are queries; None: its own."""


CAUSAL = Mask()
NO_BIAS = RelativeBias()


def hstu_attention(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B: Tensor,
    *,
    norm: float,
    scale: float = 1.0,
    mask: Mask = CAUSAL,
    bias: RelativeBias = NO_BIAS,
    query_offsets_B: Tensor | None = None,
    max_attention: int | None = None,
    longest: int | None = None,
) -> Tensor:
    """The weighted sum of values that each query sees, (T, H, V), before the gate.

    `offsets_B` (B + 1) says where each sample's rows start and end. With `query_offsets_B` the
    queries are only the last rows of each sample, and the keys and values before them a cache.
    With `max_attention` a row sees keys at most so many positions before its own. `longest` is the
    length of the longest sample; without it the host waits for the device to say.
    """
    keys = Padding.of(offsets_B, k_THA.shape[0], longest)
    queries = keys
    if query_offsets_B is not None:
        queries = Padding.of(query_offsets_B, q_THA.shape[0])
    pairs = _Pairs.of(queries, keys, mask, max_attention)
    q_BHLA, k_BHLA = queries.pad(q_THA).transpose(1, 2), keys.pad(k_THA).transpose(1, 2)
    scores_BHLL = torch.matmul(q_BHLA, k_BHLA.transpose(2, 3)) * scale
    scores_BHLL = pairs.add_bias(scores_BHLL, bias)
    weights_BHLL = torch.where(pairs.visible_BLL[:, None], functional.silu(scores_BHLL), 0) / norm
    v_BHLV = keys.pad(v_THV).transpose(1, 2)
    out_BLHV = torch.matmul(weights_BHLL.to(v_BHLV.dtype), v_BHLV).transpose(1, 2)
    return queries.unpad(out_BLHV)


def bias_mixing(
    num_queries: int,
    v_THV: Tensor,
    offsets_B: Tensor,
    *,
    mask: Mask = CAUSAL,
    bias: RelativeBias = NO_BIAS,
    query_offsets_B: Tensor | None = None,
    max_attention: int | None = None,
    longest: int | None = None,
) -> list[Tensor]:
    """FuXi's other two channels: values weighted by position alone, and by time alone, (T, H, V).

    A weight is an entry of its table, (1, P) or (1, Q), without activation or divisor; all heads
    share it. One tensor for each table that `bias` has, in this order.
    """
    keys = Padding.of(offsets_B, v_THV.shape[0], longest)
    queries = keys
    if query_offsets_B is not None:
        queries = Padding.of(query_offsets_B, num_queries)
    pairs = _Pairs.of(queries, keys, mask, max_attention)
    v_BLX = keys.pad(v_THV.flatten(1))
    mixed: list[Tensor] = []
    for weights_BLL in pairs.weights(bias):
        seen_BLL = torch.where(pairs.visible_BLL, weights_BLL, 0).to(v_BLX.dtype)
        # One batch of products of one size: a weight of all samples alike is spread out.
        out_BLX = torch.matmul(seen_BLL.expand(len(v_BLX), -1, -1), v_BLX)
        mixed.append(queries.unpad(out_BLX).unflatten(1, v_THV.shape[1:]))
    return mixed


def norm_gate(attended_THV: Tensor, u_THV: Tensor, eps: float = 1e-6) -> Tensor:
    """HSTU's gate: the attended values, normalised over all heads of a row, times `u`."""
    shape = attended_THV.shape[1:]
    return functional.layer_norm(attended_THV, shape, eps=eps) * u_THV


@dataclass(frozen=True, slots=True)
class Padding:
    """Where the rows of jagged samples lie once every sample is as long as the longest."""

    lengths_B: Tensor
    longest: int
    slots_T: Tensor
    """The place of each row among the B * L padded ones."""

    @classmethod
    def of(cls, offsets_B: Tensor, total: int, longest: int | None = None) -> Padding:
        """For `total` rows; where `longest` is not given, the device is asked for it."""
        lengths_B = offsets_B[1:] - offsets_B[:-1]
        if longest is None:
            longest = int(lengths_B.max()) if total else 0
        sample_T = torch.repeat_interleave(lengths_B, output_size=total)
        row_T = torch.arange(total, device=offsets_B.device) - offsets_B[sample_T]
        return cls(lengths_B, longest, sample_T * longest + row_T)

    def pad(self, x_T: Tensor) -> Tensor:
        """(T, ...) to (B, L, ...), with zeros after the end of each sample."""
        padded = x_T.new_zeros(len(self.lengths_B) * self.longest, *x_T.shape[1:])
        padded.index_copy_(0, self.slots_T, x_T)
        return padded.view(len(self.lengths_B), self.longest, *x_T.shape[1:])

    def unpad(self, x_BL: Tensor) -> Tensor:
        """(B, L, ...) to (T, ...)."""
        return x_BL.flatten(0, 1).index_select(0, self.slots_T)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Every query with every key of its sample; the first dimension is 1 where samples agree."""

    query_row_BL: Tensor
    """Where in its sample each query stands, counted from the oldest row."""
    distance_BLL: Tensor
    """Positions from key to query."""
    visible_BLL: Tensor
    keys: Padding

    @classmethod
    def of(
        cls, queries: Padding, keys: Padding, mask: Mask, max_attention: int | None = None
    ) -> _Pairs:
        device = keys.lengths_B.device
        key_row_1L = torch.arange(keys.longest, device=device)[None]
        query_row_BL = torch.arange(queries.longest, device=device)[None]
        if queries is not keys:
            query_row_BL = query_row_BL + (keys.lengths_B - queries.lengths_B)[:, None]
        key_position_BL, query_position_BL = key_row_1L, query_row_BL
        if mask.num_targets_B is not None:
            history_B1 = (keys.lengths_B - mask.num_targets_B)[:, None]
            key_position_BL = torch.minimum(key_row_1L, history_B1)
            query_position_BL = torch.minimum(query_row_BL, history_B1)
        distance_BLL = query_position_BL[:, :, None] - key_position_BL[:, None, :]
        # Padding needs no mask of its own: it lies after every row of its sample, at no earlier
        # position than the last of them.
        itself_BLL = query_row_BL[:, :, None] == key_row_1L[:, None, :]
        visible_BLL = (distance_BLL > 0) | itself_BLL
        if max_attention is not None:
            visible_BLL = visible_BLL & (distance_BLL <= max_attention)
        return cls(query_row_BL, distance_BLL, visible_BLL, keys)

    def add_bias(self, scores_BHLL: Tensor, bias: RelativeBias) -> Tensor:
        for bias_BHLL in self._looked_up(bias):
            scores_BHLL = scores_BHLL + bias_BHLL
        return scores_BHLL

    def weights(self, bias: RelativeBias) -> Iterator[Tensor]:
        """(B, L, L) for each table, which has one line for all heads."""
        return (weights_BHLL.squeeze(1) for weights_BHLL in self._looked_up(bias))

    def _looked_up(self, bias: RelativeBias) -> Iterator[Tensor]:
        """(B, H, L, L) by position, then by time, of the tables that there are."""
        if bias.position_HP is not None:
            last = bias.position_HP.shape[1] - 1
            yield _look_up(bias.position_HP, self.distance_BLL.clamp(0, last))
        if bias.time_HQ is not None:
            yield _look_up(bias.time_HQ, self._time_buckets(bias, bias.time_HQ.shape[1]))

    def _time_buckets(self, bias: RelativeBias, buckets: int) -> Tensor:
        """Whole numbers all the way: no rounding, the same buckets on every device."""
        assert bias.times_T is not None, "a bias by time needs the rows' times"
        times_T, asked_T = bias.times_T, bias.query_times_T
        times_BL = self.keys.pad(times_T)
        if not self.keys.longest:
            return self.distance_BLL.expand(times_BL.shape[0], -1, -1)
        row_BL = self.query_row_BL.clamp(max=self.keys.longest - 1)
        own_BL = times_BL if asked_T is None else self.keys.pad(asked_T)
        own_BL = own_BL.gather(1, row_BL.expand(times_BL.shape[0], -1))
        passed_BLL = own_BL[:, :, None] - times_BL[:, None, :]
        edges = 2 ** torch.arange(buckets - 1, device=times_T.device)
        return torch.bucketize(passed_BLL, edges, right=True)


def _look_up(table_HP: Tensor, index_BLL: Tensor) -> Tensor:
    """(B, H, L, L): one column of the table for each pair."""
    picked_HN = pick_columns(table_HP, index_BLL.flatten())
    return picked_HN.view(table_HP.shape[0], *index_BLL.shape).transpose(0, 1)


def pick_columns(table_HP: Tensor, index_N: Tensor) -> Tensor:
    """`table_HP[:, index_N]`, with a backward that adds in a fixed order.

    That of `nn.Embedding` does not: on a GPU it gives other bits each time.
    """
    return _PickColumns.apply(table_HP, index_N)


class _PickColumns(torch.autograd.Function):
    """What `pick_columns` says."""

    @staticmethod
    def forward(ctx: Any, table_HP: Tensor, index_N: Tensor) -> Tensor:
        ctx.save_for_backward(index_N)
        ctx.columns = table_HP.shape[1]
        return table_HP.index_select(1, index_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_HN: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index_N,) = ctx.saved_tensors
        sums_HP = grad_HN.new_zeros(grad_HN.shape[0], ctx.columns)
        if not grad_HN.is_cuda:  # one thread per row of the table, which adds in order
            return sums_HP.scatter_add_(1, index_N.expand_as(grad_HN), grad_HN), None
        step = max(1, _ONE_HOT_VALUES // ctx.columns)
        for start in range(0, index_N.shape[0], step):  # on a GPU by a product, without atomics
            one_hot_NP = functional.one_hot(index_N[start : start + step], ctx.columns)
            sums_HP += grad_HN[:, start : start + step] @ one_hot_NP.to(grad_HN.dtype)
        return sums_HP, None
