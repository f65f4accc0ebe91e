"""Host memory for prefixes: pieces never overlap, and come back by themselves."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.errors import CapacityError
from nestpipe.serve.engine.kv_memory import GRAIN, HostArena, give_arena, hand_over_arena
from support.examples import examples

SIZES = st.integers(0, 6 * GRAIN)


@examples("few")
@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=60))
def test_pieces_never_overlap_and_all_memory_comes_back(steps: list[tuple[bool, int]]):
    arena = HostArena(32 * GRAIN, pinned=False)
    held: list[tuple[int, torch.Tensor]] = []
    for number, (give_back, size) in enumerate(steps):
        if give_back and held:
            held.pop(size % len(held))
        else:
            try:
                held.append((number % 251, arena.empty((size,), torch.uint8)))
            except CapacityError:
                assert arena.free_bytes < 12 * GRAIN  # not all in one piece
                continue
            held[-1][1].fill_(number % 251)
        assert all(bool((tensor[::97] == value).all()) for value, tensor in held)
    assert all(bool((tensor == value).all()) for value, tensor in held)
    held.clear()
    gc.collect()
    assert arena.free_bytes == arena.num_bytes
    assert len(arena.empty((arena.num_bytes,), torch.uint8)) == arena.num_bytes


def test_a_view_keeps_its_piece():
    arena = HostArena(8 * GRAIN, pinned=False)
    layer = arena.empty((4, GRAIN), torch.bfloat16)[2]
    gc.collect()
    assert arena.free_bytes == arena.num_bytes - 8 * GRAIN
    del layer
    assert arena.free_bytes == arena.num_bytes


def test_what_does_not_fit_is_said_in_one_sentence():
    arena = HostArena(8 * GRAIN, pinned=False)
    with pytest.raises(CapacityError, match=r"serve\.host_mb"):
        arena.empty((2 * arena.num_bytes,), torch.uint8)


class Model:
    arena: HostArena | None = None
    wants_arena = False


def test_a_model_on_the_host_needs_none():
    model = Model()
    give_arena(model, 100)
    assert model.arena is None


def test_another_model_goes_on_with_the_same_memory():
    old, new = Model(), Model()
    old.arena, new.wants_arena = HostArena(GRAIN, pinned=False), True
    hand_over_arena(old, new)
    assert new.arena is old.arena
