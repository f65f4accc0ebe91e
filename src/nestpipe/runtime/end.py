"""The end of the data: known to a run before it starts, or found while it runs."""

from __future__ import annotations


class End:
    """How many batches there are, once that is known; hand it to `run` as `batches`.

    `counts t` calls `found_at(t)` when no rank has a sample in batch t. Every rank learns it from
    the same exchange, so all ranks leave out the same collectives.
    """

    def __init__(self, batches: int | None = None) -> None:
        """`batches`: an upper limit, the same on every rank."""
        self._batches = batches

    def __call__(self) -> int | None:
        return self._batches

    def found_at(self, batch: int) -> None:
        """Batch `batch` and all later ones do not exist."""
        self._batches = batch if self._batches is None else min(batch, self._batches)
