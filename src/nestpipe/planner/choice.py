"""A choice of settings with its reason, and how sure its gain is."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nestpipe.planner.candidates import (
    FINAL_BATCHES,
    Candidate,
    Predictor,
    Search,
    Told,
    quantiles,
)
from nestpipe.schedule import plan
from nestpipe.sim import Figures

DRAWS = 16
"""How often costs are drawn anew to see how sure a gain is."""
SHOWN = 5
"""Candidates that are told, besides the plainest."""
HIDDEN_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Predicted:
    """One candidate, its step, and its gain over the fastest `serial` with a range."""

    candidate: Candidate
    figures: Figures
    gain: float
    low: float
    high: float
    """Four of five draws of the measured costs have a gain between these."""
    measured_ms: float | None = None
    """The median step of a short run, where `--check` ran it."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "settings": self.candidate.sections(),
            "step_ms": self.figures.step_ms,
            "gain": self.gain,
            "gain_range": [self.low, self.high],
            "busiest_lane": self.figures.busiest_lane,
            "pipeline_efficiency": self.figures.pipeline_efficiency,
            "exposed_ms": dict(self.figures.exposed_ms),
            "measured_ms": self.measured_ms,
        }


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What was chosen, beside the best of the others."""

    rows: tuple[Predicted, ...]
    """The best candidates, the chosen one first."""
    serial: Predicted
    """The fastest `serial`, which gains are over."""
    today: Predicted
    """The job as its config has it now."""
    looked_at: int
    """Candidates that were replayed."""

    @property
    def chosen(self) -> Predicted:
        return self.rows[0]

    def reason(self) -> str:
        """Why it is the one, as sentences."""
        best, run = self.chosen, self.chosen.figures
        hidden = _hidden(self.serial.figures, run)
        parts = [
            f"{best.candidate}: {best.gain:.2f}x over the fastest serial (4 of 5 draws: "
            f"{best.low:.2f}x to {best.high:.2f}x).",
            f"Its busiest lane is {run.busiest_lane}, {run.busy_ms[run.busiest_lane]:.1f} of "
            f"{run.step_ms:.1f} ms.",
        ]
        today = self.today.figures.step_ms / run.step_ms
        if best.candidate != self.today.candidate:
            parts.append(f"Over the config as it is ({self.today.candidate}): {today:.2f}x.")
        if best.measured_ms is not None and self.today.measured_ms is not None:
            ratio = self.today.measured_ms / best.measured_ms
            parts.append(f"Measured over the config as it is: {ratio:.2f}x.")
        if not plan(best.candidate.plan).shape.overlaps:
            parts.append("Nothing is hidden: no other plan is predicted to be faster.")
        elif hidden:
            told = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in hidden)
            parts.append(f"It hides {told} that serial waits for.")
        left = sorted(run.exposed_ms.items(), key=lambda item: -item[1])[:2]
        still = [f"{kind} {ms:.1f} ms" for kind, ms in left if ms >= 0.02 * run.step_ms]
        parts += [f"Still exposed: {', '.join(still)}."] if still else []
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "chosen": self.chosen.as_json(),
            "reason": self.reason(),
            "serial": self.serial.as_json(),
            "today": self.today.as_json(),
            "others": [row.as_json() for row in self.rows[1:]],
            "looked_at": self.looked_at,
        }


def _hidden(serial: Figures, run: Figures) -> list[tuple[str, float]]:
    """Kinds that serial waits longer for, most of all first."""
    less = {k: ms - run.exposed_ms.get(k, 0.0) for k, ms in serial.exposed_ms.items()}
    ranked = sorted(less.items(), key=lambda item: -item[1])[:HIDDEN_SHOWN]
    return [(kind, ms) for kind, ms in ranked if ms >= 0.02 * serial.step_ms]


def choose(
    predictor: Predictor,
    start: Candidate,
    *,
    shown: int = SHOWN,
    draws: int = DRAWS,
    tell: Told = lambda _: None,
) -> PlanChoice:
    """Search for the fastest settings, and see how sure the gain of the best few is."""
    search = Search(predictor, tell)
    ranked = search.run(start)
    serial = search.plainest

    def final(candidate: Candidate, seed: int | None = None) -> Figures:
        tell(candidate)
        return predictor.figures(candidate, batches=FINAL_BATCHES, seed=seed)

    base = final(serial)
    base_draws = [final(serial, seed).step_ms for seed in range(1, draws + 1)]

    def judged(candidate: Candidate) -> Predicted:
        run = final(candidate)
        steps = [final(candidate, seed).step_ms for seed in range(1, draws + 1)]
        gains = [b / s for b, s in zip(base_draws, steps, strict=True)]
        return Predicted(candidate, run, base.step_ms / run.step_ms, *quantiles(gains))

    rows = {candidate: judged(candidate) for candidate in ranked[:shown]}
    of_serial = Predicted(serial, base, 1.0, 1.0, 1.0)
    today = of_serial if start == serial else rows.get(start) or judged(start)
    return PlanChoice(tuple(rows.values()), of_serial, today, len(search.found))


def checked(choice: PlanChoice, measured: Mapping[Candidate, float]) -> PlanChoice:
    """The same choice after short runs: the fastest of those that ran comes first."""

    def read(row: Predicted) -> Predicted:
        return replace(row, measured_ms=measured.get(row.candidate))

    serial, today = read(choice.serial), read(choice.today)
    rows = {row.candidate: row for row in (*map(read, choice.rows), today, serial)}.values()
    ran = [row for row in rows if row.measured_ms is not None]
    others = [row for row in map(read, choice.rows) if row.measured_ms is None]
    fastest = sorted(ran, key=lambda row: row.measured_ms or 0.0)
    return PlanChoice((*fastest, *others), serial, today, choice.looked_at)


def config_text(given: str, candidate: Candidate, note: str, settings: Sequence[str] = ()) -> str:
    """A config with the candidate's settings in it; comments of the given one stay.

    `settings` are overrides in the form `section.key=value`, which come before the choice.
    """
    import tomlkit

    document: Any = tomlkit.parse(given)
    for setting in settings:
        key, _, value = setting.partition("=")
        *sections, name = (part.strip() for part in key.split("."))
        _table_in(document, sections)[name] = _toml_value(value)
    for section, values in candidate.sections().items():
        table = _table_in(document, [section])
        for name, value in values.items():
            table[name] = value
    return f"# {note}\n\n{tomlkit.dumps(document).lstrip()}"


def _table_in(document: Any, sections: Sequence[str]) -> Any:
    import tomlkit

    for section in sections:
        if section not in document:
            document[section] = tomlkit.table()
        document = document[section]
    return document


def _toml_value(text: str) -> Any:
    """What a setting on the command line means: a value of TOML, or else a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
