"""How a batch is cut into micro-batches: how many samples each gets, and which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.batch import Batch
from nestpipe.data.clustering import How, micro_batches
from nestpipe.models.protocol import RecModel


@dataclass(frozen=True, slots=True)
class Cut:
    """The same for every batch of a run."""

    count: int
    how: How = "contiguous"
    first: float = 1.0
    last: float = 1.0
    """Sizes of the first and the last micro-batch over that of those in the middle."""

    def of(self, batch: Batch, model: RecModel, table_of: Mapping[str, str]) -> list[Batch]:
        """The micro-batches; `table_of` says which features share keys."""
        if self.count == 1:
            return [batch]
        sizes = micro_sizes(batch.size, self.count, self.first, self.last)
        if self.how == "contiguous":
            return batch.split(sizes)
        # Keys that a model draws at random for each sample only blur who belongs together.
        keys = getattr(model, "query_keys", model.sparse_keys)(batch)
        return micro_batches(batch, keys, sizes, self.how, table_of=table_of)


def micro_sizes(total: int, count: int, first: float = 1.0, last: float = 1.0) -> list[int]:
    """Samples of each micro-batch: at the ends `first` and `last` times those in the middle."""
    weights = [1.0] * count
    weights[0], weights[-1] = first, last
    due = [total * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in due]
    # What rounding left over goes where it is missed most, earlier ones first.
    order = sorted(range(count), key=lambda i: (sizes[i] - due[i], i))
    for i in order[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
