"""The settings of a load test: requests, arrivals, users, and how they are served.

An arm is one way to serve the same requests, as data. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from nestpipe.config import build, fraction, not_negative, positive
from nestpipe.errors import ConfigError
from nestpipe.serve.types import ServeSettings

TOLERANCE = 0.05
"""How close a search comes to the true value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSettings:
    """Open-loop requests: arrivals do not wait for earlier answers."""

    rate: float = 50.0
    """Requests per second on average; gaps between them are exponential (Poisson)."""
    seconds: float = 20.0
    """How long requests arrive."""
    warmup_s: float = 0.0
    """Requests that arrive before this are sent, but not measured."""
    users: int = 1_000_000
    """Number of users."""
    popularity: float = 0.7
    """Zipf exponent of the users' popularity; 0: uniform. With 1 one request in ten is of the same
    user."""
    return_share: float = 0.5
    """Chance that a visit is followed by another of the same user: it sets the rate of reuse."""
    return_median_s: float = 5.0
    """Median time between such visits."""
    return_spread: float = 1.0
    """Standard deviation of the logarithm of that time."""
    return_tail: Literal["log_normal", "pareto"] = "log_normal"
    """The distribution of that time."""
    length: int = 1024
    """Events of a history; the median of them where they differ."""
    length_spread: float = 0.0
    """Standard deviation of the logarithm of the length (log-normal); 0: all alike."""
    most_length: int = 16_384
    """Longest history."""
    short: int = 64
    """The newest of them, which come with the ranking only."""
    new_events: int = 2
    """Events that a user has more at each visit."""
    grow_by: int = 256
    """Events that move from the short to the long history at a time."""
    candidates: int = 128
    """Candidates of a request."""
    retrieval_ms: float = 60.0
    """Mean time of retrieval, between the signal ..."""
    preprocess_ms: float = 40.0
    """... and pre-processing, after which the ranking follows."""
    delay_jitter: float = 0.2
    """Standard deviation of both times over their mean."""
    items: int = 10_000
    """Items that histories and candidates are made of: 1 to this."""
    times: bool = False
    """Whether events have times, for models that read them."""
    seed: int = 0
    """The same seed makes the same requests."""

    def __post_init__(self) -> None:
        for name in ("rate", "seconds", "users", "return_median_s", "grow_by", "items"):
            positive(name, getattr(self, name))
        for name in ("length", "most_length", "short", "candidates"):
            positive(name, getattr(self, name))
        for name in ("warmup_s", "popularity", "return_spread", "length_spread", "new_events"):
            not_negative(name, getattr(self, name))
        for name in ("retrieval_ms", "preprocess_ms", "delay_jitter", "seed"):
            not_negative(name, getattr(self, name))
        fraction("return_share", self.return_share)
        if self.length <= self.short:
            raise ConfigError(
                f"length is {self.length} and its newest {self.short} events are the short "
                f"history; give a length above {self.short} or set workload.short"
            )
        if self.length > self.most_length:
            raise ConfigError(
                f"length is {self.length}, but most_length {self.most_length}; raise most_length"
            )
        if self.warmup_s >= self.seconds:
            raise ConfigError(
                f"warmup_s is {self.warmup_s} and all ends after {self.seconds} s; "
                "leave some seconds to measure"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """What `--set serve.KEY=VALUE` and `--set workload.KEY=VALUE` can change."""

    serve: ServeSettings = field(default_factory=ServeSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)


def check_tolerance(tolerance: float) -> None:
    """Refuse tolerances that are not above 0 and at most 1."""
    if not 0 < tolerance <= 1:
        raise ConfigError(f"tolerance is {tolerance:g}; give a number above 0, and at most 1")


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to serve the same requests."""

    letter: str
    name: str
    about: str
    changes: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the instances that differ from the user's."""
    capped: bool = False
    """Only the newest `cut_length` events of each history are sent."""
    uncut: bool = False
    """No history is ever cut, however late the answer."""
    scattered: bool = False
    """Signal and ranking each go to an instance at random."""
    remote: bool = False
    """Host memory is as far as another machine: an injected delay."""

    def settings(self, base: ServeSettings) -> ServeSettings:
        """The settings of the instances in this arm."""
        changes = dict(self.changes)
        if self.uncut:
            changes["cut_length"] = base.max_events
        if changes.get("host_mb") is None and base.host_mb == 0:
            raise ConfigError(
                f"arm {self.letter} ({self.name}) needs host memory and serve.host_mb is 0; "
                "set it above 0 or leave this arm out"
            )
        return build(ServeSettings, {**asdict(base), **changes})

    def cap(self, base: ServeSettings) -> int | None:
        """The longest history that is sent, where there is one."""
        return base.cut_length if self.capped else None


_NO_HOST = {"host_mb": 0.0}
_INLINE = {"relay": False, **_NO_HOST}

ARMS = {
    arm.letter: arm
    for arm in (
        Arm("A", "inline capped", "every history cut to cut_length", _INLINE, capped=True),
        Arm("B", "inline full", "every history whole, computed at once", _INLINE, uncut=True),
        Arm("C", "relay", "prefixes in device memory only", _NO_HOST),
        Arm("D", "relay + host", "and in host memory for those who return"),
        Arm(
            "E",
            "no admission control",
            "as C, and everyone is prepared",
            {**_NO_HOST, "admission": False},
        ),
        Arm("F", "no affinity", "as C, and each leg to any instance", _NO_HOST, scattered=True),
        Arm("G", "remote host", "as D, host memory 5 GB/s and 1 ms away (emulated)", remote=True),
        Arm("H", "no single-flight", "as D, the same work may run twice", {"single_flight": False}),
        Arm("I", "host without relay", "as D, but signals are ignored", {"relay": False}),
    )
}


def arms_of(text: str) -> list[Arm]:
    """`A,B,D` as arms."""
    letters = [letter.strip().upper() for letter in text.split(",")]
    for letter in letters:
        if letter not in ARMS:
            known = ", ".join(f"{arm.letter} {arm.name}" for arm in ARMS.values())
            raise ConfigError(f"there is no arm {letter!r}; choose from: {known}")
    if len(set(letters)) < len(letters):
        raise ConfigError(f"arms are {text!r}, one of them twice; name each once")
    return [ARMS[letter] for letter in letters]
