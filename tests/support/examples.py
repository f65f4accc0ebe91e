"""How many examples a property test draws: every count of the tests is in this table.

`NESTPIPE_EXAMPLES=long` draws twenty times as many, for a nightly run (`make test-long`).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

COUNTS = {
    "few": 25,
    "some": 40,
    "more": 60,
    "default": 100,
    "orders": 100,
    "many": 150,
    "most": 300,
    "bit flips": 200,
    "damage": 1000,
    "restarts": 2,
    "faults": 5,
    "bad rows": 4,
    "crashes": 3,
    "two trainers": 3,
    "fuzz": 12,
}
"""Slow worlds take few; what costs microseconds takes many."""
PROFILES = {"default": 1, "long": 20}


def is_long() -> bool:
    """Whether the profile for a nightly run is in force."""
    return os.environ.get("NESTPIPE_EXAMPLES", "default") == "long"


def num_examples(count: str) -> int:
    """The examples of one kind of test under the profile in force."""
    return COUNTS[count] * PROFILES[os.environ.get("NESTPIPE_EXAMPLES", "default")]


def examples(count: str) -> settings:
    """Decorate a property test with its count."""
    return settings(max_examples=num_examples(count), suppress_health_check=[HealthCheck.too_slow])


def load_profile() -> None:
    """Give every undecorated property test the default count of the profile in force."""
    # No test judges wall-clock time, so a busy machine must not fail a property.
    settings.register_profile("nestpipe", deadline=None, max_examples=num_examples("default"))
    settings.load_profile("nestpipe")
