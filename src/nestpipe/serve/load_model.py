"""The model of a load test: a checkpoint, or random weights of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from nestpipe.config import build, override, positive
from nestpipe.errors import ConfigError
from nestpipe.models import HstuConfig
from nestpipe.serve.calibrate import calibrate, lengths_up_to
from nestpipe.serve.costs import Costs
from nestpipe.serve.model import HstuRankModel
from nestpipe.serve.types import Clock
from nestpipe.serve.warm_up import warm_up

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
    return build(RandomModel, override(asdict(RandomModel()), assignments))


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
