"""Several instances behind a router: whatever happens, in whatever order, all is as it must be."""

from __future__ import annotations

from collections import Counter

import pytest

from support.serving_world.mutants import MUTANTS
from support.serving_world.world import World

SEEDS = 500
BLOCKS = 5
TRIES = 200
"""Worlds that may overlook a broken rule before one of them has to see it."""

REACHED = {
    *("answer hbm_hit", "answer late_hit", "answer dram_hit"),
    *("answer miss_full", "answer miss_cut", "answer ShedError"),
    *("signal admitted", "signal already_cached", "signal not_at_risk", "signal failed"),
    *("signal rejected_footprint", "signal rejected_load", "signal rejected_window"),
    *("dies", "restart", "join", "leave", "has closed", "broken", "swap"),
    *("reloads", "offloads", "early_batches", "wasted_prefixes", "abandoned_fills", "discarded"),
    *("failed_fills", "failed_reloads", "failed_offloads", "failed_batches"),
    *("host_evicted", "host_expired"),
}
"""What every block of worlds has to come across, or it shows too little."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_any_order_of_events_in_the_whole_service(block: int):
    seen: Counter[str] = Counter()
    for seed in range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS):
        seen += World(seed).play().seen
    assert not [name for name in sorted(REACHED) if not seen[name]]


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_world_without_a_rule_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch):
    leave_out, said = MUTANTS[rule]
    leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=said) as caught:
        play_until_caught()
    story = "\n".join(caught.value.__notes__)
    assert "signals" in story
    assert "python -m support.serving_world.world" in story


def play_until_caught() -> None:
    for seed in range(TRIES):
        World(seed).play()


def test_a_seed_tells_the_same_story_twice():
    first, second = World(17).play(), World(17).play()
    assert len(first.story) > 100
    assert first.story == second.story
