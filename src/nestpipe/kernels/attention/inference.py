"""HSTU's attention where no gradient is wanted: no score matrix, and a cache stays where it lies.

`attend` and `attend_with_past` compute what `hstu_attention` does. On a GPU a kernel does it all;
on the host blocks of queries come one after the other, so that memory is that of a block and not of
all pairs of rows, and no block looks at keys that come after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.kernels.attention.reference import CAUSAL, NO_BIAS, Mask, RelativeBias, hstu_attention

# Shapes: B samples, T rows of all samples together, L layers, H heads, A width of queries and keys,
# V width of values, P and Q buckets of the biases; of one sample: M queries, N keys, C candidates

_HAS_TRITON = find_spec("triton") is not None
_SCORES = 1 << 20
"""Scores that the host holds at a time, so that they stay in its caches ..."""
_ROWS = (32, 128)
"""... of at least and at most so many queries: fewer make slow products, more see less of each."""
_SCORES_OF_A_RUN = 1 << 18
"""Up to so many scores, short samples go through the plain form together: a call for each costs
more than what it saves."""


def attend(
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
    longest: int | None = None,
) -> Tensor:
    """`hstu_attention` without gradients, (T, H, V).

    `longest` is the length of the longest sample; it saves a GPU empty work.
    """
    rule = Rule(norm, scale, mask.num_targets_B, bias)
    if query_offsets_B is None:
        query_offsets_B = offsets_B
    if kernel_serves(q_THA):
        from nestpipe.kernels.attention.triton_forward import Keys, attend_by_kernel

        keys = Keys(k_THA, v_THV, offsets_B, offsets_B)
        return attend_by_kernel(q_THA, query_offsets_B, keys, rule, longest)
    return _attend_in_runs(q_THA, k_THA, v_THV, offsets_B, query_offsets_B, rule)


def attend_with_past(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    past_keys: Sequence[Tensor],
    past_values: Sequence[Tensor],
    offsets_B: Tensor,
    *,
    norm: float,
    scale: float = 1.0,
    mask: Mask = CAUSAL,
    bias: RelativeBias = NO_BIAS,
    longest: int | None = None,
    pointers_3B: Tensor | None = None,
) -> Tensor:
    """`attend` for rows that follow others: `offsets_B` counts the new ones alone.

    `past_keys` and `past_values` have the older rows of each sample, (N, H, A) and (N, H, V). On a
    GPU they are read where they lie and must stay there until the work is done. They are history:
    candidates are among the new rows. `bias.times_T` has the times of all rows, each sample's past
    before its new rows. No sample has more than `longest` new rows. `pointers_3B` is the part of
    `prefix_pointers` for this layer, where it is known.
    """
    for old, new in [*((x, k_THA) for x in past_keys), *((x, v_THV) for x in past_values)]:
        found, wanted = ((x.dtype, x.device, tuple(x.shape[1:])) for x in (old, new))
        assert found == wanted, f"rows of a past are {found}, new ones {wanted}"
    rule = Rule(norm, scale, mask.num_targets_B, bias)
    if kernel_serves(q_THA) and len(q_THA):
        from nestpipe.kernels.attention.triton_forward import Keys, attend_by_kernel

        if pointers_3B is None:
            pointers_3B = _pointers([past_keys], [past_values])[0]
        time_offsets_B = offsets_B
        if bias.time_HQ is not None:
            time_offsets_B = offsets_B + functional.pad(torch.cumsum(pointers_3B[2], 0), (1, 0))
        keys = Keys(k_THA, v_THV, offsets_B, time_offsets_B, pointers_3B)
        new = len(q_THA) if longest is None else longest
        most = max(len(past) for past in past_keys) + new
        return attend_by_kernel(q_THA, offsets_B, keys, rule, longest, most)
    out_THV, ends, first = v_THV.new_empty(v_THV.shape), offsets_B.tolist(), 0
    for number, (old_k, old_v) in enumerate(zip(past_keys, past_values, strict=True)):
        new = slice(ends[number], ends[number + 1])
        k_NHA, v_NHV = torch.cat([old_k, k_THA[new]]), torch.cat([old_v, v_THV[new]])
        part = rule.of(number, number + 1, slice(first, first + len(k_NHA)))
        _Sample.of(k_NHA, v_NHV, part).attend(q_THA[new], out_THV[new])
        first += len(k_NHA)
    return out_THV


def prefix_pointers(keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor | None:
    """(L, 3, B) for `attend_with_past` of each layer, by a single copy; None: it needs none.

    From (L, N, H, A) and (L, N, H, V) of each sample.
    """
    if not keys or not kernel_serves(keys[0]):
        return None
    layers = range(keys[0].shape[0])
    return _pointers(
        [[part[layer] for part in keys] for layer in layers],
        [[part[layer] for part in values] for layer in layers],
    )


def _pointers(keys: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]) -> Tensor:
    """(L, 3, B) where keys and values of each layer and sample start, and the number of rows."""
    table = [
        [[_address(x) for x in k], [_address(x) for x in v], [len(x) for x in k]]
        for k, v in zip(keys, values, strict=True)
    ]
    return torch.tensor(table, dtype=torch.int64).to(keys[0][0].device, non_blocking=True)


def _address(x_NHA: Tensor) -> int:
    assert x_NHA.is_contiguous(), f"rows of a past must lie side by side; strides {x_NHA.stride()}"
    address, size = x_NHA.data_ptr(), x_NHA.shape[2] * x_NHA.element_size()
    # Where rows are whole multiples of 16 bytes, the kernel reads 16 at a time.
    assert size % 16 or address % 16 == 0, f"a past must start at 16 bytes, not at {address:#x}"
    return address


def kernel_serves(q_THA: Tensor) -> bool:
    """Whether the GPU's kernel can do it; float64 and builds without triton go the plain way."""
    return q_THA.is_cuda and q_THA.dtype != torch.float64 and _HAS_TRITON


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores become weights."""

    norm: float
    scale: float
    num_targets_B: Tensor | None
    bias: RelativeBias

    def of(self, start: int, stop: int, rows: slice) -> Rule:
        """For the samples from `start` to `stop` alone, whose keys are `rows`."""
        targets, times = self.num_targets_B, self.bias.times_T
        return Rule(
            self.norm,
            self.scale,
            None if targets is None else targets[start:stop],
            replace(self.bias, times_T=None if times is None else times[rows]),
        )


def _attend_in_runs(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B: Tensor,
    query_offsets_B: Tensor,
    rule: Rule,
) -> Tensor:
    """Several short samples at a time, or one long one."""
    out_THV = v_THV.new_empty(q_THA.shape[0], *v_THV.shape[1:])
    ends, query_ends = offsets_B.tolist(), query_offsets_B.tolist()
    for start, stop in _runs(ends, query_ends, _SCORES_OF_A_RUN // q_THA.shape[1]):
        rows, asked = slice(ends[start], ends[stop]), slice(query_ends[start], query_ends[stop])
        q, k, v, part = q_THA[asked], k_THA[rows], v_THV[rows], rule.of(start, stop, rows)
        if stop - start == 1:
            _Sample.of(k, v, part).attend(q, out_THV[asked])
            continue
        query_part_B = None
        if query_offsets_B is not offsets_B:
            query_part_B = query_offsets_B[start : stop + 1] - query_ends[start]
        out_THV[asked] = hstu_attention(
            q,
            k,
            v,
            offsets_B[start : stop + 1] - ends[start],
            norm=rule.norm,
            scale=rule.scale,
            mask=Mask(part.num_targets_B),
            bias=part.bias,
            query_offsets_B=query_part_B,
        )
    return out_THV


def _runs(ends: list[int], query_ends: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Samples from start to stop: one, or as many as have up to `most` pairs once padded."""
    start, longest, longest_query = 0, 0, 0
    for number in range(len(ends) - 1):
        longest = max(longest, ends[number + 1] - ends[number])
        longest_query = max(longest_query, query_ends[number + 1] - query_ends[number])
        if number > start and (number + 1 - start) * longest * longest_query > most:
            yield start, number
            start, longest = number, ends[number + 1] - ends[number]
            longest_query = query_ends[number + 1] - query_ends[number]
    if len(ends) > 1:
        yield start, len(ends) - 1


@dataclass(frozen=True, slots=True)
class _Sample:
    """Keys and values of one sample; its candidates come after `history`."""

    k_NHA: Tensor
    v_NHV: Tensor
    times_N: Tensor | None
    history: int
    rule: Rule

    @classmethod
    def of(cls, k_NHA: Tensor, v_NHV: Tensor, rule: Rule) -> _Sample:
        """With the rule of this sample alone."""
        targets = 0 if rule.num_targets_B is None else int(rule.num_targets_B)
        return cls(k_NHA, v_NHV, rule.bias.times_T, len(k_NHA) - targets, rule)

    def attend(self, q_MHA: Tensor, out_MHV: Tensor) -> None:
        """Writes the result of the sample's last rows, `q_MHA`, to `out_MHV`."""
        first = len(self.k_NHA) - len(q_MHA)
        for start, stop in self._blocks(first):
            block = slice(start - first, stop - first)
            out_MHV[block] = self._attend_block(q_MHA[block], start, stop) / self.rule.norm

    def _blocks(self, first: int) -> Iterator[tuple[int, int]]:
        """Rows from `first` on, in blocks that are all history or all candidates."""
        least, most = _ROWS
        step = _SCORES // max(1, self.k_NHA.shape[1] * self.history)
        step = min(max(step, least), most)
        for begin, end in (first, self.history), (max(first, self.history), len(self.k_NHA)):
            yield from ((start, min(start + step, end)) for start in range(begin, end, step))

    def _attend_block(self, q_MHA: Tensor, start: int, stop: int) -> Tensor:
        num_keys = min(stop, self.history)
        k_HAN = self.k_NHA[:num_keys].permute(1, 2, 0)
        scores_HMN = torch.bmm(q_MHA.transpose(0, 1), k_HAN).mul_(self.rule.scale)
        self._add_position(scores_HMN, start, stop)
        self._add_time(scores_HMN, start, stop)
        weights_HMN = functional.silu(scores_HMN, inplace=True)
        if start < self.history:
            weights_HMN[:, :, start:].tril_()
        out_MHV = torch.bmm(weights_HMN, self.v_NHV[:num_keys].transpose(0, 1)).transpose(0, 1)
        if start >= self.history:
            out_MHV = out_MHV + self._from_itself(q_MHA, start, stop)
        return out_MHV

    def _add_position(self, scores_HMN: Tensor, start: int, stop: int) -> None:
        """Looks up only the distances that have a column of their own."""
        table_HP = self.rule.bias.position_HP
        if table_HP is None:
            return
        num_keys, last = scores_HMN.shape[2], table_HP.shape[1] - 1
        rows = torch.arange(start, stop) if start < self.history else torch.tensor([self.history])
        near = min(max(min(start, self.history) - last + 1, 0), num_keys)
        distance_MN = rows[:, None] - torch.arange(near, num_keys)
        index_MN = distance_MN.clamp_(0, last).to(table_HP.device)
        scores_HMN[:, :, :near] += table_HP[:, last, None, None]
        scores_HMN[:, :, near:] += _columns(table_HP, index_MN)

    def _add_time(self, scores_HMN: Tensor, start: int, stop: int) -> None:
        table_HQ = self.rule.bias.time_HQ
        if table_HQ is None:
            return
        assert self.times_N is not None, "a bias by time needs the rows' times"
        passed_MN = self.times_N[start:stop, None] - self.times_N[: scores_HMN.shape[2]]
        edges = 2 ** torch.arange(table_HQ.shape[1] - 1, device=table_HQ.device)
        scores_HMN += _columns(table_HQ, torch.bucketize(passed_MN, edges, right=True))

    def _from_itself(self, q_CHA: Tensor, start: int, stop: int) -> Tensor:
        """What each candidate sees of itself, (C, H, V)."""
        score_CH = torch.einsum("cha,cha->ch", q_CHA, self.k_NHA[start:stop]) * self.rule.scale
        for table in (self.rule.bias.position_HP, self.rule.bias.time_HQ):
            if table is not None:
                score_CH = score_CH + table[:, 0]
        return functional.silu(score_CH)[:, :, None] * self.v_NHV[start:stop]


def _columns(table_HP: Tensor, index_MN: Tensor) -> Tensor:
    """(H, M, N)"""
    return table_HP.index_select(1, index_MN.flatten()).view(len(table_HP), *index_MN.shape)
