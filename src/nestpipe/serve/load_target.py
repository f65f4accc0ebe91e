"""What is loaded: instances and a router in this process, set up as an arm says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from nestpipe.serve.costs import Costs, Fit, Work
from nestpipe.serve.instance import Instance
from nestpipe.serve.load_arms import Arm
from nestpipe.serve.router import Router, RouterSettings
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.totals import totals
from nestpipe.serve.trigger import Trigger
from nestpipe.serve.types import (
    KV,
    Answer,
    Clock,
    Outcome,
    PrefixItem,
    RankItem,
    RankModel,
    RankRequest,
    Scores,
    Signal,
)

REMOTE_GB_PER_S = 5.0
REMOTE_MS = 1.0
"""What fetching from another machine is taken to cost."""
DRAIN_S = 10.0


class EmulatedRemoteFetch:
    """A model whose host memory seems to be on another machine: each reload is delayed.

    An emulation: nothing goes through a network; the thread that reloads waits instead.
    """

    def __init__(self, model: RankModel, wait: Callable[[float], object] | None = None) -> None:
        self._model = model
        self._wait = wait or threading.Event().wait

    @property
    def version(self) -> str:
        return self._model.version

    @property
    def dtype(self) -> str:
        return self._model.dtype

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        return self._model.prefix(items)

    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        return self._model.rank(items)

    def kv_bytes(self, length: int) -> int:
        return self._model.kv_bytes(length)

    def to_host(self, kv: KV) -> KV:
        return self._model.to_host(kv)

    def to_device(self, kv: KV) -> KV:
        self._wait(remote_fit(Fit()).at(kv.num_bytes) / 1e3)
        return self._model.to_device(kv)


def remote_fit(local: Fit) -> Fit:
    """The time of a reload with the emulated fetch before it."""
    ms_per_byte = 1e3 / (REMOTE_GB_PER_S * 1e9)
    return replace(local, base=local.base + REMOTE_MS, n=local.n + ms_per_byte)


class Several:
    """A router and its instances as one service whose counters are those of all together."""

    def __init__(self, router: Router, instances: Sequence[Instance]) -> None:
        self._router = router
        self._instances = instances

    def prefetch(self, signal: Signal) -> Outcome:
        return self._router.prefetch(signal)

    def rank(self, request: RankRequest) -> Future[Answer]:
        return self._router.rank(request)

    def stats(self) -> dict[str, float]:
        together = totals(instance.stats() for instance in self._instances)
        return {**together, **self._router.stats()}

    def drain(self, timeout_s: float) -> bool:
        return self._router.drain(timeout_s)


@contextmanager
def open_arm(
    arm: Arm, base: ServeSettings, models: Sequence[RankModel], costs: Costs, clock: Clock
) -> Generator[Several]:
    """An instance per model, all of them cold, behind a router."""
    settings = arm.settings(base)
    fits = dict(costs.fits)
    if arm.remote:
        models = [EmulatedRemoteFetch(model) for model in models]
        fits[Work.RELOAD] = remote_fit(fits[Work.RELOAD])
    affinity = "random" if arm.scattered else "user"
    with ExitStack() as stack:
        instances: list[Instance] = []
        for model in models:
            trigger = Trigger(settings, Costs(fits), model.kv_bytes, clock)
            instances.append(stack.enter_context(Instance(model, settings, trigger, clock)))
        backends = {f"instance-{number}": one for number, one in enumerate(instances)}
        routing = RouterSettings(affinity=affinity, life_s=settings.life_s)
        router = Router(backends, routing, clock)
        yield Several(router, instances)
        router.drain(DRAIN_S)
