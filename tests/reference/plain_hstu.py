"""HSTU for one history at a time, in whole matrices: every row with every row, in any precision.

Nothing here imports the project. The formulas are those of docs/attention.md: pointwise attention
with relative biases, a norm without weights, a gate, an output projection and a residual. FuXi's
block is that of models/fuxi.py, written from its formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

# Shapes: N rows of one history, D width, H heads, A and V widths of queries and values, L events
# that predict, M negatives, J ranges of items


@dataclass(frozen=True)
class PlainShape:
    """Sizes that the weights do not tell."""

    blocks: int
    heads: int
    attention_dim: int
    value_dim: int
    max_len: int
    scaled: bool = True
    max_attention: int = 0
    feed_forward: int = 1


def encode(
    x_ND: Tensor,
    weights: Mapping[str, Tensor],
    shape: PlainShape,
    times_N: Tensor | None = None,
    candidates: int = 0,
    asked_N: Tensor | None = None,
) -> Tensor:
    """Each row after what it sees; the last rows may be candidates, which see no other one.

    `asked_N`: the times from which each row's bias counts back, where they are not its own.
    """
    count, width = x_ND.shape
    row_N = torch.arange(count)
    history = count - candidates
    position_N = row_N.clamp(max=history)
    learnt_ND = weights["position_DN"].T[position_N.clamp(max=shape.max_len)]
    x_ND = x_ND * math.sqrt(width) + learnt_ND
    sees_NN = (row_N[None] < row_N[:, None]) & (row_N[None] < history) | torch.eye(count).bool()
    apart_NN = (position_N[:, None] - position_N[None]).clamp(min=0)
    if shape.max_attention:
        sees_NN = sees_NN & (apart_NN <= shape.max_attention)
    passed_NN = None
    if times_N is not None:
        passed_NN = time_bits(times_N if asked_N is None else asked_N, times_N)
    for block in range(shape.blocks):
        own = {
            name.removeprefix(f"blocks.{block}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{block}.")
        }
        if "position_1P" in own:
            x_ND = fuxi_block(x_ND, own, shape, sees_NN, apart_NN, passed_NN)
        else:
            x_ND = x_ND + _attention(x_ND, own, shape, sees_NN, apart_NN, passed_NN)
    return x_ND


def _attention(
    x_ND: Tensor,
    own: Mapping[str, Tensor],
    shape: PlainShape,
    sees_NN: Tensor,
    apart_NN: Tensor,
    passed_NN: Tensor | None,
) -> Tensor:
    centred_ND = x_ND - x_ND.mean(1, keepdim=True)
    normed_ND = centred_ND / (centred_ND.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    if "norm.weight" in own:
        normed_ND = normed_ND * own["norm.weight"] + own["norm.bias"]
    mixed = normed_ND @ own["uvqk.weight"].T + own["uvqk.bias"]
    mixed = mixed * torch.sigmoid(mixed)
    heads, values, width = shape.heads, shape.value_dim, shape.attention_dim
    u, v, q, k = mixed.split([heads * values, heads * values, heads * width, heads * width], 1)
    attended = []
    for head in range(heads):
        q_NA, k_NA = (part[:, head * width : (head + 1) * width] for part in (q, k))
        v_NV = v[:, head * values : (head + 1) * values]
        scores_NN = q_NA @ k_NA.T / (math.sqrt(width) if shape.scaled else 1)
        bias_P = _line(own["position_HP"], head)
        scores_NN = scores_NN + bias_P[apart_NN.clamp(max=len(bias_P) - 1)]
        if passed_NN is not None:
            bias_Q = _line(own["time_HQ"], head)
            scores_NN = scores_NN + bias_Q[passed_NN.clamp(max=len(bias_Q) - 1)]
        weights_NN = scores_NN * torch.sigmoid(scores_NN) / shape.max_len
        attended.append((weights_NN * sees_NN) @ v_NV)
    both = torch.cat(attended, 1)
    both = both - both.mean(1, keepdim=True)
    gated = both / (both.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * u
    return gated @ own["out.weight"].T + own["out.bias"]


def _line(table_HP: Tensor, head: int) -> Tensor:
    """A table may have one line for all heads."""
    return table_HP[head if len(table_HP) > 1 else 0]


def time_bits(asked_N: Tensor, times_N: Tensor) -> Tensor:
    """Below 1 the first bucket, then a bucket for each power of two."""
    passed = [max(0, int(now - then)) for now in asked_N.tolist() for then in times_N.tolist()]
    bits = torch.tensor([time.bit_length() for time in passed]).long()
    return bits.view(len(times_N), len(times_N))


def fuxi_block(
    x_ND: Tensor,
    own: Mapping[str, Tensor],
    shape: PlainShape,
    sees_NN: Tensor,
    apart_NN: Tensor,
    passed_NN: Tensor | None,
) -> Tensor:
    """FuXi-alpha: maps by position, by time and by products, a gate over all, then SwiGLU."""
    mixed = _rms(x_ND) @ own["uvqk.weight"].T
    mixed = mixed * torch.sigmoid(mixed)
    heads, values, width = shape.heads, shape.value_dim, shape.attention_dim
    maps = [own["position_1P"][0][apart_NN.clamp(max=own["position_1P"].shape[1] - 1)]]
    if passed_NN is not None:
        maps.append(own["time_1Q"][0][passed_NN.clamp(max=own["time_1Q"].shape[1] - 1)])
    gates = (len(maps) + 1) * heads * values
    u, v, q, k = mixed.split([gates, heads * values, heads * width, heads * width], 1)
    columns = []
    for head in range(heads):
        q_NA, k_NA = (part[:, head * width : (head + 1) * width] for part in (q, k))
        v_NV = v[:, head * values : (head + 1) * values]
        scores_NN = q_NA @ k_NA.T / (math.sqrt(width) if shape.scaled else 1)
        semantic_NN = scores_NN * torch.sigmoid(scores_NN) / shape.max_len
        columns += [(map_NN * sees_NN) @ v_NV for map_NN in [*maps, semantic_NN]]
    gated = _rms(torch.cat(columns, 1)) * u
    y_ND = gated @ own["out.weight"].T + own["out.bias"] + x_ND
    if not shape.feed_forward:
        return y_ND
    inner = shape.feed_forward * x_ND.shape[1]
    first, third = own["wide.weight"][:inner], own["wide.weight"][inner:]
    z_ND = _rms(y_ND)
    gate = z_ND @ first.T
    return (gate * torch.sigmoid(gate) * (z_ND @ third.T)) @ own["narrow.weight"].T + y_ND


def _rms(x_ND: Tensor) -> Tensor:
    return x_ND / (x_ND.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()


@dataclass
class PlainHistories:
    """Row numbers of each history, oldest first, and the negatives of each sample."""

    rows: list[list[int]]
    negatives: list[list[int]]


class PlainRetriever(nn.Module):
    """The next item at every position, told from negatives by a softmax of cosines."""

    def __init__(
        self,
        items: nn.Embedding,
        weights: Mapping[str, Tensor],
        shape: PlainShape,
        temperature: float,
        log_chance_V: Tensor,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"of items": items})
        self.names = list(weights)
        self.weights = nn.ParameterList([nn.Parameter(w.clone()) for w in weights.values()])
        self.shape, self.temperature = shape, temperature
        self.log_chance_V = log_chance_V

    def loss(self, batch: PlainHistories) -> tuple[Tensor, float]:
        total, predicted = torch.zeros(()), 0
        for rows, negatives in zip(batch.rows, batch.negatives, strict=True):
            total = total + self._one(rows, negatives)
            predicted += max(0, len(rows) - 1)
        return total, float(predicted)

    def _one(self, rows: list[int], negatives: list[int]) -> Tensor:
        table = self.tables["of items"]
        x_ND = table(torch.tensor(rows).long())
        wrong_MD = functional.normalize(table(torch.tensor(negatives)), dim=1)
        if len(rows) < 2:
            return 0 * (x_ND.sum() + wrong_MD.sum())  # looked up all the same
        weights = dict(zip(self.names, self.weights, strict=True))
        encoded_LD = functional.normalize(encode(x_ND, weights, self.shape)[:-1], dim=1)
        losses = []
        for vector_D, row in zip(encoded_LD, rows[1:], strict=True):
            others = [i for i, other in enumerate(negatives) if other != row]
            candidates = torch.tensor([row, *(negatives[i] for i in others)])
            right_1D = functional.normalize(table(candidates[:1]), dim=1)
            scores = torch.cat([right_1D, wrong_MD[others]]) @ vector_D / self.temperature
            scores = scores - self.log_chance_V[candidates]
            losses.append(functional.cross_entropy(scores, torch.tensor(0)))
        return torch.stack(losses).sum()


def log_chance_halving(items: int) -> Tensor:
    """The chance of items 1 to `items`: ranges that halve in length are drawn alike."""
    end = items + 1
    starts = [end >> halving for halving in range(end.bit_length() - 1, -1, -1)]
    ranges = list(pairwise(starts))
    chance = torch.ones(end)
    for low, high in ranges:
        chance[low:high] = 1 / (len(ranges) * (high - low))
    return chance.log()
