"""How many examples a property test draws: every count of the tests is in this table.

`NESTPIPE_EXAMPLES=long` draws many more, for a nightly run (`make test-long`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, settings

COUNTS = {
    "few": (15, 500),
    "some": (25, 800),
    "more": (30, 1200),
    "default": (60, 2000),
    "many": (80, 3000),
    "most": (120, 6000),
    "orders": (16, 2000),
    "orders apart": (8, 1200),
    "sets of edges": (10, 800),
    "edges alike": (1, 1000),
    "bit flips": (200, 4000),
    "damage": (1000, 20000),
    "restarts": (2, 40),
    "faults": (5, 100),
    "bad rows": (4, 80),
    "crashes": (3, 60),
    "two trainers": (3, 60),
    "fuzz": (12, 240),
}
"""In `make test`, and in the long profile. Slow worlds take few; what costs microseconds, many."""
PROFILES = ("default", "long")
Case = TypeVar("Case")


def is_long() -> bool:
    """Whether the profile for a nightly run is in force."""
    return PROFILES.index(os.environ.get("NESTPIPE_EXAMPLES", "default")) == 1


def num_examples(count: str) -> int:
    """The examples of one kind of test under the profile in force."""
    return COUNTS[count][is_long()]


def every(share: int, cases: Sequence[Case]) -> list[Case]:
    """One of so many cases, chosen once for all; every case in the long profile."""
    if is_long():
        return list(cases)
    chosen = random.Random(len(cases)).sample(range(len(cases)), -(-len(cases) // share))
    return [cases[number] for number in sorted(chosen)]


def examples(count: str) -> settings:
    """Decorate a property test with its count."""
    return settings(max_examples=num_examples(count), suppress_health_check=[HealthCheck.too_slow])


def load_profile() -> None:
    """Give every undecorated property test the default count of the profile in force."""
    # No test judges wall-clock time, so a busy machine must not fail a property.
    settings.register_profile("nestpipe", deadline=None, max_examples=num_examples("default"))
    settings.load_profile("nestpipe")
