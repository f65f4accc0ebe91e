"""What sequence encoders share: config, row metadata, prefixes, and attention.

`models/hstu.py` has the encoder and its rules, `models/fuxi.py` another kind of block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nestpipe.config import not_negative, positive
from nestpipe.errors import ConfigError
from nestpipe.jagged import Join, offsets_of, rows_within
from nestpipe.kernels.attention.fused import AttentionForm, BatchFacts, train_attention
from nestpipe.kernels.attention.inference import attend, attend_with_past, prefix_pointers
from nestpipe.kernels.attention.reference import Mask, RelativeBias, hstu_attention
from nestpipe.kernels.block.fused import BlockRule, Dropout, PointwiseForm, chosen_kernels
from nestpipe.models.draws import dropout, kernel_dropout, of_each_row

# Shapes: B samples, T rows of all samples together, D model width, H heads, A width of queries and
# keys, V width of values


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOptions:
    """`[model.encoder]`: how a sequence encoder is built, apart from its sizes."""

    kind: Literal["hstu", "fuxi"] = "hstu"
    """Blocks: `hstu`, or `fuxi` (FuXi-alpha), which mixes rows by position and by time apart from
    their products and has a feed-forward part."""
    dropout: float = 0.0
    """Dropout rate of the inputs and of each block; the mask follows from the seed, the sample, the
    pass and the position alone."""
    position_buckets: int = 64
    """Buckets of the position bias, one per distance; longer distances share the last bucket. 0,
    hstu alone: no such bias."""
    time_buckets: int = 0
    """Buckets of the time bias, one per power of two of the time difference; 0: times are not
    read."""
    time: Literal["own", "next"] = "own"
    """Whose time a row's bias counts from: its own, or, as published, that of the item to predict.
    `next` tells the model when the held-out item was chosen: a leak, for comparisons alone."""
    shared_bias: bool = False
    """All heads share one table of each bias."""
    scaled: bool = True
    """Divide products of queries and keys by the root of their width."""
    affine_norm: bool = True
    """hstu: the norm before a block learns a factor and a shift of each column."""
    weight_std: float = 0.0
    """Standard deviation of a block's first projection at the start; 0: torch's default."""
    feed_forward: int = 1
    """fuxi: width of the feed-forward part as a multiple of the model's; 0: none."""
    max_attention: int = 0
    """Attention window: positions before its own that a row sees; 0: all of them."""
    attention: AttentionForm = "auto"
    """Form of attention in training: kernels that keep no score in memory (`fused`, GPUs alone), or
    `plain`; `auto`: the kernels where they are proven. `hopper`: the kernel of Hopper's warp
    groups, for heads of 64, 128 or 256 in bfloat16 or float16."""
    pointwise: PointwiseForm = "auto"
    """Form of what stands between a block's products in training (norms, SiLU, gate, dropout,
    residual): one kernel for each step (`fused`, GPUs alone), or `plain`; `auto`: the kernels where
    they are proven. `steps`: as `fused`, but each step of hstu's block is called by itself; the
    host has more to do."""
    checkpoint_activations: bool = False
    """Activation checkpointing: keep the input of each block alone, and recompute the rest in the
    backward pass: less memory, about a third more compute. The result is the same."""

    def __post_init__(self) -> None:
        if self.kind == "fuxi":
            positive("position_buckets", self.position_buckets)
        for name in (
            "position_buckets",
            "time_buckets",
            "weight_std",
            "feed_forward",
            "max_attention",
        ):
            not_negative(name, getattr(self, name))
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; give 0 or more, and less than 1")
        if self.time == "next" and not self.time_buckets:
            raise ConfigError("time is 'next' but time_buckets is 0; give a number of buckets")
        if self.time == "next" and self.attention in ("fused", "hopper"):
            raise ConfigError("time is 'next', which no kernel has; set attention = 'plain'")


@dataclass(frozen=True, kw_only=True, slots=True)
class HstuConfig(EncoderOptions):
    """Sizes and options of a sequence encoder. A result depends on the sample alone."""

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

    def __post_init__(self) -> None:
        EncoderOptions.__post_init__(self)
        for name in ("blocks", "heads", "dim", "attention_dim", "value_dim", "max_len"):
            positive(name, getattr(self, name))

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.attention_dim**-0.5 if self.scaled else 1.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Metadata of the rows to encode."""

    lengths_B: Tensor
    """Rows of each sample, its candidates included; those in a prefix are not counted."""
    num_targets_B: Tensor | None = None
    """Candidates, the last rows of each sample."""
    times_T: Tensor | None = None
    """Own time of each row, whole numbers; read where the config has time buckets."""
    next_times_T: Tensor | None = None
    """Time of the item after each row; read where the config's `time` is `next`."""
    draws_B: Tensor | None = None
    """64 bits of each sample and pass, which dropout follows from; read in training."""
    longest: int | None = None
    """Rows of the longest sample; None: the device is asked, and the host waits for it."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys and values of the older part of each history: enough to continue after it."""

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


@dataclass(frozen=True, slots=True)
class PastParts:
    """Of one block: the past of each sample, where it lies."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    pointers_3B: Tensor | None


Past = tuple[Tensor, Tensor] | PastParts | None
"""Keys and values that a block goes on from."""


def join_past(k_THA: Tensor, v_THV: Tensor, view: View, past: Past) -> tuple[Tensor, Tensor]:
    """Keys and values after those of a past; parts of a past stay apart."""
    if not isinstance(past, tuple):
        return k_THA, v_THV
    assert view.join is not None
    return view.join.rows(past[0], k_THA), view.join.rows(past[1], v_THV)


def pasts_of_blocks(prefix: Prefix | PrefixParts | None, blocks: int) -> Iterator[Past]:
    """What each block goes on from; parts of a past are given out once they are there."""
    if prefix is None:
        yield from [None] * blocks
    elif isinstance(prefix, Prefix):
        yield from zip(prefix.keys, prefix.values, strict=True)
    else:
        yield from _parts_of_blocks(prefix, blocks)


def _parts_of_blocks(prefix: PrefixParts, blocks: int) -> Iterator[PastParts]:
    assert not torch.is_grad_enabled(), "parts of a prefix are for inference, without gradients"
    pointers = prefix_pointers(prefix.keys, prefix.values)
    for number in range(blocks):
        prefix.wait_for(number)
        yield PastParts(
            [part[number] for part in prefix.keys],
            [part[number] for part in prefix.values],
            None if pointers is None else pointers[number],
        )


@dataclass(frozen=True, slots=True)
class View:
    """What attention needs to know of the rows, the same for every block."""

    positions_T: Tensor
    """Of the new rows."""
    lengths_B: Tensor
    """Keys and values of each sample, a prefix's included."""
    longest: int
    """The largest of them (after parts of a prefix, of the new rows)."""
    query_offsets_B: Tensor | None
    """(B + 1,) of the new rows, where they follow a prefix."""
    mask: Mask
    times_T: Tensor | None
    """Of keys and values, a prefix's included."""
    join: Join | None
    """Puts the new rows after those of the prefix."""
    query_times_T: Tensor | None = None
    """What each row's time bias counts from, where that is not its own time."""
    draws_T: Tensor | None = None
    """64 bits of each new row, where there is dropout."""
    offsets_B: Tensor | None = None
    """(B + 1,) of keys and values; `View.of` sets it, so that blocks share it."""
    facts: BatchFacts = field(default_factory=BatchFacts)
    forms: dict[Hashable, bool] = field(default_factory=dict)
    """Whether kernels serve, by what is asked; blocks of one kind need not ask again."""
    rules: dict[int, BlockRule] = field(default_factory=dict)
    """What blocks of one encoder share, by the id of its config."""

    @classmethod
    def of(cls, tokens: Tokens, total: int, prefix: Prefix | PrefixParts | None) -> View:
        new_B, times_T = tokens.lengths_B, tokens.times_T
        rows_T = rows_within(new_B, total)
        history_B, mask = new_B, Mask(tokens.num_targets_B)
        if tokens.num_targets_B is not None:
            history_B = new_B - tokens.num_targets_B
        sample_T = torch.repeat_interleave(new_B, output_size=total)
        positions_T = torch.minimum(rows_T, history_B[sample_T])
        if prefix is None:
            draws_B, longest = tokens.draws_B, tokens.longest
            longest = _largest(new_B) if longest is None else longest
            # By row, not by position: candidates share one position.
            draws_T = None if draws_B is None else of_each_row(draws_B, new_B, rows_T)
            after = tokens.next_times_T
            known = (None, mask, times_T, None, after, draws_T, offsets_of(new_B))
            return cls(positions_T, new_B, longest, *known)
        assert tokens.next_times_T is None, "a prefix is encoded by its rows' own times"
        assert tokens.draws_B is None, "a prefix is for inference, without dropout"
        past_B, num_past, past_times_T = _rows_of(prefix)
        join = Join.of(past_B, num_past, new_B, total)
        if times_T is not None:
            assert past_times_T is not None, "the prefix was made without times"
            times_T = join.rows(past_times_T, times_T)
        positions_T = positions_T + past_B[sample_T]
        longest = _largest(new_B if isinstance(prefix, PrefixParts) else join.lengths_B)
        # Parts of a prefix are read where they are: nothing asks for offsets of all rows.
        ends_B = None if isinstance(prefix, PrefixParts) else offsets_of(join.lengths_B)
        known = (offsets_of(new_B), mask, times_T, join)
        return cls(positions_T, join.lengths_B, longest, *known, offsets_B=ends_B)

    def dropped(self, x_TD: Tensor, share: float, site: int) -> Tensor:
        """The rows after dropout at a place of the encoder, where there is dropout."""
        return x_TD if self.draws_T is None else dropout(x_TD, self.draws_T, share, site=site)

    def dropout(self, share: float, site: int) -> Dropout | None:
        """The same as a kernel wants it."""
        return None if self.draws_T is None else kernel_dropout(self.draws_T, share, site=site)

    def bias(self, position_HP: Tensor | None, time_HQ: Tensor | None) -> RelativeBias:
        """The tables, with the times that they are looked up by."""
        return RelativeBias(position_HP, time_HQ, self.times_T, self.query_times_T)


class Pending(NamedTuple):
    """Rows, and what is yet to be added to them: the next block's kernel adds and norms at once."""

    x_TD: Tensor
    added_TD: Tensor | None = None

    def total(self) -> Tensor:
        return self.x_TD if self.added_TD is None else self.x_TD + self.added_TD


def pointwise_by_kernels(config: HstuConfig, x_TD: Tensor, past: Past) -> bool:
    """Whether kernels compute what stands between a block's products: in training alone."""
    channels = 3 if config.kind == "fuxi" else 1
    widest = max(config.dim, channels * config.heads * config.value_dim)
    training = torch.is_grad_enabled() and past is None
    return training and chosen_kernels(x_TD, config.pointwise, widest)


def attend_rows(
    config: HstuConfig,
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    view: View,
    past: Past,
    bias: RelativeBias,
) -> Tensor:
    """(T, H, V) what each row gathers by products of queries and keys, in the form that fits."""
    rule: dict[str, Any] = {
        "norm": config.max_len,
        "scale": config.scale,
        "mask": view.mask,
        "bias": bias,
        "longest": view.longest,
    }
    window = config.max_attention or None
    if isinstance(past, PastParts):
        assert view.query_offsets_B is not None
        assert window is None, "a window is refused where a model is served"
        rows = q_THA, k_THA, v_THV, past.keys, past.values
        return attend_with_past(*rows, view.query_offsets_B, pointers_3B=past.pointers_3B, **rule)
    assert view.offsets_B is not None
    rows = q_THA, k_THA, v_THV, view.offsets_B
    own_time = bias.query_times_T is None
    if not torch.is_grad_enabled() and window is None and own_time:
        return attend(*rows, query_offsets_B=view.query_offsets_B, **rule)
    if view.query_offsets_B is None:
        rule |= {"max_attention": window, "facts": view.facts}
        return train_attention(*rows, form=config.attention, **rule)
    queries = {"query_offsets_B": view.query_offsets_B, "max_attention": window}
    return hstu_attention(*rows, **queries, **rule)


def _rows_of(prefix: Prefix | PrefixParts) -> tuple[Tensor, int, Tensor | None]:
    """How many rows of each sample it has, how many in all, and their times."""
    if isinstance(prefix, Prefix):
        return prefix.lengths_B, prefix.keys[0].shape[0], prefix.times_T
    lengths = [part.shape[1] for part in prefix.keys]
    times_T = None if prefix.times is None else torch.cat(list(prefix.times))
    return torch.tensor(lengths, device=prefix.keys[0].device), sum(lengths), times_T


def _largest(lengths_B: Tensor) -> int:
    return int(lengths_B.max()) if len(lengths_B) else 0
