"""The models on HSTU: `HstuRetriever` predicts the next item, `HstuRanker` scores candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.config import Table, positive
from nestpipe.errors import ConfigError, DataError
from nestpipe.jagged import Jagged, Join, longest_of, rows_within
from nestpipe.kernels.attention.reference import Padding
from nestpipe.models.draws import ItemSampler, draw_state, keep, of_each_row
from nestpipe.models.hstu import Hstu
from nestpipe.models.protocol import Loss, full_precision
from nestpipe.models.sequence import HstuConfig, Prefix, PrefixParts, Tokens

# Shapes: B samples, T rows of all samples together, L positions that predict (padded), M negatives
# of a sample, N items to score, D width

NEGATIVES_SITE = 1 << 20
"""Of draws: which negatives a position takes; the encoder's dropout has the small numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSoftmaxConfig:
    """Negative sampling: how the next item is distinguished from others."""

    num_items: int
    """Items are keys from 1 to this; negatives are drawn among them."""
    negatives: int = 128
    """Drawn per sample and shared by all its positions ..."""
    pool: int = 0
    """... or, above 0: drawn per sample as a pool, of which each position takes each item with
    probability negatives / pool."""
    sampling: Literal["uniform", "log_uniform"] = "uniform"
    """`log_uniform`: small keys more often, for catalogues sorted by popularity; corrected for."""
    normalise: bool = True
    """Compare directions only: vectors and rows are scaled to length 1."""
    temperature: float = 0.05
    """Divisor of the scores; use 1 where `normalise` is off."""
    seed: int = 0
    """Of the negatives."""

    def __post_init__(self) -> None:
        for name in ("num_items", "negatives", "temperature"):
            positive(name, getattr(self, name))
        if self.pool and self.pool < self.negatives:
            raise ConfigError(
                f"pool is {self.pool}, fewer than the {self.negatives} negatives; give more, or 0"
            )

    @property
    def drawn(self) -> int:
        """Items drawn for each sample."""
        return self.pool or self.negatives


class HstuRetriever(nn.Module):
    """Next-item prediction by sampled softmax; its weight is the number of predicted items.

    Reads `sparse["history"]`, oldest item first, keys from 1 to `num_items` or of the catalogue,
    which is saved with the weights; each item but the first is predicted from those before it.
    `dense["sample_id"]` (B,) int64 names a sample (without it, the sum of its keys does): negatives
    are a function of (seed, sample_id), and of `dense["step"]` (B,) int64 where the batch has that
    column, so that another pass over the data can draw others. With time buckets also
    `sparse["timestamps"]`, a whole number for each item; with `time = "next"` also `dense["time"]`
    (B,), that of the held-out item, where there is one.
    """

    catalogue: Tensor | None

    def __init__(
        self,
        config: HstuConfig,
        softmax: SampledSoftmaxConfig,
        catalogue: Tensor | None = None,
    ) -> None:
        """`catalogue` (num_items,) int64, sorted: the items' keys, where they are not 1, 2, ..."""
        super().__init__()
        self.config = config
        self.softmax = softmax
        assert catalogue is None or len(catalogue) == softmax.num_items, "a key for each item"
        self.register_buffer("catalogue", catalogue)
        self.sampler = ItemSampler(softmax.num_items, softmax.sampling, softmax.seed)
        self.encoder = Hstu(config)
        self._copied: tuple[int, Tensor] | None = None

    def tables(self) -> list[Table]:
        """One table, of items."""
        return [Table(name="items", dim=self.config.dim, features=("history", "negatives"))]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        self._check_items(batch.sparse["history"].values)
        negatives_BM = self.negatives(batch)
        lengths_B = torch.full_like(negatives_BM[:, 0], self.softmax.drawn)
        return {
            "history": batch.sparse["history"],
            "negatives": Jagged(negatives_BM.flatten(), lengths_B),
        }

    def _check_items(self, items_T: Tensor) -> None:
        """Refuse items that negatives are never drawn from; on a GPU that would make it wait."""
        if items_T.is_cuda or not len(items_T) or self.catalogue is not None:
            return
        least, most = (int(bound) for bound in torch.aminmax(items_T))
        if least < 1 or most > self.softmax.num_items:
            wrong = least if least < 1 else most
            raise DataError(
                f"a history has item {wrong}, and items are 1 to {self.softmax.num_items:,}; "
                "correct model.num_items, or leave it 0 to take the items of the data"
            )

    def shard_units(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.encoder.blocks)

    def query_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        """The keys that `encode` wants: no negatives."""
        return {"history": batch.sparse["history"]}

    def negatives(self, batch: Batch) -> Tensor:
        """(B, M) the negatives of each sample."""
        drawn_BM = self.sampler.draw_from(draw_state(batch, self.softmax.seed), self.softmax.drawn)
        return drawn_BM if self.catalogue is None else self._keys(drawn_BM.device)[drawn_BM - 1]

    def items(self) -> Tensor:
        """(N,) the keys of all items."""
        if self.catalogue is not None:
            return self.catalogue.cpu()
        return torch.arange(1, self.softmax.num_items + 1)

    def numbers(self, items: Tensor) -> Tensor:
        """The number from 1 of each item in the catalogue; 0 where it is not in it."""
        if self.catalogue is None:
            return torch.where((items > 0) & (items <= self.softmax.num_items), items, 0)
        keys_N = self._keys(items.device)
        place = torch.searchsorted(keys_N, items.contiguous()).clamp_(max=len(keys_N) - 1)
        return torch.where(keys_N[place] == items, place + 1, 0)

    def _keys(self, device: torch.device) -> Tensor:
        """The catalogue on a device: batches are routed on the host and trained on a GPU."""
        assert self.catalogue is not None
        if self.catalogue.device == device:
            return self.catalogue
        version = self.catalogue._version  # loading writes into it
        if self._copied is None or self._copied[0] != version:
            self._copied = (version, self.catalogue.to(device))
        return self._copied[1]

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        vectors_TD = self._vectors(rows, batch)
        # A cosine over a temperature of 0.05 needs more digits than bfloat16 has.
        with torch.autocast(vectors_TD.device.type, enabled=False):
            return self._loss(vectors_TD, rows, batch)

    def _loss(self, vectors_TD: Tensor, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        history = batch.sparse["history"]
        padding = Padding.of(history.offsets, len(history.values), longest_of(history))
        next_BLD = padding.pad(self._direction(rows["history"]))[:, 1:]
        vectors_BLD = padding.pad(vectors_TD)[:, :-1]
        negatives_BMD = self._direction(rows["negatives"])
        negatives_BMD = negatives_BMD.view(batch.size, self.softmax.drawn, self.config.dim)
        positive_BL = (vectors_BLD * next_BLD).sum(2)
        negative_BLM = torch.bmm(vectors_BLD, negatives_BMD.transpose(1, 2))
        taken_BLM = self._taken(batch, padding)
        loss_BL = self._minus_log_chance(
            positive_BL,
            negative_BLM if taken_BLM is None else negative_BLM.masked_fill(~taken_BLM, -math.inf),
            padding.pad(history.values)[:, 1:],
            self.negatives(batch),
        )
        rows_L = torch.arange(1, padding.longest or 1, device=loss_BL.device)
        counted_BL = rows_L[None] < padding.lengths_B[:, None]
        total = torch.where(counted_BL, loss_BL, 0).sum()
        return Loss(total, float((history.known_lengths - 1).clamp(min=0).sum()))

    def _taken(self, batch: Batch, padding: Padding) -> Tensor | None:
        """(B, L, M) which negatives of its sample each position takes; None: all of them."""
        if not self.softmax.pool:
            return None
        history = batch.sparse["history"]
        rows_T = rows_within(history.lengths, len(history.values))
        draws_T = of_each_row(draw_state(batch, self.softmax.seed), history.lengths, rows_T)
        chance = self.softmax.negatives / self.softmax.pool
        taken_TM = keep(draws_T, self.softmax.pool, chance, site=NEGATIVES_SITE)
        return padding.pad(taken_TM)[:, :-1]

    def step_flops(self, batch: Batch) -> Tensor:
        """(B,) of a training step on each sample: products alone, three times those forward."""
        lengths_B = batch.sparse["history"].lengths
        scores_B = (lengths_B - 1).clamp(min=0) * (6.0 * self.config.dim * (1 + self.softmax.drawn))
        return self.encoder.flops(lengths_B, torch.zeros_like(lengths_B)) + scores_B

    def encode(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B, D) what follows the last item of each history; zeros where there is no item."""
        history = batch.sparse["history"]
        vectors_TD = self._vectors(rows, batch)
        nothing_1D = vectors_TD.new_zeros(1, self.config.dim)
        last_B = torch.where(history.lengths > 0, history.offsets[1:] - 1, len(vectors_TD))
        return torch.cat([vectors_TD, nothing_1D]).index_select(0, last_B)

    def score(self, vectors_BD: Tensor, items_ND: Tensor) -> Tensor:
        """(B, N) how well each item, given by its row, follows; higher is better."""
        with torch.autocast(vectors_BD.device.type, enabled=False):
            return vectors_BD @ self._direction(items_ND).T / self.softmax.temperature

    def _vectors(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(T, D) at each item, the direction in which the next one is expected."""
        history = batch.sparse["history"]
        tokens = Tokens(
            history.lengths,
            times_T=own_times(self.config, batch),
            next_times_T=_next_times(batch) if self.config.time == "next" else None,
            draws_B=self.draws(batch),
            longest=longest_of(history),
        )
        return self._direction(self.encoder(rows["history"], tokens))

    def draws(self, batch: Batch) -> Tensor | None:
        """(B,) what dropout follows from, in training."""
        wanted = self.training and self.config.dropout > 0
        return draw_state(batch, self.softmax.seed) if wanted else None

    def _direction(self, x_TD: Tensor) -> Tensor:
        return functional.normalize(x_TD, dim=1) if self.softmax.normalise else x_TD

    def _minus_log_chance(
        self,
        positive_BL: Tensor,
        negative_BLM: Tensor,
        next_BL: Tensor,
        negatives_BM: Tensor,
    ) -> Tensor:
        """(B, L) minus the log-probability of the next item, among itself and the negatives.

        A negative that is the next item itself does not count. Scores are lowered by how often
        an item is drawn, so that items drawn often are not pushed down for that.
        """
        temperature = self.softmax.temperature
        right_BL = positive_BL / temperature - self._log_chance(next_BL).to(positive_BL)
        chance_BM = self._log_chance(negatives_BM).to(positive_BL)
        wrong_BLM = negative_BLM / temperature - chance_BM[:, None]
        is_next_BLM = next_BL[:, :, None] == negatives_BM[:, None]
        wrong_BLM = wrong_BLM.masked_fill(is_next_BLM, float("-inf"))
        scores = torch.cat([right_BL[:, :, None], wrong_BLM], dim=2)
        return torch.logsumexp(scores, dim=2) - right_BL

    def _log_chance(self, items: Tensor) -> Tensor:
        alike = self.softmax.sampling == "uniform" or self.catalogue is None
        return self.sampler.log_chance(items if alike else self.numbers(items).clamp_(min=1))


def own_times(config: HstuConfig, batch: Batch) -> Tensor | None:
    """(T,) when each item of the histories was chosen, where the config wants it."""
    return batch.sparse["timestamps"].values if config.time_buckets else None


def _next_times(batch: Batch) -> Tensor:
    """(T,) when the item after each was chosen; after the last one, the held-out item's time."""
    times = batch.sparse["timestamps"]
    sample_T = torch.repeat_interleave(times.lengths, output_size=len(times.values))
    ends_T = times.offsets[1:][sample_T]
    is_last_T = torch.arange(1, len(sample_T) + 1, device=sample_T.device) == ends_T
    asked_T = batch.dense["time"][sample_T] if "time" in batch.dense else times.values
    return torch.where(is_last_T, asked_T, times.values.roll(-1))


# Shapes: B samples, T rows of all samples together, C candidates of all samples together, D width


class HstuRanker(nn.Module):
    """Scores candidates after a history; none sees another, so none changes another's score.

    Reads `sparse["history"]`, oldest item first, `sparse["candidates"]`, and `sparse["labels"]`:
    lists as long as those of `candidates`, with 1 for a candidate that was liked and 0 for one that
    was not. With time buckets also `sparse["timestamps"]`, a whole number for each item of the
    history, and `dense["time"]` (B,), that of the request.

    The loss is binary cross-entropy, its weight the number of candidates.
    """

    def __init__(self, config: HstuConfig, seed: int = 0) -> None:
        """`seed` is that of dropout."""
        super().__init__()
        if config.time == "next":
            raise ConfigError(
                "time is 'next', which is for retrieval: candidates have the request's time; "
                "set time = 'own'"
            )
        self.config = config
        self.seed = seed
        self.encoder = Hstu(config)
        self.head = nn.Sequential(
            nn.LayerNorm(config.dim),
            nn.Linear(config.dim, config.dim),
            nn.SiLU(),
            nn.Linear(config.dim, 1),
        )

    def tables(self) -> list[Table]:
        """One table, of items."""
        return [Table(name="items", dim=self.config.dim, features=("history", "candidates"))]

    def shard_units(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.encoder.blocks)

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in ("history", "candidates")}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_C = full_precision(self.logits(rows, batch))
        labels_C = batch.sparse["labels"].values.to(logits_C.dtype)
        if labels_C.shape != logits_C.shape:
            raise DataError(
                f"a batch has {len(labels_C)} labels for {len(logits_C)} candidates; "
                "give a label for each"
            )
        total = functional.binary_cross_entropy_with_logits(logits_C, labels_C, reduction="sum")
        return Loss(total, float(len(logits_C)), torch.sigmoid(logits_C.detach()), labels_C)

    def logits(
        self, rows: Mapping[str, Tensor], batch: Batch, prefix: Prefix | PrefixParts | None = None
    ) -> Tensor:
        """(C,) log-odds of each candidate; with a prefix, `history` is only what came after it."""
        history, candidates = batch.sparse["history"], batch.sparse["candidates"]
        join = Join.of(
            history.lengths, len(history.values), candidates.lengths, len(candidates.values)
        )
        dropped = self.training and self.config.dropout > 0 and prefix is None
        tokens = Tokens(
            join.lengths_B,
            candidates.lengths,
            self._times(batch, join),
            draws_B=draw_state(batch, self.seed) if dropped else None,
            longest=longest_of(history, candidates) if prefix is None else None,
        )
        joined_TD = join.rows(rows["history"], rows["candidates"])
        encoded_TD = self.encoder(joined_TD, tokens, prefix)
        return self.head(encoded_TD.index_select(0, join.second_places)).squeeze(1)

    def prefix(
        self, rows: Mapping[str, Tensor], batch: Batch, prefix: Prefix | PrefixParts | None = None
    ) -> Prefix:
        """What can be computed of `history` before the candidates are known."""
        times_T = own_times(self.config, batch)
        tokens = Tokens(batch.sparse["history"].lengths, times_T=times_T)
        return self.encoder.prefix(rows["history"], tokens, prefix)

    def _times(self, batch: Batch, join: Join) -> Tensor | None:
        if not self.config.time_buckets:
            return None
        candidates = batch.sparse["candidates"]
        asked_C = torch.repeat_interleave(
            batch.dense["time"], candidates.lengths, output_size=len(candidates.values)
        )
        return join.rows(batch.sparse["timestamps"].values, asked_C)

    def step_flops(self, batch: Batch) -> Tensor:
        """(B,) of a training step on each sample: products alone, three times those forward."""
        candidates_B = batch.sparse["candidates"].lengths
        head_B = candidates_B * (6.0 * self.config.dim * (self.config.dim + 1))
        return self.encoder.flops(batch.sparse["history"].lengths, candidates_B) + head_B
