"""A memory of the last batches: bounded however long a run is."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class LastBatches(Generic[T]):
    """What several lanes note about each batch; batches too far behind the newest are dropped."""

    def __init__(self, batches: int) -> None:
        assert batches > 0, f"cannot keep {batches} batches"
        self._batches = batches
        self._newest = -1
        self._of_batch: dict[int, list[T]] = {}
        self._lock = threading.Lock()

    def add(self, batch: int, item: T) -> None:
        with self._lock:
            if batch > self._newest:
                self._newest = batch
                self._drop()
            if batch > self._newest - self._batches:
                self._of_batch.setdefault(batch, []).append(item)

    def all(self) -> list[T]:
        with self._lock:
            return [item for items in self._of_batch.values() for item in items]

    def clear(self) -> None:
        with self._lock:
            self._of_batch, self._newest = {}, -1

    def _drop(self) -> None:
        for old in [b for b in self._of_batch if b <= self._newest - self._batches]:
            del self._of_batch[old]
