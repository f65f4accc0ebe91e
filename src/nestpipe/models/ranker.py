"""`HstuRanker`: how likely a user is to like each of some candidates, given the history."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.config import Table
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged, Join
from nestpipe.models.hstu import Hstu, HstuConfig, Prefix, PrefixParts, Tokens
from nestpipe.models.protocol import Loss

# Shapes: B samples, T rows of all samples together, C candidates of all samples together, D width


class HstuRanker(nn.Module):
    """Scores candidates after a history; none sees another, so none changes another's score.

    Reads `sparse["history"]`, oldest item first, `sparse["candidates"]`, and `sparse["labels"]`:
    lists as long as those of `candidates`, with 1 for a candidate that was liked and 0 for one that
    was not. With time buckets also `sparse["times"]`, a whole number for each item of the
    history, and `dense["time"]` (B,), that of the request.

    The loss is binary cross-entropy, its weight the number of candidates.
    """

    def __init__(self, config: HstuConfig) -> None:
        super().__init__()
        self.config = config
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

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in ("history", "candidates")}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        logits_C = self.logits(rows, batch)
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
        tokens = Tokens(join.lengths_B, candidates.lengths, self._times(batch, join))
        joined_TD = join.rows(rows["history"], rows["candidates"])
        encoded_TD = self.encoder(joined_TD, tokens, prefix)
        return self.head(encoded_TD.index_select(0, join.second_places)).squeeze(1)

    def prefix(
        self, rows: Mapping[str, Tensor], batch: Batch, prefix: Prefix | PrefixParts | None = None
    ) -> Prefix:
        """What can be computed of `history` before the candidates are known."""
        times_T = batch.sparse["times"].values if self.config.time_buckets else None
        tokens = Tokens(batch.sparse["history"].lengths, times_T=times_T)
        return self.encoder.prefix(rows["history"], tokens, prefix)

    def _times(self, batch: Batch, join: Join) -> Tensor | None:
        if not self.config.time_buckets:
            return None
        candidates = batch.sparse["candidates"]
        asked_C = torch.repeat_interleave(
            batch.dense["time"], candidates.lengths, output_size=len(candidates.values)
        )
        return join.rows(batch.sparse["times"].values, asked_C)
