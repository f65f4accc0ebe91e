"""What is loaded: instances and a router in this process, set up as an arm says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nestpipe.config import build, positive
from nestpipe.errors import ConfigError
from nestpipe.loadtest.arms import Arm
from nestpipe.models import HstuConfig
from nestpipe.serve.engine.admission import AdmissionControl
from nestpipe.serve.engine.calibration import calibrate, lengths_up_to, warm_up
from nestpipe.serve.engine.cost_model import Costs, Fit, Work
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.model.ranker import HstuRankModel
from nestpipe.serve.routing.router import Router, RouterSettings
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Answer,
    Clock,
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

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
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
            admission = AdmissionControl(settings, Costs(fits), model.kv_bytes, clock)
            instances.append(stack.enter_context(Instance(model, settings, admission, clock)))
        backends = {f"instance-{number}": one for number, one in enumerate(instances)}
        routing = RouterSettings(affinity=affinity, life_s=settings.life_s)
        router = Router(backends, routing, clock)
        yield Several(router, instances)
        router.drain(DRAIN_S)


# The model of a load test: a checkpoint, or random weights of any size.


MakeModel = Callable[[], HstuRankModel]


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomModel:
    """`--random`: what a model without training is to be like."""

    layers: int = 4
    dim: int = 128
    heads: int = 4
    items: int = 10_000
    max_len: int = 4096
    """What attention is divided by, and positions that are told apart."""
    time_buckets: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "items", "max_len"):
            positive(name, getattr(self, name))
        if self.dim % self.heads:
            raise ConfigError(
                f"dim is {self.dim} and heads {self.heads}; give a dim that heads divides"
            )

    @property
    def config(self) -> HstuConfig:
        width = self.dim // self.heads
        return HstuConfig(
            blocks=self.layers,
            heads=self.heads,
            dim=self.dim,
            attention_dim=width,
            value_dim=width,
            max_len=self.max_len,
            time_buckets=self.time_buckets,
        )


def random_model(text: str) -> RandomModel:
    """`layers=4,dim=128` as what it says."""
    assignments = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in assignments if "=" not in part]
    if wrong:
        raise ConfigError(
            f"{wrong[0]!r} says nothing of a random model; write layers=4,dim=128,heads=4"
        )
    return build(RandomModel, asdict(RandomModel()), overrides=assignments)


def model_maker(
    checkpoint: Path | None, random: RandomModel, *, device: str, dtype: str
) -> MakeModel:
    """Makes the same model again and again: each instance has its own."""
    if checkpoint is not None:
        return lambda: HstuRankModel.from_checkpoint(checkpoint, device, dtype)
    return lambda: HstuRankModel.random(random.config, random.items, random.seed, device, dtype)


def measure_costs(
    model: HstuRankModel, longest: int, candidates: int, clock: Clock, short: int, chunk: int
) -> Costs:
    """Time the model at lengths up to the longest, prefixes in chunks as an instance makes them."""
    warm_up(model)
    lengths = lengths_up_to(longest)
    return calibrate(model, lengths, [candidates], clock, short=short, chunk=chunk)
