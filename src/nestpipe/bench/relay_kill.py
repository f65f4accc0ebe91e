"""An instance that is killed while it has a ranking in hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nestpipe.bench.relay_service import Behind
from nestpipe.errors import RunError

AFTER = 0.4
UNTIL = 0.8
"""Between these parts of the arrivals it is killed, as soon as it has a ranking in hand."""
LOOK_S = 0.01
BACK_S = 120.0
"""How long an instance may take to be back."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and what followed."""

    instance: str
    in_hand: int
    """Rankings that it had when it was last asked."""
    retries: int | None
    """Rankings that the router asked for at another instance; None: nginx does not say."""
    back: bool
    """Whether it was started again."""


@contextmanager
def killed_under_load(
    service: Behind, name: str, seconds: float, *, tells: bool
) -> Generator[Callable[[], Kill]]:
    """Kill that instance while requests come; after the block, the function says what followed.

    `tells`: the router counts rankings that it had to ask for again.
    """
    ended = threading.Event()
    before = service.retries() if tells else 0.0
    with ThreadPoolExecutor(1) as pool:
        in_hand = pool.submit(_kill_when_busy, service, name, seconds, ended)

        def followed() -> Kill:
            retries = int(service.retries() - before) if tells else None
            return Kill(name, in_hand.result(), retries, _came_back(service, name))

        try:
            yield followed
        finally:
            ended.set()


def _kill_when_busy(service: Behind, name: str, seconds: float, ended: threading.Event) -> int:
    ended.wait(AFTER * seconds)
    in_hand = 0
    for _ in range(round((UNTIL - AFTER) * seconds / LOOK_S)):
        in_hand = int(service.instances[name].stats()["open_rankings"])
        if in_hand or ended.wait(LOOK_S):
            break
    service.started.kill(name)
    return in_hand


def _came_back(service: Behind, name: str) -> bool:
    with suppress(RunError):
        return bool(service.started.heard(rf"{name} is back", BACK_S))
    return False
