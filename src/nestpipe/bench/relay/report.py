"""What the arms showed: a record for each, and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nestpipe.bench.relay.answers import Compared, Kill
from nestpipe.loadtest.report import Report
from nestpipe.serve.types import Path

FRONTS = {"builtin": "the built-in router", "nginx": "nginx"}


@dataclass(frozen=True, slots=True)
class Reading:
    """One arm behind one front, all rounds together."""

    front: str
    told: Report
    scores: Compared
    kill: Kill | None = None
    faults: tuple[str, ...] = ()
    """What callers of lost requests were told, each once."""

    @property
    def lost(self) -> int:
        """Requests that got no scores."""
        return self.told.sheds + self.told.errors + self.told.unanswered

    @property
    def p99_ms(self) -> float:
        return self.told.latency.p99_ms if self.told.latency else float("inf")

    @property
    def hits(self) -> dict[str, int]:
        """Answers by path."""
        found = {path: self.told.paths.get(str(path)) for path in Path}
        return {str(path): one.count if one else 0 for path, one in found.items()}

    @property
    def reloads(self) -> int | None:
        """Prefixes from host memory, mostly for the signal; None: a killed instance forgets."""
        return None if self.kill else int(self.told.counted.get("reloads", 0))

    @property
    def signals(self) -> dict[str, int]:
        """Signals by what became of them; none where none were sent."""
        return {} if set(self.told.outcomes) == {"lost"} else dict(self.told.outcomes)

    def as_json(self) -> dict[str, Any]:
        told, latency = self.told, self.told.latency
        return {
            "front": self.front,
            "arm": told.name,
            "target_ms": told.target_ms,
            "requests": told.requests,
            "p50_ms": latency.p50_ms if latency else None,
            "p99_ms": latency.p99_ms if latency else None,
            "within_target": told.compliant / told.requests if told.requests else None,
            "keeps_target": told.keeps_target,
            "signals": self.signals,
            "hits": self.hits,
            "reloads": self.reloads,
            "cuts": told.cuts,
            "lost": self.lost,
            "faults": list(self.faults),
            "wrong": self.scores.wrong,
            "compared": self.scores.compared,
            "worst_deviation": self.scores.worst,
            "length_asked": told.asked.mean,
            "length_used": told.used.mean,
            "driver_late_p99_ms": told.late_p99_ms,
            "valid": told.valid,
            "killed": asdict(self.kill) if self.kill else None,
        }


def is_sound(readings: Sequence[Reading]) -> bool:
    """Whether no request was lost and no score wrong."""
    return not any(one.lost or one.scores.wrong for one in readings)


def conclusion(readings: Sequence[Reading], length: int) -> str:
    """One sentence: what relay did, what the kill did, whether scores were right."""
    fronts = list(dict.fromkeys(one.front for one in readings))
    parts = [_of_front(front, [one for one in readings if one.front == front]) for front in fronts]
    killed = [one for one in readings if one.kill]
    lost, asked = sum(one.lost for one in killed), sum(one.told.requests for one in killed)
    wrong = sum(one.scores.wrong for one in readings)
    compared = sum(one.scores.compared for one in readings)
    late = "" if all(one.told.valid for one in readings) else _late(readings)
    return (
        f"At {length:,} events and a P99 target of {readings[0].told.target_ms:g} ms, "
        f"{'; '.join(parts)}; with an instance killed under load {lost} of {asked} requests were "
        f"lost; {wrong} of {compared} answers had a wrong score{late}."
    )


def _of_front(front: str, readings: Sequence[Reading]) -> str:
    arms = {one.told.name: one for one in readings}
    inline, relays = arms["inline full"], [arms["relay"], arms["relay + host"]]
    kept = [one for one in relays if one.told.keeps_target]
    best = min(kept or relays, key=lambda one: one.p99_ms)
    where = f"behind {FRONTS[front]}"
    figures = f"P99 {best.p99_ms:.0f} ms, inline {inline.p99_ms:.0f} ms"
    if not kept:
        in_time = best.p99_ms <= best.told.target_ms
        spoilt = f", {best.told.spoilt:.1%} cut, shed or lost" if in_time else ""
        return f"{where} relay misses it ({figures}{spoilt})"
    names = " and ".join(one.told.name for one in kept)
    keep = "keeps" if len(kept) == 1 else "keep"
    also = ", and so does inline ranking" if inline.told.keeps_target else " where inline cannot"
    return f"{where} {names} {keep} it{also} ({figures})"


def _late(readings: Sequence[Reading]) -> str:
    worst = max(one.told.late_p99_ms for one in readings)
    return (
        f"; but the driver was up to {worst:.1f} ms late at P99, so this shows nothing: run it on "
        "an idle machine"
    )
