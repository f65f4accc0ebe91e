"""Memory that grows is pinned piece by piece, each once, and given back."""

import pytest

from nestpipe.kernels import host_memory as pinned
from nestpipe.kernels.host_memory import PinnedMemory

PIECES = [(1000, 10), (2000, 20), (3000, 30)]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the system holds as pinned; it refuses pieces of 30 bytes and more."""
    held: dict[int, int] = {}

    def register(address: int, size: int) -> int:
        assert address not in held, "pinned twice"
        if size >= 30:
            return 1
        held[address] = size
        return 0

    def unregister(address: int) -> int:
        del held[address]
        return 0

    monkeypatch.setattr(pinned, "_register", register)
    monkeypatch.setattr(pinned, "_unregister", unregister)
    return held


def test_only_what_came_since_is_pinned(system: dict[int, int]):
    memory = PinnedMemory()
    assert memory.extend(lambda first: PIECES[first:1])
    assert system == {1000: 10}
    assert memory.extend(lambda first: PIECES[first:2])
    assert memory.extend(lambda first: PIECES[first:2])
    assert system == {1000: 10, 2000: 20}
    memory.close()
    memory.close()
    assert system == {}


def test_a_refusal_is_remembered_and_the_rest_given_back(system: dict[int, int]):
    memory = PinnedMemory()
    assert not memory.extend(lambda first: PIECES[first:])
    assert system == {1000: 10, 2000: 20}
    assert not memory.extend(lambda first: pytest.fail("it has refused"))
    memory.close()
    assert system == {}
