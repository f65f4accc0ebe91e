"""Python's garbage collector at times of our own choosing.

Left alone it starts in the middle of some op, on one rank at a time, and all ranks wait for it.
"""

# pyright: strict
from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

EVERY_BATCHES = 32


@contextmanager
def collected_by_hand() -> Generator[None]:
    """Inside, the collector runs only when `between_batches` lets it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def between_batches(batch: int) -> None:
    """Collect what young garbage there is, every so many batches, the same ones on every rank."""
    if batch % EVERY_BATCHES == EVERY_BATCHES - 1:
        gc.collect(1)
