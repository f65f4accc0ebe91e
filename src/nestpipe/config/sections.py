"""Settings that several parts share: access to a service, tables, learning rates.

A service accepts calls from this machine alone, or from callers with the token. The learning rate
is a function of the step alone: a resumed run, or one with another plan, has the same rate.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from nestpipe.config.load import fit_leaf, fraction, known_types, not_negative, positive
from nestpipe.errors import ConfigError

TOKEN_VARIABLE = "NESTPIPE_TOKEN"
SHORTEST_TOKEN = 16


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token of a file, or else of the environment; never of the command line."""
    if file is None:
        token = environment.get(TOKEN_VARIABLE)
        return None if token is None else _checked(token.strip(), TOKEN_VARIABLE)
    try:
        return _checked(file.read_text(encoding="ascii").strip(), f"the token of '{file}'")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"cannot read a token from '{file}'; name a readable text file") from None


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{where} is too short or not plain text; use {SHORTEST_TOKEN} characters or more, for "
            "example of `openssl rand -hex 32`"
        )
    return token


def require_token(host: str, token: str | None, instead: str = "--host 127.0.0.1") -> None:
    """Refuse to be reachable from outside without one; `instead` is what to ask for then."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"'{host}' can be reached by other machines and there is no token; set "
            f"{TOKEN_VARIABLE} or --token-file, or use {instead}"
        )


def is_authorised(header: bytes | None, token: str | None) -> bool:
    """Whether `Authorization: Bearer ...` carries the token; as slow for every wrong one."""
    if token is None:
        return True
    scheme, _, given = (header or b"").partition(b" ")
    right = hmac.compare_digest(given.strip(), token.encode())
    return right and scheme.lower() == b"bearer"


Pooling = Literal["none", "sum", "mean"]
RowDtype = Literal["float32", "bfloat16", "float16"]
MOST_FLOAT16_STD = 10_000
"""A new row's values are at most 5.2 times as large."""
Placement = Literal["rows", "table"]
Eviction = Literal["none", "lru", "lfu", "norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPolicy:
    """Which keys of a table get a row, and which rows leave again.

    Decisions fall at the boundaries of `run.lifecycle_every`. They follow from the batches trained
    so far alone: no plan, number of ranks or restart changes them.
    """

    max_rows: int = 0
    """Capacity in rows, over all workers; 0: limited by memory alone."""
    max_bytes: int = 0
    """Capacity in bytes: weights, optimizer state and 128 bytes of index per row; 0: no limit."""
    evict: Eviction = "none"
    """Eviction at capacity: rows used longest ago (`lru`), in the fewest batches (`lfu`), or with
    the smallest weights (`norm`); `none`: no eviction, and a full table is an error."""
    ttl: int = 0
    """Time to live: evict rows that no batch has used for this many steps; 0: never."""
    admit_count: int = 1
    """Batches that must use a key before it gets a row; until then it reads as its initial value
    and its gradients are dropped. 1: at first use."""
    admit_probability: float = 1.0
    """The share of keys that ever get a row, drawn by the seed and the key."""
    admit_candidates: int = 1_048_576
    """Keys below `admit_count` whose counts are kept after a boundary, those used last."""

    def __post_init__(self) -> None:
        fit_leaf(Eviction, self.evict, "evict")
        for name in ("max_rows", "max_bytes", "ttl"):
            not_negative(name, getattr(self, name))
        for name in ("admit_count", "admit_candidates"):
            positive(name, getattr(self, name))
        fraction("admit_probability", self.admit_probability)
        if self.evict != "none" and not (self.max_rows or self.max_bytes):
            raise ConfigError(
                f"evict is {self.evict!r} but there is no capacity; set max_rows or max_bytes"
            )

    @property
    def evicts(self) -> bool:
        """Whether rows ever leave."""
        return self.evict != "none" or self.ttl > 0

    @property
    def selects(self) -> bool:
        """Whether some keys get no row, or get it later."""
        return self.admit_count > 1 or self.admit_probability < 1

    @property
    def keeps_to_limit(self) -> bool:
        """Whether a full table is not an error: rows are evicted, or wait until they fit."""
        return self.evict != "none" or self.admit_count > 1

    @property
    def has_lifecycle(self) -> bool:
        return self.evicts or self.selects


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(RowPolicy):
    """A table of rows that appear on first use; its keys are any 64-bit integers."""

    name: str
    """The table's name in rows and checkpoints."""
    dim: int
    """Width of a row."""
    features: tuple[str, ...] = ()
    """Features of `sparse_keys` that look rows up here; by default the one of the same name."""
    pooling: Pooling = "none"
    """`none`: a row per key; `sum`, `mean`: per sample the sum or the mean of its rows."""
    init_std: float = 0.01
    """Spread of a new row's values, drawn from a normal distribution."""
    dtype: RowDtype = "float32"
    """How weights are stored; sums, gradients and optimizer state are float32. float16 has more
    digits than bfloat16, and ends at 65,504: see `run.non_finite`."""
    placement: Placement = "rows"
    """`rows`: every row has a worker of its own, so a table may be larger than any of them;
    `table`: one worker keeps all rows, which is less traffic for pooled features of small tables.
    """
    lr: float = 0.0
    """Learning rate of its rows; 0: that of all rows."""
    trainable: bool = True
    """Off: rows are read-only; none is updated or inserted."""

    def __post_init__(self) -> None:
        known_types(self, f" of table {self.name!r}")
        # `super()` does not know a class with slots.
        RowPolicy.__post_init__(self)
        if not self.name.isidentifier():
            raise ConfigError(f"a table cannot be called {self.name!r}; use letters, digits and _")
        positive("dim", self.dim)
        not_negative("init_std", self.init_std)
        if self.dtype == "float16" and self.init_std > MOST_FLOAT16_STD:
            raise ConfigError(
                f"init_std of table {self.name!r} is {self.init_std}, but float16 ends at 65,504; "
                f"set {MOST_FLOAT16_STD:,} or less, or dtype = 'bfloat16'"
            )
        not_negative("lr", self.lr)
        if self.has_lifecycle and not self.trainable:
            raise ConfigError(
                f"table {self.name!r} is frozen and has a row policy, but its rows neither come "
                "nor go; leave it out of lifecycle.tables, or train it"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (self.name,)


ScheduleName = Literal["constant", "cosine", "step"]


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """How a learning rate changes over a run, and which tables have a rate of their own."""

    schedule: ScheduleName = "constant"
    """What the rate does after warm-up: `constant`; `cosine`, down to `final` in `decay_steps`;
    `step`, times `decay` after every `decay_steps`."""
    warmup_steps: int = 0
    """Batches of linear warm-up; the last of them has the rate `lr`."""
    decay_steps: int = 0
    """Batches of a cosine, or between two steps, after warm-up."""
    decay: float = 0.1
    """step: factor of the rate."""
    final: float = 0.0
    """cosine: the fraction of `lr` at the end and afterwards."""
    rates: tuple[str, ...] = ()
    """Other rates by name, such as `["user_*=0.01"]`; the first pattern that matches counts."""

    def __post_init__(self) -> None:
        known_types(self)
        not_negative("warmup_steps", self.warmup_steps)
        not_negative("decay_steps", self.decay_steps)
        positive("decay", self.decay)
        fraction("final", self.final)
        if self.schedule != "constant" and not self.decay_steps:
            raise ConfigError(
                f"decay_steps is 0 and schedule {self.schedule!r}; say in how many batches the "
                "rate falls"
            )
        rates_of(self.rates)

    def factor(self, step: int) -> float:
        """The rate of a step, counted from 1, as a multiple of `lr`."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        done = step - 1 - self.warmup_steps
        if self.schedule == "cosine":
            part = min(done, self.decay_steps) / self.decay_steps
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * part)) / 2
        return self.decay ** (done // self.decay_steps) if self.schedule == "step" else 1.0


def rates_of(rates: Iterable[str]) -> dict[str, float]:
    """The patterns of `pattern=rate`, with their rates."""
    found: dict[str, float] = {}
    for text in rates:
        pattern, equals, number = text.partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not (pattern.strip() and equals and 0 < rate < math.inf):
            raise ConfigError(
                f"rates has {text!r}; write a name or pattern and a rate above 0, as in "
                "'user_*=0.01'"
            )
        found[pattern.strip()] = rate
    return found


def first_match(patterns: Mapping[str, float], name: str) -> float | None:
    """The value of the first pattern that matches the name, or None."""
    return next((value for p, value in patterns.items() if fnmatchcase(name, p)), None)


def refuse_idle(key: str, patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    """Refuse a pattern that matches nothing: it is a misspelling, and would have no effect."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            some = ", ".join(known[:6]) + (", ..." if len(known) > 6 else "")
            raise ConfigError(f"{key} has {pattern!r}, which fits no {what}; there are {some}")
