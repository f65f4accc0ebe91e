"""Errors meant for people: one sentence that says what, which value, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable


class NestpipeError(Exception):
    """The root of every error that a user can cause; the command line prints it and exits."""

    exit_status = 2


class ConfigError(NestpipeError):
    """A config or hardware file, or an option, holds a value that cannot be used."""


class MissingSplitError(ConfigError):
    """The data has no samples set apart for what was asked."""


class PlanError(ConfigError):
    """A plan was asked for by a name or with a setting that does not exist."""


class ParseError(NestpipeError):
    """A schedule or trace file does not read as one."""


class ScheduleError(NestpipeError):
    """A schedule that the checker refuses: it could change the result of training or hang."""


class DataError(NestpipeError):
    """A data set cannot be read as asked, or holds more broken rows than allowed."""


class CapacityError(NestpipeError):
    """A table would outgrow the rows or the memory that it may have."""

    exit_status = 3


class ModelError(NestpipeError):
    """A model does not keep to its part: it fails, or returns what cannot be trained."""


class CheckpointError(NestpipeError):
    """A checkpoint cannot be written, or does not fit what is to be loaded."""


class MisfitError(CheckpointError):
    """A checkpoint is whole, and of other tables or optimizers: so are those before it."""


class UnjudgedError(CheckpointError):
    """A checkpoint that may be whole and cannot be judged here: of a later program, without
    permission, or with hashes that this environment lacks. Nothing may take its place."""


class RunError(NestpipeError):
    """A run failed: a peer died, a collective timed out, the loss is not a number."""

    exit_status = 3


def remedy(step: int) -> str:
    """What to do where a step came to NaN or inf: no rate has done anything before the first."""
    return (
        "lower the learning rates"
        if step > 1
        else "no row or weight had moved yet, so look at the data for huge numbers, or at the loss"
    )


class LossError(RunError):
    """The loss of a step is NaN or infinite."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"the loss of step {step} is {loss}; {remedy(step)}")
        self.step, self.loss = step, loss


class ShedError(NestpipeError):
    """The service has more to do than it can; the same request may be answered a little later."""

    exit_status = 3

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Speaker:
    """Which rank tells people of an error that several may have: one of them, whichever has it.

    What is wrong with an option is wrong on every rank. What is wrong with a file, or too large for
    a pool, may be so on one rank alone, which then must say it.
    """

    def __init__(self) -> None:
        self._claim: Callable[[str], bool] | None = None

    def command_begins(self) -> None:
        """No rank has joined yet: ranks of an earlier command in this process do not count."""
        self._claim = None

    def ranks_met(self, claim: Callable[[str], bool]) -> None:
        """From now on ranks ask each other; `claim` is true for the first to name a kind."""
        self._claim = claim

    def may_say(self, error: NestpipeError) -> bool:
        """Whether this process tells it; of a run that failed every rank tells its own part."""
        if isinstance(error, RunError):
            return True
        if self._claim is None:
            return os.environ.get("RANK", "0") == "0"
        return self._claim(type(error).__name__)


speaker = Speaker()
"""Of this process."""
