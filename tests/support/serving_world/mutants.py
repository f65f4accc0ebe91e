"""Ways to break serving, one rule each: a world that does not see them shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from nestpipe.serve.engine.kv_cache import Cache
from nestpipe.serve.engine.kv_memory import DevicePool, Entry, HostEntry, HostTier, KVSource, Need
from nestpipe.serve.engine.state import EngineState
from nestpipe.serve.http.router import _RoutedRanking
from nestpipe.serve.types import History, PrefixKey
from support.serving_world.turns import Change

Mutant = Callable[[pytest.MonkeyPatch], None]


def _keys_without(**fields: object) -> Mutant:
    real = PrefixKey.of

    def of(user: str, history: History, version: str, dtype: str) -> PrefixKey:
        return replace(real(user, history, version, dtype), **fields)  # pyright: ignore

    return lambda patch: patch.setattr(PrefixKey, "of", of)


def _after(owner: type, name: str, then: Callable[..., object]) -> Mutant:
    """The method as it is, and something more after it."""
    real = getattr(owner, name)

    def both(self: object, *args: object, **named: object) -> object:
        result = real(self, *args, **named)
        then(self, *args)
        return result

    return lambda patch: patch.setattr(owner, name, both)


def _instead(owner: type, name: str, act: object) -> Mutant:
    return lambda patch: patch.setattr(owner, name, act)


def _reserve_without_bound(device_pool: DevicePool, need: Need, source: KVSource) -> Entry:
    entry = Entry(need, source)
    device_pool._entries.setdefault(need.key, []).append(entry)
    device_pool.num_bytes += need.num_bytes
    return entry


def _use_uncounted(cache: Cache, entry: Entry) -> None:
    cache.device_pool.busy(entry)
    entry.used = True


def _fail_at_once(ranking: _RoutedRanking, member: str, fault: BaseException) -> None:
    ranking._fail(fault)


@dataclass(frozen=True, slots=True, eq=False)
class _KeyOfAnyVersion(PrefixKey):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixKey) and _but_version(self) == _but_version(other)

    def __hash__(self) -> int:
        return hash(_but_version(self))


def _but_version(key: PrefixKey) -> tuple[object, ...]:
    return key.user, key.length, key.events, key.dtype


MUTANTS: dict[str, tuple[Mutant, str]] = {
    "the version in the key": (
        lambda patch: patch.setattr(PrefixKey, "of", _KeyOfAnyVersion.of),
        "wrong scores",
    ),
    "the events in the key": (_keys_without(events=""), "wrong scores"),
    "user and events in the key": (_keys_without(user="", events=""), "wrong scores"),
    "single flight": (
        _after(Cache, "__init__", lambda cache, *_: setattr(cache, "single_flight", False)),
        "makes a prefix twice",
    ),
    "an end of promises": (
        _instead(DevicePool, "promise", lambda *_: None),
        "keeps device memory for nobody",
    ),
    "a window before the end": (
        _after(Cache, "_promise", lambda cache, entry, now: setattr(entry, "promises", 0)),
        "has freed .* which was promised",
    ),
    "counted readers": (
        _instead(Cache, "_use", _use_uncounted),
        "reads a prefix that has been freed|keeps device memory for nobody",
    ),
    "one release for one reader": (
        _after(Cache, "released", lambda cache, entry: setattr(entry, "users", entry.users - 1)),
        "is freed while it is needed|reads a prefix that has been freed|device memory for nobody",
    ),
    "pins in host memory": (
        _instead(HostEntry, "pinned", property(lambda kept: False)),
        "to_device reads a prefix that has been freed|KeyError",
    ),
    "the bound of device memory": (
        _instead(DevicePool, "reserve", _reserve_without_bound),
        "exceeds its device memory",
    ),
    "the bound of host memory": (
        _instead(HostTier, "_make_room", lambda *_: True),
        "exceeds its host memory",
    ),
    "host memory that is given back": (
        _instead(HostTier, "_drop", lambda host, key: host._kept.pop(key)),
        "counts wrongly",
    ),
    "the next one in line": (
        _instead(_RoutedRanking, "_failed", _fail_at_once),
        "does not answer|died|could have answered",
    ),
    "calls that wake": (
        _instead(Change, "call_all", lambda change: None),
        "sleeps",
    ),
    "answers for those without": (
        _instead(EngineState, "_run_inline", lambda *_: None),
        "never answered|not in list",
    ),
}
"""What is left out, and what a world says then."""
