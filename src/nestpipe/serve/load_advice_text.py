"""The advice in plain sentences: what pays, what does not, and why."""

from __future__ import annotations

import math

from nestpipe.serve.advise import MOST_MISSES, WORTH, Advice, Question

BUSY = 0.7
"""Part of a device's time above which queues alone may break a P99."""


def sentences(advice: Advice, question: Question) -> list[str]:
    """What was found, whether relay pays, whether host memory pays, and with which settings."""
    told = [_log(advice), _reuse(advice), _relay(advice, question), _host(advice)]
    load = _load(advice, question)
    return [*told, *([load] if load else []), _settings(advice)]


def _log(advice: Advice) -> str:
    facts = advice.facts
    return (
        f"The log has {facts.requests:,} requests of {facts.users:,} users in "
        f"{_duration(facts.seconds)}; histories have {facts.length_p50:,.0f} events at the median, "
        f"{facts.length_p99:,.0f} at P99 and {facts.longest:,} at most, and "
        f"{facts.candidates_p50:,.0f} candidates are usual."
    )


def _reuse(advice: Advice) -> str:
    seen = ", ".join(f"{row.seen:.0%} within {_duration(row.ttl_s)}" for row in advice.memory[1:4])
    return f"Share of requests whose user had come before: {seen}."


def _relay(advice: Advice, question: Question) -> str:
    facts, settings = advice.facts, question.settings
    target = f"{settings.target_ms:g} ms"
    if facts.misses <= MOST_MISSES:
        return (
            f"Relay does not pay: inline rankings take {facts.inline_p99_ms:.1f} ms at P99 on an "
            f"idle device, and {facts.misses:.1%} of requests would miss the target of {target}, "
            "which its P99 allows."
        )
    begin = f"{facts.misses:.1%} of requests would miss the target of {target} if ranked inline"
    if facts.helped <= MOST_MISSES:
        late = facts.too_late >= facts.too_slow
        why = (
            f"their prefixes take longer than the window of {settings.window_ms:g} ms; a quicker "
            "device or an earlier signal would help"
            if late
            else "even with a prefix they would be too slow; fewer candidates or a quicker device "
            "would help"
        )
        return f"Relay does not pay: {begin}, but {why}."
    if not advice.relay:
        return (
            f"Relay does not pay: {begin}, but it moves work and saves none, and "
            f"{question.instances} instances would need {facts.relay_load:.0%} of their time; "
            f"{_instances(facts.relay_load, question)} instances could carry it."
        )
    rest = facts.misses - facts.helped
    left = f", {rest:.1%} stay out of reach" if rest > 0.0005 else ""
    return f"Relay pays: {begin}; with their prefixes ready {facts.helped:.1%} are within it{left}."


def _host(advice: Advice) -> str:
    row = advice.chosen
    found = f"{row.reused:.0%} of requests would find their prefix within {_duration(row.ttl_s)}"
    if advice.host:
        what = "" if advice.relay else " even without relay"
        return (
            f"Host memory pays{what}: {found}, which lets the device answer "
            f"{advice.host_gain:.2f} times the requests."
        )
    if advice.host_gain >= WORTH:
        return (
            f"Host memory would give {advice.host_gain:.2f} times the requests ({found}), but even "
            f"so {advice.facts.host_load:.0%} of the instances' time would be needed."
        )
    return (
        f"Host memory does not pay: {found}, and reloading instead of computing gives "
        f"{advice.host_gain:.2f} times the requests, less than {WORTH:g}."
    )


def _load(advice: Advice, question: Question) -> str | None:
    facts = advice.facts
    load = facts.relay_load if advice.relay else facts.inline_load
    load = facts.host_load if advice.host else load
    if load <= BUSY:
        return None
    return (
        f"The instances are {load:.0%} busy with that: above {BUSY:.0%} queues alone may break the "
        f"target, so plan for {_instances(load, question)} instances."
    )


def _instances(load: float, question: Question) -> int:
    return math.ceil(load * question.instances / BUSY)


def _settings(advice: Advice) -> str:
    words = ", ".join(f"{name} = {_value(name, x)}" for name, x in advice.settings.items())
    return f"Settings for each instance: {words}."


def _value(name: str, value: float) -> str:
    return str(bool(value)).lower() if name == "relay" else f"{value:g}"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
