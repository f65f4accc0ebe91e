"""Python's own habits, for the time of a run: when it collects garbage, how it shares its lock."""

# pyright: strict
from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

COLLECT_EVERY = 32
"""Batches between two collections."""
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter from another lane's."""


@contextmanager
def quiet_interpreter() -> Generator[None]:
    """Inside, garbage is collected by `between_batches` alone, and lanes wait less for each other.

    Left alone the collector starts in the middle of some op, on one rank at a time, and all ranks
    wait for it.
    """
    collecting, switch_s = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        if collecting:
            gc.enable()


def between_batches(batch: int) -> None:
    """Collect what young garbage there is, every so many batches, the same ones on every rank."""
    if batch % COLLECT_EVERY == COLLECT_EVERY - 1:
        gc.collect(1)
