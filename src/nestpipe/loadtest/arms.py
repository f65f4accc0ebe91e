"""The arms of a comparison: what each does without, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from nestpipe.config import build
from nestpipe.errors import ConfigError
from nestpipe.serve.settings import ServeSettings


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
